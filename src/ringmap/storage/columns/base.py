"""A column: rows of one shape and dtype, in slots that wrap, at one place of one disk.

    MemmapColumn(disk, path, spec, rows, label).create()            a new one, closed
    MemmapColumn(disk, path, spec, rows, label).open(write=True)    an old one, if it has no fault

A column knows slots, not positions or episodes: the store decides which rows may be overwritten, and when. A new
backend writes `nbytes`, `create`, `faults`, `repair`, `write`, `take` and `sync`, and what else it does better than
`Column`; `ringmap.testing.ColumnTests` tests its obligations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from ringmap.errors import CorruptError
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import Room

__all__ = ["LARGE_NBYTES", "Column", "Live", "Undecodable"]

Array = np.ndarray[Any, np.dtype[Any]]
Live = Callable[[int, int], bool]
"""Tells whether any of `count` rows from a slot on (no wrap) belongs to a stored episode."""

LARGE_NBYTES = 64 << 20
"""A smaller column is read into memory in a few reads without hints."""


class Undecodable(CorruptError):
    """The bytes of a chunk differ from what was written."""


class Column:
    """Rows of one column.

    The one writer calls `write`, `reserve` and `sync`; any thread of any process calls `take` and `read`, at any time,
    also while rows are written: the result may then mix old and new rows, and the caller validates it.

    Args:
        disk, path: where its file or folder is.
        spec, rows: what a row is, and how many there are.
        label: what the file or folder says of itself; it has the options of the backend, too.
    """

    def __init__(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> None:
        self.disk, self.path, self.spec, self.rows, self.label = disk, path, spec, rows, label
        self.is_large = not disk.volatile and rows * spec.row_nbytes >= LARGE_NBYTES
        """Whether its rows may be on the disk only, so that a call of `want` pays off."""

    # -- the file or folder as a whole ---------------------------------------------------------

    @classmethod
    def suits(cls, spec: ColumnSpec) -> bool:
        """Tell whether such rows can be stored in this kind; the memmap takes all others."""
        return True

    @property
    def nbytes(self) -> int:
        """The exact size of the parts with a fixed size."""
        raise NotImplementedError

    @property
    def nbytes_when_full(self) -> int:
        """The maximum size of all parts together."""
        return self.nbytes

    def create(self) -> None:
        """Make the file or folder, and sync it."""
        raise NotImplementedError

    def create_copy(self, source: Column) -> bool:
        """Make the file or folder for a copy of `source`; tell whether it already shares all rows of it."""
        self.create()
        return False

    def open(self, write: bool = False, reserved: int = 0, mapped: bool = True) -> Self:
        """Open it and return it.

        `write`: whether rows are written; `reserved`: rows from slot 0 that were written before; `mapped`: whether it
        may be read through a map.

        Raises:
            CorruptError: it has a fault.
        """
        for fault in self.faults():
            raise CorruptError(f"{self.path}: {fault}; run ringmap.check on the buffer")
        return self

    def faults(self) -> list[str]:
        """Return the faults of the file or folder as a whole, in words; rows are not read."""
        raise NotImplementedError

    def exists(self) -> bool:
        """Tell whether a file or folder of this kind exists."""
        return self.disk.is_file(self.path)  # reading a pipe would never end

    def strays(self) -> list[str]:
        """Return the names inside it that are not part of it."""
        return []

    def repair(self) -> None:
        """Restore its size, header and label. Rows do not change."""
        raise NotImplementedError

    def pieces(self, slot: int, count: int) -> Iterator[bytes | str]:
        """Yield the bytes of rows in order, without a cache; for rows that can't be decoded, the reason, in words.

        Never raises. In any state of the file or folder, opened before or not.
        """
        yield self.read(slot, count).tobytes()

    def close(self) -> None:
        """Release files. Returned arrays stay valid."""

    # -- writing -------------------------------------------------------------------------------

    def reserve(self, slot: int, count: int) -> int:
        """Make sure that `count` rows from `slot` (no wrap) can be written, or raise OSError. Return up to which slot
        all can."""
        return self.rows

    def write(self, slot: int, values: Array, live: Live | None = None) -> None:
        """Write rows from `slot` on (no wrap). `values`: (n, *shape), the column's dtype, C-contiguous.

        `live` tells which other rows must keep their values; without it, unreadable ones may be lost.
        """
        raise NotImplementedError

    def writable(self, slot: int, count: int) -> Array | None:
        """Return `count` rows from `slot` (no wrap) to write to; None where only `write` writes."""
        return None

    def copy_from(self, source: Column, slot: int, count: int) -> tuple[int, int]:
        """Copy rows from the same slots (no wrap) of another column of the same kind.

        Returns:
            The slots `[first, stop)` that were actually copied: at least the requested ones, and more where rows are
            stored in chunks. A row that its writer overwrote meanwhile may be copied old, new or torn.

        Raises:
            CorruptError: some of the other column's rows are gone.
        """
        self.write(slot, source.read(slot, count))
        return slot, slot + count

    def rewrite(self, slot: int, count: int) -> None:
        """Write these rows again, with the same bytes, for the next `sync`; a power cut meanwhile loses none."""
        self.write(slot, self.read(slot, count))

    def touched(self, slot: int, count: int) -> None:
        """Let the next `sync` cover these rows, which another process may have written."""

    def sync(self) -> None:
        """Return once every written row is durable on the disk."""
        raise NotImplementedError

    # -- reading -------------------------------------------------------------------------------

    def take(self, slots: Array, out: Array | None = None, head: int = 0) -> Array:
        """Return a copy of the rows at `slots` (int64, any order, duplicates allowed), shape `slots.shape + shape`.

        `head`: a position below which all were written before this call, including the requested rows; so
        rows cached by an earlier call may be returned. 0: nothing is known. A new array begins where `copying.empty`
        lets it.
        """
        raise NotImplementedError

    def read(self, slot: int, count: int) -> Array:
        """Return a copy of `count` rows from `slot` (no wrap)."""
        rows = np.empty((count, *self.spec.shape), self.spec.dtype)
        return self.take(np.arange(slot, slot + count), rows)

    def want(self, slots: Array) -> None:
        """Ask for the rows at `slots`, which will be taken soon. A hint: nothing changes."""

    def map_into(self, room: Room, at: int) -> bool:
        """Map all rows, in order, into a room from its byte `at` on; False where they are in no map of one file."""
        return False

    def forget(self) -> None:
        """Drop all rows cached by earlier calls: written rows may have been taken back."""
