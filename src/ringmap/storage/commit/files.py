"""Commit files: the files that make a commit count, and which of their content is durable.

    blob -> segment      record -> episode table      state -> state.bin

Invariants: a power cut may bring back an older record as the newest. So rows, slots and segments that such a record
calls live are not changed before a sync has made a newer record durable. After a failed sync nothing is
written, since the system marks such pages as clean and a retry would report success wrongly.
Not here: rows, the order of a commit (commit.py), locks (store.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import xxhash

from ringmap.errors import CorruptError, SyncFailedError
from ringmap.storage.columns.rows import Rows
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.paths import Paths
from ringmap.storage.read.recovery import RecoveredState, find, small_state_of
from ringmap.storage.records.blobs import HEAD, Segments, StatePlace, encode_blob
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.state import NO_BOOT, State, StateFile
from ringmap.storage.records.table import DROPPED, EPISODE, EpisodeTable, Record

__all__ = ["BlobPlace", "CommitFiles"]

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")

_FINISHED_MAX = 32

BlobPlace = tuple[int, int, int]
"""The fields `blob_offset`, `blob_size` and `blob_sum` of a record."""


class CommitFiles:
    """The table, state and segments of a buffer, open for writing. `power`: whether to sync each commit; `mapped`:
    whether walks over the table use a map."""

    def __init__(self, disk: Disk, paths: Paths, manifest: Manifest, power: bool, mapped: bool = True) -> None:
        self.power = power
        self.disk = disk
        self.paths = paths
        self.carried: dict[str, Any] = {}
        self._restored: tuple[int, int, int] | None = None
        """Segment, offset and size of the small state that an opening took from a segment."""
        self.poison: OSError | None = None
        self.unpublished = False
        self.state = State()
        self._carried_at: StatePlace | None = None
        """Where the current segment has the small state, None if it has an older one."""
        self._synced_tail, self._synced_first = 0, 1
        self.table = EpisodeTable.open(disk, paths.table, manifest.table_slots, manifest.uuid, True, mapped)
        self.state_file = StateFile.open(disk, paths.state, manifest.uuid, True)
        self.segments = Segments(disk, paths.data)

    # -- recovery ----------------------------------------------------------------------------

    def find(self, manifest: Manifest) -> RecoveredState:
        """Return the state of the files; see `recovery.find`."""
        shown = self.state_file.newest()
        return find(self.table, shown, self.disk.boot_id(), manifest, self.paths.table)

    def restore(
        self, recovered: RecoveredState, rows: Rows | None, bad: Mapping[int, str], trusted: bool = True
    ) -> None:
        """Make the files agree with the recovered state, in an order that a further crash can't harm. `bad`: episodes
        that no sync covered and whose bytes are damaged, to be dropped; `trusted`: whether the state is shown as of
        this boot.
        """
        # Set first, so that a failed sync below removes the trust in this state.
        self.state = State(
            recovered.generation,
            recovered.seq,
            recovered.first,
            recovered.tail,
            recovered.head,
            recovered.synced,
            recovered.era,
        )
        for seq, fault in bad.items():
            log.warning("%s: dropped a damaged episode: %s", self.paths.folder, fault)
            record = self.table.read(seq)
            assert record is not None
            self.table.write(record._replace(flags=record.flags | DROPPED))
        for slot in recovered.wipe:
            self.table.zero(slot)
        self._write_again(recovered, rows, bad)
        with self.poisoning():
            if rows is not None:
                if recovered.seq > recovered.synced:  # last before the sync: the rewrites above must not be rushed
                    start = self.table.start_of(max(recovered.first, recovered.synced + 1))
                    rows.touched(start, recovered.head - start)
                rows.sync()
            self.segments.sync_all(n for n, seq in recovered.live.segments.items() if seq > recovered.synced)
            self.disk.sync_folder(self.paths.folder)  # a kill may have come right after a rename
            self.disk.sync_folder(self.paths.open)  # a removed step file must not come back
            self.table.sync()
        self._write_state(synced=recovered.seq, era=recovered.era + 1, boot=NO_BOOT)
        self._write_state(boot=(self.disk.boot_id() if trusted else None) or NO_BOOT)
        with self.poisoning():
            self.state_file.sync()
        self._synced_tail, self._synced_first = recovered.tail, recovered.first
        self.unpublished = False

    def _write_again(self, recovered: RecoveredState, rows: Rows | None, bad: Mapping[int, str]) -> None:
        """Write what may not be durable again. A failed sync leaves pages that count as clean and are not on the disk:
        this makes them dirty."""
        for row in recovered.unsynced:
            record = Record.of(row)
            if record.seq in bad:
                continue
            if rows is not None and record.live and record.start >= recovered.tail:
                rows.rewrite(record.start, record.length)
            if self.segments.blob_of(record) is not None:
                self.segments.rewrite(record.blob_segment, record.blob_offset, record.blob_size)
            elif record.kind != EPISODE:  # the manifest will have the small state that is left
                record = record._replace(blob_segment=0, blob_offset=0, blob_size=0, blob_sum=0)
            self.table.write(record)
        if self._restored is not None and not recovered.clean:
            self.segments.rewrite(*self._restored)

    def adopt(self, recovered: RecoveredState) -> None:
        """Continue after the existing segments, and delete those that no record names."""
        last = recovered.live.segments
        self.segments.adopt(last, max([recovered.segment, *last]))

    def _write_state(self, **changes: Any) -> None:
        """Write the next state, with these fields; raise OSError, and keep the one before."""
        state = self.state._replace(generation=self.state.generation + 1, **changes)
        self.state_file.write(state)
        self.state = state

    def restore_carried(self, recovered: RecoveredState, kept: Mapping[str, Any]) -> bool:
        """Take the small state that the newest whole blob names, or that of the manifest if it is newer; return whether
        it is as of the newest record."""
        self._carried_at = None
        small = small_state_of(recovered.seq, self.table, self.segments.blob_of, kept)
        if small.fault:
            path = self.paths.manifest if small.kept else self.paths.table
            raise CorruptError(f"{path}: {small.fault}; run ringmap.check on the buffer")
        self.carried, self._restored = small.state, small.at
        return small.seq >= recovered.seq

    # -- a commit's own writes -----------------------------------------------------------------

    def carry(self, small: Mapping[str, Any] | None) -> None:
        """Set sections of the small state, which the next commit stores, and each flush."""
        if small:
            self.carried = {**self.carried, **small}
            self._carried_at = None

    def carry_finished(self, episode: str) -> None:
        """Name the open episode that this commit finishes, while its file may come back."""
        finished = self.carried.get("finished", [])
        if len(finished) >= _FINISHED_MAX:  # else each blob would name all that ever ended
            left = set(self.disk.names(self.paths.open))  # the others are durably gone after the sync
            self.sync_folder(self.paths.open)
            finished = [name for name in finished if name in left]
        self.carry({"finished": [*finished, episode]})

    def protect(self, need: int, seq: int, now: State) -> None:
        """Sync the table if rows below `need`, or the slot of `seq`, are live in a record that the disk may hold as
        newest."""
        if need > self._synced_tail or seq - self.table.slots >= self._synced_first:
            self.sync_table(now)

    def sync_table(self, now: State) -> None:
        """Make the newest record, that of `now`, durable, and its blob first.

        Without the blob, a power cut could leave no whole blob: the older ones are deleted with their segments.
        """
        with self.poisoning():
            self._sync_blobs()
            self.table.sync()
        self._table_is_synced(now)

    def _sync_blobs(self) -> None:
        written = self.segments.unsynced()
        for file in written.values():
            file.sync()
        if self.segments.new_name:
            self.disk.sync_folder(self.segments.folder)
            self.segments.new_name = False
        if self.power:  # else the background sync may be using a file that this would close
            self.segments.forget_synced(written)

    def _table_is_synced(self, upto: State) -> None:
        self._synced_tail = max(self._synced_tail, upto.tail)
        self._synced_first = max(self._synced_first, upto.first)
        if not self.unpublished:  # else readers still see a state that needs them
            self.segments.delete_before(self._synced_first, self.state.seq)

    def write_blobs(
        self, last: int, sums: Sequence[list[int]], data: Sequence[bytes], words: Sequence[bytes]
    ) -> tuple[int, list[BlobPlace]]:
        """Write the blobs of the records up to `last`, one behind the other, each of checksums, data and words. Return
        their segment, and where in it each is."""
        blobs: list[bytes] = []
        places: list[BlobPlace] = []
        at = self.segments.next_offset
        for each in zip(sums, data, words, strict=True):
            blob = self._blob(at, *each)
            blobs.append(blob)
            places.append((at, len(blob), xxhash.xxh3_64_intdigest(blob)))
            at += len(blob)
        return self.segments.append(b"".join(blobs), last)[0], places

    def _blob(self, at: int, sums: list[int], data: bytes, words: bytes) -> bytes:
        """Return a blob that begins at byte `at` of its segment. If no blob before it there has the small state, this
        one has it."""
        place, state = self._carried_at, b""
        if not at or place is None:
            state = json.dumps(self.carried, separators=(",", ":")).encode()
            begin = at + HEAD.size + 8 * len(sums) + len(words)
            place = self._carried_at = begin, len(state), xxhash.xxh3_64_intdigest(state)
        return encode_blob(sums, place, data, state, words)

    def sync_written(self, rows: Rows | None) -> None:
        """Make rows and blob durable, before the record that names them."""
        with self.poisoning():
            if rows is not None:
                rows.sync()
            self._sync_blobs()

    def append(self, record: Record, durable: bool) -> None:
        """Write the record, which is the commit, then show it to readers. `durable`: sync it; rows and blobs are synced
        already."""
        self.table.write(record)
        if durable:
            with self.poisoning():
                self.table.sync()
        old = self.state
        synced = record.seq if durable else old.synced
        self._publish(
            State(old.generation + 1, record.seq, record.first, record.tail, record.head, synced, old.era, old.boot)
        )

    def drop_retired(self) -> None:
        """Delete the segments that the newest record retired: it is durable. Its state must already be shown to
        threads."""
        self._table_is_synced(self.state)

    def _publish(self, state: State) -> None:
        try:
            self.state_file.write(state)
        except OSError as error:
            # The commit stands; readers must see it before the rows that it retired are overwritten.
            log.warning("%s: can't be written (%s), tried again later", self.paths.state, error)
            self.unpublished = True
            self.state = state._replace(generation=state.generation - 1)
        else:
            self.state = state

    def publish_again(self) -> None:
        """Show readers the state that an earlier try could not, or raise OSError."""
        if self.unpublished:
            self._write_state()
            self.unpublished = False

    # -- syncs -------------------------------------------------------------------------------

    def begin_sync(
        self, rows: Rows | None, beside: Sequence[Callable[[], None]]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what syncs all that was written by now, and what then says so in `state.bin`.

        Begun and ended with the writer's lock; the sync itself may run without it. If it fails, with OSError, nothing
        is known of what reached the disk: its caller poisons the files. `beside`: syncs of sidecars, which come first.
        """
        segments = self.segments.unsynced()
        return partial(self.sync_all, rows, segments, beside), partial(self.mark_synced, self.state, segments)

    def sync_all(
        self, rows: Rows | None, segments: Mapping[int, File], beside: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Sync everything written so far, the table last."""
        for sync in (*beside, *(() if rows is None else (rows.sync,)), *(file.sync for file in segments.values())):
            sync()
        for folder in (self.paths.data, self.paths.open):
            self.disk.sync_folder(folder)
        self.table.sync()

    def mark_synced(self, upto: State, segments: Mapping[int, File]) -> None:
        """Record that everything up to state `upto` is durable, unless a recovery came in between."""
        if self.state.era != upto.era:
            return
        self.segments.forget_synced(segments)
        self._table_is_synced(upto)
        if upto.seq > self.state.synced:
            self._publish(self.state._replace(generation=self.state.generation + 1, synced=upto.seq))

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        with self.poisoning():
            self.disk.sync_folder(path)

    @contextlib.contextmanager
    def poisoning(self) -> Any:
        """Stop writing for good if a sync in the block fails."""
        try:
            yield
        except OSError as error:
            self.poisoned(error)

    def poisoned(self, error: OSError) -> NoReturn:
        """Stop writing for good after a failed sync, and say that the page cache is not trusted."""
        self.poison = error
        with contextlib.suppress(OSError):
            self._write_state(boot=NO_BOOT)
        self.refuse("ReplayBuffer")

    def refuse(self, where: str) -> NoReturn:
        """Raise the error of files that a failed sync has closed for writing."""
        assert self.poison is not None
        raise SyncFailedError(
            self.poison.errno,
            f"{where}: a sync of {self.paths.folder} failed ({self.poison}), so nothing more is written "
            "through this handle; the fate of the episode of that call is open, all before it are safe; "
            "fix the disk, close the buffer and open it again",
        ) from self.poison

    def close(self) -> None:
        """Release all descriptors."""
        self.segments.close()
        self.table.close()
        self.state_file.close()
