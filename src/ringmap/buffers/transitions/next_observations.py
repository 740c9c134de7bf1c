"""Next observations that are not rows, stored separately.

    calls:  [lane 0 1 2][lane 0 1 2][lane 0 1 2]  ->  successors file: the next observations of the newest call
                             ^ fresh: this call's episode data hold the next observation of lane 1's last step

Invariants: the state in memory belongs to the head that it names; both are in one object that never changes, and
it is returned for that head alone; a call after a dropped one continues nothing; a fork has its own lock and
memory.
Not here: the files (storage/sidecars/successors.py), how a following row is found (nstep.py).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.errors import CorruptError, RingmapError
from ringmap.storage.columns.rows import combine, sum_of
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.advice import clear_error
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import is_live
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.ring.integers import Ordinal
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.successors import Successors

__all__ = ["NextObservations", "lane_breaks"]

Array = np.ndarray[Any, np.dtype[Any]]
Observations = Mapping[str, Array]

_KEPT_NBYTES = 64 << 20
"""Next observations that are not rows, cached in memory after a read."""


_SMALL_NBYTES = 1 << 14
"""Up to this size two copies and a comparison of bytes are faster than NumPy's: 0.3 us against 3."""


class Newest(NamedTuple):
    """The next observations of the rows that end at `head`; None if unknown."""

    head: int
    observations: Observations | None


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
        self._lock = threading.RLock()
        self._newest = Newest(-1, None)
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._kept_nbytes = 0

    @property
    def lock(self) -> threading.RLock:
        """Held while a call is stored, and while the state in memory changes."""
        if self._pid != os.getpid():  # a thread of the parent may have held it at the fork
            self._begin()
        return self._lock

    # -- writing -----------------------------------------------------------------------------

    def before(self, store: Handle) -> Observations | None:
        """Return the next observations of the newest rows, as of the last commit; None if there are none, or they were lost."""
        if not store.seq or not len(store.live):
            self._newest = Newest(store.head, None)
        elif self._newest.observations is None or self._newest.head != store.head:
            self._newest = self._stored(store)
        if self._newest.observations is not None and _stop(store) != store.head:
            return (
                None  # the newest call was dropped: the next call does not follow the one before it
            )
        return self._newest.observations

    def _stored(self, source: Handle) -> Newest:
        """Return the next observations of the newest rows from the files, with the head of that time."""
        with source.memory:
            head = source.head
            record = source.record_of(source.live.newest) if len(source.live) else None
        if record is None:
            return Newest(head, None)
        return Newest(head, self.files.find(record.head, record.rows_sum))

    def announce(
        self, head: int, rows: Sequence[Array], after: Observations, durably: bool, where: str
    ) -> None:
        """Write the next observations of these rows, up to `head`, before their commit.

        Raises:
            EnvironmentFault: the disk is full or fails.
        """
        try:
            self.files.write(head, combine([sum_of(values) for values in rows]), after)
            if durably:
                self.files.sync()
        except RingmapError:
            raise
        except OSError as error:
            became, then = (
                "nothing was stored by this call",
                "free space or mend the disk, then call it again",
            )
            raise clear_error(error, where, self._folder, became, then) from error

    def committed(self, head: int, after: Observations) -> None:
        """Record that the rows up to `head` are stored. Copies."""
        self.files.turn()  # first: an interrupt after this is detected by the head
        self._newest = Newest(head, {name: np.array(values) for name, values in after.items()})

    def put_back(self, source: Handle, newest: Observations) -> None:
        """Start a buffer in RAM with the next observations of its newest rows."""
        self._newest = Newest(source.head, newest)
        record = source.record_of(source.live.newest)
        assert record is not None
        self.files.write(record.head, record.rows_sum, newest)
        self.files.turn()

    def forget(self) -> None:
        """Record that all rows were removed."""
        self._newest = Newest(-1, None)

    # -- reading -----------------------------------------------------------------------------

    def at(self, source: Handle, position: int, head: int, newest: int) -> Observations | None:
        """Return the next observation of a step, one array per leaf; None if it was evicted, was lost, or is a row now.

        Args:
            source: the buffer.
            position: of a step without a following row.
            head: of the buffer at the time of the look.
            newest: the start of the newest call at that time.
        """
        if position >= newest:
            return _one(self._of_newest(source, head), position - newest)
        with source.memory:
            live = source.live
            at = int(live.starts.searchsorted(position, side="right")) - 1
            if at < 0 or at + 1 >= len(live):
                return None
            ordinal, after = Ordinal(live.first + at), Ordinal(live.first + at + 1)
            start, stop = live.start(ordinal), live.start(ordinal) + live.length(ordinal)
            if not start <= position < stop or live.start(after) != stop:
                return None
        apart = self._apart(source, after, stop)
        if apart is None or "lanes" not in apart:
            return None
        lane = int(np.searchsorted(apart["lanes"], position - start))
        if lane == len(apart["lanes"]) or apart["lanes"][lane] != position - start:
            return None
        return _one({name: apart[name] for name in self._names}, lane)

    def _of_newest(self, source: Handle, head: int) -> Observations | None:
        """Return the next observations of the newest call, as of this head; None if the head has changed."""
        newest = self._newest
        if newest.head != head or newest.observations is None:
            with self.lock:  # while a call is being stored, its next observations are written first
                if self._newest.head != head or self._newest.observations is None:
                    self._newest = self._stored(source)
                newest = self._newest
        return newest.observations if newest.head == head else None

    def _apart(self, source: Handle, ordinal: Ordinal, start: int) -> dict[str, Any] | None:
        """Return the observations stored separately with the call whose first row is at `start`."""
        with self.lock:
            if start in self._kept:
                self._kept.move_to_end(start)
                return self._kept[start]
        try:
            found = source.read_data(ordinal)
        except CorruptError:
            if not is_live(source, start):
                return None
            raise
        if found is not None:
            with self.lock:
                if start not in self._kept:  # else another thread read them meanwhile
                    self._kept[start] = found
                    self._kept_nbytes += _nbytes(found)
                while self._kept_nbytes > _KEPT_NBYTES:
                    self._kept_nbytes -= _nbytes(self._kept.popitem(last=False)[1])
        return found

    # -- whole buffers -----------------------------------------------------------------------

    def sync(self, store: Store, where: str) -> None:
        """Force both files, whichever is valid, to the disk.

        Raises:
            SyncFailedError: a sync failed; open the buffer again.
        """
        with self.lock:
            store.sync_too(where, self.files.sync_both)

    def close(self) -> None:
        """Release the files."""
        self.files.close()


def _stop(source: Handle) -> int:
    """Return the end of the newest call."""
    live = source.live
    return live.start(live.newest) + live.length(live.newest)


def lane_breaks(
    rows: Observations, before: Observations | None, begun: Any = False
) -> tuple[Array, dict[str, Array]]:
    """Return which lanes break, and their last next observations, to be stored separately.

    Args:
        rows: the observations of the call, `(N, ...)`.
        before: the next observations of the last call, None if unknown.
        begun: `(N,)`, lanes that begin an episode, whatever their observations.

    Returns:
        bool `(N,)`; and `lanes` with their observations, {} for none.
    """
    count = len(next(iter(rows.values())))
    if before is None:
        return np.ones(count, np.bool_), {}
    lanes = len(next(iter(before.values())))
    if lanes != count:
        return np.ones(count, np.bool_), {"lanes": np.arange(lanes, dtype=np.int32), **before}
    if not np.any(begun) and all(_same_bytes(rows[name], then) for name, then in before.items()):
        return np.zeros(count, np.bool_), {}
    fresh = np.zeros(count, np.bool_) | begun
    for name, then in before.items():
        now, was = rows[name].reshape(count, -1), then.reshape(count, -1)
        fresh |= (now.view(np.uint8) != was.view(np.uint8)).any(axis=1)
    left = np.flatnonzero(fresh)
    return fresh, {"lanes": left.astype(np.int32), **{n: v[left] for n, v in before.items()}}


def _same_bytes(one: Array, other: Array) -> bool:
    if one.nbytes <= _SMALL_NBYTES:
        return one.tobytes() == other.tobytes()
    return bool((one.reshape(-1).view(np.uint8) == other.reshape(-1).view(np.uint8)).all())


def _one(values: Observations | None, lane: int) -> Observations | None:
    return None if values is None else {name: v[lane] for name, v in values.items()}


def _nbytes(values: Mapping[str, Any]) -> int:
    return sum(v.nbytes for v in values.values() if isinstance(v, np.ndarray))
