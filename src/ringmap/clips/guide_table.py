"""GuideTable: at every so many clip numbers, the episode that holds the clip of that number.

    episodes      |e0 e0 e0 e0 e0|e1|e2 e2|e3 e3 e3|
    clip number    0     2     4     6     8    10
    signposts     e0    e0    e0    e2    e3    e3      (stride 2)

A lookup starts at the post at or before its number and walks on, an episode at a time: a step
or two, since posts are made about as dense as episodes are. A binary search over the ends
of 1,000,000 episodes misses the cache ten times for each clip after a batch of pixels went
through it: 190 us for 256 clips, where this takes 45.

Invariants: posts never decrease; `posts[k]` is the episode of clip `k * stride`, or one that
was evicted before it.
Not here: the walk, and how many clips an episode has (index.py).
Cost: O(1) amortised for each clip that comes, vectorised; up to 8 bytes per episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.storage.ring.integers import Ordinal
from ringmap.storage.ring.live import GrowingArray

__all__ = ["GuideTable"]

Array = np.ndarray[Any, np.dtype[Any]]


class GuideTable:
    """Posts for clip numbers from `number` on.

    Args:
        number: the first clip number that will be looked up.
        clips, episodes: how many there are about, for the stride: a power of two.
    """

    __slots__ = ("_posts", "_shift", "_stop")

    def __init__(self, number: int, clips: int, episodes: int) -> None:
        self._shift = (clips // max(1, episodes)).bit_length()
        self._stop = number >> self._shift
        self._posts: GrowingArray[Ordinal] = GrowingArray(np.empty(0, np.int64), self._stop)
        self._posts.reserve((clips >> self._shift) + 1, self._stop)

    def fit(self, base: int, episodes: int) -> bool:
        """Tell whether posts are neither much denser nor much sparser than episodes."""
        posts = self._stop - (base >> self._shift)
        return posts <= 4 * episodes + 64 and (episodes <= 4 * posts + 64 or not self._shift)

    def append(self, ordinal: int, end: int, base: int) -> None:
        """Add an episode whose last clip is number `end - 1`; what lies before `base` may be forgotten."""
        stop = -(-end >> self._shift)
        if stop - self._stop == 1:
            self._posts.append(ordinal, base >> self._shift)
        elif stop > self._stop:
            self._posts.extend(np.full(stop - self._stop, ordinal), base >> self._shift)
        self._stop = stop

    def extend(self, ordinal: int, ends: Array, base: int) -> None:
        """Add several, numbered from `ordinal` on, as `append` does."""
        stops = -(-ends >> self._shift)
        counts = np.diff(stops, prepend=self._stop)
        ordinals = np.arange(ordinal, ordinal + len(ends))
        self._posts.extend(np.repeat(ordinals, counts), base >> self._shift)
        self._stop += int(counts.sum())

    def before(self, numbers: Array, base: int) -> Array:
        """Return for each clip number, none below `base`, the episode at the post before it."""
        first = base >> self._shift
        posts = self._posts.span(first, self._stop)
        found: Array = posts.take((numbers >> self._shift) - first)
        return found
