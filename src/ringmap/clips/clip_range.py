"""A clip range: the clips that exist at one moment, as a sampler sees them.

    ids        0 ........ count - 1        what a sampler returns
    numbers    base ..... end - 1          the same clips, for life
    positions  low ............ head - 1   of their anchors on the ring, for life, in every process

The anchor of a clip is its first step; that of a window is the step from which its offsets count.

Invariants: valid while `lock` is held, or while no thread writes.
Not here: which of them to draw (samplers/), reading them (gather.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ringmap.clips.draws import integers
from ringmap.clips.index import SpanIndex, counts
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.live import LiveEpisodes
from ringmap.storage.ring.ring import ClipNumber, Position

__all__ = ["ClipRange"]

Array = np.ndarray[Any, np.dtype[Any]]


class ClipRange:
    """The clips of one span at one moment: the numbers `[base, end)`.

    `index`: their numbers, up to date; `capacity`: the number of newest clips that count, None: all; `has_episodes`:
    whether what is stored are episodes of an environment, not groups of rows; `before`: steps of a clip before its
    anchor.
    """

    __slots__ = ("base", "before", "capacity", "end", "has_episodes", "index", "source")

    base: ClipNumber
    end: ClipNumber

    def __init__(
        self,
        source: Handle,
        index: SpanIndex,
        capacity: int | None = None,
        has_episodes: bool = True,
        before: int = 0,
    ) -> None:
        self.source, self.index, self.before = source, index, before
        self.capacity, self.has_episodes = capacity, has_episodes
        self.follow()

    def follow(self) -> None:
        """Move to the clips that exist now. For a caller that holds `lock`: episodes may have come or gone before it
        did."""
        index = self.index
        index.follow()
        self.base, self.end = index.base, index.end
        if self.capacity is not None:
            self.base = ClipNumber(max(self.base, self.end - self.capacity))

    def of_moment(self, base: ClipNumber, end: ClipNumber) -> ClipRange:
        """Return the clips `[base, end)` of the same index."""
        made = ClipRange.__new__(ClipRange)
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        made.base, made.end = base, end
        return made

    @property
    def count(self) -> int:
        """Number of clips: ids are in `[0, count)`."""
        return self.end - self.base

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while ids are computed, so that no clip is evicted meanwhile."""
        return self.source.lock

    @property
    def anchors(self) -> tuple[Any, ...]:
        """What decides which steps are anchors: clip ranges with equal values have the same ones, at the same
        moment."""
        index = self.index
        return self.before, index.span, index.least, index.across, index.live

    @property
    def live(self) -> LiveEpisodes:
        """Starts and lengths of the episodes."""
        return self.index.live

    @property
    def head(self) -> Position:
        """One past the newest position."""
        return self.source.head

    @property
    def low(self) -> Position:
        """The position of the oldest clip that counts; the head when there is none."""
        if self.end == self.base:
            return self.source.head
        if self.index.shift is not None:
            return Position(self.base + self.index.shift)
        if self.index.is_joined:  # the first number may be that of a lost clip, or not the lowest position
            return self.live.start(self.live.first)
        return Position(int(self.index.positions(np.array([self.base]))[0]) + self.before)

    def end_before(self, head: Position) -> ClipNumber:
        """Return one past the number of the last clip whose episode starts before position `head`."""
        return self.index.end_before(head)

    def draw(self, count: int, rng: np.random.Generator) -> Array | None:
        """Return the positions of the anchors of `count` clips drawn uniformly, None if there are none."""
        if not self.count:
            return None
        drawn = self.index.drawn(integers(rng, self.base, self.end, count), self.before, rng)
        return None if drawn is None else drawn.positions

    def positions(self, ids: Array) -> Array:
        """Return the positions of the anchors of these clips, -1 for one that lost its first steps. O(B log
        episodes)."""
        return self.index.positions(ids + self.base, self.before)

    def ids(self, positions: Array) -> Array:
        """Return the ids of the clips with these anchors. O(B log episodes)."""
        return self.index.numbers(positions, self.before) - self.base

    def late(self, position: int) -> Array:
        """Return the anchors before a position whose clips end after it: steps of a chain that goes on there. O(clips
        after it)."""
        if not self.index.is_joined:
            return np.empty(0, np.int64)
        first = max(self.base, self.end_before(Position(position)))
        anchors = self.index.positions(np.arange(first, self.end), self.before)
        return anchors[(anchors >= 0) & (anchors < position)]

    def in_episodes(self, lengths: Array) -> Array:
        """Return the number of clips in episodes of these lengths, int64."""
        return counts(lengths, self.index.span, self.index.least)

    def starts(self, first: int, last: int) -> Array:
        """Tell for each position in `[first, last)` whether it is an anchor. O(last - first + episodes there)."""
        live, span = self.live, self.index.span
        if self.index.is_joined:
            return self.index.are(np.arange(first, last), self.before)
        starts, lengths = live.starts, live.lengths
        # Rows damaged by a power cut may lie after the newest episode.
        if span == 1 and not self.index.least and live.is_dense and last <= starts[-1] + lengths[-1]:
            return np.ones(last - first, np.bool_)
        from_ = max(0, int(starts.searchsorted(first, side="right")) - 1)
        upto = int(starts.searchsorted(last))
        begins = starts[from_:upto] + self.before
        stops = begins + self.in_episodes(lengths[from_:upto])
        change = np.zeros(last - first + 1, np.int64)
        np.add.at(change, np.clip(begins - first, 0, last - first), 1)
        np.add.at(change, np.clip(stops - first, 0, last - first), -1)
        found: Array = change[:-1].cumsum() > 0
        return found
