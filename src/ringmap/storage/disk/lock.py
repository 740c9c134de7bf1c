"""The writer's lock: one writer per directory, enforced by the kernel.

A thin layer over filelock's `FileLock` (flock, LockFileEx): the kernel releases it when the
process ends, however it ends. The lock file stays and names its holder, for the error
that the next handle gets.

Invariants: never a soft lock, which would survive a kill; a forked child holds nothing.
Not here: threads of one process (store.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from ringmap.errors import EnvironmentFault, LockedError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import NotAFileError, remedy

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = ["WriterLock", "describe", "holder_of"]

_NBYTES = 512

_NOT_OF_LOCKING = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Errors of making or opening the lock file that do not depend on whether the file system has locks."""


def holder_of(path: str) -> dict[str, Any]:
    """Return the last holder from the lock file: pid, host, since, or {} if the file has none."""
    try:
        return _holder_in(Disk().read_file(path, 4096))
    except (OSError, ValueError):  # NotAFileError is a ValueError
        return {}


def _holder_in(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data.rstrip(b"\0 \n") or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def describe(holder: dict[str, Any]) -> str:
    """Name a lock's holder for an error message."""
    if not holder:
        return "another handle"
    own = " (this process)" if holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname() else ""
    return f"process {holder.get('pid')}{own} on host {holder.get('host')} since {holder.get('since')}"


def _why_not(error: OSError) -> str:
    """Return why a lock file can't be locked, and the remedy."""
    said = error.strerror or str(error)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        what = (
            "the file system is read-only"
            if error.errno == errno.EROFS
            else f"this process may not write here ({said})"
        )
        return f"{what}; open the buffer with mode='r' to read it; to write, {remedy(error)}"
    if error.errno in _NOT_OF_LOCKING:
        return f"can't be locked ({said}); {remedy(error)}, then call it again"
    return f"this file system can't lock files ({said}); put the buffer on another one"


class WriterLock:
    """The lock of one directory: a file at `path`, made if it does not exist. `folder`: the directory, for messages."""

    def __init__(self, disk: Disk, path: str, folder: str) -> None:
        self.path = path
        self._disk = disk
        self._folder = folder
        self._lock: FileLock | None = None

    def acquire(self) -> None:
        """Take the lock without waiting; LockedError names who holds it. EnvironmentFault: it can't be taken."""
        from filelock import FileLock, Timeout  # here: a reader needs no lock

        if (kind := self._disk.kind(self.path)) and kind != "missing":
            raise NotAFileError(self.path, kind)
        # Set before it is taken, so that `release` releases it after any interrupt.
        lock = self._lock = FileLock(
            self.path, timeout=0, thread_local=False, fallback_to_soft=False, preserve_lock_file=True
        )
        try:
            self._disk.before("lock", self.path)
            lock.acquire()
        except Timeout:
            raise LockedError(
                f"{self._folder}: is being written by {describe(holder_of(self.path))}; open it with mode='r' "
                "to read, or close the other one"
            ) from None
        except OSError as error:
            raise EnvironmentFault(error.errno, f"{self.path}: {_why_not(error)}") from error
        try:
            self._sign()
        except BaseException:  # the caller has nothing yet that it could release
            self.release()
            raise

    def _sign(self) -> None:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        # For the error of the next handle only: a full disk may refuse it.
        refused = contextlib.suppress(OSError)
        with refused, contextlib.closing(self._disk.open(self.path, write=True)) as file:
            # Another file of the buffer may be here by mistake: its bytes must not be overwritten.
            found = file.read(_NBYTES + 1, 0)
            if len(found) <= _NBYTES and (_holder_in(found) or not found.strip(b"\0")):
                file.write(json.dumps(holder).encode().ljust(_NBYTES), 0)

    def release(self) -> None:
        """Release the lock; a lock that is not held is ignored."""
        if self._lock is not None:
            self._lock.release(force=True)
        self._lock = None

    def drop_in_child(self) -> None:
        """Forget the lock in a forked child, without unlocking it: the parent holds it.

        filelock closes the inherited descriptor itself, in its own hook; a test pins that.
        """
        self._lock = None
