"""A disk in RAM, for a buffer without a path.

The same tree of files as on a real disk, so that the same code runs on it and
its guarantees against interrupts hold in RAM too. Files of a fixed size are NumPy
arrays that the system allocates on first touch: a big ring costs what is stored.
Not here: faults (nothing can fail), other processes (nothing is shared).
"""

from __future__ import annotations

import os
import stat
from typing import Any, Self

import numpy as np

from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.system import Data

__all__ = ["MemoryDisk", "MemoryFile"]

Array = np.ndarray[Any, np.dtype[Any]]


class MemoryFile(File):
    """A file of a disk in RAM: its bytes are one array, replaced by a larger one when it grows."""

    __slots__ = ("_view", "data", "path", "used")

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        try:
            self.data: Array = np.zeros(size, np.uint8)
        except MemoryError:
            raise MemoryError(
                f"a column of {size:,} bytes does not fit in memory; give path= to keep the rows in a directory, or "
                "lower max_steps"
            ) from None
        self._view = self.data.data
        self.used = size

    def write(self, data: Data, offset: int) -> None:
        """Write all of `data` at `offset`; the file grows as needed."""
        stop = offset + len(data)
        if stop > len(self.data):
            grown = np.zeros(max(stop, 2 * len(self.data), 4096), np.uint8)
            grown[: self.used] = self.data[: self.used]
            self.data, self._view = grown, grown.data
        self._view[offset:stop] = data
        if stop > self.used:
            self.used = stop

    def read(self, size: int, offset: int) -> bytes:
        """Read up to `size` bytes at `offset`; fewer at the end of the file."""
        return self.data[offset : min(offset + size, self.used)].tobytes()

    def read_into(self, room: memoryview, offset: int) -> int:
        """Read at `offset` into `room`, a buffer of bytes, and return how many were read; fewer at the end of the
        file."""
        data = self.data[offset : min(offset + len(room), self.used)]
        room[: len(data)] = data.data
        return len(data)

    def map(self, random: bool = False) -> Array:
        """Return the whole file as a read-only array that shows later writes."""
        view = self.data[: self.used]
        view.flags.writeable = False
        return view

    def writable(self, offset: int, nbytes: int) -> Array | None:
        """Return a byte range of the file itself."""
        return self.data[offset : offset + nbytes]

    def size(self) -> int:
        """Return the size in bytes."""
        return self.used


class MemoryDisk(Disk):
    """A tree of files in RAM."""

    volatile = True

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, MemoryFile] = {}
        self._folders: set[str] = set()

    def hold(self, folder: str) -> Self:
        """Return itself: a tree in RAM can't be replaced."""
        return self

    def free(self, path: str) -> int | None:
        """Return None: the free memory is not known."""
        return None

    def create(self, path: str, size: int = 0) -> File:
        """Create a file of `size` zero bytes and open it for writing."""
        file = self._files[path] = MemoryFile(path, size)
        return file

    def make_folder(self, path: str) -> None:
        """Create a folder."""
        self._folders.add(path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder."""
        if source in self._files:
            file = self._files[target] = self._files.pop(source)
            file.path = target
            return
        inside = source + os.sep
        for folder in [f for f in self._folders if f == source or f.startswith(inside)]:
            self._folders.remove(folder)
            self._folders.add(target + folder[len(source) :])
        for path in [p for p in self._files if p.startswith(inside)]:
            self._files[target + path[len(source) :]] = self._files.pop(path)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._files.pop(path, None)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all its content."""
        for inner in [p for p in self._files if p.startswith(path + os.sep)]:
            self._files.pop(inner, None)
        self._folders = {p for p in self._folders if p != path and not p.startswith(path + os.sep)}

    def sync_folder(self, path: str) -> None:
        """Do nothing: RAM has no cache to sync."""

    def boot_id(self) -> bytes | None:
        """Return a constant: the tree ends with the process."""
        return b"\1" * 16

    def open(self, path: str, write: bool = False) -> File:
        """Open a file that exists."""
        try:
            return self._files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def read_file(self, path: str, limit: int) -> bytes:
        """Return a whole file of at most `limit` bytes."""
        file = self.open(path)
        return file.read(min(limit, file.size()), 0)

    def _mode(self, path: str) -> int:
        if path in self._files:
            return stat.S_IFREG
        return stat.S_IFDIR if path in self._folders else 0

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""
        return self._files[path].used

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder."""
        prefix = path + os.sep
        inside = [p[len(prefix) :] for p in [*self._files, *self._folders] if p.startswith(prefix)]
        return sorted({name.split(os.sep)[0] for name in inside})
