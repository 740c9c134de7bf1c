"""A commit: all that one call stores, and the one order in which that becomes durable and is shown.

    check, convert -> reserve blocks, retire what is overwritten -> sync the table, if it still calls that live
    -> rows, blobs [power: sync] -> RECORD [power: sync] -> state.bin -> memory

It counts from the record on. Several episodes are several records after one write of rows; a mark (retire, clear, the
end of a chain) is a record without rows. Rows that fit in the spare ones are written where no live row is, and their
record both publishes them and retires what they evict; longer ones first commit a mark that retires it.

Rows of transitions have the ordinal of their episode in a column, and get it with their commit:

    lanes         -2  -2   2   2   2   2        a row with N > 0 goes on from the row N before it, unless that one ended
    an episode ended                  x
    _episode       4   5   4   5   6   5        the record: ordinal 4, behind 3

Invariants: a row or slot that the newest durable record calls live is never overwritten; `_stale` is set before the
first write and cleared last; memory changes under `lock` only; the numbers of a commit are those that its record
gives, in the order of the episodes' first rows, and rows that have a number, of a copy, keep it.
Not here: who may write, and when (store.py); which files these are (files.py); what `lanes` says
(buffers/transitions/).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ringmap.errors import CorruptError, InputError, ReplacedError
from ringmap.storage.columns.backends import Storage, choose
from ringmap.storage.columns.rows import Rows, combine, sum_of
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import Words, coded
from ringmap.storage.commit.create import make_columns, warn_of_space
from ringmap.storage.commit.files import BlobPlace, CommitFiles
from ringmap.storage.commit.group import OpenGroup, Values, follows
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.process import begin
from ringmap.storage.read.handle import Handle
from ringmap.storage.records.blobs import LARGEST_BLOB, encode_data, names_origin
from ringmap.storage.records.manifest import TRANSITIONS, Manifest
from ringmap.storage.records.step_file import StepFile, Unlinked
from ringmap.storage.records.table import COPIED, EPISODE, MANY, MOST_U4, RETIRE, PartOf, Record
from ringmap.storage.ring.links import NONE
from ringmap.storage.ring.ring import Ordinal, Position
from ringmap.storage.sidecars.successors import Successors

__all__ = ["ENDS", "LANES", "NUMBERS", "UNNUMBERED", "Commit", "Committer", "NewRecord", "Values", "numbered"]

Array = np.ndarray[Any, np.dtype[Any]]

LANES, ENDS, NUMBERS = "lanes", ("dones", "truncated"), "_episode"
"""Names of columns of transitions."""
UNNUMBERED = -1

_HELPED_NBYTES = 1 << 20
"""From this size on rows are summed on another core while they are written."""

_MOST_STEPS, _MOST_DATA = (1 << 31) - 1, LARGEST_BLOB // 2
"""Of an episode. Memory counts its steps in 32 bits; a blob also has checksums, and may have the small state."""

_NO_PART = (NONE, 0, NONE, 0, 0)
"""The fields `chain` to `lane` of a record of an episode that is whole."""


class NewRecord(NamedTuple):
    """One record of a commit: of an episode, or of a mark, which has no rows.

    `data`: of the episode, encoded; `part`: which part of a chain it is, None for a whole episode; `tail`: of a
    mark, None for the present one.
    """

    length: int = 0
    data: bytes = b""
    flags: int = 0
    part: PartOf | None = None
    kind: int = EPISODE
    tail: Position | None = None


class Commit(NamedTuple):
    """All that one call stores: several records, but for which there is one of each.

    `where`: the method to name in an error;
    `schema`: of the rows, equal to the buffer's, or becomes it; None for a mark;
    `arrays`: one per column, the rows of the records one behind the other, in the schema's dtypes, C-contiguous;
    `words`: the rows' own, if columns of text have codes already;
    `small`: sections of the small state (JSON) that changed;
    `finished`: the open episode that this ends;
    `next_observations`: of the newest rows, for `Successors`;
    `sync`: whether durability "power" applies; else a later sync makes it durable.
    """

    records: Sequence[NewRecord]
    where: str
    schema: Schema | None = None
    arrays: Sequence[Array] = ()
    words: Words | None = None
    small: Mapping[str, Any] | None = None
    finished: str | None = None
    next_observations: Values | None = None
    sync: bool = True

    @classmethod
    def of_end(
        cls, part: PartOf, flags: int, where: str, data: bytes = b"", small: Mapping[str, Any] | None = None
    ) -> Commit:
        """Return the end of a chain whose parts are all stored; `part` would come next."""
        return cls([NewRecord(0, data, flags, part._replace(is_last=True), RETIRE)], where, small=small)


class Committer(Handle):
    """A handle that makes commits: what is in memory, and its files, after each. The base of `Store`, which says who
    may write, and when. `power`: whether each commit is synced; `storage`: how new columns are stored."""

    def __init__(
        self, disk: Disk, folder: str, manifest: Manifest, mapped: bool, power: bool, storage: Storage
    ) -> None:
        super().__init__(disk, folder, manifest, mapped)
        self.ring = manifest.ring
        self.power = power and not disk.volatile
        self._storage: Storage = storage
        self._are_numbered = manifest.kind == TRANSITIONS
        self._stale = True
        """Whether memory and files may differ: an interrupt or an error came in the middle of a change."""
        self._torn_memory = False
        """Whether memory does not even agree with itself."""
        self._sync_soon: Callable[[], None] | None = None
        """Called before each commit that the background makes durable."""
        self._group: OpenGroup | None = None
        self._spent: StepFile | None = None
        """The file of a group that is committed, for the next one."""
        self._successors = Successors(self.home)

    def commit_now(self, files: CommitFiles, new: Commit, stored: list[NewRecord] | None = None) -> None:
        """Make a commit, in the order of docs/reference/on-disk-format.md. The caller keeps others out.

        Each record counts whole or not at all, as if it came alone. After an error those in `stored` count.
        """
        records, schema, arrays, rows = new.records, new.schema, new.arrays, self.rows
        start, need, begun = self.committed_head, 0, None
        stop, words = start, [b""] * len(records)
        sums: list[list[int]] = [[]] * len(records)
        if schema is not None:
            # 1. Check, convert.
            if new.words is not None:
                words = [new.words.pack()]
            elif schema.texts:
                arrays, own = coded(schema, list(arrays), [one.length for one in records])
                words = [each.pack() for each in own]
            for at, one in enumerate(records):
                if one.length > _MOST_STEPS or len(words[at]) + len(one.data) > _MOST_DATA or one.part is not None:
                    self._refuse_large(one, len(words[at]) + len(one.data), new.where)
            if len(records) > 1:
                _refuse_far(records, words, new.where)
            if rows is None or rows.schema is not schema:
                rows = self._rows_for(files, schema, new.where)
            if self._are_numbered:
                before = partial(self._numbers_of, rows)
                arrays, begun = numbered(schema.names, arrays, start, self.next_ordinal, before)
            # 2. Reserve, and retire first what is live there.
            stop = Position(start + len(arrays[0]))
            rows.reserve(start, len(arrays[0]))
            need = self.ring.overwritten(stop)
            if need > self.tail:
                self._retire(files, need)
        if self._sync_soon is not None:
            self._sync_soon()
        self._stale = True
        # 3. Sync the table, if the disk still calls these rows or the slot live.
        files.protect(need, self.seq + 1, files.state)
        # 4. Rows, blobs and next observations.
        if rows is not None and schema is not None:
            is_large = len(arrays[0]) * rows.row_nbytes >= _HELPED_NBYTES
            helped = begin(partial(_sums_of, arrays, records)) if is_large else None
            rows.write(start, arrays, self._is_live)
            sums = _sums_of(arrays, records) if helped is None else helped.end()
        files.carry(new.small)
        if new.finished is not None:
            files.carry_finished(new.finished)
        segment, places = files.write_blobs(self.seq + len(records), sums, [one.data for one in records], words)
        if new.next_observations is not None:
            self._successors.write(stop, combine(sums[0]), new.next_observations)
            if self.power:
                with files.poisoning():
                    self._successors.sync()
        durable = self.power and new.sync
        if durable:
            files.sync_written(rows)
        for at, one in enumerate(records):
            if at:
                files.publish_again()  # state.bin may lag by one record, not by two
                files.protect(0, self.seq + 1, files.state)
            # 5. The record. 6. The state.
            record = self._record(one, start, combine(sums[at]), segment, places[at], begun)
            files.append(record, durable and at == len(records) - 1)
            self._remember(record)
            start = record.head
            if stored is not None:
                stored.append(one)
        if new.next_observations is not None:
            self._successors.turn()
        if durable:
            files.drop_retired()
        self._stale = False

    def _record(
        self, one: NewRecord, start: Position, rows_sum: int, segment: int, place: BlobPlace, begun: int | None
    ) -> Record:
        """Return the record that comes next: `begun` episodes begin in it, if its rows are of many."""
        seq, length, part = self.seq + 1, one.length, one.part
        tail, first = self._after(seq, Position(start + length), self.tail if one.tail is None else one.tail)
        ordinal, behind, bits, in_chain = self.next_ordinal, 1 if length else 0, 0, _NO_PART
        if part is not None:
            in_chain, bits = part.place(start), part.bits
            if part.chain != NONE and length:
                ordinal, behind = part.ordinal, self.next_ordinal - part.ordinal
        if begun is not None:
            behind, bits = begun, MANY
        elif one.data and names_origin(one.data):
            bits |= COPIED
        offset, size, blob_sum = place
        moment = max(time.time_ns(), self.time)  # never falls, whatever the clock does
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
            moment,
            *in_chain,
            one.kind,
            one.flags,
            bits,
            behind,
        )

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

    def _remember(self, record: Record) -> None:
        """Move memory to the state after `record`."""
        with self.lock:
            self._torn_memory = True
            if record.start < self.head:
                self._group = None  # its rows are committed
            self._apply_next(record)
            self._torn_memory = False

    def _retire(self, files: CommitFiles, need: int) -> None:
        """Retire the oldest episodes up to position `need`, durably: rows below it will be overwritten."""
        tail = self.live.tail_for(need, 0)
        self.commit_now(files, Commit([NewRecord(kind=RETIRE, tail=self.head if tail < 0 else tail)], ""))
        if not self.power:
            files.sync_table(files.state)
        files.publish_again()

    def _is_live(self, slot: int, count: int) -> bool:
        """Tell whether a live episode has any of `count` rows from `slot` on (no wrap). O(log episodes)."""
        starts, lengths = self.live.starts, self.live.lengths
        at = self.tail + (slot - self.tail) % self.ring.rows
        for first in (at, at - self.ring.rows):
            last = int(np.searchsorted(starts, first + count)) - 1
            if count and last >= 0 and starts[last] + lengths[last] > first:
                return True
        return False

    def _refuse_large(self, one: NewRecord, nbytes: int, where: str) -> None:
        """Raise InputError if a record can't say how large an episode is. Nothing was changed."""
        part = one.part or PartOf()
        behind = 0 if part.chain == NONE else self.next_ordinal - part.ordinal
        for size, most, what in (
            (one.length, _MOST_STEPS, "steps"),
            (nbytes, _MOST_DATA, "bytes of episode data and text"),
            (part.number, MOST_U4, "parts"),
            (part.lane, MOST_U4, "as its lane"),
            (behind, MOST_U4, "episodes that began since its first part"),
        ):
            if size > most:
                raise InputError(
                    f"{where}: an episode with {size} {what}, expected at most {most}; end it, and begin another"
                )

    def _rows_for(self, files: CommitFiles, schema: Schema, where: str) -> Rows:
        """Return the columns; make them if this is the first episode."""
        if self.rows is None:
            self._stale = True
            self.begin_columns(files, schema, locked=False)
        elif self.rows.schema is not schema and self.rows.schema != schema:
            raise InputError(f"{where}: schema mismatch: expected {self.rows.schema.names}, got {schema.names}")
        assert self.rows is not None
        return self.rows

    def begin_columns(self, files: CommitFiles, schema: Schema, locked: bool) -> None:
        """Make the columns, and the manifest that names them. `locked`: by an argument, so that they stay."""
        manifest = self.manifest.with_columns(schema, choose(self._storage, schema, "ReplayBuffer"), locked)
        warn_of_space(self.disk, self.folder, manifest)
        manifest = make_columns(self.disk, self.paths, manifest, files.sync_folder)
        rows = self.open_rows(manifest, self.head)
        self.manifest = manifest
        self._adopt(rows)

    def open_rows(self, manifest: Manifest, head: int) -> Rows:
        """Return the columns that a manifest names, open for writing."""
        assert manifest.schema is not None
        columns = manifest.columns(self.disk, self.paths.columns)
        return Rows(manifest.schema, columns, self.ring).open(write=True, head=head, mapped=self.mapped)

    def _numbers_of(self, rows: Rows, positions: Array) -> Array:
        """Return the numbers of the episodes that rows before a commit are of, as `numbered` asks for them."""
        numbers, *ended = (rows.take_stored(name, positions) for name in (NUMBERS, *ENDS))
        ended.append(~self.live.has(positions))
        known: Array = np.where(np.any(ended, 0), UNNUMBERED, numbers)
        return known

    # -- groups ------------------------------------------------------------------------------

    @property
    def pending(self) -> OpenGroup | None:
        """The rows of the open group."""
        return self._group

    @property
    def committed_head(self) -> Position:
        """One past the newest committed row."""
        group = self._group
        return self.head if group is None else group.start

    def begin_group(
        self, files: CommitFiles, count: int, limit: int, unlinked: Unlinked | None, earlier: Callable[[], Values]
    ) -> OpenGroup:
        """Begin a group for `limit` rows, at least for the first call's `count`."""
        rows, start, disk = self.rows, self.head, self.disk
        assert rows is not None
        rows.reserve(start, limit)
        in_place = None
        if disk.volatile:
            first = self.ring.pieces(start, limit)[0][1]
            if first >= count and not rows.schema.texts:  # it ends where the ring wraps
                limit, in_place = first, rows.writable(start, first)
        group = OpenGroup(rows.schema, unlinked, start, limit, follows(self.newest_record()), earlier(), in_place)
        if not disk.volatile:
            spent, self._spent = self._spent, None
            try:
                group.begin(disk, self.paths.open, spent)
                self._sync_group(files, group)
            except BaseException:
                remove_file(group.file)
                raise
        if not group.is_in_place:
            rows.show(pending=rows_beside(self))
        self._group = group
        return group

    def _sync_group(self, files: CommitFiles, group: OpenGroup) -> None:
        """Make the rows of a group durable, at durability "power"."""
        if self.power and group.file is not None:
            with files.poisoning():
                group.file.sync()

    def show_pending(self, group: OpenGroup) -> None:
        """Let memory show the rows of the open group. Holds `lock`."""
        self._torn_memory = True
        if self.head > group.start:  # some are shown already
            self.live.grow(group.count)
        else:
            self.live.append(group.start, group.count, origin=self.next_ordinal)
        self.head = Position(group.start + group.count)
        self._torn_memory = False

    def commit_group(self, files: CommitFiles, where: str, small: Mapping[str, Any] | None) -> None:
        """Commit the rows of the open group, if there is one."""
        group = self._group
        if group is None:
            return
        if group.count:
            kept, newest = group.kept()
            one = NewRecord(group.count, encode_data(kept, where))
            arrays = group.columns()
            new = Commit([one], where, group.schema, arrays, group.words, small, next_observations=newest)
            self.commit_now(files, new)
        self._group, self._spent = None, group.file

    # -- next observations -------------------------------------------------------------------

    def find_successors(self) -> None:
        """Find the next observations of the newest rows, which the next commit does not overwrite."""
        newest = self.newest_rows() if self._are_numbered else None
        if newest is not None:
            with contextlib.suppress(CorruptError):  # who reads them says so
                self._successors.find(newest.head, newest.rows_sum)

    def put_next_observations(self, values: Values) -> None:
        """Write the next observations of the newest rows, for a ring in RAM that was copied."""
        newest = self.newest_rows()
        if newest is not None:
            self._successors.write(newest.head, newest.rows_sum, values)
            self._successors.turn()

    def newest_record(self) -> Record | None:
        """Return the newest record, None if there is none."""
        return self.table.read(self.seq) if self.seq else None

    def newest_rows(self) -> Record | None:
        """Return the record of the newest committed rows, None if there are none. O(log episodes)."""
        with self.lock:
            live = self.live
            last = int(live.starts.searchsorted(self.committed_head)) - 1
            return self.record_of(Ordinal(live.first + last)) if last >= 0 else None


def rows_beside(handle: Committer) -> Callable[[], OpenGroup | None]:
    """Return a function that returns the open group if its rows are not in the columns. It does not keep the handle."""
    known = weakref.ref(handle)

    def group() -> OpenGroup | None:
        alive = known()
        group = None if alive is None else alive.pending
        return None if group is None or group.is_in_place else group

    return group


def remove_file(file: StepFile | None) -> None:
    """Remove the file of a group; the next opening does it if this fails."""
    if file is not None:
        with contextlib.suppress(OSError, ReplacedError):
            file.remove()


def _refuse_far(records: Sequence[NewRecord], words: Sequence[bytes], where: str) -> None:
    """Raise InputError if the blobs of several records, which lie side by side, would lie too far in their segment for
    an opening."""
    nbytes = sum(map(len, words)) + sum(len(one.data) for one in records)
    if nbytes > _MOST_DATA:
        raise InputError(
            f"{where}: {len(records)} episodes with {nbytes} bytes of episode data and text, expected at most "
            f"{_MOST_DATA} together; store them one by one"
        )


def _sums_of(arrays: Sequence[Array], records: Sequence[NewRecord]) -> list[list[int]]:
    """Return for each record the checksum of each column's rows."""
    if len(records) == 1:
        return [[sum_of(values) for values in arrays]]
    stops = np.cumsum([one.length for one in records]).tolist()
    return [
        [sum_of(values[stop - one.length : stop]) for values in arrays]
        for one, stop in zip(records, stops, strict=True)
    ]


def numbered(
    names: Sequence[str], arrays: Sequence[Array], start: int, next_ordinal: int, before: Callable[[Array], Array]
) -> tuple[list[Array], int]:
    """Return the columns of a commit with all numbers, and how many episodes begin in it.

    Args:
        names: of the columns.
        arrays: the columns.
        start: the position of the first row.
        next_ordinal: the next ordinal to give.
        before: returns the numbers of the rows at some positions before `start`; less than 0 where an episode ended, or
            no row is.

    Example:
        >>> rows = np.array([-2, -2, 2, 2, 2, 2]), np.array([0, 0, 1, 0, 0, 0], bool), np.zeros(6, bool), np.full(6, -1)
        >>> names = ["lanes", "dones", "truncated", "_episode"]
        >>> columns, begun = numbered(names, rows, 0, 4, lambda at: -np.ones(len(at)))
        >>> columns[3].tolist(), begun
        ([4, 5, 4, 5, 6, 5], 3)
    """
    by_name = dict(zip(names, arrays, strict=True))
    if (by_name[NUMBERS] < 0).any():
        by_name[NUMBERS] = _numbers(by_name, start, next_ordinal, before)
    begun = int(by_name[NUMBERS].max()) + 1 - next_ordinal
    return list(by_name.values()), max(0, begun)


def _numbers(columns: dict[str, Array], start: int, next_ordinal: int, before: Callable[[Array], Array]) -> Array:
    lanes = columns[LANES].astype(np.int64)
    number, ordinals = np.arange(len(lanes)), np.full(len(lanes), UNNUMBERED)
    first = np.where(lanes > 0, number - lanes, number)
    earlier = np.flatnonzero(first < 0)
    if len(earlier):
        ordinals[earlier] = before(start + first[earlier])
        first[earlier] = earlier
    ended = columns[ENDS[0]] | columns[ENDS[1]]
    first = np.where(ended[first] & (first != number), number, first)
    begins = (first == number) & (ordinals < 0)
    ordinals[begins] = next_ordinal + np.arange(int(begins.sum()))
    while True:  # each round doubles the distance that it jumps
        further = first[first]
        if (further == first).all():
            return np.ascontiguousarray(ordinals[first], "<i8")
        first = further
