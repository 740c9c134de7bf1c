"""A disk in RAM, for a buffer without a path.

The same tree of files as on a real disk, so that the same code runs on it and
its guarantees against interrupts hold in RAM too. Files of a fixed size are NumPy
arrays that the system allocates on first touch: a big ring costs what is stored.
Not here: faults (nothing can fail), other processes (nothing is shared).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.system import Data, Room

__all__ = ["MemoryDisk", "MemoryFile"]

Array = np.ndarray[Any, np.dtype[Any]]


class MemoryFile(File):
    """A file of a disk in RAM: its bytes are one array, replaced by a larger one when it grows."""

    __slots__ = ("_view", "data", "used")

    def __init__(self, path: str, size: int) -> None:
        self.path, self.fd = path, -1
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

    def write_each(self, pieces: Sequence[Data], offsets: Sequence[int]) -> None:
        """Write all of each piece at its offset, one after the other."""
        for piece, offset in zip(pieces, offsets, strict=True):
            self.write(piece, offset)

    def read(self, size: int, offset: int) -> bytes:
        """Read up to `size` bytes at `offset`."""
        return self.data[offset : min(offset + size, self.used)].tobytes()

    def read_into(self, room: memoryview, offset: int) -> int:
        """Read at `offset` into a buffer of bytes, and return how many were read."""
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

    def map_into(self, room: Room, at: int, offset: int, nbytes: int, random: bool = False) -> bool:
        """Return False: a room is for files of the system."""
        return False

    def next_data(self, offset: int) -> int:
        """Return the offset: what holds zeros is not known."""
        return offset

    def size(self) -> int:
        """Return the size in bytes."""
        return self.used

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is nothing to reserve, to sync, to ask for or to release."""

    reserve = sync = will_need = close = _nothing


class MemoryDisk(Disk):
    """A tree of files in RAM."""

    volatile = True

    def __init__(self) -> None:
        super().__init__()
        self._tree: dict[str, MemoryFile | None] = {}  # None for a folder

    def hold(self, folder: str) -> Self:
        """Return itself: a tree in RAM can't be replaced."""
        return self

    def free(self, path: str) -> int | None:
        """Return None: the free memory is not known."""
        return None

    def create(self, path: str, size: int = 0) -> File:
        """Create a file of `size` zero bytes and open it for writing."""
        file = self._tree[path] = MemoryFile(path, size)
        return file

    def make_folder(self, path: str) -> None:
        """Create a folder."""
        self._tree[path] = None

    def _below(self, path: str) -> list[str]:
        """Return a path, and all that is below it; nothing if it does not exist."""
        if self._mode(path) != stat.S_IFDIR:
            return [path] if path in self._tree else []
        inside = path + os.sep
        return [p for p in self._tree if p == path or p.startswith(inside)]

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder."""
        for path in self._below(source):
            self._tree[target + path[len(source) :]] = self._tree.pop(path)

    def discard(self, path: str) -> None:
        """Remove a file, or a folder with all its content; a missing path is ignored."""
        for inner in self._below(path):
            del self._tree[inner]

    remove = discard

    def sync_folder(self, path: str) -> None:
        """Do nothing: RAM has no cache to sync."""

    def boot_id(self) -> bytes | None:
        """Return a constant: the tree ends with the process."""
        return b"\1" * 16

    def open(self, path: str, write: bool = False) -> File:
        """Open a file that exists."""
        file = self._tree.get(path)
        if file is None:
            raise FileNotFoundError(path)
        return file

    def _mode(self, path: str) -> int:
        if path not in self._tree:
            return 0
        return stat.S_IFDIR if self._tree[path] is None else stat.S_IFREG

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""
        return self.open(path).size()

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder."""
        inside = path + os.sep
        return sorted({p[len(inside) :].split(os.sep)[0] for p in self._tree if p.startswith(inside)})
