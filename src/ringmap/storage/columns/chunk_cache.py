"""A cache of recently used chunks, decoded or as in their files, valid while they equal what is stored.

    chunk -> (rows or bytes, head): the chunk as it was when every position below `head` had been written

A live row never changes, so such a chunk is valid for all positions below `head`, and for
no others: those were written later. No message has to tell a reader that a chunk was replaced.

Invariants: the cache holds at most `limit` bytes; returned arrays are not written to.
Not here: where chunks come from, and which of the two is kept (zarr.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from ringmap.storage.disk.forks import Forkable, Renew

__all__ = ["Chunk", "ChunkCache"]

Array = np.ndarray[Any, np.dtype[Any]]
Chunk = Array | bytes
"""The rows of a chunk, or the bytes of its file."""


_ENTRY_NBYTES = 256
"""Of the objects around a file's bytes, which outweigh those of an empty picture."""


class ChunkCache(Forkable):
    """The most recently used chunks. Thread-safe; O(1), amortized.

    Args:
        limit: maximum size in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[int, tuple[Chunk, int]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.RLock()  # a signal handler may sample in the middle of a sample

    def get(self, chunk: int, position: int) -> Chunk | None:
        """Return a chunk if it is valid for `position`, the highest one requested from it."""
        with self._lock:
            found = self._kept.get(chunk)
            if found is None or position >= found[1]:
                return None
            self._kept.move_to_end(chunk)
            return found[0]

    def put(self, chunk: int, content: Chunk, head: int) -> None:
        """Store a chunk; `head` is from before it was read."""
        if _size(content) > self.limit:
            return
        with self._lock:
            before = self._kept.pop(chunk, None)
            if before is not None:
                self._nbytes -= _size(before[0])
                if before[1] > head:  # another thread read it later
                    content, head = before
            self._kept[chunk] = content, head
            self._nbytes += _size(content)
            if self._nbytes > self.limit:
                self._shrink()

    def _shrink(self) -> None:
        """Drop the oldest chunks, an eighth of all bytes at least: counted anew, since an interrupt leaves the count
        wrong."""
        nbytes = sum(_size(content) for content, _ in self._kept.values())
        while nbytes > self.limit - self.limit // 8:
            _, (oldest, _) = self._kept.popitem(last=False)
            nbytes -= _size(oldest)
        self._nbytes = nbytes

    def clear(self) -> None:
        """Drop all chunks."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0

    def reset_after_fork(self, renewed: Renew) -> None:
        """Replace the lock, which another thread may have held at the fork, and drop all chunks."""
        super().reset_after_fork(renewed)
        self._lock = threading.RLock()
        self._kept, self._nbytes = OrderedDict(), 0


def _size(content: Chunk) -> int:
    return _ENTRY_NBYTES + len(content) if isinstance(content, bytes) else content.nbytes
