"""Which episodes data were written for, where they lie beside the table of episodes in the order of its rows.

    table   (first row, steps) of episode 0, 1, 2, ...  --mark_of-->  how many, and a sum of hashes
    data    of episode 0, 1, 2, ..., and the mark of the table as it was when they were written

Another program that removes an episode changes the table, and does not know of the data: the mark tells.
Invariants: episodes that are added behind the others change nothing for these; a mark takes O(1) for each episode more.
Not here: where a format keeps its mark. Formats whose data have the number of their episode need none (Lance, Minari,
LeRobot).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.errors import CorruptError

__all__ = ["fits", "mark_of", "refuse_other_table"]

Array = np.ndarray[Any, np.dtype[Any]]

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Of splitmix64."""


def mark_of(lengths: Array, offsets: Array, before: Array | None = None) -> Array:
    """Return the mark of a table, (2,) uint64: how many episodes, and the sum of their hashes.

    Args:
        lengths: of the episodes.
        offsets: of their first rows.
        before: the mark of the episodes in front of them.

    Example:
        >>> whole = mark_of(np.array([4, 4, 4]), np.array([0, 4, 8]))
        >>> first = mark_of(np.array([4]), np.array([0]))
        >>> mark_of(np.array([4, 4]), np.array([4, 8]), first).tolist() == whole.tolist()
        True
    """
    count = 0 if before is None else int(before[0])
    one, two, three = (np.uint64(n) for n in _MIX)
    hashes = np.arange(count + 1, count + 1 + len(lengths), dtype=np.uint64) * one
    for part in (offsets, lengths):
        hashes ^= np.asarray(part, np.int64).astype(np.uint64)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * two
        hashes = (hashes ^ (hashes >> np.uint64(27))) * three
    total = int(hashes.sum(dtype=np.uint64)) + (0 if before is None else int(before[1]))
    return np.array([count + len(lengths), total % (1 << 64)], np.uint64)


def fits(mark: Any, lengths: Array, offsets: Array) -> bool:
    """Tell whether a table begins with the episodes of a mark; None, of data without one, fits."""
    if mark is None:
        return True
    try:
        stated = [int(n) for n in mark]
    except (TypeError, ValueError):
        return False
    if len(stated) != 2 or not 0 <= stated[0] <= len(lengths):
        return False
    found = mark_of(lengths[: stated[0]], offsets[: stated[0]])
    return [int(n) for n in found] == stated


def refuse_other_table(path: str) -> CorruptError:
    """Return the error for data whose mark does not fit."""
    return CorruptError(
        f"{path}: the data of its episodes were written for other episodes than it has: another program removed or "
        "moved some, so it is "
        "not known which data are of which; the rows of numbers can be read: write these to a new dataset, and leave "
        "the data out"
    )
