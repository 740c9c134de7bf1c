"""The live episodes in memory: the start and the length of each.

Ordinals count episodes from the first one that this process has seen and never
wrap, so that an eviction only moves `first` and nothing is renumbered:

      first            last
        v               v
    [..|e7  e8  e9  e10|  free  ]     starts[o - offset], lengths[o - offset]

Invariants: first <= last; starts never decrease; lengths are positive; `era`
changes whenever ordinals are assigned again (a recovery, a reader that starts over), never otherwise.
Not here: clips, files, rows. 12 bytes per episode, plus growth slack.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np

from ringmap.storage.ring.integers import Ordinal, Position

__all__ = ["GrowingArray", "LiveEpisodes"]

Array = np.ndarray[Any, np.dtype[Any]]
N = TypeVar("N", bound=int)


class GrowingArray(Generic[N]):
    """A NumPy array that grows at one end and drops values at the other.

    Append and drop are O(1) amortised; a slice is a view. A list of Python
    integers would cost 8 times the memory and could not be searched in bulk.
    """

    __slots__ = ("_data", "_offset", "_stop")

    def __init__(self, values: Array, first: int = 0) -> None:
        self._data = values
        self._offset = first
        self._stop = first + len(values)

    def append(self, value: int, first: int) -> None:
        """Add `value` at the end; values before ordinal `first` may be dropped. O(1) amortised."""
        used = self._stop - self._offset
        if used == len(self._data):
            self.reserve(1, first)
            used = self._stop - self._offset
        self._data[used] = value
        self._stop += 1

    def extend(self, values: Array, first: int) -> None:
        """Add all `values` at the end, as `append` does. O(len(values)) amortised."""
        count = len(values)
        self.reserve(count, first)
        used = self._stop - self._offset
        self._data[used : used + count] = values
        self._stop += count

    def reserve(self, count: int, first: int) -> None:
        """Reserve memory for `count` values, so that they can be added in parts without a copy. O(1) amortised."""
        used = self._stop - self._offset
        if used + count > len(self._data):
            kept = self._data[first - self._offset : used]
            size = len(kept) + count
            fresh = np.empty(size + max(size // 8, 64), self._data.dtype)
            fresh[: len(kept)] = kept
            self._data, self._offset = fresh, first

    def put(self, ordinal: int, value: int) -> None:
        """Replace one value. O(1)."""
        self._data[ordinal - self._offset] = value

    def change(self, ordinal: int, value: int) -> int:
        """Replace one value; return by how much it is greater. O(1)."""
        at = ordinal - self._offset
        before: int = self._data.item(at)
        self._data[at] = value
        return value - before

    def span(self, first: int, last: int) -> Array:
        """Return the values of ordinals `[first, last)`: a view, valid until the next append."""
        return self._data[first - self._offset : last - self._offset]

    def at(self, ordinal: int) -> N:
        """Return one value. O(1)."""
        return self._data.item(ordinal - self._offset)  # type: ignore[no-any-return]


class LiveEpisodes:
    """Starts and lengths of the live episodes, oldest first.

    Args:
        starts: absolute position of the first step of each episode, int64.
        lengths: steps of each episode.
        era: how often this process had assigned ordinals again; a follower that sees it change starts over.
    """

    __slots__ = ("_lengths", "_starts", "era", "first", "last", "num_steps")

    def __init__(self, starts: Array, lengths: Array, era: int = 0) -> None:
        self.era = era
        self._set(starts, lengths)

    def _set(self, starts: Array, lengths: Array) -> None:
        self._starts: GrowingArray[Position] = GrowingArray(np.array(starts, np.int64))
        self._lengths: GrowingArray[int] = GrowingArray(np.array(lengths, np.int32))
        self.first = Ordinal(0)
        self.last = Ordinal(len(starts))
        self.num_steps = int(np.sum(lengths, dtype=np.int64))

    def reset(self, starts: Array, lengths: Array) -> None:
        """Start over with these episodes: ordinals are assigned again."""
        self.era += 1
        self._set(starts, lengths)

    @classmethod
    def from_lengths(cls, lengths: Array) -> LiveEpisodes:
        """Place episodes end to end from position 0, as a dataset on disk does."""
        sizes = np.asarray(lengths, np.int64)
        return cls(np.cumsum(sizes) - sizes, sizes)

    def __len__(self) -> int:
        return self.last - self.first

    def append(self, start: Position, length: int) -> None:
        """Add the newest episode. O(1) amortised."""
        self._starts.append(start, self.first)
        self._lengths.append(length, self.first)
        self.last = Ordinal(self.last + 1)
        self.num_steps += length

    def grow(self, length: int) -> None:
        """Let the newest episode have this many steps, at least as many as before. O(1)."""
        self.num_steps += self._lengths.change(self.last - 1, length)

    def extend(self, starts: Array, lengths: Array) -> None:
        """Add several newest episodes at once."""
        self._starts.extend(starts, self.first)
        self._lengths.extend(lengths, self.first)
        self.last = Ordinal(self.last + len(starts))
        self.num_steps += int(np.sum(lengths, dtype=np.int64))

    def evict_before(self, tail: Position) -> None:
        """Drop every episode that starts before position `tail`. O(evicted)."""
        while self.first < self.last and self._starts.at(self.first) < tail:
            self.num_steps -= self._lengths.at(self.first)
            self.first = Ordinal(self.first + 1)

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
        """Whether the episodes lie end to end: none was dropped between them."""
        if self.first == self.last:
            return False
        newest = self.newest
        stop = self._starts.at(newest) + self._lengths.at(newest)
        return stop - self._starts.at(self.first) == self.num_steps

    def ordinal_from(self, position: Position) -> Ordinal:
        """Return the ordinal of the first episode that starts at or after a position; `last` if there is none."""
        return Ordinal(self.first + int(self.starts.searchsorted(position)))

    def has(self, positions: Array) -> Array:
        """Tell of each position whether a step of a live episode is there. O(positions log episodes)."""
        if not len(self):
            return np.zeros(positions.shape, np.bool_)
        # Before the first episode the index is -1, the last one, which has no such position either.
        episodes = self.starts.searchsorted(positions, side="right") - 1
        steps = positions - self.starts.take(episodes)
        found: Array = (steps >= 0) & (steps < self.lengths.take(episodes))
        return found

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

    def lengths_since(self, ordinal: int) -> Array:
        """Return the lengths of the episodes from this ordinal on."""
        return self._lengths.span(ordinal, self.last)

    def starts_of(self, ordinals: Array) -> Array:
        """Return the start positions of these ordinals. O(len(ordinals))."""
        starts: Array = self.starts.take(ordinals - self.first)
        return starts
