"""Kills before a real system call: strace, attached to a victim that waits for it."""

import collections
import ctypes
import os
import re
import shutil
import subprocess

CALLS = "pwrite64,fdatasync,fsync,rename,unlink,unlinkat,rmdir,mkdir,ftruncate,fallocate,openat,flock"
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, -1


class Cannot(Exception):
    """This machine does not let a process be traced."""


class Tracer:
    """A blow from outside: the victim is killed before its `at`-th `call`, or its calls are listed in `out`."""

    def __init__(self, out, call=None, at=0):
        self.out = out
        self.places = []
        self.at = at
        trace = call or CALLS
        inject = ["-e", f"inject={call}:signal=KILL:when={at}"] if call else []
        self.words = ["-f", "-o", out, "-e", f"trace={trace}", *inject]
        self.ready, self.say_ready = os.pipe()
        self.go, self.say_go = os.pipe()
        self.waited = False

    def arm(self):
        """Wait, in the victim, until it is traced; once, before the first call of the script."""
        if not self.waited:
            self.waited = True
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
            os.write(self.say_ready, b"!")
            os.read(self.go, 1)

    def disarm(self):
        pass

    def attach(self, pid):
        os.read(self.ready, 1)
        with subprocess.Popen(
            [shutil.which("strace"), *self.words, "-p", str(pid)],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        ) as tracer:
            said = tracer.stderr.readline()  # "Process N attached": from here on nothing escapes it
            os.write(self.say_go, b"!")
            tracer.stderr.read()
        for fd in (self.ready, self.say_ready, self.go, self.say_go):
            os.close(fd)
        if "attached" not in said:
            raise Cannot(said.strip())

    def counts(self):
        """Return how often each call was made."""
        with open(self.out) as lines:
            names = [found[1] for line in lines if (found := re.match(r"(?:\d+ +)?(\w+)\(", line))]
        return dict(collections.Counter(names))
