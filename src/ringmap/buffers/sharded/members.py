"""The open rings of one process: looked at before each draw, joined by new ones, left by those that fail.

    every draw      the generations of all rings, in one sweep of a map                1 us, and 5 ns for each idle ring
    each 0.1 s      is the directory still at its path: one system call for each ring, the rings in turn
    each second     are there new ones: one look at the directory

Invariants: what belongs to one set of rings is one object, which is replaced by one assignment: an interrupt leaves the
old set or the new one. `changes` has counted every commit that a ring's memory holds; who changes anything holds
`lock`, and a look is refused in the middle of a look of the same thread (by a signal handler).
Not here: how a ring is found and opened (rings.py), ids and draws (engine.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ringmap.buffers.rings import Ring
from ringmap.buffers.sharded.rings import Rings
from ringmap.clips.rings import RING_FAULTS, States
from ringmap.errors import InputError, NoClipsError, RingmapError
from ringmap.storage.disk.calls import nested, refuse_nested
from ringmap.storage.read.reader import HELD_S

__all__ = ["Members"]

Array = np.ndarray[Any, np.dtype[Any]]
Generations = tuple[int, int] | None

_WHERE = "ShardedReplayBuffer"
_SCAN_S = 1.0


class _Open:
    """What belongs to one set of open rings.

    Args:
        rings: by number.
        changes: how often each ring changed.
    """

    __slots__ = ("by_number", "changes", "generations", "rings", "seen", "states", "swept")

    def __init__(self, rings: tuple[Ring, ...], changes: Array) -> None:
        self.rings, self.changes = rings, changes
        self.by_number = {ring.number: ring for ring in rings}
        self.generations: list[Callable[[], Generations]] = [ring.source.generations for ring in rings]
        self.states = States([ring.source for ring in rings])
        self.seen: list[Generations] | None = None
        self.swept: bytes | None = None


class Members:
    """The rings that are read now.

    Args:
        rings: what finds and opens them.
        changed: called when others are open than before, with those that left.
        only_known: tells whether rings without a number are left for later: the process that owns the loader numbers
            them.
    """

    def __init__(self, rings: Rings, changed: Callable[[list[Ring]], None], only_known: Callable[[], bool]) -> None:
        self.rings = rings
        self._changed, self._only_known = changed, only_known
        self.begin()

    def begin(self) -> None:
        """Begin without rings: at first, and in a forked child, where another thread may have held the lock."""
        self.lock = threading.RLock()
        self._now = _Open((), np.zeros(0, np.int64))
        self._told = self._now.rings  # `changed` was called for these
        self._next_turn = self._next_scan = 0.0
        self._turn = 0
        self._is_started = False

    def refuse_nested(self, where: str) -> None:
        """Raise RoleError in the middle of another call of this thread, on one ring or on many."""
        refuse_nested(where)
        lock: Any = self.lock
        if lock._is_owned():
            raise nested(where)

    @property
    def open(self) -> tuple[Ring, ...]:
        """The rings, by number: another tuple when others are open."""
        return self._now.rings

    @property
    def changes(self) -> Array:
        """How often each of them changed."""
        return self._now.changes

    def start(self, wait_s: float) -> None:
        """Open the rings; wait for the first one.

        Raises:
            NoClipsError: there is none after `wait_s` seconds.
            InputError: the same ring twice.
            BadRingsError: rings can't be read, with on_bad="raise".
        """
        self.rings.refuse_odd()
        self._is_started = True
        until = time.monotonic() + wait_s
        while True:
            self.rings.scan(time.monotonic(), is_first=True)
            self._adopt()
            self.rings.report()
            now = time.monotonic()
            self._next_scan, left = now + _SCAN_S, until - now
            if self.open:
                return
            if left <= 0:
                break
            time.sleep(min(0.05, left))
        raise NoClipsError(
            f"{_WHERE}: no ring {self.rings.where} after {wait_s:g} s{self.rings.why}; start a collector, whose path= "
            "is a directory there, or wait longer (wait_s=)"
        )

    def start_once(self) -> None:
        """Open the rings of a copy that was received from another process, at its first use."""
        if not self._is_started:
            with self.lock:
                self._is_started = True
                self._take_turn(time.monotonic(), scan=True)
            self.rings.report()

    def reopen(self) -> None:
        """Open the rings again, in a forked child: the open files of the parent process are not ours."""
        rings, self.rings.open = self.rings.open, ()
        self.begin()
        self._is_started = True
        kept = []
        for ring in rings:
            try:
                kept.append(self.rings.reopened(ring))
            except (RingmapError, OSError):  # the next scan finds it, or says why not
                continue
        self.rings.open = tuple(kept)
        self._adopt()

    def of(self, number: int) -> Ring | None:
        """Return an open ring by its number."""
        return self._now.by_number.get(number)

    def follow(self, scan: bool = False) -> bool:
        """Catch up with every ring; tell whether anything changed.

        Args:
            scan: whether to look for new rings now.

        Raises:
            BadRingsError: rings can't be read, with on_bad="raise": at each call until they can, or are gone.
        """
        if self._told is not self.rings.open:  # an interrupt came between
            with self.lock:
                self._adopt()
        before = self._now
        sweep = before.states.generations()
        changed = False
        if sweep is None or sweep != before.swept:
            with self.lock:
                changed = self._look()
        now = time.monotonic()
        scan |= self.rings.is_refused
        if scan or now >= self._next_turn:
            with self.lock:
                self._take_turn(now, scan)
        self.rings.report()
        return changed or self._now is not before

    def _look(self) -> bool:
        now = self._now
        sweep = now.states.generations()  # before the rings are read: a later state counts as new
        seen = [generations() for generations in now.generations]
        changed = seen != now.seen and self._catch_up(now, seen)
        now.swept = sweep
        return changed

    def _catch_up(self, now: _Open, seen: list[Generations]) -> bool:
        known, changed = now.seen, False
        failed, again = list[tuple[Ring, Exception]](), list[Ring]()
        for place, ring in enumerate(now.rings):
            if known is not None and seen[place] is not None and seen[place] == known[place]:
                continue
            try:
                ring.source.recover_if_stale()
                refreshed = ring.source.refresh()
                changed |= refreshed or (known is not None and seen[place] is not None)
                now.changes[place] += 1
                if not ring.is_checked and not self.rings.compare(ring):
                    again.append(ring)
            except (InputError, *RING_FAULTS) as error:
                failed.append((ring, error.with_traceback(None)))  # its frames hold the ring, and this list
        now.seen = None if None in seen else seen
        for ring, fault in failed:
            self.rings.set_aside(ring, fault)
        for ring in again:
            self.rings.leave(ring)
            self._next_turn = self._next_scan = 0.0  # it is opened now
        self._adopt()
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
                self.rings.set_aside(ring, error, now)
                self._adopt()
        if scan or now >= self._next_scan:
            self._next_scan = now + _SCAN_S
            self.rings.scan(now, only_known=self._only_known())
            self._adopt()

    def drop(self, ring: Ring, error: Exception) -> None:
        """Go on without a ring.

        Raises:
            BadRingsError: it can't be read, with on_bad="raise".
        """
        with self.lock:
            self.rings.set_aside(ring, error)
            self._adopt()
            self.rings.report()

    def leave(self, ring: Ring) -> None:
        """Go on without a ring that was removed on purpose."""
        with self.lock:
            self.rings.leave(ring)
            self._adopt()

    def _adopt(self) -> None:
        """Read the rings that are open now."""
        rings, before = self.rings.open, self._now
        if rings is not before.rings:
            counts = zip(before.rings, before.changes.tolist(), strict=True)
            known = {id(ring): count for ring, count in counts}
            self._now = _Open(rings, np.array([known.get(id(ring), 0) for ring in rings], np.int64))
        if rings is not self._told:
            here = {id(ring) for ring in rings}
            self._changed([ring for ring in self._told if id(ring) not in here])
            self._told = rings
