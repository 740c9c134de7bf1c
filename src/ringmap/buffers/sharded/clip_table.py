"""Where clips are on many rings: one search for a draw, however many rings there are; and which of them are the newest.

    ring 0: clips [0, 30)    ring 1: clips [30, 50)    ...        a moment: what ids mean
    episodes of all rings    ends   12 30 | 41 50 | ...           clips up to each episode
                             shifts                               from the id of a clip to its name: ring number and
                                                                  position
    CommitTimes: by time     10  10  10  20 20  40  40  50 50     the newest clips of each ring, in order: as many as
                                                                  the oldest that is asked for has newer ones

    ClipTable   of all clips of a cut, or of those of a view; follows the rings   ---->   Moment, which never changes

A draw of one id for each clip, over all rings, is in random order: no half of a batch comes from a ring of its own.
With `weights` a number for the ring is drawn first.
A draw that asked each ring took 18 us for each; the search takes 0.05 us a clip. What it costs is the joining of the
arrays, after a commit in any ring: 0.1 us for 100 episodes.

Invariants: a moment is of the time when each ring was last counted; a clip that was evicted since is found by the look
after the copy; the clips of one ring are in the order of its ids, those of the same time in that of their rings.
Not here: episodes in parts, whose clips their own ring finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ringmap.buffers.rings import Ring, Rings, joined
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.draws import integers
from ringmap.clips.gather import GONE, Pinned
from ringmap.errors import CorruptError
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import is_live
from ringmap.storage.records.table import EPISODE
from ringmap.storage.ring.ring import ClipNumber, Position

__all__ = ["ClipTable", "Clips", "CommitTimes", "Moment", "in_order"]


Array = np.ndarray[Any, np.dtype[Any]]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Moment:
    """The clips of many rings at one moment: those of the ring `numbers[i]` have the ids up to `ends[i]`.

    `pinned`: on each ring, None where it is away; `ranges`: the same as samplers see them, None where nothing is drawn;
    of a moment of another process there are none.
    """

    numbers: list[int]
    pinned: list[Pinned | None]
    ends: Array
    ranges: list[ClipRange | None]

    base: ClassVar[int] = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def heads(self) -> dict[int, tuple[int, int]]:
        """Ring number -> head and number of clips: what other processes need to know of this moment."""
        each = zip(self.numbers, self.pinned, strict=True)
        return {number: (one.head, one.count) for number, one in each if one is not None}

    @property
    def is_outdated(self) -> bool:
        """Whether clips of a ring have other numbers now."""
        each = zip(self.ranges, self.pinned, strict=True)
        return any(c is not None and (p is None or c.index.numbering is not p.numbering) for c, p in each)

    def names_on(self, place: int, ids: Array) -> Array:
        """Return the names of clips of one ring by their ids among its own; GONE for one that was evicted or lost."""
        clips, pinned = self.ranges[place], self.pinned[place]
        if clips is None or pinned is None:
            return np.full(len(ids), GONE)
        with thread.searching, clips.lock:
            clips.follow()
            index, numbers = clips.index, ids + pinned.base
            if index.numbering is not pinned.numbering:  # other numbers, the same positions
                numbers += index.end_before(pinned.head) - pinned.end
            names, good = np.full(len(ids), GONE), (numbers >= clips.base) & (numbers < clips.end)
            found = index.positions(numbers[good], clips.before)
            names[good] = np.where(found < 0, GONE, joined(self.numbers[place], found))
        return names

    def windows(self) -> list[ClipRange]:
        """Return the clips ring by ring, as samplers see them; the ids of each ring follow those of the one before."""
        each = zip(self.ranges, self.pinned, strict=True)
        return [c.of_moment(p.base, p.end) for c, p in each if c is not None and p is not None]


class _Joined(NamedTuple):
    """The arrays of all rings, put together; `alone`: the places of the rings that find their clips by themselves."""

    ends: Array
    shifts: Array
    alone: list[int]


class ClipTable:
    """The clips of one cut on these rings. For callers that hold the lock of the rings.

    Args:
        rings: those that are open.
        range_of: returns the clips of a ring, None where there are none to draw.
    """

    def __init__(self, rings: tuple[Ring, ...], range_of: Callable[[Ring], ClipRange | None]) -> None:
        self.rings = rings
        self.counts = np.zeros(len(rings), np.int64)
        """Number of clips of each ring."""
        self._range_of = range_of
        self.changes = np.full(len(rings), -1, np.int64)
        """How often each had changed then."""
        self.ranges: list[ClipRange | None] = [None] * len(rings)
        """The clips of each, None where there are none to draw."""
        self._pinned: list[Pinned | None] = [None] * len(rings)
        self._pieces: list[tuple[Array, Array] | None] = [(_NONE, _NONE)] * len(rings)
        """Of each episode the end of its clips, and from the number of a clip to its name; None: the ring knows."""
        self._moment: Moment | None = None
        self._joined: _Joined | None = None

    def follow(self, rings: Rings) -> None:
        """Count the clips of those rings that changed since the last call."""
        changes = rings.changes
        if self.changes.tobytes() == changes.tobytes():
            return
        for place in (self.changes != changes).nonzero()[0].tolist():
            self._count(place)
        self.changes[:] = changes

    def _count(self, place: int) -> None:
        ring, self._moment, self._joined = self.rings[place], None, None
        clips = self.ranges[place] = self._range_of(ring)
        if clips is None:
            self._pinned[place] = Pinned(ClipNumber(0), ClipNumber(0), None, Position(0))
            self._pieces[place], self.counts[place] = (_NONE, _NONE), 0
            return
        with thread.searching, clips.lock:
            clips.follow()
            base, index = clips.base, clips.index
            self._pinned[place] = Pinned(base, clips.end, index.numbering, clips.head)
            pieces = None if index.is_joined else index.pieces(base)
        if pieces is not None:
            ends, shifts = pieces
            ends -= base
            shifts += base + clips.before
            pieces = ends, joined(ring.number, shifts)
        self._pieces[place], self.counts[place] = pieces, clips.count

    def moment(self) -> Moment:
        """Return the clips as they were counted last."""
        if self._moment is None:
            numbers = [ring.number for ring in self.rings]
            self._moment = Moment(numbers, self._pinned.copy(), self.counts.cumsum(), self.ranges.copy())
        return self._moment

    def draw(self, size: int, shares: Array | None, rng: np.random.Generator) -> Array | None:
        """Return the names of `size` clips, drawn apart from each other; None when there are none.

        Args:
            size: how many.
            shares: of each ring, not scaled; a ring without clips has none. None: every clip is equally likely.
            rng: the generator.
        """
        found = self._joined or self._join()
        ids = self._ids(size, found.ends, shares, rng)
        if ids is None:
            return None
        names: Array = found.shifts.take(found.ends.searchsorted(ids, side="right"))
        names += ids
        if found.alone:
            lost = self._draw_alone(found.alone, ids, names, rng)
            if len(lost):
                again = self.draw(len(lost), shares, rng)
                if again is None:
                    return None
                names[lost] = again
        return names

    def names(self, ids: Array) -> Array:
        """Return the names of clips by their ids in `moment()`; GONE for one that a ring in parts has lost."""
        found = self._joined or self._join()
        names: Array = found.shifts.take(found.ends.searchsorted(ids, side="right"))
        names += ids
        stops = self.counts.cumsum() if found.alone else _NONE
        for place in found.alone:
            mine = ((ids < stops[place]) & (ids >= stops[place] - self.counts[place])).nonzero()[0]
            if len(mine):
                first = int(stops[place] - self.counts[place])
                names[mine] = self.moment().names_on(place, ids[mine] - first)
        return names

    def _ids(self, size: int, ends: Array, shares: Array | None, rng: np.random.Generator) -> Array | None:
        """Return ids of clips, drawn over all rings; None when there are none."""
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
        ids: Array = firsts + (rng.random(size) * counts).astype(np.int64)
        return ids

    def _draw_alone(self, alone: list[int], ids: Array, names: Array, rng: np.random.Generator) -> Array:
        """Let rings with episodes in parts draw their clips; return which found none, since they were cleared."""
        stops, lost = self.counts.cumsum(), list[Array]()
        for place in alone:
            stop = int(stops[place])
            mine = ((ids < stop) & (ids >= stop - self.counts[place])).nonzero()[0]
            clips = self.ranges[place]
            if not len(mine) or clips is None:
                continue
            with thread.searching, clips.lock:
                clips.follow()
                drawn = clips.draw(len(mine), rng)
            if drawn is None:
                self.counts[place], self._joined, self._moment = 0, None, None  # the next look counts it again
                lost.append(mine)
            else:
                names[mine] = joined(self.rings[place].number, drawn)
        return np.concatenate(lost) if lost else _NONE

    def _join(self) -> _Joined:
        """Put the arrays of the rings together."""
        ends, shifts, before = [_NONE], [_NONE], 0
        for pieces, count in zip(self._pieces, self.counts.tolist(), strict=True):
            own, shift = (np.array([count]), np.zeros(1, np.int64)) if pieces is None else pieces
            ends.append(own + before)
            shifts.append(shift - before)
            before += count
        alone = [place for place, pieces in enumerate(self._pieces) if pieces is None]
        self._joined = found = _Joined(np.concatenate(ends), np.concatenate(shifts), alone)
        return found


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
