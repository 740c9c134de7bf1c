"""Scan: what a directory holds, whether or not it can be opened.

    parts -> state.bin, episode table -> the newest state -> records [first, seq] -> rows, blobs

What a live writer changes meanwhile is told from damage as a reader does it: look, read, look again.

Invariants: reads only, and plainly; believes nothing without a checksum.
Not here: where the files lie (parts.py), what is reported (faults.py), what is done about it (salvage.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from ringmap.errors import DamageError
from ringmap.storage.columns.base import Column
from ringmap.storage.columns.rows import UNREADABLE, combine
from ringmap.storage.columns.text import unpack
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.threads import pool
from ringmap.storage.inspect.parts import Parts
from ringmap.storage.inspect.raw_files import Files, Part
from ringmap.storage.read.recovery import (
    Progress,
    SmallState,
    find,
    is_clean,
    possible,
    small_state_of,
    small_states,
)
from ringmap.storage.records.blobs import (
    LARGEST_BLOB,
    LAST_SEGMENT,
    decode_blob,
    decode_data,
    segment_name,
)
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.names import DATA, MANIFEST, STATE, TABLE
from ringmap.storage.records.state import State
from ringmap.storage.records.table import DROPPED, EPISODE, MOST, RECORD, Record
from ringmap.storage.ring.ring import ORIGIN, Position

__all__ = ["Reached", "Scan"]

Array = np.ndarray[Any, np.dtype[Any]]

_LOOKS = 50
_PROOFS = 16
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Reached:
    """The newest state that anything vouches for. `by`: the file that does."""

    seq: int = 0
    first: int = 1
    tail: Position = ORIGIN
    head: Position = ORIGIN
    by: str = ""


class Scan:
    """What the directory of a buffer holds.

    Attributes:
        parts: which file is which.
        states: the two slots of state.bin; `shown`: the newer one that is valid.
        clean: whether the page cache vouches for what is shown.
        reached: the newest state.
        refused: the error with which an opening refuses this table and these states, None if it takes them.
        misled: that the newest record names the wrong one as the oldest, in words; empty if it does not.
        strays: numbers of records beyond the newest state.
        records: a copy of records `[first, seq]`; `valid`: which of them hold.

    Raises:
        UnknownFormatError, NewerVersionError: as for `Identity`.

    Cost: reads the table; rows and blobs are read by `verify` alone.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.files = Files(disk, folder)
        self.parts = Parts(self.files)
        self.states: tuple[State | None, State | None] = (None, None)
        self.shown: State | None = None
        self.clean = False
        self.reached = Reached()
        self.refused: DamageError | None = None
        self.misled = ""
        self.strays: list[int] = []
        self.records, self.valid = np.empty(0, RECORD), np.empty(0, np.bool_)
        self._columns: list[Column | None] = []
        self._segments: dict[str, str] | None = None
        if self.parts.manifest is not None:
            self._look()
            for index in range(len(self.parts.columns)):
                self._trust_chunks(index)
            self._columns = [self._opened(i) for i in range(len(self.parts.columns))]

    @property
    def manifest(self) -> Manifest:
        """The manifest, for a caller that knows that there is one."""
        assert self.parts.manifest is not None
        return self.parts.manifest

    # -- the newest state --------------------------------------------------------------------

    def look_at_states(self) -> tuple[State | None, State | None]:
        """Return both slots of state.bin; what stays torn is damage, and no write under way."""
        manifest, at = self.manifest, self.parts.state.at
        for _ in range(_LOOKS):
            states = self.files.states(at or STATE, manifest.uuid)
            one, other = states
            if one is not None and other is not None and abs(one.generation - other.generation) == 1:
                break
        return states

    def _look(self) -> None:
        manifest = self.manifest
        self.states = self.look_at_states()
        self.shown = shown = _newest(self.states)
        boot = self.files.disk.boot_id()
        self.clean = is_clean(shown, boot)
        self.table = self.files.table(self.parts.table.at or "", manifest.table_slots, manifest.uuid)
        records, whole, _ = self.table.scan()
        valid = whole & self._possible(records)
        try:
            found = find(self.table, shown, boot, manifest, self.files.path(TABLE))
        except DamageError as error:
            self.refused = error
        if self.clean and self.refused is None:  # the state that an opening takes
            self.reached = Reached(found.seq, found.first, found.tail, found.head, TABLE)
        else:
            self.reached = self._find_reached(records, valid)
        self.reached = self._with_oldest(self.reached)
        beyond = whole & (records["seq"] > self.reached.seq)
        self.strays = [int(number) for number in records["seq"][beyond]]
        if self.reached.seq:
            self.records, self.valid = self.table.read_range(self.reached.first, self.reached.seq)
            self.valid &= self._possible(self.records)

    def _with_oldest(self, reached: Reached) -> Reached:
        """Return a state with the right oldest record, where its neighbours show that the one it names is not."""
        first, tail = reached.first, reached.tail
        while first < reached.seq and (one := self.table.read(first)) and one.start < tail:
            first += 1
        while first > 1 and (one := self.table.read(first - 1)) and one.live and one.start >= tail:
            first -= 1
        if first != reached.first:
            self.misled = f"record {reached.seq} calls record {reached.first} the oldest live one, and {first} is"
        return replace(reached, first=first)

    def _possible(self, records: Array) -> Array:
        """Return which records can be those of such a ring: whoever forges one gives it a checksum that holds."""
        return possible(records, self.manifest.max_steps, self.table.slots)

    def _find_reached(self, records: Array, valid: Array) -> Reached:
        """Return what the newest record says, unless state.bin or the manifest know of a newer one."""
        manifest, shown = self.manifest, self.shown
        slots, max_steps = self.table.slots, manifest.max_steps
        claims = [Reached()]

        def claim(one: Reached) -> None:
            """Take it, unless there can't be such a state: only a forger claims it."""
            fits = one.seq - slots < one.first <= one.seq + 1
            if fits and 0 <= one.tail <= one.head <= min(one.tail + max_steps, MOST):
                claims.append(one)

        if valid.any():
            newest = records[valid][int(np.argmax(records["seq"][valid]))]
            record = Record.of(newest)
            claim(Reached(record.seq, record.first, record.tail, record.head, TABLE))
        need = 0
        if shown is not None:
            need = max(shown.mark, shown.seq if self.clean else 0)
            if shown.seq >= need > claims[-1].seq:
                claim(Reached(shown.seq, shown.first, shown.tail, shown.head, STATE))
        counts = manifest.table
        if {"seq", "first", "tail", "head"} <= counts.keys() and counts["seq"] > claims[-1].seq:
            seq, first = counts["seq"], counts["first"]
            tail, head = Position(counts["tail"]), Position(counts["head"])
            claim(Reached(seq, first, tail, head, MANIFEST))
        return claims[-1]

    def live(self) -> Array:
        """Return the valid records of the live episodes, oldest first; a damaged flag drops none."""
        r = self.records
        live = self.valid & (r["kind"] == EPISODE) & (r["flags"] & DROPPED != DROPPED)
        found: Array = r[live & (r["start"] >= self.reached.tail)]
        return found

    def newest(self, without: Collection[int] = ()) -> Record | None:
        """Return the record of the newest live episode, but for those `without`."""
        live = self.live()
        live = live[~np.isin(live["seq"], list(without))]
        return Record.of(live[-1]) if len(live) else None

    def misflagged(self) -> list[int]:
        """Return the numbers of the records whose flag of a dropped episode is damaged."""
        dropped = self.records["flags"] & DROPPED
        wrong = self.valid & (dropped != 0) & (dropped != DROPPED)
        return [int(number) for number in self.records["seq"][wrong]]

    def broken(self) -> list[tuple[int, int]]:
        """Return the runs `(first, last)` of live records that are damaged or missing.

        None that a writer retired or wrote over meanwhile.
        """
        numbers = self.reached.first + np.flatnonzero(~self.valid)
        if len(numbers):
            again = Scan(self.files.disk, self.files.folder) if self.has_moved() else self
            kept = [
                n
                for n in map(int, numbers)
                if n >= again.reached.first
                and not again._is_whole(n)
                and (again.table.read(n + again.table.slots) is None or not again.has_moved())
            ]
            numbers = np.array(kept, np.int64)
            if again is not self:
                again.close()
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        return [(int(run[0]), int(run[-1])) for run in np.split(numbers, breaks) if len(run)]

    def _is_whole(self, number: int) -> bool:
        records, valid = self.table.read_range(number, number)
        return bool((valid & self._possible(records)).all())

    def has_moved(self) -> bool:
        """Tell whether a writer has committed since this look."""
        return _newest(self.look_at_states()) != self.shown

    def newest_tail(self) -> int:
        """Return the position below which rows may have been overwritten by now."""
        again = _newest(self.look_at_states())
        if again is None or again == self.shown:
            return self.reached.tail
        return max(self.reached.tail, again.tail)

    # -- rows and blobs ----------------------------------------------------------------------

    def verify(self, progress: Progress | None = None) -> Iterator[tuple[Record, list[tuple[str, str]]]]:
        """Yield each live episode whose rows or blob are damaged, and what is: `(file, words)`.

        Columns that lie nowhere are left out. Reads every live byte, in
        parallel.
        """
        live = self.live()
        threads = pool(4, "ringmap-check")  # reads and xxhash release the GIL
        with threads or contextlib.nullcontext():
            for at in range(0, len(live), _BATCH):
                batch = [Record.of(row) for row in live[at : at + _BATCH]]
                found = (threads.map if threads is not None else map)(self.faults_of, batch)
                for record, faults in zip(batch, found, strict=True):
                    if faults and record.start >= self.newest_tail():
                        yield record, faults
                if progress is not None:
                    progress(min(at + _BATCH, len(live)), len(live))

    def faults_of(self, record: Record) -> list[tuple[str, str]]:
        """Return what is wrong with the bytes of a live episode, as `(file, words)`."""
        blob = self.blob(record)
        where = f"of record {record.seq} (positions {record.start} to {record.head})"
        why: dict[str, str] = {}
        sums = [
            None if column is None else self._sum(column, record, part.file, why)
            for column, part in zip(self._columns, self.parts.columns, strict=True)
        ]
        if blob is None:
            name = self.segment_file(record.blob_segment)
            gone = "damaged" if self.files.is_file(name) else "gone with its segment"
            faults = [(name, f"blob {where} is {gone}")]
            known = [s for s in sums if s is not None]
            if len(known) == len(sums) and combine(known) != record.rows_sum:
                faults += [(part.file, f"rows {where} may be damaged") for part in self.parts.columns]
            return faults
        name = self.segment_file(record.blob_segment)
        try:
            expected, _, data, packed = decode_blob(blob)
            decode_data(data)
            words = len(unpack(packed))
        except ValueError as error:
            return [(name, f"blob {where} does not make sense: {error}")]
        rows = [s for s in sums if s is not None]
        if len(rows) == len(sums) and combine(rows) == record.rows_sum:
            # A reader takes them, whatever the blob says of single columns.
            return self._strange_codes(record, words, where)
        if len(expected) != len(sums) or combine(expected) != record.rows_sum:
            return [(self.parts.table.file, f"record {record.seq} and its blob disagree")]
        return [
            (part.file, f"rows {where} are damaged{why.get(part.file, '')}")
            for part, found, want in zip(self.parts.columns, sums, expected, strict=True)
            if found is not None and found != want
        ]

    def _strange_codes(self, record: Record, words: int, where: str) -> list[tuple[str, str]]:
        """Return the columns of text in which a whole episode has codes beyond its words."""
        found, schema = list[tuple[str, str]](), self.manifest.schema
        if schema is None or not schema.texts:
            return found
        for column, part, spec in zip(self._columns, self.parts.columns, schema.columns, strict=True):
            if not spec.is_text or column is None:
                continue
            for slot, steps in self.manifest.ring.pieces(record.start, record.length):
                codes = np.frombuffer(b"".join(p for p in column.pieces(slot, steps) if isinstance(p, bytes)), "<i4")
                if len(codes) and not 0 <= codes.min() <= codes.max() < words:
                    found.append((part.file, f"text {where} is not among the {words} words of its commit"))
                    break
        return found

    def _trust_chunks(self, index: int) -> None:
        """Take a folder under the column's own name for it all the same if rows in it prove it.

        Its `zarr.json`, which says otherwise, is a file like any other, and may have been swapped alone.
        """
        part, one = self.parts.columns[index], self.manifest.column(index)
        if part.at == part.file or not one.is_known or not self.files.is_array(part.file):
            return
        if self._proves(index, part.file) and not self._proves(index, part.at):
            faults = one.at(self.files.disk, self.files.path(part.file)).faults()
            self.parts.columns[index] = Part(part.file, part.file, faults)

    def _proves(self, index: int, at: str | None) -> bool:
        """Tell whether what lies there has the rows of one of the newest episodes."""
        column = self._opened(index, at)
        found = False
        for row in self.live()[-_PROOFS:] if column is not None else ():
            record = Record.of(row)
            blob = self.blob(record)
            expected = [] if blob is None else self.sums_in(blob)
            assert column is not None
            found = found or expected[index : index + 1] == [self._sum(column, record, "", {})]
        if column is not None:
            column.close()
        return found

    def _opened(self, index: int, at: str | None = None) -> Column | None:
        """Open a column wherever it lies, or `at` another place, whatever state it is in."""
        at, one = at or self.parts.columns[index].at, self.manifest.column(index)
        if at is None:
            return None
        return one.at(self.files.disk, self.files.path(at))

    def _sum(self, column: Column, record: Record, file: str, why: dict[str, str]) -> int:
        """Return the checksum of an episode's rows in one column; note under `file` why they can't be read."""
        total = xxhash.xxh3_64()
        for slot, steps in self.manifest.ring.pieces(record.start, record.length):
            for data in column.pieces(slot, steps):
                if isinstance(data, str):
                    why[file] = f": {data}"
                    return UNREADABLE
                total.update(data)
        return total.intdigest()

    def segment_file(self, number: int) -> str:
        """Return the name under which a segment should lie."""
        return f"{DATA}/{segment_name(number)}"

    def blob(self, record: Record) -> bytes | None:
        """Return a record's blob, or None when it is nowhere."""
        own = self.segment_file(record.blob_segment)
        blob = self._blob_in(own, record)
        if blob is None and self._segments and own in self._segments:
            blob = self._blob_in(self._segments[own], record)
        return blob

    def _blob_in(self, name: str, record: Record) -> bytes | None:
        if record.blob_size > LARGEST_BLOB:
            return None
        data = self.files.read(name, record.blob_size, record.blob_offset)
        whole = len(data) == record.blob_size and xxhash.xxh3_64_intdigest(data) == record.blob_sum
        return data if whole else None

    @staticmethod
    def sums_in(blob: bytes) -> list[int]:
        """Return the checksums of columns in a blob, none if it does not make sense."""
        try:
            return decode_blob(blob)[0]
        except ValueError:
            return []

    def small_states(self) -> Iterator[SmallState]:
        """Yield the small states that an opening may take, the right one first."""
        return small_states(self.reached.seq, self.table, self.blob, self.carried)

    @property
    def carried(self) -> Mapping[str, Any]:
        """The small state in the manifest; empty if it is damaged, or of a record that is not stored."""
        kept = self.manifest.carried
        ahead = bool(kept) and kept["seq"] > self.reached.seq
        return {} if ahead or self.kept_fault() else kept

    def kept_fault(self) -> str:
        """Return why the small state in the manifest is not valid, in words."""
        return small_state_of(0, self.table, self.blob, self.manifest.carried).fault

    def find_segments(self) -> dict[str, str]:
        """Return, for each segment that lies under another segment's name, `file -> where`.

        Two segments that were swapped: the first blob of each is found in the other.
        """
        if self._segments is not None:
            return self._segments
        self._segments = {}
        live = self.live()
        numbers, at = np.unique(live["blob_segment"], return_index=True)
        last = len(live) - 1 - np.unique(live["blob_segment"][::-1], return_index=True)[1]
        oldest = {int(n): Record.of(live[i]) for n, i in zip(numbers, at, strict=True)}
        newest = {int(n): Record.of(live[i]) for n, i in zip(numbers, last, strict=True)}
        lost = {
            number: record
            for number, record in oldest.items()
            # One whose newest blob is where it should be was not swapped: only a record of it is wrong.
            if number <= LAST_SEGMENT and self.blob(record) is None and self.blob(newest[number]) is None
        }
        ours = {self.segment_file(number) for number in oldest if number not in lost}
        strays = [name for name in self.files.all() if name not in ours] if lost else []
        for record in lost.values():
            where = next((name for name in strays if self._blob_in(name, record) is not None), None)
            if where is not None:
                self._segments[self.segment_file(record.blob_segment)] = where
        return self._segments

    def close(self) -> None:
        """Give the files back."""
        for column in self._columns:
            if column is not None:
                column.close()
        self._columns = []


def _newest(states: tuple[State | None, State | None]) -> State | None:
    return max((s for s in states if s is not None), key=lambda s: s.generation, default=None)
