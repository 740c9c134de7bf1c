"""The live episodes in memory: the start and the length of each.

Ordinals count episodes from the first one that this process has seen and never
wrap, so that an eviction only moves `first` and nothing is renumbered:

      first            last
        v               v
    [..|e7  e8  e9  e10|  free  ]     starts[o - offset], lengths[o - offset]

Invariants: first <= last; starts never decrease; lengths are positive; `stop` is where the newest episode ends; `era`
changes whenever ordinals are assigned again (a recovery, a reader that starts over), never otherwise.
A part of a chain has an ordinal as an episode has one; `whole` joins them.
Not here: clips, files, rows. 20 bytes per episode, plus growth slack.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.storage.ring.arrays import GrowingArray, lowest
from ringmap.storage.ring.links import NO_PART, NONE, Links, Part, Parts, WholeEpisodes
from ringmap.storage.ring.ring import Ordinal, Position

__all__ = ["LiveEpisodes"]

Array = np.ndarray[Any, np.dtype[Any]]

_WALK = 512
"""Parts that are joined in the time that a walk takes longer than a search among joined ones."""


class LiveEpisodes:
    """Starts (positions of first steps) and lengths in steps of the live episodes, oldest first.

    `era`: how often ordinals were assigned again: a follower that sees it change starts over; `parts`: what they are
    parts of; None if none is a part; `origins`: their ordinals in the ring, as of `origins_of`; None for zeros.
    """

    __slots__ = (
        "_lengths",
        "_origins",
        "_overlap",
        "_runs",
        "_starts",
        "_walks",
        "_whole",
        "era",
        "first",
        "last",
        "links",
        "num_steps",
        "stop",
    )

    def __init__(
        self, starts: Array, lengths: Array, era: int = 0, parts: Parts | None = None, origins: Array | None = None
    ) -> None:
        self.era = era - 1
        self.clear()
        self.extend(starts, lengths, parts, origins)
        self._overlap = bool((starts[1:] < (starts + lengths)[:-1]).any())

    def clear(self) -> None:
        """Start over without episodes: ordinals are assigned again."""
        self.era += 1
        self._starts: GrowingArray[Position] = GrowingArray(np.empty(0, np.int64))
        self._lengths: GrowingArray[int] = GrowingArray(np.empty(0, np.int32))
        self._origins: GrowingArray[int] = GrowingArray(np.empty(0, np.int64))
        self.first = self.last = Ordinal(0)
        self.num_steps = self.stop = 0
        """One past the newest position of an episode; meaningless if there is none."""
        self._overlap = False
        self.links: Links | None = None
        """What is known of parts; None while there is none."""
        self._whole: tuple[tuple[int, ...], WholeEpisodes] | None = None
        self._runs: tuple[WholeEpisodes, WholeEpisodes] | None = None
        self._walks: tuple[tuple[int, ...], int] = (), 0
        """The state at the last walk, and how many there were in it."""

    @classmethod
    def from_lengths(cls, lengths: Array) -> LiveEpisodes:
        """Place episodes end to end from position 0, as a dataset on disk does."""
        sizes = np.asarray(lengths, np.int64)
        return cls(np.cumsum(sizes) - sizes, sizes)

    def __len__(self) -> int:
        return self.last - self.first

    def append(self, start: Position, length: int, origin: int = 0, part: Part = NO_PART) -> None:
        """Add the newest episode, or the newest part of a chain. O(1) amortised."""
        first, last = self.first, Ordinal(self.last + 1)
        self._starts.append(start, first)
        self._lengths.append(length, first)
        self._origins.append(origin, first)
        if part[0] != NONE or self.links is not None:
            self._linked().append(part, self._starts.span(first, last), self._lengths.span(first, last), first)
        self.last = last
        self.num_steps += length
        self.stop = start + length

    def grow(self, length: int) -> None:
        """Let the newest episode have this many steps, at least as many as before. O(1)."""
        more = self._lengths.change(self.last - 1, length)
        self.num_steps += more
        self.stop += more

    def extend(self, starts: Array, lengths: Array, parts: Parts | None = None, origins: Array | None = None) -> None:
        """Add several newest episodes at once; `parts` is None if none of them is a part."""
        count = len(starts)
        first, last = self.first, Ordinal(self.last + count)
        self._starts.extend(starts, first)
        self._lengths.extend(lengths, first)
        self._origins.extend(np.zeros(count, np.int64) if origins is None else origins, first)
        if parts is not None or self.links is not None:
            every = self._starts.span(first, last), self._lengths.span(first, last)
            self._linked().extend(parts or Parts.none(count), *every, first)
        self.last = last
        self.num_steps += int(np.sum(lengths, dtype=np.int64))
        if count:
            self.stop = int(starts[-1]) + int(lengths[-1])

    def _linked(self) -> Links:
        """Return what is known of parts, to which the live episodes were added."""
        if self.links is None:
            self.links = Links(self.first, self.last)
        return self.links

    def evict_before(self, tail: Position) -> None:
        """Drop every episode that starts before position `tail`. O(evicted)."""
        while self.first < self.last and self._starts.at(self.first) < tail:
            self.num_steps -= self._lengths.at(self.first)
            if self.links is not None:
                self.links.evict(self.first)
                if not self.links.num_parts:
                    self.links = None
            self.first = Ordinal(self.first + 1)

    def end(self, chain: int, seq: int) -> None:
        """Note that a chain has ended, with record `seq`."""
        if self.links is not None:
            self.links.end(chain, seq, self.first, self.last)
            self._whole = None

    @property
    def whole(self) -> WholeEpisodes:
        """The live episodes with their parts joined. O(episodes log episodes) after a change, else O(1)."""
        key = self._state
        if self._whole is None or self._whole[0] != key:
            links = self.links
            parts = None if links is None else links.of(self.first, self.last)
            ended = dict[int, int]() if links is None else links.ended
            self._whole = key, WholeEpisodes(self.starts, self.lengths, parts, ended)
        return self._whole[1]

    @property
    def _state(self) -> tuple[int, ...]:
        return self.era, self.first, self.last, self.num_steps

    @property
    def runs(self) -> WholeEpisodes:
        """The live episodes with those of a lane joined; see `WholeEpisodes.by_lane`. O(episodes log episodes) after a
        change."""
        whole = self.whole
        if self._runs is None or self._runs[0] is not whole:
            self._runs = whole, whole.by_lane()
        return self._runs[1]

    @property
    def num_episodes(self) -> int:
        """Number of episodes, parts joined."""
        return len(self) if self.links is None else len(self.whole)

    @property
    def names(self) -> Array:
        """Positions of the first steps of the episodes, int64, parts joined; without parts a view, valid until the next
        append."""
        return self.starts if self.links is None else self.whole.names

    @property
    def whole_lengths(self) -> Array:
        """Lengths of the episodes in steps, int32, parts joined; without parts a view, valid until the next append."""
        return self.lengths if self.links is None else self.whole.lengths.astype(np.int32)

    def along(self, indices: Array, steps: Array) -> tuple[Array, Array]:
        """Return the positions `(n, m)` of steps of parts, of those that they follow, and that follow them; and for
        which parts all steps are stored: the positions of others mean nothing.

        `indices`: of the parts among the live ones, `(n,)`; `steps`: counted from the first step of each, `(n, m)`;
        they rise in each row.

        Cost: what is asked once after each change, O(steps, for each part on the way); what is asked often in between,
        no more than a search.
        """
        state, count = self._walks
        count = count + 1 if state == self._state else 1
        if (self._whole is not None and self._whole[0] == self._state) or count * _WALK >= len(self):
            return self.whole.along(indices, steps)
        self._walks = self._state, count
        return self._walk(indices, steps)

    def _walk(self, indices: Array, steps: Array) -> tuple[Array, Array]:
        """Do what `along` does, from part to part."""
        starts, lengths = self.starts, self.lengths
        positions: Array = starts.take(indices)[:, None] + steps
        good = np.ones(len(indices), np.bool_)
        oldest, newest = steps[:, 0], steps[:, -1]
        for is_before in (True, False):
            which = (oldest < 0 if is_before else newest >= lengths.take(indices)).nonzero()[0]
            at, begin = indices.take(which), np.zeros(len(which), np.int64)
            while len(which):  # `begin`: where part `at` begins, counted as the steps are
                stop = begin + lengths.take(at)
                at = self._beside(at, is_before)
                if lowest(at) < 0:
                    good[which[at < 0]] = False
                    kept = (at >= 0).nonzero()[0]
                    which, at, begin, stop = which[kept], at[kept], begin[kept], stop[kept]
                bound = begin if is_before else stop
                begin = bound - lengths.take(at) if is_before else bound
                some = steps.take(which, 0)
                is_there = some < bound[:, None] if is_before else some >= bound[:, None]
                moved = some + (starts.take(at) - begin)[:, None]
                positions[which] = np.where(is_there, moved, positions.take(which, 0))
                if is_before:
                    more = (oldest.take(which) < begin).nonzero()[0]
                else:
                    more = (newest.take(which) >= begin + lengths.take(at)).nonzero()[0]
                which, at, begin = which.take(more), at.take(more), begin.take(more)
        return positions, good

    def _beside(self, indices: Array, is_before: bool) -> Array:
        """Return the indices of the parts that parts follow, or that follow them; a negative number for none that is
        live."""
        if self.links is None:
            return np.full(len(indices), NONE)
        return self.links.beside(indices + self.first, is_before) - self.first

    def tail_for(self, head: int, limit: int) -> Position:
        """Return the smallest episode boundary so that at most `limit` steps lie in `[tail, head)`.

        `head` may be beyond the last episode: future steps count. O(evicted episodes).
        """
        ordinal: int = self.first
        while ordinal < self.last:
            start = self._starts.at(ordinal)
            if head - start <= limit:
                return start
            ordinal += 1
        return Position(-1)

    @property
    def newest(self) -> Ordinal:
        """The ordinal of the newest episode; there must be one."""
        return Ordinal(self.last - 1)

    @property
    def is_dense(self) -> bool:
        """Whether the episodes lie end to end: none was dropped between them, and none is there twice, as in a view."""
        if self._overlap:
            return False
        return self.first < self.last and self.stop - self._starts.at(self.first) == self.num_steps

    def ordinal_from(self, position: Position) -> Ordinal:
        """Return the ordinal of the first episode that starts at or after a position; `last` if there is none."""
        return Ordinal(self.first + int(self.starts.searchsorted(position)))

    def has(self, positions: Array, counts: Array | int = 1) -> Array:
        """Tell of each position whether a step of a live episode is there, and so many of it from there on.
        O(positions log episodes)."""
        if not len(self):
            return np.zeros(positions.shape, np.bool_)
        _, steps, lengths = self.locate(positions)
        found: Array = (steps >= 0) & (steps + counts <= lengths)
        return found

    def is_inside(self, position: Position) -> bool:
        """Tell whether a position is that of a step of a live episode, and not of the first one. O(log episodes)."""
        starts = self.starts
        at = int(starts.searchsorted(position)) - 1
        if at < 0 or (at + 1 < len(starts) and starts[at + 1] == position):
            return False
        return bool(position < starts[at] + self.lengths[at])

    def locate(self, positions: Array) -> tuple[Array, Array, Array]:
        """Return the index among the live episodes of that in which each position lies, the step there, and its length.
        O(positions log episodes).

        There must be an episode. The step of a position in none is negative, or not below the length.
        """
        starts = self.starts
        index = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
        return index, positions - starts.take(index), self.lengths.take(index)

    def start(self, ordinal: Ordinal) -> Position:
        """Return the position of the first step of the episode with this ordinal."""
        return self._starts.at(ordinal)

    def length(self, ordinal: Ordinal) -> int:
        """Return the number of steps of the episode with this ordinal."""
        return self._lengths.at(ordinal)

    @property
    def starts(self) -> Array:
        """Absolute start positions, int64, oldest first: a view, valid until the next append."""
        return self._starts.span(self.first, self.last)

    @property
    def lengths(self) -> Array:
        """Lengths in steps, int32, oldest first: a view, valid until the next append."""
        return self._lengths.span(self.first, self.last)

    @property
    def origins(self) -> Array:
        """Ordinals in the ring, int64, as `origins_of` returns them, oldest first: a view, valid until the next
        append."""
        return self._origins.span(self.first, self.last)

    def lengths_since(self, ordinal: int) -> Array:
        """Return the lengths of the episodes from this ordinal on."""
        return self._lengths.span(ordinal, self.last)

    def stops_between(self, first: int, last: int) -> Array:
        """Return where the episodes of the ordinals `[first, last)` end, int64. O(last - first)."""
        stops: Array = self._starts.span(first, last) + self._lengths.span(first, last)
        return stops
