"""A cache of recently used decoded chunks, valid while they equal what is stored.

    chunk -> (rows, head): the rows as they were when every position below `head` had been written

A live row never changes, so such a chunk is valid for all positions below `head`, and for
no others: those were written later. No message has to tell a reader that a chunk was replaced.

Invariants: the cache holds at most `limit` bytes; returned arrays are not written to.
Not here: where chunks come from (zarr.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from ringmap.storage.disk.forks import Forkable, Renew

__all__ = ["ChunkCache"]

Array = np.ndarray[Any, np.dtype[Any]]


class ChunkCache(Forkable):
    """The most recently used chunks. Thread-safe; O(1).

    Args:
        limit: maximum size in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[int, tuple[Array, int]] = OrderedDict()
        self._lock = threading.RLock()  # a signal handler may sample in the middle of a sample

    def get(self, chunk: int, position: int) -> Array | None:
        """Return the rows of a chunk if they are valid for `position`, the highest one requested from it."""
        with self._lock:
            found = self._kept.get(chunk)
            if found is None or position >= found[1]:
                return None
            self._kept.move_to_end(chunk)
            return found[0]

    def put(self, chunk: int, rows: Array, head: int) -> None:
        """Store the rows of a chunk; `head` is from before they were read."""
        if rows.nbytes > self._limit:
            return
        with self._lock:
            before = self._kept.pop(chunk, None)
            if before is not None and before[1] > head:  # another thread read it later
                rows, head = before
            self._kept[chunk] = rows, head
            while len(self._kept) * rows.nbytes > self._limit:  # chunks have the same size
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Drop all chunks."""
        with self._lock:
            self._kept.clear()

    def reset_after_fork(self, renewed: Renew) -> None:
        """Replace the lock, which another thread may have held at the fork, and drop all chunks."""
        super().reset_after_fork(renewed)
        self._lock = threading.RLock()
        self._kept = OrderedDict()
