"""The calls that change the disk under an HDF5 file, and its lock.

Every one goes through this module, as `disk.write(...)`, so that a test can replace it and
inject a fault, or a kill, before each of them.
Not here: what is written where, and in which order (journal.py, pages.py, session.py).
"""

from __future__ import annotations

import contextlib
import errno
import os

from ringmap.errors import LockedError
from ringmap.storage.system import System

try:
    import fcntl
except ImportError:  # Windows: HDF5 locks nothing there either
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "BINARY",
    "lock",
    "put_new",
    "read_into",
    "remove",
    "replace",
    "reserve",
    "sync",
    "truncate",
    "unlock",
    "write",
]

BINARY = getattr(os, "O_BINARY", 0)

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_system = System()


# -- changes --------------------------------------------------------------------------------------


def write(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`, or raise OSError."""
    done = 0
    while done < len(
        view
    ):  # a disk that fills writes less than asked, and says why at the next try
        done += _system.pwrite(fd, view[done:], offset + done)


def truncate(fd: int, size: int) -> None:
    """Cut or stretch a file."""
    os.ftruncate(fd, size)


def reserve(fd: int, offset: int, size: int) -> None:
    """Allocate blocks that may be holes, so that a full disk shows now and not when they are written."""
    _system.reserve(fd, offset, size)


def sync(fd: int, path: str) -> None:
    """Force a file and its name to the disk itself."""
    _system.sync(fd)
    _system.sync_folder(os.path.dirname(os.path.abspath(path)))


def remove(path: str) -> None:
    """Remove a file; one that is not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def replace(source: str, target: str) -> None:
    """Rename a file over another one, in one step."""
    os.replace(source, target)


def put_new(source: str, target: str) -> None:
    """Rename a file to a path where nothing may be.

    Raises:
        FileExistsError: something is there.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.rename(source, target)
    else:
        os.unlink(source)


# -- looks ----------------------------------------------------------------------------------------


def read_into(fd: int, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset` on, with zeros beyond the end of the file."""
    done = 0
    while done < len(view):
        part = _system.pread(fd, len(view) - done, offset + done)
        view[done : done + len(part)] = part
        done += len(part)
        if not part:
            view[done:] = bytes(len(view) - done)
            return


# -- the lock -------------------------------------------------------------------------------------


def lock(fd: int, path: str, shared: bool = False) -> None:
    """Take the lock that HDF5 itself takes: shared for reading, exclusive for writing.

    `HDF5_USE_FILE_LOCKING=FALSE` and file systems without locks are respected as HDF5 does.

    Raises:
        LockedError: another handle holds it.
    """
    if fcntl is None or os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0"):
        return
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(
            f"{path}: open elsewhere, in this process or another; close that dataset or writer "
            "(dataset.close()) and try again"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def unlock(fd: int) -> None:
    """Close a file, and free its lock even where a forked child still has a copy of `fd`."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
