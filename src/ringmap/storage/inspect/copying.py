"""The copy that a snapshot is made of: what was copied so far, round by round, and how it becomes a buffer.

    state -> records since the last round -> table       under the copy's own salt
             blobs, rows since the last round -> segments, columns

Invariants: the source is only read; what `is_whole` says yes to is one committed state; a
record, a blob and a row are copied once, but for rows in chunks.
Not here: how many rounds there are (snapshot.py), how a column's rows are copied (columns/).
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringmap.storage.columns.rows import Rows
from ringmap.storage.commit.create import make_parts
from ringmap.storage.commit.store import Store
from ringmap.storage.directory.entries import Paths
from ringmap.storage.directory.opening import read_manifest
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.recovery import bad_rows, small_state_of
from ringmap.storage.records.blobs import Segments, segment_name
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.state import NO_BOOT, State, StateFile
from ringmap.storage.records.table import DROPPED, EPISODE, EpisodeTable, Record, are_live
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import SIDECARS, Copied, Home, Sidecar

__all__ = ["Copy", "Kept", "Look", "StartOver", "look"]

Kept = Mapping[type[Sidecar], Callable[[Copied], Any]]
"""What gives a copy what a handle has in memory of its sidecars; see `Sidecar.copy`."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Look:
    """A committed state: `starts` of its live episodes; `era` as for `LiveEpisodes`."""

    era: int
    seq: int
    first: int
    tail: Position
    head: Position
    starts: Array


def look(source: Handle) -> Look:
    """Return the newest committed state."""
    source.refresh()
    with source.memory:
        live, head = source.live, source.committed_head
        starts = live.starts[: int(live.starts.searchsorted(head))].copy()
        return Look(live.era, source.seq, source.first, source.tail, head, starts)


class StartOver(Exception):
    """Positions may have been used again: a recovery came in between."""


class Copy:
    """What was copied so far.

    Args:
        source: the buffer.
        disk: where the copy goes.
        folder: its directory, empty but for the lock.
    """

    def __init__(self, source: Handle, disk: Disk, folder: str) -> None:
        self.source = source
        self.disk = disk
        self.paths = Paths(folder)
        self.missing = ""
        self._manifest: Manifest | None = None
        self._era = -1
        self._rows: Rows | None = None
        self._table: EpisodeTable | None = None
        self._next = 1  # records before it are copied, or are not live
        self._head = 0  # likewise rows
        self._fresh: list[tuple[int, int]] = []  # slots copied in this round
        # Number -> newest live record in it, bytes that count.
        self._segments: dict[int, tuple[int, int]] = {}
        self._newest = (0, 0)  # segment of the newest record, bytes that count
        self._copied: dict[int, int] = {}  # number -> bytes that the copy has

    def take(self, now: Look) -> bool:
        """Copy what the state has and the copy has not; False if a part of it is gone, which `missing` names."""
        if self._manifest is None:
            self._begin(now)
        elif now.era != self._era:
            raise StartOver
        return not now.seq or (self._take_records(now) and self._take_blobs(now) and self._take_rows(now))

    def _begin(self, now: Look) -> None:
        """Make the parts, columns that share their rows with the source's where that can be."""
        manifest = self.source.manifest
        if not now.seq and not manifest.locked_by_argument:
            manifest = manifest.without_columns()
        self._era, self._head = now.era, now.tail
        self._manifest = manifest = replace(manifest, uuid=uuid.uuid4().bytes, closed=None)
        make_parts(self.disk, self.paths, manifest)
        if manifest.schema is not None:
            self.disk.make_folder(self.paths.columns)
        self._table = EpisodeTable.open(
            self.disk, self.paths.table, manifest.table_slots, manifest.uuid, True, mapped=False
        )
        if manifest.schema is not None:
            self._make_columns(manifest, now)

    def _make_columns(self, manifest: Manifest, now: Look) -> None:
        rows, shared = self.source.rows, True
        assert manifest.schema is not None
        for i, one in enumerate(manifest.columns):
            column = one.inside(self.disk, self.paths.folder)
            if rows is None or not now.seq:
                column.create()
            else:
                shared &= column.create_copy(rows.columns[i])
        self._rows = Rows.open(
            self.disk,
            self.paths.folder,
            manifest.schema,
            manifest.columns,
            manifest.ring,
            True,
            now.head,
            mapped=False,
        )
        if now.seq and shared:
            self._head, self._fresh = now.head, [(0, manifest.rows)]
        else:
            plain = [
                one.spec.row_nbytes
                for one in manifest.columns
                if one.kind == "memmap"  # the others take nobody knows how much less
            ]
            self._refuse_without_room((now.head - now.tail) * sum(plain))

    def _refuse_without_room(self, need: int) -> None:
        """Raise rather than fill the disk that the writer may be on."""
        free = self.disk.free(self.paths.folder)
        if free is not None and need > free:
            raise OSError(
                errno.ENOSPC,
                f"the copy takes {need:,} bytes, only {free:,} are free",
                self.paths.folder,
            )

    def _take_records(self, now: Look) -> bool:
        assert self._table is not None
        fresh = max(self._next, now.first)
        records, valid = self.source.table.read_range(fresh, now.seq)
        if not valid.all():
            bad = fresh + int(np.argmin(valid))
            self.missing = f"record {bad} of {self.source.paths.table} is damaged"
            return False
        live = (records["kind"] == EPISODE) & (records["start"] >= now.tail)
        gone = live & ~np.isin(records["start"], now.starts)
        records["flags"][gone] |= DROPPED  # damaged ones of which a reader alone may know
        self._table.write_many(records)
        self._next = now.seq + 1
        ends = records["blob_offset"].astype(np.uint64) + records["blob_size"]
        live &= records["flags"] & DROPPED == 0
        numbers, which = np.unique(records["blob_segment"][live], return_inverse=True)
        last, end = np.zeros((2, len(numbers)), np.uint64)
        np.maximum.at(last, which, records["seq"][live])
        np.maximum.at(end, which, ends[live])
        for number, *found in zip(numbers.tolist(), last.tolist(), end.tolist(), strict=True):
            known = self._segments.get(number, (0, 0))
            self._segments[number] = max(found[0], known[0]), max(found[1], known[1])
        if len(records):
            self._newest = int(records["blob_segment"][-1]), int(ends[-1])
        return True

    def _take_blobs(self, now: Look) -> bool:
        for number, (last, end) in self._segments.items():
            if last >= now.first and not self._copy_blobs(number, end):
                self.missing = f"{self.source.segments.path(number)} is missing or cut"
                return False
        # That of a record without an episode may be lost, and its small state in the manifest.
        self._copy_blobs(*self._newest)
        return True

    def _copy_blobs(self, number: int, end: int) -> bool:
        """Copy a segment up to byte `end`; False if it is not there, or ends before."""
        done = self._copied.get(number, 0)
        if done >= end:
            return True
        try:
            source = self.source.disk.open(self.source.segments.path(number))
        except FileNotFoundError:
            return False
        try:
            if source.size() < end:
                return False
            path = os.path.join(self.paths.data, segment_name(number))
            with closing(self.disk.open(path, write=True) if done else self.disk.create(path)) as file:
                file.copy_from(source, done, end - done)
        finally:
            source.close()
        self._copied[number] = end
        return True

    def _take_rows(self, now: Look) -> bool:
        assert self._rows is not None
        assert self.source.rows is not None
        start = Position(max(self._head, now.tail))
        for slot, count in self._rows.ring.pieces(start, now.head - start):
            for target, source in zip(self._rows.columns, self.source.rows.columns, strict=True):
                self._fresh.append(target.copy_from(source, slot, count))
        self._head = now.head
        return True

    def left(self, then: Look) -> int:
        """Return the bytes of rows that the next round has to copy."""
        row = self._rows.row_nbytes if self._rows is not None else 0
        return row * (then.head - max(self._head, then.tail))

    def is_whole(self, now: Look, then: Look) -> bool:
        """Tell whether the copy is the state `now`, given that the writer had come to `then` when it was complete."""
        if then.era != now.era:
            raise StartOver
        fresh, self._fresh = self._fresh, []
        if then.tail <= now.tail or self._rows is None or self._table is None:
            return True
        records, _ = self._table.read_range(now.first, now.seq)
        start, count = records["start"], records["length"]
        retired = are_live(records, now.tail) & (start < then.tail)
        slots, rows = start % self._rows.ring.rows, self._rows.ring.rows
        copied = np.zeros(len(records), np.bool_)
        for first, stop in fresh:
            copied |= (slots < stop) & (slots + count > first)
            copied |= slots + count - rows > first  # those that wrap
        for row in records[retired & copied]:
            record = Record.of(row)
            sums = self._rows.sums(record.start, record.length)
            if bad_rows(record, self._rows.schema.names, sums, None) is not None:
                return False
        return True

    # -- the end -----------------------------------------------------------------------------------

    def finish(self, now: Look, kept: Kept) -> None:
        """Make the copy a buffer of that state, and sync all of it; `kept` is what a handle has of its sidecars."""
        disk, paths, manifest = self.disk, self.paths, self._manifest
        assert manifest is not None
        assert self._table is not None
        used = {number for number, (last, _) in self._segments.items() if last >= now.first}
        used = (used | {self._newest[0]}) & set(self._copied)
        for number in set(self._copied) - used:
            disk.remove(os.path.join(paths.data, segment_name(number)))
        if self._rows is not None:
            self._rows.sync()
            disk.sync_folder(paths.columns)
        segments = Segments(disk, paths.data)
        segments.sync_all(used)
        disk.sync_folder(paths.open)
        self._table.sync()
        self._write_state(manifest, now)
        self._copy_sidecars(manifest, now, kept)
        counts = {"count": len(now.starts), "first": now.first, "tail": now.tail, "head": now.head}
        manifest = replace(manifest, table={**counts, "seq": now.seq})
        try:
            manifest = replace(manifest, carried=self._carried(now, segments), settings=self._settings())
        finally:
            segments.close()
        disk.sync_folder(paths.folder)
        disk.replace_file(paths.manifest, manifest.encode())

    def _write_state(self, manifest: Manifest, now: Look) -> None:
        with closing(StateFile.open(self.disk, self.paths.state, manifest.uuid, write=True)) as states:
            boot = self.disk.boot_id() or NO_BOOT
            states.write_both(State(2, now.seq, now.first, now.tail, now.head, now.seq, era=1, boot=boot))
            states.sync()

    def _copy_sidecars(self, manifest: Manifest, now: Look, kept: Kept) -> None:
        assert self._table is not None
        numbers = range(now.seq, now.first - 1, -1)
        records = (self._table.read(seq) for seq in numbers if len(now.starts))
        live = (r for r in records if r is not None and r.live and r.start >= now.tail)
        state = Copied(now.tail, now.head, next(live, None), manifest.uuid)
        target = Home(self.disk, self.paths.folder, manifest.uuid, manifest.rows, manifest.schema)
        for sidecar in SIDECARS:
            sidecar.copy(self.source.home, target, state, kept.get(sidecar))

    def _carried(self, now: Look, segments: Segments) -> dict[str, Any]:
        """Return the small state as of the commit, or of a flush after it."""
        assert self._table is not None
        flushed = self._newest_manifest().carried
        kept = flushed if flushed and flushed["seq"] <= now.seq else {}
        small = small_state_of(now.seq, self._table, segments.blob_of, kept)
        if small.fault:  # which check reports, of the copy too
            return {}
        state = {name: value for name, value in small.state.items() if name != "finished"}
        return {"seq": now.seq, "state": state}  # that names streams, of which the copy has none

    def _settings(self) -> dict[str, Any]:
        source = self.source
        remembered = source.settings.remembered if isinstance(source, Store) else None
        return dict(remembered or self._newest_manifest().settings)

    def _newest_manifest(self) -> Manifest:
        source = self.source
        volatile = source.disk.volatile
        return source.manifest if volatile else read_manifest(source.disk, source.folder)

    def close(self) -> None:
        """Give all descriptors back."""
        if self._rows is not None:
            self._rows.close()
        if self._table is not None:
            self._table.close()
