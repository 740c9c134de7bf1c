"""Disks that go wrong, and a folder where a sync costs nothing."""

import contextlib
import errno
import os
import signal
import tempfile
from pathlib import Path

from ringmap.storage.disk import checksums
from ringmap.storage.disk.files import Disk
from ringmap.storage.inspect import check
from ringmap.storage.read.handle import Handle

RAM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def ram_folder():
    """Give a folder in RAM where there is one, for what does not depend on the disk, and remove it."""
    with tempfile.TemporaryDirectory(prefix="ringmap-test-", dir=RAM) as folder:
        yield Path(folder)


def undisturbed(set=setattr, peeks=5):
    """Keep readers from waiting for a writer, and `check` from starting threads: no other process writes here.

    Args:
        set: as `setattr`; `monkeypatch.setattr` undoes it.
        peeks: how often a slot is read that stays torn.
    """
    set(Handle, "retry_s", 0)
    set(checksums, "_PEEKS", peeks)
    set(check, "_PEEKS", 1)
    set(check, "mapped", lambda work, items, count, name: map(work, items))


def descriptor_of(file):
    """Return the descriptor of a file of the real disk, which the caller owns from now on."""
    fd, file.fd = file.fd, -1
    return fd


class Cut(BaseException):
    """The process dies here: from now on nothing it does reaches the disk."""


def kill():
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Through:
    """A class of buffers whose files go through `disk`: called, and opened, as the class itself."""

    def __init__(self, kind, disk):
        self.kind, self.disk = kind, disk

    def __call__(self, *args, **options):
        return self.kind(*args, disk=self.disk, **options)

    def open(self, *args, **options):
        return self.kind.open(*args, disk=self.disk, **options)


class FaultyDisk(Disk):
    """The real disk, where a change can be made to fail.

    `fail(at, error)` makes the `at`-th change from now raise `error`, or call it, before it happens; `sticky`,
    all changes from that one on; `only`, counting changes of that kind alone.
    """

    def __init__(self, system=None):
        super().__init__(system)
        self.lift()

    def fail(self, at, error, sticky=False, only=None):
        self._left, self._error, self._sticky, self._only = at, error, sticky, only

    def lift(self):
        self.fail(0, None)

    @property
    def struck(self):
        """Whether the planted error was raised."""
        return self._error is not None and self._left <= 0

    def before(self, change, path, *details):
        if self._error is None or self._only not in (None, change):
            return
        self._left -= 1
        if self._left == 0 or (self._left < 0 and self._sticky):
            if isinstance(self._error, Cut):
                self._sticky, self._only = True, None  # the dead change nothing
            if callable(self._error):
                self._error()
            raise self._error


class FullDisk(Disk):
    """The real disk, which has no room for changes of these kinds below `where` while it is `full`."""

    def __init__(self, *changes, where="", system=None):
        super().__init__(system)
        self.full, self._changes, self._where = False, changes, where

    def before(self, change, path, *details):
        if self.full and change in self._changes and self._where in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
