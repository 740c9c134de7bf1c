"""What a draw hands on to the read of its clips: their anchors, and which of them cross parts.

    numbers -> parts -> anchors (B,) ------------------------------------> slots (B, H)
                  \\--> clips that begin in an earlier part: a walk from
                            part to part, positions of all steps --> slots of these few

A draw looks up the part of each clip, and so it knows which clips begin in an earlier one. A read that is given anchors
alone looks up the parts of all of them again.

Invariants: a step is read at the position where its part is stored; an item is whole only if the lowest position that
was read for it is still live after the copy.
Not here: which parts make an episode (storage/ring/links.py), items with padding (bounds.py).

Integers for a draw:  random()  in [0, 1)  * count  -> cut off -> + low. `Generator.integers` calls Python code of NumPy
for the size, which takes longer than the draw; this takes 0.4 of its time for 32. A double has 53 bits, so each integer
is drawn with a probability that differs from 1 / count by at most a part of count / 2**53: for a ring of a million
steps by 1e-10 of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.arrays import all_true
from ringmap.storage.ring.links import NONE, WholeEpisodes
from ringmap.storage.ring.live import LiveEpisodes

__all__ = ["ANCHOR_ONLY", "NO_CROSSING", "Around", "Crossing", "Drawn", "Weigh", "integers"]

Array = np.ndarray[Any, np.dtype[Any]]
Weigh = Callable[[Array], Array]
"""Returns the weights of a batch, given the final positions of its clips: some may have been redrawn."""


def integers(rng: np.random.Generator, low: int, high: int, count: int) -> Array:
    """Return `count` integers drawn uniformly from `[low, high)`, int64; `high` is at most 2**53 above `low`.

    Raises:
        ValueError: there is no integer to draw.

    Example:
        >>> drawn = integers(np.random.default_rng(0), 10, 13, 1000)
        >>> sorted(set(drawn.tolist())), drawn.dtype
        ([10, 11, 12], dtype('int64'))
    """
    if high <= low and count:
        raise ValueError(f"no integer lies in [{low}, {high})")
    # A product is below the range even where it is rounded: the greatest draw is 1 - 2**-53.
    drawn = rng.random(count)
    drawn *= _number(float(high - low))
    found = drawn.astype(np.int64)
    if low:
        found += _number(low)
    return found


@lru_cache(maxsize=64, typed=True)  # 5 and 5.0 are arrays of two types
def _number(value: float) -> Array:
    """Return a number as NumPy calls take it: to convert one takes as long as to multiply 32 by it."""
    return np.array(value)


class Around:
    """The steps around an anchor that an item holds: `array`, their offsets and 0, rising, int64; `zero`: where 0 is
    among them."""

    __slots__ = ("array", "zero")

    def __init__(self, offsets: Iterable[int] = ()) -> None:
        self.array: Array = np.array(sorted({0, *offsets}), np.int64)
        self.zero = int(self.array.searchsorted(0))

    def spots(self, offsets: Array) -> slice | Array:
        """Return where some of the offsets are among them: as a slice, if they rise evenly."""
        found: Array = self.array.searchsorted(offsets)
        first, last = int(found[0]), int(found[-1])
        stride = int(found[1]) - first if len(found) > 1 else 1
        if stride > 0 and np.array_equal(found, np.arange(first, last + 1, stride)):
            return slice(first, last + 1, stride)
        return found


ANCHOR_ONLY = Around()


class Crossing:
    """The items of a batch that have steps in more than one part. None of their steps is clamped.

    `which`: the items; `positions`: of their steps, `(n, steps)`, as `around` has these; they stay right, since a step
    keeps its position for life; `good`: whether the steps of each lie in its episode; positions of others mean nothing.
    """

    __slots__ = ("_around", "good", "positions", "which")

    def __init__(self, which: Array, positions: Array, around: Around, good: Array) -> None:
        self.which, self.positions, self._around = which, positions, around
        self.good = None if all_true(good) else good
        """None: all are."""

    def __len__(self) -> int:
        return len(self.which)

    @classmethod
    def before(
        cls,
        which: Array,
        live: LiveEpisodes | WholeEpisodes,
        index: Array,
        first: Array,
        step: int,
        around: Around,
        enough: Array | None = None,
    ) -> Crossing:
        """Return items that begin before the part that they belong to, or lie in an episode of which too little is
        left.

        `index`: of the part of each in `live`; `first`: their first steps, counted from those of the parts; `step`:
        which of their steps is the anchor; `enough`: whether enough of the episode of each is left; None: of all.
        """
        steps = (first + step)[:, None] + around.array
        positions, good = live.along(index, np.concatenate([first[:, None], steps], 1))
        return cls(which, positions[:, 1:], around, good if enough is None else good & enough)

    @classmethod
    def of(cls, source: Handle, anchors: Array, around: Around) -> Crossing:
        """Return the items that cross parts, given the positions of all anchors, `(B,)`."""
        low, high = around.array[[0, -1]].tolist()
        with thread.searching, source.lock:
            live = source.live
            if not len(live):
                return NO_CROSSING
            index, left, lengths = live.locate(anchors)
            far = left + high >= lengths
            if low:
                far |= left + low < 0
            which = far.nonzero()[0]
            if not len(which):
                return NO_CROSSING
            steps = left.take(which)[:, None] + around.array
            positions, good = live.along(index.take(which), steps)
        return cls(which, positions, around, good)

    def put_anchors(self, anchors: Array) -> None:
        """Put the positions of the anchors among those of the batch; -1 for an item that is not good."""
        found = self.positions[:, self._around.zero]
        anchors[self.which] = found if self.good is None else np.where(self.good, found, NONE)

    def put(self, slots: Array, spots: slice | Array, rows: int, positions: Array | None = None) -> None:
        """Replace the slots `(B, n)`, or `(B,)` of one step, and the positions, if any, of these items, which were
        found as if each lay in one part. `spots`: of their steps, from `Around.spots`."""
        found = self.positions[:, spots]
        if slots.ndim == 1:
            found = found[:, 0]
        slots[self.which] = found % rows
        if positions is not None:
            positions[self.which] = found

    def still_whole(self, source: Handle, count: int) -> Array | None:
        """Validate the copy: return which items of the batch of `count` are good, None for all.

        Positions rise with the steps, so it is the first step that is overwritten first. Where that is the anchor, the
        reader looks at it anyway.
        """
        good = self.good
        if self._around.zero:
            live = self.positions[:, 0] >= source.newest_tail()
            good = live if good is None else good & live
        if good is None or all_true(good):
            return None
        found = np.ones(count, np.bool_)
        found[self.which] = good
        return found


_NOTHING = np.empty(0, np.int64)

NO_CROSSING = Crossing(_NOTHING, _NOTHING[:, None], ANCHOR_ONLY, _NOTHING)
"""All items lie in one part each."""


class Drawn(NamedTuple):
    """Clips that were drawn.

    `positions`: of their anchors, int64 `(B,)`; `crossing`: those that cross parts, None if that is not known; `weigh`:
    the function that returns their weights, None if they have none.
    """

    positions: Array
    crossing: Crossing | None = None
    weigh: Weigh | None = None
