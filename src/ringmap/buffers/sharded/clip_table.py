"""Where the clips of all rings are: one search for a draw, however many rings there are.

    ring 0: clips [0, 30)    ring 1: clips [30, 50)    ...        counts
    episodes of all rings    ends   12 30 | 41 50 | ...           clips up to each episode
                             shifts                               from the number of a clip to its id: ring number and
                             position

A draw of one number for each clip, over all rings, is in random order: no half of a batch comes from a ring of its own.
With `weights` a number for the ring is drawn first.
A draw that asked each ring took 18 us for each; the search takes 0.05 us a clip. What it costs is the joining of the
arrays, after a
commit in any ring: 0.1 us for 100 episodes.

Invariants: as of the moment when each ring was last counted; a clip that was evicted since is found by the look after
the copy. Not here: episodes in parts, whose clips their own ring draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.buffers.rings import Ring
from ringmap.buffers.sharded.numbers import joined
from ringmap.clips.cut import Cut
from ringmap.clips.draws import integers
from ringmap.storage.disk.calls import thread

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
        self._shifts: list[Array] = [empty] * len(rings)
        """From the number of a clip among those of its ring to its id, for each episode."""
        self._joined: tuple[Array, Array, list[int]] | None = None

    def follow(self, changes: Array) -> None:
        """Count the rings anew that changed; `changes`: how often each has. For a caller that holds the engine's
        lock."""
        if self._changes.tobytes() == changes.tobytes():
            return
        for place in (self._changes != changes).nonzero()[0].tolist():
            self._count(place)
            self._joined = None
        self._changes[:] = changes

    def _count(self, place: int) -> None:
        ring, cut = self.rings[place], self._cut
        source = ring.source
        with thread.searching, source.lock:
            live = source.live
            if cut.across or live.links is not None:
                self._ends[place] = None
                self.counts[place] = ring.reader.pin_here(cut).count
                return
            starts, counts = live.starts, cut.counts(live.lengths)
            if ring.reader.capacity is not None:
                starts, counts = _newest(starts, counts, ring.reader.capacity)
            firsts = joined(ring.number, starts + cut.before)
        ends = self._ends[place] = np.cumsum(counts)
        self._shifts[place] = firsts - (ends - counts)
        self.counts[place] = ends[-1] if len(ends) else 0

    def draw(self, size: int, shares: Array | None, rng: np.random.Generator) -> Array | None:
        """Return the ids of `size` clips, drawn apart from each other; None when there are none.

        Args:
            size: how many.
            shares: of each ring, not scaled; a ring without clips has none. None: every clip is equally likely.
            rng: the generator.
        """
        ends, shifts, alone = self._joined or self._join()
        numbers = self._numbers(size, ends, shares, rng)
        if numbers is None:
            return None
        ids: Array = shifts.take(ends.searchsorted(numbers, side="right"))
        ids += numbers
        if alone:
            lost = self._draw_alone(alone, numbers, ids, rng)
            if len(lost):
                again = self.draw(len(lost), shares, rng)
                if again is None:
                    return None
                ids[lost] = again
        return ids

    def _numbers(self, size: int, ends: Array, shares: Array | None, rng: np.random.Generator) -> Array | None:
        """Return numbers of clips, counted over all rings; None when there are none."""
        total = int(ends[-1]) if len(ends) else 0
        if not total:
            return None
        if shares is None:
            return integers(rng, 0, total, size)
        upto = (shares * (self.counts > 0)).cumsum()
        if not upto[-1]:
            return None
        rings = upto.searchsorted(rng.random(size) * upto[-1], side="right")
        counts = self.counts.take(rings)
        firsts = (self.counts.cumsum() - self.counts).take(rings)
        # A product is below its count even where it is rounded: see draws.py.
        numbers: Array = firsts + (rng.random(size) * counts).astype(np.int64)
        return numbers

    def _draw_alone(self, alone: list[int], numbers: Array, ids: Array, rng: np.random.Generator) -> Array:
        """Let the rings whose episodes are in parts draw their clips; return which found none: the ring was cleared
        meanwhile."""
        stops, lost = self.counts.cumsum(), list[Array]()
        for place in alone:
            stop = int(stops[place])
            mine = ((numbers < stop) & (numbers >= stop - self.counts[place])).nonzero()[0]
            if not len(mine):
                continue
            ring = self.rings[place]
            drawn = ring.reader.draw(len(mine), self._cut, rng)
            if drawn is None:
                self.counts[place], self._joined = 0, None  # the next look counts it again
                lost.append(mine)
            else:
                ids[mine] = joined(ring.number, drawn.positions)
        return np.concatenate(lost) if lost else np.empty(0, np.int64)

    def _join(self) -> tuple[Array, Array, list[int]]:
        """Put the arrays of the rings together; return them, and the places of the rings that draw by themselves."""
        ends, shifts, before = list[Array](), list[Array](), 0
        for own, shift, count in zip(self._ends, self._shifts, self.counts.tolist(), strict=True):
            if own is None:
                own, shift = np.array([count]), np.zeros(1, np.int64)
            ends.append(own + before)
            shifts.append(shift - before)
            before += count
        empty = [np.empty(0, np.int64)]
        alone = [place for place, own in enumerate(self._ends) if own is None]
        made = np.concatenate(ends or empty), np.concatenate(shifts or empty), alone
        self._joined = made
        return made


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
