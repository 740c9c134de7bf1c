"""Forked processes that say what they do, and may be killed; and one without threads, to fork them from.

with Runner("tests.faults.concurrency.handlers") as runner:
    reports = runner.run(folder, calls="write", acts="close")
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass, field

from ringmap import ReplayBuffer
from tests import ROOT
from tests.faults.crash.kill.blows import PACKAGE


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


class Runner:
    """A process that runs the jobs of a module, which calls `serve`, each in a fork of itself.

    A test process with torch in it forks slowly, and has threads.
    """

    def __init__(self, module):
        self.module = module

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # its threads make a fork slow
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        # Not at the end of its input: a process that a test forked and left alive holds that open.
        try:
            self.process.communicate("\n", timeout=60)
        finally:
            self.process.kill()

    def run(self, root, **job):
        """Run a job and return what it did."""
        file = os.path.join(root, "reports")
        self.process.stdin.write(json.dumps({"file": file, "job": {"root": str(root), **job}}) + "\n")
        self.process.stdin.flush()
        code = self.process.stdout.readline().strip()
        assert code, "the process that runs jobs has ended"
        with open(file) as said:
            assert code == "0", said.read()
            return json.load(said)


def serve(run_job):
    """Run each job that comes in a fork of this process, and write what it returns into a file."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "ringmap."):  # now, not one by one in each fork
        if module.name.split(".")[1] in ("storage", "clips", "buffers"):
            importlib.import_module(module.name)
    for name in ("numcodecs", "multiprocessing.synchronize"):
        importlib.import_module(name)
    with contextlib.closing(ReplayBuffer(4, seed=0, storage="zarr")) as buffer:  # what a process does but once
        buffer.write_episode({"x": [1, 2]})
        buffer.sample(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in iter(lambda: sys.stdin.readline().strip(), ""):
        given = json.loads(line)
        if not (child := os.fork()):
            with open(given["file"], "w") as said:
                try:
                    done = run_job(**given["job"])
                except BaseException:
                    traceback.print_exc(file=said)
                    said.flush()
                    os._exit(1)
                json.dump(done, said)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
