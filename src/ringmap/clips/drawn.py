"""What a draw hands on to the read of its clips: their anchors, and which of them cross parts.

    numbers -> parts -> anchors (B,) -----------------------------> slots (B, H)
                  \\--> those that begin in an earlier part: their places among the joined episodes
                                                              \\--> slots of these few

A draw looks up the part of each clip, and so it knows which clips begin in an earlier one. A read that is given anchors alone
looks up the parts of all of them again.

Invariants: a step is read at the position where its part is stored; an item is whole only if the lowest position that was read
for it is still live after the copy.
Not here: which parts make an episode (storage/ring/chains.py), items with padding (parts.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.samplers.base import Weigh
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.chains import NONE, WholeEpisodes

__all__ = ["NO_CROSSING", "Crossing", "Drawn"]

Array = np.ndarray[Any, np.dtype[Any]]


class Crossing:
    """The items of a batch that have steps in more than one part. None of their steps is clamped.

    It stays true: a step keeps its position for life.

    Args:
        which: the items.
        whole: the episodes.
        places: of the anchors.
        good: whether the steps of each lie in its episode; None: all do.
    """

    __slots__ = ("_lowest", "_places", "_whole", "good", "which")

    def __init__(
        self, which: Array, whole: WholeEpisodes, places: Array, good: Array | None = None
    ) -> None:
        self.which, self._whole, self._places = which, whole, places
        self.good = None if good is None or good.all() else good
        self._lowest: Array | None = None

    def __len__(self) -> int:
        return len(self.which)

    @classmethod
    def before(
        cls, which: Array, whole: WholeEpisodes, index: Array, first: Array, step: int
    ) -> Crossing:
        """Return items that begin before the part that they belong to.

        Args:
            which: the items.
            whole: the episodes.
            index: of their parts.
            first: of their steps, counted from the first step of the part: below 0.
            step: which of their steps is the anchor.
        """
        places = whole.place_of(index) + first
        good = places >= whole.begin_of(index)
        if step:
            places += step
        return cls(which, whole, places, good)

    @classmethod
    def of(cls, source: Handle, anchors: Array, low: int, high: int) -> Crossing:
        """Return the items that cross parts.

        Args:
            source: the ring.
            anchors: positions `(B,)`.
            low: the smallest offset of their steps, at most 0.
            high: the greatest one, at least 0.
        """
        with source.memory:
            live = source.live
            if not len(live):
                return NO_CROSSING
            index = live.starts.searchsorted(anchors, side="right") - 1
            left = anchors - live.starts.take(index)
            far = left + high >= live.lengths.take(index)
            if low:
                far |= left + low < 0
            which = far.nonzero()[0]
            if not len(which):
                return NO_CROSSING
            whole = live.whole
        index = index.take(which)
        places, begins = whole.place_of(index) + left.take(which), whole.begin_of(index)
        stops = begins + whole.lengths.take(whole.episode_of(index))
        return cls(which, whole, places, (places + low >= begins) & (places + high < stops))

    def put_anchors(self, anchors: Array) -> None:
        """Put the positions of the anchors among those of the batch; -1 for an item that is not good."""
        found = self._whole.positions(self._places)
        if self.good is not None:
            found[~self.good] = NONE
        anchors[self.which] = found

    def put(self, slots: Array, offsets: Array, lowest: int, rows: int) -> None:
        """Replace the slots of these items, which were found as if each lay in one part.

        Args:
            slots: of the whole batch, `(B, n)`; `(B,)` of one step.
            offsets: of the steps from the anchor.
            lowest: the smallest of these.
            rows: of the ring.
        """
        positions = self._whole.positions(self._places[:, None] + offsets)
        if lowest < 0:  # else it is the anchor's own, at which the reader looks again anyway
            read = np.minimum.reduce(positions, 1)
            self._lowest = read if self._lowest is None else np.minimum(self._lowest, read)
        positions %= rows
        slots[self.which] = positions if slots.ndim > 1 else positions[:, 0]

    def still_whole(self, source: Handle, count: int) -> Array | None:
        """Look again: return which items of the batch of `count` are good, None for all."""
        good = self.good
        if self._lowest is not None:
            live = self._lowest >= source.newest_tail()
            good = live if good is None else good & live
        if good is None or good.all():
            return None
        found = np.ones(count, np.bool_)
        found[self.which] = good
        return found


_NOTHING = np.empty(0, np.int64)

NO_CROSSING = Crossing(_NOTHING, WholeEpisodes(_NOTHING, _NOTHING, None, {}), _NOTHING)
"""All items lie in one part each."""


class Drawn(NamedTuple):
    """Clips that were drawn.

    `positions`: of their anchors, int64 `(B,)`; `crossing`: which of them cross parts, None: it is not known; `weigh`: returns
    their weights, None: they have none.
    """

    positions: Array
    crossing: Crossing | None = None
    weigh: Weigh | None = None
