"""One gather over several threads: NumPy releases the interpreter lock while it copies rows.

    slots (B, H) -> [B/n | B/n | B/n] -> take into the same `out`, each part in another thread

Small gathers stay on the calling thread: starting other threads takes longer than the copy.
Not here: which rows, and whether they stayed live during the copy (gather.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ringmap.storage.columns.aligned import empty
from ringmap.storage.columns.base import Takes
from ringmap.storage.disk.threads import begin

__all__ = ["SPLIT_NBYTES", "take", "together"]

Array = np.ndarray[Any, np.dtype[Any]]

SPLIT_NBYTES = 1 << 21
"""Bytes below which a second thread does not pay off: 2 MiB are copied in 0.2 ms, starting the work in it takes 0.05
ms."""


def take(column: Takes, slots: Array, out: Array | None, threads: int, head: int) -> Array:
    """Return the rows of a column at `slots` `(B, H)`, copied by up to `threads` threads. `head`: as for
    `Column.take`."""
    spec = column.spec
    parts = min(threads, len(slots), slots.size * spec.row_nbytes // (SPLIT_NBYTES // 2))
    if parts < 2:
        return column.take(slots, out, head)
    if out is None:
        out = empty((*slots.shape, *spec.shape), spec.dtype)
    bounds = [len(slots) * part // parts for part in range(parts + 1)]
    pieces = [slice(a, b) for a, b in pairwise(bounds)]
    together([partial(column.take, slots[piece], out[piece], head) for piece in pieces])
    return out


def together(work: Sequence[Callable[[], object]]) -> None:
    """Do the first on this thread, and the others at the same time, where helpers are free; all have ended when this
    returns or raises."""
    others = [begin(one, len(work) - 1) for one in work[1:]]
    try:
        work[0]()
        for other in others:
            other.end()
    finally:
        for other in others:
            other.drop()  # none writes into the caller's arrays any more, even if one failed
