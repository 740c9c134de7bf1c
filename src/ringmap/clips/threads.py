"""One gather over several threads: NumPy releases the interpreter lock while it copies rows.

    slots (B, H) -> [B/n | B/n | B/n] -> take into the same `out`, each part in another thread

Small gathers stay on the calling thread: starting other threads takes longer than the copy.
Not here: which rows, and whether they stayed live during the copy (gather.py).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any

import numpy as np

from ringmap.storage.columns.base import Column
from ringmap.storage.disk.threads import pool as pool_of

__all__ = ["SPLIT_NBYTES", "take"]

Array = np.ndarray[Any, np.dtype[Any]]

SPLIT_NBYTES = 1 << 21
"""Bytes below which a second thread does not pay off: 2 MiB are copied in 0.2 ms, starting the work in it takes 0.05 ms."""

_pool: ThreadPoolExecutor | None = None
_workers = 0


def take(column: Column, slots: Array, out: Array | None, threads: int, head: int) -> Array:
    """Return the rows of a column at `slots` `(B, H)`, copied by up to `threads` threads. `head`: as for `Column.take`."""
    spec = column.spec
    parts = min(threads, len(slots), slots.size * spec.row_nbytes // (SPLIT_NBYTES // 2))
    if parts < 2:
        return column.take(slots, out, head)
    if out is None:
        out = np.empty((*slots.shape, *spec.shape), spec.dtype)
    bounds = [len(slots) * part // parts for part in range(parts + 1)]
    pieces = [slice(a, b) for a, b in pairwise(bounds)]
    pool = _threads(parts - 1)
    if pool is None:
        return column.take(slots, out, head)
    others = [pool.submit(column.take, slots[piece], out[piece], head) for piece in pieces[1:]]
    try:
        column.take(slots[pieces[0]], out[pieces[0]], head)
    finally:
        wait(others)  # they write into `out`: wait for all of them, even if one fails
    for other in others:
        other.result()
    return out


def _threads(count: int) -> ThreadPoolExecutor | None:
    """Return the pool of this process, grown to `count` threads; None where they can't start."""
    global _pool, _workers
    if _pool is None or _workers < count:
        grown = pool_of(count, "ringmap-gather")
        if grown is None:
            return None
        _pool, _workers = grown, count
    return _pool


def _forget_after_fork() -> None:
    global _pool, _workers
    _pool, _workers = None, 0  # a child process has none of its parent's threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
