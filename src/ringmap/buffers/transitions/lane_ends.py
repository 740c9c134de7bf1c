"""The newest row of each environment that the caller names, and what that row led to.

    calls      lane=0  lane=1  lane=2 | lane=0  lane=2 | lane=1 ...       one environment at a time, or some of them
    rows       p       p+1     p+2      p+3     p+4      p+5
    lanes      -1      -2      -3       3       2        4                how far back the environment's last row is

A row says how far back its environment's last row stands, as in a call of all lanes; less than 0 if it does not go on
from that one. A reader expects the next row as far ahead, and finds it there while the environments come in turn; else
it looks for the row that says so (nstep.py).

Invariants: the ends are those of the head and era that they name; what was stored by other means is read from the rows,
and its environments have no names until one goes on from them, bit for bit.
Not here: how rows are stored (buffer.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.buffers.transitions.next_observations import different
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["FURTHEST", "LaneEnds"]

Array = np.ndarray[Any, np.dtype[Any]]

FURTHEST = 1024
"""An environment whose last row is further back begins anew: a reader looks as far ahead for the next one."""


class LaneEnds:
    """The newest rows of environments.

    Args:
        specs: the leaves of observations as they are given: whole stacks.
    """

    def __init__(self, specs: Sequence[ColumnSpec]) -> None:
        self._specs = specs
        self._places: dict[Hashable, int] = {}
        self._unnamed: list[int] = []
        self._count = 0
        self._make_room(8)
        self.forget()

    def forget(self) -> None:
        """Begin anew, with no environment known."""
        self.head = self.era = -1
        self._places.clear()
        self._unnamed.clear()
        self._count = 0

    def is_of(self, head: int, era: int) -> bool:
        """Whether these are the newest rows of a store with this head, in this era."""
        return self.head == head and self.era == era

    def _make_room(self, room: int) -> None:
        self.at, self.strides = np.full(room, -1, np.int64), np.ones(room, np.int64)
        self.ages = np.zeros(room, np.uint8)
        self.led = {s.name: np.zeros((room, *s.shape), s.dtype) for s in self._specs}

    def __len__(self) -> int:
        """Return the number of environments that are known."""
        return self._count

    def _new(self) -> int:
        count = self._count
        if count == len(self.at):
            at, strides, ages, led = self.at, self.strides, self.ages, self.led
            self._make_room(2 * count)
            self.at[:count], self.strides[:count], self.ages[:count] = at, strides, ages
            for name, values in led.items():
                self.led[name][:count] = values
        self.at[count] = -1
        self._count += 1
        return count

    def begin(
        self,
        at: Array,
        strides: Array,
        ages: Array,
        led: Mapping[str, Array],
        ended: Array,
        are_in_order: bool,
    ) -> None:
        """Take newest rows from the ring, oldest first.

        Args:
            at: their positions.
            strides: how far back their environments' rows before them are.
            ages: of stacks.
            led: what they led to.
            ended: which of them end an episode: none goes on from these, but what they led to is still asked for.
            are_in_order: whether row i is of environment i.
        """
        for number in range(len(at)):
            place = self._new()
            self.at[place], self.strides[place], self.ages[place] = at[number], strides[number], ages[number]
            for name, values in led.items():
                self.led[name][place] = values[number]
            if are_in_order:
                self._places[number] = place
            elif not ended[number]:
                self._unnamed.append(place)

    def place(self, lane: Hashable, rows: Mapping[str, Array], number: int) -> int:
        """Return the place of an environment; for one that has none yet, that of an unnamed row that its observation
        goes on from.

        Args:
            lane: its name.
            rows: the observations of a call.
            number: of its row among them.
        """
        found = self._places.get(lane)
        if found is not None:
            return found
        for which, place in enumerate(self._unnamed):
            if all(values[number].tobytes() == self.led[name][place].tobytes() for name, values in rows.items()):
                del self._unnamed[which]
                self._places[lane] = place
                return place
        place = self._places[lane] = self._new()
        return place

    def known(self, lane: Hashable) -> int | None:
        """Return the place of an environment, None if it has none yet."""
        return self._places.get(lane)

    def goes_on(self, places: Array, rows: Mapping[str, Array]) -> Array:
        """Tell which observations are, bit for bit, what their environments' newest rows led to."""
        found: Array = self.at[places] >= 0
        for name, values in rows.items():
            found &= ~different(values, self.led[name][places])
        return found

    def drop_before(self, position: int) -> None:
        """Forget environments whose newest rows are before a position: no row will go on from them."""
        kept = [p for p in range(self._count) if self.at[p] >= position]
        if len(kept) == self._count:
            return
        new = {old: number for number, old in enumerate(kept)}
        per_place: list[Array] = [self.at, self.ages, self.strides, *self.led.values()]
        for values in per_place:
            values[: len(kept)] = values[kept]
        self._places = {lane: new[p] for lane, p in self._places.items() if p in new}
        self._unnamed = [new[p] for p in self._unnamed if p in new]
        self._count = len(kept)

    def earlier(self) -> dict[str, Array]:
        """Return what the newest rows led to, for the commit of rows that begin at `head`: `rows` are numbered from
        there, ascending."""
        at = self.at[: self._count]
        which = np.argsort(at)[int((at < 0).sum()) :]
        if not len(which):
            return {}
        found = {"rows": (self.at[which] - self.head).astype(np.int32)}
        return found | {name: values[which] for name, values in self.led.items()}

    @property
    def nbytes(self) -> int:
        """Size of what `earlier` returns."""
        return sum(v.nbytes // len(v) for v in self.led.values()) * self._count

    def follow_one(self, place: int, at: int, stride: int, name: str, led: Array, era: int) -> None:
        """Take one row that was stored at `at`, of which there is one leaf: as `follow`."""
        self.head = -1
        self.at[place], self.strides[place] = at, stride
        self.led[name][place] = led
        self.head, self.era = at + 1, era

    def follow(
        self, places: Array, first: int, strides: Array, ages: Array, led: Mapping[str, Array], era: int
    ) -> None:
        """Take the rows of a call that was stored at `first`."""
        self.head = -1  # an interrupt may come in between
        count = len(places)
        self.at[places] = first + np.arange(count)
        self.strides[places], self.ages[places] = strides, ages
        for name, values in led.items():
            self.led[name][places] = values
        self.head, self.era = first + count, era
