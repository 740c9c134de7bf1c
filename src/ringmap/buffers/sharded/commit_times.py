"""The order of commits over many rings: which clips of all are the newest.

    ring 0    clips committed at   10  10  10  40  40            ids   0  1  2  3  4
    ring 1                             20  20      50 50               5  6      7  8
    by time                        10  10  10  20 20  40  40  50 50

A sampler that goes by age asks for the clip with so many newer ones. Only the newest clips of each ring are put in
order: as many as the oldest that is asked for has newer ones.

Invariants: the clips of one ring are in the order of its ids; clips of the same moment in that of their rings.
Not here: draws (engine.py), who gives a commit its time (storage/commit).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.clip_range import ClipRange
from ringmap.errors import CorruptError
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import is_live
from ringmap.storage.records.table import EPISODE

__all__ = ["Clips", "CommitTimes", "in_order"]

Array = np.ndarray[Any, np.dtype[Any]]


class CommitTimes:
    """When the steps of a ring were committed. 24 bytes for each episode.

    Args:
        source: the ring.
    """

    def __init__(self, source: Handle) -> None:
        self._source = source
        self._era: int | None = None
        self._upto = 0
        self._starts = self._stops = self._times = np.empty(0, np.int64)

    def __call__(self, starts: Array) -> Array:
        """Return the times of the commits of these episodes, or parts, by the positions of their first steps, in ns
        since 1970.

        For a caller that holds the ring's `lock`. O(episodes committed since), and a search for each.

        Raises:
            CorruptError: a record is damaged.
        """
        source = self._source
        if self._era != source.live.era:
            self._era, self._upto = source.live.era, 0
            self._starts = self._stops = self._times = np.empty(0, np.int64)
        first = max(source.first, self._upto + 1)
        if first <= source.seq:
            records, valid = source.table.read_range(first, source.seq)
            found = records[valid & (records["kind"] == EPISODE) & (records["length"] > 0)]
            self._upto = source.seq
            kept = int(self._starts.searchsorted(source.tail))
            self._starts = np.concatenate([self._starts[kept:], found["start"]])
            self._stops = np.concatenate([self._stops[kept:], found["start"] + found["length"]])
            self._times = np.concatenate([self._times[kept:], found["time"]])
        if not len(self._starts):
            return np.zeros(len(starts), np.int64)
        at = np.maximum(self._starts.searchsorted(starts, side="right") - 1, 0)
        others = self._stops.take(at) <= starts  # evicted meanwhile, or damaged
        if others.any() and is_live(source, int(starts[others].max())):
            raise CorruptError(
                f"{source.paths.table}: the record of the step at position {int(starts[others].max())} is damaged; run "
                "ringmap.check on the buffer"
            )
        return self._times.take(at)


class Clips(NamedTuple):
    """The clips of a ring, and when they were committed."""

    range: ClipRange
    times: CommitTimes


def in_order(ids: Array, rings: Sequence[Clips]) -> Array:
    """Return the ids, ring by ring, of clips that are given by ids in the order of their commits.

    Args:
        ids: in `[0, n)`, the newest highest; `n`: how many clips the rings have together.
        rings: their clips.

    Cost: O(episodes that hold the clips up to the oldest of these, on each ring), sorted.
    """
    counts = np.array([clips.count for clips, _ in rings], np.int64)
    ages = int(counts.sum()) - 1 - ids
    most = int(ages.max()) + 1 if len(ages) else 0
    times, sizes, lasts = list[Array](), list[Array](), list[Array]()
    for (clips, times_of), before in zip(rings, (np.cumsum(counts) - counts).tolist(), strict=True):
        low = max(clips.base, clips.end - most)
        with thread.searching, clips.lock:
            starts, ends = clips.index.episodes_from(low)
        times.append(times_of(starts))
        ends = np.clip(ends, low, clips.end)
        sizes.append(np.diff(ends, prepend=low))
        lasts.append(ends + (before - clips.base - 1))
    newest_first = np.concatenate(times).argsort(kind="stable")[::-1]
    size = np.concatenate(sizes)[newest_first]
    upto = size.cumsum()
    at = upto.searchsorted(ages, side="right")
    last = np.concatenate(lasts)[newest_first].take(at)
    found: Array = last - (ages - (upto.take(at) - size.take(at)))
    return found
