"""Values that a learner wrote back: kept in its own directory, and read over those of the rings.

    update(ids, {"latent": ...})  ->  ring, position  ->  runs/learner/UUID/mutable.bin
    every read of a ring          ->  its row  ->  what its writer updated  ->  what the learner updated

A file is one of a single buffer (storage/sidecars/mutable.py). Beside each column it keeps the session of the ring's
writer in which the learner gave a row that value, 0 where it gave none. A power cut takes rows, and their positions are
given again: then the ring's own file says which positions, up to which session, and these values do not count either.

Invariants: only the process that holds the learner's lock writes; a column that the learner did not give is the ring's
own; no row has the value of another one.
Not here: the bytes of a file (storage/sidecars), ids (numbers.py), the lock (learner_state.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ringmap.buffers.sharded.learner_state import LearnerState
from ringmap.buffers.sharded.members import Members
from ringmap.buffers.sharded.numbers import apart
from ringmap.buffers.sharded.rings import Ring
from ringmap.buffers.updates import updated
from ringmap.clips.many import groups
from ringmap.errors import CorruptError, InputError
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.advice import clear_errors
from ringmap.storage.inspect.faults import Finding
from ringmap.storage.read.handle import Handle, refuse_if_mine, tail_of
from ringmap.storage.sidecars.mutable import MutableValues, rows_in

__all__ = ["FleetValues"]

log = logging.getLogger("ringmap")

Array = np.ndarray[Any, np.dtype[Any]]

_WHERE = "ShardedReplayBuffer"


class FleetValues:
    """The values that a learner wrote back into the rows of all rings.

    Args:
        members: the open rings.
        state: the learner's directory.
        power: whether an update is durable when it returns.

    Processes and threads: one update at a time, under the lock of `members`; any thread of any process may read.
    """

    def __init__(self, members: Members, state: LearnerState, power: bool) -> None:
        self._members, self._state, self._power = members, state, power
        self.begin()

    def begin(self) -> None:
        """Begin without rings: at first, and in a forked child."""
        self._rings: dict[int, tuple[Ring, _RingValues]] = {}  # by number

    def show(self, ring: Ring) -> _RingValues:
        """Let all reads of a ring find its values, and return these."""
        known = self._rings.get(ring.number)
        if known is not None and known[0] is ring:
            return known[1]
        values = _RingValues(self._state)
        ring.source.lay_over(values.over)
        self._rings[ring.number] = ring, values
        return values

    def leave(self, ring: Ring) -> None:
        """Close the file of a ring that is no longer read; what it holds is durable, for a `flush` that comes later."""
        known = self._rings.pop(ring.number, None)
        if known is not None:
            try:
                known[1].sync(_WHERE)
            except OSError as error:
                log.warning("%s: values of the ring %s: %s", _WHERE, ring.name, error)
            finally:
                known[1].close()

    def update(self, ids: Any, values: Any, where: str) -> int:
        """Store values of steps, as `ShardedReplayBuffer.update` does."""
        members = self._members
        refuse_if_mine(members.lock, where)
        with members.lock:
            members.follow()
            positions, fitted = self._checked(ids, values, where)
            parts = self._parts(positions, fitted, where)
            for kept, local, at in parts:
                given = {name: array.take(at, 0) for name, array in fitted.items()}
                kept.update(local, given, self._power, where)
        return sum(len(local) for _, local, _ in parts)

    def _checked(self, ids: Any, values: Any, where: str) -> tuple[Array, dict[str, Array]]:
        """Return the ids, and the values of all columns in their dtypes."""
        rings = self._members.rings
        if rings.columns is not None:
            raise InputError(f"{where}: the rings {rings.where} hold transitions, whose columns are not mutable")
        casting = [ring.episodes.options.casting for ring in self._members.open[:1]] or ["safe"]
        return updated(rings.schema, ids, values, casting[0], where)

    def _parts(self, ids: Array, values: Mapping[str, Array], where: str) -> list[tuple[_RingValues, Array, Array]]:
        """Return for each ring: its values, positions of steps that are stored, and where these stand among the ids."""
        members, parts = self._members, []
        numbers, local = apart(ids)
        for number, at in groups(numbers):
            if not 0 <= number < len(members.rings.numbers.uuids):
                raise InputError(
                    f"{where}: id {int(ids[at[0]])} is of another buffer: no ring has the number {number}; give the "
                    "ids of a batch of this buffer"
                )
            ring = members.of(number)
            if ring is None:  # it left: its clips are lost, as by an eviction
                continue
            source, positions = ring.source, local[at]
            known = set() if source.schema is None else set(source.schema.mutable.names)
            if wrong := [name for name in values if name not in known]:
                raise InputError(
                    f"{where}: column {wrong[0]!r} is not mutable in the ring {ring.name}, as it is in others; leave "
                    "the ids of its steps out, or make it again with that column mutable"
                )
            if positions.max() >= source.head:
                raise InputError(
                    f"{where}: id {int(ids[at[positions.argmax()]])} is of another buffer: the ring {ring.name} has "
                    f"positions up to, and without, {source.head}; give the ids of a batch of this buffer"
                )
            with source.memory:
                stored = source.stored(positions)
            if stored is not None:
                positions, at = positions[stored], at[stored]
            if len(at):
                parts.append((self.show(ring), positions, at))
        return parts

    def flush(self, where: str = _WHERE) -> None:
        """Force all values to the disk.

        Raises:
            EnvironmentFault: the disk fails. The next call first writes them all again.
        """
        with self._members.lock:
            for _, values in self._rings.values():
                values.sync(where)

    def check(self) -> list[Finding]:
        """Return the faults of all files. Reads them whole."""
        with self._members.lock:
            return [f for ring, values in self._rings.values() for f in values.faults(ring.source)]

    def close(self) -> None:
        """Release the files."""
        with self._members.lock:
            for _, values in self._rings.values():
                values.close()
            self._rings.clear()


class _RingValues:
    """The values of one ring, as `Changes`. The file is made by the first update; until then a copy in another process
    looks for it."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state
        self._file: MutableValues | None = None
        self._fault: Exception | None = None
        """Why the file can't be opened: who reads the ring, or updates it, hears it."""
        self._is_unsure = False
        """Whether a sync failed: opened again, the file writes all values again. Meanwhile other threads may be reading
        it."""

    def over(self, source: Handle) -> _RingValues:
        """Return the values, to be read over those of an open ring."""
        schema, own = source.schema, source.values
        assert schema is not None
        assert own is not None
        names, home = schema.mutable.names, self._state.home(source)
        self._sessions = dict(zip(names, _free_names(names), strict=True))
        sessions = (ColumnSpec(name, (), np.dtype("<i8"), True) for name in self._sessions.values())
        columns = Schema((*sessions, *schema.mutable.columns))
        self._home, self._own = replace(home, schema=columns), own
        self._path = home.path(MutableValues.names[0])
        self._tail, self._mapped = tail_of(source), source.mapped
        if self._state.is_writable and MutableValues.exists(self._home):
            try:  # what this session shows is durable, as with a single buffer
                with clear_errors(_WHERE, self._path):
                    self._begun()
            except (CorruptError, OSError) as error:
                self._fault = error
        return self

    @property
    def columns(self) -> Collection[str]:
        """The names of the columns that may have values."""
        return self._sessions

    # -- reads -------------------------------------------------------------------------------

    def put_into(self, name: str, positions: Array, taken: Array) -> None:
        """Replace the rows that have a value, in an array `(*positions.shape, ...)` of the rows at these positions.

        Raises:
            CorruptError: a value, or the file, is damaged.
        """
        file = self._file or self._found()
        if file is None:
            return
        flat = positions.reshape(-1)
        with self._clear():
            which, (values, sessions) = file.newest([name, self._sessions[name]], flat)
        good = (sessions > 0) & ~self._own.are_lost(flat[which], sessions)
        if not good.all():
            which, values = which[good], values[good]
        if len(which):
            rows_in(taken, positions)[which] = values

    def _found(self) -> MutableValues | None:
        """Return the file if another process has made it since."""
        if self._fault is not None:
            raise self._fault
        if not self._state.is_writable and MutableValues.exists(self._home):
            self._file = self._open(write=False)
        return self._file

    def _open(self, write: bool) -> MutableValues:
        with self._clear():
            return MutableValues.open(self._home, write, self._mapped, self._tail)

    @contextlib.contextmanager
    def _clear(self) -> Iterator[None]:
        """Say what to do about a damaged file: it is no part of a buffer that can be repaired."""
        try:
            yield
        except CorruptError as error:
            what = str(error).partition("; run ")[0]
            raise CorruptError(
                f"{what}; remove this file, which is a learner's own: then steps have the values of their ring again"
            ) from error

    # -- updates -----------------------------------------------------------------------------

    def update(self, positions: Array, values: Mapping[str, Array], power: bool, where: str) -> None:
        """Store values of steps that are stored.

        Raises:
            EnvironmentFault: the disk is full or fails.
        """
        became = (
            "steps of other rings may have been updated, and none of this one, if its disk can still be written at all"
        )
        with clear_errors(where, self._path, lambda: became):
            file = self._writer()
            session = np.array(self._own.session)
            given = dict.fromkeys((self._sessions[name] for name in values), session)
            with self._clear():
                file.update(positions, {**values, **given}, _none)
            if power:
                self._sync(mark=False)

    def _writer(self) -> MutableValues:
        """Return the file for writing."""
        if self._fault is not None:
            raise self._fault
        return self._begun() if self._file is None or self._is_unsure else self._file

    def _begun(self) -> MutableValues:
        """Open the file for writing, and make it if it is not there. What it holds is durable then."""
        home = self._home
        if not MutableValues.exists(home):
            make_folder(home.disk, home.folder)
            MutableValues.create(home)
        file = self._open(write=True)
        try:
            file.begin(0, trusted=True)
        except BaseException:
            file.close()
            raise
        self._file, self._is_unsure = file, False
        return file

    def sync(self, where: str) -> None:
        """Return once all values are durable.

        Raises:
            EnvironmentFault: the disk fails. The next call first writes all values again.
        """
        if self._file is not None and self._state.is_writable:
            then = "the newest values may not be on the disk: mend it, then call it again"
            with clear_errors(where, self._path, then=then):
                self._sync(mark=True)

    def _sync(self, mark: bool) -> None:
        file = self._writer()
        try:
            file.sync(mark)
        except OSError:
            self._is_unsure = True
            raise

    def faults(self, source: Handle) -> list[Finding]:
        """Return what is wrong with the file."""
        if source.values is None or not MutableValues.exists(self._home):
            return []
        newest = source.table.read(source.seq) if source.seq else None
        return [Finding(self._path, what) for what in MutableValues.faults(self._home, newest)]

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            if self._state.is_writable and not self._is_unsure:
                self._file.seal()
            self._file.close()


def _free_names(names: list[str]) -> list[str]:
    """Return a new column name for each of these names, different from all of them."""
    mark = "session"
    while any(name.startswith(mark) for name in names):
        mark += "_"
    return [f"{mark} {number}" for number in range(len(names))]


def _none(name: str, positions: Array) -> Array:
    """Return what a row has in a column that was never given: session 0, and no value that counts."""
    return np.zeros((), np.int8)
