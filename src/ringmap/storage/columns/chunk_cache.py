"""Decoded chunks that were used last, for as long as they say what is stored.

    chunk -> (rows, head): the rows as they were when every position below `head` had been written

A row that is live never changes, so such a chunk is right for all positions below `head`, and for
no others: those were written since. Nobody has to tell a reader that a chunk was replaced.

Invariants: at most `limit` bytes are kept; what is handed out is not written to.
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
    """The chunks used last. Thread-safe; O(1).

    Args:
        limit: bytes to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[int, tuple[Array, int]] = OrderedDict()
        self._lock = threading.RLock()  # a signal handler may sample in the middle of a sample

    def get(self, chunk: int, position: int) -> Array | None:
        """Return the rows of a chunk if they are right for `position`, the highest that is asked of it."""
        with self._lock:
            found = self._kept.get(chunk)
            if found is None or position >= found[1]:
                return None
            self._kept.move_to_end(chunk)
            return found[0]

    def put(self, chunk: int, rows: Array, head: int) -> None:
        """Keep the rows of a chunk; `head` is from before they were read."""
        if rows.nbytes > self._limit:
            return
        with self._lock:
            before = self._kept.pop(chunk, None)
            if before is not None and before[1] > head:  # another thread read it later
                rows, head = before
            self._kept[chunk] = rows, head
            while len(self._kept) * rows.nbytes > self._limit:  # chunks are of one size
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._kept.clear()

    def reset_after_fork(self, renewed: Renew) -> None:
        """Replace the lock, which another thread may have held at the fork, and keep nothing."""
        super().reset_after_fork(renewed)
        self._lock = threading.RLock()
        self._kept = OrderedDict()
