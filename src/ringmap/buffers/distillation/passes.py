"""Passes over a student's rows: every row once, or every episode in pieces.

    row         0 1 2 3 4 5 6 7                    of many actors, in the order in which they were added
    actor       a b a b a b a b
    done            .   x x                        an episode ends at a done row, and at the last row

    epochs      [5 1 3 | 0 4 2 | 7 6]              rows, shuffled, in batches
    episodes    [0 2 4] [1 3] [5 7] [6]
    sequences   [0 2] [4 .] [1 3] [5 7] [6 .]      pieces of episodes, time-major, padded

Invariants: each row is in one episode, whose rows belong to one actor; a pass covers what is stored when it begins; a
row that is evicted before its turn is left out, and in sequences its whole piece is: no other row replaces it.
Not here: the content of a batch (buffer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringmap.storage.columns.values import root

__all__ = ["Read", "episodes_of", "epoch", "pieces_of", "sequences"]

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Array]
Read = Callable[[Array], tuple[Columns, Array]]
"""Returns rows by id, and which of them are still stored."""


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


def epoch(read: Read, order: Array, size: int, drop_last: bool) -> Iterator[Columns]:
    """Yield rows in this order, in batches of `size`, the last one smaller or dropped."""
    for at in range(0, len(order) - (size - 1 if drop_last else 0), size):
        columns, held = read(order[at : at + size])
        if held.all():
            yield columns
        elif held.any():
            yield {name: values[held] for name, values in columns.items()}


def sequences(
    read: Read,
    ids: Array,
    bounds: Array,
    length: int,
    size: int | None,
    drop_last: bool,
    rng: np.random.Generator | None,
) -> Iterator[Columns]:
    """Yield episodes in pieces of `length` rows, `(length, B, ...)`, with `mask` and `is_first`.

    Args:
        read: the function that reads rows.
        ids: of all rows, in the order of their episodes.
        bounds: the start of each episode in it.
        length: T.
        size: B, pieces; None: all at once.
        drop_last: whether to leave out a last batch with fewer pieces.
        rng: shuffles the pieces; None: in the order of episodes.
    """
    starts, sizes = pieces_of(bounds, length)
    first = np.isin(starts, bounds)
    count = len(starts)
    order = np.arange(count) if rng is None else rng.permutation(count)
    size = count if size is None else size
    for at in range(0, count - (size - 1 if drop_last else 0), size):
        chosen = order[at : at + size]
        made = _piece(read, ids, starts[chosen], sizes[chosen], first[chosen], length)
        if made is not None:
            yield made


def _piece(read: Read, ids: Array, starts: Array, sizes: Array, first: Array, length: int) -> Columns | None:
    """Return one batch of pieces; None if all of them lost a row."""
    steps = np.arange(length)[:, None]
    mask = steps < sizes
    taken = ids[np.where(mask, starts + steps, starts)]
    columns, held = read(taken.reshape(-1))
    whole = held.reshape(taken.shape).all(axis=0)
    if not whole.any():
        return None
    mask, first = mask[:, whole], first[whole]
    made: Columns = {}
    for name, values in columns.items():
        block = values.reshape(*taken.shape, *values.shape[1:])[:, whole]
        if root(name) == "hidden":
            made[name] = block[0]
        else:
            block[~mask] = np.zeros((), block.dtype)
            made[name] = block
    made["mask"], made["is_first"] = mask, first & (steps == 0)
    return made
