"""A column whose newest rows are in memory: they belong to a group that is not committed yet.

    take(slots) -> the column's rows -> those of the open group take their place

Only the owner of a ring has such rows. Everything that reads columns by name reads through this.

Invariants: a row is read from the group or from the file, and both are right once it is committed: the file is written
before the group is let go.
Not here: which rows are pending (commit/group.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ringmap.storage.columns.aligned import empty
from ringmap.storage.columns.base import Column, Live
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.room import Room
from ringmap.storage.ring.integers import Position

__all__ = ["PendingColumn", "PendingRows", "found_in"]

Array = np.ndarray[Any, np.dtype[Any]]


class PendingRows(Protocol):
    """Rows that are not in the columns yet."""

    @property
    def start(self) -> Position:
        """The position of the first one."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def apart_at(self, positions: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of these positions are of these rows, bool `(n,)`, and what is kept with these, beside their columns."""
        ...

    def newest_apart(self) -> dict[str, Array]:
        """Return what is kept with the rows of the newest call."""
        ...

    def earlier_at(self, positions: Array) -> tuple[Array | slice, dict[str, Array]]:
        """Return for which of these positions, of rows before these, something is kept, bool `(n,)`, and this."""
        ...

    def among(self, slots: Array) -> tuple[Array, Array] | None:
        """Return at which of `slots`, of any shape, these rows are, as booleans, and the numbers of these; None for none."""
        ...

    def rows_of(self, names: Sequence[str], numbers: Array) -> list[Array]:
        """Return rows of columns by number."""
        ...


class PendingColumn:
    """A column, and its rows in memory. See `Column`.

    Args:
        column: its file.
        pending: returns the rows in memory, None when there are none.
    """

    def __init__(self, column: Column, pending: Callable[[], PendingRows | None]) -> None:
        self.file, self._pending = column, pending
        self.spec: ColumnSpec = column.spec
        self.rows = column.rows

    @property
    def is_quick_apart(self) -> bool:
        """False: each call looks for rows elsewhere, too."""
        return False

    @property
    def is_large(self) -> bool:
        """Whether a call of `want` pays off."""
        return self.file.is_large

    def want(self, slots: Array) -> None:
        """Ask for the rows at `slots`."""
        self.file.want(slots)

    def take(self, slots: Array, out: Array | None = None, head: int = 0) -> Array:
        """Return a copy of the rows at `slots`."""
        pending = self._pending()
        if pending is None:
            return self.file.take(slots, out, head)
        head = min(head, pending.start)  # a chunk that is read now is not whole beyond
        found = pending.among(slots)
        if found is None:
            return self.file.take(slots, out, head)
        here, numbers = found
        if here.all():
            taken = empty((*slots.shape, *self.spec.shape), self.spec.dtype) if out is None else out
        else:  # not from a chunk that has no file yet
            taken = self.file.take(np.where(here, slots[~here][0], slots), out, head)
        taken[here] = pending.rows_of([self.spec.name], numbers)[0]
        return taken

    def map_into(self, room: Room, at: int) -> bool:
        """Return False: some rows may be elsewhere."""
        return False

    # -- the file's own ----------------------------------------------------------------------

    def reserve(self, slot: int, count: int) -> None:
        """Make sure that rows can be written."""
        self.file.reserve(slot, count)

    def writable(self, slot: int, count: int) -> Array | None:
        """Return rows of the file to write to."""
        return self.file.writable(slot, count)

    def write(self, slot: int, values: Array, live: Live | None = None) -> None:
        """Write rows."""
        self.file.write(slot, values, live)

    def copy_from(self, source: Column, slot: int, count: int) -> tuple[int, int]:
        """Copy rows of another column."""
        return self.file.copy_from(source, slot, count)

    def read(self, slot: int, count: int) -> Array:
        """Return a copy of rows in the file."""
        return self.file.read(slot, count)

    def pieces(self, slot: int, count: int) -> Iterator[bytes | str]:
        """Yield the bytes of rows in the file."""
        return self.file.pieces(slot, count)

    def rewrite(self, slot: int, count: int) -> None:
        """Write rows again."""
        self.file.rewrite(slot, count)

    def touched(self, slot: int, count: int) -> None:
        """Let the next `sync` cover rows."""
        self.file.touched(slot, count)

    def sync(self) -> None:
        """Make all rows in the file durable."""
        self.file.sync()

    def forget(self) -> None:
        """Drop cached rows."""
        self.file.forget()

    def close(self) -> None:
        """Release the file."""
        self.file.close()


def found_in(numbers: Array, wanted: Array) -> tuple[Array | slice, Array]:
    """Return which of `wanted` are among sorted numbers, an index into them, and the places of these.

    Example:
        >>> found_in(np.array([3, 5, 9]), np.array([9, 4, 3]))
        (array([ True, False,  True]), array([2, 0]))
    """
    places = numbers.searchsorted(wanted)
    if not len(numbers):
        return np.zeros(len(wanted), np.bool_), places[:0]
    known: Array = numbers.take(places, mode="clip") == wanted
    if known.all():  # a number beyond the last one differs from it
        return slice(None), places
    return known, places[known]
