"""Where the clips of all rings are: one search for a draw, however many rings there are.

    ring 0: clips [0, 30)    ring 1: clips [30, 50)    ...        counts, ends of rings
    episodes of all rings    ends 12 30 | 41 50 | ...             clips up to each episode
                             first ids of their first clips       ring number and position

A draw that asked each ring took 18 us for each; the search takes 0.2 us a clip. What it costs is the joining of the arrays, after a
commit in any ring: 0.1 us for 100 episodes.

Invariants: as of the moment when each ring was last counted; a clip that was evicted since is found by the look after the copy.
Not here: episodes in parts, whose clips their own ring draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.buffers.sharded.numbers import joined
from ringmap.buffers.sharded.rings import Ring
from ringmap.clips.cut import Cut

__all__ = ["ClipTable"]

Array = np.ndarray[Any, np.dtype[Any]]


class ClipTable:
    """The clips of one cut on these rings.

    Args:
        rings: the open rings.
        cut: of the clips.
    """

    def __init__(self, rings: tuple[Ring, ...], cut: Cut) -> None:
        self.rings = rings
        self.counts = np.zeros(len(rings), np.int64)
        """Number of clips of each ring."""
        self._cut = cut
        self._changes = np.full(len(rings), -1, np.int64)
        empty = np.empty(0, np.int64)
        self._ends: list[Array | None] = [empty] * len(rings)
        self._firsts: list[Array] = [empty] * len(rings)
        self._joined: tuple[Array, Array, Array] | None = None

    def follow(self, changes: Array) -> None:
        """Count the rings anew that changed; `changes`: how often each has. For a caller that holds the engine's lock."""
        for place in (self._changes != changes).nonzero()[0].tolist():
            self._count(place)
            self._joined = None
        self._changes[:] = changes

    def _count(self, place: int) -> None:
        ring, cut = self.rings[place], self._cut
        source = ring.source
        with source.memory:
            live = source.live
            if cut.across or live.chains is not None:
                self._ends[place] = None
                self.counts[place] = ring.reader.pin(cut).count
                return
            starts, counts = live.starts, cut.counts(live.lengths)
            if ring.reader.capacity is not None:
                starts, counts = _newest(starts, counts, ring.reader.capacity)
            self._firsts[place] = joined(ring.number, starts + cut.before)
        ends = self._ends[place] = np.cumsum(counts)
        self.counts[place] = ends[-1] if len(ends) else 0

    def find(self, picks: Array, rng: np.random.Generator) -> list[tuple[int, Array | None]]:
        """Return `picks[i]` clips of ring i drawn uniformly, as ids: pairs of the first ring's place and ids.

        A ring that has to be asked comes as a pair of its place and None.
        """
        alone = [place for place in picks.nonzero()[0].tolist() if self._ends[place] is None]
        found: list[tuple[int, Array | None]] = [(place, None) for place in alone]
        if alone:
            picks = picks.copy()
            picks[alone] = 0
        if not picks.any():
            return found
        if self._joined is None:
            known = [e if e is not None else np.empty(0, np.int64) for e in self._ends]
            sizes = np.array([e[-1] if len(e) else 0 for e in known], np.int64)
            before = np.cumsum(sizes) - sizes
            ends = np.concatenate([e + b for e, b in zip(known, before.tolist(), strict=True)])
            firsts = np.concatenate(
                [
                    f if e is not None else f[:0]
                    for f, e in zip(self._firsts, self._ends, strict=True)
                ]
            )
            self._joined = ends, firsts, before
        ends, firsts, before = self._joined
        rings = np.repeat(np.arange(len(picks)), picks)
        numbers = before[rings] + rng.integers(0, self.counts[rings])
        episodes = ends.searchsorted(numbers, side="right")
        starts = np.where(episodes > 0, ends[episodes - 1], 0)
        found.append((int(rings[0]), firsts[episodes] + (numbers - starts)))
        return found


def _newest(starts: Array, counts: Array, most: int) -> tuple[Array, Array]:
    """Leave out the oldest clips, so that at most so many are left: of a ring of rows only the newest count.

    Example:
        >>> [v.tolist() for v in _newest(np.array([10, 20, 30]), np.array([5, 5, 5]), 7)]
        [[23, 30], [2, 5]]
    """
    ends = counts.cumsum()
    over = int(ends[-1]) - most if len(ends) else 0
    if over <= 0:
        return starts, counts
    first = int(ends.searchsorted(over, side="right"))
    starts, counts = starts[first:].copy(), counts[first:].copy()
    left = int(ends[first]) - over
    starts[0] += counts[0] - left
    counts[0] = left
    return starts, counts
