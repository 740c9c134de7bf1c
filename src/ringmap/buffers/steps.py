"""A ring of steps: the newest `capacity` rows, stored in a buffer of episodes.

    ReplayBuffer, max_steps = capacity + group, spare_rows = group      [..|g7 g7|g8 g8 g8|g9]
                                                                             ^ window: the newest `capacity` rows

Rows come in groups of at most `group`, each one commit (an "episode" to the buffer). The buffer evicts
whole groups, and has room for one group more than the window, so all rows in the window are stored.
The manifest says the capacity, and what the rows are.

Invariants: len == min(rows ever added, capacity), except for damaged rows; a row keeps its id, its position
on the ring, for life; one commit of `add` is at most as long as the spare rows. With `older` rows, as many rows before
the window are stored, too, for those that need them.
Not here: which rows are drawn, and their meaning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers.base import Buffer, Unindexed
from ringmap.buffers.engine import Engine, door
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.sources import RingSource
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import ROW
from ringmap.clips.draws import integers
from ringmap.errors import CorruptError, InputError, LappedError, NoClipsError
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.columns.values import root
from ringmap.storage.commit.commit import Commit, NewRecord
from ringmap.storage.disk.calls import note_nested, refuse_nested, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import local_path
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import lost, read_whole, retry
from ringmap.storage.read.recovery import small_state_in
from ringmap.storage.records.manifest import ROWS, Kind, Manifest, examine, must_be, read_manifest
from ringmap.storage.ring.ring import spare_rows

__all__ = ["OverRing", "StepRing"]

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

_AT_ONCE_NBYTES = 8 << 20
"""Rows that are committed together are also in memory, and in a file of this size."""


class StepRing(Buffer):
    """Rows of any columns; each is kept until `capacity` newer rows exist.

    Args:
        capacity: rows.
        path: directory; None for RAM. A path that already holds a ring is opened.
        group: rows per commit, and the room beyond `capacity`; None: a sixteenth, at least 1024, at
            most `capacity`.
        where: the class to name in an error.
        disk: as for `ReplayBuffer`.
        older: rows before the newest `capacity` that stay stored.
        kind: what the rows are, as the manifest says it.
        stack: of the observations in them: the number of frames and the padding; None for none.
        mutable: names of the columns that `update` may change, and of those that nest some.
        options: of `ReplayBuffer`: storage, schema, durability, casting, sync_every_s, threads, reads.

    Raises:
        InputError: an argument is wrong, or contradicts a value on disk.

    Cost: an add of up to `group` rows is one commit.

    Example:
        >>> ring = StepRing(4)
        >>> ring.add({"x": np.arange(3)}), ring.add({"x": np.arange(3, 6)})
        (array([0, 1, 2]), array([3, 4, 5]))
        >>> len(ring), ring.rows(ring.ids())["x"].tolist()
        (4, [2, 3, 4, 5])
    """

    mutable: Collection[str] = ()

    def __init__(
        self,
        capacity: int,
        *,
        path: str | os.PathLike[str] | None = None,
        group: int | None = None,
        where: str = "StepRing",
        disk: Disk | None = None,
        older: int = 0,
        kind: str = ROWS,
        stack: tuple[int, str] | None = None,
        mutable: Collection[str] = (),
        **options: Any,
    ) -> None:
        capacity = positive(where, "capacity", capacity)
        self.capacity = int(capacity)
        self.group = spare_rows(self.capacity) if group is None else group
        self.mutable = mutable
        if path is not None and examine(door(disk), local_path(path)) == "buffer":
            stored = self.manifest_at(path, where, disk, kind).born
            for asked, found in zip(_facts(self.capacity, stack), _facts(stored.capacity, stored.stack), strict=True):
                if asked != found:
                    raise InputError(
                        f"{where}: {asked}, but the buffer on disk has {found}; there is no resize: open it with "
                        f"{where}.open, or make a new one"
                    )
        self.buffer = ReplayBuffer(
            self.capacity + older + self.group,
            path=path,
            spare_rows=self.group,
            disk=disk,
            kind=Kind(kind, self.capacity, older, stack),
            **options,
        )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: str = "r",
        kind: str = ROWS,
        where: str = "StepRing.open",
        **options: Any,
    ) -> StepRing:
        """Return the ring at a path, of any capacity: "r" for a live reader, "r+" for the writer."""
        cls.manifest_at(path, where, options.get("disk"), kind)
        ring = cls.__new__(cls)
        ring.buffer = ReplayBuffer.open(path, mode, kind=kind, **options)
        manifest = ring.engine.owned.manifest
        ring.capacity, ring.group = manifest.capacity, manifest.spare
        return ring

    @classmethod
    def over(cls, buffer: ReplayBuffer, where: str) -> StepRing:
        """Return the ring of rows that a buffer is, or of the newest 15/16 of the steps of its episodes."""
        ring = cls.__new__(cls)
        ring.buffer = buffer
        manifest = buffer.engine.owned.manifest
        is_rows = manifest.born.capacity is not None
        ring.group = manifest.spare if is_rows else max(1, buffer.max_steps // 16)
        ring.capacity = manifest.capacity if is_rows else buffer.max_steps - ring.group
        if not ring.capacity:
            raise InputError(f"{where}: a ring of rows needs max_steps of at least 2")
        return ring

    @property
    def engine(self) -> Engine:
        """The engine of the buffer."""
        return self.buffer.engine

    @property
    def episode_ring(self) -> ReplayBuffer:
        """The buffer that holds the rows, of which each commit is an "episode"."""
        return self.buffer

    def mix_source(self, items: Mapping[str, Any]) -> RingSource:
        """Return what draws and stores rows for a mix."""
        return RingSource(self)

    # -- which rows --------------------------------------------------------------------------

    def window(self) -> ClipRange:
        """Return the newest `capacity` rows that exist now, numbered from the oldest. O(1)."""
        source = self.engine.source
        with thread.searching, source.lock:
            return self._window_of(source)

    def _window_of(self, source: Handle) -> ClipRange:
        """Do the work of `window`. Holds `lock`."""
        return ClipRange(source, self.engine.rings[0].reader.index.of(1), self.capacity, has_episodes=False)

    def __len__(self) -> int:
        return self.window().count

    @property
    def added(self) -> int:
        """Rows ever added: one past the newest id."""
        return self.engine.source.head

    @property
    def oldest(self) -> int:
        """The oldest id in the window. O(log groups)."""
        source = self.engine.source
        with thread.searching, source.lock:
            return self._window_of(source).low

    def ids(self) -> Array:
        """Return the ids of all rows in the window, oldest first, int64. O(rows)."""
        source = self.engine.source
        with thread.searching, source.lock:
            window = self._window_of(source)
            return window.positions(np.arange(window.count))

    def draw_or_count(self, source: Handle, count: int, rng: np.random.Generator) -> tuple[Array, int]:
        """Return the ids of `count` rows drawn uniformly from the window, none if it has fewer; and how many it has."""
        with thread.searching, source.lock:
            index = self.buffer.engine.rings[0].reader.index.of(1)
            base = max(index.base, index.end - self.capacity)
            stored = index.end - base
            if stored < count:
                return np.empty(0, np.int64), stored
            return index.draw(count, rng, base=base), stored

    def draw(self, count: int, rng: np.random.Generator, since: int = 0) -> Array:
        """Return the ids of `count` rows drawn uniformly from the window, of those since one id. O(count log groups).

        Raises:
            NoClipsError: no row is left: another thread, or the writer, cleared them.
        """
        source = self.engine.source
        with thread.searching, source.lock:
            window = self._window_of(source)
            if not window.count or since >= source.head:
                raise NoClipsError(f"{source.folder}: no rows are left to draw from; add some first")
            least = int(window.ids(np.array([since]))[0]) if since > window.low else 0
            return window.positions(integers(rng, least, window.count, count))

    def holds(self, ids: Array) -> Array:
        """Tell for each id whether its row is in the window. O(ids log groups)."""
        inside = (ids >= self.oldest) & (ids < self.added)
        found: Array = inside & self.engine.reader.starts(ids, ROW)
        return found

    # -- rows --------------------------------------------------------------------------------

    def id_at(self, age: int) -> int:
        """Return the id of the row that is `age` rows newer than the oldest in the window. O(log groups)."""
        source = self.engine.source
        with thread.searching, source.lock:
            return int(self._window_of(source).positions(np.array([age]))[0])

    def rows(self, ids: Array) -> dict[str, Array]:
        """Return rows by id, column -> `(n, ...)`, copies. The ids are in the window.

        A row that an add of another thread or process evicts meanwhile is redrawn, as in `ReplayBuffer`.
        """
        return self.rows_at(ids)[0]

    def rows_at(self, ids: Array) -> tuple[dict[str, Array], Array]:
        """Return rows as `rows` does, and their ids, which differ where rows were redrawn."""
        engine, schema = self.engine, self.schema
        if schema is None:
            return {}, np.empty(0, np.int64)
        asked = engine.anchors_at(np.array(ids, np.int64), ROW)
        positions = engine.replaced(asked, ROW)
        return engine.read(positions, ROW), positions

    def read(self, ids: Array, names: Sequence[str] | None = None) -> tuple[dict[str, Array], Array]:
        """Return columns (None: all) of rows, and which rows are still in the window: the others are meaningless."""
        stored = self.engine.source.rows
        assert stored is not None
        wanted = [n for n in stored.schema.names if names is None or n in names]
        columns = dict(zip(wanted, stored.take(wanted, ids), strict=True))
        bad = lost(self.engine.source, ids, self.holds(ids))
        return columns, np.ones(len(ids), np.bool_) if bad is None else ~bad

    def column(self, name: str, ids: Array) -> Array:
        """Return one column of rows by id; LappedError if a writer elsewhere evicted some of them."""
        source = self.engine.source
        values = self.take(name, ids)
        if lost(source, ids) is not None:
            raise LappedError(
                f"{source.folder}: rows were evicted by the writer before they could be read; raise the capacity"
            )
        return values

    def take(self, name: str, ids: Array) -> Array:
        """Return a copy of one column of rows by id, without a check: for use inside `read_whole`."""
        rows = self.engine.source.rows
        assert rows is not None
        return rows.take([name], ids)[0]

    def read_whole(self, read: Callable[[], tuple[Array, T]]) -> T:
        """Return a read of one consistent state: `read` looks ids up, copies their rows with `take`, and returns the
        ids and its result. It is called again if one of the rows was evicted meanwhile.

        Raises:
            LappedError: the writer overtook this reader for 5 s without progress.
        """
        source = self.engine.source
        return read_whole(source, read, source.folder, "raise the capacity")

    @property
    def path(self) -> Path | None:
        """The directory of its buffer, None in RAM."""
        return self.buffer.path

    @property
    def schema(self) -> Schema | None:
        """The columns; None before the first row."""
        return self.engine.source.schema

    def add(
        self,
        rows: Mapping[str, Any],
        notes: Mapping[str, Any] | None = None,
        where: str = "StepRing.add",
    ) -> Array:
        """Store rows and return their ids, int64.

        Args:
            rows: column -> `(n, ...)`, lists, arrays or tensors. n = 0 is ignored.
            notes: as for `ReplayBuffer.write_episode`; they join with the last group.
            where: the method to name in an error.

        Raises:
            InputError: unequal lengths, a schema mismatch, a value that does not fit, more rows than
                `capacity`. Nothing was changed.

        Cost: one commit for each `group` rows; a kill in the middle of several leaves the first groups stored.
        """
        store = self.engine.writer(where)
        arrays: Mapping[str, Array] = as_columns(rows, where)
        count = len(next(iter(arrays.values()))) if arrays else 0
        if count > self.capacity:
            raise InputError(f"{where}: {count} rows exceed capacity={self.capacity}; raise it, or add fewer at a time")
        store.recover_if_stale()
        first = self.added
        if not count:
            return np.empty(0, np.int64)
        schema = self._schema_of(arrays) if store.schema is None else store.schema
        fitted = schema.fit(arrays, self.buffer.options.casting, where).values()
        for at in range(0, count, self.group):
            part = [values[at : at + self.group] for values in fitted]
            with self.engine.committing(notes if at + self.group >= count else None) as small:
                store.commit(Commit([NewRecord(len(part[0]))], where, schema, part, small=small))
        return np.arange(first, first + count)

    def _schema_of(self, arrays: Mapping[str, Array]) -> Schema:
        """Return the columns of the first rows."""
        specs = (replace(s, mutable=root(s.name) in self.mutable) for s in Schema.of(arrays).columns)
        return Schema(tuple(specs))

    def update(self, ids: Array, values: Mapping[str, Array], where: str) -> None:
        """Change values of rows, in mutable columns, as `ReplayBuffer.update` does. Values have the columns' dtypes."""
        store = self.engine.writer(where)
        store.recover_if_stale()
        store.update(ids, values, where)

    def append(
        self, rows: Mapping[str, Any], notes: Mapping[str, Any] | None = None, where: str = "StepRing.append"
    ) -> Array:
        """Store rows as `add` does, to be committed later, together with those of other calls. This handle shows them
        at once.

        Raises:
            InputError: as for `add`.
            EnvironmentFault: the disk is full or fails. Nothing was stored by this call.

        Cost: one write; at durability "power" one sync.
        """
        store = self.engine.writer(where)
        refuse_nested(where)
        store.recover_if_stale()
        schema = store.schema
        if schema is None:
            return self.add(rows, notes, where)
        arrays: Mapping[str, Array] = as_columns(rows, where)
        count = len(next(iter(arrays.values()))) if arrays else 0
        limit = self.at_once(sum(spec.row_nbytes for spec in schema.columns))
        if not 0 < count <= limit:
            return self.add(arrays, notes, where)
        fitted = schema.fit(arrays, self.buffer.options.casting, where)
        first = store.append(list(fitted.values()), count, limit, where, small=lambda: self.engine.committing(notes))
        return np.arange(first, first + count)

    def at_once(self, row_nbytes: int) -> int:
        """Return how many rows of this size are committed together; a call with more is a commit of its own."""
        return min(self.group, _AT_ONCE_NBYTES // row_nbytes) if row_nbytes else 0

    def notes(self) -> dict[str, Any]:
        """Return the notes of the newest rows; for a reader, as of its last refresh."""
        if self.buffer.mode == "r+":
            return self.buffer.notes
        source, found = self.engine.source, dict[str, Any]()

        def attempt() -> int:
            seq = source.seq
            record = source.table.read(seq) if seq else None
            blob = None if record is None else source.blob_of(record)
            small = blob and record and small_state_in(record, blob, source.blob_of)
            if not small or small.lost:  # overwritten meanwhile, or nothing is stored
                return int(source.refresh() or source.seq != seq)
            if small.fault:
                raise CorruptError(f"{source.paths.table}: {small.fault}; run ringmap.check on the buffer")
            found.update(small.state.get("notes") or {})
            return 0

        retry(attempt, lambda: None, source.folder, "raise the capacity", retry_s=source.retry_s)
        return found

    # -- whole rings -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the ring is closed."""
        return self.engine.is_closed

    def close(self) -> None:
        """Flush, and release files and lock."""
        self.buffer.close()

    def save(self, path: str | os.PathLike[str], notes: Mapping[str, Any], where: str) -> None:
        """Write a copy of what is stored to a new directory, with these notes if this handle writes: whole, or not at
        all."""
        if self.buffer.mode == "r+":
            self.buffer.flush(notes=notes)
        self.engine.snapshot(path, where)

    @staticmethod
    def manifest_at(path: str | os.PathLike[str], where: str, disk: Disk | None = None, kind: str = ROWS) -> Manifest:
        """Return the manifest of the ring at a path, of this kind."""
        folder = local_path(path)
        fixed = read_manifest(door(disk), folder)
        must_be(fixed, kind, folder, where)
        return fixed

    def __repr__(self) -> str:
        place = "" if self.path is None else f", path={str(self.path)!r}"
        return f"StepRing({len(self)}/{self.capacity} rows{place})"


def _facts(capacity: int | None, stack: tuple[int, str] | None) -> list[str]:
    """Return what is fixed by the birth of a ring, as the arguments say it."""
    stacked = "no frame_stack" if stack is None else f"frame_stack={stack[0]}, padding_type={stack[1]!r}"
    return [f"capacity={capacity}", stacked]


class OverRing(Unindexed):
    """A buffer over a ring of rows of its own, with which its state is stored; a subclass says which state."""

    _ring: StepRing | None
    """None where somebody else's buffer holds the rows."""

    def _notes(self) -> dict[str, Any]:
        """Return the state, as notes of the ring."""
        raise NotImplementedError

    def flush(self) -> None:
        """Force rows and state to the disk. Does nothing on a reader."""
        if note_nested(self.flush):
            return
        if self._ring is not None and self._ring.buffer.mode == "r+":
            self._ring.buffer.flush(notes=self._notes())

    def close(self) -> None:
        """Flush, and release files and locks of a ring of its own. Closing twice is allowed."""
        if note_nested(self.close):
            return
        if self._ring is None or self._ring.closed:
            return
        try:
            if self._ring.buffer.mode == "r+" and not self._ring.engine.owned.is_poisoned:
                self.flush()
        finally:
            self._ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Flush; the buffer stays open."""
        if self._ring is None or not self._ring.closed:
            self.flush()
