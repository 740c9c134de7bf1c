"""The rows that a batch of transitions is summed from: of one ring, or of several at once.

    transitions      t0 t1 t2 t3 t4           RowsOfOne, and RowsOfAdjacent of several rings whose columns are mapped
    side by side ranked           t1 t4 | t3 | t0 t2       RowsOfMany: ring by ring; `places` 1 4 3 0 2
                     ring 0  1    2

What is computed for each transition is computed for all of them at once; a column takes one copy for each ring. Wide
values are copied to their places in the batch, others are put there at the end by one copy more.

Invariants: a ring that fails is noted, and its values mean nothing; no ring waits for another.
Not here: which rows are read (nstep.py), the looks before and after (clips/many.py, nstep.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ringmap.buffers.transitions.next_observations import NextObservations
from ringmap.clips.adjacent import RING_FAULTS, AdjacentRings
from ringmap.clips.many import groups
from ringmap.storage.columns.copying import SPLIT_NBYTES, empty, take, together
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle

__all__ = ["RowsOfAdjacent", "RowsOfMany", "RowsOfOne", "are_live"]

Array = np.ndarray[Any, np.dtype[Any]]

_WIDE_NBYTES = 1 << 14
"""Bytes of a value from which a call for each, right to its place, takes less time than a second copy of all."""


class RowsOfOne:
    """The rows of one ring, as of now.

    `head`: of the ring; `stop`: where the newest call ended; `is_dense`: whether all positions up to there are stored.
    """

    def __init__(self, source: Handle, following: NextObservations) -> None:
        assert source.rows is not None
        self.source, self.rows, self.following = source, source.rows, following
        with thread.searching, source.lock:
            self.head, live = source.head, source.live
            self.stop: int = live.stop
            self.is_dense = live.is_dense

    def take(self, names: Sequence[str], at: Array, prefix: str = "") -> list[Array]:
        """Return columns of the rows at these positions. `prefix`: of their names in a batch."""
        return self.rows.take(names, at, self.head)

    def take_large(self, name: str, at: Array, prefix: str, into: Array | None, threads: int) -> Array:
        """Return the rows at these positions, `(B, size)` of stacks of frames, else `(B,)`, in `into` if it is an
        array."""
        return self.rows.take([name], at, self.head, [into], threads)[0]

    def are_live(self, at: Array) -> Array:
        """Tell which positions are stored."""
        return are_live(self.source, at)

    def lanes_of(self, which: Array, at: Array) -> Array:
        """Return the column `lanes` of rows near some transitions: `at` is `(len(which), n)`."""
        return self.rows.take(["lanes"], at, self.head)[0]

    def find(self, last: Array, which: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of some transitions, whose last steps are at `last[which]`, have a next observation apart, and
        these."""
        return self.following.find(self.source, last[which], self.head)

    def places(self, values: Array) -> Array | None:
        """Return where the values of each transition are in an array of the batch; None: in the order of the
        transitions."""
        return None


class RowsOfAdjacent:
    """The rows of rings side by side, as of now: transitions are in the order in which they were asked for.

    Args:
        rings: the rings.
        following: what finds the next observations of each.
        places: among the rings, of the ring of each transition.
    """

    head = -1
    """Each ring has its own."""

    def __init__(self, rings: AdjacentRings, following: Sequence[NextObservations], places: Array) -> None:
        self._rings, self._following, self._ring_of = rings, following, places
        ends = rings.ends()
        self.stop, self.is_dense = ends.stops.take(places), ends.is_dense
        self._laps, self._first = rings.laps(places), rings.first_rows(places)

    def take(self, names: Sequence[str], at: Array, prefix: str = "") -> list[Array]:
        """Return columns of the rows at these positions. `prefix`: of their names in a batch."""
        slots, by_name, head = at % self._laps, self._rings.rows.by_name, self._rings.head
        slots += self._first
        return [by_name[name].take(slots, None, head) for name in names]

    def take_large(self, name: str, at: Array, prefix: str, into: Array | None, threads: int) -> Array:
        """Return the rows at these positions, `(B, size)` of stacks of frames, else `(B,)`, in `into` if it is an
        array."""
        laps, first = self._laps, self._first
        if at.ndim > 1:
            laps = laps if isinstance(laps, int) else laps[:, None]
            first = first if isinstance(first, int) else first[:, None]
        slots = at % laps
        slots += first
        return take(self._rings.rows.by_name[name], slots, into, threads, self._rings.head)

    def are_live(self, at: Array) -> Array:
        """Tell which positions are stored."""
        found = np.empty(at.shape, np.bool_)
        for place, which in groups(self._ring_of):
            found[which] = are_live(self._rings.sources[place], at[which])
        return found

    def lanes_of(self, which: Array, at: Array) -> Array:
        """Return the column `lanes` of rows near some transitions: `at` is `(len(which), n)`."""
        laps, first = (
            value if isinstance(value, int) else value[which][:, None] for value in (self._laps, self._first)
        )
        lanes: Array = self._rings.rows.by_name["lanes"].take(at % laps + first, None, self._rings.head)
        return lanes

    def find(self, last: Array, which: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of some transitions, whose last steps are at `last[which]`, have a next observation apart, and
        these."""
        known, found, names = list[Array](), list[dict[str, Array]](), list[str]()
        for place, mine in groups(self._ring_of.take(which)):
            source = self._rings.sources[place]
            try:
                here, values = self._following[place].find(source, last[which[mine]], source.head)
            except RING_FAULTS:  # the look after the copy says so
                continue
            if len(here):
                known.append(mine[here])
                found.append(values)
                names = list(values)
        if not known:
            return np.empty(0, np.int64), {}
        return np.concatenate(known), {name: np.concatenate([values[name] for values in found]) for name in names}

    def places(self, values: Array) -> Array | None:
        """Return where the values of each transition are in an array of the batch; None: in the order of the
        transitions."""
        return None


class RowsOfMany:
    """The rows of several rings, as of now: transitions are ranked ring by ring.

    Args:
        sources: the rings, and what finds their next observations.
        places: of the transitions of each ring in the batch.
        batch: column -> `(size, ...)`: wide values are put there.
        size: of the batch.
        threads: maximum number of threads for the copy of wide values.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Handle, NextObservations]],
        places: Sequence[Array],
        batch: dict[str, Array],
        size: int,
        threads: int,
    ) -> None:
        self._rings = [RowsOfOne(*source) for source in sources]
        counts = [len(part) for part in places]
        stops = np.cumsum(counts).tolist()
        self.bounds = list(zip([0, *stops[:-1]], stops, strict=True))
        self.head = -1
        """Each ring has its own."""
        self.faults: dict[int, Exception] = {}
        """By the number of the ring: the others can still be read."""
        self._places, self._batch, self._size, self._threads = np.concatenate(places), batch, size, threads
        self._placed = set[int]()
        self.stop = np.repeat([ring.stop for ring in self._rings], counts)
        self.is_dense = all(ring.is_dense for ring in self._rings)

    def _is_wide(self, name: str, at: Array) -> bool:
        column = self._rings[0].rows.by_name[name]
        if at.ndim == 1 and not column.spec.shape:  # a scalar is needed in the order of the ranks
            return False
        nbytes = column.spec.row_nbytes * (at.size // max(1, len(at)))
        return nbytes >= _WIDE_NBYTES and column.is_quick_apart

    def take(self, names: Sequence[str], at: Array, prefix: str = "") -> list[Array]:
        """Return columns of the rows at these positions. `prefix`: of their names in a batch."""
        made, narrow = dict[str, Array](), dict[str, Array]()
        for name in names:
            if self._is_wide(name, at):
                made[name] = self._to_places(name, at, prefix)
            else:
                made[name] = narrow[name] = self._made(name, at, len(at))
        self._fill(narrow, at)
        return [made[name] for name in names]

    def take_large(self, name: str, at: Array, prefix: str, into: Array | None, threads: int) -> Array:
        """Return the rows at these positions, `(B, size)` of stacks of frames, else `(B,)`."""
        if self._is_wide(name, at):
            return self._to_places(name, at, prefix)
        values = self._made(name, at, len(at))
        self._fill({name: values}, at)
        return values

    def _made(self, name: str, at: Array, size: int) -> Array:
        spec = self._rings[0].rows.by_name[name].spec
        return empty((size, *at.shape[1:], *spec.shape), spec.dtype)

    def _fill(self, columns: dict[str, Array], at: Array) -> None:
        """Copy columns, ring after ring."""
        for number, (ring, (start, stop)) in enumerate(zip(self._rings, self.bounds, strict=True)):
            if number in self.faults:
                continue
            into = [values[start:stop] for values in columns.values()]
            try:
                ring.rows.take(list(columns), at[start:stop], ring.head, into)
            except RING_FAULTS as error:
                self.faults[number] = error

    def _to_places(self, name: str, at: Array, prefix: str) -> Array:
        """Copy a column of wide values to the batch."""
        key = prefix + name
        into, fresh = self._batch.get(key), self._made(name, at, 0)
        if into is None or (into.shape[1:], into.dtype) != (fresh.shape[1:], fresh.dtype):
            into = self._batch[key] = self._made(name, at, self._size)
        self._placed.add(id(into))
        whole = into if at.ndim > 1 else into[:, None]
        steps = at if at.ndim > 1 else at[:, None]
        threads = min(self._threads, len(self._rings))
        if steps.size * self._rings[0].rows.by_name[name].spec.row_nbytes < SPLIT_NBYTES:
            threads = 1
        together([partial(self._copy, name, steps, whole, n, threads) for n in range(threads)])
        return into

    def _copy(self, name: str, steps: Array, whole: Array, first: int, every: int) -> None:
        for number in range(first, len(self._rings), every):
            if number in self.faults:
                continue
            ring, (start, stop) = self._rings[number], self.bounds[number]
            copy, places = ring.rows.take, self._places[start:stop].tolist()
            try:
                for at, place in zip(steps[start:stop], places, strict=True):
                    copy([name], at, ring.head, [whole[place]])
            except RING_FAULTS as error:
                self.faults[number] = error

    def are_live(self, at: Array) -> Array:
        """Tell which positions are stored."""
        found = np.empty(at.shape, np.bool_)
        for ring, (start, stop) in zip(self._rings, self.bounds, strict=True):
            found[start:stop] = ring.are_live(at[start:stop])
        return found

    def lanes_of(self, which: Array, at: Array) -> Array:
        """Return the column `lanes` of rows near some transitions: `at` is `(len(which), n)`."""
        lanes = np.zeros(at.shape, np.int32)
        cuts = which.searchsorted([stop for _, stop in self.bounds]).tolist()
        for number, (ring, start, stop) in enumerate(zip(self._rings, [0, *cuts], cuts, strict=False)):
            if start == stop or number in self.faults:
                continue
            try:
                lanes[start:stop] = ring.lanes_of(which[start:stop], at[start:stop])
            except RING_FAULTS as error:
                self.faults[number] = error
        return lanes

    def find(self, last: Array, which: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of some transitions, whose last steps are at `last[which]`, have a next observation apart, and
        these."""
        known, found = list[Array](), list[dict[str, Array]]()
        cuts = which.searchsorted([stop for _, stop in self.bounds]).tolist()
        for number, (ring, start, stop) in enumerate(zip(self._rings, [0, *cuts], cuts, strict=False)):
            if start == stop or number in self.faults:
                continue
            try:
                mine, values = ring.find(last, which[start:stop])
            except RING_FAULTS as error:
                self.faults[number] = error
                continue
            if len(mine):
                known.append(start + mine)
                found.append(values)
        if not known:
            return np.empty(0, np.int64), {}
        joined = {name: np.concatenate([values[name] for values in found]) for name in found[0]}
        return np.concatenate(known), joined

    def places(self, values: Array) -> Array | None:
        """Return where the values of each transition are in an array of the batch; None: they are ranked."""
        return self._places if id(values) in self._placed else None

    def put(self, name: str, values: Array) -> None:
        """Put ranked values into their places in the batch."""
        if id(values) in self._placed:
            return
        into, size = self._batch.get(name), self._size
        if into is None or (into.shape[1:], into.dtype) != (values.shape[1:], values.dtype):
            into = self._batch[name] = empty((size, *values.shape[1:]), values.dtype)
        if len(values) == size:
            values.take(self._order, 0, into, "clip")
        else:
            into[self._places] = values

    @property
    def _order(self) -> Array:
        order = np.empty(self._size, np.int64)
        order[self._places] = np.arange(self._size)
        return order


def are_live(source: Handle, positions: Array) -> Array:
    """Tell which positions are stored: repairs and power cuts leave gaps."""
    with thread.searching, source.lock:
        starts, lengths = source.live.starts, source.live.lengths
        if not len(starts):
            return np.zeros(positions.shape, np.bool_)
        index = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
        live: Array = (positions >= starts[index]) & (positions < starts[index] + lengths[index])
        return live
