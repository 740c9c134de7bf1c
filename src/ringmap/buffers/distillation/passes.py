"""Passes over a student's rows: every row once, or every episode in pieces.

    epochs      [5 1 3 | 0 4 2]                    rows, shuffled, in batches
    sequences   [e0: 0 2 4 | e1: 1 3 .]            pieces of episodes, time-major, padded

Invariants: a pass covers what is stored when it begins; a row that is evicted before its turn is left out, and in
sequences its whole piece is: no other row replaces it.
Not here: which rows belong to one episode (lanes.py), the content of a batch (buffer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringmap.buffers.distillation.lanes import pieces_of
from ringmap.storage.columns.values import root

__all__ = ["Read", "epoch", "sequences"]

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Array]
Read = Callable[[Array], tuple[Columns, Array]]
"""Returns rows by id, and which of them are still stored."""


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
