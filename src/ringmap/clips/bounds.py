"""Reads items that need the bounds of their episodes: steps are clamped to these, or columns are computed from them.

    anchors (B,) -> episodes -> places -> clamped to the episode -> positions -> slots

    place    in a ring without parts the position itself; else a step's number among the joined episodes, since the
             parts of one may lie apart: those of items within one part need no search

Invariants: a step is read at the position where its part is stored; an item is whole only if the lowest position that
was read for it is still live after the copy.
Not here: which parts make an episode (storage/ring/links.py); items that need no bounds (gather.py, draws.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.clips.cut import Cut, Ends, Places, Steps, places_of, slots_of
from ringmap.clips.items import ItemRows, Items, Numbers
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.records.table import MOST
from ringmap.storage.ring.arrays import all_true
from ringmap.storage.ring.links import WholeEpisodes

__all__ = ["Bounds"]

Array = np.ndarray[Any, np.dtype[Any]]


class Bounds(ItemRows):
    """The episodes of the anchors of a batch, at positions `(B,)`, as of one moment, and the rows of these, for
    computed columns. `across`: runs of episodes of a lane in place of episodes."""

    def __init__(self, source: Handle, anchors: Array, across: bool = False) -> None:
        assert source.rows is not None
        self._source, self._rows, self._anchors = source, source.rows, anchors
        self.names, self.size = source.rows.by_name, source.rows.ring.rows
        self._whole: WholeEpisodes | None = None
        self._lowest, self._reached = anchors, MOST
        with thread.searching, source.lock:
            live = source.live
            if not len(live):
                steps, lengths = np.zeros(len(anchors), np.int64), np.zeros(len(anchors), np.int32)
            else:
                index, steps, lengths = live.locate(anchors)
                if across or live.links is not None:
                    self._whole = live.runs if across else live.whole
        inside = steps.view(np.uint64) < lengths.astype(np.uint64)  # a negative one is huge
        self._outside: Array | None = None if all_true(inside) else ~inside
        if self._outside is not None:  # a step alone, which means nothing
            steps, lengths = np.where(inside, steps, 0), np.where(inside, lengths, 1)
        self._places, self._lengths = anchors, lengths
        self._names = self._first = anchors - steps
        self._ends: Ends | None = None
        whole = self._whole
        if whole is None:
            self.lock = source.lock
            return
        self.size = max(1, whole.num_steps)
        self._begin = whole.place_of_part.take(index)
        self._end = self._begin + lengths
        self._places = self._begin + steps
        self._shift = anchors - self._places
        episodes = whole.of_part.take(index)
        self._names = whole.names.take(episodes)
        self._first, self._lengths = whole.places.take(episodes), whole.lengths.take(episodes)
        self._ends = Ends(whole.first_steps.take(episodes), whole.is_open.take(episodes))

    def places(self, kinds: list[tuple[Steps, bool]], is_covered: bool) -> tuple[list[Places], Array | None]:
        """Return where each of the steps is, with positions if rows are covered; and which items lie in their episodes,
        None if all do. `kinds`: steps, and whether they come without an axis of their own."""
        found: list[Places] = []
        rows, whole, ends = self._rows.ring.rows, self._whole, self._ends
        for steps, is_alone in kinds:
            is_pad = at = wanted = None
            if steps.padded:
                blanks = None if ends is None else ends.blanks(steps.blank_first, steps.blank_last)
                wanted, is_pad = steps.places(self._places, self._first, self._lengths, blanks)
                at = wanted if whole is None else wanted + self._shift[:, None]
                slots = slots_of(at, self._first, rows) if whole is None else at % rows
            else:
                slots = steps.slots(self._anchors, rows)
                at = self._anchors[:, None] + steps.array if is_covered else None
            if whole is not None:
                self._cross(whole, steps, wanted, slots, at)
            at = at if is_covered else None
            found.append(places_of(slots, is_pad, at) if is_alone else (slots, is_pad, at))
        return found, None if self._outside is None else ~self._outside

    def _cross(self, whole: WholeEpisodes, steps: Steps, wanted: Array | None, slots: Array, at: Array | None) -> None:
        """Find the steps of items that leave the part of their anchor. `wanted`: the places of clamped steps."""
        if wanted is None:
            low, high = self._places + steps.lowest, self._places + steps.highest
            outside = (low < self._first) | (high >= self._first + self._lengths)
            if outside.any():
                self._outside = outside if self._outside is None else self._outside | outside
        else:
            low, high = wanted.min(1), wanted.max(1)
        crossing = np.flatnonzero((low < self._begin) | (high >= self._end))
        if not len(crossing):
            return
        if wanted is None:
            first = self._first[crossing][:, None]
            wanted = self._places[crossing][:, None] + steps.array
            wanted = np.clip(wanted, first, first + self._lengths[crossing][:, None] - 1)
        else:
            wanted = wanted[crossing]
        positions = whole.positions(wanted)
        slots[crossing] = positions % self._rows.ring.rows
        if at is not None:
            at[crossing] = positions
        if self._lowest is self._anchors:
            self._lowest = self._anchors.copy()
        self._lowest[crossing] = np.minimum(self._lowest[crossing], positions.min(1))

    def items(self, cut: Cut, batch: Mapping[str, Array], rng: np.random.Generator, numbers: Numbers) -> Items:
        """Return the items, for computed columns."""
        steps = self._places - self._first
        return Items(
            self, cut, self._anchors, self._names, self._lengths, batch, rng, numbers, steps, self._first, self._ends
        )

    def still_whole(self, good: Array | None) -> Array | None:
        """Validate the copy: return which items are good, None for all."""
        if self._lowest is self._anchors and self._reached == MOST:
            return good
        tail = self._source.newest_tail()
        whole = self._lowest >= tail
        if self._reached < tail:  # it is not known for which item
            whole[:] = False
        if good is not None:
            whole &= good
        return None if all_true(whole) else whole

    # -- rows, by place ------------------------------------------------------------------------

    def take(self, column: str, places: Array, starts: Array) -> Array:
        """Return copies of rows."""
        rows, head = self._rows, self._source.head
        if self._whole is None:
            return rows.take([column], places, head, slots=slots_of(places, starts, self.size))[0]
        positions = self._whole.positions(places)
        if positions.size:
            self._reached = min(self._reached, int(positions.min()))
        return rows.take([column], positions, head)[0]

    def read(self, column: str, start: int, length: int) -> Array:
        """Return a copy of rows of one or more episodes."""
        if self._whole is None:
            return self._rows.take([column], range(start, start + length))[0]
        places = np.arange(start, start + length)
        return self.take(column, places, places)

    def key_of(self, column: str) -> Any:
        """Return the timeline of the ring, or the joined episodes; None for a column whose values may change."""
        if self._rows.may_change(column):
            return None
        return self._source.timeline if self._whole is None else self._whole

    def are_begins(self, places: Array) -> Array:
        """Tell at which of these places an episode begins."""
        if self._whole is not None:
            return self._whole.are_begins(places)
        with thread.searching, self._source.lock:
            starts = self._source.live.starts
            found: Array = starts.take(starts.searchsorted(places), mode="clip") == places
        return found

    def positions(self, places: Array) -> Array:
        """Return where the steps at these places are stored."""
        return places if self._whole is None else self._whole.positions(places)

    def newest_tail(self) -> int:
        """Return the place below which rows may have been overwritten by now; of joined episodes 0, or one beyond
        all."""
        tail = self._source.newest_tail()
        if self._whole is None:
            return tail
        return 0 if self._reached >= tail else MOST
