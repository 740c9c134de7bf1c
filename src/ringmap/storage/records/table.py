"""The episode table: one fixed-size record per commit.

    seq   1   2   3   4 ...         record of commit s in slot s % len(table)
         [ep][ep][retire][ep]

A record says what its commit changed: which rows were added, which position is the
oldest live one after it (`tail`), and which record is the oldest live one (`first`).
So the newest record alone defines the live state, and [first, seq] are its records.

An episode has an ordinal, its number among all episodes of the ring, which is given with its first commit, stands in
all its parts, and is never given again. `ordinal + behind` is the next one to give, as of each record; a record without
rows has it as its `ordinal`.

Invariants of the live range: numbers run without a gap; each
record starts at the head of the one before it; tails, times and `ordinal + behind` never decrease;
every record's checksum, salted with the buffer's uuid, holds.
Not here: rows, the order of writes and syncs (commit.py, files.py), the state after a crash (recovery.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash

from ringmap.errors import CorruptError
from ringmap.storage.columns.memmap import HEADER_NBYTES, npy_header
from ringmap.storage.disk.files import Disk, File, closed
from ringmap.storage.ring.links import NO_PART, NONE, Part, Parts
from ringmap.storage.ring.ring import Position

__all__ = [
    "CLEAR",
    "COPIED",
    "DROPPED",
    "END",
    "EPISODE",
    "INTERRUPTED",
    "LAST_ORDINAL",
    "LAST_TIME",
    "MOST",
    "MOST_U4",
    "PART",
    "RECORD",
    "RETIRE",
    "SPARE_SLOTS",
    "TERMINATED",
    "TRUNCATED",
    "EpisodeTable",
    "PartOf",
    "Record",
    "are_live",
    "ends_of",
    "next_ordinals",
    "origins_of",
    "parts_of",
]

Array = np.ndarray[Any, np.dtype[Any]]

EPISODE, RETIRE, CLEAR = 1, 2, 3
"""Kinds of record. A record of any other kind is from a newer ringmap."""

MOST = 1 << 62
"""Positions and numbers are below this: results computed from them fit in 64 bits."""

TERMINATED, TRUNCATED, INTERRUPTED, DROPPED = 1, 2, 4, 0xF8
"""Flags of an episode's record. A dropped episode was damaged: it is never returned, its positions remain.

DROPPED is set in a record that is already durable, and is the only part that ever changes in it. So
it is in one byte, which no crash can tear, and outside the checksum, which continues to match the
rest; it has five bits, so that a flipped bit is detected.
"""

LAST_ORDINAL = 1 << 55
"""No ordinal beyond it is left out: one so large was forged, and the next ones must stay possible."""

LAST_TIME = (1 << 63) - 1
"""The last time that a record can have, in ns since 1970."""

MOST_U4 = (1 << 32) - 1
"""The greatest value of `length`, `number`, `lane`, `behind` and the place of a blob."""

PART, END, COPIED, MANY = 1, 2, 4, 8
"""In `part`: the record is of a part of a chain, and `chain`, `step`, `previous`, `number` and `lane` count;
its chain has ended; its episode data name the ring and the number that the episode was first stored as; its rows are of
many episodes, of which `behind` begin in it, with ordinals from `ordinal` on. A record without rows that has the first
two ends a chain whose last part is stored already."""

SPARE_SLOTS = 64
"""Slots of the table beyond one per row, for retire and clear records."""


class Record(NamedTuple):
    """The result of one commit: the fields of a record in the table, in order, without its checksum. See the module."""

    seq: int
    start: Position
    tail: Position
    first: int
    rows_sum: int = 0
    blob_sum: int = 0
    length: int = 0
    blob_segment: int = 0
    blob_offset: int = 0
    blob_size: int = 0
    ordinal: int = 0
    time: int = 0
    chain: int = NONE
    step: int = 0
    previous: int = NONE
    number: int = 0
    lane: int = 0
    kind: int = EPISODE
    flags: int = 0
    part: int = 0
    behind: int = 0

    @property
    def head(self) -> Position:
        """One past the newest position after this commit."""
        return Position(self.start + self.length)

    @property
    def next_ordinal(self) -> int:
        """The ordinal of the next episode that begins."""
        return self.ordinal + self.behind

    @property
    def origin(self) -> int:
        """The ordinal, with its bits inverted where the blob says what the episode was first stored as."""
        return ~self.ordinal if self.part & COPIED else self.ordinal

    @property
    def link(self) -> Part:
        """Of which chain it stores a part, and which part."""
        return (self.chain, self.step, self.lane, self.previous) if self.part & PART else NO_PART

    @property
    def live(self) -> bool:
        """Whether this is a stored episode, judged by the record alone."""
        return self.kind == EPISODE and not self.flags & DROPPED

    @classmethod
    def of(cls, row: Any) -> Record:
        """Read a record from one element of a RECORD array."""
        return cls(*row.item()[:-1])


_PACK = struct.Struct("<QqqQQQIIIIQqqqqIIBBHIQ")
"""The type of each field of a record, and of its checksum."""

RECORD = np.dtype(
    [(name, np.dtype(f"<{kind}").str) for name, kind in zip((*Record._fields, "check"), _PACK.format[1:], strict=True)]
)
"""128 bytes; a record never crosses a page, so a write of one is never torn by a kill."""

_NBYTES = RECORD.itemsize
_CHECKED = struct.Struct("120s8x")
_FLAGS_BYTE = 113
_WALKED_FIELDS = "start", "kind", "flags", "seq"
_WALKED = 4096
"""Records read at a time in a walk over all: they stay in the cache."""
_BLOCK = 16_384
"""Records read and written at a time."""


class PartOf(NamedTuple):
    """Which part of a chain a commit stores: see `Record`.

    `chain`: the position of the chain's first step, NONE for its first part; `step`: its steps that are stored already;
    `number`: its parts that are; `lane`: free for the caller; `is_last`: whether the chain ends with it; `previous`:
    the position of the first step of the part before, NONE for the first part; `ordinal`: of the chain's episode, for a
    later part.
    """

    chain: int = NONE
    step: int = 0
    previous: int = NONE
    number: int = 0
    lane: int = 0
    is_last: bool = False
    ordinal: int = 0

    @classmethod
    def of(cls, record: Record) -> PartOf | None:
        """Return that of a record; None if it is of an episode that is whole."""
        if not record.part & PART:
            return None
        place = record.chain, record.step, record.previous, record.number, record.lane
        return cls(*place, bool(record.part & END), record.ordinal)

    def next(self, start: int, length: int, ordinal: int) -> PartOf:
        """Return the part that follows this one, which has `length` steps from position `start` on, and, if it is the
        first one, got this ordinal."""
        chain, ordinal = (start, ordinal) if self.chain == NONE else (self.chain, self.ordinal)
        return PartOf(chain, self.step + length, start, self.number + 1, self.lane, ordinal=ordinal)

    def place(self, start: int) -> tuple[int, int, int, int, int]:
        """Return the fields `chain` to `lane` of a record that begins at position `start`."""
        chain = start if self.chain == NONE else self.chain
        return chain, self.step, self.previous, self.number, self.lane

    @property
    def bits(self) -> int:
        """The field `part` of its record."""
        return PART | END * self.is_last


def are_live(records: Array, tail: int) -> Array:
    """Tell which records are stored episodes from position `tail` on, judged by the records alone."""
    kept = (records["kind"] == EPISODE) & (records["flags"] & DROPPED == 0)
    live: Array = kept & (records["start"] >= tail)
    return live


def parts_of(records: Array) -> Parts | None:
    """Return the chains of the records of episodes; None if none is of a part."""
    is_part = records["part"] & PART != 0
    if not is_part.any():
        return None
    lanes = records["lane"].astype(np.int64)  # as of 4 bytes, NONE would be their greatest number
    lanes[~is_part] = NONE
    return Parts(records["chain"], records["step"], lanes, records["previous"])


def origins_of(records: Array) -> Array:
    """Return the ordinal of each record, int64, with its bits inverted where the blob says what the episode was first
    stored as."""
    ordinals: Array = records["ordinal"].astype(np.int64)
    part = records["part"]
    if part.any():
        copied = part & COPIED != 0
        ordinals[copied] = ~ordinals[copied]
    return ordinals


def next_ordinals(records: Array) -> Array:
    """Return the ordinal, as of each record, of the next episode that begins, int64."""
    found: Array = records["ordinal"].astype(np.int64) + records["behind"]
    return found


def ends_of(records: Array) -> list[tuple[int, int]]:
    """Return the chains that these records end, and the number of the record of each."""
    found = records[(records["part"] & END != 0) & (records["flags"] & DROPPED == 0)]
    return list(zip(found["chain"].tolist(), found["seq"].tolist(), strict=True))


class EpisodeTable:
    """The table in its file, `np.load`-able as a structured array, of so many slots. `uuid`: 16 bytes that salt the
    checksums, so that a foreign table has no valid record; `mapped`: whether walks use a map; otherwise they read."""

    def __init__(self, file: File, slots: int, uuid: bytes, mapped: bool = True) -> None:
        self.slots = slots
        self._file = file
        self._seed = xxhash.xxh3_64_intdigest(uuid)
        self._walk: list[Array] | None = None
        if mapped:
            # For walks over existing records; the rest of the map is never touched, see `_read`.
            view = file.map()[HEADER_NBYTES : self.nbytes(slots)].view(RECORD)
            self._walk = [view[name] for name in _WALKED_FIELDS]

    @staticmethod
    def nbytes(slots: int) -> int:
        """Return the exact size of the file."""
        return HEADER_NBYTES + slots * _NBYTES

    @classmethod
    def create(cls, disk: Disk, path: str, slots: int) -> None:
        """Make an empty table, at its full (sparse) size, or restore size and header of one that is there; and sync."""
        nbytes = cls.nbytes(slots)
        if not disk.exists(path):
            disk.create(path, nbytes).close()
        elif disk.size(path) != nbytes:
            disk.extend(path, nbytes)
        with closing(disk.open(path, write=True)) as file:
            file.write(npy_header(RECORD.descr, (slots,)), 0)
            file.sync()

    @classmethod
    def open(cls, disk: Disk, path: str, slots: int, uuid: bytes, write: bool, mapped: bool = True) -> EpisodeTable:
        """Open the table after comparing its size and header with the expected ones."""
        for fault in cls.faults(disk, path, slots):
            raise CorruptError(f"{path}: {fault}; run ringmap.check on the buffer")
        return cls(disk.open(path, write), slots, uuid, mapped)

    @classmethod
    def faults(cls, disk: Disk, path: str, slots: int) -> list[str]:
        """Return the faults of the file as a whole, in words; records are not read."""
        if faults := disk.size_faults(path, "episode table", cls.nbytes(slots)):
            return faults
        with closing(disk.open(path)) as file:
            if file.read(HEADER_NBYTES, 0) != npy_header(RECORD.descr, (slots,)):
                return [f"header is not that of {slots} records"]
            return []

    # -- one record --------------------------------------------------------------------------

    def write(self, record: Record) -> None:
        """Write a record into its slot. O(1)."""
        packed = _PACK.pack(*record, 0)
        data = packed[:-8] + self._check_of(packed).to_bytes(8, "little")
        self._file.write(data, HEADER_NBYTES + record.seq % self.slots * _NBYTES)

    def zero(self, slot: int) -> None:
        """Clear a slot."""
        self._file.write(bytes(_NBYTES), HEADER_NBYTES + slot * _NBYTES)

    def read(self, seq: int) -> Record | None:
        """Return record `seq`, or None if its slot holds anything else. O(1)."""
        data = self._read(seq % self.slots)
        fields = _PACK.unpack(data)
        if fields[0] != seq or fields[-1] != self._check_of(data):
            return None
        return Record(*fields[:-1])

    def start_of(self, seq: int) -> Position:
        """Return the start of record `seq`, unchecked: for walking a checked range."""
        (starts, *_), slot = self._peek(seq)
        return Position(int(starts[slot]))

    def first_live(self, seq: int, stop: int, tail: Position) -> int:
        """Return the first record in `[seq, stop)` of an episode at or after `tail`, else `stop`. O(skipped)."""
        while seq < stop:
            (starts, kinds, flags, _), slot = self._peek(seq)
            if starts[slot] >= tail and kinds[slot] == EPISODE and not flags[slot] & DROPPED:
                return seq
            seq += 1
        return stop

    def _peek(self, seq: int) -> tuple[Sequence[Any], int]:
        """Return the columns of starts, kinds, flags and numbers, unchecked, and the place of record `seq` in them."""
        slot, walk = seq % self.slots, self._walk
        if walk is not None:
            return walk, slot
        row = np.frombuffer(self._read(slot), RECORD)
        return [row[name] for name in _WALKED_FIELDS], 0

    def find(self, start: int, first: int, last: int) -> Record | None:
        """Return the stored episode's record that starts at a position, among records `[first, last]`; None if it is
        not there. O(log n).

        Records that a writer has overwritten meanwhile count as older than all that are left. While it overwrites one
        that is looked at, a record that is there may be missed: `search` never misses one.
        """
        low, high, walk = first, last, self._walk
        while low < high:  # the first record that starts there
            middle = (low + high) // 2
            (starts, _, _, numbers), slot = self._peek(middle) if walk is None else (walk, middle % self.slots)
            if starts[slot] < start or numbers[slot] != middle:  # or it was overwritten; unchecked
                low = middle + 1
            else:
                high = middle
        for number in range(low, last + 1):
            record = self.read(number)
            if record is None or record.start != start:
                return None
            if record.live:
                return record
        return None

    def search(self, start: int, first: int, last: int) -> Record | None:
        """Return what `find` does, after reading every record. O(n), vectorised."""
        records, valid = self.read_range(first, last)
        stored = valid & (records["start"] == start) & are_live(records, start)
        which = np.flatnonzero(stored)
        return Record.of(records[which[0]]) if len(which) else None

    def is_empty(self, slot: int) -> bool:
        """Tell whether a slot was never written, or was cleared."""
        return not any(self._read(slot))

    def sync(self) -> None:
        """Return once every written record is durable on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Release the descriptor and the map; a running read keeps them until it is done."""
        self._file, self._walk = closed(self._file.path), None

    # -- many records ------------------------------------------------------------------------

    def count(self, first: int, last: int) -> int:
        """Return the number of records `[first, last]`.

        Raises:
            CorruptError: there are more than fit in the table: the number is wrong, or forged.
        """
        if last + 1 - first > self.slots:
            raise CorruptError(
                f"{self._file.path}: records {first} to {last} do not fit in its {self.slots} slots, so "
                "whatever says that they are stored is damaged; run ringmap.check on the buffer"
            )
        return max(0, last + 1 - first)

    def read_range(self, first: int, last: int) -> tuple[Array, Array]:
        """Return a copy of records `[first, last]` and whether each one is valid. O(n), vectorised. Raises what `count`
        does."""
        count = self.count(first, last)
        records, valid = np.empty(count, RECORD), np.empty(count, np.bool_)
        for at in range(0, len(records), _BLOCK):
            block = records[at : at + _BLOCK]
            self._fill(block, first + at)
            valid[at : at + _BLOCK] = self.valid(block, first + at)  # while it is in the cache
        return records, valid

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, Array]]:
        """Yield records `[first, last]` as they stand in the file, unchecked, some at a time: the number of the first
        of them, and these, after the record before them except in the first block. The next block goes over each. O(n).

        Read, not mapped: into memory that stays in the cache this takes no longer than the faults of a map.
        """
        room = np.empty(1 + _WALKED, RECORD)
        for number in range(first, last + 1, _WALKED):
            count = min(_WALKED, last + 1 - number)
            room[0] = room[-1]
            self._fill(room[1 : 1 + count], number)
            yield number, room[1 if number == first else 0 : 1 + count]

    def write_many(self, records: Array) -> None:
        """Write records of consecutive numbers into their slots, under this table's own salt. Vectorised."""
        at = 0
        while at < len(records):
            slot = int(records["seq"][at]) % self.slots
            block = records[at : at + min(_BLOCK, self.slots - slot)].copy()
            block["check"] = self._checks(block)
            self._file.write(block.view(np.uint8).data, HEADER_NBYTES + slot * _NBYTES)
            at += len(block)

    def scan(self) -> tuple[Array, Array, Array]:
        """Return a copy of every record ever written, whether it is valid in its slot, and the slot."""
        found, valid, slots = [np.empty(0, RECORD)], [np.empty(0, np.bool_)], [np.empty(0, np.int64)]
        at = 0
        while at < self.slots:
            # Most of a young table was never written: holes, which are not read.
            data_at = self._file.next_data(HEADER_NBYTES + at * _NBYTES) - HEADER_NBYTES
            at = max(at, data_at // _NBYTES)
            block = np.empty(max(0, min(_BLOCK, self.slots - at)), RECORD)
            self._fill(block, at)
            where = np.flatnonzero(block["seq"])
            if len(where) < len(block):
                where = np.flatnonzero(_words(block).any(axis=1))
                block = block[where]
            found.append(block)
            valid.append(self._checks(block) == block["check"])
            slots.append(where + at)
            at += _BLOCK
        # Without dtype=, NumPy compares every field of the records.
        records, slot = np.concatenate(found, dtype=RECORD), np.concatenate(slots)
        is_there = (records["seq"] % np.uint64(self.slots) == slot) & (records["seq"] > 0)
        return records, np.concatenate(valid) & is_there, slot

    def valid(self, records: Array, first: int) -> Array:
        """Tell which records, read from the place of those from a number on, are these. O(n), vectorised."""
        numbers = np.arange(first, first + len(records), dtype=np.uint64)
        found: Array = (self._checks(records) == records["check"]) & (records["seq"] == numbers)
        return found

    # -- bytes: by reads, since a map of a hole takes memory on a full tmpfs ----------------------

    def _read(self, slot: int) -> bytes:
        """Return the bytes of one record."""
        data = self._file.read(_NBYTES, HEADER_NBYTES + slot * _NBYTES)
        return data if len(data) == _NBYTES else self._refuse_cut()

    def _fill(self, records: Array, number: int) -> None:
        """Read the records from a number on into an array."""
        at = 0
        while at < len(records):
            slot = (number + at) % self.slots
            run = records[at : at + self.slots - slot].view(np.uint8).data
            if self._file.read_into(run, HEADER_NBYTES + slot * _NBYTES) < len(run):
                self._refuse_cut()
            at += self.slots - slot

    def _refuse_cut(self) -> NoReturn:
        raise CorruptError(
            f"{self._file.path}: episode table was cut since it was opened; run ringmap.check on the buffer"
        )

    def _checks(self, records: Array) -> Array:
        """Return the checksum that each record should have."""
        seed = self._seed
        checks = [xxhash.xxh3_64_intdigest(data, seed) for (data,) in _CHECKED.iter_unpack(records.view(np.uint8).data)]
        for at in (records["flags"] & DROPPED).nonzero()[0].tolist():
            checks[at] = self._check_of(records[at].tobytes())
        return np.array(checks, np.uint64)

    def _check_of(self, data: bytes) -> int:
        if data[_FLAGS_BYTE] & DROPPED:
            data = data[:_FLAGS_BYTE] + bytes((data[_FLAGS_BYTE] & ~DROPPED & 0xFF,)) + data[_FLAGS_BYTE + 1 :]
        return xxhash.xxh3_64_intdigest(_CHECKED.unpack(data)[0], self._seed)


def _words(records: Array) -> Array:
    """Return the records as 64-bit words, one row each. No copy."""
    return records.view("<u8").reshape(len(records), _NBYTES // 8)
