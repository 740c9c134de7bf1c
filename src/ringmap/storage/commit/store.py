"""The store: the one writer of a buffer, its commits and its recovery.

One commit, in order; it counts from the record on:

    reserve blocks -> [sync table, if it still calls needed rows or slots live]
    -> rows, blob [power: sync] -> RECORD [power: sync] -> state.bin -> memory

An episode that fits in the spare rows is written where no live row is, and its record
both publishes it and retires the episodes that it evicts. A longer one first writes a retire record.

Invariants: a row or slot that the newest durable record calls live is never overwritten;
`stale` is set before a call's first write and cleared as its last statement, and a call
that finds it set recovers from the files first; memory changes under `memory` only.
Locks, in this order: `_mutex` (one writing call at a time), `_syncing` (one sync), `memory`. Whoever takes `_mutex`
sets the mark of its thread (disk/calls.py): a call inside a call is refused.
Not here: what a commit stores (buffers/), how a directory is created (create.py), when the
background syncs (background_sync.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ringmap.errors import (
    ClosedError,
    CorruptError,
    InputError,
    ReadOnlyError,
    ReplacedError,
    RingmapError,
    RoleError,
    SyncFailedError,
)
from ringmap.storage.columns.backends import Storage, choose
from ringmap.storage.columns.rows import Rows, combine, sum_of
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import coded
from ringmap.storage.commit.background_sync import BackgroundSync
from ringmap.storage.commit.commit_files import BlobPlace, CommitFiles
from ringmap.storage.commit.create import make_columns, make_folder, make_home, warn_of_space
from ringmap.storage.commit.group import OpenGroup, Values, follows, rows_left
from ringmap.storage.commit.numbering import ENDS, NUMBERS, UNNUMBERED, numbered
from ringmap.storage.directory.entries import Paths
from ringmap.storage.directory.opening import examine, hold, read_manifest
from ringmap.storage.disk.advice import clear_error, clear_errors, clear_reads
from ringmap.storage.disk.calls import end_noted, lifted, refuse_nested, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.threads import begin
from ringmap.storage.read.handle import Handle, refuse_if_mine
from ringmap.storage.read.recovery import Progress, RecoveredState, bad_episodes
from ringmap.storage.read.texts import Texts
from ringmap.storage.records.blobs import LARGEST_BLOB, encode_data, names_origin
from ringmap.storage.records.kinds import TRANSITIONS
from ringmap.storage.records.manifest import Kind, Manifest, lineage_of
from ringmap.storage.records.names import STREAM
from ringmap.storage.records.step_file import StepFile, StoredSteps, Unlinked, read_steps
from ringmap.storage.records.table import (
    CLEAR,
    COPIED,
    DROPPED,
    END,
    EPISODE,
    LAST_ORDINAL,
    MANY,
    MOST_U4,
    PART,
    RETIRE,
    SPARE_SLOTS,
    PartOf,
    Record,
    are_live,
    next_ordinals,
)
from ringmap.storage.ring.links import NONE
from ringmap.storage.ring.ring import Ordinal, Position
from ringmap.storage.sidecars import SIDECARS
from ringmap.storage.sidecars.successors import Successors

__all__ = ["JOINED_NBYTES", "NewEpisode", "Settings", "Store"]

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")

_HELPED_NBYTES = 1 << 20
"""From this size on the rows of an episode are summed on another core while they are written."""

JOINED_NBYTES = 1 << 16
"""Up to this size the rows of several episodes are better copied together than written apart. A larger copy is made in
new pages."""

_READY_S = 0.1
"""For so long a call that joins a group relies on the last look at the directory: a look takes as long as all else of
the call."""

_MOST_STEPS, _MOST_DATA = (1 << 31) - 1, LARGEST_BLOB // 2
"""Of an episode. Memory counts its steps in 32 bits; a blob of up to 4 GiB also has the small state."""

_NO_PART = (NONE, 0, NONE, 0, 0)
"""The fields `chain` to `lane` of a record of an episode that is whole."""

_NOTHING_LOST = "nothing was stored by this call and nothing committed is lost"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a store beyond those fixed on disk.

    `power`: sync each commit; `sync_every_s`: seconds between background syncs, 0 for none; `group_s`: seconds after
    which single rows are committed, 0 for no such limit;
    `remembered`: the caller's settings, stored in the manifest; `progress`: called while verifying;
    `mapped`: read through maps.
    """

    power: bool = False
    sync_every_s: float = 30.0
    storage: Storage = "memmap"
    remembered: Mapping[str, Any] | None = None
    progress: Progress | None = None
    mapped: bool = True
    group_s: float = 1.0


@dataclass(frozen=True, slots=True)
class NewEpisode:
    """An episode among several that one call stores: its steps, its encoded data, its flags."""

    length: int
    data: bytes
    flags: int


class Store(Handle):
    """A buffer open for writing. Made by `Store.create` or `Store.open`.

    Processes and threads: one store per directory, by lock. Methods may be called from any
    thread of the process that opened it; a forked child gets an error.
    """

    writable = True

    def __init__(
        self,
        disk: Disk,
        folder: str,
        manifest: Manifest,
        settings: Settings,
        lock: WriterLock | None,
    ):
        super().__init__(disk, folder, manifest, settings.mapped)
        self.settings = settings
        self.power = settings.power and not disk.volatile
        self.ring = manifest.ring
        self.files: CommitFiles | None = None
        self._lock = lock
        self._mutex = threading.Lock()
        self._syncing = threading.Lock()
        self.made_room = False
        self._stale = True
        self._trusted = True
        """Whether the recovery found that no power cut, and no failed sync, came since the last writer."""
        self._torn_memory = False
        self._closed = False
        self._child = False
        self._group: OpenGroup | None = None
        self._spent: StepFile | None = None
        """The file of a group that is committed, for the next one."""
        self._ready_until = 0.0
        self._following = Successors(self.home)
        self._following_of = -1
        """The number of the record for which the files of next observations were last turned."""
        self._background: BackgroundSync[Store] | None = None
        self._grouping: BackgroundSync[Store] | None = None
        if settings.sync_every_s > 0 and not self.power and not disk.volatile:
            self._background = BackgroundSync(self, settings.sync_every_s, Store.sync_behind)
        if settings.group_s > 0 and not disk.volatile:
            self._grouping = BackgroundSync(self, settings.group_s / 2, Store.commit_behind, "ringmap-group")
        _stores.add(self)

    # -- opening -----------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        disk: Disk,
        folder: str,
        max_steps: int,
        spare: int,
        settings: Settings,
        schema: Schema | None,
        kind: Kind | None = None,
        lineage: bytes | None = None,
    ) -> Store:
        """Make a buffer at `folder`, or continue an unfinished creation.

        `kind`: of its rows, None for episodes; `lineage`: None for a new one.

        Raises:
            UnknownFormatError, CorruptError: see `create.examine`.
            LockedError: another handle has it open for writing.
            EnvironmentFault: the disk is full, read-only or fails.
        """
        examine(disk, folder)
        make_folder(disk, folder)
        paths, disk = Paths(folder), hold(disk, folder)

        def prepare() -> None:
            if examine(disk, folder) != "buffer":  # another handle may have been first
                manifest = Manifest(
                    uuid.uuid4().bytes,
                    max_steps,
                    spare,
                    max_steps + spare + SPARE_SLOTS,
                    settings=dict(settings.remembered or {}),
                    table={"count": 0, "first": 1, "tail": 0, "head": 0, "seq": 0},
                    born=kind or Kind(),
                    lineage=lineage or lineage_of(None, ""),
                    closed=0,
                )
                make_home(disk, paths, manifest)

        with clear_errors("ReplayBuffer", folder, lambda: _NOTHING_LOST):
            return cls._locked(disk, folder, settings, schema, prepare)

    @classmethod
    def open(cls, disk: Disk, folder: str, settings: Settings, schema: Schema | None = None) -> Store:
        """Open the buffer at `folder` for writing, in its last committed state.

        The caller has read its manifest: the lock leaves a file, and in a directory that is not ours it may not.

        Args:
            disk: the disk that holds it.
            folder: its directory.
            settings: for this handle.
            schema: fixes the columns if no episode has done so yet.

        Raises:
            UnknownFormatError, CorruptError, NewerVersionError: it is not a buffer, or is damaged.
            LockedError: another handle has it open for writing.
            EnvironmentFault: the disk fails.
        """
        disk = hold(disk, folder)
        with clear_errors("ReplayBuffer.open", folder, lambda: _NOTHING_LOST):
            return cls._locked(disk, folder, settings, schema, lambda: None)

    @classmethod
    def _locked(
        cls,
        disk: Disk,
        folder: str,
        settings: Settings,
        schema: Schema | None,
        prepare: Callable[[], None],
    ) -> Store:
        """Take the lock and open the buffer; on failure release everything."""
        lock = None if disk.volatile else WriterLock(disk, Paths(folder).lock, folder)
        store: Store | None = None
        try:
            if lock is not None:
                lock.acquire()
            disk.check_held("ReplayBuffer")  # the lock is taken by path
            prepare()
            store = cls(disk, folder, read_manifest(disk, folder), settings, lock)
            store._recover()
            store._finish_groups()
            store._recover_sidecars()
            store._open_values(store.rows)
            store._fix_schema(schema)
            return store
        except BaseException:
            if store is not None:
                store.close_files()
            disk.let_go()
            if lock is not None:
                lock.release()
            raise

    def _finish_groups(self) -> None:
        """Commit the rows of a group that a killed process left open, and remove its file."""
        with clear_reads("ReplayBuffer", self.folder):
            for name in self.disk.names(self.paths.open):
                folder = os.path.join(self.paths.open, name)
                path = os.path.join(folder, STREAM)
                if not self.disk.is_folder(folder) or not self.disk.is_file(path):
                    continue
                steps = read_steps(self.disk, path, self.ring.spare)
                heading = steps.heading
                if steps.fault and (steps.after is not None or heading is None):
                    log.warning("%s: %s; the %d rows before it count", path, steps.fault, steps.count)
                if heading is None or heading.after is None:
                    continue
                fits = heading.schema == self.schema and self.rows is not None
                if fits and steps.count and heading.after == follows(self._newest_record()):
                    self._commit_left(steps, heading.schema, folder)
                    self.flush(folder)  # what an opening shows is durable
                elif steps.count and heading.after[0] >= self.seq:  # else they were committed
                    log.warning(
                        "%s: dropped %d rows of an open group: the rows before them are lost", self.folder, steps.count
                    )
                self.disk.remove_folder(folder)
                # Else a power cut could bring it back, when the record that it follows is the newest one again.
                self.disk.sync_folder(self.paths.open)

    def _newest_record(self) -> Record | None:
        """Return the newest record, None if there is none."""
        return self.table.read(self.seq) if self.seq else None

    def _commit_left(self, steps: StoredSteps, schema: Schema, folder: str) -> None:
        arrays, data, following = rows_left(steps)
        self.commit(schema, arrays, encode_data(data, folder), 0, where=folder, following=following)
        log.info("%s: stored %d rows of a group that was open", self.folder, steps.count)

    def _recover_sidecars(self) -> None:
        """Make sure that no new row gets a sidecar value of a row that was lost."""
        for sidecar in () if self.disk.volatile else SIDECARS:
            for fault in sidecar.recover(self.home, self.head):
                path = self.home.path(sidecar.names[0])
                log.warning("%s: %s; run ringmap.check on the buffer", path, fault)

    def _open_values(self, rows: Rows | None) -> None:
        before = self.values
        super()._open_values(rows)
        if self.values is not None and self.values is not before:
            self.values.begin(self.head, self._trusted)

    def _fix_schema(self, schema: Schema | None) -> None:
        if schema is not None and self.schema is None:
            assert self.files is not None
            self._make_columns(self.files, schema, locked=True)

    def _recover(self) -> None:
        """Make memory and files agree with the committed state; waits for a running sync. The caller holds the mutex,
        or is the opening."""
        with self._syncing:
            self._stale = True
            if self.files is not None:  # else it was read a moment ago, under the lock
                self.manifest = read_manifest(self.disk, self.folder)
            manifest = self.manifest
            if self.rows is not None:
                self.rows.forget()
            progress = None
            if self.files is None:  # else threads of this process may be reading
                progress = self.settings.progress  # later it would be called in the middle of a call
                self.files = CommitFiles(self.disk, self.paths, manifest, self.power, self.mapped)
                self.table, self.segments = self.files.table, self.files.segments
                self.is_open = True
            files = self.files
            found = files.find(manifest)
            self._trusted = found.clean
            nobody_wrote = found.generation > 0 and found.era == manifest.closed
            if not found.clean and not nobody_wrote:
                manifest = self.manifest = replace(manifest, ordinal=self._beyond_lost(found))
                # Before the state is shown as of this boot: then an opening trusts it.
                self.disk.replace_file(self.paths.manifest, manifest.encode())
            if not found.seq and not manifest.locked_by_argument:
                manifest = self.manifest = manifest.without_columns()
            if self.rows is not None and self.rows.schema != manifest.schema:
                self.rows.close()  # of a first episode that was refused
                self.rows = None
            if found.seq and manifest.schema is None:
                raise CorruptError(f"{self.paths.manifest}: names no columns, but episodes are stored; put it back")
            if manifest.schema is not None and self.rows is None:
                rows = Rows.open(
                    self.disk,
                    self.folder,
                    manifest.schema,
                    manifest.columns,
                    self.ring,
                    True,
                    found.head,
                    self.mapped,
                )
                rows.show(words=Texts(self))
                self.rows = rows
            behind = found.doubtful()
            bad: dict[int, str] = {}
            if len(behind) and self.rows is not None:
                log.info("%s: verifying %d episodes that no sync vouches for", self.folder, len(behind))
                bad = bad_episodes(behind, self.rows, self.segments, progress)
            newest = files.restore_carried(found, manifest.carried)
            files.mend(found, self.rows, bad)
            # The blob of the small state may be deleted with its segment. And after a creation whose last sync failed,
            # the name of the manifest that fixes the columns is written again, so that a sync of it counts.
            if not newest or (not found.seq and manifest.locked_by_argument):
                kept = {"seq": found.seq, "state": files.carried}
                manifest = self.manifest = replace(manifest, carried=kept)
                self.disk.replace_file(self.paths.manifest, manifest.encode())
            files.adopt(found)
            with self.memory:
                self._torn_memory = True
                self._take(found, bad)
                self.next_ordinal = max(self.next_ordinal, manifest.ordinal)
                group = self._group
                if group is not None and group.after != follows(self._newest_record()):
                    group = self._group = None  # the interrupted call committed it
                self._show_group()
                self._torn_memory = False
            if self.power and group is not None and group.file is not None:
                with (
                    files.poisoning()
                ):  # the call may have been interrupted before its sync: what is shown now is durable
                    group.file.sync()
            self._stale = False

    def _beyond_lost(self, found: RecoveredState) -> int:
        """Return an ordinal that no lost record gave, after a cut of the power or a failed sync.

        A record is only written while its slot, and its rows, are not needed by the newest one that is durable. So at
        most a table of records was lost, of which each gave one ordinal, and the open group had the next one. Where
        rows are of many episodes, at most all rows of the ring were lost, and the table has more slots.
        """
        newest = found.records[-1:]
        given = int(next_ordinals(newest)[0]) if len(newest) else 0
        known = self.manifest.ordinal
        beyond = max(given, known) + self.manifest.table_slots + 1
        return beyond if beyond < LAST_ORDINAL else known

    # -- roles -------------------------------------------------------------------------------

    def _ready(self, where: str) -> CommitFiles:
        """Raise unless this handle may write now; recover first if an interrupt left it stale."""
        if self._closed:
            raise self.closed(where)
        if self._child:
            raise ReadOnlyError(
                f"{where}: this process was forked from the writer and only reads; {self.folder} is "
                f"written by {describe(holder_of(self.paths.lock))}"
            )
        self.disk.check_held(where)
        if self.files is not None and self.files.poison is not None:
            self.files.refuse(where)
        if self._stale:
            self._recover()
        assert self.files is not None
        self.files.publish_again()
        return self.files

    def recover_if_stale(self) -> None:
        """Make memory agree with the files if an interrupt separated them. No cost otherwise.

        Raises:
            RoleError: called by a signal handler in the middle of a change of memory.
        """
        if not self._stale or self._closed or self.is_poisoned:
            return
        if self._child and not self.disk.volatile:
            return  # its files are the parent's; a copy of a disk in RAM is the child's own
        if thread.inside:
            if self._torn_memory:
                self._refuse("ReplayBuffer")
            return  # a write or a recovery of this thread is running: memory shows the state before it
        if self._mutex.locked() and not self._torn_memory:
            return  # one of another thread
        try:
            thread.inside = True
            with self._mutex:
                if self._stale:
                    self._recover()
        except OSError:
            if self._torn_memory:
                raise
            log.warning("%s: recovery failed, and is tried again", self.folder)
        finally:
            thread.inside = False
            if thread.noted:
                end_noted()

    def exclusively(
        self,
        where: str,
        work: Callable[[CommitFiles], None],
        small: Mapping[str, Any] | None = None,
    ) -> None:
        """Commit the open group, with `small`, then do `work` while other writing calls are kept out; raise unless this
        handle may write.

        Takes a function, and is not a context manager: an interrupt between a
        Python `__enter__` and its block would leave the mutex locked forever.
        """

        def whole() -> None:
            self.made_room = False
            try:
                files = self._ready(where)
                self._commit_group(files, where, small)
                work(files)
            except RingmapError:
                raise
            except OSError as error:
                raise clear_error(error, where, self.folder, self._what_became()) from error

        self.alone(where, whole)

    def _what_became(self) -> str:
        """Return the effect of an error on the stored data."""
        if not self.made_room:
            return _NOTHING_LOST
        return (
            "nothing was stored by this call and the oldest episodes are gone: they had made room for one longer than "
            "the spare rows"
        )

    def alone(self, where: str, work: Callable[[], None]) -> None:
        """Do `work` while other writing calls are kept out, whether or not this handle may write."""
        self.refuse_within(where)
        try:
            thread.inside = True
            with self._mutex:
                work()
        finally:
            thread.inside = False
            if thread.noted:
                end_noted()

    def refuse_within(self, where: str, *locks: Any) -> None:
        """Raise in the middle of another call of the same thread, or of a search of memory.

        Args:
            where: the method to name in the message.
            locks: further reentrant locks that such a call holds.
        """
        refuse_nested(where)
        for lock in (self.memory, *locks):
            refuse_if_mine(lock, where)

    def is_idle(self, wait_s: float) -> bool:
        """Whether no other thread is in the middle of a writing call, or none is within so many seconds."""
        if not self._mutex.acquire(timeout=wait_s):
            return False
        self._mutex.release()
        return True

    @property
    def carried(self) -> dict[str, Any]:
        """The small state that every commit carries, by section."""
        return self.files.carried if self.files is not None else {}

    @property
    def is_poisoned(self) -> bool:
        """Whether a sync failed, so that this handle no longer writes."""
        return self.files is not None and self.files.poison is not None

    @property
    def is_unsynced(self) -> bool:
        """Whether durability is "power", and there are commits that asked for no sync and had none since."""
        if not self.power or self.files is None:
            return False
        return self.files.state.mark < self.files.state.seq

    @property
    def writable_here(self) -> bool:
        """Whether this process may write: not a forked child, not closed."""
        return not self._child and not self._closed

    def begin_at(self, position: Position) -> None:
        """Place the first episode at this position, for the copy of another ring. Before any commit only."""
        if self.seq or len(self.live):
            raise RoleError(f"Store.begin_at: {self.folder} has commits already")
        self.head = self.tail = position

    def count_from(self, ordinal: int, time: int) -> None:
        """Give the next episode that begins this ordinal, and the next commit this time or a later one, for the copy of
        another ring."""
        self.next_ordinal, self.time = ordinal, time

    # -- commits -----------------------------------------------------------------------------

    def commit(
        self,
        schema: Schema,
        arrays: list[Array],
        data: bytes,
        flags: int,
        where: str = "ReplayBuffer.write_episode",
        finished: str | None = None,
        small: Mapping[str, Any] | None = None,
        following: Values | None = None,
        part: PartOf | None = None,
        sync: bool = True,
    ) -> None:
        """Store one episode: its rows, its data and the buffer's small state, or none of these.

        Args:
            schema: of the arrays; equal to the buffer's, or becomes it.
            arrays: one per column, `(length, *shape)`, in the schema's dtypes, C-contiguous.
            data: encoded episode data.
            flags: TERMINATED, TRUNCATED, INTERRUPTED.
            where: the method to name in an error.
            finished: the open episode that this commit ends.
            small: sections of the small state (JSON) that changed.
            following: the next observations of the newest rows, for `Successors`.
            part: which part of a chain it is; None: an episode that is whole.
            sync: whether durability "power" applies; else a later sync makes it durable.

        Raises:
            InputError: another thread locked another schema first.
            CorruptError: rows that share a file with a stored episode can't be read. Nothing was stored.
            EnvironmentFault: disk full, I/O error. Nothing was stored, and nothing evicted, unless
                the episode is longer than the spare rows: then the oldest may be gone.
            SyncFailedError: a sync failed; open the buffer again.

        Cost: O(1) in the stored episodes; one write per column, and three small ones.
        """
        self.exclusively(
            where,
            lambda files: self.commit_within(
                files,
                schema,
                arrays,
                data,
                flags,
                where,
                finished,
                small,
                following=following,
                part=part,
                sync=sync,
            ),
        )

    def commit_within(
        self,
        files: CommitFiles,
        schema: Schema,
        arrays: list[Array],
        data: bytes,
        flags: int,
        where: str,
        finished: str | None = None,
        small: Mapping[str, Any] | None = None,
        group: OpenGroup | None = None,
        following: Values | None = None,
        part: PartOf | None = None,
        sync: bool = True,
    ) -> None:
        """Do the work of `commit`, inside `exclusively`. `group`: the open group, if its rows are committed."""
        length = len(arrays[0])
        if group is None:
            arrays, (words,) = coded(schema, arrays)
        else:
            words = group.words  # its rows are codes already
        packed = words.pack()
        self._refuse_large(length, len(packed) + len(data), part, where)
        rows = self._rows_for(files, schema, where)
        start = self.head if group is None else group.start
        begun = None
        if self.manifest.kind == TRANSITIONS:
            arrays, begun = numbered(schema.names, arrays, start, self.next_ordinal, partial(self._numbers_of, rows))
        need = self.ring.overwritten(start + length)
        rows.reserve(start, length)
        if need > self.tail:
            self._retire(files, need)
        seq = self.seq + 1
        tail, first = self._after(seq, start + length, self.tail)
        self._stale = True
        files.protect(need, seq, files.state)
        summed = partial(_sums_of, arrays)
        helped = begin(summed) if length * rows.row_nbytes >= _HELPED_NBYTES else None
        rows.write(start, arrays, self._is_live)
        sums = summed() if helped is None else helped.end()
        files.carry(small)
        if finished is not None:
            files.carry_finished(finished)
        place = files.write_blob(seq, sums, data, packed)
        record = self._episode(seq, start, length, tail, first, combine(sums), place, flags, data, part, begun)
        if following is not None:
            self._write_following(files, record, following)
        durable = self.power and sync
        if durable:
            files.sync_written(rows)
        files.append(record, durable)
        self._remember(record)
        if following is not None:
            self._following.turn()
            self._following_of = record.seq
        self._committed(files, durable)

    def _refuse_large(self, length: int, nbytes: int, part: PartOf | None, where: str) -> None:
        """Raise InputError if a record can't say how large an episode is. Nothing was changed."""
        if part is None and length <= _MOST_STEPS and nbytes <= _MOST_DATA:
            return
        what = "bytes of episode data and text"
        sizes = [("steps", length, _MOST_STEPS), (what, nbytes, _MOST_DATA)]
        if part is not None:
            sizes += [("parts", part.number, MOST_U4), ("as its lane", part.lane, MOST_U4)]
            if part.chain != NONE:
                behind = self.next_ordinal - part.ordinal
                sizes += [("episodes that began since its first part", behind, MOST_U4)]
        for what, size, most in sizes:
            if size > most:
                raise InputError(
                    f"{where}: an episode with {size} {what}, expected at most {most}; end it, and begin another"
                )

    def _episode(
        self,
        seq: int,
        start: Position,
        length: int,
        tail: Position,
        first: int,
        rows_sum: int,
        place: BlobPlace,
        flags: int,
        data: bytes,
        part: PartOf | None = None,
        begun: int | None = None,
    ) -> Record:
        """Return the record of an episode, or of a part of one; of rows of many episodes, of which `begun` begin
        here."""
        segment, offset, size, blob_sum = place
        ordinal, behind, bits = self.next_ordinal, 1, 0
        chain, step, previous, number, lane = _NO_PART
        if part is not None:
            chain, step, previous, number, lane = part.place(start)
            bits = part.bits
            if part.chain != NONE:
                ordinal, behind = part.ordinal, self.next_ordinal - part.ordinal
        if begun is not None:
            behind, bits = begun, MANY
        elif data and names_origin(data):
            bits |= COPIED
        return Record(
            seq,
            start,
            tail,
            first,
            rows_sum,
            blob_sum,
            length,
            segment,
            offset,
            size,
            ordinal,
            self._now(),
            chain,
            step,
            previous,
            number,
            lane,
            EPISODE,
            flags,
            bits,
            behind,
        )

    def _numbers_of(self, rows: Rows, positions: Array) -> Array:
        """Return the numbers of the episodes that rows before a commit are of, as `numbered` asks for them."""
        numbers, *ended = (rows.take_stored(name, positions) for name in (NUMBERS, *ENDS))
        ended.append(~self.live.has(positions))
        found: Array = np.where(np.any(ended, 0), UNNUMBERED, numbers)
        return found

    def _now(self) -> int:
        """Return the time of a commit, in ns. It never falls, whatever the clock does."""
        return max(time.time_ns(), self.time)

    def _committed(self, files: CommitFiles, durable: bool) -> None:
        """End a commit: all its records count."""
        if durable:
            files.drop_retired()
        self._stale = False
        if self._background is not None:
            self._background.committed()

    def _rows_for(self, files: CommitFiles, schema: Schema, where: str) -> Rows:
        """Return the columns; make them if this is the first episode."""
        if self.rows is None:
            self._stale = True
            self._make_columns(files, schema, locked=False)
        elif self.rows.schema is not schema and self.rows.schema != schema:
            raise InputError(f"{where}: schema mismatch: expected {self.rows.schema.names}, got {schema.names}")
        assert self.rows is not None
        return self.rows

    def commit_joined(
        self,
        schema: Schema,
        arrays: list[Array],
        episodes: Sequence[NewEpisode],
        stored: list[NewEpisode],
        where: str,
        small: Mapping[str, Any] | None = None,
        sync: bool = True,
    ) -> None:
        """Store several episodes in order: one write per column and one for their blobs, then a record and a state for
        each.

        Each counts whole or not at all, as if it came alone. After an error those in `stored` count.

        Args:
            schema: of the arrays; equal to the buffer's, or becomes it.
            arrays: one per column, the rows of the episodes one behind the other; else as for `commit`.
            episodes: at least one, together at most as long as the spare rows.
            stored: takes each episode once it counts.
            where: the method to name in an error.
            small: as for `commit`.
            sync: likewise.

        Raises:
            as `commit`.
        """
        self.exclusively(
            where,
            lambda files: self._commit_joined(
                files, self._rows_for(files, schema, where), arrays, episodes, stored, small, sync
            ),
        )

    def _commit_joined(
        self,
        files: CommitFiles,
        rows: Rows,
        arrays: list[Array],
        episodes: Sequence[NewEpisode],
        stored: list[NewEpisode],
        small: Mapping[str, Any] | None,
        sync: bool,
    ) -> None:
        start, total = self.head, len(arrays[0])
        need = self.ring.overwritten(start + total)
        assert need <= self.tail, "longer than the spare rows"
        rows.reserve(start, total)
        arrays, words = coded(rows.schema, arrays, [one.length for one in episodes])
        self._stale = True
        files.protect(need, self.seq + 1, files.state)
        rows.write(start, arrays, self._is_live)
        files.carry(small)
        last = len(episodes) - 1
        at, parts = 0, list[tuple[list[int], bytes, bytes]]()
        for one, own in zip(episodes, words, strict=True):
            stop = at + one.length
            sums = _sums_of([v[at:stop] for v in arrays] if last else arrays)
            parts.append((sums, one.data, own.pack()))
            at = stop
        places = files.write_blobs(self.seq + 1 + last, parts)
        durable = self.power and sync
        if durable:
            files.sync_written(rows)
        for number, (one, place, (sums, *_)) in enumerate(zip(episodes, places, parts, strict=True)):
            if files.unpublished:  # state.bin may lag by one record, not by two
                files.publish_again()
            seq, length = self.seq + 1, one.length
            tail, first = self._after(seq, self.head + length, self.tail)
            files.protect(0, seq, files.state)
            record = self._episode(seq, self.head, length, tail, first, combine(sums), place, one.flags, one.data)
            files.append(record, durable and number == last)
            self._remember(record)
            stored.append(one)
        self._committed(files, durable)

    def _write_following(self, files: CommitFiles, record: Record, following: Values) -> None:
        """Write the next observations of a record's newest rows, over those that the newest record does not need."""
        if self._following_of != self.seq:  # this handle has not written yet, or was interrupted
            newest = self.newest_rows()
            if newest is not None:
                self._following.find(newest.head, newest.rows_sum)
        self._following.write(record.head, record.rows_sum, following)
        if self.power:
            try:
                self._following.sync()
            except OSError as error:
                files.poisoned(error)

    def end_chain(
        self,
        files: CommitFiles,
        part: PartOf,
        flags: int,
        data: bytes = b"",
        small: Mapping[str, Any] | None = None,
    ) -> None:
        """End a chain whose parts are all stored, by a record without rows. Inside `exclusively`.

        Args:
            files: of the commit.
            part: the one that would come next.
            flags: as for `commit`.
            data: of the episode.
            small: as for `commit`.
        """
        files.carry(small)
        self._stale = True
        self._commit_mark(files, RETIRE, self.tail, flags, replace(part, is_last=True), data)
        self._stale = False

    def drop_chains(self, chains: Collection[int], where: str) -> None:
        """Flag the parts of some chains as dropped, durably: they are not returned any more. O(live records).

        Args:
            chains: names of chains: positions of their first steps.
            where: the method to name in an error.

        Raises:
            EnvironmentFault: the disk fails; call this again.
        """

        def work(files: CommitFiles) -> None:
            if not self.seq:
                return
            records, valid = self.table.read_range(max(1, self.first), self.seq)
            of_them = (records["part"] & PART != 0) & np.isin(records["chain"], list(chains))
            self._stale = True
            for row in records[valid & of_them & are_live(records, self.tail)]:
                record = Record.of(row)
                self.table.write(replace(record, flags=record.flags | DROPPED))
            self._recover()  # syncs the table, and has readers look again

        self.exclusively(where, work)

    def follow_with(self, following: Values) -> None:
        """Write the next observations of the newest rows, for a ring in RAM that was copied."""
        newest = self.newest_rows()
        if newest is not None:
            self._following.write(newest.head, newest.rows_sum, following)
            self._following.turn()

    def newest_rows(self) -> Record | None:
        """Return the record of the newest committed rows, None if there are none. O(log episodes)."""
        with self.memory:
            live = self.live
            last = int(live.starts.searchsorted(self.committed_head)) - 1
            return self.record_of(Ordinal(live.first + last)) if last >= 0 else None

    def update(self, positions: Array, values: Mapping[str, Array], where: str) -> int:
        """Store newer values of rows, in mutable columns; return how many: rows that were evicted are left out.

        Args:
            positions: int64 `(n,)`.
            values: column -> `(n, *shape)`, of its dtype: mutable columns.
            where: the method to name in an error.

        Raises:
            InputError: a position that no row has had yet.
            EnvironmentFault: the disk is full or fails. Nothing was changed, if the disk can still be written at all.
            SyncFailedError: a sync failed; open the buffer again.

        Cost: see `MutableValues.update`; at durability "power" one sync.
        """
        counts: list[int] = []
        self.exclusively(where, lambda files: counts.append(self._update(files, positions, values, where)))
        return counts[0]

    def _update(self, files: CommitFiles, positions: Array, values: Mapping[str, Array], where: str) -> int:
        rows, newest = self.rows, self.values
        if not len(positions):
            return 0
        kept = self.stored(positions)
        if kept is not None:
            wrong = (positions < 0) | (positions >= self.head)
            if wrong.any():
                raise InputError(
                    f"{where}: id {int(positions[wrong][0])} is of another buffer: the steps stored here have ids from "
                    f"{self.tail} up to, and without, {self.head}; give the ids of a batch of this buffer"
                )
            positions, values = positions[kept], {n: v[kept] for n, v in values.items()}
            if not len(positions):
                return 0
        assert rows is not None
        assert newest is not None
        newest.update(positions, values, rows.take_stored)
        if self.power:
            try:
                newest.sync(mark=False)
            except OSError as error:
                files.poisoned(error)
        elif self._background is not None:
            self._background.committed()
        return len(positions)

    def clear(self, small: Mapping[str, Any] | None = None) -> None:
        """Retire every episode, in one commit."""

        def work(files: CommitFiles) -> None:
            files.carry(small)
            if len(self.live):
                self._stale = True
                self._commit_mark(files, CLEAR, self.head)
                self._stale = False

        self.exclusively("ReplayBuffer.clear", work)

    # -- rows stored alone -------------------------------------------------------------------

    @property
    def pending(self) -> OpenGroup | None:
        """The rows of the open group."""
        return self._group

    @property
    def committed_head(self) -> Position:
        """One past the newest committed row."""
        group = self._group
        return self.head if group is None else group.start

    def append(
        self,
        arrays: Sequence[Any],
        count: int,
        limit: int,
        where: str,
        unlinked: Unlinked | None = None,
        earlier: Callable[[], Values] = dict,
        small: Callable[[], AbstractContextManager[Mapping[str, Any] | None]] = nullcontext,
        is_single: bool = False,
    ) -> Position:
        """Store the rows of one call, which are committed later, together with those of other calls.

        The caller has called `refuse_within`. The rows are safe when this returns, and this handle shows them at once;
        others with the commit. That comes once there are `limit` such rows, before anything else is stored, with
        `flush` and `close`, and after `group_s` seconds.

        Args:
            arrays: one per column, `(count, *shape)`, in the schema's dtypes; then one per column of `unlinked`.
            count: 1 to `limit`.
            limit: at most the spare rows.
            where: the method to name in an error.
            unlinked: further columns; see `split_unlinked`.
            earlier: returns unlinked values of rows of earlier calls; called if this call begins a group.
            small: provides the small state for a commit of the rows of earlier calls.
            is_single: whether the arrays are values of one row, without the first axis.

        Returns:
            The position of the first row.

        Raises:
            InputError: the call has more text than a commit holds. Nothing was stored by it.
            EnvironmentFault: disk full, I/O error. Nothing was stored by this call.
            SyncFailedError: a sync failed; open the buffer again.

        Cost: one write, at durability "power" with one sync; one commit for `limit` rows.
        """
        try:
            thread.inside = True
            with self._mutex:
                group = self._group
                if group is None or not group.has_room(count) or not self._is_ready(group):
                    group = self._next_group(count, limit, where, unlinked, earlier, small)
                group.refuse_large(arrays, where)
                position = Position(group.start + group.count)
                self._stale = True
                try:
                    self._append_to(group, arrays, count, is_single)
                except OSError:
                    with clear_errors(where, self.folder, self._what_became):
                        raise
                self._stale = False
                return position
        finally:
            thread.inside = False
            if thread.noted:
                end_noted()

    def _append_to(self, group: OpenGroup, arrays: Sequence[Any], count: int, is_single: bool) -> None:
        try:
            group.append(arrays, count, is_single, self.power)
        except OSError:
            self._stale = False  # nothing changed
            raise
        if self.power:
            assert self.files is not None
            try:
                if group.file is not None:
                    group.file.sync()
            except OSError as error:
                self.files.poisoned(error)
        self._show_group()

    def _is_ready(self, group: OpenGroup) -> bool:
        """Tell whether this handle may write, and the group goes on, without a system call: `_ready` said so less than
        100 ms ago."""
        files = self.files
        if files is None or self._closed or self._child or self._stale:
            return False
        is_recent = time.monotonic() < self._ready_until
        return is_recent and files.poison is None and not files.unpublished

    def _next_group(
        self,
        count: int,
        limit: int,
        where: str,
        unlinked: Unlinked | None,
        earlier: Callable[[], Values],
        small: Callable[[], AbstractContextManager[Mapping[str, Any] | None]],
    ) -> OpenGroup:
        """Return the open group if it goes on; else commit it, and begin another."""
        self.made_room = False
        with clear_errors(where, self.folder, self._what_became):
            files = self._ready(where)
            self._ready_until = time.monotonic() + _READY_S
            group = self._group
            if group is None or not group.has_room(count) or self._is_due(group):
                if group is not None:
                    with small() as state:
                        self._commit_group(files, where, state)
                group = self._begin_group(files, count, limit, unlinked, earlier)
            return group

    def _is_due(self, group: OpenGroup) -> bool:
        """Tell whether a call commits the group before it adds to another; the thread does that for an idle writer."""
        age, most = time.monotonic() - group.begun_at, self.settings.group_s
        return bool(group.count) and not self.disk.volatile and 0 < most < 2 * age

    def _begin_group(
        self,
        files: CommitFiles,
        count: int,
        limit: int,
        unlinked: Unlinked | None,
        earlier: Callable[[], Values],
    ) -> OpenGroup:
        rows, start = self.rows, self.head
        assert rows is not None
        rows.reserve(start, limit)
        after = follows(self._newest_record())
        in_place = None
        if self.disk.volatile:
            first = self.ring.pieces(start, limit)[0][1]
            if first >= count and not rows.schema.texts:  # it ends where the ring wraps
                limit, in_place = first, rows.writable(start, first)
        group = OpenGroup(rows.schema, unlinked, start, limit, self.ring.rows, after, earlier(), in_place)
        if not self.disk.volatile:
            spent, self._spent = self._spent, None
            try:
                group.begin(self.disk, self.paths.open, spent)
                if self.power and group.file is not None:
                    with files.poisoning():
                        group.file.sync()
            except BaseException:
                self._remove(group.file)
                raise
        if not group.is_in_place:
            rows.show(pending=_pending_of(self))
        self._group = group
        if self._grouping is not None:
            self._grouping.committed()
        return group

    def _show_group(self) -> None:
        """Let memory show the rows of the open group."""
        group = self._group
        if group is None or not group.count:
            return
        with self.memory:
            self._torn_memory = True
            if self.head > group.start:  # it is shown already
                self.live.grow(group.count)
            else:
                self.live.append(group.start, group.count, origin=self.next_ordinal)
            self.head = Position(group.start + group.count)
            self._torn_memory = False

    def _commit_group(self, files: CommitFiles, where: str, small: Mapping[str, Any] | None = None) -> None:
        """Commit the rows of the open group, if there is one."""
        group = self._group
        if group is None:
            return
        if group.count:
            kept, following = group.kept()
            data = encode_data(kept, where)
            self.commit_within(
                files,
                group.schema,
                group.columns(),
                data,
                0,
                where,
                small=small,
                group=group,
                following=following,
            )
        self._group, self._spent = None, group.file

    def _remove(self, file: StepFile | None) -> None:
        if file is not None:
            with contextlib.suppress(OSError, ReplacedError):  # the next opening does it
                file.remove()

    def settle(self, where: str, small: Mapping[str, Any] | None = None) -> None:
        """Commit the rows of the open group, so that other handles find them."""
        if self._group is not None and self.writable_here:
            self.exclusively(where, lambda files: None, small)

    def commit_behind(self) -> None:
        """Commit the rows of a group that no call has committed in time, in a background thread."""
        try:
            thread.inside = True
            with self._mutex:
                files, group = self.files, self._group
                if group is not None and files is not None and self._may_sync(files) and self._is_due(group):
                    self._commit_group(files, "ReplayBuffer")
        except (OSError, RingmapError) as error:  # the next writing call tries again
            log.warning("%s: rows can't be committed yet: %s", self.folder, error)
        finally:
            thread.inside = False
            if thread.noted:
                end_noted()

    def _retire(self, files: CommitFiles, need: int) -> None:
        """Retire the oldest episodes up to position `need`, durably: rows below it will be overwritten."""
        tail = self.live.tail_for(need, 0)
        self._stale = True
        self._commit_mark(files, RETIRE, self.head if tail < 0 else tail)
        self.made_room = True
        if not self.power:
            files.sync_table(files.state)
        files.publish_again()
        self._stale = False

    def _commit_mark(
        self,
        files: CommitFiles,
        kind: int,
        tail: Position,
        flags: int = 0,
        part: PartOf | None = None,
        data: bytes = b"",
    ) -> None:
        """Commit a record without rows."""
        seq = self.seq + 1
        tail, first = self._after(seq, self.head, tail)
        files.protect(0, seq, files.state)
        segment, offset, size, blob_sum = files.write_blob(seq, [], data)
        bits = (0 if part is None else part.bits) | (COPIED if data and names_origin(data) else 0)
        place = _NO_PART if part is None else part.place(self.head)
        record = Record(
            seq,
            self.head,
            tail,
            first,
            combine([]),
            blob_sum,
            0,
            segment,
            offset,
            size,
            self.next_ordinal,
            self._now(),
            *place,
            kind,
            flags,
            bits,
        )
        if self.power:
            files.sync_written(self.rows)  # of commits before it that were not synced
        files.append(record, self.power)
        self._remember(record)
        if self.power:
            files.drop_retired()

    def _remember(self, record: Record) -> None:
        """Move memory to the state after `record`."""
        live = self.live
        with self.memory:
            self._torn_memory = True
            live.evict_before(record.tail)
            if record.start < self.head:  # the rows of the open group, which are shown already
                self._group = None
            elif record.length:
                live.append(record.start, record.length, record.origin, record.link)
            if record.part & END:
                live.end(record.chain, record.seq)
            self.seq, self.first = record.seq, record.first
            self.tail, self.head = record.tail, record.head
            self.next_ordinal, self.time = record.next_ordinal, record.time
            self._torn_memory = False

    def _after(self, seq: int, head: int, tail: Position) -> tuple[Position, int]:
        """Return tail and oldest live record once record `seq` ends at `head`: episodes that fit stay."""
        live, table = self.live, self.table
        if head - tail > self.ring.max_steps:
            kept = live.tail_for(head, self.ring.max_steps)
            tail = max(tail, self.head if kept < 0 else kept)
        first = self.first
        if tail != self.tail or not len(live) or live.start(live.first) >= self.committed_head:
            first = table.first_live(first, seq, tail)
        # After many retirements without an episode, the table's slots run out before the steps do.
        # A record is never written over one that state.bin names: readers look there until the new state is shown.
        while seq + 1 - first >= table.slots:
            first = table.first_live(first + 1, seq, tail)
            tail = table.start_of(first) if first < seq else self.head
        return tail, first

    def _is_live(self, slot: int, count: int) -> bool:
        """Tell whether a live episode has any of `count` rows from `slot` on (no wrap). O(log episodes)."""
        starts, lengths = self.live.starts, self.live.lengths
        at = self.tail + (slot - self.tail) % self.ring.rows
        for first in (at, at - self.ring.rows):
            last = int(np.searchsorted(starts, first + count)) - 1
            if count and last >= 0 and starts[last] + lengths[last] > first:
                return True
        return False

    def _make_columns(self, files: CommitFiles, schema: Schema, locked: bool) -> None:
        chosen = choose(self.settings.storage, schema, "ReplayBuffer")
        backends, options = [c.backend for c in chosen], [c.options for c in chosen]
        manifest = self.manifest.with_columns(schema, backends, options, locked)
        warn_of_space(self.disk, self.folder, manifest)
        manifest = make_columns(self.disk, self.paths, manifest, files.sync_folder)
        rows = Rows.open(
            self.disk,
            self.folder,
            schema,
            manifest.columns,
            self.ring,
            True,
            self.head,
            self.mapped,
        )
        self.manifest = manifest
        self._adopt(rows)

    # -- syncs -------------------------------------------------------------------------------

    def flush(self, where: str = "ReplayBuffer.flush", small: Mapping[str, Any] | None = None) -> None:
        """Force all committed data, and the small state, to the disk.

        Raises:
            SyncFailedError: a sync failed; open the buffer again.
            EnvironmentFault: the manifest can't be written.
        """
        self.exclusively(where, lambda files: self._flush(files, small))

    def _flush(self, files: CommitFiles, small: Mapping[str, Any] | None, closes: bool = False) -> None:
        with self._syncing:
            files.carry(small)
            if self.disk.volatile:
                return
            segments, gone = files.segments.unsynced(), files.finished_streams_gone()
            try:
                if self.values is not None:
                    self.values.sync()
                self._following.sync_both()
                files.sync_all(self.rows, segments)
            except OSError as error:
                files.poisoned(error)
            files.mark_synced(files.state, segments, gone)
            files.sync_state()
            table = {
                "count": len(self.live),
                "first": self.first,
                "tail": self.tail,
                "head": self.head,
                "seq": self.seq,
            }
            self.manifest = replace(
                self.manifest,
                table=table,
                carried={"seq": self.seq, "state": files.carried},
                closed=files.state.era if closes else None,
                settings=dict(self.settings.remembered or self.manifest.settings),
            )
            self.disk.replace_file(self.paths.manifest, self.manifest.encode())

    def sync_too(self, where: str, sync: Callable[[], None]) -> None:
        """Sync a file that is written beside the store's own, before a commit that needs it.

        Raises:
            SyncFailedError: as for `flush`: it is unknown what reached the disk, and no later sync would tell.
        """

        def work(files: CommitFiles) -> None:
            try:
                sync()
            except OSError as error:
                files.poisoned(error)

        self.exclusively(where, work)

    def sync_in_background(self) -> None:
        """Do the work of `flush` except for the manifest, without blocking the writer."""
        self.refuse_within("Store.sync_in_background")
        self.sync_behind()

    def sync_behind(self) -> None:
        """Sync, in the background thread; or after a commit, and then the writer waits for it."""
        try:
            thread.inside = True
            self._sync_behind()
        finally:
            thread.inside = False
            if thread.noted:
                end_noted()

    def _sync_behind(self) -> None:
        files = self.files
        with self._mutex:
            values = self.values if self.values is not None and self.values.is_dirty else None
            if files is None or not self._may_sync(files):
                return
            if files.state.seq <= files.state.mark and values is None:
                return
            upto, rows = files.state, self.rows
            segments, gone = files.segments.unsynced(), files.finished_streams_gone()
            self._syncing.acquire()  # a recovery waits for us
            try:
                if values is not None:
                    values.promise()
            except BaseException:  # nothing was synced yet: a read failed, say
                self._syncing.release()
                raise
        failed: OSError | None = None
        try:
            if values is not None:
                values.sync()
            files.sync_all(rows, segments)
        except OSError as error:
            failed = error
        except ReplacedError:  # the next writing call raises it
            return
        finally:
            self._syncing.release()
        with self._mutex:
            if failed is not None:
                with contextlib.suppress(SyncFailedError):  # the next writing call raises it
                    files.poisoned(failed)
            elif self._may_sync(files):
                files.mark_synced(upto, segments, gone)
                # If this fails the mark is older after a power cut, and more is verified: no harm.
                with contextlib.suppress(OSError):
                    files.state_file.sync()

    def _may_sync(self, files: CommitFiles) -> bool:
        """Tell whether files and memory agree, so that a mark may be set."""
        wrong = self._closed or self._child or self._stale or files.unpublished
        return not wrong and files.poison is None

    # -- the end -----------------------------------------------------------------------------

    def close(self, small: Mapping[str, Any] | None = None) -> None:
        """Flush, and release files and lock, whatever happens.

        Raises:
            RoleError: in the middle of another call of the same thread. Nothing was changed.
            ReplacedError: the directory is no longer at its path; the commits of this handle are in it, wherever it is
                now.
            SyncFailedError, EnvironmentFault: as for `flush`.
        """
        where = "ReplayBuffer.close"

        def flush() -> None:
            if not self._child and not self.is_poisoned:
                with clear_errors(where, self.folder, self._what_became):
                    files = self._ready(where)
                    self._commit_group(files, where, small)
                    self._flush(files, small, closes=True)
                    if self.values is not None:
                        self.values.seal()
                    self._remove(self._spent)

        self._end(where, flush)

    def abandon(self) -> None:
        """Release files and lock without a flush.

        Raises:
            RoleError: in the middle of another call of the same thread. Nothing was changed.
        """
        self._end("ReplayBuffer.close", lambda: None)

    def _end(self, where: str, first: Callable[[], None]) -> None:
        threads = [one for one in (self._background, self._grouping) if one is not None]

        def end() -> None:
            try:
                if not self._closed:
                    first()
            finally:
                with self._syncing:  # waits for a running sync
                    self._closed = True
                    for one in threads:
                        one.stop()
                    try:
                        self.close_files()
                    finally:  # an interrupt in between must not keep the next writer out
                        if self._lock is not None and not self._child:
                            self._lock.release()

        self.alone(where, end)
        for one in threads:
            one.join()  # with no lock held: it may be waiting for one

    def shown_tail(self) -> Position:
        """Return the position below which rows may have been overwritten by now.

        Raises:
            ClosedError: the store is closed: another writer may overwrite them, unknown to this handle.
        """
        if self._closed:
            raise ClosedError(f"{self.folder}: the buffer was closed meanwhile; open it again")
        return self.tail

    def close_files(self) -> None:
        """Release all descriptors. Running reads keep them, or raise ClosedError: `rows` stays."""
        if self.rows is not None:
            self.rows.close()
        if self.files is not None:
            self.files.close()
            self.files = None
        if self._group is not None and self._group.file is not None:
            self._group.file.close()
        if self._spent is not None:
            self._spent.close()
        self._following.close()
        if self.values is not None:
            self.values.close()
        self.is_open = False
        if not self._child:  # a child continues to read where its parent does
            self.disk.let_go()

    def become_child(self) -> None:
        """Make the store unusable after a fork: the parent holds the lock and the locks' state is unknown."""
        self._child = True
        self._mutex, self._syncing = threading.Lock(), threading.Lock()
        self.memory = threading.RLock()
        self._background = self._grouping = None
        if self._lock is not None:
            self._lock.drop_in_child()
        if not self.disk.volatile:
            self._group = None
            self.close_files()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter the kernel releases everything, and a running sync would never end.
        if not is_finalizing() and not getattr(self, "_closed", True) and not self._child:
            with contextlib.suppress(Exception):  # the buffer of a function that returned
                lifted(self._end_unused)

    def _end_unused(self) -> None:
        """Do what a close would, as far as it is certain. No call of this store is under way: nobody has it."""
        try:
            if not self.disk.volatile and not self.is_poisoned:
                self.settle("ReplayBuffer")
        finally:
            self.abandon()


def _pending_of(store: Store) -> Callable[[], OpenGroup | None]:
    """Return a function that returns the open group of a store, without keeping the store alive."""
    found = weakref.ref(store)

    def pending() -> OpenGroup | None:
        store = found()
        group = None if store is None else store.pending
        return None if group is None or group.is_in_place else group

    return pending


def _sums_of(arrays: list[Array]) -> list[int]:
    """Return the checksum of each column's rows."""
    return [sum_of(values) for values in arrays]


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store.become_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
