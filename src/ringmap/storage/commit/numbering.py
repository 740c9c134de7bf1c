"""Numbers of the episodes that single rows are of: each row of transitions has its episode's ordinal, in a column.

    lanes         -2  -2   2   2   2   2        a row with N > 0 goes on from the row N before it, unless that one ended
    an episode ended                  x
    _episode       4   5   4   5   6   5        the record: ordinal 4, behind 3

Rows come with -1, and get their numbers with their commit: those that go on from rows before it, by what these say.

Invariants: the numbers of a commit are those that its record gives: `ordinal` up to, and without, `ordinal + behind`,
in the order of the episodes' first rows; rows that have a number, of a copy, keep it.
Not here: what `lanes` says (buffers/transitions/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["ENDS", "LANES", "NUMBERS", "UNNUMBERED", "numbered"]

Array = np.ndarray[Any, np.dtype[Any]]

LANES, ENDS, NUMBERS = "lanes", ("dones", "truncated"), "_episode"
"""Names of columns."""
UNNUMBERED = -1


def numbered(
    names: Sequence[str], arrays: Sequence[Array], start: int, following: int, before: Callable[[Array], Array]
) -> tuple[list[Array], int]:
    """Return the columns of a commit with all numbers, and how many episodes begin in it.

    Args:
        names: of the columns.
        arrays: the columns.
        start: the position of the first row.
        following: the next ordinal to give.
        before: returns the numbers of the rows at some positions before `start`; less than 0 where an episode ended, or
            no row is.

    Example:
        >>> rows = np.array([-2, -2, 2, 2, 2, 2]), np.array([0, 0, 1, 0, 0, 0], bool), np.zeros(6, bool), np.full(6, -1)
        >>> names = ["lanes", "dones", "truncated", "_episode"]
        >>> columns, begun = numbered(names, rows, 0, 4, lambda at: -np.ones(len(at)))
        >>> columns[3].tolist(), begun
        ([4, 5, 4, 5, 6, 5], 3)
    """
    by_name = dict(zip(names, arrays, strict=True))
    if (by_name[NUMBERS] < 0).any():
        by_name[NUMBERS] = _numbers(by_name, start, following, before)
    begun = int(by_name[NUMBERS].max()) + 1 - following
    return list(by_name.values()), max(0, begun)


def _numbers(columns: dict[str, Array], start: int, following: int, before: Callable[[Array], Array]) -> Array:
    lanes = columns[LANES].astype(np.int64)
    number, ordinals = np.arange(len(lanes)), np.full(len(lanes), UNNUMBERED)
    first = np.where(lanes > 0, number - lanes, number)
    earlier = np.flatnonzero(first < 0)
    if len(earlier):
        ordinals[earlier] = before(start + first[earlier])
        first[earlier] = earlier
    ended = columns[ENDS[0]] | columns[ENDS[1]]
    first = np.where(ended[first] & (first != number), number, first)
    begins = (first == number) & (ordinals < 0)
    ordinals[begins] = following + np.arange(int(begins.sum()))
    while True:  # each round doubles the distance that it jumps
        further = first[first]
        if (further == first).all():
            return np.ascontiguousarray(ordinals[first], "<i8")
        first = further
