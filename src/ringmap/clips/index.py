"""The clip index: maps flat clip ids to episodes and first steps, in integers only.

An episode of L steps holds max(0, L - span + 1) clips. `ends[o]` counts the clips
of all episodes up to ordinal o, evicted ones included, so that an eviction moves
`base` and changes nothing else, and a clip keeps its number for life:

    number = base + id        base = clips evicted so far (of this span)

Numbers are assigned again, from 0 on, when an era ends, when an update was interrupted, and when the index of a span
that was dropped is built again. `numbering` is another object then; positions keep their meaning.

A lookup searches the ends of few episodes; of many it starts at an entry of the guide, and walks to the first episode
whose end is beyond the number. From there it is one addition: the first steps of the clips of an episode follow one
another as their numbers do.

    position of the first step == number + shifts[o]       shifts[o] == start of o + L[o] - (span - 1) - ends[o]

A long episode may be stored in parts (storage/ring/links.py). A clip belongs to the part that holds its last step, so
a part that is added adds numbers at the end only, as if all parts before it were live:

    ends[o] - ends[o - 1] == clips(step + L) - clips(step)         step = steps of the chain before part o
    last step of a clip   == stop of o - (ends[o] - number)

So a clip whose first step would lie before its part begins in an earlier one: its steps are looked up one by one
(draws.py). A clip that begins in an earlier part is lost with that part, although the part that it belongs to stays. So
are all clips of a chain that is now shorter than a clip's episode must be. Their numbers stay, and have no position: of
such numbers there are at most span - 1, or twice as many as an episode must have steps, for each chain that has lost a
part.

Invariants: ends never decrease; ends[o] - ends[o - 1] == max(0, L[o] - span + 1) for an episode that is not a part;
0 <= base <= ends[last - 1]; no lookup walks more than a few steps.
Not here: positions on a ring, rows, files.
Cost: an append or an evict is O(1) amortised, for each span in use; a lookup of n
ids is O(n log episodes) at worst and O(n) as a rule, vectorised. 24 bytes per episode
and span in use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, overload

import numpy as np

from ringmap.clips.draws import ANCHOR_ONLY, NO_CROSSING, Around, Crossing, Drawn, integers
from ringmap.errors import ClipIndexError, SubscriptError
from ringmap.storage.ring.arrays import GrowingArray
from ringmap.storage.ring.links import NONE, WholeEpisodes
from ringmap.storage.ring.live import LiveEpisodes
from ringmap.storage.ring.ring import ClipNumber, Ordinal, Position

__all__ = ["ClipIndex", "ClipPairs", "SpanIndex", "counts"]

Array = np.ndarray[Any, np.dtype[Any]]

_MAX_SPANS = 16
"""Number of spans updated together: for one more, the one that was built first is dropped, and built again on
request."""

_BETWEEN = -1
"""The era of an index that is being changed: an interrupt leaves this value, and the next look starts over."""

_PART = 65_536
"""Episodes added at a time: a million at once would leave holes of many megabytes in memory."""

_MAX_STEPS = 4
"""Steps to walk from an entry of the guide before a binary search is faster."""

_FEW = 4096
"""Episodes among which a binary search is faster than the guide: their ends stay in the processor's second cache."""

_STALE = 8
"""A guide is made again once one of so many clips came after it."""

_TRIES = 8
"""Draws of clips in place of lost ones, before all clips are looked at."""


def counts(lengths: Array, span: int, least: int = 0) -> Array:
    """Return the number of clips of `span` steps in episodes of these lengths, int64; those shorter than `least` have
    none."""
    sizes = np.asarray(lengths, np.int64)
    found: Array = np.maximum(0, sizes - (span - 1))
    return np.where(sizes < least, 0, found) if least else found


class _Guide(NamedTuple):
    """Where a lookup begins: the episode of every 2**shift-th clip number, from `first << shift` up to `end`.

    A binary search over the ends of 1,000,000 episodes misses the cache ten times for each clip: 56 us for 256 clips,
    where this takes 23.
    """

    shift: int
    first: int
    ordinals: Array
    end: int

    @classmethod
    def over(cls, ends: Array, first: int, base: int) -> _Guide:
        """Return the guide over these ends of episodes, numbered from `first` on. O(episodes)."""
        end = int(ends[-1])
        shift = ((end - base) // len(ends)).bit_length()
        counts = np.diff(-(-ends >> shift), prepend=base >> shift)
        return cls(shift, base >> shift, np.repeat(np.arange(first, first + len(ends)), counts), end)

    def before(self, numbers: Array) -> Array:
        """Return for each clip number its episode, or one before it."""
        found: Array = self.ordinals.take((numbers >> self.shift) - self.first, mode="clip")
        return found


class SpanIndex:
    """Clip numbers of one span, in steps, over live episodes, which are added and evicted.

    `least`: steps that an episode with a clip has at least; `across`: whether clips run on into the next episode of
    their lane: then every step is the last of one clip, which is lost if it would begin before the lane's oldest step.
    """

    __slots__ = (
        "_ends",
        "_era",
        "_guide",
        "_length",
        "_num_steps",
        "_shifts",
        "_upto",
        "across",
        "base",
        "end",
        "first",
        "last",
        "least",
        "live",
        "numbering",
        "shift",
        "span",
    )

    def __init__(self, live: LiveEpisodes, span: int, least: int = 0, across: bool = False) -> None:
        self.live = live
        self.span = span
        self.least = least
        self.across = across
        self._restart()

    def _restart(self) -> None:
        live = self.live
        self._era = _BETWEEN
        self._upto = self.first = self.last = live.first
        self._num_steps = self._length = 0
        """Steps of all episodes, and of the newest one: it grows while it is an open group."""
        self.base = self.end = ClipNumber(0)
        """The number of the oldest clip, and one past that of the newest."""
        self.shift: int | None = None
        """From a number to the position of its clip, where every step starts a clip and episodes lie end to end: no
        search is needed."""
        self.numbering = object()
        self._ends: GrowingArray[ClipNumber] = GrowingArray(np.empty(0, np.int64), live.first)
        self._shifts: GrowingArray[int] = GrowingArray(np.empty(0, np.int64), live.first)
        self._guide: _Guide | None = None

    @property
    def is_joined(self) -> bool:
        """Whether clips may cross what is stored one by one: parts, or episodes."""
        return self.across or self.live.links is not None

    @property
    def whole(self) -> WholeEpisodes:
        """The episodes, or runs of episodes, in which clips lie."""
        return self.live.runs if self.across else self.live.whole

    def follow(self) -> None:
        """Catch up with the episodes: O(1) when nothing changed, O(changes) otherwise. Of a ring, holds its lock."""
        live = self.live
        if (
            live.era == self._era
            and live.first == self.first
            and live.last == self._upto
            and live.num_steps == self._num_steps
        ):
            return
        self._catch_up(live)
        self._era = live.era

    def _catch_up(self, live: LiveEpisodes) -> None:
        first, last = live.first, live.last
        if live.era != self._era:
            self._restart()
        self._era = _BETWEEN
        newest = Ordinal(self._upto - 1)
        if first < self._upto and (length := live.length(newest)) != self._length:
            self._grow(newest, length)
        if last != self._upto:
            seen: int = self._ends.at(self._upto - 1) if self._upto > self.first else self.base
            fresh = max(self._upto, first)
            if last - fresh == 1 and fresh == self._upto and not self.is_joined:
                length = live.length(fresh)
                seen += max(0, length - self.span + 1) if length >= self.least else 0
                self._ends.append(seen, self.first)
                self._shifts.append(live.start(fresh) + length - (self.span - 1) - seen, self.first)
            else:
                if fresh > self._upto:  # episodes came and went unseen: their clips had no numbers
                    self._ends = GrowingArray(np.empty(0, np.int64), fresh)
                    self._shifts = GrowingArray(np.empty(0, np.int64), fresh)
                    self.first, self.base = fresh, ClipNumber(seen)
                self._ends.reserve(last - fresh, self.first)
                self._shifts.reserve(last - fresh, self.first)
                for at in range(fresh, last, _PART):
                    stop = min(at + _PART, last)
                    ends = np.cumsum(self._clips_of(at, stop)) + seen
                    seen = int(ends[-1])
                    self._ends.extend(ends, self.first)
                    shifts = live.stops_between(at, stop) - ends
                    shifts -= self.span - 1
                    self._shifts.extend(shifts, self.first)
            self._upto = last
        if first != self.first:
            if first > self.first:
                self.base = self._ends.at(first - 1)
            self.first = first
        self.last, self._num_steps = last, live.num_steps
        self._length = live.length(live.newest) if first < last else 0
        self.end = self._ends.at(last - 1) if last > first else self.base
        is_dense = self.span == 1 and not self.least and live.is_dense
        self.shift = live.start(first) - self.base if is_dense else None

    def _clips_of(self, first: int, last: int) -> Array:
        """Return how many numbers the episodes, or parts, of the ordinals `[first, last)` have. O(last - first)."""
        lengths, links = self.live.lengths_since(first)[: last - first], self.live.links
        if self.across:
            return lengths.astype(np.int64)
        if links is None:
            return counts(lengths, self.span, self.least)
        before = links.of(first, last).steps
        found: Array = counts(before + lengths, self.span, self.least)
        found -= counts(before, self.span, self.least)
        return found

    def _grow(self, newest: Ordinal, length: int) -> None:
        """Add the clips of the steps that the newest known episode got since."""
        before, now = self._length, length
        if not self.across:
            before, now = counts(np.array([before, now]), self.span, self.least).tolist()
        end = self._ends.at(newest) + now - before
        self._ends.change(newest, end)
        self._shifts.change(newest, self.live.start(newest) + length - (self.span - 1) - end)

    def end_before(self, position: Position) -> ClipNumber:
        """Return one past the number of the last clip of the episodes that start before `position`. O(log episodes)."""
        count = int(self.live.starts.searchsorted(position))
        return self._ends.at(self.first + count - 1) if count else self.base

    def episodes_from(self, number: int) -> tuple[Array, Array]:
        """Return the episodes, or parts, from that of a clip number on: where each starts, and one past the number of
        its last clip."""
        ends = self._ends.span(self.first, self.last)
        at = int(ends.searchsorted(number, side="right"))
        return self.live.starts[at:], ends[at:].copy()

    def pieces(self, number: int) -> tuple[Array, Array]:
        """Return the ends of the episodes from that of a clip number on, and what leads from the numbers of their clips
        to positions. Copies; of an index that is not joined."""
        ends = self._ends.span(self.first, self.last)
        at = int(ends.searchsorted(number, side="right"))
        return ends[at:].copy(), self._shifts.span(self.first, self.last)[at:].copy()

    def _find(self, numbers: Array) -> Array:
        """Return, for each clip number in `[base, end)`, the index of its episode."""
        ends = self._ends.span(self.first, self.last)
        if len(ends) <= _FEW:
            return ends.searchsorted(numbers, side="right")
        index: Array = np.maximum(self._entries(ends, numbers), 0)
        for _ in range(_MAX_STEPS):
            behind = ends.take(index) <= numbers
            if not behind.any():
                break
            index += behind
        else:  # among episodes much shorter than most, or too short for a clip
            late = np.flatnonzero(ends.take(index) <= numbers)
            index[late] = ends.searchsorted(numbers[late], side="right")
        return index

    def _entries(self, ends: Array, numbers: Array) -> Array:
        """Return where to begin the search for each clip number among these ends: at its episode, or before it."""
        guide = self._guide
        if guide is None or self.end - guide.end > (self.end - self.base) // _STALE:
            guide = self._guide = _Guide.over(ends, self.first, self.base)
        return guide.before(numbers) - self.first

    def _first_steps(self, numbers: Array) -> tuple[Array, Array]:
        """Return the index of the episode, or part, of each clip number in `[base, end)`, and the position of the
        clip's first step: before the part, among other rows, if the clip begins in an earlier one."""
        index = self._find(numbers)
        return index, numbers + self._shifts.span(self.first, self.last).take(index)

    def locate(self, numbers: Array) -> tuple[Array, Array]:
        """Return the episode ordinal and the first step in it of each clip number in `[base, end)`; the step is -1 for
        a lost clip.

        Episodes of parts are counted from `first` on, as they are named.
        """
        index, positions = self._first_steps(numbers)
        if not self.is_joined:
            return index + self.first, positions - self.live.starts.take(index)
        whole, steps = self.whole, positions - self.live.starts.take(index)
        episode = whole.of_part.take(index)
        steps += whole.place_of_part.take(index) - whole.places.take(episode)
        if self.least:
            steps[whole.lengths.take(episode) < self.least] = NONE
        return episode + self.first, np.maximum(steps, NONE)

    def positions(self, numbers: Array, step: int = 0) -> Array:
        """Return the position on the ring of step `step` of each clip number in `[base, end)`; -1 for a lost clip."""
        if self.shift is not None:
            shifted: Array = numbers + self.shift
            return shifted
        positions, crossing = self._placed(numbers, step, ANCHOR_ONLY)
        if crossing is not None:
            crossing.put_anchors(positions)
        return positions

    def _placed(self, numbers: Array, step: int, around: Around) -> tuple[Array, Crossing | None]:
        """Return the position of a step of each clip number in `[base, end)`, and the clips that begin in an earlier
        part, whose positions `Crossing.put_anchors` puts there."""
        index, positions = self._first_steps(numbers)
        crossing: Crossing | None = None
        if self.is_joined:
            steps = positions - self.live.starts.take(index)
            far, enough = steps < 0, None
            if self.least:
                enough = self.whole.lengths.take(self.whole.of_part.take(index)) >= self.least
                far |= ~enough
            which = far.nonzero()[0]
            if len(which):
                crossing = Crossing.before(
                    which,
                    self.whole if self.across else self.live,
                    index.take(which),
                    steps.take(which),
                    step,
                    around,
                    None if enough is None else enough.take(which),
                )
        if step:
            positions += step
        return positions, crossing

    def draw(self, count: int, rng: np.random.Generator, base: int) -> Array:
        """Return the positions of the first steps of `count` clips drawn uniformly from those numbered from `base` on,
        at least one; -1 for a lost clip."""
        if self.shift is not None:
            return integers(rng, base + self.shift, self.end + self.shift, count)
        return self.positions(integers(rng, base, self.end, count))

    def numbers(self, positions: Array, step: int = 0) -> Array:
        """Return the number of the clip whose step `step` is at each position, a clip of a live episode. O(B log
        episodes)."""
        live = self.live
        if self.shift is not None:
            shifted: Array = positions - self.shift
            return shifted
        index = live.starts.searchsorted(positions, side="right") - 1
        if not self.is_joined:
            found: Array = positions - self._shifts.span(self.first, self.last).take(index) - step
            return found
        after = positions - live.starts.take(index) + (self.span - 1 - step)
        if not (self.across or self.least):  # it belongs to the part that holds its last step
            last = live.along(index, after[:, None])[0][:, 0]
            part = live.starts.searchsorted(last, side="right") - 1
            found = last - self._shifts.span(self.first, self.last).take(part) - (self.span - 1)
            return found
        whole = self.whole
        # It belongs to the part that holds its last step, or with which the chain is long enough.
        last, episode = whole.place_of_part.take(index) + after, whole.of_part.take(index)
        long_enough = whole.places.take(episode) + self.least - 1 - whole.first_steps.take(episode)
        part = whole.part_at(np.maximum(last, long_enough))
        stops = whole.place_of_part.take(part) + live.lengths.take(part)
        found = self._ends.span(self.first, self.last).take(part) - (stops - last)
        return found

    def drawn(self, numbers: Array, step: int, rng: np.random.Generator, around: Around = ANCHOR_ONLY) -> Drawn | None:
        """Return the clips with these numbers, which were drawn uniformly; a lost one is redrawn, and its number
        changed. None if all clips are lost.

        `step`: which of their steps is the anchor; `around`: the steps of a clip, from the anchor.
        """
        if self.shift is not None:
            return Drawn(numbers + self.shift, NO_CROSSING)
        for _ in range(_TRIES):
            positions, crossing = self._placed(numbers, step, around)
            if crossing is None:
                return Drawn(positions, NO_CROSSING)
            if crossing.good is None:
                crossing.put_anchors(positions)
                return Drawn(positions, crossing)
            lost = crossing.which[~crossing.good]
            numbers[lost] = integers(rng, self.base, self.end, len(lost))
        every = self.positions(np.arange(self.base, self.end), step)
        every = every[every >= 0]
        if not len(every):
            return None
        positions = self.positions(numbers, step)
        lost = np.flatnonzero(positions < 0)
        positions[lost] = rng.choice(every, len(lost))
        return Drawn(positions)

    def are(self, positions: Array, step: int) -> Array:
        """Tell of each position whether step `step` of a clip stands there. O(B log episodes)."""
        live, inside = self.live, None
        if live.first == live.last:
            return np.zeros(len(positions), np.bool_)
        index, steps, lengths = live.locate(positions)
        if self.across or live.links is not None:
            inside = (steps >= 0) & (steps < lengths)
            if not (self.across or self.least):
                inside &= live.along(index, (steps - step)[:, None] + np.array([0, self.span - 1]))[1]
                return inside
            whole = self.whole
            episode = whole.of_part.take(index)
            steps = whole.place_of_part.take(index) + steps - whole.places.take(episode)
            lengths = whole.lengths.take(episode)
        found: Array = steps >= step
        found &= steps <= lengths - (self.span - step)
        if self.least:
            found &= lengths >= self.least
        return found if inside is None else found & inside

    def check(self) -> list[str]:
        """Return violated invariants, in words; empty when sound. O(episodes)."""
        expected = np.cumsum(self._clips_of(self.first, self.last)) + self.base
        got = self._ends.span(self.first, self.last)
        if not np.array_equal(expected, got):
            return [f"clip index of span {self.span}: clip counts do not follow the episode lengths"]
        shifts = self.live.stops_between(self.first, self.last) - (self.span - 1) - got
        if not np.array_equal(shifts, self._shifts.span(self.first, self.last)):
            return [f"clip index of span {self.span}: a clip's position does not follow from its number"]
        numbers = np.arange(self.base, self.end)
        if len(numbers) and (self._entries(got, numbers) > got.searchsorted(numbers, side="right")).any():
            return [f"clip index of span {self.span}: an entry of the guide is beyond its clip"]
        return []


class ClipIndex:
    """The span indexes in use over one set of live episodes."""

    __slots__ = ("_spans", "live")

    def __init__(self, live: LiveEpisodes) -> None:
        self.live = live
        self._spans: dict[tuple[int, int, bool], SpanIndex] = {}

    def of(self, span: int, least: int = 0, across: bool = False) -> SpanIndex:
        """Return the up-to-date index of `span`; the first call for a span costs O(episodes).

        `least`: steps that an episode with a clip has at least; `across`: see `SpanIndex`.
        """
        index = self._spans.get((span, least, across))
        if index is None:
            index = SpanIndex(self.live, span, least, across)
            index.follow()  # first: threads that share a dataset, whose episodes never change, take it whole or not
            if len(self._spans) >= _MAX_SPANS:
                self._spans.pop(next(iter(self._spans)), None)
            self._spans[span, least, across] = index
        if len(self._spans) == 1:
            index.follow()
            return index
        # All spans are updated at each call, so that the backlog of each stays bounded.
        for other in tuple(self._spans.values()):
            other.follow()
        return index

    def check(self) -> list[str]:
        """Return violated invariants of every span in use."""
        return [fault for key in self._spans for fault in self.of(*key).check()]


class ClipPairs(Sequence[tuple[int, int]]):
    """A lazy sequence of `(episode, step)` pairs, oldest episode first; no memory per clip.

    `span`, `least`: as of the index; `lock`: held while that is updated and searched, if another thread may add
    episodes; `before`: steps of a clip before the one to return; `of_run`: where the episodes of `index` are runs of
    episodes, returns the episodes, and the steps in them, of steps of runs.

    Example:
        >>> pairs = ClipPairs(ClipIndex(LiveEpisodes.from_lengths(np.array([3, 1, 2]))), span=2)
        >>> list(pairs)
        [(0, 0), (0, 1), (2, 0)]
        >>> pairs[-1], len(pairs)
        ((2, 0), 3)
    """

    def __init__(
        self,
        index: ClipIndex,
        span: int,
        lock: AbstractContextManager[Any] | None = None,
        before: int = 0,
        least: int = 0,
        of_run: Callable[[Array, Array], tuple[Array, Array]] | None = None,
    ) -> None:
        self._of_run = of_run
        self._index = index
        self._span = span, least
        self._before = before
        self._lock = nullcontext() if lock is None else lock

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            index = copy.deepcopy(self._index)
        return {**self.__dict__, "_index": index, "_lock": nullcontext()}

    def __len__(self) -> int:
        with self._lock:
            of = self._index.of(*self._span)
            return of.end - of.base

    @overload
    def __getitem__(self, item: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, item: slice) -> Sequence[tuple[int, int]]: ...
    def __getitem__(self, item: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        with self._lock:
            return self._at(item)

    def _at(self, item: Any) -> tuple[int, int] | Sequence[tuple[int, int]]:
        if np.ndim(item):
            raise SubscriptError(
                "clip_indices: takes the number of one clip, or a slice of them; of the ids of a batch "
                "locate(batch.ids) says the same"
            )
        of = self._index.of(*self._span)
        size, is_slice = of.end - of.base, isinstance(item, slice)
        if not is_slice and not -size <= item < size:
            raise ClipIndexError(f"clip_indices: clip {item} is out of range for {size} clips")
        ids = np.arange(size)[item] if is_slice else np.array([item % size])
        ordinals, steps = of.locate(ids + of.base)
        episodes = ordinals - of.first
        episodes, steps = (episodes, steps + self._before) if self._of_run is None else self._of_run(episodes, steps)
        pairs = list(zip(episodes.tolist(), steps.tolist(), strict=True))
        return pairs if is_slice else pairs[0]
