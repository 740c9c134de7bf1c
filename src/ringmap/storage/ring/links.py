"""Linked parts: episodes that are stored in parts, and the same episodes with their parts joined.

    positions   |a0 a0 a0|b0 b0|a1 a1|whole|b1 b1 b1|a2|      a part is stored like an episode, others may lie between
    ordinal         0       1     2     3      4     5
    chain           0       3     0     -      3     0        the position of the chain's first step
    step            0       0     3     -      2     5        how many steps of the chain were stored before the part
    previous        -       -     0     -      3     5        the position of the part before, as its record names it

    joined      |a0 a0 a0 a1 a1 a2|b0 b0 b1 b1 b1|whole|      places: a step's number in this order

A part follows the live part that it names if its step is where that one stops. Otherwise a part between them was
dropped, and it begins an episode of its own. An episode is named by the position of its first step: of a chain, also
when that was evicted. So episodes keep their names and their order for life; only an episode that begins after a
dropped part is named by what is left of it.

Parts are linked as they are added, so that the steps around a part are found by walking from part to part (`Links`).
The joined episodes of one moment (`WholeEpisodes`) are made again after a change, for whoever asks for episodes.

Invariants: names rise; the parts of an episode meet, and their positions rise; a part is linked to the one that it
follows. Not here: clips (clips/index.py), records (records/table.py).
Cost: 40 bytes per live episode from the first part on that is stored; nothing before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringmap.storage.ring.arrays import GrowingArray

__all__ = ["NONE", "NO_PART", "Links", "Part", "Parts", "WholeEpisodes"]

Array = np.ndarray[Any, np.dtype[Any]]

NONE = -1
"""Stands for the chain of an episode that has none, for no part, and for a position that is not live."""

_CHAIN, _STEP, _LANE, _BEFORE, _AFTER = range(5)


class Parts(NamedTuple):
    """The parts among some episodes, int64 `(n,)` each.

    `chains`: the position of the chain's first step, NONE for an episode without a chain; `steps`: how many steps of
    its chain were stored before each part, 0 without a chain; `lanes`: NONE without a chain; `previous`: the position
    of the part before, NONE for none; None where it is not known.
    """

    chains: Array
    steps: Array
    lanes: Array
    previous: Array | None = None

    @classmethod
    def none(cls, count: int) -> Parts:
        """Return those of episodes none of which is a part."""
        none = np.full(count, NONE)
        return cls(none, np.zeros(count, np.int64), none, none)

    @property
    def rows(self) -> Array:
        """A row `chain, step, lane, before, after` for each, which is not linked yet."""
        rows = np.full((len(self.chains), 5), NONE)
        rows[:, _CHAIN], rows[:, _STEP], rows[:, _LANE] = self[:3]
        return rows


Part = tuple[int, int, int, int]
"""The same of one episode: chain, step, lane, previous."""

NO_PART: Part = NONE, 0, NONE, NONE


class Links:
    """Which parts the live episodes are, and which part each of them follows, by ordinal. At first those of
    `[first, last)` are live, and none is a part."""

    __slots__ = ("_most", "_table", "ended", "num_parts")

    def __init__(self, first: int, last: int) -> None:
        self._table: GrowingArray[int] = GrowingArray(Parts.none(last - first).rows, first)
        self.ended: dict[int, int] = {}
        """Chain -> the number of the record that ended it."""
        self.num_parts = 0
        """Live episodes that are parts."""
        self._most = 64

    def append(self, part: Part, starts: Array, lengths: Array, first: int) -> None:
        """Add the newest live episode, as `extend` does. O(log episodes)."""
        chain, step, lane, previous = part
        self._table.extend(np.array([[chain, step, lane, NONE, NONE]]), first)
        if chain == NONE:
            return
        self.num_parts += 1
        before, newest = int(starts.searchsorted(previous)), len(starts) - 1
        rows = self._table.span(first, first + len(starts))
        if rows[before, _CHAIN] == chain and rows[before, _STEP] + lengths[before] == step:
            rows[before, _AFTER], rows[newest, _BEFORE] = first + newest, first + before

    def extend(self, parts: Parts, starts: Array, lengths: Array, first: int) -> None:
        """Add the newest live episodes, which are these parts, and link them to those that they follow. O(log episodes)
        amortised for each. `starts`, `lengths`: of all live episodes; `first`: the ordinal of the oldest."""
        self._table.extend(parts.rows, first)
        which = (parts.chains != NONE).nonzero()[0]
        self.num_parts += len(which)
        if parts.previous is None or not len(which):
            return
        at, previous = which + (len(starts) - len(parts.chains)), parts.previous.take(which)
        # A view may hold an episode more than once, side by side: a part follows the one of the same rank.
        before = starts.searchsorted(previous) + at - starts.searchsorted(starts.take(at))
        before = np.minimum(before, len(starts) - 1)
        rows = self._table.span(first, first + len(starts))
        meets = rows[before, _CHAIN] == rows[at, _CHAIN]
        meets &= rows[before, _STEP] + lengths.take(before) == rows[at, _STEP]
        at, before = at[meets], before[meets]
        rows[at, _BEFORE], rows[before, _AFTER] = before + first, at + first

    def evict(self, ordinal: int) -> None:
        """Forget the oldest live episode. O(1)."""
        self.num_parts -= bool(self._table.span(ordinal, ordinal + 1)[0, _CHAIN] != NONE)

    def of(self, first: int, last: int) -> Parts:
        """Return what the episodes of these ordinals are: views, valid until the next one is added."""
        rows = self._table.span(first, last)
        return Parts(rows[:, _CHAIN], rows[:, _STEP], rows[:, _LANE])

    def beside(self, ordinals: Array, is_before: bool) -> Array:
        """Return the ordinals of the parts that these follow, which may have been evicted since, or of those that
        follow these; NONE for none."""
        found: Array = self._table.take(ordinals)[:, _BEFORE if is_before else _AFTER]
        return found

    def end(self, chain: int, seq: int, first: int, last: int) -> None:
        """Note that a chain has ended, with record `seq`, while the ordinals `[first, last)` are live. O(1)
        amortised."""
        self.ended[chain] = seq
        if len(self.ended) > self._most:
            live = set(self.of(first, last).chains.tolist())
            self.ended = {name: seq for name, seq in self.ended.items() if name in live}
            self._most = 2 * len(self.ended) + 64


class WholeEpisodes:
    """The episodes of one moment with their parts joined, and where each of their steps is stored.

    An episode has a number, 0 for the oldest; a step of one has a place; a part has an index among the live episodes.
    Immutable.

    Of each episode: `names`, `lengths` (live steps), `first_steps` (how many were evicted), `places` (of its first
    step), `parts` (the index of its first part in `in_order`), `is_open` (whether it has not ended), `lanes` (NONE for
    one that is not stored in parts). Of each part, by its index: `of_part` (the number of its episode),
    `place_of_part` (the place of its first step); `in_order`: the indices of all parts, episode by episode.
    `num_steps`: of all. `begins`: the places at which episodes begin: `places`, but in `by_lane`; `episodes`: their
    numbers, in this order.

    Made of the starts and lengths of all parts, in the order of positions, their chains, None if none is a part, and
    the chains that have ended.
    """

    __slots__ = (
        "__weakref__",
        "_places",
        "_shifts",
        "_starts",
        "begins",
        "episodes",
        "first_steps",
        "in_order",
        "is_open",
        "lanes",
        "lengths",
        "names",
        "num_steps",
        "of_part",
        "parts",
        "place_of_part",
        "places",
    )

    def __init__(self, starts: Array, lengths: Array, parts: Parts | None, ended: dict[int, int]) -> None:
        chains, steps, lanes, _ = parts or Parts.none(len(starts))
        is_part = chains != NONE
        names = np.where(is_part, chains, starts)
        order = names.argsort(kind="stable")
        name, begins = names[order], np.ones(len(starts), np.bool_)
        same = name[1:] == name[:-1]
        joins = same & is_part[order][1:] & is_part[order][:-1]
        begins[1:] = ~(joins & _meet(steps[order], lengths[order]))
        if (begins[1:] & same).any():  # what follows a dropped part is an episode of its own
            first = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
            is_rest = np.append(False, same)[first]
            names[order[is_rest]] = starts[order[first[is_rest]]]
            again = names[order].argsort(kind="stable")
            order, begins = order[again], begins[again]
        self._lay_out(order, begins, starts[order], lengths[order].astype(np.int64))
        oldest = order[self.parts]
        self.names, self.first_steps, self.lanes = names[oldest], steps[oldest], lanes[oldest]
        self.begins, self.episodes = self.places, np.arange(len(oldest))
        self.is_open = is_part[oldest] & ~np.isin(chains[oldest], list(ended))

    def _lay_out(self, order: Array, begins: Array, starts: Array, sizes: Array) -> None:
        """Give each part its places, in this order; `begins` tells which parts begin an episode."""
        self.in_order, self.parts = order, begins.nonzero()[0]
        self._starts = starts
        stops = sizes.cumsum()
        self._places = stops - sizes
        self._shifts = starts - self._places
        self.places = self._places[self.parts]
        self.lengths = np.diff(self.places, append=stops[-1:])
        self.num_steps = int(stops[-1]) if len(stops) else 0
        self.of_part, self.place_of_part = np.empty((2, len(order)), np.int64)
        self.of_part[order], self.place_of_part[order] = begins.cumsum() - 1, self._places

    def by_lane(self) -> WholeEpisodes:
        """Return runs of episodes in place of episodes: those of a lane one after the other, or in the order of storage
        without lanes.

        A run ends with an episode that has not ended: the next step of that is not known. `episodes` are the numbers
        here of the episodes of the runs, in order.
        """
        order = self.lanes.argsort(kind="stable")
        lanes = self.lanes[order]
        begins = np.ones(len(self), np.bool_)
        begins[1:] = (lanes[1:] != lanes[:-1]) | self.is_open[order][:-1]
        rank = order.argsort()  # the inverse
        number = self.of_part[self.in_order]
        parts = rank[number].argsort(kind="stable")
        number = number[parts]
        is_first = np.ones(len(parts), np.bool_)
        is_first[1:] = number[1:] != number[:-1]
        made = object.__new__(WholeEpisodes)
        made._lay_out(self.in_order[parts], is_first & begins[rank[number]], self._starts[parts], self._sizes[parts])
        oldest = order[begins]
        made.names, made.first_steps, made.lanes = self.names[oldest], self.first_steps[oldest], self.lanes[oldest]
        made.begins, made.episodes = made._places[is_first], order
        made.is_open = self.is_open[order][np.append(begins[1:], True)] if len(order) else begins
        return made

    @property
    def _sizes(self) -> Array:
        """The steps of each part, in the order of places."""
        return np.diff(self._places, append=self.num_steps)

    def __len__(self) -> int:
        return len(self.names)

    def are_begins(self, places: Array) -> Array:
        """Tell of each place, 0 or more, whether an episode begins there."""
        found: Array = self.begins.take(self.begins.searchsorted(places, side="right") - 1) == places
        return found

    def positions(self, places: Array) -> Array:
        """Return the positions of places, which exist. O(n log parts)."""
        found: Array = self._shifts.take(self._places.searchsorted(places, side="right") - 1)
        found += places
        return found

    def places_at(self, positions: Array) -> Array:
        """Return the places of positions, -1 of one that is in none of these parts. O(parts + n log parts)."""
        if not len(self._starts):
            return np.full(len(positions), NONE)
        order = self._starts.argsort(kind="stable")
        part = order[np.maximum(self._starts[order].searchsorted(positions, side="right") - 1, 0)]
        steps = positions - self._starts[part]
        return np.where((steps >= 0) & (steps < self._sizes[part]), self._places[part] + steps, NONE)

    def part_at(self, places: Array) -> Array:
        """Return the index of the part that holds each place. O(n log parts)."""
        found: Array = self.in_order.take(self._places.searchsorted(places, side="right") - 1)
        return found

    def along(self, indices: Array, steps: Array) -> tuple[Array, Array]:
        """Return where steps of episodes are stored, counted from the first steps of parts, as `LiveEpisodes.along`
        does."""
        episodes, places = self.of_part.take(indices), self.place_of_part.take(indices)[:, None] + steps
        begins = self.places.take(episodes)
        good = (places[:, 0] >= begins) & (places[:, -1] < begins + self.lengths.take(episodes))
        return self.positions(places), good

    def find(self, names: Array) -> Array:
        """Return the numbers of the episodes with these names, -1 for one that is not live. O(n log episodes)."""
        if not len(self.names):
            return np.full(len(names), NONE)
        found = np.minimum(self.names.searchsorted(names), len(self.names) - 1)
        return np.where(self.names.take(found) == names, found, NONE)

    def parts_of(self, episode: int) -> Array:
        """Return the indices of the parts of an episode, in order."""
        stop = self.parts[episode + 1] if episode + 1 < len(self.parts) else len(self.in_order)
        return self.in_order[self.parts[episode] : stop]

    def parts_in(self, episodes: Array) -> tuple[Array, Array, Parts]:
        """Return starts, lengths and chains of the parts of some episodes, in the order of positions. O(parts)."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[episodes] = True
        number, previous = self.of_part[self.in_order], np.append(NONE, self._starts[:-1])[: len(self._starts)]
        previous[self.parts] = NONE
        kept = chosen[number].nonzero()[0]
        kept = kept[self._starts[kept].argsort(kind="stable")]
        number = number[kept]
        steps = self.first_steps[number] + self._places[kept] - self.places[number]
        parts = Parts(self.names[number], steps, self.lanes[number], previous[kept])
        return self._starts[kept], self._sizes[kept], parts

    def check(self) -> list[str]:
        """Return violated invariants, in words; empty when sound. O(episodes)."""
        if (np.diff(self.names) <= 0).any():
            return ["chains: two episodes have the same name"]
        rises = np.diff(self._starts) > 0
        rises[self.parts[1:] - 1] = True
        return [] if rises.all() else ["chains: the parts of an episode are not in order"]


def _meet(steps: Array, lengths: Array) -> Array:
    """Tell of the parts of a chain, but the first, whether each begins at the step at which the one before stops."""
    found: Array = steps[1:] == steps[:-1] + lengths[:-1]
    return found
