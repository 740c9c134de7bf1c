"""Pace: how often a step is used, held by collectors and learners that wait for each other. There is no server.

    collectors  ─► rings      state.bin        how many steps came in     rings.py
                   fleet.json                  which fleet this is
                   pace/      commit-*-20      20 steps are being committed, while its lock is held
    learners    ─► pace/      learner-0.json   how many steps were drawn  tally.py
                              lock             one looks and acts at a time
                              pace.json        the numbers that all must share

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
from typing import Any
from uuid import uuid4

from ringmap import arguments
from ringmap.errors import CorruptError, EnvironmentFault, InputError, LockedError, NoClipsError
from ringmap.fleet.alone import Alone
from ringmap.fleet.rings import Rings
from ringmap.fleet.tally import Tally
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import Paths, local_path
from ringmap.storage.disk.system import clear_errors

__all__ = ["Pace"]

log = logging.getLogger("ringmap")

_FOLDER, _LOCK, _NUMBERS, _FLEET = "pace", "lock", "pace.json", "fleet.json"
_SHARED = "samples_per_insert", "min_steps", "slack"
_LEARNER = re.compile(r"learner-(\d+)\.json")
_COMMIT = re.compile(r"commit-[0-9a-f]{32}-(\d+)")
_MOST = 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05

_alone = Alone()


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

    Cost: a call that need not wait: a few system calls for each ring, and a small file for each learner; a draw and a
    commit write
        one. About 0.5 ms. Waits look again after 0.5 to 50 ms. No lock is held during a commit.

    Processes and threads: any. A thread that collects and draws in turn, through one object, only counts: it would wait
    for itself.
        Once it has drawn more than the slack since its own last commit, it is a learner as any other.

    Source: Reverb's rate limiter (Cassirer et al., 2021), `SampleToInsertRatio`; its error buffer, set as in Acme
    (Hoffman et al.,
        2020): a tolerance times `min_steps`.

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
        numbers = os.path.join(local_path(path), _FOLDER, _NUMBERS)
        found = _json_at(Disk(), numbers, where)
        if not found:
            return None
        try:
            return cls(path, *(found[name] for name in _SHARED))
        except (InputError, KeyError) as error:
            raise _corrupt(where, numbers, error) from error

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._one_learner = Alone()  # draws at a time
        self._turn = _Turn()
        self._last_to_draw: int | None = None
        self._collecting = Rings(self._disk, self.path)
        self._learning = Rings(self._disk, self.path)
        self._tally: Tally | None = None
        self._alive: WriterLock | None = None
        self._joined = False
        self._fleet = ""
        self._said = ""

    def __reduce__(self) -> Any:
        again = (
            _again,
            (self.path, self.samples_per_insert, self.min_steps, self.slack, self.max_ahead, self.timeout_s, self.rank),
        )
        return again

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
        rings.raise_marks(self._collecting.marks)
        for tally in self._tallies().values():
            rings.raise_marks(tally.marks)
        return rings.look()

    @property
    def drawn(self) -> int:
        """Steps that were drawn, ever, by all learners."""
        return sum(tally.drawn for tally in self._tallies().values())

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
        if self._pid == os.getpid():
            with self._one_learner("Pace.close"):
                if self._alive is not None:
                    self._alive.release()
                self._alive = self._tally = None

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
        pause = _FIRST_PAUSE_S
        while True:
            with self._locked(where):
                if self._may_insert(count, where):
                    reserved = self._reserve(count)
                    break
            if flush is not None:
                flush()
                flush = None
                continue
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        try:
            yield
        finally:
            self._turn.inserted()
            try:
                self._disk.discard(reserved.path)
            finally:
                reserved.release()

    def _reserve(self, count: int) -> WriterLock:
        """Count steps that are being committed, until the file is removed, or the process is gone. Holds the lock."""
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
        tallies = self._tallies().values()
        drawn = sum(tally.drawn for tally in tallies)
        for tally in tallies:
            self._collecting.raise_marks(tally.marks)
        reserved = self._reserved()  # first: what is committed meanwhile counts twice, not never
        new = self._collecting.look(uncommitted=True) + reserved - self.min_steps
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
        own, locked = self._learner_path("lock"), self._disk.system.is_locked
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
        with self._one_learner(where), clear_errors(where, self.path):
            tally, turn = self._learner(where), self._turn
            is_own_turn = turn.has(count, self.slack_drawn)
            if not is_own_turn:
                self._check_slack(count, where)
            self._last_to_draw = threading.get_ident()
            pause, alive_at, came_in = _FIRST_PAUSE_S, time.monotonic(), -1
            while True:
                with self._locked(where):
                    if is_own_turn or self._may_draw(count):
                        turn.drew(count)
                        tally.drawn += count
                        tally.marks = dict(self._learning.marks)
                        self._publish(tally, where)
                        return
                now, came = time.monotonic(), sum(self._learning.marks.values())
                # A ring of this process says nothing to a thread that collects: it may be its own.
                if came != came_in or self._learning.is_written(elsewhere=turn.collects):
                    alive_at, came_in = now, came
                if now - alive_at >= self.timeout_s:
                    raise NoClipsError(
                        f"{where}: waited {self.timeout_s:g} s, and no {'other ' if turn.collects else ''}collector is "
                        f"alive; {came} steps came in and {tally.drawn} were drawn here; the last was seen: "
                        f"{self._learning.last_writer()}; start a collector again"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

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

    def _may_draw(self, count: int) -> bool:
        tallies = self._tallies()
        for tally in tallies.values():
            self._learning.raise_marks(tally.marks)
        drawn = sum(tally.drawn for tally in tallies.values()) + count
        new = self._learning.look() - self.min_steps
        return new >= 0 and self.samples_per_insert * new - drawn >= -self.slack_drawn

    def _learner(self, where: str) -> Tally:
        """Become the learner of this rank, as long as this object lives; return its counter."""
        if self._alive is None:
            lock = WriterLock(self._disk, self._learner_path("lock"), self._folder)
            try:
                lock.acquire()
            except LockedError:
                raise LockedError(
                    f"{where}: {describe(holder_of(lock.path))} is the learner of rank {self.rank} in {self.path}; "
                    "give each learner a rank of its own, Pace(..., rank=1)"
                ) from None
            self._alive = lock
        if self._tally is None:  # reading it may have failed before
            self._tally = self._tallies().get(self.rank, Tally(fleet=self._fleet))
            self._tally.fleet = self._fleet  # one of an earlier release has none
        return self._tally

    def _publish(self, tally: Tally, where: str) -> None:
        path = self._learner_path("json")
        with clear_errors(where, self._folder):
            self._disk.put(path, path + ".tmp", tally.encode(), synced=False)

    # -- both ----------------------------------------------------------------------------------

    def _join(self, where: str) -> None:
        """Make the directory, and compare the numbers that all must share."""
        if self._pid != os.getpid():  # forked: the parent is the learner
            if self._alive is not None:
                self._alive.drop_in_child()
            self._begin()
        if self._joined:
            return
        ours = {"version": 1, **{name: getattr(self, name) for name in _SHARED}}
        path, identity = os.path.join(self._folder, _NUMBERS), os.path.join(self.path, _FLEET)
        with clear_errors(where, self._folder):
            make_folder(self._disk, self._folder)
        if self._disk.system.is_network(self._folder):
            raise EnvironmentFault(
                f"{where}: {self._folder} lies on a network file system, which does not tell who is alive on another "
                "host; put the rings of a fleet on a local disk"
            )
        with self._locked(where), clear_errors(where, self._folder):
            known = _json_at(self._disk, identity, where).get("fleet", "")
            found = _json_at(self._disk, path, where)
            theirs = found.pop("fleet", "")
            if found and found != ours:
                raise InputError(
                    f"{where}: {path} is of a fleet with other numbers: {found}, expected {ours}; give all of them the "
                    f"same, or stop all of them and remove {self._folder} to count from zero"
                )
            if theirs and theirs != known:
                raise self._foreign(path, theirs, known, where)
            if not known:  # first of both: a kill in between leaves no counts without the fleet they are of
                known = uuid4().hex
                self._disk.replace_file(identity, json.dumps({"fleet": known}).encode())
            if not theirs:
                self._disk.replace_file(path, json.dumps({**ours, "fleet": known}).encode())
            self._fleet = known
        self._joined = True

    def _foreign(self, path: str, theirs: str, known: str, where: str) -> InputError:
        return InputError(
            f"{where}: {path} belongs to fleet {theirs}, and {self.path} is "
            f"{f'fleet {known}' if known else 'none yet'}: it was copied "
            f"from elsewhere; stop the fleet and remove {self._folder} to count from zero, or copy the whole "
            f"directory, with {_FLEET}"
        )

    @contextlib.contextmanager
    def _locked(self, where: str) -> Iterator[None]:
        """Hold the lock under which one process looks and acts."""
        from filelock import FileLock

        lock = FileLock(
            os.path.join(self._folder, _LOCK),
            thread_local=False,
            fallback_to_soft=False,
            preserve_lock_file=True,
        )
        with _alone(where):
            with clear_errors(where, self._folder):
                self._disk.before("lock", lock.lock_file)
                lock.acquire(poll_interval=_FIRST_PAUSE_S)
            try:
                with clear_errors(where, self.path):
                    yield
            finally:
                lock.release(force=True)

    def _tallies(self) -> dict[int, Tally]:
        """Return what each learner says, by rank."""
        found = {}
        for name in self._disk.names(self._folder):
            if rank := _LEARNER.fullmatch(name):
                path = os.path.join(self._folder, name)
                tally = Tally.decode(self._disk.read_file(path, _MOST), path)
                if tally.fleet and self._fleet and tally.fleet != self._fleet:
                    raise self._foreign(path, tally.fleet, self._fleet, "Pace")
                found[int(rank[1])] = tally
        return found

    def _learner_path(self, suffix: str) -> str:
        return os.path.join(self._folder, f"learner-{self.rank}.{suffix}")

    def _learner_locks(self) -> list[str]:
        names = self._disk.names(self._folder)
        return [os.path.join(self._folder, n) for n in names if re.fullmatch(r"learner-\d+\.lock", n)]

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


class _Turn(threading.local):
    """What a thread that collects and draws in turn did last."""

    collects = False
    """Whether it has ever committed."""
    _drawn: int | None = None
    """Steps drawn since its last commit; None: it made none."""

    def inserted(self) -> None:
        """Note a commit."""
        self.collects, self._drawn = True, 0

    def has(self, count: int, slack: float) -> bool:
        """Tell whether a draw would only wait for the next commit of this thread: it is the first since the last one,
        or within the slack."""
        return self._drawn is not None and (not self._drawn or self._drawn + count <= slack)

    def drew(self, count: int) -> None:
        """Note a draw."""
        if self._drawn is not None:
            self._drawn += count


def _json_at(disk: Disk, path: str, where: str) -> dict[str, Any]:
    """Return what a file says; nothing if it is not there.

    Raises:
        CorruptError: it is not what was written.
    """
    if not disk.exists(path):
        return {}
    try:
        found = json.loads(disk.read_file(path, _MOST))
        if type(found) is not dict:
            raise ValueError("expected a mapping")
    except (ValueError, RecursionError) as error:
        raise _corrupt(where, path, error) from error
    return found


def _corrupt(where: str, path: str, error: Exception) -> CorruptError:
    return CorruptError(f"{where}: {path}: is not what was written ({error}); remove it")


def _again(
    path: str, ratio: float, min_steps: int, slack: float, ahead: int | None, timeout_s: float, rank: int
) -> Pace:
    return Pace(path, ratio, min_steps, slack, max_ahead=ahead, timeout_s=timeout_s, rank=rank)
