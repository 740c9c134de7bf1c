"""The rows that a batch of transitions is summed from, as of now: of one ring, or of several side by side.

What is computed for each transition is computed for all of them at once. Rings whose columns can't be mapped side by
side are read one after the other (clips/rings.py).

Not here: which rows are read (nstep.py), the looks before and after (nstep.py, clips/rings.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.buffers.transitions.next_observations import NextObservations
from ringmap.clips.rings import RING_FAULTS, AdjacentRings, groups
from ringmap.storage.columns.copying import take
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle

__all__ = ["RowsOfAdjacent", "RowsOfOne", "are_live"]

Array = np.ndarray[Any, np.dtype[Any]]


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

    def take(self, names: Sequence[str], at: Array) -> list[Array]:
        """Return columns of the rows at these positions."""
        return self.rows.take(names, at, self.head)

    def take_large(self, name: str, at: Array, into: Array | None, threads: int) -> Array:
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

    def take(self, names: Sequence[str], at: Array) -> list[Array]:
        """Return columns of the rows at these positions."""
        slots, by_name, head = at % self._laps, self._rings.rows.by_name, self._rings.head
        slots += self._first
        return [by_name[name].take(slots, None, head) for name in names]

    def take_large(self, name: str, at: Array, into: Array | None, threads: int) -> Array:
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


def are_live(source: Handle, positions: Array) -> Array:
    """Tell which positions are stored: repairs and power cuts leave gaps."""
    with thread.searching, source.lock:
        starts, lengths = source.live.starts, source.live.lengths
        if not len(starts):
            return np.zeros(positions.shape, np.bool_)
        index = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
        live: Array = (positions >= starts[index]) & (positions < starts[index] + lengths[index])
        return live
