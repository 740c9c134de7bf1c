"""Raw files: what the bytes of each file say it is, whatever its name.

Invariants: reads only, and never through a map: a bad sector or a file that someone cuts would
kill the process, and here it is an empty answer.
Not here: which file is which (identity.py, parts.py).
"""

from __future__ import annotations

import bisect
import errno
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringmap.errors import EnvironmentFault
from ringmap.storage.columns.memmap import read_label
from ringmap.storage.columns.zarr import read_zarr_label
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.memory import MemoryFile
from ringmap.storage.disk.system import Data, NotAFileError
from ringmap.storage.records.names import COLUMNS, DATA, OPEN, STREAM
from ringmap.storage.records.state import State, StateFile
from ringmap.storage.records.table import EpisodeTable

__all__ = ["Files", "Part", "copy_of", "words_of"]

_BLOCK = 1 << 20


@dataclass(slots=True)
class Part:
    """A file that a buffer must have.

    `file`: its name; `at`: the name under which its bytes lie, None when they are nowhere;
    `faults`: what is wrong, in words.
    """

    file: str
    at: str | None
    faults: list[str] = field(default_factory=list)


class Files:
    """The files of a directory, by relative name with forward slashes."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.folder, *name.split("/")) if name else self.folder

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names of what lies in a folder, with the folder's own before them."""
        prefix = f"{folder}/" if folder else ""
        if folder and not self.is_folder(folder):  # a link would lead elsewhere
            return []
        return [prefix + name for name in self.disk.names(self.path(folder))]

    def is_folder(self, name: str) -> bool:
        """Tell whether a folder is there, and lies in folders of the directory itself."""
        parts = name.split("/")
        paths = ("/".join(parts[: i + 1]) for i in range(len(parts)))
        return all(self.disk.is_folder(self.path(path)) for path in paths)

    def is_file(self, name: str) -> bool:
        """Tell whether a regular file is there: reading a pipe would never end."""
        above = name.rpartition("/")[0]
        return self.disk.is_file(self.path(name)) and (not above or self.is_folder(above))

    def all(self) -> list[str]:
        """Return the regular files of the directory and its folders."""
        streams = [f"{name}/{STREAM}" for name in self.names(OPEN)]
        names = [*self.names(), *self.names(COLUMNS), *self.names(DATA), *streams]
        return [name for name in names if self.is_file(name)]

    def columns(self) -> list[str]:
        """Return what may be a column: regular files, and folders of the name that a Zarr array has."""
        folders = [n for n in [*self.names(), *self.names(COLUMNS)] if self.is_array(n)]
        return [*self.all(), *folders]

    def is_array(self, name: str) -> bool:
        """Tell whether a folder is there that a Zarr array may lie in: one with its `zarr.json`, or its name."""
        if not self.is_folder(name):
            return False
        return name.endswith(".zarr") or self.is_file(f"{name}/zarr.json")

    def is_part(self, name: str) -> bool:
        """Tell whether a file is there, or a folder that a Zarr array may lie in."""
        return self.is_file(name) or self.is_array(name)

    def size(self, name: str) -> int:
        """Return a file's size, 0 when there is none."""
        return self.disk.size(self.path(name)) if self.is_file(name) else 0

    def read(self, name: str, size: int, offset: int = 0) -> bytes:
        """Return up to `size` bytes at `offset`; none of a file that is gone or can't be read."""

        def read(file: File) -> bytes:
            size_left = file.size() - offset
            return file.read(min(size, size_left), offset) if size_left > 0 else b""

        try:
            found: bytes = self._look(name, read) or b""
        except MemoryError as error:  # no word on whether it is whole
            raise EnvironmentFault(
                errno.ENOMEM, f"{self.path(name)}: {size:,} bytes of it do not fit in memory"
            ) from error
        return found

    def is_blank(self, name: str, offset: int) -> bool:
        """Tell whether nothing but zeros lies in a file from `offset` on. Holes cost nothing."""

        def look(file: File) -> bool:
            at, stop = offset, file.size()
            while (at := max(at, file.next_data(at))) < stop:
                data = file.read(_BLOCK, at)
                if data.strip(b"\0"):
                    return False
                at += max(1, len(data))
            return True

        return self._look(name, look) is not False

    def label(self, name: str) -> dict[str, Any] | None:
        """Return what a column's file or folder says of itself."""
        if self.is_array(name):
            return read_zarr_label(self.read(f"{name}/zarr.json", _BLOCK))
        found: dict[str, Any] | None = self._look(name, read_label)
        return found

    def states(self, name: str, uuid: bytes) -> tuple[State | None, State | None]:
        """Return the two states in a state file, None for one that is not valid."""
        data = MemoryFile(name, 0)
        data.write(self.read(name, StateFile.nbytes), 0)
        return StateFile(data, uuid).slots()

    def table(self, name: str, slots: int, uuid: bytes) -> EpisodeTable:
        """Return an episode table as it is now: a copy in RAM, zeros where the file ends early.

        An empty one of a single slot where no memory could hold it: then its size is forged.
        """
        try:
            copied = self._look(name, lambda file: copy_of(file, EpisodeTable.nbytes(slots)))
            blank = copied or _Copied(name, EpisodeTable.nbytes(slots))
        except MemoryError:
            slots, blank = 1, _Copied(name, EpisodeTable.nbytes(1))
        return EpisodeTable(blank, slots, uuid)

    def _look(self, name: str, what: Callable[[File], Any]) -> Any:
        if not self.is_file(name):
            return None
        try:
            with closing(self.disk.open(self.path(name))) as file:
                return what(file)
        except (OSError, ValueError, RecursionError):
            return None


class _Copied(MemoryFile):
    """A copy of a file that knows its holes, as the file did."""

    __slots__ = ("blocks",)

    def __init__(self, path: str, size: int) -> None:
        super().__init__(path, size)
        self.blocks: list[int] = []

    def write(self, data: Data, offset: int) -> None:
        """Write a record."""
        super().write(data, offset)
        if (at := offset // _BLOCK * _BLOCK) not in self.blocks:  # a record never crosses one
            bisect.insort(self.blocks, at)

    def next_data(self, offset: int) -> int:
        """Return the first offset from here on that may hold anything but zeros; the size where none does."""
        at = bisect.bisect_right(self.blocks, offset - _BLOCK)
        return max(offset, self.blocks[at]) if at < len(self.blocks) else self.used


def copy_of(file: File, size: int) -> MemoryFile:
    """Return the first `size` bytes of a file; what is missing or can't be read is zero.

    Blocks of zeros cost no memory, and holes no time: a table is sparse, and one that is forged may be vast.
    """
    copied, at, stop = _Copied(file.path, size), 0, min(size, file.size())
    while (at := max(at, file.next_data(at) // _BLOCK * _BLOCK)) < stop:
        try:
            block = np.frombuffer(file.read(min(_BLOCK, size - at), at), np.uint8)
        except OSError:
            block = np.empty(0, np.uint8)
        if block.any():
            copied.data[at : at + len(block)] = block
            copied.blocks.append(at)
        at += _BLOCK
    return copied


def words_of(faults: Callable[[], list[str]]) -> list[str]:
    """Return the faults that a part finds with its own file, or that it can't be read."""
    try:
        return faults()
    except OSError as error:
        return [f"can't be read: {error.strerror or error}"]
    except NotAFileError as error:
        return [f"is {error.kind}, expected a regular file"]
