"""Next observations that are not rows, stored separately.

    calls:   [lane 0 1 2][lane 0 1 2] | [lane 0 1 2] ...      several calls are committed together
                              ^ fresh: the next observation of lane 1's last step is not the row after it

    where the next observation of a step is           while its row is pending   once it is committed
    any step                                          in the open group          -
    its lane goes on                                                             its following row
    its lane broke                                                               data of its commit, or of the next one
    a step of the newest call                                                    successors file, of the newest commit

Invariants: what is cached of the newest commit is returned for its head and its era alone; of other commits for their
era: a writer that finds an earlier state writes other rows to the same positions; a fork has its own lock and memory.
Not here: the file (storage/sidecars/successors.py), which values a commit keeps (storage/commit/group.py), how a
following row is found (nstep.py).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.rings import groups
from ringmap.errors import CorruptError
from ringmap.storage.disk.calls import Turn, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import is_live
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.ring.arrays import all_true, found_in
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.successors import Successors

__all__ = ["NextObservations", "different", "same_bytes"]

Array = np.ndarray[Any, np.dtype[Any]]
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
