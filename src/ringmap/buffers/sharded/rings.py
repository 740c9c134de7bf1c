"""The rings of a fleet: found below a path, opened, followed, set aside when they fail, and looked at again.

    paths -> candidates -> opened -> Ring                       read by the engine
                |            |          |          |
                |            | it fails | it fails | its directory is gone
                |            v          v          v
                +<--------- Problem               evicted
                   on_bad="raise": an error of each draw, until it is read again or gone
                   on_bad="skip": a warning at each change; looked at again after 1, 2, 4, ... 60 s

    every draw      the generations of all rings, in one sweep of a map                1 us, and 5 ns for each idle ring
    each 0.1 s      is the directory still at its path: one system call for each ring, the rings in turn
    each second     are there new ones: one look at the directory

A place without a manifest is no ring; one of which that can't be told is a ring that can't be read. A ring holds
episodes or transitions, as its manifest says. Transitions without columns are opened as rows, and again when they have
some.

Invariants: no two open rings have the same uuid; all have the columns of the first one; what belongs to one set of open
rings is one object, which is replaced by one assignment: an interrupt leaves the old set or the new one. `changes` has
counted every commit that a ring's memory holds; who changes anything holds `lock`, and a look is refused in the middle
of a look of the same thread (by a signal handler). Where the folder can't be listed, the rings that are open stay.
Not here: draws and gathers (engine.py), what users see of a ring (buffer.py).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringmap.buffers.options import Options, log_progress
from ringmap.buffers.rings import Ring, RingNumbers, Rings
from ringmap.buffers.transitions.columns import TransitionColumns
from ringmap.buffers.transitions.nstep import transition_reader
from ringmap.clips.facts import Facts
from ringmap.clips.gather import ClipReader
from ringmap.clips.rings import RING_FAULTS, States
from ringmap.errors import (
    BadRingsError,
    EnvironmentFault,
    InputError,
    NoClipsError,
    ReplacedError,
    RingmapError,
)
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.calls import nested, refuse_nested
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import FINE, Paths, local_path
from ringmap.storage.disk.system import clear_error, clear_reads, remedy
from ringmap.storage.read.reader import HELD_S, Reader
from ringmap.storage.records.manifest import EPISODES, TRANSITIONS, must_be, read_manifest

__all__ = ["Fleet", "Problem", "as_paths"]

log = logging.getLogger("ringmap")

Array = np.ndarray[Any, np.dtype[Any]]
Generations = tuple[int, int] | None

_WHERE = "ShardedReplayBuffer"
_FIRST_S, _LAST_S = 1.0, 60.0
_SCAN_S = 1.0

_HELD = 5
"""Descriptors of an open ring, at most: its directory, the states, the records, newer values of mutable columns, the
data of an episode."""
_SPARE = 32
"""Descriptors that stay free for all else: what is open for a moment, a caller's own files."""


@dataclass(slots=True)
class Problem:
    """A ring that is not read, and why.

    `again_at`: when it is looked at again, in monotonic seconds.
    """

    name: str
    folder: str
    error: Exception
    again_at: float
    redraws: int = 0


_NO_STATES = States([])


class _Open:
    """What belongs to one set of open rings."""

    __slots__ = ("by_number", "changes", "rings", "seen", "states", "swept")

    def __init__(self, rings: tuple[Ring, ...], changes: Array) -> None:
        self.rings, self.changes = rings, changes
        self.by_number = {ring.number: ring for ring in rings}
        self.states = _NO_STATES  # until the engine was told
        self.seen: list[Generations] | None = None
        self.swept: bytes | None = None


class Fleet(Rings):
    """The rings below a path.

    Args:
        paths: a directory whose children are rings, a glob, or a list of rings.
        options: for each ring, to open it.
        on_bad: "raise" or "skip".
        numbers: of the rings.
        sums: n_step and gamma of transitions, where the caller gave them.
        asked: the argument of the caller that only rings of episodes have, for a message; None: there is none.
    """

    def __init__(
        self,
        paths: Any,
        options: Mapping[str, Any],
        on_bad: str,
        numbers: RingNumbers,
        sums: Mapping[str, Any],
        asked: str | None,
        told: Facts,
    ) -> None:
        super().__init__(())
        self.paths = paths
        self.options = dict(options)
        self.sums, self.asked = dict(sums), asked
        self.on_bad = on_bad
        self.numbers = numbers
        self.problems: dict[str, Problem] = {}
        """By folder."""
        self.schema: Schema | None = None
        self.told = self.facts = told
        self.columns: TransitionColumns | None = None
        """The columns of transitions; None for rings of episodes, and while no columns are known."""
        self._is_settled = False
        self._wrong_call: Exception | None = None
        self._not_listed: dict[str, Exception] = {}  # where rings may be, and why that is not known
        self._told: dict[str, str] = {}  # by folder: why it is not read
        self._delays: dict[str, tuple[float, float]] = {}  # by folder: seconds, and when
        self.changed: Callable[[list[Ring]], None] = lambda gone: None
        """Called when others are open than before, with those that left."""
        self.only_known: Callable[[], bool] = lambda: False
        """Tells whether rings without a number are left for later: the process that owns the loader numbers them."""
        self._begin()

    def _begin(self) -> None:
        """Begin without rings: at first, and in a forked child, where another thread may have held the lock."""
        self.lock = threading.RLock()
        self._now = _Open((), np.zeros(0, np.int64))
        self._known = self._now.rings  # `changed` was called for these
        self._next_turn = self._next_scan = 0.0
        self._turn = 0
        self._is_started = False

    @property
    def open(self) -> tuple[Ring, ...]:
        """The rings, in the order of their numbers: another tuple when others are open."""
        return self._now.rings

    def _put(self, rings: tuple[Ring, ...]) -> None:
        counts = zip(self._now.rings, self._now.changes.tolist(), strict=True)
        known = {id(ring): count for ring, count in counts}
        self._now = _Open(rings, np.array([known.get(id(ring), 0) for ring in rings], np.int64))

    @property
    def changes(self) -> Array:
        """How often each of them changed."""
        return self._now.changes

    def of(self, number: int) -> Ring | None:
        """Return an open ring by its number; None: it is away."""
        return self._now.by_number.get(number)

    @property
    def uuids(self) -> list[bytes]:
        """What names the rings that were open so far, by their numbers."""
        return self.numbers.uuids

    def number_of(self, uuid: bytes) -> int:
        """Return the number of the ring with this uuid; one that is away may come back."""
        return self.numbers.of(uuid)

    def refuse_nested(self, where: str) -> None:
        """Raise RoleError in the middle of another call of this thread, on one ring or on many."""
        refuse_nested(where)
        lock: Any = self.lock
        if lock._is_owned():
            raise nested(where)

    @property
    def n_step(self) -> int:
        """Number of rewards summed per transition."""
        return int(self.sums.get("n_step", 1))

    @property
    def where(self) -> str:
        """Where it looks, in words."""
        return ", ".join(self.paths) if isinstance(self.paths, tuple) else f"below {self.paths}"

    @property
    def path(self) -> Path | None:
        """The directory, or the glob; None for a list of rings."""
        return Path(self.paths) if isinstance(self.paths, str) else None

    @property
    def _wrong(self) -> dict[str, Exception]:
        """Why something is not read, by what it is: the directories of rings, or where they can't be listed."""
        return {one.folder: one.error for one in list(self.problems.values())} | self._not_listed

    @property
    def why(self) -> str:
        """What is wrong with the rings that can't be read, for the end of a sentence; "" if there are none."""
        return "".join(f"; {folder}: {error}" for folder, error in self._wrong.items())

    @property
    def is_refused(self) -> bool:
        """Whether a draw from the open rings would be one from a part of the fleet, which was not asked for."""
        return self.on_bad == "raise" and bool(self.problems or self._not_listed)

    def report(self) -> None:
        """Say what is wrong with rings, once the caller reads from those that are open."""
        if not (self.problems or self._not_listed or self._told):  # as at nearly each draw
            return
        wrong = self._wrong
        if self.on_bad == "raise" and wrong:
            said = dict[str, list[str]]()  # many may have one reason
            for folder, error in wrong.items():
                said.setdefault(str(error), []).append(folder)
            listed = "; ".join(f"{', '.join(folders)}: {why}" for why, folders in said.items())
            raise BadRingsError(
                f"{_WHERE}: {len(wrong)} of {len(wrong) + len(self.open)} rings {self.where} can't be read: {listed}; "
                "mend them, or move them away, or read on without them with on_bad='skip'",
                wrong,
            ) from next(iter(wrong.values()))
        now = {folder: str(error) for folder, error in wrong.items()}
        before, self._told = self._told, now
        if now == before:
            return
        changes = [f"goes on without {f}: {why}" for f, why in now.items() if before.get(f) != why]
        read = {ring.folder for ring in self.open}
        changes += [f"reads {f} again" for f in before if f in read]
        if changes:
            warnings.warn(f"{_WHERE}: {'; '.join(changes)}", RuntimeWarning, stacklevel=2)

    def start(self, wait_s: float) -> None:
        """Open the rings; wait for the first one."""
        self.refuse_odd()
        self._is_started = True
        until = time.monotonic() + wait_s
        while True:
            self._scan(time.monotonic(), is_first=True)
            self._tell()
            self.report()
            now = time.monotonic()
            self._next_scan, left = now + _SCAN_S, until - now
            if self.open:
                return
            if left <= 0:
                break
            time.sleep(min(0.05, left))
        raise NoClipsError(
            f"{_WHERE}: no ring {self.where} after {wait_s:g} s{self.why}; start a collector, whose path= "
            "is a directory there, or wait longer (wait_s=)"
        )

    def start_once(self) -> None:
        """Open the rings of a copy that was received from another process, at its first use."""
        if not self._is_started:
            with self.lock:
                self._is_started = True
                self._take_turn(time.monotonic(), scan=True)
            self.report()

    def reopen(self) -> None:
        """Open the rings again, in a forked child: the open files of the parent process are not ours."""
        rings = self.open
        self._begin()
        self._is_started = True
        kept = []
        for ring in rings:
            try:
                kept.append(self._reopened(ring))
            except (RingmapError, OSError):  # the next scan finds it, or says why not
                continue
        self._put(tuple(kept))
        self._tell()

    def follow(self, scan: bool = False) -> bool:
        """Catch up with every ring; tell whether anything changed.

        Args:
            scan: whether to look for new rings now.
        """
        before = self._now
        if self._known is not before.rings:  # an interrupt came between
            with self.lock:
                self._tell()
            before = self._now
        sweep = before.states.generations()
        changed = False
        if sweep is None or sweep != before.swept:
            with self.lock:
                changed = self._look()
        now = time.monotonic()
        scan |= self.is_refused
        if scan or now >= self._next_turn:
            with self.lock:
                self._take_turn(now, scan)
        self.report()
        return changed or self._now is not before

    def _look(self) -> bool:
        now = self._now
        sweep = now.states.generations()  # before the rings are read: a later state counts as new
        seen = [ring.source.generations() for ring in now.rings]
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
                if not ring.is_checked and not self.compare(ring):
                    again.append(ring)
            except (InputError, *RING_FAULTS) as error:
                failed.append((ring, error.with_traceback(None)))  # its frames hold the ring, and this list
        now.seen = None if None in seen else seen
        for ring, fault in failed:
            self._set_aside(ring, fault)
        for ring in again:
            self._leave(ring)
            self._next_turn = self._next_scan = 0.0  # it is opened now
        self._tell()
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
                self._set_aside(ring, error, now)
                self._tell()
        if scan or now >= self._next_scan:
            self._next_scan = now + _SCAN_S
            self._scan(now, only_known=self.only_known())
            self._tell()

    def drop(self, ring: Ring, error: Exception) -> None:
        """Go on without a ring."""
        with self.lock:
            self._set_aside(ring, error)
            self._tell()
        self.report()

    def leave(self, ring: Ring) -> None:
        """Go on without a ring that was removed on purpose."""
        with self.lock:
            self._leave(ring)
            self._tell()

    def _tell(self) -> None:
        """Let the engine read the rings that are open now."""
        rings = self.open
        if rings is not self._known:
            self._now.states = States([ring.source for ring in rings])
            here = {id(ring) for ring in rings}
            self.changed([ring for ring in self._known if id(ring) not in here])
            self._known = rings

    # -- which rings --------------------------------------------------------------------------

    def candidates(self, unlisted: dict[str, OSError]) -> list[tuple[str, str]]:
        """Return name and folder of each place where a ring may be, by name.

        Args:
            unlisted: takes the folders that can't be listed, where the path is a glob that names many.
        """
        paths = self.paths
        if isinstance(paths, tuple):
            return [(path, local_path(path)) for path in paths]
        if glob.has_magic(paths) and not os.path.isdir(paths):
            return [(path, local_path(path)) for path in Disk().matching(paths, unlisted)]
        names = [name for name in Disk().names(paths) if name not in FINE]
        return [(name, local_path(os.path.join(paths, name))) for name in names]

    def _scan(self, now: float, is_first: bool = False, only_known: bool = False) -> bool:
        """Let rings leave that are gone, and join that are new; tell whether any did. What can't be read is in
        `report`.

        Cost: one directory, and one stat for each place without a ring that is open.
        """
        before, unlisted = self.open, dict[str, OSError]()
        try:
            places = self.candidates(unlisted)
        except OSError as error:
            self._not_listed = {self.where: _not_listed(error, self.where)}
            return False
        self._not_listed = {folder: _not_listed(e, folder) for folder, e in unlisted.items()}
        there = {folder for _, folder in places}
        for ring in before:
            if ring.folder not in there and _is_gone(ring.folder):
                self._leave(ring)
        for folder in self.problems.keys() - there:
            del self.problems[folder]
        known = {ring.folder for ring in self.open}
        new = list[tuple[str, str]]()
        for name, folder in places:
            problem = self.problems.get(folder)
            if folder in known or (problem is not None and now < problem.again_at):
                continue
            try:
                is_there = Disk().exists(Paths(folder).manifest)
            except OSError as error:
                self._put_aside(name, folder, error, now)
                continue
            if is_there:
                new.append((name, folder))
            else:
                self.problems.pop(folder, None)
        fit, too_many = self._room_for(new)
        for number, (name, folder) in enumerate(new):
            if number < fit:
                self._join(name, folder, now, is_first, only_known)
            else:
                self._put_aside(name, folder, too_many, now)
        return self.open is not before

    def _room_for(self, new: list[tuple[str, str]]) -> tuple[int, Exception]:
        """Return how many of these rings the descriptors that are left suffice for, and the error of the others."""
        found = Disk().system.descriptors() if new else None
        if found is None:
            return len(new), RingmapError()
        used, most, hard = found
        each = self._descriptors_of(new[0][1])
        fit = max(0, (most - used - _SPARE) // each)
        needed = used + _SPARE + each * len(new)
        could = "" if needed <= hard else f", of which the system allows {hard} here"
        return fit, EnvironmentFault(
            errno.EMFILE,
            f"{_WHERE}: {len(new)} rings need {each} open files each, {needed} with the {used} that this process has; "
            f"it may have {most}: run 'ulimit -n {needed}' before it starts{could}, or give fewer rings",
        )

    def _descriptors_of(self, folder: str) -> int:
        """Return how many descriptors a ring such as this one holds: mapped columns none."""
        if self.options["reads"] == "map" and Disk().system.room(mmap.PAGESIZE) is not None:
            return _HELD  # a map holds none
        with contextlib.suppress(RingmapError, OSError):
            schema = read_manifest(Disk(), folder).schema
            return _HELD + 2 * len(schema.columns if schema is not None else ())
        return _HELD

    def _join(self, name: str, folder: str, now: float, is_first: bool, only_known: bool) -> None:
        try:
            manifest = read_manifest(Disk(), folder)
            uuid = manifest.uuid
            for other in self.open:
                if other.uuid == uuid:
                    raise self._error_of_call(
                        f"{folder} and {other.folder} are the same ring (uuid {uuid.hex()}), by a link or a copy; "
                        "give each ring once, and copy rings with ReplayBuffer.snapshot"
                    )
            if only_known and uuid not in self.numbers:
                return
            ring = self._opened(self.numbers.of(uuid), name, folder, manifest.uuid)
            try:
                if not self.compare(ring):  # its columns came meanwhile
                    ring.close()
                    return
            except BaseException:
                ring.close()
                raise
        except (RingmapError, OSError) as error:
            if is_first and error is self._wrong_call:
                raise
            self._put_aside(name, folder, error, now)
            return
        self.problems.pop(folder, None)
        self._put(tuple(sorted((*self.open, ring), key=lambda ring: ring.number)))

    def _opened(self, number: int, name: str, folder: str, uuid: bytes) -> Ring:
        """Open a ring to read, given its uuid: as rows of transitions alone while it has no columns."""
        mapped = self.options["reads"] == "map"
        with clear_reads(_WHERE, folder):
            source = Reader(Disk(), folder, log_progress, mapped, uuid=uuid)
        try:
            manifest, rng = source.manifest, np.random.default_rng()
            is_transitions = manifest.kind == TRANSITIONS
            must_be(manifest, TRANSITIONS if is_transitions else EPISODES, folder, _WHERE)
            Options.remembered(manifest.settings, folder).check(_WHERE)
            is_plain = not is_transitions or manifest.schema is None
            reader = ClipReader(source, rng) if is_plain else transition_reader(source, rng, **self.sums)
        except BaseException:
            source.close()
            raise
        return Ring.of(number, name, source, reader)

    def _reopened(self, ring: Ring) -> Ring:
        """Open a ring again, in a forked child: the open files of the parent process are not ours."""
        made = self._opened(ring.number, ring.name, ring.folder, ring.uuid)
        made.is_checked = ring.is_checked
        return made

    def _error_of_call(self, message: str) -> InputError:
        """Return an error of the caller: at the opening it is raised, whatever `on_bad` says."""
        self._wrong_call = InputError(f"{_WHERE}: {message}")
        return self._wrong_call

    def _check_call(self, is_transitions: bool, folder: str) -> None:
        """Raise if the caller's arguments are for rings of the other kind than the first one."""
        if is_transitions and self.asked is not None:
            raise self._error_of_call(
                f"{self.asked}, but {folder} holds transitions, which are single steps; leave it out (the writer's "
                "frame_stack= makes stacks)"
            )
        if not is_transitions and self.sums:
            given = " and ".join(f"{name}={value!r}" for name, value in self.sums.items())
            raise self._error_of_call(
                f"{given} is for transitions, but {folder} holds episodes; leave it out, and draw with "
                f"sample(window={{...: NStep(...)}})"
            )

    def compare(self, ring: Ring) -> bool:
        """Compare the columns of a ring with those of the others, once it has some.

        Returns:
            False for a ring of transitions that was opened before it had columns: it must be opened again.
        """
        schema = ring.source.schema
        if ring.is_checked or schema is None:
            return True
        is_transitions, known = ring.source.manifest.kind == TRANSITIONS, self.schema
        if is_transitions and ring.reader.holds_episodes:
            return False
        if known is None:
            self._check_call(is_transitions, ring.folder)
            self.schema = schema
            self.columns = ring.reader.columns
        elif is_transitions != (self.columns is not None):
            kinds = ("transitions", "episodes")
            here, there = kinds if is_transitions else kinds[::-1]
            raise InputError(
                f"{_WHERE}: {ring.folder} holds {here}, the rings before it {there}; give rings of one schema"
            )
        elif set(schema.columns) != set(known.columns):
            differ = sorted(map(str, set(schema.columns) ^ set(known.columns)))
            raise InputError(
                f"{_WHERE}: {ring.folder} has other columns than the rings before it ({', '.join(differ)} on one side "
                "only); give rings of one schema"
            )
        if is_transitions:
            ring.is_checked = True
            return True
        if not ring.source.seq:
            return True
        stored = self.told.over(Facts.of(Options.remembered(ring.source.manifest.settings, ring.folder)))
        if not self._is_settled:
            self.facts, self._is_settled = stored, True
        elif stored.reward_at != self.facts.reward_at:
            raise InputError(
                f"{_WHERE}: {ring.folder} has reward_at={stored.reward_at!r}, the rings before it "
                f"{self.facts.reward_at!r}; give rings of one kind"
            )
        else:
            self.facts.refuse_rate(stored, _WHERE, "a ring before it", ring.folder)
            self.facts = self.facts.over(stored)
        ring.is_checked = True
        return True

    def _leave(self, ring: Ring) -> None:
        """Close a ring that is gone, or was removed on purpose: it is no problem."""
        if self._close(ring):
            log.info("%s: the ring %s is gone", _WHERE, ring.folder)

    def _close(self, ring: Ring) -> bool:
        if not any(one is ring for one in self.open):  # another thread was faster
            return False
        self._put(tuple(one for one in self.open if one is not ring))
        ring.close()
        return True

    def _set_aside(self, ring: Ring, error: Exception, now: float | None = None) -> None:
        """Close a ring that failed, and remember why, unless it is gone."""
        redraws = ring.reader.num_redraws
        if self._close(ring):
            now = time.monotonic() if now is None else now
            self._put_aside(ring.name, ring.folder, error, now, redraws)

    def _put_aside(self, name: str, folder: str, error: Exception, now: float, redraws: int = 0) -> None:
        if isinstance(error, ReplacedError) or _is_gone(folder):
            self.problems.pop(folder, None)
            log.info("%s: the ring %s is gone", _WHERE, folder)
            return
        if isinstance(error, OSError) and not isinstance(error, RingmapError):
            error = clear_error(error, _WHERE, folder, then=remedy(error))
        delay, last = self._delays.get(folder, (0.0, now))
        delay = min(2 * delay, _LAST_S) if delay and now - last < 2 * _LAST_S else _FIRST_S
        self._delays[folder] = delay, now
        # With "raise" nothing is drawn meanwhile, so nothing waits for a look that is slow.
        again_at = now if self.on_bad == "raise" else now + delay
        self.problems[folder] = Problem(name, folder, error, again_at, redraws)

    def refuse_odd(self) -> None:
        """Raise if the path is a ring itself."""
        if isinstance(self.paths, str):
            with contextlib.suppress(OSError):  # then the rings in it can't be listed
                if Disk().exists(Paths(self.paths).manifest):
                    raise InputError(
                        f"{_WHERE}: {self.paths} is one ring; open it with ReplayBuffer.open, or give the directory "
                        "above it"
                    )

    def to_send(self) -> dict[str, Any]:
        """Return what `received` builds a copy from: paths, settings and ring numbers."""
        names = "paths", "options", "on_bad", "schema", "columns", "told", "facts", "sums", "asked"
        return {"uuids": list(self.uuids), **{name: getattr(self, name) for name in names}}

    @classmethod
    def received(cls, state: Mapping[str, Any]) -> Fleet:
        """Return the rings, which are opened at first use, from what another process sent."""
        numbers = RingNumbers(state["uuids"])
        made = cls(
            state["paths"], state["options"], state["on_bad"], numbers, state["sums"], state["asked"], state["told"]
        )
        made.schema, made.columns, made.facts = state["schema"], state["columns"], state["facts"]
        return made

    def close(self) -> None:
        """Close all."""
        rings = self.open
        self._put(())
        for ring in rings:
            ring.close()


def _not_listed(error: OSError, folder: str) -> Exception:
    return clear_error(
        error,
        f"{_WHERE}: the rings below {folder} can't be listed",
        folder,
        "those that are open are read on",
        f"{remedy(error)}; it is tried again at the next look",
    )


def _is_gone(folder: str) -> bool:
    try:
        return not Disk().exists(Paths(folder).manifest)
    except OSError:
        return False


def as_paths(paths: Any) -> str | tuple[str, ...]:
    """Return a path or a glob, or a tuple of paths."""
    if isinstance(paths, str | Path):
        return local_path(paths)
    if isinstance(paths, Sequence) and paths and all(isinstance(p, str | Path) for p in paths):
        return tuple(local_path(path) for path in paths)
    raise InputError(f"{_WHERE}: paths must be a directory, a glob or a list of rings, got {paths!r:.80}")
