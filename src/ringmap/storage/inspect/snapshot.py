"""A snapshot: a copy of a buffer as of one commit, made while its writer goes on.

    peek -> copy rows [tail, head)  -> validate -> what came in meanwhile: copy that -> validate ...
            all of them, or reflinks               little, and less each time

A row that is still live at a peek was not overwritten before it: of the copied rows, those are whole. Others may be
torn: the copy is complete, and holds the state at the start of the round, if the episodes that were retired since are
whole by their checksums. A fast writer could make rounds endless: on the writer's own handle, no other thread writes
during the last one.

    .NAME.ringmap-unfinished/    columns, segments, table, state, manifest -> synced -> renamed to NAME

Invariants: the source is only read; nothing is at the target before all of it is there and synced, and the place is
locked meanwhile; what is in the copy was one committed state; a record, a blob and a row are copied once, but for rows
in chunks. It has a UUID of its own, which labels, records and states carry.
Not here: how a column's rows are copied (columns/), how a disk shares bytes (system.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, EnvironmentFault, ExistsError, InputError, LappedError, LockedError
from ringmap.storage.columns.rows import Rows
from ringmap.storage.commit.create import make_folder, make_parts
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import LOCK, NAMES, Paths
from ringmap.storage.disk.system import clear_errors
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.reader import Reader
from ringmap.storage.read.recovery import bad_columns, small_state_of
from ringmap.storage.records.blobs import Segments, segment_name
from ringmap.storage.records.manifest import Manifest, read_manifest
from ringmap.storage.records.state import NO_BOOT, State, StateFile
from ringmap.storage.records.table import DROPPED, EpisodeTable, Record, are_live
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import SIDECARS, Copied, Home, Sidecar

__all__ = ["Kept", "refuse_target", "snapshot", "workplace"]

Kept = Mapping[type[Sidecar], Callable[[Copied], Any]]
"""What gives a copy what a handle has in memory of its sidecars; see `Sidecar.copy`."""

Array = np.ndarray[Any, np.dtype[Any]]

_TRIES = 10

_ROUNDS = 4
"""After so many, a writer is kept waiting for what is left: the writes of the last one."""


def snapshot(source: Handle, disk: Disk, folder: str, where: str, kept: Kept | None = None) -> None:
    """Make a copy of an open buffer at `folder` of a disk, absolute; see `ReplayBuffer.snapshot`. `kept`: what the
    handle has in memory of its sidecars."""
    own = "" if source.disk.volatile else source.folder
    with workplace(own, disk, folder, where) as beside, _followed(source) as followed:
        for _ in range(_TRIES):  # a recovery may come in between, and use positions again
            writer = followed if isinstance(followed, Store) and followed.writable_here else None
            if writer is not None:  # says now if this handle may not keep writing out
                writer.exclusively(where, lambda _: None)
            with closing(Copy(followed, disk, beside, Moment.of(followed))) as copy:
                if copy.follow(writer, where):
                    copy.finish(kept or {})
                    return
            for name in set(disk.names(beside)) - {LOCK}:
                disk.discard(os.path.join(beside, name))
        raise LappedError(f"{where}: {source.folder}: writers opened the buffer again and again")


@contextlib.contextmanager
def _followed(source: Handle) -> Iterator[Handle]:
    """Lend what follows the writer: the writer itself, or a reader whose catching up no one else sees."""
    if not isinstance(source, Reader):
        yield source
        return
    source.disk.check_held("ReplayBuffer.snapshot")
    with closing(Reader(source.disk, source.folder, mapped=source.mapped, uuid=source.manifest.uuid)) as reader:
        yield reader


# -- the place -------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace(own: str, disk: Disk, folder: str, where: str) -> Iterator[str]:
    """Lend an empty directory that becomes `folder` if the block succeeds, and is gone if it fails.

    `own`: the directory of the buffer that is copied, "" for one in RAM; `where`: the method to name in an error.

    Raises:
        InputError, ExistsError: no copy may go there.
        LockedError: another one is being made.
        EnvironmentFault: the disk is full or fails.
    """
    folder = os.path.realpath(folder)
    refuse_target(own, disk, folder, where)
    parent, name = os.path.split(folder)
    beside = os.path.join(parent, f".{name}.ringmap-unfinished")
    said = f"nothing is at {folder}, and the buffer is as it was"
    with clear_errors(where, folder, lambda: said):
        make_folder(disk, parent)
        with contextlib.suppress(FileExistsError):
            disk.make_folder(beside)
        if foreign := sorted(set(disk.names(beside)) - NAMES):
            raise ExistsError(
                f"{where}: {beside} holds something that no copy left there ({', '.join(foreign[:3])}); move it away"
            )
        lock = _locked(disk, beside, folder, where)
        try:
            for left in set(disk.names(beside)) - {LOCK}:  # of a try that was killed
                disk.discard(os.path.join(beside, left))
            refuse_target(own, disk, folder, where)  # another one may have come first
            yield beside
            disk.rename(beside, folder)
            try:
                disk.sync_folder(parent)
            except OSError:  # it may be there after a power cut, or not: better not
                disk.discard(folder)
                raise
        except BaseException:
            with contextlib.suppress(OSError):  # what stays goes with the next try
                disk.discard(beside)
            raise
        finally:
            lock.release()


def _locked(disk: Disk, beside: str, folder: str, where: str) -> WriterLock:
    """Take the lock of the place where a copy to `folder` is made, or leave nothing there."""
    lock = WriterLock(disk, Paths(beside).lock, beside)
    try:
        lock.acquire()
    except LockedError:
        raise LockedError(
            f"{where}: a copy to {folder} is being made by {describe(holder_of(Paths(beside).lock))}; "
            "wait for it, or choose another path"
        ) from None
    except BaseException as error:
        if not disk.exists(beside) and isinstance(error, EnvironmentFault):
            raise LockedError(
                f"{where}: another copy to {folder} ended just now; look at what is there, and call it again"
            ) from None
        if disk.exists(beside) and set(disk.names(beside)) <= {LOCK}:
            disk.discard(beside)
        raise
    return lock


def refuse_target(own: str, disk: Disk, folder: str, where: str) -> None:
    """Raise unless a copy may go there."""
    own = os.path.realpath(own) if own else own
    if own and (folder == own or folder.startswith(own + os.sep)):
        raise InputError(f"{where}: {folder} lies inside the buffer itself; choose a path outside")
    if not disk.exists(folder):
        return
    if not disk.is_folder(folder) or disk.names(folder):
        raise ExistsError(f"{where}: something is at {folder} already; expected a directory that is new or empty")
    if os.path.ismount(folder):
        raise InputError(f"{where}: {folder} is a mount point, which nothing can be renamed to; name a directory in it")


# -- following the writer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """A committed state: `starts` of its live episodes; `era` as for `LiveEpisodes`."""

    era: int
    seq: int
    first: int
    tail: Position
    head: Position
    starts: Array

    @classmethod
    def of(cls, source: Handle) -> Moment:
        """Return the newest one."""
        source.refresh()
        with thread.searching, source.lock:
            live, head = source.live, source.committed_head
            starts = live.starts[: int(live.starts.searchsorted(head))].copy()
            return cls(live.era, source.seq, source.first, source.tail, head, starts)


# -- the copy --------------------------------------------------------------------------------------


class Copy:
    """What was copied so far.

        state -> records since the last round -> table       under the copy's own salt
                 blobs, rows since the last round -> segments, columns

    `folder`: its directory on `disk`, empty but for the lock.
    """

    def __init__(self, source: Handle, disk: Disk, folder: str, now: Moment) -> None:
        self.source, self.disk, self.paths, self.now = source, disk, Paths(folder), now
        manifest = source.manifest
        if not now.seq and not manifest.locked_by_argument:
            manifest = manifest.without_columns()
        self._manifest = manifest = replace(manifest, uuid=uuid.uuid4().bytes, closed=None)
        make_parts(disk, self.paths, manifest)
        table = disk, self.paths.table, manifest.table_slots, manifest.uuid
        self._table = EpisodeTable.open(*table, write=True, mapped=False)
        self._next = 1  # records before it are copied, or are not live
        self._head = now.tail  # likewise rows
        self._copied: dict[int, int] = {}  # number of a segment -> bytes that the copy has
        self._rows = None if manifest.schema is None else self._make_columns(manifest, now)

    def _make_columns(self, manifest: Manifest, now: Moment) -> Rows:
        """Make columns that share their rows with the source's where that can be."""
        rows, shared = self.source.rows, True
        assert manifest.schema is not None
        self.disk.make_folder(self.paths.columns)
        columns = manifest.columns(self.disk, self.paths.columns)
        for i, column in enumerate(columns):
            if rows is None or not now.seq:
                column.create()
            else:
                shared &= column.create_copy(rows.columns[i])
        if now.seq and shared:
            self._head = now.head
        else:  # a compressed column takes nobody knows how much less
            ways = zip(columns, manifest.choices, strict=True)
            plain = (column.spec.row_nbytes for column, way in ways if way.backend == "memmap")
            self._refuse_without_room((now.head - now.tail) * sum(plain))
        return Rows(manifest.schema, columns, manifest.ring).open(write=True, head=now.head, mapped=False)

    def _refuse_without_room(self, need: int) -> None:
        """Raise rather than fill the disk that the writer may be on."""
        free = self.disk.free(self.paths.folder)
        if free is not None and need > free:
            what = f"the copy takes {need:,} bytes, only {free:,} are free"
            raise OSError(errno.ENOSPC, what, self.paths.folder)

    def follow(self, writer: Store | None, where: str) -> bool:
        """Copy round by round until the copy is whole; False if a recovery came in between. `writer`: the source, if it
        can keep all others from writing."""
        for _ in range(_TRIES if writer is None else _ROUNDS):
            fault = self._take()
            then = Moment.of(self.source)
            if then.era != self.now.era:
                return False
            if not fault and self.is_whole(then):
                return True
            if fault and then.seq == self.now.seq:
                raise CorruptError(f"{self.source.folder}: {fault}; run ringmap.check on the buffer")
            self.now = then
        if writer is None:
            raise LappedError(
                f"{where}: the writer of {self.source.folder} overtook this reader {_TRIES} times in a row; raise "
                "max_steps, or call it on the writer's own handle"
            )
        done: list[str | OSError] = []

        def last_round(_: Any) -> None:
            era, self.now = self.now.era, Moment.of(writer)
            try:
                done.append(self._take() if self.now.era == era else "")
            except OSError as error:  # of the copy's disk: no word on what the writer stores
                done.append(error)

        era = self.now.era
        writer.exclusively(where, last_round)
        if isinstance(done[0], OSError):
            raise done[0]
        if done[0]:
            raise CorruptError(f"{self.source.folder}: {done[0]}; run ringmap.check on the buffer")
        return self.now.era == era

    def _take(self) -> str:
        """Copy what the state has and the copy has not. Return, in words, what of it is gone."""
        if not self.now.seq:
            return ""
        fault = self._take_records() or self._take_blobs()
        if not fault:
            self._take_rows()
        return fault

    def _take_records(self) -> str:
        now = self.now
        fresh = max(self._next, now.first)
        records, valid = self.source.table.read_range(fresh, now.seq)
        if not valid.all():
            return f"record {fresh + int(np.argmin(valid))} of {self.source.paths.table} is damaged"
        gone = are_live(records, now.tail) & ~np.isin(records["start"], now.starts)
        records["flags"][gone] |= DROPPED  # damaged ones of which a reader alone may know
        self._table.write_many(records)
        self._next = now.seq + 1
        return ""

    def _live(self) -> Array:
        """Return the records of the live episodes in the copy."""
        records, _ = self._table.read_range(self.now.first, self.now.seq)
        found: Array = records[are_live(records, self.now.tail)]
        return found

    def _needed(self) -> dict[int, int]:
        """Return the segments with blobs of live episodes, and up to which byte each is needed."""
        records = self._live()
        numbers, which = np.unique(records["blob_segment"], return_inverse=True)
        ends = np.zeros(len(numbers), np.int64)
        np.maximum.at(ends, which, records["blob_offset"].astype(np.int64) + records["blob_size"])
        return dict(zip(numbers.tolist(), ends.tolist(), strict=True))

    def _take_blobs(self) -> str:
        for number, end in self._needed().items():
            if not self._copy_blobs(number, end):
                return f"{self.source.segments.path(number)} is missing or cut"
        newest = self._table.read(self.now.seq)
        if newest is not None:  # without an episode it may be lost, and its small state in the manifest
            self._copy_blobs(newest.blob_segment, newest.blob_offset + newest.blob_size)
        return ""

    def _copy_blobs(self, number: int, end: int) -> bool:
        """Copy a segment up to byte `end`; False if it is not there, or ends before."""
        done, path = self._copied.get(number, 0), os.path.join(self.paths.data, segment_name(number))
        if done >= end:
            return True
        try:
            source = self.source.disk.open(self.source.segments.path(number))
        except FileNotFoundError:
            return False
        with closing(source):
            if source.size() < end:
                return False
            with closing(self.disk.open(path, write=True) if done else self.disk.create(path)) as file:
                file.copy_from(source, done, end - done)
        self._copied[number] = end
        return True

    def _take_rows(self) -> None:
        now = self.now
        assert self._rows is not None
        assert self.source.rows is not None
        start = Position(max(self._head, now.tail))
        for slot, count in self._rows.ring.pieces(start, now.head - start):
            for target, source in zip(self._rows.columns, self.source.rows.columns, strict=True):
                target.copy_from(source, slot, count)
        self._head = now.head

    def is_whole(self, then: Moment) -> bool:
        """Tell whether the copy is the state `now`, given that the writer had come to `then` when it was complete."""
        if then.tail <= self.now.tail or self._rows is None:
            return True
        records = self._live()
        for record in map(Record.of, records[records["start"] < then.tail]):
            if bad_columns(record, self._rows.sums(record.start, record.length), None):
                return False
        return True

    # -- the end -----------------------------------------------------------------------------------

    def finish(self, kept: Kept) -> None:
        """Make the copy a buffer of that state, and sync all of it; `kept` is what a handle has of its sidecars."""
        disk, paths, manifest, now = self.disk, self.paths, self._manifest, self.now
        newest = self._table.read(now.seq) if now.seq else None
        used = set(self._needed()) | ({newest.blob_segment} if newest is not None else set())
        for number in set(self._copied) - used:
            disk.remove(os.path.join(paths.data, segment_name(number)))
        if self._rows is not None:
            self._rows.sync()
            disk.sync_folder(paths.columns)
        with closing(Segments(disk, paths.data)) as segments:
            segments.sync_all(used & set(self._copied))
            disk.sync_folder(paths.open)
            self._table.sync()
            with closing(StateFile.open(disk, paths.state, manifest.uuid, write=True)) as states:
                boot = disk.boot_id() or NO_BOOT
                states.write_both(State(2, now.seq, now.first, now.tail, now.head, now.seq, era=1, boot=boot))
                states.sync()
            live = self._live()
            state = Copied(now.tail, now.head, Record.of(live[-1]) if len(live) else None, manifest.uuid)
            target = Home(disk, paths.folder, manifest.uuid, manifest.rows, manifest.schema)
            for sidecar in SIDECARS:
                sidecar.copy(self.source.home, target, state, kept.get(sidecar))
            counts = {"first": now.first, "tail": now.tail, "head": now.head, "seq": now.seq}
            source = self.source
            stored = source.manifest if source.disk.volatile else read_manifest(source.disk, source.folder)
            remembered = source.settings.remembered if isinstance(source, Store) else None
            manifest = replace(
                manifest,
                table={"count": len(now.starts), **counts},
                carried=self._carried(now, segments, stored.carried),
                settings=dict(remembered or stored.settings),
            )
        disk.sync_folder(paths.folder)
        disk.replace_file(paths.manifest, manifest.encode())

    def _carried(self, now: Moment, segments: Segments, flushed: dict[str, Any]) -> dict[str, Any]:
        """Return the small state as of the commit, or of a flush after it."""
        small = small_state_of(
            now.seq, self._table, segments.blob_of, flushed if flushed and flushed["seq"] <= now.seq else {}
        )
        if small.fault:  # which check reports, of the copy too
            return {}
        state = {name: value for name, value in small.state.items() if name != "finished"}
        return {"seq": now.seq, "state": state}  # that names open episodes, of which the copy has none

    def close(self) -> None:
        """Release all descriptors."""
        if self._rows is not None:
            self._rows.close()
        self._table.close()
