"""Other processes for tests: forked ones that answer, and ones that are killed."""

import contextlib
import os
import pickle
import signal
import sys
import traceback


class Child:
    """A forked process that runs `work(self)` and may talk with its parent, both ways.

    Args:
        work: runs in the child; what it returns is what `result` returns here.
    """

    def __init__(self, work):
        to_parent, to_child = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            self._reader, self._writer = to_parent[0], to_child[1]
            os.close(to_parent[1])
            os.close(to_child[0])
            return
        self._reader, self._writer = to_child[0], to_parent[1]
        os.close(to_parent[0])
        os.close(to_child[1])
        try:
            self.say(("returned", work(self)))
        except BaseException:
            with contextlib.suppress(OSError):
                self.say(("raised", traceback.format_exc()))
        finally:
            os._exit(0)

    def say(self, what):
        """Send a value to the other side."""
        data = pickle.dumps(what)
        os.write(self._writer, len(data).to_bytes(8, "little"))
        while data:
            data = data[os.write(self._writer, data) :]

    def hear(self):
        """Wait for a value from the other side."""
        size = int.from_bytes(self._read(8), "little")
        return pickle.loads(self._read(size))

    def _read(self, size):
        data = b""
        while len(data) < size:
            part = os.read(self._reader, size - len(data))
            if not part:
                raise EOFError("the other side is gone")
            data += part
        return data

    def result(self):
        """Wait for the end; return what `work` returned."""
        try:
            how, what = self.hear()
            assert how == "returned", what
        finally:
            self.reap()
        return what

    def kill(self):
        """Send SIGKILL and wait until the process is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        for fd in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(fd)


def in_child(work, *args):
    """Run `work(*args)` in a forked process and return what it returned."""
    return Child(lambda _: work(*args)).result()


def error_of(work, *args):
    """Return the class name and the words of what `work` raises; None when it raises nothing."""
    try:
        work(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None
