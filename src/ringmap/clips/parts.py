"""Reads items of episodes that are stored in parts: a step is found by its place among the joined episodes.

    anchors (B,) -> parts -> places -> clamped to the episode -> positions -> slots
                                                                    |
                      an item whose steps lie in one part needs no search for them, and no place if nothing is clamped

Invariants: a step is read at the position where its part is stored; an item is whole only if the lowest position that
was read for it is still live after the copy.
Not here: which parts make an episode (storage/ring/links.py); rings without parts, which pay nothing (gather.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.clips.cut import Cut, Ends, Places, Steps, clamp, places_of
from ringmap.clips.items import ItemRows, Items, Numbers
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.records.table import MOST
from ringmap.storage.ring.links import WholeEpisodes
from ringmap.storage.ring.live import LiveEpisodes

__all__ = ["Joined", "JoinedRows"]

Array = np.ndarray[Any, np.dtype[Any]]


class Joined:
    """The anchors of a batch among the joined episodes of one moment.

    Args:
        source: the ring.
        whole: its episodes.
        anchors: positions `(B,)`.
        index: of the part of each.
        steps: of the anchor in that part.
        lengths: steps of that part.
    """

    def __init__(
        self,
        source: Handle,
        whole: WholeEpisodes,
        anchors: Array,
        index: Array,
        steps: Array,
        lengths: Array,
    ) -> None:
        self._source, self.whole, self.anchors = source, whole, anchors
        good = (steps >= 0) & (steps < lengths)
        self._outside: Array | None = None if good.all() else ~good
        self._begin = whole.place_of_part.take(index)
        self._end = self._begin + lengths
        self._places = self._begin + np.where(good, steps, 0)
        episodes = whole.of_part.take(index)
        self._names = whole.names.take(episodes)
        self._first = whole.places.take(episodes)
        self._lengths = whole.lengths.take(episodes)
        self._ends = Ends(whole.first_steps.take(episodes) > 0, whole.is_open.take(episodes))
        self._shift = anchors - self._places
        self._lowest = anchors
        self._reached = MOST

    @classmethod
    def of(cls, source: Handle, anchors: Array, across: bool = False) -> Joined:
        """Return the anchors among the live episodes as they are now; `across`: among runs of episodes."""
        with thread.searching, source.lock:
            live = source.live
            whole = live.runs if across else live.whole
            if not len(live):
                live = LiveEpisodes(np.full(1, MOST), np.ones(1, np.int64))  # in which none of them lies
                whole = live.whole
            index, steps, lengths = live.locate(anchors)
        return cls(source, whole, anchors, index, steps, lengths.astype(np.int64))

    def places(self, kinds: list[tuple[Steps, bool]], rows: int, is_covered: bool) -> tuple[list[Places], Array | None]:
        """Return where each of the steps is; and which items lie in their episodes, None if all do.

        Args:
            kinds: steps, and whether they come without an axis of their own.
            rows: of the ring.
            is_covered: whether positions are needed.
        """
        found: list[Places] = []
        stop = self._first + self._lengths
        for steps, is_alone in kinds:
            low = self._places + steps.lowest
            high = self._places + steps.highest
            is_pad = at = None
            if steps.padded:
                wanted = self._places[:, None] + steps.array
                blanks = self._ends.blanks(steps.blank_first, steps.blank_last)
                wanted, is_pad = clamp(wanted, self._first, self._lengths, *blanks)
                at = wanted + self._shift[:, None]
                slots = at % rows
                low, high = wanted.min(1), wanted.max(1)
            else:
                self._note((low < self._first) | (high >= stop))
                slots = steps.slots(self.anchors, rows)
                at = self.anchors[:, None] + steps.array if is_covered else None
            crossing = np.flatnonzero((low < self._begin) | (high >= self._end))
            if len(crossing):
                if is_pad is None:
                    wanted = self._places[crossing][:, None] + steps.array
                    last = (stop[crossing] - 1)[:, None]
                    wanted = np.clip(wanted, self._first[crossing][:, None], last)
                else:
                    wanted = wanted[crossing]
                positions = self.whole.positions(wanted)
                slots[crossing] = positions % rows
                if at is not None:
                    at[crossing] = positions
                if self._lowest is self.anchors:
                    self._lowest = self.anchors.copy()
                lowest = np.minimum(self._lowest[crossing], positions.min(1))
                self._lowest[crossing] = lowest
            at = at if is_covered else None
            found.append(places_of(slots, is_pad, at) if is_alone else (slots, is_pad, at))
        return found, None if self._outside is None else ~self._outside

    def _note(self, outside: Array) -> None:
        if outside.any():
            self._outside = outside if self._outside is None else self._outside | outside

    def items(
        self, rows: JoinedRows, cut: Cut, batch: Mapping[str, Array], rng: np.random.Generator, numbers: Numbers
    ) -> Items:
        """Return the items, for computed columns."""
        return Items(
            rows,
            cut,
            self.anchors,
            self._names,
            self._lengths,
            batch,
            rng,
            numbers,
            self._places - self._first,
            self._first,
            self._ends,
        )

    def reach(self, position: int) -> None:
        """Note that a position was read for some item."""
        self._reached = min(self._reached, position)

    def still_whole(self, good: Array | None) -> Array | None:
        """Validate the copy: return which items are good, None for all."""
        if self._lowest is self.anchors and self._reached == MOST:
            return good
        tail = self._source.newest_tail()
        whole = self._lowest >= tail
        if self._reached < tail:  # it is not known for which item
            whole[:] = False
        if good is not None:
            whole &= good
        return None if whole.all() else whole


class JoinedRows(ItemRows):
    """The rows of a ring with parts; the position of a row is its place among the joined episodes."""

    def __init__(self, source: Handle, joined: Joined) -> None:
        assert source.rows is not None
        self._source, self._joined, self._rows = source, joined, source.rows
        self._whole = joined.whole
        self.names = source.rows.by_name
        self.size = max(1, int(self._whole.lengths.sum()))
        self._lowest = MOST

    def take(self, column: str, places: Array, starts: Array) -> Array:
        """Return copies of rows."""
        positions = self._whole.positions(places)
        if positions.size:
            lowest = int(positions.min())
            self._lowest = min(self._lowest, lowest)
            self._joined.reach(lowest)
        return self._rows.take([column], positions, self._source.head)[0]

    def read(self, column: str, start: int, length: int) -> Array:
        """Return a copy of rows of one or more episodes."""
        places = np.arange(start, start + length)
        return self.take(column, places, places)

    def key_of(self, column: str) -> Any:
        """Return the joined episodes, None for a column whose values may change."""
        return None if self._rows.may_change(column) else self._whole

    def _episodes(self, starts: Array) -> Array:
        found: Array = self._whole.places.searchsorted(starts)
        return found

    def positions(self, places: Array) -> Array:
        """Return where the steps at these places are stored."""
        return self._whole.positions(places)

    def are_begins(self, places: Array) -> Array:
        """Tell at which of these places an episode begins."""
        return self._whole.are_begins(places)

    def are_open(self, starts: Array) -> Array:
        """Tell of the episodes that begin at these places which have not ended."""
        found: Array = self._whole.is_open.take(self._episodes(starts))
        return found

    def first_steps(self, starts: Array) -> Array:
        """Return how many steps of the episodes that begin at these places were evicted."""
        found: Array = self._whole.first_steps.take(self._episodes(starts))
        return found

    def newest_tail(self) -> int:
        """Return 0 if all rows that were taken are whole, else a place beyond all of them."""
        return 0 if self._lowest >= self._source.newest_tail() else MOST
