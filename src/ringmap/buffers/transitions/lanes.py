"""The newest row of each environment, what that row led to, and next observations that are not rows.

    calls      lane=0  lane=1  lane=2 | lane=0  lane=2 | lane=1 ...       one environment at a time, or some of them
    rows       p       p+1     p+2      p+3     p+4      p+5
    lanes      -1      -2      -3       3       2        4                how far back the environment's last row is

A row says how far back its environment's last row stands; less than 0 if it does not go on from that one. A reader
expects the next row as far ahead, and finds it there while the environments come in turn; else it looks for the row
that says so (nstep.py). In calls without names row i is of environment i, and a call of another length begins anew:
the ends are the rows of the newest call.

    where the next observation of a step is           while its row is pending   once it is committed
    any step                                          in the open group          -
    its lane goes on                                                             its following row
    its lane broke                                                               data of its commit, or of the next one
    a step of the newest call                                                    successors file, of the newest commit

Invariants: the ends are those of the head and era that they name; what was stored by other means is read from the rows,
and its environments have no names until one goes on from them, bit for bit. What is cached of the newest commit is
returned for its head and its era alone; of other commits for their era: a writer that finds an earlier state writes
other rows to the same positions; a fork has its own lock and memory.
Not here: how rows are stored (buffer.py), the file (storage/sidecars/successors.py).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.rings import groups
from ringmap.errors import CorruptError
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.calls import Turn, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import is_live
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.ring.arrays import all_true, found_in
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.successors import Successors

__all__ = ["FURTHEST", "LaneEnds", "NextObservations", "different", "same_bytes"]


Array = np.ndarray[Any, np.dtype[Any]]

FURTHEST = 1024
"""An environment whose last row is further back begins anew: a reader looks as far ahead for the next one."""

_ALL = slice(None)


class LaneEnds:
    """The newest rows of environments.

    Args:
        specs: the leaves of observations as they are given: whole stacks.
        capacity: of the buffer.
    """

    def __init__(self, specs: Sequence[ColumnSpec], capacity: int) -> None:
        self._specs, self._furthest = specs, min(FURTHEST, capacity)
        self._row_nbytes = sum(spec.row_nbytes for spec in specs)
        self.forget()

    def forget(self) -> None:
        """Begin anew, with no environment known."""
        self.head = self.era = self._since = -1
        self.in_order = True
        """Whether the ends are the rows of the newest call, which had no names."""
        self._places: dict[Hashable, int] = {}
        self._unnamed: dict[bytes, list[int]] = {}
        """The places of environments without names, by what they led to."""
        self._make_room(0)

    def _make_room(self, room: int, count: int = 0) -> None:
        self.at, self.strides = np.full(room, -1, np.int64), np.ones(room, np.int64)
        self.ages = np.zeros(room, np.uint8)
        self.led = {s.name: np.zeros((room, *s.shape), s.dtype) for s in self._specs}
        self._set_count(count)

    def _set_count(self, count: int) -> None:
        self.count, self.nbytes = count, count * self._row_nbytes

    def _arrays(self) -> list[Array]:
        return [self.at, self.strides, self.ages, *self.led.values()]

    def _resize(self, room: int) -> None:
        """Make room for more environments."""
        count, before = self.count, self._arrays()
        self._make_room(room, count)
        for values, old in zip(self._arrays(), before, strict=True):
            values[:count] = old[:count]

    def _new(self) -> int:
        count = self.count
        if count == len(self.at):
            self._resize(max(8, 2 * count))
        self.at[count] = -1
        self._set_count(count + 1)
        return count

    def begin(
        self,
        head: int,
        era: int,
        has_names: bool,
        at: Array,
        strides: Array,
        ages: Array,
        led: Mapping[str, Array],
        ended: Array,
    ) -> None:
        """Take newest rows from the ring, oldest first: their positions, how far back the rows before them are, ages of
        stacks, what they led to, and which end an episode.

        Those are asked for what they led to, but none goes on from them. Before a call without names only ends that are
        all rows of the newest call are taken.
        """
        self.forget()
        count = len(at)
        if has_names or (count and count == strides[-1] == head - at[0]):
            self._make_room(count, count)
            self.at[:], self.strides[:], self.ages[:] = at, strides, ages
            for name, values in led.items():
                self.led[name][:] = values
        if has_names:
            self.in_order = False
            for place in np.flatnonzero(~ended).tolist():
                self._unnamed.setdefault(self._key(self.led, place), []).append(place)
        self.head, self.era = head, era

    def _key(self, values: Mapping[str, Array], number: int) -> bytes:
        return b"".join(values[name][number].tobytes() for name in self.led)

    def _name_lanes(self) -> None:
        """Take the rows of the newest call, which had no names, for those of environments 0, 1, ..."""
        self.in_order = False
        self._places = {number: number for number in range(self.count)}
        self.at[:] = np.arange(self.head - self.count, self.head)
        self.strides[:] = max(1, self.count)

    def _place(self, name: Hashable, rows: Mapping[str, Array], number: int) -> int:
        """Return the place of an environment, or that of a nameless row that its observation goes on from."""
        place = self._places.get(name)
        if place is None:
            same = self._unnamed.get(self._key(rows, number)) if self._unnamed else None
            place = self._places[name] = same.pop(0) if same else self._new()
        return place

    # -- a call ------------------------------------------------------------------------------

    def match(
        self,
        names: Sequence[Hashable] | None,
        rows: Mapping[str, Array],
        count: int,
        source: Handle,
        begun: Array | None,
    ) -> tuple[Any, Any, Any]:
        """Return the places of the environments of a call, how far back their rows before are, and which of these they
        do not go on from, bool `(count,)`, None for none.

        Args:
            names: of the environments; None for all in order.
            rows: their observations, `(count, ...)`; of one environment also without the first axis.
            count: of the rows.
            source: the ring.
            begun: `(count,)`, those that begin an episode, whatever their observations.
        """
        if names is None and self.in_order:
            if count != self.count:
                return _ALL, count, np.ones(count, np.bool_)
            for name, values in rows.items():
                led = self.led[name]
                if not same_bytes(values, led):
                    parted = different(values.reshape(led.shape), led)
                    begun = parted if begun is None else begun | parted
            return _ALL, count, begun
        if self.in_order:
            self._name_lanes()
        names = range(count) if names is None else names
        if count == 1:
            place = self._places.get(names[0], -1)
            at = int(self.at[place]) if place >= 0 else -1
            back = self.head - at
            if begun is None and source.tail <= at and back <= FURTHEST:
                for name, values in rows.items():
                    if not same_bytes(values, self.led[name][place]):
                        break
                else:
                    return slice(place, place + 1), back, None
            rows = {name: values.reshape(1, *self.led[name].shape[1:]) for name, values in rows.items()}
        places = np.array([self._place(name, rows, number) for number, name in enumerate(names)])
        at = self.at[places]
        backs = self.head + np.arange(count) - at
        is_near = (at >= source.tail) & (backs <= FURTHEST)
        parted = ~is_near if begun is None else begun | ~is_near
        for name, values in rows.items():
            parted |= different(values, self.led[name][places])
        # Of one without a row, that is how far on its next row is expected.
        return places, np.where(is_near, backs, max(1, min(self.count, self._furthest))), parted

    def out_of_turn(self, places: Any, strides: Any, parted: Any) -> Array:
        """Tell which rows of a call go on from rows that are not as far back as the rows before these."""
        if self.in_order:
            return np.zeros(1, np.bool_)
        is_out: Array = (strides != self.strides[places]) & (self.ages[places] > 0)
        return is_out if parted is None else is_out & ~parted

    def earlier(self, places: Any, strides: Any, parted: Any) -> dict[str, Array]:
        """Return what rows led to that are followed by no row as a reader expects it, for a group that begins with this
        call: `rows` are numbered from there, ascending. Of rows before those of the newest call a commit has kept
        it."""
        if self.in_order:
            if parted is None:
                return {}
            at = np.arange(-self.count, 0)
            is_end = parted if len(parted) == self.count else np.ones(self.count, np.bool_)
        else:
            at = self.at[: self.count] - self.head
            is_end = at >= max(0, self._since) - self.head
            goes_on = strides == self.strides[places]
            is_end[places] &= ~(goes_on if parted is None else goes_on & ~parted)
        which = np.flatnonzero(is_end)
        which = which[at[which].argsort()]
        if not len(which):
            return {}
        return {"rows": at[which].astype(np.int32), **{name: values[which] for name, values in self.led.items()}}

    def follow(
        self, places: Any, count: int, strides: Any, ages: Array | None, led: Mapping[str, Array], era: int
    ) -> None:
        """Take the rows of a call that was stored at the head."""
        first = self.head
        self.head = -1  # an interrupt may come in between
        if not self.in_order:
            self.at[places] = first if count == 1 else first + np.arange(count)
            self.strides[places] = strides
            last = strides if isinstance(strides, int) else int(strides[-1])
            self._since = min(first, first + count - last)
        elif count != self.count:
            self._make_room(count, count)
        if ages is not None:
            self.ages[places] = ages
        for name in led:
            self.led[name][places] = led[name]
        self.head, self.era = first + count, era
        if self._places and self.count > 2 * FURTHEST:
            self._drop_before(self.head - FURTHEST)

    def _drop_before(self, position: int) -> None:
        """Forget environments whose newest rows are before a position: no row will go on from them."""
        near = np.flatnonzero(self.at[: self.count] >= position)
        if len(near) == self.count:
            return
        new = {old: number for number, old in enumerate(near.tolist())}
        for values in self._arrays():
            values[: len(near)] = values[near]
        self._places = {lane: new[p] for lane, p in self._places.items() if p in new}
        self._unnamed = {key: [new[p] for p in places if p in new] for key, places in self._unnamed.items()}
        self._set_count(len(near))


Observations = Mapping[str, Array]

_CACHED_NBYTES = 64 << 20
"""Next observations that are not rows, cached in memory after a read."""

_SMALL_NBYTES = 1 << 15
"""Up to this size two copies and a comparison of bytes are faster than NumPy's: 0.3 us against 3, 1.7 against 2.9 at
the end."""


class Newest(NamedTuple):
    """The next observations of the newest live rows, as of a head in an era; None if unknown.

    `stop`: where these rows end: before the head if the newest call was dropped.
    """

    head: int
    observations: Observations | None
    stop: int = -1
    era: int = -1


class NextObservations:
    """The next observations of one buffer that are not rows; `names`: of the columns."""

    def __init__(self, disk: Disk, folder: str, manifest: Manifest, names: list[str]) -> None:
        self.files = Successors(Home(disk, folder, manifest.uuid, manifest.rows))
        self._names = names
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._turn, self._lock = Turn(), threading.Lock()
        self._newest = Newest(-1, None)
        self._cache: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()
        """By era, and the position of the first row."""
        self._cache_nbytes = 0

    @property
    def turn(self) -> Turn:
        """That of a call that is stored, and of what reads the newest one."""
        if self._pid != os.getpid():  # a thread of the parent may have had it at the fork
            self._begin()
        return self._turn

    def newest(self, source: Handle) -> Newest:
        """Return the next observations of the newest rows from what is stored, with the head of that time."""
        with thread.searching, source.lock:
            head, era, pending = source.head, source.live.era, source.pending
            if pending is not None and pending.count:
                return Newest(head, pending.newest_unlinked(), head, era)
            record = source.record_of(source.live.newest) if len(source.live) else None
        if record is None:
            return Newest(head, None)
        return Newest(head, self.files.find(record.head, record.rows_sum), record.head, era)

    def find(self, source: Handle, positions: Array, head: int) -> tuple[Array, dict[str, Array]]:
        """Return which of these steps without a following row, int64 `(n,)`, have a next observation that is stored
        apart, as of this head; and these by leaf, `(which, ...)`.

        The next observations of others were evicted, were lost, or are rows now.
        """
        pending, known = source.pending, np.zeros(len(positions), np.bool_)
        parts = list[tuple[Array, Observations]]()

        def put(which: Array, values: Observations) -> None:
            if len(which):
                known[which] = True
                parts.append((which, values))

        if pending is not None:
            ours, values = pending.unlinked_at(positions)
            put(ours.nonzero()[0], values)
        if pending is None or not pending.count:  # else those of the newest call were found
            newest = self._of_newest(source, head)
            if newest.observations:
                count = len(next(iter(newest.observations.values())))
                rows = positions - (newest.stop - count)
                which = (~known & (rows >= 0) & (rows < count)).nonzero()[0]
                put(which, {n: v.take(rows[which], 0) for n, v in newest.observations.items()})
        if not all_true(known):
            self._find_in_commits(source, positions, known, put)
        if len(parts) == 1:
            return parts[0][0], dict(parts[0][1])
        if not parts:
            return np.empty(0, np.int64), {}
        joined = {n: np.concatenate([values[n] for _, values in parts]) for n in self._names}
        return np.concatenate([which for which, _ in parts]), joined

    def _find_in_commits(
        self, source: Handle, positions: Array, known: Array, put: Callable[[Array, Observations], None]
    ) -> None:
        """Put those that are among the data of their commits, or of the commits after these."""
        with thread.searching, source.lock:
            live = source.live
            if not len(live):
                return
            starts, era, pending = live.starts, live.era, source.pending
            index = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
            begins = starts[index]
            stops = begins + live.lengths[index]
            stored = ~known & (begins <= positions) & (positions < stops)
            followed = stored & (starts[np.minimum(index + 1, len(live) - 1)] == stops)
            if pending is not None:  # the group has no record yet
                before = (stored & (stops == pending.start)).nonzero()[0]
                followed[before] = False
                ours, values = pending.earlier_at(positions[before])
                put(before[ours], values)
        for firsts, wanted in ((begins, stored), (stops, followed)):
            left = (wanted & ~known).nonzero()[0]
            for start, mine in groups(firsts[left]):
                data, which = self._data_at(source, era, start), left[mine]
                if data and "rows" in data:
                    ours, at = found_in(data["rows"], positions[which] - start)
                    put(which[ours], {name: data[name].take(at, 0) for name in self._names})

    def _of_newest(self, source: Handle, head: int) -> Newest:
        """Return the next observations of the newest call: of another one than at this head, if that has changed, whose
        rows are not among those that are asked for."""

        def work() -> Newest:
            newest = self._newest
            if newest.head != head or newest.era != source.live.era or newest.observations is None:
                newest = self._newest = self.newest(source)
            return newest

        # While a call is being stored, its next observations are written first.
        return work() if self.turn.is_here else self.turn.take("TransitionReplayBuffer", work)

    def _data_at(self, source: Handle, era: int, start: int) -> dict[str, Any] | None:
        """Return the data of the commit whose first row is at `start`."""
        key = era, start
        with thread.searching, self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        try:
            found = source.data_at(Position(start))
        except CorruptError:
            if not is_live(source, start):
                return None
            raise
        if found is not None:
            with thread.searching, self._lock:
                if key not in self._cache:  # else another thread read them meanwhile
                    self._cache[key] = found
                    self._cache_nbytes += _nbytes_of(found)
                while self._cache_nbytes > _CACHED_NBYTES:
                    self._cache_nbytes -= _nbytes_of(self._cache.popitem(last=False)[1])
        return found

    def close(self) -> None:
        """Release the files."""
        self.files.close()


def same_bytes(one: Array, other: Array) -> bool:
    """Tell whether two arrays of one dtype and as many values have the same bytes."""
    if one.nbytes <= _SMALL_NBYTES:
        return one.tobytes() == other.tobytes()
    if not (one.flags.c_contiguous and other.flags.c_contiguous):
        one, other = np.ascontiguousarray(one), np.ascontiguousarray(other)
    return bool((one.reshape(-1).view(np.uint8) == other.reshape(-1).view(np.uint8)).all())


def different(rows: Array, others: Array) -> Array:
    """Tell for each row whether its bytes differ from those of the other array's row."""
    if not rows.nbytes:
        return np.zeros(len(rows), np.bool_)
    whole = np.dtype((np.void, rows.nbytes // len(rows)))
    one, other = (np.ascontiguousarray(a).reshape(len(rows), -1) for a in (rows, others))
    different: Array = one.view(whole)[:, 0] != other.view(whole)[:, 0]
    return different


def _nbytes_of(values: Mapping[str, Any]) -> int:
    """Return the size of the arrays among some values."""
    return sum(v.nbytes for v in values.values() if isinstance(v, np.ndarray))
