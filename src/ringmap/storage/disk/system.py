"""The operating system: the differences between systems, chosen at run time, and their errors in words.

Each service has a fallback that any system can run; `System(portable=True)` takes
every fallback at once, so that a test on Linux exercises them all.

| service | Linux | macOS | Windows | fallback |
| --- | --- | --- | --- | --- |
| write at an offset | pwrite | pwrite | - | seek and write under a lock |
| sync a file | fdatasync | F_FULLFSYNC | - | fsync |
| sync a folder | fsync | fsync | - | nothing: the file system journals names |
| reserve blocks | posix_fallocate | - | - | nothing: a full disk shows when it is written to |
| read into an array | preadv | preadv | - | read, then copy |
| map files side by side | MAP_FIXED | - | - | each is mapped by itself |
| share bytes between files | FICLONE | - | - | they are copied |
| copy between files | copy_file_range | - | - | read and write |
| ask for bytes ahead | posix_fadvise, MADV_RANDOM | - | - | nothing: pages come when they are touched |
| skip holes | SEEK_DATA | SEEK_DATA | - | they are read: zeros |
| reads of this thread | getrusage | - | - | none: nothing is asked for after a while |
| hold a folder, and open what is below it | dir_fd | dir_fd | - | paths, and a look ahead of each |
| open no link, and wait for nobody | O_NOFOLLOW, O_NONBLOCK | the same | - | lstat, open, compare |
| boot id | /proc | sysctl | - | none: each opening verifies what no sync covers |
| cores | affinity and the cgroup's quota | cpu_count | cpu_count | cpu_count |
| memory left | /proc, the cgroup's limit, RLIMIT_AS | - | - | no limit is known |
| network file system | /proc/self/mountinfo | - | - | taken for a local one |
| who holds a lock | /proc/locks | - | - | unknown |
| open files, and their limit | /proc, getrlimit | /dev, getrlimit | - | unknown: the error of an opening says it |
| end with the parent process | prctl | - | - | none: the caller watches it |

Not here: when any of these is called, and faults (files.py); what an error did to the caller's data (who calls).
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import platform
import re
import signal
import stat
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, EnvironmentFault, RingmapError
from ringmap.storage.disk.process import disk_reads

__all__ = [
    "Data",
    "NotAFileError",
    "Room",
    "System",
    "clear_error",
    "clear_errors",
    "clear_reads",
    "cores",
    "file_system",
    "kind_of",
    "memory_left",
    "remedy",
]

Array = np.ndarray[Any, np.dtype[Any]]
Data = bytes | bytearray | memoryview
"""Types that can be written."""

_NETWORK = re.compile("9p|afs|beegfs|ceph|cifs|(fuse.)?glusterfs|fuse.sshfs|gpfs|lustre|nfs4?|orangefs|smb3|smbfs")

_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV}
"""Errors of `posix_fallocate` on a file system without this service: then nothing is reserved."""

_LOOKS_AT_LOCKS = 8
"""The kernel gives its locks a page at a time, and counts from the first one again for each page: while other locks are
released, one may be missing (in 2 of 480 looks beside a process that takes and releases 40). What all miss, is free."""

_F_FULLFSYNC, _FICLONE, _PR_SET_PDEATHSIG, _MAP_FIXED = 51, 0x40049409, 1, 0x10
"""Numbers of the kernel that Python does not name."""

_CANNOT_SHARE = _CANNOT_RESERVE - {errno.ENODEV} | {errno.EXDEV, errno.ENOTTY, errno.EPERM, errno.ETXTBSY, errno.EBADF}
"""Errors of the kernel if these two files can't share bytes, or can't be copied by it: then we read and write."""

_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
"""x86 loads in the order of the program; ARM and POWER do not."""

_FADVISE = hasattr(os, "posix_fadvise")

_BELOW = {os.open, os.stat, os.mkdir, os.rmdir, os.unlink, os.rename} <= os.supports_dir_fd

_REFUSING = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""With these flags a link is not opened, and a pipe is opened without waiting, to be examined."""

_REFUSED = {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}
"""Errors of the kernel if the path is a link, a socket, or a folder that is opened for writing."""

_KINDS = {
    stat.S_IFREG: "",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class NotAFileError(CorruptError):
    """Something other than a regular file is at the path. `kind`: what, in words."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(
            f"{path}: is {kind}, expected a regular file: what leads elsewhere is not followed, and what "
            "another process may hold back is not read; put the file itself there"
        )
        self.path, self.kind = path, kind

    def __reduce__(self) -> tuple[type[NotAFileError], tuple[str, str]]:
        return type(self), (self.path, self.kind)


def kind_of(mode: int) -> str:
    """Return the kind of a file with this mode, in words; "" for a regular file."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


class System:
    """The services of this operating system; `portable`: the fallback of each."""

    def __init__(self, portable: bool = False) -> None:
        self.portable = portable
        self._direct = hasattr(os, "pwrite") and not portable
        self._seek = threading.Lock()  # needs no hook at forks: a system that forks has pread
        self._boot: bytes | None = None

    @property
    def loads_are_ordered(self) -> bool:
        """Whether this processor loads from memory in the order of the program; elsewhere a system call or a lock
        orders two loads."""
        return not self.portable and _ORDERED

    def hold_folder(self, path: str) -> int | None:
        """Return a descriptor of a folder, relative to which all else can be opened; None where the system can't."""
        if self.portable or not _BELOW:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            return None
        return os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)

    def names(self, path: str, dir_fd: int | None = None) -> list[str]:
        """Return the names in a folder, in any order."""
        if dir_fd is None:
            return os.listdir(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)
        try:  # a separate descriptor, since threads that share one share its place in the list
            return os.listdir(fd)
        finally:
            os.close(fd)

    def open_file(
        self, path: str, flags: int, *, dir_fd: int | None = None, name: str | None = None
    ) -> tuple[int, os.stat_result]:
        """Open an existing regular file; return its descriptor, and its status. `name`: its path in messages.

        NotAFileError: the path is a link, a pipe, a folder or a device. It is not opened completely: a link may lead
        anywhere, and opening a pipe waits for its other end, possibly for ever.
        """
        before = None
        if self.portable or not hasattr(os, "O_NOFOLLOW"):
            before = os.stat(path, follow_symlinks=False)
            if kind := kind_of(before.st_mode):
                raise NotAFileError(name or path, kind)
        else:
            flags |= _REFUSING
        try:
            fd = os.open(path, flags, dir_fd=dir_fd)
        except OSError as error:
            is_refused = error.errno in _REFUSED
            if is_refused and (kind := kind_of(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode)):
                raise NotAFileError(name or path, kind) from None
            raise
        try:
            found = os.fstat(fd)
            kind = kind_of(found.st_mode)
            if kind or (before is not None and not os.path.samestat(before, found)):
                raise NotAFileError(name or path, kind or "another file than a moment ago")
        except BaseException:
            os.close(fd)
            raise
        return fd, found

    def pwrite_each(self, fd: int, pieces: Sequence[Data], offsets: Sequence[int]) -> None:
        """Write all of each piece at its offset; see `pwrite`. A Python function per piece would cost a tenth of the
        write itself."""
        written = list(map(os.pwrite if self._direct else self._write_at, repeat(fd), pieces, offsets))
        if written != list(map(len, pieces)):
            for piece, offset, done in zip(pieces, offsets, written, strict=True):
                self.pwrite(fd, memoryview(piece)[done:], offset + done)

    def pwrite(self, fd: int, data: Data, offset: int) -> None:
        """Write all of `data` at `offset`, or raise OSError."""
        write = os.pwrite if self._direct else self._write_at
        done, size = write(fd, data, offset), data.nbytes if type(data) is memoryview else len(data)
        while done < size:  # a disk that fills writes less than asked, and says why at the next try
            done += write(fd, memoryview(data).cast("B")[done:], offset + done)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Read `size` bytes at `offset`, fewer at the end of the file."""
        read = os.pread if self._direct else self._read_at
        data = read(fd, size, offset)
        while 0 < len(data) < size and (more := read(fd, size - len(data), offset + len(data))):
            data += more
        return data

    def pread_into(self, fd: int, room: memoryview, offset: int) -> int:
        """Read at `offset` into `room` (bytes) and return how many were read, fewer at the end of the file."""
        if self.portable or not hasattr(os, "preadv"):
            data = self.pread(fd, len(room), offset)
            room[: len(data)] = data
            return len(data)
        done = os.preadv(fd, (room,), offset)
        while 0 < done < len(room) and (more := os.preadv(fd, (room[done:],), offset + done)):
            done += more
        return done

    def _write_at(self, fd: int, data: Data, offset: int) -> int:
        with self._seek:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data)

    def _read_at(self, fd: int, size: int, offset: int) -> bytes:
        with self._seek:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, size)

    def share(self, source: int, fd: int) -> bool:
        """Let an empty file share all bytes of another (a reflink); False where the file system can't."""
        if self.portable or not sys.platform.startswith("linux"):
            return False
        import fcntl

        try:
            fcntl.ioctl(fd, _FICLONE, source)
        except OSError as error:
            if error.errno not in _CANNOT_SHARE:
                raise
            return False
        return True

    def copy_range(self, source: int, fd: int, offset: int, nbytes: int) -> int:
        """Copy bytes to the same offset of another file, and return how many; 0 where the kernel can't, or at the
        end."""
        if self.portable or not hasattr(os, "copy_file_range"):
            return 0
        try:
            return os.copy_file_range(source, fd, nbytes, offset, offset)
        except OSError as error:
            if error.errno not in _CANNOT_SHARE:
                raise
            return 0

    def sync(self, fd: int) -> None:
        """Force a file's bytes to the disk."""
        if sys.platform == "darwin" and not self.portable:  # there fsync leaves them in the drive's own cache
            import fcntl

            fcntl.fcntl(fd, _F_FULLFSYNC)
        elif self.portable or not hasattr(os, "fdatasync"):
            os.fsync(fd)
        else:
            os.fdatasync(fd)

    def sync_folder(self, path: str, *, dir_fd: int | None = None) -> None:
        """Force a folder's names to the disk."""
        if self.portable or sys.platform == "win32":
            return
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0), dir_fd=dir_fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def reserve(self, fd: int, offset: int, nbytes: int) -> None:
        """Allocate the blocks of a byte range, so that a later write in it does not find a full disk."""
        if self.portable or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(fd, offset, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise

    def will_need(self, fd: int, offset: int, nbytes: int) -> None:
        """Let the system begin to read a byte range. Returns at once, more or less."""
        if _FADVISE and not self.portable and nbytes > 0:  # 0 would mean all that follows
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def room(self, nbytes: int) -> Room | None:
        """Return address space for files side by side; None where the system has none to give, and for no bytes.

        A process whose address space is limited gets none: it needs it for the maps of single files.
        """
        if self.portable or not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
            return None
        if resource is None or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return None
        try:
            return Room(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ))
        except (OSError, OverflowError, ValueError):
            return None

    def next_data(self, fd: int, offset: int) -> int:
        """Return the next offset that may hold data other than zeros; the file's size if there is none."""
        if self.portable or not hasattr(os, "SEEK_DATA"):
            return offset
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            return os.fstat(fd).st_size if error.errno == errno.ENXIO else offset

    def disk_reads(self) -> int:
        """Return a number that grows when this thread, or a helper of it, reads from the disk; always 0 if the system
        does not tell."""
        return 0 if self.portable else disk_reads()

    def boot_id(self) -> bytes | None:
        """Return 16 bytes that change at each boot, or None if the system has none."""
        if self._boot is None and not self.portable:
            self._boot = _read_boot_id() or b""
        return self._boot or None

    def is_network(self, path: str) -> bool:
        """Tell whether `path` is on a network file system."""
        return not self.portable and _NETWORK.fullmatch(file_system(path)) is not None

    def copies_up(self, path: str) -> bool:
        """Tell whether `path` is on overlayfs, where the first writer of a file in a lower layer writes a copy of it,
        under the same name and number, while those who hold the file go on with the old one.
        """
        return not self.portable and file_system(path) == "overlay"

    def is_locked(self, path: str) -> bool | None:
        """Tell whether a process holds an flock on a file, or None if the system does not tell. Takes no lock. One on a
        file with the same number on another file system counts as well: that system has other device numbers."""
        if self.portable:
            return None
        try:
            number = b":%d" % os.stat(path).st_ino
            for _ in range(_LOOKS_AT_LOCKS):
                pieces = _read_locks()
                words = [line.split() for line in b"".join(pieces).splitlines()]
                if any(len(w) > 5 and w[1] == b"FLOCK" and w[5].endswith(number) for w in words):
                    return True
                if len(pieces) < 2:
                    break
        except OSError:
            return None
        return False

    def descriptors(self) -> tuple[int, int, int] | None:
        """Return how many files this process has open, how many it may, and how many it could ask for; None if the
        system does not tell."""
        if self.portable or resource is None:
            return None
        for folder in ("/proc/self/fd", "/dev/fd"):
            with contextlib.suppress(OSError):
                used = len(os.listdir(folder))
                return used, *resource.getrlimit(resource.RLIMIT_NOFILE)
        return None

    def end_with(self, parent: int) -> bool:
        """Let the kernel kill this process once its parent is gone; return False if the system can't, or `parent` is
        not the parent, or not any more."""
        if self.portable or not sys.platform.startswith("linux"):
            return False
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        asked = libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0
        return asked and os.getppid() == parent  # it may have ended before that


class Room:
    """Address space in which files are mapped side by side, so that one array reaches over all of them.

        room    |file 0 ......|    |file 1 ...|       |file 2 ......|    |
                at = 0             at = 1 * stride    at = 2 * stride

    Only what `put` mapped changes; the rest reads as zeros; all maps live as long as the room, or an array over it.
    """

    def __init__(self, space: mmap.mmap) -> None:
        self._space = space
        self.bytes: Array = np.frombuffer(space, np.uint8)
        """All of it, read-only."""

    def put(self, fd: int, at: int, offset: int, nbytes: int, random: bool) -> bool:
        """Map a byte range of a file, which may be closed afterwards, from byte `at` on; with `random`, touching it
        causes no readahead. Return False if the system refuses, as what does not begin at a page, and no bytes.
        """
        if at < 0 or nbytes > len(self.bytes) - at:
            raise ValueError(f"bytes [{at}, {at + nbytes}) lie outside a room of {len(self.bytes)}")
        if not _map_at(fd, int(self.bytes.ctypes.data) + at, offset, nbytes):
            _broken.append(self._space)
            return False
        if random and hasattr(mmap, "MADV_RANDOM"):
            with contextlib.suppress(OSError):
                self._space.madvise(mmap.MADV_RANDOM, at, nbytes)
        return True


_broken: list[mmap.mmap] = []
"""Rooms in which a map failed: the kernel may have unmapped the place before, and given it to another thread, whose
memory would go with the room. So they are never given back; they take no memory."""


def _map_at(fd: int, address: int, offset: int, nbytes: int) -> bool:
    """Map a byte range of a file, for reading, at an address: what was mapped there is gone."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return bool(libc.mmap(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) == address)


def _read_locks(path: str = "/proc/locks") -> list[bytes]:
    """Return the locks of the system, in the pieces in which the kernel gave them."""
    pieces = []
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            pieces.append(piece)
    return pieces


def cores(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int:
    """Return the number of cores that this process may use, at least 1: its affinity, and the quota of its cgroup and
    of each one above it."""
    try:
        count: float = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    for folder in _cgroups(proc, root):
        quota = _numbers(f"{folder}/cpu.max")
        if len(quota) == 2 and min(quota) > 0:
            count = min(count, quota[0] / quota[1])
    return max(1, math.ceil(count))


def _cgroups(proc: str, root: str) -> Iterator[str]:
    """Yield the folders of the cgroup (version 2) of this process, and of each one above it."""
    with contextlib.suppress(OSError), open(proc, encoding="utf-8") as file:
        for line in file:
            if line.startswith("0::"):
                folder = root
                yield folder
                for part in line[3:].strip().split("/"):
                    if part and part != "..":
                        folder = os.path.join(folder, part)
                        yield folder


def memory_left(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup", meminfo: str = "/proc/meminfo") -> float:
    """Return how many bytes this process may still take, as far as the machine, its cgroup and its limit tell; infinity
    if they don't."""
    least = 1024 * _named(meminfo, "MemAvailable:", math.inf)
    for folder in _cgroups(proc, root):
        limit, used = _numbers(f"{folder}/memory.max"), _numbers(f"{folder}/memory.current")
        if limit and used:  # files in memory are given back when it is needed
            least = min(least, max(0.0, limit[0] - used[0] + _named(f"{folder}/memory.stat", "inactive_file", 0.0)))
    if resource is not None:
        limited, _ = resource.getrlimit(resource.RLIMIT_AS)
        taken = _numbers("/proc/self/statm")
        if limited != resource.RLIM_INFINITY and taken:
            least = min(least, max(0.0, limited - taken[0] * mmap.PAGESIZE))
    return least


def _named(path: str, name: str, unknown: float) -> float:
    """Return the number after a name, in a file of such lines."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        for words in map(str.split, file):
            if words[:1] == [name]:
                return float(words[1])
    return unknown


def _numbers(path: str) -> list[float]:
    """Return the numbers in a small file; none if it does not exist, or contains "max"."""
    try:
        with open(path, encoding="utf-8") as file:
            return [float(word) for word in file.read(100).split()]
    except (OSError, ValueError):
        return []


def _read_boot_id() -> bytes | None:
    try:
        if sys.platform == "darwin":
            with os.popen("/usr/sbin/sysctl -n kern.bootsessionuuid") as pipe:
                text = pipe.read()
        else:
            with open("/proc/sys/kernel/random/boot_id") as file:
                text = file.read()
        return uuid.UUID(text.strip()).bytes
    except (OSError, ValueError):
        return None


def file_system(path: str) -> str:
    """Return the type of the file system that holds `path`; "" if the system does not tell."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            mounts = [line.split(b" ") for line in file.read().split(b"\n") if line]
        device = os.stat(path).st_dev
    except OSError:
        return ""
    number = b"%d:%d" % (os.major(device), os.minor(device))
    return next((words[words.index(b"-") + 1].decode() for words in mounts if words[2] == number), "")


# -- errors of the system, in words --------------------------------------------------------------

_REMEDIES = {
    errno.EMFILE: "close files, or raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close files: the whole machine has too many open",
    errno.EROFS: "mount the file system for writing, or choose another path",
    errno.EACCES: "give this process the permission, or choose another path",
    errno.EPERM: "give this process the permission, or choose another path",
}


def remedy(error: OSError) -> str:
    """Return the remedy before the call is repeated.

    Example:
        >>> remedy(OSError(errno.ENOSPC, "No space left on device"))
        'free space or fix the disk'
    """
    return _REMEDIES.get(error.errno or 0, "free space or fix the disk")


def clear_error(error: OSError, where: str, folder: str, became: str = "", then: str = "") -> EnvironmentFault:
    """Return an error that says where an error of the operating system struck, its effect on the caller's data
    (`became`), and the remedy (`then`; "": that of the error, and another call). `folder` is named if it names no file.
    """
    said = [f"{where}: {error.strerror or error} ({error.filename or folder})", became]
    said.append(then or f"{remedy(error)}, then call it again")
    return EnvironmentFault(error.errno, "; ".join(filter(None, said)))


@contextlib.contextmanager
def clear_errors(
    where: str,
    folder: str,
    became: Callable[[], str] = str,
    then: str = "",
    passing: tuple[type[Exception], ...] = (RingmapError,),
) -> Iterator[None]:
    """Replace an error of the operating system by that of `clear_error`, but those `passing`. Where each microsecond
    counts, call that instead.

    Raises:
        EnvironmentFault: in place of an OSError that is not ours.
    """
    try:
        yield
    except passing:
        raise
    except OSError as error:
        raise clear_error(error, where, folder, became(), then) from error


def clear_reads(where: str, folder: str) -> contextlib.AbstractContextManager[None]:
    """Do the work of `clear_errors` for a call that only reads; a missing file has a separate error."""
    return clear_errors(where, folder, passing=(RingmapError, FileNotFoundError))
