"""Pace: how often a step is used, held by collectors and learners that wait for each other. There is no server.

    collectors  ─► rings      state.bin        how many steps came in     rings.py
                   fleet.json                  which fleet this is
                   pace/      commit-*-20      20 steps are being committed, while its lock is held
    learners    ─► pace/      pace.json        how many steps were drawn, and the numbers that all must share
                              lock             one looks and acts at a time
                              learner-0.lock   held while that learner lives

    ahead = samples_per_insert * (inserted - min_steps) - drawn         in steps drawn
            -slack ............ 0 ............ +slack
    learners wait below                        collectors wait above     slack * samples_per_insert * min_steps

A collector reserves its steps under the lock, commits them outside it, and then removes the reservation. For collectors
`inserted` has all reservations, and the rows of open groups, so that no two of them find the same room.

Invariants: while both sides live, and once `min_steps` came in, `ahead` stays within the slack, but for a commit that
is larger than what is left of it: that is let through where `ahead` is 0 or less, else both sides could wait for each
other. Nobody waits for the dead, and no thread for itself.
Not here: what is collected, and what is drawn.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from ringmap import arguments
from ringmap.errors import CorruptError, EnvironmentFault, InputError, LockedError, NoClipsError
from ringmap.fleet.rings import Rings
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.calls import Turn
from ringmap.storage.disk.checksums import decode_signed, encode_signed
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import Paths, local_path
from ringmap.storage.disk.system import clear_errors

__all__ = ["Pace", "checked_pace", "paced"]

Result = TypeVar("Result")

log = logging.getLogger("ringmap")

_FOLDER, _LOCK, _COUNTS, _FLEET = "pace", "lock", "pace.json", "fleet.json"
_SHARED = "samples_per_insert", "min_steps", "slack"
_LEARNER = re.compile(r"learner-\d+\.lock")
_COMMIT = re.compile(r"commit-[0-9a-f]{32}-(\d+)")
_MOST = 1 << 24
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05

_turn = Turn()


@dataclass(frozen=True, slots=True)
class _Counts:
    """What `pace.json` says. `drawn`: rank -> steps, ever; `marks`: uuid of a ring -> steps, as any learner saw it."""

    numbers: dict[str, Any]
    fleet: str
    drawn: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        return encode_signed({"numbers": self.numbers, "fleet": self.fleet, "drawn": self.drawn, "marks": self.marks})

    @classmethod
    def decode(cls, data: bytes, path: str, where: str) -> _Counts:
        """Return what a file says; raise CorruptError if it is not what was written."""
        body, fault = decode_signed(data)
        try:
            counts = cls(**body or {})
            steps = [*counts.drawn.values(), *counts.marks.values()]
            if fault or any(type(n) is not int or n < 0 for n in steps) or type(counts.fleet) is not str:
                raise ValueError(fault or "a count is none")
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"{where}: {path}: is not what was written ({error}); stop the fleet and remove it to count from zero"
            ) from error
        return counts


def _read(disk: Disk, path: str) -> bytes | None:
    """Return a file; None if it is not there."""
    try:
        return disk.read_file(path, _MOST)
    except (FileNotFoundError, NotADirectoryError):
        return None


class Pace:
    """Holds the ratio of steps drawn to steps collected, between processes that share a directory of rings.

    Collectors wait while they are too far ahead of the learners, and learners while they are too far ahead of the
    collectors. Before `min_steps` came in, nothing is drawn.

    Args:
        path: the directory whose children are the rings. The counts lie in `pace/` in it, and survive restarts.
        samples_per_insert: steps drawn for each step that came in after the first `min_steps`.
        min_steps: steps that come in before the first is drawn.
        slack: how far either side may be ahead, as a part of `min_steps`.
        max_ahead: while no learner is alive, collectors may go on until they are this many steps ahead, the slack at
            least; None: without limit.
        timeout_s: how long a learner waits while no collector is alive.
        rank: of this learner among several. Each has a counter of its own, and they add up.
        disk: through which the files change; for tests.

    Raises:
        InputError: a number is wrong, or `path` is a ring itself. Of the first call that collects or draws: other
            processes gave other numbers, or a file in `pace/` is of another fleet.
        EnvironmentFault: of that call: the directory lies on a network file system, or can't be written to.

    Cost: a call that need not wait: a few system calls for each ring, and a small file that is read; a draw and a
        commit write one. About 0.5 ms. Waits look again after 0.5 to 50 ms. No lock is held during a commit.

    Processes and threads: any. A thread that collects and draws in turn, through one object, only counts: it would wait
        for itself. Once it has drawn more than the slack since its own last commit, it is a learner as any other.

    Source: Reverb's rate limiter (Cassirer et al., 2021), `SampleToInsertRatio`; its error buffer, set as in Acme
        (Hoffman et al., 2020): a tolerance times `min_steps`.

    Example:
        >>> import numpy as np, ringmap
        >>> pace = Pace("runs/replay", samples_per_insert=2, min_steps=100, slack=0.5)
        >>> buf = ringmap.ReplayBuffer(max_steps=1000, path="runs/replay/collector-0", seed=0)
        >>> for _ in range(3):
        ...     with pace.insert(50):
        ...         buf.write_episode({"obs": np.zeros((50, 3))})
        ...     batch = buf.sample(32, pace=pace) if pace.inserted > 100 else None
        >>> pace.inserted, pace.drawn
        (150, 32)
        >>> pace.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        samples_per_insert: float,
        min_steps: int,
        slack: float = 0.1,
        *,
        max_ahead: int | None = None,
        timeout_s: float = 600.0,
        rank: int = 0,
        disk: Disk | None = None,
    ) -> None:
        self.path = local_path(path)
        self.samples_per_insert = arguments.positive_real("Pace", "samples_per_insert", samples_per_insert)
        self.min_steps = arguments.count("Pace", "min_steps", min_steps, 1)
        self.slack = arguments.positive_real("Pace", "slack", slack)
        self.max_ahead = None if max_ahead is None else arguments.count("Pace", "max_ahead", max_ahead, 0)
        self.timeout_s = arguments.positive_real("Pace", "timeout_s", timeout_s)
        self.rank = arguments.count("Pace", "rank", rank, 0)
        self._disk = disk or Disk()
        if self._disk.exists(Paths(self.path).manifest):
            raise InputError(
                f"Pace: {self.path} is a ring itself; give the directory above it, whose children are the rings"
            )
        self._folder = os.path.join(self.path, _FOLDER)
        self._counts_path = os.path.join(self._folder, _COUNTS)
        self._numbers = {"version": 1, **{name: getattr(self, name) for name in _SHARED}}
        self._begin()

    @classmethod
    def kept_at(cls, path: str | os.PathLike[str]) -> Pace | None:
        """Return the pace that collectors and learners keep below a directory, to look at it; None if they keep none.

        Raises:
            CorruptError: `pace.json` is not what was written.
            EnvironmentFault: it can't be read.

        Example:
            >>> pace = Pace("runs/watched", samples_per_insert=4, min_steps=100, slack=0.5)
            >>> with pace.insert(10):
            ...     pass
            >>> Pace.kept_at("runs/watched"), Pace.kept_at("runs")
            (Pace('.../runs/watched', samples_per_insert=4.0, min_steps=100, slack=0.5), None)
        """
        where = "Pace.kept_at"
        file = os.path.join(local_path(path), _FOLDER, _COUNTS)
        if (data := _read(Disk(), file)) is None:
            return None
        try:
            numbers = _Counts.decode(data, file, where).numbers
            return cls(path, *(numbers[name] for name in _SHARED))
        except (InputError, LookupError, TypeError) as error:
            raise CorruptError(f"{where}: {file}: is not what was written ({error}); remove it") from error

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._one_learner = Turn()  # draws at a time
        self._loop = _Loop()
        self._last_to_draw: int | None = None
        self._rings = Rings(self._disk, self.path)
        self._alive: WriterLock | None = None
        self._seen: tuple[bytes | None, _Counts | None] = None, None
        """The file of the counts as it was last, and what it says."""
        self._fleet = ""
        self._said = ""

    def __reduce__(self) -> Any:
        numbers = [getattr(self, name) for name in _SHARED]
        options: dict[str, Any] = {"max_ahead": self.max_ahead, "timeout_s": self.timeout_s, "rank": self.rank}
        return partial(type(self), self.path, *numbers, **options), ()

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Pace({self.path!r}, samples_per_insert={self.samples_per_insert}, min_steps={self.min_steps}, "
            f"slack={self.slack})"
        )

    @property
    def slack_drawn(self) -> float:
        """How far either side may be ahead, in steps drawn."""
        return self.slack * self.samples_per_insert * self.min_steps

    @property
    def inserted(self) -> int:
        """Steps that came into the rings, ever, as far as a learner or this object saw them."""
        rings = Rings(self._disk, self.path)
        rings.raise_marks(self._rings.marks)
        rings.raise_marks(self._counts("Pace.inserted").marks)
        return rings.look()

    @property
    def drawn(self) -> int:
        """Steps that were drawn, ever, by all learners."""
        return sum(self._counts("Pace.drawn").drawn.values())

    @property
    def ahead(self) -> float:
        """How far collectors are ahead, in steps drawn; learners, if it is negative. Within `slack_drawn` either way,
        but for a large commit."""
        return self.samples_per_insert * (self.inserted - self.min_steps) - self.drawn

    @property
    def has_learner(self) -> bool:
        """Whether a learner is alive, or the system does not tell."""
        return any(self._disk.system.is_locked(lock) is not False for lock in self._learner_locks())

    def close(self) -> None:
        """End to be a learner: from now on collectors do not wait for this one. Counts stay."""
        self._one_learner.take("Pace.close", self._end)

    def _end(self) -> None:
        if self._alive is not None:
            self._alive.release()
        self._alive = None

    # -- collectors ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def insert(self, num_steps: int, flush: Callable[[], object] | None = None) -> Iterator[None]:
        """Wait until a commit of so many steps may come in; commit them in the `with` block.

        Steps come in when they are committed: rows that a `TransitionReplayBuffer` keeps in an open group do so with
        the group.

        Args:
            num_steps: of the commit.
            flush: called before a wait, so that learners see all steps of this collector.

        Raises:
            RoleError: the caller is a signal handler that came in the middle of a look.
            CorruptError, EnvironmentFault: the counts are damaged, or can't be read.
        """
        where = "Pace.insert"
        count = arguments.count(where, "num_steps", num_steps, 1)
        self._join(where)
        pauses = _pauses()
        while not (reserved := self._act(where, lambda: self._reserve(count, where))):
            if flush is not None:
                flush()
                flush = None
            else:
                time.sleep(next(pauses))
        try:
            yield
        finally:
            self._loop.committed()
            try:
                self._disk.discard(reserved.path)
            finally:
                reserved.release()

    def _reserve(self, count: int, where: str) -> WriterLock | None:
        """Count steps that are being committed, until the file is removed or the process is gone; None: there is no
        room. Holds the lock."""
        if not self._may_insert(count, where):
            return None
        path = os.path.join(self._folder, f"commit-{uuid4().hex}-{count}")
        reserved = WriterLock(self._disk, path, self._folder)
        reserved.acquire()
        return reserved

    def _reserved(self) -> int:
        """Return how many steps are being committed; remove what the dead have left. Holds the lock."""
        found = 0
        for name in self._disk.names(self._folder):
            if commit := _COMMIT.fullmatch(name):
                lock = WriterLock(self._disk, os.path.join(self._folder, name), self._folder)
                try:
                    lock.acquire()
                except LockedError:
                    found += int(commit[1])
                else:
                    self._disk.discard(lock.path)
                    lock.release()
        return found

    def check_ring(self, path: str | os.PathLike[str] | None, where: str) -> None:
        """Raise unless a buffer is one of the rings whose steps are counted.

        Raises:
            InputError: it is in RAM, or elsewhere.
        """
        if path is None or os.path.dirname(local_path(path)) != self.path:
            place = "in RAM" if path is None else f"at {path}"
            raise InputError(
                f"{where}: pace= counts the rings in {self.path}, and this buffer is {place}; put it there"
            )

    def _may_insert(self, count: int, where: str) -> bool:
        counts = self._counts(where)
        drawn = sum(counts.drawn.values())
        self._rings.raise_marks(counts.marks)
        reserved = self._reserved()  # first: what is committed meanwhile counts twice, not never
        new = self._rings.look(uncommitted=True) + reserved - self.min_steps
        before = self.samples_per_insert * new - drawn
        has_room = before <= 0 or before + self.samples_per_insert * count <= self.slack_drawn
        if self.has_learner:
            if self._said == "ahead":
                self._said = ""
            return has_room or self._waits_for_itself()
        ahead = new + count - drawn / self.samples_per_insert
        if has_room:
            return True
        may = self.max_ahead is None or ahead <= self.max_ahead
        said = "ahead" if may else "waits"
        if self._said != said:
            self._said = said
            most = "without limit" if self.max_ahead is None else f"up to max_ahead={self.max_ahead} steps ahead"
            does = (
                f"goes on, {most}"
                if may
                else f"waits: {ahead - count:.0f} steps are not used yet, with max_ahead={self.max_ahead}"
            )
            log.warning("%s: no learner is alive (%s); this collector %s", where, self._last_learner(), does)
        return may

    def _waits_for_itself(self) -> bool:
        """Tell whether this thread, which is to commit, is the only learner."""
        if self._last_to_draw != threading.get_ident():
            return False
        own, locked = self._own_lock, self._disk.system.is_locked
        return not any(lock != own and locked(lock) for lock in self._learner_locks())

    # -- learners ------------------------------------------------------------------------------

    def draw(self, num_steps: int) -> None:
        """Wait until so many steps may be drawn, and count them.

        Args:
            num_steps: of the batch: clips times steps in each.

        Raises:
            InputError: the slack is less than this batch, which could wait for ever.
            LockedError: another process is the learner of this rank.
            RoleError: this thread is in the middle of a paced call: the caller is a signal handler or a callback.
            NoClipsError: no collector was alive for `timeout_s`; the message names who was seen last.
            CorruptError, EnvironmentFault: the counts are damaged, or can't be read or written.
        """
        where = "Pace.draw"
        count = arguments.count(where, "num_steps", num_steps, 1)
        self._join(where)
        with clear_errors(where, self.path):
            self._one_learner.take(where, lambda: self._draw(count, where))

    def _draw(self, count: int, where: str) -> None:
        self._become_learner(where)
        loop = self._loop
        is_own_turn = loop.has_turn(count, self.slack_drawn)
        if not is_own_turn:
            self._check_slack(count, where)
        self._last_to_draw = threading.get_ident()
        alive_at, came_in = time.monotonic(), -1
        for pause in _pauses():
            came = self._act(where, lambda: self._count_draw(count, is_own_turn, where))
            if came is None:
                return loop.drew(count)
            now = time.monotonic()
            # A ring of this process says nothing to a thread that collects: it may be its own.
            if came != came_in or self._rings.is_written(elsewhere=loop.collects):
                alive_at, came_in = now, came
            if now - alive_at >= self.timeout_s:
                raise NoClipsError(
                    f"{where}: waited {self.timeout_s:g} s, and no {'other ' if loop.collects else ''}collector is "
                    f"alive; {came} steps came in and {self._counts(where).drawn.get(str(self.rank), 0)} were drawn "
                    f"here; the last was seen: {self._rings.last_writer()}; start a collector again"
                )
            time.sleep(pause)

    def _count_draw(self, count: int, is_own_turn: bool, where: str) -> int | None:
        """Count a draw if it may be; else return how many steps came in. Holds the lock."""
        counts = self._counts(where)
        self._rings.raise_marks(counts.marks)
        if not (is_own_turn or self._may_draw(count, sum(counts.drawn.values()))):
            return sum(self._rings.marks.values())
        drawn = {**counts.drawn, str(self.rank): counts.drawn.get(str(self.rank), 0) + count}
        counts = _Counts(counts.numbers, counts.fleet, drawn, dict(self._rings.marks))
        data = counts.encode()
        self._disk.put(self._counts_path, self._counts_path + ".tmp", data, synced=False)
        self._seen = data, counts
        return None

    def over(self, batches: Iterable[Any], num_steps: int) -> Iterator[Any]:
        """Yield batches of a `DataLoader`, or of any iterator, each once it may be drawn; it counts when it is handed
        out.

        Args:
            batches: for example `DataLoader(buf, batch_size=64)`. Workers may gather ahead.
            num_steps: of each batch: clips times steps in each.
        """
        for batch in batches:
            self.draw(num_steps)
            yield batch

    def _may_draw(self, count: int, drawn: int) -> bool:
        new = self._rings.look() - self.min_steps
        return new >= 0 and self.samples_per_insert * new - drawn - count >= -self.slack_drawn

    def _become_learner(self, where: str) -> None:
        """Become the learner of this rank, as long as this object lives."""
        if self._alive is None:
            lock = WriterLock(self._disk, self._own_lock, self._folder)
            try:
                lock.acquire()
            except LockedError:
                raise LockedError(
                    f"{where}: {describe(holder_of(lock.path))} is the learner of rank {self.rank} in {self.path}; "
                    "give each learner a rank of its own, Pace(..., rank=1)"
                ) from None
            self._alive = lock

    # -- both ----------------------------------------------------------------------------------

    def _join(self, where: str) -> None:
        """Make the directory, and compare the numbers that all must share."""
        if self._pid != os.getpid():  # forked: the parent is the learner
            self._begin()
        if self._fleet:
            return
        with clear_errors(where, self._folder):
            make_folder(self._disk, self._folder)
        if self._disk.system.is_network(self._folder):
            raise EnvironmentFault(
                f"{where}: {self._folder} lies on a network file system, which does not tell who is alive on another "
                "host; put the rings of a fleet on a local disk"
            )
        self._fleet = self._act(where, lambda: self._identify(where))

    def _identify(self, where: str) -> str:
        """Return which fleet this is, and make the files that say so. Holds the lock."""
        path, disk = os.path.join(self.path, _FLEET), self._disk
        fleet = _fleet_in(disk, path, where)
        data = _read(disk, self._counts_path)
        counts = None if data is None else _Counts.decode(data, self._counts_path, where)
        if counts is not None and counts.numbers != self._numbers:
            raise InputError(
                f"{where}: {self._counts_path} is of a fleet with other numbers: {counts.numbers}, expected "
                f"{self._numbers}; give all of them the same, or stop all of them and remove {self._folder} to count "
                "from zero"
            )
        if counts is not None and counts.fleet != fleet:
            raise InputError(
                f"{where}: {self._counts_path} belongs to fleet {counts.fleet}, and {self.path} is "
                f"{f'fleet {fleet}' if fleet else 'none yet'}: it was copied from elsewhere; stop the fleet and remove "
                f"{self._folder} to count from zero, or copy the whole directory, with {_FLEET}"
            )
        if not fleet:  # first of both: a kill in between leaves no counts without the fleet they are of
            fleet = uuid4().hex
            disk.replace_file(path, json.dumps({"fleet": fleet}).encode())
        if counts is None:
            disk.replace_file(self._counts_path, _Counts(self._numbers, fleet).encode())
        return fleet

    def _counts(self, where: str) -> _Counts:
        data, (before, counts) = _read(self._disk, self._counts_path), self._seen
        if data is None:
            return _Counts(self._numbers, self._fleet)
        if counts is None or data != before:
            counts = _Counts.decode(data, self._counts_path, where)
            self._seen = data, counts
        return counts

    def _act(self, where: str, work: Callable[[], Result]) -> Result:
        """Do work under the lock: one process looks and acts at a time."""
        from filelock import FileLock

        lock = FileLock(
            os.path.join(self._folder, _LOCK),
            thread_local=False,
            fallback_to_soft=False,
            preserve_lock_file=True,
        )

        def locked() -> Result:
            with clear_errors(where, self._folder):
                self._disk.before("lock", lock.lock_file)
                lock.acquire(poll_interval=_FIRST_PAUSE_S)
            try:
                with clear_errors(where, self.path):
                    return work()
            finally:
                lock.release(force=True)

        return _turn.take(where, locked)

    @property
    def _own_lock(self) -> str:
        return os.path.join(self._folder, f"learner-{self.rank}.lock")

    def _learner_locks(self) -> list[str]:
        return [os.path.join(self._folder, n) for n in self._disk.names(self._folder) if _LEARNER.fullmatch(n)]

    def _last_learner(self) -> str:
        holders = [holder for lock in self._learner_locks() if (holder := holder_of(lock))]
        if not holders:
            return "none has come yet"
        return f"the last was {describe(max(holders, key=lambda holder: holder.get('since') or ''))}"

    def _check_slack(self, batch: int, where: str) -> None:
        if batch > self.slack_drawn:
            raise InputError(
                f"{where}: slack={self.slack} of min_steps={self.min_steps} lets a side be {self.slack_drawn:g} steps "
                f"drawn ahead, and a batch of {batch} steps is more: it could wait for ever; raise slack to "
                f"{batch / (self.samples_per_insert * self.min_steps):.3g}, or min_steps"
            )


def checked_pace(pace: Any, where: str) -> Pace | None:
    """Return the argument `pace`; raise InputError if it is none."""
    if not (pace is None or isinstance(pace, Pace)):
        raise InputError(f"{where}: pace= must be a ringmap.Pace, got {type(pace).__name__}")
    return pace


def paced(pace: Pace | None, num_steps: int, writer: Any) -> contextlib.AbstractContextManager[None]:
    """Wait until a commit of so many steps of a writer may come in, which is made in the `with` block."""
    return contextlib.nullcontext() if pace is None or not num_steps else pace.insert(num_steps, writer.flush)


class _Loop(threading.local):
    """What a thread that collects and draws in turn did last."""

    collects = False
    """Whether it has ever committed."""
    _drawn = 0
    """Steps drawn since its last commit."""

    def committed(self) -> None:
        """Note a commit."""
        self.collects, self._drawn = True, 0

    def has_turn(self, count: int, slack: float) -> bool:
        """Tell whether a draw would only wait for the next commit of this thread: it is the first since the last one,
        or within the slack."""
        return self.collects and (not self._drawn or self._drawn + count <= slack)

    def drew(self, count: int) -> None:
        """Note a draw."""
        self._drawn += count


def _pauses() -> Iterator[float]:
    """Yield how long to wait before each look, for ever: looks, since processes that share files alone can't wake one
    another, and one that was killed would wake nobody."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _fleet_in(disk: Disk, path: str, where: str) -> str:
    """Return the identity of a fleet; "" if it has none yet."""
    data = _read(disk, path)
    try:
        return "" if data is None else str(json.loads(data)["fleet"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptError(f"{where}: {path}: is not what was written ({error}); remove it, and pace/") from error
