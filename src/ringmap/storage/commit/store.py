"""The store: the one writer of a buffer. It says who may write, and when; it recovers, syncs and ends.

    a call -> one gate (`exclusively`): alone, ready, the open group committed -> commit_now, clear, update, ...
    append -> the same lock, without the rest while its group goes on

Invariants: a call that finds `_stale` set recovers from the files first; only the process that opened the directory
writes.
Locks, in this order: `_mutex` (one writing call at a time), `_syncing` (files are synced: a recovery, a flush and the
end wait for a sync that runs beside the writer), `lock` (live episodes change, or are searched). Whoever takes
`_mutex` sets the mark of its thread (disk/calls.py): a call inside a call is refused.
Not here: what a commit stores (buffers/), in which order (commit.py), how a group is kept (group.py), how a directory
is created (create.py), the thread of the background (background.py).
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
from typing import Any, TypeVar

import numpy as np

from ringmap.errors import (
    ClosedError,
    CorruptError,
    InputError,
    ReadOnlyError,
    ReplacedError,
    RingmapError,
    SyncFailedError,
)
from ringmap.storage.columns.backends import Storage
from ringmap.storage.columns.rows import Rows
from ringmap.storage.columns.schema import Schema
from ringmap.storage.commit.background import Background
from ringmap.storage.commit.commit import Commit, Committer, NewRecord, remove_file
from ringmap.storage.commit.create import make_folder, make_home
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.commit.group import OpenGroup, Values, follows, rows_left
from ringmap.storage.disk.calls import end_noted, lifted, marked, refuse_nested, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import Paths
from ringmap.storage.disk.system import clear_error, clear_errors, clear_reads
from ringmap.storage.read.handle import Texts
from ringmap.storage.read.recovery import Progress, RecoveredState, bad_episodes
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.manifest import Kind, Manifest, examine, hold, lineage_of, read_manifest
from ringmap.storage.records.step_file import Unlinked, read_steps
from ringmap.storage.records.table import CLEAR, DROPPED, LAST_ORDINAL, PART, Record, are_live
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import SIDECARS

__all__ = ["JOINED_NBYTES", "Settings", "Store"]

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")

JOINED_NBYTES = 1 << 16
"""Up to this size the rows of several episodes are better copied together than written apart. A larger copy is made in
new pages."""

_READY_S = 0.1
"""For so long a call that joins a group takes it that the directory is still at its path: to ask takes as long as all
else of the call."""

_NOTHING_LOST = "nothing was stored by this call and nothing committed is lost"
_OLDEST_LOST = (
    "nothing was stored by this call and the oldest episodes are gone: they had made room for one longer than the "
    "spare rows"
)
T = TypeVar("T")


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


class Store(Committer):
    """A buffer open for writing. Made by `Store.create` or `Store.open`.

    Flags, each for what no other tells: `_stale` (files may be ahead of memory; by every change) and `_torn_memory`
    (nor may memory be read meanwhile; both of `Committer`), `_closed`, `_child` (its files are the parent's; it may be
    closed, too). Of the files: `poison` (the sync that failed: nothing is written any more) and `unpublished`
    (state.bin is behind the table).

    Processes and threads: one store per directory, by lock. Methods may be called from any
    thread of the process that opened it; a forked child gets an error.
    """

    writable = True

    def __init__(self, disk: Disk, folder: str, manifest: Manifest, settings: Settings, lock: WriterLock | None):
        super().__init__(disk, folder, manifest, settings.mapped, settings.power, settings.storage)
        self.settings = settings
        self.files: CommitFiles | None = None
        self._lock = lock
        self._mutex = threading.Lock()
        self._syncing = threading.Lock()
        self._closed = False
        self._child = False
        self._ready_until = 0.0
        self._background = Background(self)
        if settings.sync_every_s > 0 and not self.power and not disk.volatile:
            self._sync_soon = partial(self._background.within, settings.sync_every_s, Store.sync_behind)
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
        """Make a buffer at `folder`, or continue an unfinished creation. `kind`: of its rows, None for episodes;
        `lineage`: None for a new one. Raises what `manifest.examine` and `open` do."""
        examine(disk, folder)
        make_folder(disk, folder)
        first = Manifest(
            uuid.uuid4().bytes,
            max_steps,
            spare,
            settings=dict(settings.remembered or {}),
            table={"count": 0, "first": 1, "tail": 0, "head": 0, "seq": 0},
            born=kind or Kind(),
            lineage=lineage or lineage_of(None, ""),
            closed=0,
        )
        return cls._locked("ReplayBuffer", disk, folder, settings, schema, first)

    @classmethod
    def open(cls, disk: Disk, folder: str, settings: Settings, schema: Schema | None = None) -> Store:
        """Open the buffer at `folder` for writing, in its last committed state. `schema` fixes the columns if no
        episode has.

        The caller has read its manifest: the lock leaves a file, and in a directory that is not ours it may not.

        Raises:
            CorruptError: it is damaged.
            LockedError: another handle has it open for writing.
            EnvironmentFault: the disk is full, read-only or fails.
        """
        return cls._locked("ReplayBuffer.open", disk, folder, settings, schema)

    @classmethod
    def _locked(
        cls,
        where: str,
        disk: Disk,
        folder: str,
        settings: Settings,
        schema: Schema | None,
        first: Manifest | None = None,
    ) -> Store:
        """Take the lock and open the buffer, with this manifest if it is new; on failure release everything."""
        refuse_nested("ReplayBuffer")
        disk = hold(disk, folder)
        with clear_errors(where, folder, lambda: _NOTHING_LOST), contextlib.ExitStack() as held:
            held.callback(disk.let_go)
            lock = None if disk.volatile else WriterLock(disk, Paths(folder).lock, folder)
            if lock is not None:
                held.callback(lock.release)  # also after an interrupt in the middle of the next line
                lock.acquire()
            disk.check_held("ReplayBuffer")  # the lock is taken by path
            if first is not None and examine(disk, folder) != "buffer":  # else another handle was first
                make_home(disk, Paths(folder), first)
            store = cls(disk, folder, read_manifest(disk, folder), settings, lock)
            held.callback(store.close_files)
            store._begin(schema)
            held.pop_all()
        return store

    def _begin(self, schema: Schema | None) -> None:
        """Recover what the last writer left; fix the columns if a schema is given and none are."""
        manifest = self.manifest
        self.files = CommitFiles(self.disk, self.paths, manifest, self.power, self.mapped)
        self.table, self.segments, self.is_open = self.files.table, self.files.segments, True
        self._recover(manifest, self.settings.progress)
        self._finish_groups()
        for sidecar in () if self.disk.volatile else SIDECARS:  # no new row gets a value of a row that was lost
            for fault in sidecar.recover(self.home, self.head):
                log.warning("%s: %s; run ringmap.check on the buffer", self.home.path(sidecar.names[0]), fault)
        self._begin_values()
        if schema is not None and self.schema is None:
            assert self.files is not None
            self.begin_columns(self.files, schema, locked=True)

    def _finish_groups(self) -> None:
        """Commit the rows of a group that a killed process left open, and remove its file."""
        disk = self.disk
        with clear_reads("ReplayBuffer", self.folder):
            for name in disk.names(self.paths.open):
                folder = os.path.join(self.paths.open, name)
                steps = read_steps(disk, folder, self.ring.spare)
                heading, count, after = steps.heading, steps.count, steps.after
                if steps.fault and (after is not None or heading is None):
                    log.warning("%s: %s; the %d rows before it count", folder, steps.fault, count)
                if heading is None or after is None:
                    continue
                fits = heading.schema == self.schema and self.rows is not None
                if fits and count and after == follows(self.newest_record()):
                    arrays, kept, newest = rows_left(steps)
                    one = NewRecord(count, encode_data(kept, folder))
                    self.commit(Commit([one], folder, heading.schema, arrays, next_observations=newest))
                    self.flush(folder)  # what an opening shows is durable
                    log.info("%s: stored %d rows of a group that was open", self.folder, count)
                elif count and after[0] >= self.seq:  # else they were committed
                    log.warning("%s: dropped %d rows of an open group: the rows before them are lost", folder, count)
                disk.discard(folder)
                # Else a power cut could bring it back, when the record that it follows is the newest one again.
                disk.sync_folder(self.paths.open)

    def _adopt(self, rows: Rows) -> None:
        super()._adopt(rows)
        self._begin_values()

    def _begin_values(self) -> None:
        """Make the newer values of mutable columns ready for updates."""
        if self.values is not None:
            self.values.begin(self.head)

    def _recover(self, manifest: Manifest | None = None, progress: Progress | None = None) -> None:
        """Make memory and files agree with the committed state; waits for a running sync. The caller holds the mutex,
        or is the opening, which has read the manifest."""
        files = self.files
        assert files is not None
        with self._syncing:
            self._stale = True
            manifest = self.manifest = manifest or read_manifest(self.disk, self.folder)
            if self.rows is not None:
                self.rows.forget()
            recovered = files.find(manifest)
            nobody_wrote = recovered.generation > 0 and recovered.era == manifest.closed
            if not recovered.clean and not nobody_wrote:
                # Before the state is shown as of this boot: then an opening trusts it. A lost state begins eras anew.
                manifest = self._put_manifest(ordinal=self._beyond_lost(recovered), closed=None)
            if not recovered.seq and not manifest.locked_by_argument:
                manifest = self.manifest = manifest.without_columns()
            if self.rows is not None and self.rows.schema != manifest.schema:
                self.rows.close()  # of a first episode that was refused
                self.rows = None
            if recovered.seq and manifest.schema is None:
                raise CorruptError(f"{self.paths.manifest}: names no columns, but episodes are stored; put it back")
            if manifest.schema is not None and self.rows is None:
                rows = self.open_rows(manifest, recovered.head)
                rows.show(words=Texts(self))
                self._open_values(rows)
                self.rows = rows
            behind = recovered.doubtful()
            bad: dict[int, str] = {}
            if len(behind) and self.rows is not None:
                log.info("%s: verifying %d episodes that no sync covers", self.folder, len(behind))
                bad = bad_episodes(behind, self.rows, self.segments, progress)
            if self.values is not None and not recovered.clean:
                self.values.distrust()  # before the state is shown as of this boot
            newest = files.restore_carried(recovered, manifest.carried)
            files.restore(recovered, self.rows, bad)
            # The blob of the small state may be deleted with its segment. And after a creation whose last sync failed,
            # the name of the manifest that fixes the columns is written again, so that a sync of it counts.
            if not newest or (not recovered.seq and manifest.locked_by_argument):
                manifest = self._put_manifest(carried={"seq": recovered.seq, "state": files.carried})
            files.adopt(recovered)
            with self.lock:
                self._torn_memory = True
                recovered.drop(bad)
                self._apply(recovered, recovered.live, anew=True)
                self.next_ordinal = max(self.next_ordinal, manifest.ordinal)
                group = self._group
                if group is not None and group.after != follows(self.newest_record()):
                    group = self._group = None  # the interrupted call committed it
                if group is not None and group.count:
                    self.show_pending(group)
                self._torn_memory = False
            if group is not None:  # the call may have been interrupted before it: what is shown now is durable
                self._sync_group(files, group)
            self.find_successors()
            self._stale = False

    def _put_manifest(self, **changes: Any) -> Manifest:
        """Replace the manifest, with these fields changed."""
        manifest = self.manifest = replace(self.manifest, **changes)
        self.disk.replace_file(self.paths.manifest, manifest.encode())
        return manifest

    def _beyond_lost(self, recovered: RecoveredState) -> int:
        """Return an ordinal that no lost record gave: at most a table of records, or all rows of the ring, and the open
        group had one each."""
        newest, known = recovered.live.newest, self.manifest.ordinal
        given = 0 if newest is None else newest.next_ordinal
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
        """Make memory agree with the files if an interrupt separated them."""
        if not self._stale or self._closed or self.is_poisoned:
            return
        if self._child and not self.disk.volatile:
            return  # its files are the parent's; a copy of a disk in RAM is the child's own
        if not self._torn_memory and (thread.inside or self._mutex.locked()):
            return  # a write or a recovery is running: memory shows the state before it

        def recover() -> None:
            if self._stale and not self._closed and not self.is_poisoned:  # by now: another thread had its turn
                self._recover()

        try:
            self.alone("ReplayBuffer", recover)
        except OSError:
            if self._torn_memory:
                raise
            log.warning("%s: recovery failed, and is tried again", self.folder)

    def exclusively(self, where: str, work: Callable[[CommitFiles], T], small: Mapping[str, Any] | None = None) -> T:
        """Commit the open group, with `small`, then do `work` while other writing calls are kept out; raise unless this
        handle may write."""
        done: T = self.alone(where, self._ready_for, where, work, small)
        return done

    def _ready_for(self, where: str, work: Callable[[CommitFiles], T], small: Mapping[str, Any] | None) -> T:
        tail = None
        try:
            files = self._ready(where)
            if self._group is not None:
                self.commit_group(files, where, small)
                files.publish_again()  # state.bin may lag by one record, not by two
            tail = self.tail
            return work(files)
        except RingmapError:
            raise
        except OSError as error:
            has_retired = tail is not None and tail != self.tail
            raise clear_error(error, where, self.folder, _OLDEST_LOST if has_retired else _NOTHING_LOST) from error

    def alone(self, where: str, work: Callable[..., T], *args: Any) -> T:
        """Do `work` while other writing calls are kept out, whether or not this handle may write.

        A function, as an interrupt between a Python `__enter__` and its block would leave the mutex locked for ever.
        """
        refuse_nested(where)
        try:
            thread.inside = True
            with self._mutex:
                return work(*args)
        finally:
            thread.inside = False
            if thread.noted:
                end_noted()

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
        return self.files.state.synced < self.files.state.seq

    @property
    def writable_here(self) -> bool:
        """Whether this process may write: not a forked child, not closed."""
        return not self._child and not self._closed

    # -- commits -----------------------------------------------------------------------------

    def commit(self, new: Commit, stored: list[NewRecord] | None = None) -> None:
        """Store all that a commit says, or nothing: of several records those that `stored` takes, once each counts.

        Raises:
            InputError: another thread locked another schema first.
            EnvironmentFault: disk full, I/O error. Nothing was stored, and nothing evicted, unless the episode is
                longer than the spare rows: then the oldest may be gone.
            SyncFailedError: a sync failed; open the buffer again.

        Cost: O(1) in the stored episodes; one write per column, and three small ones.
        """
        self.exclusively(new.where, lambda files: self.commit_now(files, new, stored))

    def drop_chains(self, chains: Collection[int], where: str) -> None:
        """Flag the parts of some chains, named by the positions of their first steps, as dropped, durably. O(live
        records)."""

        def work(files: CommitFiles) -> None:
            if not self.seq:
                return
            records, valid = self.table.read_range(max(1, self.first), self.seq)
            of_them = (records["part"] & PART != 0) & np.isin(records["chain"], list(chains))
            self._stale = True
            for row in records[valid & of_them & are_live(records, self.tail)]:
                record = Record.of(row)
                self.table.write(record._replace(flags=record.flags | DROPPED))
            self._recover()  # syncs the table, and has readers load all again

        self.exclusively(where, work)

    def update(self, positions: Array, values: Mapping[str, Array], where: str) -> int:
        """Store newer values of rows, in mutable columns; return how many: rows that were evicted are left out.

        Args:
            positions: int64 `(n,)`.
            values: column -> `(n, *shape)`, of its dtype: mutable columns.
            where: the method to name in an error.

        Raises:
            InputError: a position that no row has had yet.
            EnvironmentFault: the disk is full or fails. Nothing was changed, if the disk can still be written at all.
        """
        return self.exclusively(where, lambda files: self._update(files, positions, values, where))

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
        if self.power and newest.is_dirty:  # what an interrupted update left: one copy of each row must be durable
            with files.poisoning():
                newest.sync(note=False)
        missing = [name for name in newest.columns if name not in values]
        if missing:  # these keep their values: not those of an update that did not end
            newest.undo()
            values = {**values, **dict(zip(missing, rows.take(missing, positions, self.head), strict=True))}
        if self._sync_soon is not None:
            self._sync_soon()
        newest.update(positions, values)
        if self.power:
            with files.poisoning():
                newest.sync(note=False)
        return len(positions)

    def clear(self, small: Mapping[str, Any] | None = None) -> None:
        """Retire every episode, in one commit."""

        def work(files: CommitFiles) -> None:
            files.carry(small)
            if len(self.live):
                self.commit_now(files, Commit([NewRecord(kind=CLEAR, tail=self.head)], "ReplayBuffer.clear"))

        self.exclusively("ReplayBuffer.clear", work)

    # -- rows stored alone -------------------------------------------------------------------

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
        """Store the rows of one call, which are committed later, together with those of other calls; return the
        position of the first.

        The caller has called `refuse_nested`. The rows are safe when this returns, and this handle shows them at once;
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

        Raises:
            InputError, EnvironmentFault: too much text for a commit; the disk is full or fails. Nothing was stored.
        """
        try:  # the gate of `alone`: its frames would take a tenth of the time
            thread.inside = True
            with self._mutex:
                group, files = self._group, self.files
                if group is None or files is None or not (group.has_room(count) and self._is_ready(files)):
                    group, files = self._next_group(count, limit, where, unlinked, earlier, small)
                group.refuse_large(arrays, where)
                position = Position(group.start + group.count)
                self._stale = True
                try:
                    group.append(arrays, count, is_single)
                except OSError as error:
                    self._stale = False  # nothing changed
                    raise clear_error(error, where, self.folder, _NOTHING_LOST) from error
                if self.power:
                    self._sync_group(files, group)
                with self.lock:
                    self.show_pending(group)
                self._stale = False
                return position
        finally:
            thread.inside = False
            if thread.noted:
                end_noted()

    def _next_group(
        self,
        count: int,
        limit: int,
        where: str,
        unlinked: Unlinked | None,
        earlier: Callable[[], Values],
        small: Callable[[], AbstractContextManager[Mapping[str, Any] | None]],
    ) -> tuple[OpenGroup, CommitFiles]:
        """Return the open group if it goes on; else commit it, and begin another."""
        with clear_errors(where, self.folder, lambda: _NOTHING_LOST):
            files, group = self._ready(where), self._group
            self._ready_until = time.monotonic() + _READY_S
            if group is None or not group.has_room(count) or self._is_due():
                if group is not None:
                    with small() as state:
                        self.commit_group(files, where, state)
                if self.settings.group_s > 0 and not self.disk.volatile:
                    self._background.within(self.settings.group_s / 2, Store.commit_behind)
                group = self.begin_group(files, count, limit, unlinked, earlier)
            return group, files

    def _is_ready(self, files: CommitFiles) -> bool:
        """Tell whether this handle may write, and its group goes on, without a system call: `_ready` said so less than
        100 ms ago."""
        if self._closed or self._child or self._stale or time.monotonic() >= self._ready_until:
            return False
        return files.poison is None and not files.unpublished

    def _is_due(self) -> bool:
        """Tell whether a call commits the group before it adds to another; the thread does that for an idle writer."""
        group, most = self._group, self.settings.group_s
        if group is None or not group.count or most <= 0 or self.disk.volatile:
            return False
        return time.monotonic() - group.begun_at >= most / 2

    def commit_pending(self, where: str, small: Mapping[str, Any] | None = None) -> None:
        """Commit the rows of the open group, so that other handles find them."""
        if self._group is not None and self.writable_here:
            self.exclusively(where, lambda files: None, small)

    def commit_behind(self) -> None:
        """Commit the rows of a group that no call has committed in time, in the background thread."""

        def work() -> None:
            files = self.files
            if files is not None and self._may_sync(files) and self._is_due():
                self.commit_group(files, "ReplayBuffer", None)

        try:
            self.alone("ReplayBuffer", work)
        except (OSError, RingmapError) as error:  # the next writing call tries again
            log.warning("%s: rows can't be committed yet: %s", self.folder, error)
        if self._group is not None and self.writable_here:
            self._background.within(self.settings.group_s / 2, Store.commit_behind)

    # -- syncs -------------------------------------------------------------------------------

    def flush(self, where: str = "ReplayBuffer.flush", small: Mapping[str, Any] | None = None) -> None:
        """Force all committed data, and the small state, to the disk."""
        self.exclusively(where, lambda files: self._flush(files, small))

    def _flush(self, files: CommitFiles, small: Mapping[str, Any] | None, closes: bool = False) -> None:
        with self._syncing:
            files.carry(small)
            if not self.disk.volatile:
                self._sync_all(files)
            counts = {"first": self.first, "tail": self.tail, "head": self.head, "seq": self.seq}
            self._put_manifest(
                table={"count": len(self.live), **counts},
                carried={"seq": self.seq, "state": files.carried},
                closed=files.state.era if closes else None,
                settings=dict(self.settings.remembered or self.manifest.settings),
            )

    def _sync_all(self, files: CommitFiles) -> None:
        beside = [] if self.values is None else [self.values.sync]
        sync, note = files.begin_sync(self.rows, [*beside, self._successors.sync_all])
        with files.poisoning():
            sync()
        note()
        with files.poisoning():  # what state.bin says is durable
            files.state_file.sync()

    def sync_behind(self) -> None:
        """Do the work of `flush` except for the manifest, in the background thread, which does not block the writer."""
        marked("Store.sync_behind", self._sync_behind)

    def _sync_behind(self) -> None:
        files = self.files
        with self._mutex:
            values = self.values if self.values is not None and self.values.is_dirty else None
            if files is None or not self._may_sync(files):
                return
            if files.state.seq <= files.state.synced and values is None:
                return
            sync, note = files.begin_sync(self.rows, [] if values is None else [values.sync])
            self._syncing.acquire()  # a recovery waits for us
        failed: OSError | None = None
        try:
            sync()
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
                note()
                # If this fails `synced` is older after a power cut, and more is verified: no harm.
                with contextlib.suppress(OSError):
                    files.state_file.sync()

    def _may_sync(self, files: CommitFiles) -> bool:
        """Tell whether files and memory agree, so that what was synced may be told."""
        wrong = self._closed or self._child or self._stale or files.unpublished
        return not wrong and files.poison is None

    # -- the end -----------------------------------------------------------------------------

    def close(self, small: Mapping[str, Any] | None = None) -> None:
        """Flush, and release files and lock, whatever happens.

        Raises:
            ReplacedError: the directory is no longer at its path; the commits of this handle are in it.
        """
        where = "ReplayBuffer.close"

        def flush() -> None:
            if not self._child and not self.is_poisoned:
                with clear_errors(where, self.folder, lambda: _NOTHING_LOST):
                    files = self._ready(where)
                    self.commit_group(files, where, small)
                    self._flush(files, small, closes=True)
                    if self.values is not None:
                        self.values.note_closed()
                    remove_file(self._spent)

        self._end(where, flush)

    def abandon(self) -> None:
        """Release files and lock without a flush."""
        self._end("ReplayBuffer.close", lambda: None)

    def _end(self, where: str, first: Callable[[], None]) -> None:
        def end() -> None:
            try:
                if not self._closed:
                    first()
            finally:
                with self._syncing:  # waits for a running sync
                    self._closed = True
                    self._background.stop()
                    try:
                        self.close_files()
                    finally:  # an interrupt in between must not keep the next writer out
                        if self._lock is not None and not self._child:
                            self._lock.release()

        self.alone(where, end)
        marked(where, self._background.join)  # with no lock held: it may be waiting for one

    def shown_tail(self) -> Position:
        """Return the position below which rows may have been overwritten by now; raise ClosedError if it is unknown."""
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
        for file in (None if self._group is None else self._group.file, self._spent):
            if file is not None:
                file.close()
        self._successors.close()
        if self.values is not None:
            self.values.close()
        self.is_open = False
        if not self._child:  # a child continues to read where its parent does
            self.disk.let_go()

    def become_child(self) -> None:
        """Make the store unusable after a fork: the parent holds the lock and the locks' state is unknown."""
        self._child = True
        self._mutex, self._syncing = threading.Lock(), threading.Lock()
        self.lock = threading.Lock()
        self._background, self._sync_soon = Background(self), None
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
                self.commit_pending("ReplayBuffer")
        finally:
            self.abandon()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store.become_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
