"""Forked processes that say what they do, and may be killed."""

import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field


@dataclass
class Death:
    """How a child ended: killed, or with an error; and all that it said."""

    killed: bool
    said: list = field(default_factory=list)
    error: str = ""


def run(body, before_wait=lambda pid: None):
    """Fork, run `body(say)` in the child, and return how it ended. `before_wait(pid)` may kill it from outside."""
    ear, mouth = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:

        def say(**what):
            line = json.dumps(what).encode() + b"\n"
            while line:
                line = line[os.write(mouth, line) :]

        try:
            os.close(ear)
            try:
                body(say)
            except BaseException:
                sys.settrace(None)
                say(error=traceback.format_exc(limit=-12))
        finally:
            os._exit(0)
    os.close(mouth)
    before_wait(pid)
    with open(ear, "rb") as told:
        said = [json.loads(line) for line in told.read().splitlines(keepends=True) if line.endswith(b"\n")]
    status = os.waitpid(pid, 0)[1]
    killed = os.WIFSIGNALED(status)
    errors = [one["error"] for one in said if "error" in one]
    if killed and os.WTERMSIG(status) != signal.SIGKILL:
        errors.append(f"died of signal {os.WTERMSIG(status)}")
    return Death(killed, said, "".join(errors))
