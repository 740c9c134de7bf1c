"""Next observations that are not rows, stored separately.

    calls:   [lane 0 1 2][lane 0 1 2] | [lane 0 1 2] ...      several calls are committed together
                              ^ fresh: the next observation of lane 1's last step is not the row after it

    where the next observation of a step is           while its row is pending   once it is committed
    any step                                          in the open group          -
    its lane goes on                                                             its following row
    its lane broke                                                               data of its commit, or of the next one
    a step of the newest call                                                    successors file, of the newest commit

Invariants: the state in memory belongs to the head and the era that it names; all are in one object that never changes,
and it is returned for these alone; what is cached of a commit belongs to an era, too: a writer that finds an earlier
state writes other rows to the same positions; a call after a dropped one continues nothing; a fork has its own lock and
memory.
Not here: the file (storage/sidecars/successors.py), which values a commit keeps (storage/commit/group.py), how a
following row is found (nstep.py).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ringmap.errors import CorruptError
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.calls import Turn, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import is_live
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.ring.arrays import found_in, highest, lowest
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.successors import Successors

__all__ = ["NextObservations", "different", "lane_breaks", "nbytes_of", "same_bytes"]

Array = np.ndarray[Any, np.dtype[Any]]
Observations = Mapping[str, Array]

_KEPT_NBYTES = 64 << 20
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

    def is_of(self, source: Handle, head: int) -> bool:
        """Whether they are known, and those of a buffer with this head."""
        return self.head == head and self.era == source.live.era and self.observations is not None


class _Search:
    """Next observations of steps at these positions, which are being looked for."""

    def __init__(self, positions: Array, names: list[str]) -> None:
        self.positions, self._names = positions, names
        self._which: list[Array] = []
        self._values: list[Observations] = []

    def put(self, which: Array, values: Observations) -> None:
        """Take values of some steps."""
        if len(which):
            self._which.append(which)
            self._values.append(values)

    @property
    def good(self) -> Array:
        """Which are found."""
        good = np.zeros(len(self.positions), np.bool_)
        for which in self._which:
            good[which] = True
        return good

    def left(self) -> Array:
        """Return which are not found yet."""
        left: Array = (~self.good).nonzero()[0]
        return left

    def found(self) -> tuple[Array, dict[str, Array]]:
        """Return which are found, and the values of these."""
        if not self._which:
            return np.empty(0, np.int64), {}
        if len(self._which) == 1:
            return self._which[0], dict(self._values[0])
        joined = {n: np.concatenate([v[n] for v in self._values]) for n in self._names}
        return np.concatenate(self._which), joined


class NextObservations:
    """The next observations of one buffer that are not rows.

    Args:
        disk: of the buffer.
        folder: the buffer's.
        manifest: the buffer's.
        names: of the observation columns.
    """

    def __init__(self, disk: Disk, folder: str, manifest: Manifest, names: list[str]) -> None:
        self.files = Successors(Home(disk, folder, manifest.uuid, manifest.rows))
        self._folder, self._names = folder, names
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._turn, self._cache = Turn(), threading.Lock()
        self._newest = Newest(-1, None)
        self._era = -1
        """The era of the store in which its newest call was this handle's."""
        self._kept: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()
        """By era, and the position of the first row."""
        self._kept_nbytes = 0

    @property
    def turn(self) -> Turn:
        """That of a call that is stored, and of what reads the newest one."""
        if self._pid != os.getpid():  # a thread of the parent may have had it at the fork
            self._begin()
        return self._turn

    # -- writing -----------------------------------------------------------------------------

    def before(self, store: Handle) -> Observations | None:
        """Return the next observations of the newest rows; None if there are none, or they were lost."""
        newest = self._newest
        if newest.head == store.head and self._era == store.live.era:
            return newest.observations  # of a call of this handle
        if not newest.is_of(store, store.head):
            newest = self._newest = self._stored(store)
        if newest.observations is None or _stop(store) != store.head:
            return None  # if the newest call was dropped, the next call does not follow the one before it
        return newest.observations

    def _stored(self, source: Handle) -> Newest:
        """Return the next observations of the newest rows from what is stored, with the head of that time."""
        with thread.searching, source.lock:
            head, era, pending = source.head, source.live.era, source.pending
            if pending is not None and pending.count:
                return Newest(head, pending.newest_unlinked(), head, era)
            record = source.record_of(source.live.newest) if len(source.live) else None
        if record is None:
            return Newest(head, None)
        return Newest(head, self.files.find(record.head, record.rows_sum), record.head, era)

    def committed(self, store: Store, after: Observations) -> None:
        """Record that the newest rows of a store are stored. Copies."""
        self._era = -1  # an interrupt may come in between
        copied = {name: values.copy() for name, values in after.items()}
        self._newest = Newest(store.head, copied, store.head, store.live.era)
        self._era = store.live.era

    def put_back(self, source: Store, newest: Observations) -> None:
        """Start a buffer in RAM with the next observations of its newest rows."""
        self._newest = Newest(source.head, newest, source.head, source.live.era)
        source.put_next_observations(newest)

    def forget(self) -> None:
        """Record that all rows were removed, or that the newest ones are of several calls."""
        self._newest = Newest(-1, None)

    def is_own_call(self, store: Handle) -> bool:
        """Whether the newest rows are those of one call of this handle."""
        return self._newest.head == store.head and self._era == store.live.era

    # -- reading -----------------------------------------------------------------------------

    def find(self, source: Handle, positions: Array, head: int) -> tuple[Array, dict[str, Array]]:
        """Return which of these steps have a next observation that is stored apart, and these by leaf, `(which, ...)`.

        The next observations of others were evicted, were lost, or are rows now.

        Args:
            source: the buffer.
            positions: int64 `(n,)`, of steps without a following row; at least one.
            head: of the buffer at the time of the look.
        """
        pending, newest = source.pending, self._newest
        if newest.observations and newest.is_of(source, head):
            count = len(next(iter(newest.observations.values())))
            lanes = positions - (newest.stop - count)
            if lowest(lanes) >= 0 and highest(lanes) < count:  # all are of the newest call
                taken = {name: values[lanes] for name, values in newest.observations.items()}
                return np.arange(len(positions)), taken
        found = _Search(positions, self._names)
        if pending is not None:
            ours, values = pending.unlinked_at(positions)
            found.put(ours.nonzero()[0], values)
        left = found.left()
        are_pending = pending is not None and pending.count  # then those of the newest call were found
        now = self._of_newest(source, head) if len(left) and not are_pending else None
        if now is not None and now.observations:
            count = len(next(iter(now.observations.values())))
            lanes = positions[left] - (now.stop - count)
            ours = (lanes >= 0) & (lanes < count)
            lanes = lanes[ours]
            found.put(left[ours], {n: v[lanes] for n, v in now.observations.items()})
            left = found.left()
        if len(left):
            self._find_in_commits(source, found, left)
        return found.found()

    def _find_in_commits(self, source: Handle, found: _Search, left: Array) -> None:
        """Find those among the data of their commits, or of the commits after these. `left`: which are not found
        yet."""
        positions = found.positions[left]
        with thread.searching, source.lock:
            live = source.live
            if not len(live):
                return
            starts, count, era = live.starts, len(live), live.era
            at = starts.searchsorted(positions, side="right") - 1
            index = np.maximum(at, 0)
            begins = starts[index]
            stops = begins + live.lengths[index]
            stored = (at >= 0) & (positions < stops)
            followed = stored & (starts[np.minimum(index + 1, count - 1)] == stops)
            pending = source.pending
            if pending is not None:  # the group has no record yet
                before = (stored & (stops == pending.start)).nonzero()[0]
                followed[before] = False
                known, values = pending.earlier_at(positions[before])
                found.put(left[before[known]], values)
        for ours in _by_commit(index, stored & ~found.good[left]):
            self._put_kept(source, found, left[ours], era, int(begins[ours[0]]))
        for ours in _by_commit(index, followed & ~found.good[left]):
            self._put_kept(source, found, left[ours], era, int(stops[ours[0]]))

    def _put_kept(self, source: Handle, found: _Search, which: Array, era: int, start: int) -> None:
        """Put those that are in the data of a commit whose first row is at `start`."""
        apart = self._apart(source, era, start)
        if not apart or "rows" not in apart:
            return
        known, at = found_in(apart["rows"], found.positions[which] - start)
        found.put(which[known], {name: apart[name].take(at, 0) for name in self._names})

    def _of_newest(self, source: Handle, head: int) -> Newest | None:
        """Return the next observations of the newest call, as of this head; None if the head has changed."""
        newest = self._newest
        if not newest.is_of(source, head):

            def work() -> Newest:
                if not self._newest.is_of(source, head):
                    self._newest = self._stored(source)
                return self._newest

            # While a call is being stored, its next observations are written first.
            newest = work() if self.turn.is_here else self.turn.take("TransitionReplayBuffer", work)
        return newest if newest.head == head else None

    def _apart(self, source: Handle, era: int, start: int) -> dict[str, Any] | None:
        """Return the observations stored separately with the call whose first row is at `start`."""
        key = era, start
        with thread.searching, self._cache:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        try:
            found = source.data_at(Position(start))
        except CorruptError:
            if not is_live(source, start):
                return None
            raise
        if found is not None:
            with thread.searching, self._cache:
                if key not in self._kept:  # else another thread read them meanwhile
                    self._kept[key] = found
                    self._kept_nbytes += nbytes_of(found)
                while self._kept_nbytes > _KEPT_NBYTES:
                    self._kept_nbytes -= nbytes_of(self._kept.popitem(last=False)[1])
        return found

    # -- whole buffers -----------------------------------------------------------------------

    def close(self) -> None:
        """Release the files."""
        self.files.close()


def _by_commit(index: Array, wanted: Array) -> list[Array]:
    """Return the places of the wanted ones, those of equal index together."""
    places = wanted.nonzero()[0]
    if not len(places):
        return []
    places = places[index[places].argsort(kind="stable")]
    sorted_ = index[places]
    ends = (sorted_[1:] != sorted_[:-1]).nonzero()[0] + 1
    bounds = [0, *ends.tolist(), len(places)]
    return [places[a:b] for a, b in itertools.pairwise(bounds)]


def _stop(source: Handle) -> int:
    """Return the end of the newest call."""
    live = source.live
    return live.start(live.newest) + live.length(live.newest)


def lane_breaks(rows: Observations, before: Observations | None, begun: Any = None) -> tuple[Array, dict[str, Array]]:
    """Return which lanes break, and their last next observations, to be stored separately.

    Args:
        rows: the observations of the call, `(N, ...)`.
        before: the next observations of the last call, None if unknown.
        begun: `(N,)`, lanes that begin an episode, whatever their observations.

    Returns:
        bool `(N,)`; and `rows`, numbered from the end of the last call (-1 is its last row), with their observations,
        {} for none.
    """
    count = len(next(iter(rows.values())))
    if before is None:
        return np.ones(count, np.bool_), {}
    lanes = len(next(iter(before.values())))
    if lanes != count:
        return np.ones(count, np.bool_), {"rows": np.arange(-lanes, 0, dtype=np.int32), **before}
    fresh = np.zeros(count, np.bool_)
    if begun is not None:
        fresh |= begun
    for name, then in before.items():
        if not same_bytes(rows[name], then):
            fresh |= different(rows[name], then)
    left = np.flatnonzero(fresh)
    if not len(left):
        return fresh, {}
    return fresh, {
        "rows": (left - lanes).astype(np.int32),
        **{n: v[left] for n, v in before.items()},
    }


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


def nbytes_of(values: Mapping[str, Any]) -> int:
    """Return the size of the arrays among some values."""
    return sum(v.nbytes for v in values.values() if isinstance(v, np.ndarray))
