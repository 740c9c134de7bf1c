"""Chains: episodes that are stored in parts, and the same episodes with their parts joined.

    positions   |a0 a0 a0|b0 b0|a1 a1|whole|b1 b1 b1|a2|      a part is stored like an episode, others may lie between
    ordinal         0       1     2     3      4     5
    chain           0       3     0     -      3     0        the position of the chain's first step
    step            0       0     3     -      2     5        how many steps of the chain were stored before the part

    joined      |a0 a0 a0 a1 a1 a2|b0 b0 b1 b1 b1|whole|      places: a step's number in this order

A part follows the newest live part of its chain if its step is where that one stops. Otherwise a part between them was
dropped, and it begins an episode of its own. An episode is named by the position of its first step: of a chain, also
when that was evicted. So episodes keep their names and their order for life; only an episode that begins after a
dropped part is named by what is left of it.

Parts are linked as they are added, so that the steps around a part are found by walking from part to part (`Chains`).
The joined episodes of one moment (`WholeEpisodes`) are made again after each change.

Invariants: names rise; the parts of an episode meet, and their positions rise; a part is linked to the one that it
follows. Not here: clips (clips/index.py), records (records/table.py).
Cost: 40 bytes per live episode from the first part on that is stored; nothing before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringmap.storage.ring.arrays import GrowingArray

__all__ = ["NONE", "Chains", "Parts", "WholeEpisodes"]

Array = np.ndarray[Any, np.dtype[Any]]

NONE = -1
"""Stands for the chain of an episode that has none, and for a position that is not live."""


class Parts(NamedTuple):
    """The chains of episodes.

    `chains`: int64 `(n,)`, the position of the chain's first step, NONE for an episode without a chain; `steps`: int64
    `(n,)`, how many steps of its chain were stored before each part; 0 without a chain; `lanes`: int64 `(n,)`, of each
    part; NONE without a chain.
    """

    chains: Array
    steps: Array
    lanes: Array


class Chains:
    """The chains of the live episodes, by ordinal.

    Args:
        first: the ordinal of the oldest live episode.
        last: one past the ordinal of the newest one. None of these is a part.
    """

    __slots__ = ("_most", "_newest", "after", "before", "ended", "lanes", "names", "num_parts", "steps")

    def __init__(self, first: int, last: int) -> None:
        self.names: GrowingArray[int] = GrowingArray(np.full(last - first, NONE), first)
        self.steps: GrowingArray[int] = GrowingArray(np.zeros(last - first, np.int64), first)
        self.lanes: GrowingArray[int] = GrowingArray(np.full(last - first, NONE), first)
        self.before: GrowingArray[int] = GrowingArray(np.full(last - first, NONE), first)
        """The ordinal of the part that each follows, which may have been evicted since; NONE for none."""
        self.after: GrowingArray[int] = GrowingArray(np.full(last - first, NONE), first)
        """The ordinal of the part that follows each; NONE for none."""
        self._newest: dict[int, tuple[int, int]] = {}
        """Chain -> the ordinal of its newest part, and the step of the chain at which that stops."""
        self.ended: dict[int, int] = {}
        """Chain -> the number of the record that ended it."""
        self.num_parts = 0
        """Live episodes that are parts."""
        self._most = 64

    def append(self, chain: int, step: int, lane: int, length: int, first: int, ordinal: int) -> None:
        """Add the newest episode; values before ordinal `first` may be dropped. O(1) amortised.

        Args:
            chain: as in `Parts`.
            step: as in `Parts`.
            lane: as in `Parts`.
            length: its steps.
            first: the ordinal of the oldest live episode.
            ordinal: its own.
        """
        is_part = chain != NONE
        self.num_parts += is_part
        self.names.append(chain, first)
        self.steps.append(step, first)
        self.lanes.append(lane if is_part else NONE, first)
        self.before.append(NONE, first)
        self.after.append(NONE, first)
        if is_part:
            self._link(chain, step, step + length, ordinal, ordinal, first)

    def extend(self, parts: Parts | None, lengths: Array, first: int, ordinal: int) -> None:
        """Add the newest episodes; None: none of them is a part. `ordinal`: of the first one."""
        count = len(lengths)
        chains, steps, lanes = parts or _no_parts(count)
        before, after = np.full(count, NONE), np.full(count, NONE)
        which = np.flatnonzero(chains != NONE)
        self.num_parts += len(which)
        which = which[np.argsort(chains[which], kind="stable")]  # chain by chain
        name, stops = chains[which], steps[which] + lengths[which]
        same = name[1:] == name[:-1]
        meets = same & (steps[which][1:] == stops[:-1])
        before[which[1:][meets]] = which[:-1][meets] + ordinal
        after[which[:-1][meets]] = which[1:][meets] + ordinal
        for values, added in (
            (self.names, chains),
            (self.steps, steps),
            (self.lanes, lanes),
            (self.before, before),
            (self.after, after),
        ):
            values.extend(added, first)
        ends = np.flatnonzero(np.append(~same, True)) if len(which) else which
        begins = np.append(0, ends[:-1] + 1) if len(which) else which
        oldest, newest = which[begins], which[ends]
        for one in zip(
            chains[oldest].tolist(),
            steps[oldest].tolist(),
            stops[ends].tolist(),
            (oldest + ordinal).tolist(),
            (newest + ordinal).tolist(),
            strict=True,
        ):
            self._link(*one, first)

    def _link(self, chain: int, step: int, stop: int, oldest: int, newest: int, first: int) -> None:
        """Link a part that was added to the newest one of its chain, if it follows that.

        Args:
            chain: of the part.
            step: at which it begins.
            stop: the step at which the newest part stops that was added with it.
            oldest: the ordinal of the part.
            newest: that of the newest one.
            first: the ordinal of the oldest live episode.
        """
        known = self._newest.get(chain)
        if known is not None and known[0] >= first and known[1] == step:
            self.before.put(oldest, known[0])
            self.after.put(known[0], oldest)
        self._newest[chain] = newest, stop
        if len(self._newest) > 2 * self.num_parts + 64:
            self._newest = {name: one for name, one in self._newest.items() if one[0] >= first}

    def evict(self, ordinal: int) -> None:
        """Forget the oldest live episode. O(1)."""
        self.num_parts -= self.names.at(ordinal) != NONE

    def of(self, first: int, last: int) -> Parts:
        """Return the chains of the episodes of these ordinals."""
        return Parts(*(values.span(first, last) for values in (self.names, self.steps, self.lanes)))

    def end(self, chain: int, seq: int, first: int, last: int) -> None:
        """Note that a chain has ended, with record `seq`. O(1) amortised.

        Args:
            chain: as in `Parts`.
            seq: the number of the record.
            first: the ordinal of the oldest live episode.
            last: one past the ordinal of the newest one.
        """
        self.ended[chain] = seq
        if len(self.ended) > self._most:
            live = set(np.unique(self.names.span(first, last)).tolist())
            self.ended = {name: seq for name, seq in self.ended.items() if name in live}
            self._most = 2 * len(self.ended) + 64


class WholeEpisodes:
    """The episodes of one moment with their parts joined, and where each of their steps is stored.

    An episode has a number, 0 for the oldest; a step of one has a place; a part has an index among the live episodes.
    Immutable.

    Args:
        starts: position of the first step of each part, in the order of positions.
        lengths: steps of each.
        parts: the chains; None: none of them is a part.
        ended: the chains that have ended.

    Attributes:
        names: of each episode, int64.
        lengths: live steps of each.
        first_steps: how many steps of each were evicted.
        places: the place of the first step of each.
        parts: the index of the first part of each in `in_order`.
        in_order: indices of all parts, episode by episode.
        is_open: which episodes have not ended.
        lanes: of each episode; NONE for one that is not stored in parts.
        begins: the places at which episodes begin: `places`, but in `by_lane`.
    """

    __slots__ = (
        "__weakref__",
        "_begin_of",
        "_episode_of",
        "_into",
        "_later",
        "_place_of",
        "_places",
        "_shifts",
        "_starts",
        "begins",
        "ended",
        "episodes",
        "first_steps",
        "in_order",
        "is_open",
        "lanes",
        "lengths",
        "names",
        "parts",
        "places",
    )

    def __init__(self, starts: Array, lengths: Array, parts: Parts | None, ended: dict[int, int]) -> None:
        count = len(starts)
        sizes = lengths.astype(np.int64)
        chains, steps, lanes = parts or _no_parts(count)
        is_part = chains != NONE
        name = np.where(is_part, chains, starts)
        order = np.argsort(name, kind="stable")
        begins = _begins(name[order], steps[order], sizes[order], is_part[order])
        broken = begins.copy()
        broken[:1] = False
        broken[1:] &= name[order][1:] == name[order][:-1]
        if broken.any():  # what follows a dropped part is an episode of its own
            first = np.maximum.accumulate(np.where(begins, np.arange(count), 0))
            is_rest = broken[first]
            named = name[order]
            named[is_rest] = starts[order][first[is_rest]]
            name[order] = named
            again = np.argsort(name[order], kind="stable")
            order, begins = order[again], begins[again]
        self._lay_out(order, begins, starts[order], sizes[order])
        self.names = name[order][self.parts]
        self.first_steps = steps[order][self.parts]
        self.lanes = lanes[order][self.parts]
        self.begins = self.places
        self.episodes = np.arange(len(self.parts))
        self.is_open = is_part[order][self.parts]
        self.ended = ended
        if ended and self.is_open.any():
            self.is_open &= ~np.isin(chains[order][self.parts], list(ended))

    def _lay_out(self, order: Array, begins: Array, starts: Array, sizes: Array) -> None:
        """Give each part its places, in this order; `begins` tells which parts begin an episode."""
        self.in_order = order
        self.parts = np.flatnonzero(begins)
        self._starts = starts
        stops = np.cumsum(sizes)
        self._places = stops - sizes
        self._later = self._places[1:]
        self._shifts = starts - self._places
        self.places = self._places[self.parts]
        self.lengths = np.diff(self.places, append=stops[-1:])
        self._place_of = np.empty(len(order), np.int64)
        self._place_of[order] = self._places
        self._episode_of = np.empty(len(order), np.int64)
        self._episode_of[order] = np.cumsum(begins) - 1
        self._into = np.empty(len(order), np.int64)
        self._into[order] = -self._shifts
        self._begin_of = self.places.take(self._episode_of)

    def by_lane(self) -> WholeEpisodes:
        """Return runs of episodes in place of episodes: those of a lane one after the other, or in the order of storage
        without lanes.

        A run ends with an episode that has not ended: the next step of that is not known. `episodes` are the numbers
        here of the episodes of the runs, in order.
        """
        order = np.argsort(self.lanes, kind="stable")
        lanes = self.lanes[order]
        begins = np.ones(len(self), np.bool_)
        begins[1:] = (lanes[1:] != lanes[:-1]) | self.is_open[order][:-1]
        rank = np.empty(len(self), np.int64)
        rank[order] = np.arange(len(self))
        of_part = self._episode_of.take(self.in_order)
        parts = np.argsort(rank[of_part], kind="stable")
        of_part = of_part[parts]
        sizes = np.diff(self._places, append=self.lengths.sum())[parts]
        is_first = np.ones(len(parts), np.bool_)
        is_first[1:] = of_part[1:] != of_part[:-1]
        runs = np.flatnonzero(begins)
        made = object.__new__(WholeEpisodes)
        made._lay_out(self.in_order[parts], is_first & begins[rank[of_part]], self._starts[parts], sizes)
        made.names = self.names[order][runs]
        made.first_steps = self.first_steps[order][runs]
        made.lanes = lanes[runs]
        made.begins = made._places[is_first]
        made.episodes = order
        made.is_open = self.is_open[order][np.append(runs[1:], len(self)) - 1] if len(runs) else begins
        made.ended = self.ended
        return made

    def place_in_run(self, places: Array) -> tuple[Array, Array]:
        """Return the number of the episode at each place, and the step in it."""
        at = self.begins.searchsorted(places, side="right") - 1
        return self.episodes.take(at), places - self.begins.take(at)

    def are_begins(self, places: Array) -> Array:
        """Tell of each place, 0 or more, whether an episode begins there."""
        at = self.begins.searchsorted(places, side="right") - 1
        found: Array = self.begins.take(at) == places
        return found

    def __len__(self) -> int:
        return len(self.names)

    def episode_of(self, indices: Array) -> Array:
        """Return the number of the episode of each part."""
        found: Array = self._episode_of.take(indices)
        return found

    def lengths_of(self, indices: Array) -> Array:
        """Return how many steps are left of the episode of each part."""
        found: Array = self.lengths.take(self._episode_of.take(indices))
        return found

    def begin_of(self, indices: Array) -> Array:
        """Return the place of the first step of the episode of each part."""
        found: Array = self._begin_of.take(indices)
        return found

    def places_in(self, indices: Array, positions: Array) -> Array:
        """Return the places of positions, each in the part of an index; before it, of steps that are stored
        elsewhere."""
        found: Array = self._into.take(indices)
        found += positions
        return found

    def place_of(self, indices: Array) -> Array:
        """Return the place of the first step of each part."""
        found: Array = self._place_of.take(indices)
        return found

    def positions(self, places: Array) -> Array:
        """Return the positions of places, which exist. O(n log parts)."""
        found: Array = self._shifts.take(self._later.searchsorted(places, side="right"))
        found += places
        return found

    def places_at(self, positions: Array) -> Array:
        """Return the places of positions, -1 of one that is in none of these parts. O(parts + n log parts)."""
        if not len(self._starts):
            return np.full(len(positions), NONE)
        order = np.argsort(self._starts, kind="stable")
        part = order[np.maximum(self._starts[order].searchsorted(positions, side="right") - 1, 0)]
        steps = positions - self._starts[part]
        lengths = np.diff(self._places, append=self.lengths.sum())
        return np.where((steps >= 0) & (steps < lengths[part]), self._places[part] + steps, NONE)

    def part_at(self, places: Array) -> Array:
        """Return the index of the part that holds each place. O(n log parts)."""
        found: Array = self.in_order.take(self._places.searchsorted(places, side="right") - 1)
        return found

    def along(self, indices: Array, steps: Array) -> tuple[Array, Array]:
        """Return where steps of episodes are stored, counted from the first steps of parts, as `LiveEpisodes.along`
        does."""
        begins = self.begin_of(indices)
        stops = begins + self.lengths.take(self.episode_of(indices))
        places = self.place_of(indices)[:, None] + steps
        good = (places[:, 0] >= begins) & (places[:, -1] < stops)
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
        number = self._episode_of.take(self.in_order)
        kept = np.flatnonzero(chosen[number])
        kept = kept[np.argsort(self._starts[kept], kind="stable")]
        lengths = np.diff(self._places, append=self.lengths.sum())
        number = number[kept]
        steps = self.first_steps[number] + self._places[kept] - self.places[number]
        return (
            self._starts[kept],
            lengths[kept],
            Parts(self.names[number], steps, self.lanes[number]),
        )

    def check(self) -> list[str]:
        """Return violated invariants, in words; empty when sound. O(episodes)."""
        if (np.diff(self.names) <= 0).any():
            return ["chains: two episodes have the same name"]
        rises = np.diff(self._starts) > 0
        rises[self.parts[1:] - 1] = True
        return [] if rises.all() else ["chains: the parts of an episode are not in order"]


def _no_parts(count: int) -> Parts:
    none = np.full(count, NONE)
    return Parts(none, np.zeros(count, np.int64), none)


def _begins(name: Array, steps: Array, sizes: Array, is_part: Array) -> Array:
    """Tell which parts, in the order of their chains, begin an episode."""
    begins = np.ones(len(name), np.bool_)
    follows = (name[1:] == name[:-1]) & is_part[1:] & is_part[:-1]
    begins[1:] = ~(follows & (steps[1:] == steps[:-1] + sizes[:-1]))
    return begins
