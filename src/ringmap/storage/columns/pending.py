"""Rows in memory: they belong to a group that is not committed yet.

Only the owner of a ring has such rows. `Rows.take` lays them over the files.

Invariant: a row is read from the group or from the file, and both are right once it is committed: the file is written
before the group is let go.
Not here: which rows are pending (commit/group.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ringmap.storage.ring.ring import Position

__all__ = ["PendingRows", "found_in"]

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
        """Return which of these positions are of these rows, bool `(n,)`, and what is kept with these, beside their
        columns."""
        ...

    def newest_apart(self) -> dict[str, Array]:
        """Return what is kept with the rows of the newest call."""
        ...

    def earlier_at(self, positions: Array) -> tuple[Array | slice, dict[str, Array]]:
        """Return for which of these positions, of rows before these, something is kept, bool `(n,)`, and this."""
        ...

    def rows_of(self, names: Sequence[str], numbers: Array) -> list[Array]:
        """Return rows of columns by number."""
        ...


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
