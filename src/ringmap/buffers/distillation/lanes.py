"""Groups the interleaved rows of many actors into episodes: integers only.

    row      0 1 2 3 4 5 6 7            episodes [0 2 4] [1 3] [5 7] [6]
    actor    a b a b a b a b
    done         .   x x                an episode ends at a done row, and at the last row

    pieces of length 2: [0 2] [4 .] [1 3] [5 7] [6 .]      "." is padding

Invariants: each row is in one episode; rows of an episode belong to one actor, in the order in which they were added.
Not here: the rows themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["episodes_of", "pieces_of"]

Array = np.ndarray[Any, np.dtype[Any]]


def episodes_of(actors: Array, dones: Array) -> tuple[Array, Array]:
    """Return rows in the order of their episodes, and the start of each episode in it.

    Args:
        actors: `(n,)`, the actor of each row, in the order in which rows were added.
        dones: `(n,)` bool, whether an episode ended with the row.

    Returns:
        `(order, bounds)`: rows `order[bounds[e]:bounds[e + 1]]` are episode e; episodes are in order of first row.

    Cost: O(n log n), vectorised.

    Example:
        >>> order, bounds = episodes_of(np.array([0, 1, 0, 1, 0]), np.array([0, 0, 1, 0, 0], bool))
        >>> [part.tolist() for part in np.split(order, bounds[1:-1])]
        [[0, 2], [1, 3], [4]]
    """
    count = len(actors)
    if not count:
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    by_actor = np.argsort(actors, kind="stable")
    last = np.ones(count, bool)
    last[:-1] = actors[by_actor][1:] != actors[by_actor][:-1]
    last |= dones[by_actor]
    ends = np.flatnonzero(last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    rank = np.argsort(by_actor[starts], kind="stable")
    sizes = (ends - starts)[rank]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    within = np.arange(count) - np.repeat(bounds[:-1], sizes)
    return by_actor[np.repeat(starts[rank], sizes) + within], bounds


def pieces_of(bounds: Array, length: int) -> tuple[Array, Array]:
    """Return the start of each piece of at most `length` rows in the order of episodes, and its number of rows.

    Example:
        >>> [part.tolist() for part in pieces_of(np.array([0, 5, 7]), 3)]
        [[0, 3, 5], [3, 2, 2]]
    """
    sizes = np.diff(bounds)
    counts = -(-sizes // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(bounds[:-1], counts) + number * length
    return starts, np.minimum(length, np.repeat(bounds[1:], counts) - starts)
