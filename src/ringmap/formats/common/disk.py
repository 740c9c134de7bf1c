"""The calls that change the disk under a dataset, and its lock.

Every change goes through this module, as `disk.write(...)`, so that a test can replace it and
inject a fault, or a kill, before each change.
Not here: what is written where, and in which order (the sessions); the writes of h5py, lance, zarr, PyAV and
pillow themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from typing import Any

from ringmap.errors import LockedError
from ringmap.storage.disk.system import System

try:
    import fcntl
except ImportError:  # Windows: HDF5 locks nothing there either
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "BINARY",
    "append",
    "exchange",
    "lock",
    "make_folder",
    "read_into",
    "remove",
    "remove_folder",
    "replace",
    "replace_file",
    "reserve",
    "sync_all",
    "sync_file",
    "truncate",
    "unlock",
    "write",
    "write_file",
]

BINARY = getattr(os, "O_BINARY", 0)

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_system = System()

_FEW = 1 << 18
"""Copying this much into one write costs less than a second call."""

try:
    _libc: Any = ctypes.CDLL(None, use_errno=True)
except (OSError, TypeError):  # Windows
    _libc = None


# -- changes --------------------------------------------------------------------------------------


def write(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`, or raise OSError."""
    _system.pwrite(fd, view, offset)


def truncate(fd: int, size: int) -> None:
    """Truncate or extend a file."""
    os.ftruncate(fd, size)


def reserve(fd: int, offset: int, size: int) -> None:
    """Allocate blocks that may be holes, so that a full disk raises now and not when they are written."""
    _system.reserve(fd, offset, size)


def remove(path: str) -> None:
    """Remove a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def replace(source: str, target: str) -> None:
    """Rename a file over another one, atomically."""
    os.replace(source, target)


def append(fd: int, parts: list[Any], offset: int) -> None:
    """Write buffers one after the other at `offset`, or raise OSError."""
    views = [view for part in parts if len(view := memoryview(part).cast("B"))]
    if sum(map(len, views)) < _FEW:
        write(fd, memoryview(b"".join(views)), offset)
        return
    for view in views:
        write(fd, view, offset)
        offset += len(view)


def write_file(path: str, data: bytes) -> None:
    """Write a file that does not count yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(path, flags, 0o666)
    try:
        write(fd, memoryview(data), 0)
    finally:
        os.close(fd)


def replace_file(path: str, data: bytes) -> None:
    """Write a file with this content at `path`, atomically; it replaces an existing file."""
    beside = path + ".new"
    remove(beside)  # a link there would be followed
    with open(beside, "xb") as file:
        file.write(data)
    replace(beside, path)


def make_folder(path: str) -> None:
    """Create a folder, and its parents."""
    os.makedirs(path, exist_ok=True)


def remove_folder(path: str) -> bool:
    """Remove an empty folder; return whether it is gone."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def exchange(left: str, right: str) -> bool:
    """Exchange two paths atomically; return False if the system has no such call."""
    call = getattr(_libc, "renameat2", None)
    if call is None:
        return False
    here, flags = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(here, os.fsencode(left), here, os.fsencode(right), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), left)


def sync_file(path: str) -> None:
    """Sync a file and its name to the disk."""
    fd = os.open(path, os.O_RDONLY | BINARY)
    try:
        _system.sync(fd)
    finally:
        os.close(fd)
    _system.sync_folder(os.path.dirname(os.path.abspath(path)))


def sync_all(folder: str) -> None:
    """Sync the whole file system of a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        call = getattr(_libc, "syncfs", None)
        if call is None:
            os.sync()
        elif call(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), folder)
    finally:
        os.close(fd)


# -- reads ----------------------------------------------------------------------------------------


def read_into(fd: int, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset` on, with zeros beyond the end of the file."""
    done = _system.pread_into(fd, view, offset)
    view[done:] = bytes(len(view) - done)


# -- the lock -------------------------------------------------------------------------------------


def lock(fd: int, path: str, shared: bool = False, wait_s: float = 0.0) -> None:
    """Take the lock that HDF5 itself takes: shared for reading, exclusive for writing.

    `HDF5_USE_FILE_LOCKING=FALSE` and file systems without locks are handled as in HDF5.

    Raises:
        LockedError: another handle holds it, and did not give it back within so many seconds.
    """
    if fcntl is None or os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0"):
        return
    end = 0.0
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            end = end or time.monotonic() + wait_s
            if time.monotonic() >= end:
                raise LockedError(
                    f"{path}: open elsewhere, in this process or another; close that dataset or writer "
                    "(dataset.close()) and try again"
                ) from None
            time.sleep(0.001)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return


def unlock(fd: int, close: bool = True) -> None:
    """Release the lock of a file, even if a forked child still has a copy of `fd`, and close it."""
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        pass
    if close:
        os.close(fd)
