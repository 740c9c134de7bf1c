"""The column protocol: one fixed-size array of rows that wraps.

A backend stores `rows` rows of one shape and dtype. It knows slots, not positions or
episodes: the store decides which rows may be overwritten, and when. Its
obligations are tested by `ringmap.testing.ColumnTests`, which a new backend inherits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.room import Room

__all__ = ["Backend", "Column", "Live", "Takes"]

Array = np.ndarray[Any, np.dtype[Any]]
Live = Callable[[int, int], bool]
"""Tells whether any of `count` rows from a slot on (no wrap) belongs to a stored episode."""


class Takes(Protocol):
    """What rows of one column are copied from."""

    spec: ColumnSpec

    def take(self, slots: Array, out: Array | None = None, head: int = 0) -> Array:
        """Return a copy of the rows at `slots` (int64, any order, duplicates allowed), shape `slots.shape + shape`.

        `head`: a position below which all were written before this call, including the requested rows; so
        rows cached by an earlier call may be returned. 0: nothing is known. A new array begins where `aligned.empty`
        lets it.
        """
        ...


class Column(Takes, Protocol):
    """Rows of one column.

    `write`, `reserve` and `sync` are called by the one writer; `take` and `read` by any thread of
    any process, at any time, also while rows are written: the result may then mix old and
    new rows, and the caller looks again.
    """

    rows: int

    def reserve(self, slot: int, count: int) -> None:
        """Make sure that `count` rows from `slot` (no wrap) can be written, or raise OSError."""
        ...

    def write(self, slot: int, values: Array, live: Live | None = None) -> None:
        """Write rows from `slot` on (no wrap). `values`: (n, *shape), the column's dtype, C-contiguous.

        `live` tells which other rows must keep their values; without it, unreadable ones may be lost.
        """
        ...

    def writable(self, slot: int, count: int) -> Array | None:
        """Return `count` rows from `slot` (no wrap) to write to; None where only `write` writes: on a disk, or rows in
        chunks."""
        ...

    @property
    def is_large(self) -> bool:
        """Whether its rows may be on the disk only, so that a call of `want` pays off."""
        ...

    @property
    def is_quick_apart(self) -> bool:
        """Whether rows cost about as much in several calls of `take` as in one: they lie in memory, not in chunks or
        behind reads."""
        ...

    def want(self, slots: Array) -> None:
        """Ask for the rows at `slots`, which will be taken soon. A hint: nothing changes."""
        ...

    def map_into(self, room: Room, at: int) -> bool:
        """Map all rows, in order and read-only, into a room, from its byte `at` on; False where they are in no map of
        one file."""
        ...

    def copy_from(self, source: Column, slot: int, count: int) -> tuple[int, int]:
        """Copy rows from the same slots (no wrap) of another column of the same kind.

        Returns:
            The slots `[first, stop)` that were actually copied: at least the requested ones, and more where rows are
            stored in chunks. A row that its writer overwrote meanwhile may be copied old, new or torn.

        Raises:
            CorruptError: some of the other column's rows are gone.
        """
        ...

    def read(self, slot: int, count: int) -> Array:
        """Return a copy of `count` rows from `slot` (no wrap)."""
        ...

    def pieces(self, slot: int, count: int) -> Iterator[bytes | str]:
        """Yield the bytes of rows in order, without a cache; for rows that can't be decoded, the reason, in words.
        Never raises."""
        ...

    def rewrite(self, slot: int, count: int) -> None:
        """Write these rows again, with the same bytes, so that the next `sync` counts; a power cut meanwhile loses
        none."""
        ...

    def touched(self, slot: int, count: int) -> None:
        """Let the next `sync` cover these rows, which another process may have written."""
        ...

    def sync(self) -> None:
        """Return once every written row is durable on the disk."""
        ...

    def forget(self) -> None:
        """Drop all rows cached by earlier calls: written rows may have been taken back."""
        ...

    def close(self) -> None:
        """Release files. Returned arrays stay valid."""
        ...


class Backend(Protocol):
    """Makes and opens columns of one kind, and knows what their files must contain.

    A file is identified by its `path`, `spec`, `rows` and `label`, which the file itself contains.
    """

    def suits(self, spec: ColumnSpec) -> bool:
        """Tell whether such rows can be stored in this kind; the memmap takes all others."""
        ...

    def nbytes(self, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> int:
        """Return the exact size of the parts with a fixed size."""
        ...

    def nbytes_when_full(self, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> int:
        """Return the maximum size of all parts together."""
        ...

    def create(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> None:
        """Make the file or folder, and sync it."""
        ...

    def open(
        self,
        disk: Disk,
        path: str,
        spec: ColumnSpec,
        rows: int,
        label: dict[str, Any],
        write: bool,
        reserved: int,
        mapped: bool = True,
    ) -> Column:
        """Open it, or raise CorruptError.

        `reserved`: rows from slot 0 that were written before; `mapped`: whether it may be read through a map.
        """
        ...

    def create_copy(
        self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any], source: Column
    ) -> bool:
        """Make the file or folder for a copy of `source`; tell whether it already shares all rows of it."""
        ...

    def faults(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> list[str]:
        """Return the faults of the file or folder as a whole, in words; rows are not read."""
        ...

    def exists(self, disk: Disk, path: str) -> bool:
        """Tell whether a file or folder of this kind exists."""
        ...

    def resembles(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> bool:
        """Tell whether a file without its label may still be this column."""
        ...

    def strays(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> list[str]:
        """Return the names inside it that are not part of it."""
        ...

    def mend(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> None:
        """Restore its size, header and label. Rows do not change."""
        ...

    def plain(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> Column:
        """Open it in any state, for `pieces` only."""
        ...
