"""The one door to the disk: every change to a file or folder goes through a `Disk`.

    Store, columns, table, state, segments ... -> Disk.<change> -> System -> the kernel

A handle on a buffer holds the buffer's folder open (`Disk.hold`): its calls below that path go
to the opened folder, wherever that was moved to, and never to another one at the same path.

A test subclasses `Disk` and overrides `before`, which runs before each change
with its name and path: there it raises ENOSPC, kills the process or records the
change. `MemoryDisk` (memory.py) keeps the same tree in RAM: a buffer without
a path runs the same code on it.

Invariants: a write is whole or raises; nothing is ever written through a map;
a disk that holds a folder changes nothing in another folder that has replaced it. The table, the
states, plain columns and `mutable.bin` keep their size and inode for life, but for a repair; segments and
`successors.bin` only grow; a file of rows that wait grows, until their commit empties it; `priorities.bin` is written
in place; the manifest, a chunk and `marks.json` are replaced whole.
Not here: what is written where, and in which order (commit.py, files.py of commit/, create.py).
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, cast

import numpy as np

from ringmap.errors import ClosedError, EnvironmentFault, ReplacedError
from ringmap.storage.disk.system import Data, Room, System, kind_of, remedy

__all__ = ["BriefFile", "Disk", "File", "closed"]

Array = np.ndarray[Any, np.dtype[Any]]


class File:
    """An open file of a disk. Any thread may read; only the one writer writes.

    Its descriptor lives as long as the last reference to it. A file that threads share is released by `closed`, never
    by `close`: a running read holds a reference, so the number can't become another file's during the read.
    """

    __slots__ = ("disk", "fd", "path")

    def __init__(self, disk: Disk, fd: int, path: str) -> None:
        self.disk = disk
        self.fd = fd
        self.path = path

    def write(self, data: Data, offset: int) -> None:
        """Write all of `data` at `offset`, or raise OSError."""
        disk = self.disk
        disk.before("write", self.path, offset, data)
        disk.system.pwrite(self.fd, data, offset)

    def write_each(self, pieces: Sequence[Data], offsets: Sequence[int]) -> None:
        """Write all of each piece at its offset, one after the other, or raise OSError."""
        if type(self.disk).before is Disk.before:
            self.disk.system.pwrite_each(self.fd, pieces, offsets)
        else:  # each write is announced
            for piece, offset in zip(pieces, offsets, strict=True):
                self.write(piece, offset)

    def read(self, size: int, offset: int) -> bytes:
        """Read up to `size` bytes at `offset`; fewer at the end of the file."""
        return self.disk.system.pread(self.fd, size, offset)

    def read_into(self, room: memoryview, offset: int) -> int:
        """Read at `offset` into a buffer of bytes, and return how many were read."""
        return self.disk.system.pread_into(self.fd, room, offset)

    def copy_from(self, source: File, offset: int, nbytes: int) -> int:
        """Copy a byte range of another file to the same place; return how many, fewer at the end of that file."""
        at, stop, room = offset, offset + nbytes, memoryview(b"")
        while at < stop:
            count, done = min(_COPIED_AT_ONCE, stop - at), 0
            if min(source.fd, self.fd) >= 0:
                self.disk.before("copy", self.path, at, count)
                done = self.disk.system.copy_range(source.fd, self.fd, at, count)
            if not done:
                room = room or memoryview(bytearray(_READ_AT_ONCE))  # one that stays in the processor's cache
                done = source.read_into(room[:count], at)
                if not done:
                    break
                self.write(room[:done], at)
            at += done
        return at - offset

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate the blocks of a byte range, or raise OSError."""
        self.disk.before("reserve", self.path, offset, nbytes)
        self.disk.system.reserve(self.fd, offset, nbytes)

    def empty(self) -> None:
        """Make the file one of no bytes. No map of it may exist."""
        self.disk.before("empty", self.path)
        os.ftruncate(self.fd, 0)

    def sync(self) -> None:
        """Return once all written data are durable on the disk."""
        self.disk.before("sync", self.path)
        self.disk.system.sync(self.fd)

    def map(self, random: bool = False) -> Array:
        """Return the whole file as a read-only uint8 array that shows later writes. With `random`, touching it causes
        no readahead: `will_need` asks for data."""
        size = self.size()
        if size == 0:
            return np.empty(0, np.uint8)
        # Python's own map holds a second descriptor for as long as it lives.
        room = self.disk.system.room(size)
        if room is not None and room.put(self.fd, 0, 0, size, random):
            return room.bytes[:size]
        try:
            mapped = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        except (OSError, OverflowError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.ENOMEM
            is_memory = number == errno.ENOMEM
            needs = "raise the limit of address space (ulimit -v)" if is_memory else remedy(OSError(number, ""))
            raise EnvironmentFault(
                number,
                f"{self.path}: {self.size():,} bytes can't be mapped ({error}); {needs}, or open the buffer with "
                "reads='pread'",
            ) from error
        return np.frombuffer(mapped, np.uint8)

    def map_into(self, room: Room, at: int, offset: int, nbytes: int, random: bool = False) -> bool:
        """Map a byte range, read-only, into a room, from its byte `at` on; return False if this file can't be, or is
        shorter."""
        return self.size() >= offset + nbytes and room.put(self.fd, at, offset, nbytes, random)

    def writable(self, offset: int, nbytes: int) -> Array | None:
        """Return a byte range to write to, as a uint8 array, of a file in memory whose size is fixed; None for others:
        on a full disk a write to a hole would kill the process."""
        return None

    def will_need(self, offset: int, nbytes: int) -> None:
        """Ask for a byte range that will be read soon. A hint."""
        self.disk.system.will_need(self.fd, offset, nbytes)

    def next_data(self, offset: int) -> int:
        """Return the next offset that may hold data other than zeros; the size if there is none."""
        return self.disk.system.next_data(self.fd, offset)

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self.fd).st_size

    def held(self) -> File:
        """Return the file for several calls: with one descriptor, which lasts as long as the returned file."""
        return self

    def close(self) -> None:
        """Close the descriptor. Maps stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the descriptor when the last reference is dropped.

        Uses nothing global: at the end of the interpreter the names of this module may no longer exist.
        """
        try:
            if self.fd >= 0:
                close(self.fd)
        except (AttributeError, OSError):  # half made; closed by other code
            pass


class BriefFile:
    """A file of a held folder that is only read, mostly through a map, and opened anew for each call (5 us): it holds
    no descriptor. What it opens is the file that was there when it was made."""

    __slots__ = ("disk", "path", "status")

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk, self.path = disk, path
        self.status: os.stat_result | None = None
        file = self.held()
        self.status = os.fstat(file.fd)

    def held(self) -> File:
        """Return the file, open until the last reference is dropped; ReplacedError if another one is there now."""
        try:
            file = self.disk.open(self.path)
        except FileNotFoundError:
            raise ReplacedError(
                f"{self.path}: was removed since the buffer was opened; open the buffer where it is now"
            ) from None
        if self.status is not None and not os.path.samestat(self.status, os.fstat(file.fd)):
            raise ReplacedError(f"{self.path}: is another file than when the buffer was opened; open the buffer again")
        return file

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held(), name)


class ClosedFile:
    """Replaces a released file: every call raises ClosedError."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattr__(self, name: str) -> NoReturn:
        raise ClosedError(f"{self.path}: the buffer was closed meanwhile; open it again")


def closed(path: str) -> File:
    """Return a replacement for a file that other threads may be reading; see `File`."""
    return cast(File, ClosedFile(path))


_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

_BINARY = getattr(os, "O_BINARY", 0)

_COPIED_AT_ONCE = 64 << 20
_READ_AT_ONCE = 1 << 18


class _Folder:
    """A folder held open. Meanwhile no other folder can get its inode number.

    Its descriptor is closed when the last reference is dropped: another thread may be in the middle of a call.
    """

    __slots__ = ("fd", "inside", "path", "status")

    def __init__(self, system: System, path: str) -> None:
        self.path, self.inside = path, os.path.join(path, "")
        self.fd = system.hold_folder(path)
        self.status = os.stat(path) if self.fd is None else os.fstat(self.fd)

    def check(self, where: str) -> None:
        """Raise ReplacedError unless the folder is still at its path. One system call."""
        try:
            if os.path.samestat(os.stat(self.path), self.status):
                return
            fate = "was replaced by another one"
        except (FileNotFoundError, NotADirectoryError):
            fate = "was removed or renamed"
            if self.fd is not None:
                fate = "was renamed" if os.fstat(self.fd).st_nlink else "was removed"
        raise ReplacedError(
            f"{where}: the directory {self.path} {fate} since it was opened; this handle reads and writes nothing "
            "there any more: close it, and open the buffer where it is now"
        )

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        fd = getattr(self, "fd", None)
        if fd is not None:
            close(fd)


_NOWHERE = object.__new__(_Folder)
_NOWHERE.fd = None


class Disk:
    """The real disk."""

    __slots__ = ("__dict__", "__weakref__", "_held", "_is_let_go")
    """The last two are separate for each handle."""

    volatile = False
    """Whether all data end with the process: then there is nothing to lock, and no other process to tell."""

    def __init__(self, system: System | None = None) -> None:
        self.system = system or System()
        self._held: _Folder | None = None
        self._is_let_go = False

    # -- the folder that a handle holds --------------------------------------------------------

    def hold(self, folder: str) -> Self:
        """Return this disk, except that paths below `folder` lead into the folder that is there now.

        Raises:
            FileNotFoundError, NotADirectoryError: there is no such folder.
        """
        held = object.__new__(type(self))
        held.__dict__ = self.__dict__  # shared: a fault that a test injects in one shows in the other
        held._held, held._is_let_go = _Folder(self.system, folder), False
        return held

    def let_go(self) -> None:
        """Release the held folder once no call needs it; this disk is then no longer usable."""
        self._held, self._is_let_go = None, True

    def check_held(self, where: str) -> None:
        """Raise ReplacedError if the held folder was removed, renamed or replaced. One system call, 1 to 3 us."""
        held = self._held
        if held is not None:
            held.check(where)

    def _at(self, path: str) -> tuple[str, _Folder]:
        """Resolve a path: a path relative to a held folder, and that; or the path itself, and one that is nowhere. Who
        uses its descriptor keeps the folder, so that the number stays its own."""
        held = self._held
        if held is None:
            if self._is_let_go:
                raise ClosedError(f"{path}: the buffer is closed; open it again")
            return path, _NOWHERE
        if path.startswith(held.inside):
            inner = path[len(held.inside) :]
        elif path == held.path:
            inner = os.curdir
        else:
            return path, _NOWHERE
        if held.fd is None:  # this system opens nothing below a descriptor: check before each use
            held.check(path)
            return path, held
        return inner, held

    def _do(self, work: Callable[..., Any], path: str, *args: Any, **options: Any) -> Any:
        """Call a function of the operating system on a path. Raises ReplacedError if nothing is there because the held
        folder is no longer at its path."""
        at, held = self._at(path)
        try:
            return work(at, *args, dir_fd=held.fd, **options)
        except OSError as error:
            error.filename = path
            if isinstance(error, FileNotFoundError):
                self.check_held(path)
            raise

    def _stat(self, path: str) -> os.stat_result:
        """Return the status of a path, without following a link."""
        at, held = self._at(path)
        return os.stat(at, dir_fd=held.fd, follow_symlinks=False)

    def before(self, change: str, path: str, *details: Any) -> None:
        """Run before each change; a test overrides it to inject a fault."""

    # -- changes -----------------------------------------------------------------------------

    def create(self, path: str, size: int = 0) -> File:
        """Create a file of `size` zero bytes (sparse) and open it for writing; it must not exist."""
        self.before("create", path, size)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY
        file = File(self, self._do(os.open, path, flags, 0o666), path)
        if size:
            os.ftruncate(file.fd, size)
        return file

    def share(self, source: File, path: str) -> File | None:
        """Create a file that shares all bytes of another; return None, and create no file, if that is impossible."""
        if source.fd < 0:  # in memory
            return None
        with contextlib.closing(self.create(path)) as file:
            self.before("share", path)
            if self.system.share(source.fd, file.fd):
                return self.open(path, write=True)
        self.remove(path)
        return None

    def extend(self, path: str, size: int) -> None:
        """Restore the size of a truncated file (repair only: the new bytes are zero)."""
        self.before("extend", path, size)
        with contextlib.closing(self.open(path, write=True)) as file:
            os.ftruncate(file.fd, size)

    def make_folder(self, path: str) -> None:
        """Create a folder; its parent must exist."""
        self.before("mkdir", path)
        self._do(os.mkdir, path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder; an existing file at `target` is replaced in one step."""
        self.before("rename", source, target)
        (begin, held), (end, other) = self._at(source), self._at(target)
        try:
            os.replace(begin, end, src_dir_fd=held.fd, dst_dir_fd=other.fd)
        except OSError as error:
            error.filename, error.filename2 = source, target
            if isinstance(error, FileNotFoundError):
                self.check_held(target)
            raise

    def remove(self, path: str) -> None:
        """Remove a file."""
        self.before("unlink", path)
        self._do(os.unlink, path)

    def discard(self, path: str) -> None:
        """Remove what is at a path, a folder with all its content; a missing path is ignored.

        A link to a folder is removed itself, never its target.
        """
        mode = self._mode(path)
        if stat.S_ISDIR(mode):
            for name in self.names(path):
                self.discard(os.path.join(path, name))
            self.before("rmdir", path)
            self._do(os.rmdir, path)
        elif mode:
            self.remove(path)

    def sync_folder(self, path: str) -> None:
        """Return once the names in a folder are durable on the disk."""
        self.before("sync_folder", path)
        self._do(self.system.sync_folder, path)

    def replace_file(self, path: str, data: bytes) -> None:
        """Put `data` at `path` in one durable step: written beside it, synced, renamed, folder synced."""
        self.put(path, path + ".tmp", data, synced=True)
        self.sync_folder(os.path.dirname(path))

    def put(self, path: str, beside: str, data: bytes, synced: bool) -> None:
        """Put `data` at `path`, whole or not at all: written at `beside`, then renamed. `synced`: from now on the disk
        holds a whole file at `path`, the old or the new; a sync of the folder decides which one."""
        self.discard(beside)
        with contextlib.closing(self.create(beside)) as file:
            file.write(data, 0)
            if synced:
                file.sync()
        self.rename(beside, path)

    def boot_id(self) -> bytes | None:
        """Return an id that changes when the page cache is lost, or None if the system has none."""
        return self.system.boot_id()

    # -- queries -----------------------------------------------------------------------------

    def open(self, path: str, write: bool = False) -> File:
        """Open a regular file that exists.

        Raises:
            NotAFileError: the path is not a regular file. It is not opened.
        """
        flags = (os.O_RDWR if write else os.O_RDONLY) | _BINARY
        return File(self, self._do(self.system.open_file, path, flags, name=path)[0], path)

    def open_briefly(self, path: str) -> File:
        """Open a regular file to read it through a map: without a descriptor, where a file is found again below the
        held folder."""
        held = self._held
        return self.open(path) if held is None or held.fd is None else cast(File, BriefFile(self, path))

    def read_file(self, path: str, limit: int) -> bytes:
        """Return a whole file of at most `limit` bytes (more is not read). Raises what `open` does."""
        with contextlib.closing(self.open(path)) as file:
            return file.read(min(limit, file.size()), 0)

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder exists. Raises OSError, as `is_file` and `is_folder` do, if that can't be told:
        a folder above it may not be searched."""
        return self._mode(path) != 0

    def kind(self, path: str) -> str:
        """Return the kind of a path, in words: "" for a regular file, "missing" for nothing."""
        mode = self._mode(path)
        return kind_of(mode) if mode else "missing"

    def size_faults(self, path: str, what: str, nbytes: int) -> list[str]:
        """Return, in words, whether a file of this size is missing, is not a regular file, or has another size."""
        if kind := self.kind(path):
            return [f"{what} is {kind}" + ("" if kind == "missing" else ", expected a regular file")]
        size = self.size(path)
        return [] if size == nbytes else [f"{what} has {size} bytes, expected {nbytes}"]

    def is_file(self, path: str) -> bool:
        """Tell whether a path is a regular file (not a link to one)."""
        return stat.S_ISREG(self._mode(path))

    def is_folder(self, path: str) -> bool:
        """Tell whether a path is a folder (not a link to one)."""
        return stat.S_ISDIR(self._mode(path))

    def _mode(self, path: str) -> int:
        """Return the mode of a path; 0 if nothing can be there."""
        try:
            return self._stat(path).st_mode
        except ValueError:  # no path has such a name
            return 0
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return 0
            error.filename = path
            raise

    def is_at(self, file: File, path: str) -> bool:
        """Tell whether an open file is what is at a path now, and not another one with its name."""
        try:
            return os.path.samestat(self._stat(path), os.fstat(file.held().fd))
        except FileNotFoundError:
            return False

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""
        return self._stat(path).st_size

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; none if it does not exist."""
        at, held = self._at(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(self.system.names(at, held.fd))
        return []

    def matching(self, pattern: str, unlisted: dict[str, OSError] | None = None) -> list[str]:
        """Return the sorted paths that match a glob, as `glob.glob` does, which takes a folder that it can't list for
        an empty one: here that raises OSError; where the pattern names many, `unlisted` takes it and why, if given."""
        parent, name = os.path.split(pattern)
        if not glob.has_magic(pattern) or not parent or parent == pattern:
            return [pattern] if self.exists(pattern) else []
        many, found = glob.has_magic(parent), list[str]()
        for folder in self.matching(parent, unlisted) if many else [parent]:
            try:
                names = fnmatch.filter(self.names(folder), name) if glob.has_magic(name) else [name]
                paths = [os.path.join(folder, n) for n in names if name[0] == "." or n[0] != "."]
                found += paths if glob.has_magic(name) else filter(self.exists, paths)
            except OSError as error:
                if unlisted is None or not many:
                    raise
                unlisted[folder] = error
        return found

    def free(self, path: str) -> int | None:
        """Return the free bytes of the file system of an existing folder, or None if it does not tell."""
        try:
            return shutil.disk_usage(path).free
        except OSError:
            return None
