"""The guide table: the episode of every n-th clip number, as the start of a lookup.

    episodes      |e0 e0 e0 e0 e0|e1|e2 e2|e3 e3 e3|
    clip number    0     2     4     6     8    10
    table         e0    e0    e0    e2    e3    e3      (stride 2)

Only for many episodes: among few, a binary search of the ends is faster (index.py). A lookup starts at the entry at or
before its number and walks on, one episode at a time: a step or two, since entries are about as dense as episodes. A
binary search over the ends of 1,000,000 episodes misses the cache ten times for each clip after a batch of pixels
passed
through it: 190 us for 256 clips, where the table takes 45.

Invariants: entries never decrease; entry k is the episode of clip `k * stride`, or one that
was evicted before it.
Not here: the walk, and how many clips an episode has (index.py).
Cost: O(1) amortised for each new clip, vectorised; up to 8 bytes per episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.storage.ring.growing import GrowingArray
from ringmap.storage.ring.integers import Ordinal

__all__ = ["GuideTable"]

Array = np.ndarray[Any, np.dtype[Any]]


class GuideTable:
    """Entries for clip numbers from `number` on.

    Args:
        number: the first clip number that will be looked up.
        clips, episodes: their approximate numbers, for the stride: a power of two.
    """

    __slots__ = ("_entries", "_shift", "_stop")

    def __init__(self, number: int, clips: int, episodes: int) -> None:
        self._shift = (clips // max(1, episodes)).bit_length()
        self._stop = number >> self._shift
        self._entries: GrowingArray[Ordinal] = GrowingArray(np.empty(0, np.int64), self._stop)
        self._entries.reserve((clips >> self._shift) + 1, self._stop)

    def fit(self, base: int, episodes: int) -> bool:
        """Tell whether entries are neither much denser nor much sparser than episodes."""
        entries = self._stop - (base >> self._shift)
        return entries <= 4 * episodes + 64 and (episodes <= 4 * entries + 64 or not self._shift)

    def append(self, ordinal: int, end: int, base: int) -> None:
        """Add an episode whose last clip is number `end - 1`; entries before `base` may be dropped."""
        stop = -(-end >> self._shift)
        if stop - self._stop == 1:
            self._entries.append(ordinal, base >> self._shift)
        elif stop > self._stop:
            self._entries.extend(np.full(stop - self._stop, ordinal), base >> self._shift)
        self._stop = stop

    def extend(self, ordinal: int, ends: Array, base: int) -> None:
        """Add several episodes, numbered from `ordinal` on, as `append` does."""
        stops = -(-ends >> self._shift)
        counts = np.diff(stops, prepend=self._stop)
        ordinals = np.arange(ordinal, ordinal + len(ends))
        self._entries.extend(np.repeat(ordinals, counts), base >> self._shift)
        self._stop += int(counts.sum())

    def before(self, numbers: Array, base: int) -> Array:
        """Return for each clip number, none below `base`, the episode of the entry before it."""
        first = base >> self._shift
        entries = self._entries.span(first, self._stop)
        found: Array = entries.take((numbers >> self._shift) - first)
        return found
