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

    def __init__(self, source: Handle, next_observations: NextObservations) -> None:
        assert source.rows is not None
        self.source, self.rows, self.next_observations = source, source.rows, next_observations
        with thread.searching, source.lock:
            self.head, live = source.head, source.live
            self.stop: int = live.stop
            self.is_dense = live.is_dense

    def take(
        self,
        names: Sequence[str],
        at: Array,
        out: Sequence[Array | None] | None = None,
        threads: int = 1,
        which: Array | None = None,
    ) -> list[Array]:
        """Return columns of rows, in the arrays of `out` where it has some.

        Args:
            names: of the columns.
            at: the positions of one row of each transition, `(B,)`, or of several, `(B, n)`.
            out: for each column an array or None.
            threads: maximum number of threads for the copy.
            which: the transitions, if these are not all.
        """
        return self.rows.take(names, at, self.head, out, threads)

    def are_live(self, at: Array) -> Array:
        """Tell which positions are stored."""
        return are_live(self.source, at)

    def find(self, last: Array, which: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of some transitions, whose last steps are at `last[which]`, have a next observation apart, and
        these."""
        return self.next_observations.find(self.source, last[which], self.head)


class RowsOfAdjacent:
    """The rows of rings side by side, as of now: transitions are in the order in which they were asked for.

    Args:
        rings: the rings.
        next_observations: what finds the next observations of each.
        places: among the rings, of the ring of each transition.
    """

    head = -1
    """Each ring has its own."""

    def __init__(self, rings: AdjacentRings, next_observations: Sequence[NextObservations], places: Array) -> None:
        self._rings, self._next_observations, self._ring_of = rings, next_observations, places
        ends = rings.ends()
        self.stop, self.is_dense = ends.stops.take(places), ends.is_dense
        self._laps, self._first = rings.laps(places), rings.first_rows(places)

    def take(
        self,
        names: Sequence[str],
        at: Array,
        out: Sequence[Array | None] | None = None,
        threads: int = 1,
        which: Array | None = None,
    ) -> list[Array]:
        """Return columns of rows, as `RowsOfOne.take` does."""
        laps, first, rows = self._laps, self._first, self._rings.rows
        if which is not None or at.ndim > 1:
            laps, first = (
                v if isinstance(v, int) else (v if which is None else v[which])[:, None] for v in (laps, first)
            )
        slots, head = at % laps, self._rings.head
        slots += first
        if out is None and threads == 1:
            return [rows.by_name[name].take(slots, None, head) for name in names]
        into = out or [None] * len(names)
        return [take(rows.by_name[n], slots, o, threads, head) for n, o in zip(names, into, strict=True)]

    def are_live(self, at: Array) -> Array:
        """Tell which positions are stored."""
        found = np.empty(at.shape, np.bool_)
        for place, which in groups(self._ring_of):
            found[which] = are_live(self._rings.sources[place], at[which])
        return found

    def find(self, last: Array, which: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of some transitions, whose last steps are at `last[which]`, have a next observation apart, and
        these."""
        known, found, names = list[Array](), list[dict[str, Array]](), list[str]()
        for place, mine in groups(self._ring_of.take(which)):
            source = self._rings.sources[place]
            try:
                here, values = self._next_observations[place].find(source, last[which[mine]], source.head)
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
