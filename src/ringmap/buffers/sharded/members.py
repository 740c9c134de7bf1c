"""The open rings of one process: looked at before each draw, joined by new ones, left by those that fail.

    every draw      the generations of all rings, in one sweep of a map                1 us, and 5 ns for each idle ring
    each 0.1 s      is the directory still at its path: one system call for each ring, the rings in turn
    each second     are there new ones: one look at the directory

Invariants: `open` is replaced, never changed; `changes` has counted every commit that a ring's memory holds; who changes anything
holds `lock`.
Not here: how a ring is found and opened (rings.py), ids and draws (engine.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ringmap.buffers.sharded.rings import Ring, Rings
from ringmap.clips.many import RING_FAULTS
from ringmap.errors import InputError, NoClipsError
from ringmap.storage.read.reader import HELD_S
from ringmap.storage.read.states import States

__all__ = ["Members"]

Array = np.ndarray[Any, np.dtype[Any]]
Glance = tuple[int, int] | None

_WHERE = "ShardedReplayBuffer"
_SCAN_S = 1.0


class Members:
    """The rings that are read now.

    Args:
        rings: what finds and opens them.
        changed: called when others are open than before, with those that left.
        only_known: tells whether rings without a number are left for later: the process that owns the loader numbers them.
    """

    def __init__(
        self, rings: Rings, changed: Callable[[list[Ring]], None], only_known: Callable[[], bool]
    ) -> None:  # fmt: skip
        self.rings = rings
        self._changed, self._only_known = changed, only_known
        self.begin()

    def begin(self) -> None:
        """Begin without rings: at first, and in a forked child, where another thread may have held the lock."""
        self.lock = threading.RLock()
        self.open: tuple[Ring, ...] = ()
        self.changes: Array = np.zeros(0, np.int64)
        """How often each ring changed."""
        self._by_number: dict[int, Ring] = {}
        self._glances: list[Callable[[], Glance]] = []
        self._seen: list[Glance] | None = None
        self._states = States(())
        self._swept: bytes | None = None
        self._next_turn = self._next_scan = 0.0
        self._turn = 0
        self._is_started = False

    def start(self, wait_s: float) -> None:
        """Open the rings; wait for the first one.

        Raises:
            NoClipsError: there is none after `wait_s` seconds.
            InputError: the same ring twice.
        """
        self.rings.refuse_odd()
        self._is_started = True
        until = time.monotonic() + wait_s
        while True:
            self.rings.scan(time.monotonic(), is_first=True)
            self._adopt()
            now = time.monotonic()
            self._next_scan, left = now + _SCAN_S, until - now
            if self.open:
                return
            if left <= 0:
                break
            time.sleep(min(0.05, left))
        raise NoClipsError(
            f"{_WHERE}: no ring {self.rings.where} after {wait_s:g} s{self.rings.why}; start a collector, whose path= is a "
            "directory there, or wait longer (wait_s=)"
        )

    def start_once(self) -> None:
        """Open the rings of a copy that was received from another process, at its first use."""
        if not self._is_started:
            with self.lock:
                self._is_started = True
                self._take_turn(time.monotonic(), scan=True)

    def reopen(self) -> None:
        """Open the rings again, in a forked child: the open files of the parent process are not ours."""
        rings, self.rings.open = self.rings.open, ()
        self.begin()
        self._is_started = True
        kept = []
        for ring in rings:
            try:
                ring.buffer.engine.check_open()  # it opens its own files
                kept.append(ring)
            except RING_FAULTS:  # the next scan finds it, or says why not
                continue
        self.rings.open = tuple(kept)
        self._adopt()

    def of(self, number: int) -> Ring | None:
        """Return an open ring by its number."""
        return self._by_number.get(number)

    def follow(self, scan: bool = False) -> bool:
        """Catch up with every ring; tell whether anything changed.

        Args:
            scan: whether to look for new rings now.

        Raises:
            RingmapError: what a ring raised, with on_bad="raise".
        """
        before = self.open
        sweep = self._states.glance()  # before the rings are read: a later state counts as new
        changed = False
        if sweep is None or sweep != self._swept:
            with self.lock:
                sweep = self._states.glance()
                seen = [glance() for glance in self._glances]
                if seen != self._seen:
                    changed = self._catch_up(seen)
                self._swept = None if self._seen is None else sweep
        now = time.monotonic()
        if scan or now >= self._next_turn:
            with self.lock:
                self._take_turn(now, scan)
        return changed or self.open is not before

    def _catch_up(self, seen: list[Glance]) -> bool:
        known, rings, changed = self._seen, self.open, False
        failed, again = list[tuple[Ring, Exception]](), list[Ring]()
        for place, ring in enumerate(rings):
            if known is not None and seen[place] is not None and seen[place] == known[place]:
                continue
            try:
                ring.source.recover_if_stale()
                refreshed = ring.source.refresh()
                changed |= refreshed or (known is not None and seen[place] is not None)
                self.changes[place] += 1
                if not ring.is_checked and not self.rings.compare(ring):
                    again.append(ring)
            except (InputError, *RING_FAULTS) as error:
                failed.append((ring, error))
        self._seen = None if None in seen else seen
        for ring, fault in failed:  # now that places have no meaning any more
            self.drop(ring, fault)
        for ring in again:
            self.leave(ring)
            self._next_turn = self._next_scan = 0.0  # it is opened now
        return changed

    def _take_turn(self, now: float, scan: bool) -> None:
        rings = self.open
        self._next_turn = now + HELD_S / max(1, len(rings))
        if rings:
            self._turn = (self._turn + 1) % len(rings)
            ring = rings[self._turn]
            try:
                ring.source.disk.check_held(_WHERE)
            except RING_FAULTS as error:
                self.drop(ring, error)
        if scan or now >= self._next_scan:
            self._next_scan = now + _SCAN_S
            only_known = self._only_known()
            try:
                self.rings.scan(now, only_known=only_known)
            finally:
                self._adopt()

    def drop(self, ring: Ring, error: Exception) -> None:
        """Go on without a ring.

        Raises:
            Exception: that error, with on_bad="raise".
        """
        with self.lock:
            try:
                self.rings.set_aside(ring, error)
            finally:
                self._adopt()

    def leave(self, ring: Ring) -> None:
        """Go on without a ring that was removed on purpose."""
        with self.lock:
            self.rings.leave(ring)
            self._adopt()

    def _adopt(self) -> None:
        """Read the rings that are open now."""
        rings, before = self.rings.open, self.open
        if rings is before:
            return
        known = {id(ring): count for ring, count in zip(before, self.changes.tolist(), strict=True)}
        here = {id(ring) for ring in rings}
        self._glances = [ring.source.glance for ring in rings]
        self._states, self._swept = States([ring.source for ring in rings]), None
        self._seen = None
        self._by_number = {ring.number: ring for ring in rings}
        self.changes = np.array([known.get(id(ring), 0) for ring in rings], np.int64)
        self.open = rings
        self._changed([ring for ring in before if id(ring) not in here])
