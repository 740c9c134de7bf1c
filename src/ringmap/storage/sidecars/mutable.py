"""Newest values of mutable columns: three copies for each row of the ring, of which one is written at a time.

    mutable.bin   [header 0][header 1][marks][plane 0][plane 1][plane 2]     a plane: one copy for each slot
    mark          a byte for each slot, not 0 once the slot has had a copy: what was never updated is read without a
    look at copies copy          checksum · generation · position · the values of all mutable columns

An update writes, for each of its rows, a copy that is neither the newest one nor the newest one that a sync made
durable. So a kill leaves the value before it, and a power cut one at least as new as at the last sync. (Two copies
can't hold both: tests/crash/test_copies_model.py.) A reader takes the newest copy that is whole and belongs to its
position. A row without one has the value that it was stored with.

A write that stops in the middle of a copy leaves what was written before, up to some word. The generation stands before
the
position: a copy that names a new row never has the generation of the old one, of which a sync may say that it is whole.

After a power cut positions are given again. So each opening notes in the header that copies of positions from the
recovered head on, up to the generation of that time, are void; the note is durable before a greater generation is used.

Invariants: a header counts with its checksum, which covers the buffer's UUID and the columns; a copy counts with its
checksum, seeded with both; generations of a row rise; a copy that a sync covered is whole: else it is damaged.
Not here: which positions are live, and the values that rows were stored with.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ringmap.errors import CorruptError, EnvironmentFault, LappedError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.files import File, closed
from ringmap.storage.records.table import Record
from ringmap.storage.sidecars.base import Copied, Home, Kept, Mend, Sidecar

__all__ = ["MutableValues", "rows_in"]

Array = np.ndarray[Any, np.dtype[Any]]

_MAGIC = b"RINGMAPM"
_SLOT = 4096
_PLANES = 3
_SESSION = 1 << 40
"""Generations that one opening may use."""
_UNKNOWN = -1
_VOIDS_MOST, _TORN_MOST = 50, 40
_LOOKS = 1000
_BLOCK_NBYTES = 1 << 22
_STAGED_MOST = 1 << 26
_Staged = tuple[Array, list[memoryview], list[memoryview]]
"""Copies to be written, the bytes of each, and those without the checksum."""
_MARKS, _MARKED = 2 * _SLOT, b"\xff"
_BLANK = bytes(24)
"""The first fields of a copy that does not count."""


@dataclass(frozen=True, slots=True)
class _Header:
    """What the newest header says.

    `number`: of the header; `highest`: no generation beyond it is used; `synced`: copies up to this generation are
    durable, and whole, but for those in `torn`: `[after, upto]`, generations of sessions that a kill or a power cut
    ended; `voids`: `[position, upto]`: copies of positions from there on, up to this generation, do not count; `since`:
    voids up to this generation are no longer listed, since no such copy is left here; `unsure`: a sync failed, so that
    the file may differ from what the disk has.
    """

    number: int = 0
    highest: int = 0
    synced: int = 0
    torn: tuple[tuple[int, int], ...] = ()
    voids: tuple[tuple[int, int], ...] = ()
    since: int = 0
    unsure: bool = False

    def is_void(self, positions: Array, generations: Array) -> Array:
        """Tell which copies belong to rows that a power cut took, whose positions may be others' now."""
        void = np.zeros(generations.shape, np.bool_)
        for start, upto in self.voids:
            void |= (positions >= start) & (generations <= upto)
        return void

    def is_damage(self, generation: int) -> bool:
        """Tell whether a copy of this generation that is not whole was whole once."""
        if generation > self.highest:
            return True
        torn = any(after < generation <= upto for after, upto in self.torn)
        return 0 < generation <= self.synced and not torn


class _Maps(NamedTuple):
    """Parts of the file, over a map: the numbers of both headers, the marks, and all copies, as words `(3 * rows,
    n)`."""

    numbers: Array
    marks: Array
    copies: Array


class MutableValues(Sidecar):
    """The open file.

    Args:
        file: its handle.
        home: the buffer's directory, with its schema.
        header: its newest header.
        write: whether it is for updates.
        mapped: whether values are read through a map, or with reads.
        tail: returns the position of the oldest row by now.
        session: see there; of a handle that only reads.

    Processes and threads: one thread at a time may update; any thread of any process may read.
    """

    names = ("mutable.bin",)
    temporary = ("mutable.bin.tmp",)

    def __init__(
        self,
        file: File,
        home: Home,
        header: _Header,
        write: bool,
        mapped: bool = True,
        tail: Callable[[], int] = lambda: 0,
        session: int = 0,
    ) -> None:
        self.path = file.path
        self._file, self._home, self._header = file, home, header
        self._mapped = mapped and home.disk.system.loads_are_ordered  # a read is a system call, which orders them
        self._session = session
        self._synced_number = header.number
        """Of the newest header that a sync covers. For a writer, from `begin` on."""
        self._writes, self._tail = write, tail
        assert home.schema is not None
        self._columns = home.schema.mutable
        self._rows = home.rows
        self._first = _first_copy(home.rows)
        self._copy = _copy_of(self._columns)
        self._seed = xxhash.xxh3_64_intdigest(_salt_of(home))
        self._generation = header.highest
        self._newest = np.full(self._rows if write else 0, _UNKNOWN, np.int8)
        """The plane of each slot's newest copy, where known; and that of the newest durable one."""
        self._durable = self._newest.copy()
        self._under_way: Array | None = None
        """The slots of an update that has not ended."""
        self._promised: Array | None = None
        """What will be durable once the sync ends that is under way."""
        self._promise = self._generation
        self._sync_ended = threading.Event()
        self._lock = threading.Lock()
        self._map: _Maps | None = None
        self._staged: _Staged | None = None
        self.is_dirty = False
        """Whether there are updates that no sync covers."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self._columns.names

    @staticmethod
    def nbytes(schema: Schema | None, rows: int) -> int:
        """Return the size of the file, which is sparse; 0 if no column is mutable."""
        if schema is None or not schema.mutable.columns:
            return 0
        return _first_copy(rows) + _PLANES * rows * _copy_of(schema.mutable).itemsize

    # -- the file ----------------------------------------------------------------------------

    @classmethod
    def is_part_of(cls, home: Home) -> bool:
        """Tell whether the buffer has mutable columns, or the file."""
        return cls.nbytes(home.schema, home.rows) > 0 or cls.exists(home)

    @classmethod
    def create(cls, home: Home, sync_folder: Callable[[str], None] | None = None) -> None:
        """Make the file, sparse, whole or not at all, and sync its name: with `sync_folder`, if it is given."""
        disk, path, beside = home.disk, home.path(cls.names[0]), home.path(cls.temporary[0])
        disk.discard(beside)
        with closing(disk.create(beside, cls.nbytes(home.schema, home.rows))) as file:
            for number in (0, 1):
                _write_header(file, home, _Header(number))
            file.sync()
        disk.rename(beside, path)
        (sync_folder or disk.sync_folder)(home.folder)

    @classmethod
    def open(cls, home: Home, write: bool, mapped: bool = True, tail: Callable[[], int] = lambda: 0) -> MutableValues:
        """Open an existing file; a writer calls `begin` next.

        Raises:
            CorruptError: it is missing, has another size, or no valid header.
        """
        if faults := cls._faults_of_file(home):
            raise CorruptError(f"{home.path(cls.names[0])}: {faults[0]}; run ringmap.check on the buffer")
        file = home.disk.open(home.path(cls.names[0]), write)
        header, session = _newest_of(_headers(file, home))
        return cls(file, home, header, write, mapped, tail, session)

    @classmethod
    def _faults_of_file(cls, home: Home) -> list[str]:
        """Return why nothing in the file counts, in words."""
        path, nbytes = home.path(cls.names[0]), cls.nbytes(home.schema, home.rows)
        if not nbytes:
            return ["is here, but no column is mutable"]
        if faults := home.disk.size_faults(path, "file of mutable columns", nbytes):
            return faults
        with closing(home.disk.open(path)) as file:
            return [] if _headers(file, home) else ["neither header is valid: damaged, or of another buffer"]

    def begin(self, head: int, trusted: bool) -> None:
        """Take generations that no copy has, and void copies of positions that may be given again. Durable.

        Args:
            head: the end of the rows that are stored.
            trusted: whether the writers before this one lost no row: no power cut, and no failed sync, came since.
        """
        header = self._header
        if header.unsure:  # pages that count as clean may not be on the disk
            self._write_again()
        self._sync_file()
        voids, torn, since = header.voids, header.torn, header.since
        if not trusted:
            voids = (*((at, n) for at, n in voids if head - 2 * self._rows < at < head), (head, header.highest))
            if len(voids) > _VOIDS_MOST:
                self._blank(lambda copies, slots: header.is_void(copies["position"], copies["generation"]))
                voids, since = voids[-1:], voids[-2][1]
        if header.synced < header.highest:
            torn = _with(torn, header.synced, header.highest)
        self._generation = header.highest
        highest = header.highest + _SESSION
        header = _Header(header.number, highest, header.highest, torn, voids, since)
        for _ in range(2):  # both are valid from here on
            header = self._put_header(header)
            self._sync_file()

    def _put_header(self, header: _Header) -> _Header:
        """Write a header with the next number whose place is not that of the newest synced one: a power cut may tear
        all later ones."""
        number = header.number + 1
        if (number - self._synced_number) % 2 == 0:
            number += 1
        header = replace(header, number=number)
        _write_header(self._file, self._home, header)
        self._header = header
        return header

    def _sync_file(self) -> None:
        number = self._header.number
        self._file.sync()
        self._synced_number = number

    def _write_again(self) -> None:
        """Write each mark and copy again, the same bytes, so that the next sync counts. O(rows)."""
        self._file.write(self._file.read(self._rows, _MARKS), _MARKS)
        for slots, copies in self._blocks():
            which = np.argwhere(copies["generation"] != 0).tolist()
            pieces = [copies[plane, at].tobytes() for plane, at in which]
            self._file.write_each(pieces, [self._offset(plane, slots[at]) for plane, at in which])

    def _blank(self, wrong: Callable[[Array, Array], Array]) -> None:
        """Make copies not count: `wrong(copies, slots)` tells which of `(3, n)`. Durable. O(rows)."""
        for slots, copies in self._blocks():
            which = np.argwhere(wrong(copies, slots) & (copies["generation"] != 0)).tolist()
            offsets = [self._offset(plane, slots[at]) for plane, at in which]
            self._file.write_each([_BLANK] * len(offsets), offsets)
        self._file.sync()

    def _blocks(self) -> Iterator[tuple[Array, Array]]:
        """Yield `(slots, copies)` block by block, but for those that were never written."""
        step = _block_of(self._copy)
        for at in range(0, self._rows, step):
            count = min(step, self._rows - at)
            ends = [self._offset(plane, at + count) for plane in range(_PLANES)]
            begins = [self._offset(plane, at) for plane in range(_PLANES)]
            if any(self._file.next_data(a) < b for a, b in zip(begins, ends, strict=True)):
                yield np.arange(at, at + count), self._copies(at, count)

    def _copies(self, slot: int, count: int) -> Array:
        """Return copies of all copies of slots, `(3, count)`, by reads."""
        found = np.empty((_PLANES, count), self._copy)
        for plane in range(_PLANES):
            data = self._file.read(found[plane].nbytes, self._offset(plane, slot))
            found[plane] = np.frombuffer(data, self._copy)
        return found

    def _offset(self, plane: int, slot: int) -> int:
        return self._first + (int(plane) * self._rows + int(slot)) * self._copy.itemsize

    def _offsets(self, planes: Array, slots: Array) -> Array:
        offsets: Array = planes * self._rows + slots
        offsets *= self._copy.itemsize
        offsets += self._first
        return offsets

    # -- updates -----------------------------------------------------------------------------

    def update(
        self,
        positions: Array,
        values: Mapping[str, Array],
        stored: Callable[[str, Array], Array],
    ) -> None:
        """Store values of rows, the last one where a position comes twice.

        Args:
            positions: int64 `(n,)`, of live rows.
            values: column -> `(n, *shape)`, of its dtype.
            stored: returns what a column's rows at some of the positions were stored with.

        Raises:
            OSError: the disk is full or fails. No row has its new value, if the disk can still be written at all.

        Cost: one checksum for each row, and one write for each run of rows that lie side by side.
        """
        self._forget_interrupted()
        slots = positions % self._rows
        records, rows, hashed = self._stage(len(positions))
        self._fill(records, positions, slots, values, stored)
        records["check"] = _checks_of(hashed, self._seed)
        places = self._places_for(slots)
        offsets = starts = self._offsets(places, slots)
        size = self._copy.itemsize
        breaks = np.flatnonzero(offsets[1:] - offsets[:-1] != size) + 1
        if len(breaks) < len(rows) - 1:
            raw, bounds = records.view(np.uint8).data, [0, *breaks.tolist(), len(rows)]
            rows = [raw[a * size : b * size] for a, b in pairwise(bounds)]
            offsets = offsets[bounds[:-1]]
        self._under_way, self.is_dirty = slots, True
        try:
            self._file.write_each(rows, offsets.tolist())
        except OSError:
            try:  # the copies before them are the newest again
                self._file.write_each([_BLANK] * len(starts), starts.tolist())
                self._under_way = None
            except OSError:
                header, number = self._header, self._generation
                self._header = replace(header, torn=_with(header.torn, number - 1, number))
            raise
        self._newest[slots] = places
        self._under_way = None

    def _forget_interrupted(self) -> None:
        """Find out again which copies are newest, of rows whose update did not end."""
        if self._under_way is not None:
            self._newest[self._under_way] = _UNKNOWN
            self._under_way = None

    def _stage(self, count: int) -> _Staged:
        """Return memory for as many copies. The last one is used again: fresh pages cost as much as the copy."""
        staged = self._staged
        if staged is None or len(staged[0]) < count:
            records = np.zeros(count, self._copy)
            raw, size = records.view(np.uint8).data, self._copy.itemsize
            staged = records, _cut(raw, size), _cut(raw, size, 8)
            self._staged = staged if records.nbytes <= _STAGED_MOST else None
        elif len(staged[0]) > count:
            records, rows, hashed = staged
            staged = records[:count], rows[:count], hashed[:count]
        return staged

    def _fill(
        self,
        records: Array,
        positions: Array,
        slots: Array,
        values: Mapping[str, Array],
        stored: Callable[[str, Array], Array],
    ) -> None:
        """Fill in the copies to write, without their checksums."""
        records["position"] = positions
        for name, given in values.items():
            records[_field(name)] = given
        missing = [name for name in self.columns if name not in values]
        newest_known = self._newest[slots]
        if missing or newest_known.min() == _UNKNOWN:
            unknown = np.flatnonzero(newest_known == _UNKNOWN)
            self._mark(slots[unknown])
            asked = np.arange(len(positions)) if missing else unknown
            which, planes, newest = self._find(positions[asked])
            found = asked[which]
            with self._lock:
                known = np.zeros(len(slots), np.int8)
                known[found] = planes
                new = self._durable[slots] == _UNKNOWN
                self._durable[slots[new]] = known[new]
                new = self._newest[slots] == _UNKNOWN
                self._newest[slots[new]] = known[new]
            if missing:
                without = np.ones(len(positions), np.bool_)
                without[found] = False
                for name in missing:
                    records[_field(name)][found] = newest[_field(name)]
                    if without.any():
                        records[_field(name)][without] = stored(name, positions[without])
        self._generation += 1
        records["generation"] = self._generation

    def _mark(self, slots: Array) -> None:
        """Mark slots that are about to have their first copy."""
        new = np.unique(slots[self._marks(slots) == 0])
        if len(new):
            runs = np.split(new, np.flatnonzero(np.diff(new) != 1) + 1)
            pieces, offsets = (
                [_MARKED * len(run) for run in runs],
                [_MARKS + int(run[0]) for run in runs],
            )
            self._file.write_each(pieces, offsets)

    def _places_for(self, slots: Array) -> Array:
        """Return the plane to write for each slot: not that of its newest copy, nor that of its newest durable one."""
        while True:
            with self._lock:
                places = _PLACES.take(self._newest[slots] * _PLANES + self._durable[slots])
                if self._promised is None or not (self._promised[slots] == places).any():
                    return places
                ended = self._sync_ended
            ended.wait()  # all three are needed until the disk has that one

    # -- reads -------------------------------------------------------------------------------

    def put_into(self, name: str, positions: Array, taken: Array) -> None:
        """Replace the rows that have a newer value, in an array `(*positions.shape, ...)` of the rows at these
        positions.

        Raises:
            CorruptError: a value is damaged.
            LappedError: a value was updated again and again during the read.

        Cost: the heads of three copies for each row; for one that has a newer value, a copy and a checksum of it.
        """
        which, (newest,) = self.newest([name], positions.reshape(-1))
        if len(which):
            rows_in(taken, positions)[which] = newest

    def newest(self, names: Sequence[str], positions: Array) -> tuple[Array, list[Array]]:
        """Return which rows, of positions `(n,)`, have newer values, and those of some columns, which belong together.

        Raises, and costs, what `put_into` does.
        """
        which, _, newest = self._find(positions)
        return which, [newest[_field(name)] for name in names]

    @property
    def session(self) -> int:
        """The number of the newest opening for writing, as far as it is durable; greater than those of all openings
        before it."""
        self._current_header()
        return self._session

    def are_lost(self, positions: Array, sessions: Array) -> Array:
        """Tell which rows a power cut took, or may have taken, so that their positions may be others' now; each was
        known in its session."""
        header = self._current_header()
        return header.is_void(positions, sessions) | (sessions <= header.since)

    def _find(self, positions: Array) -> tuple[Array, Array, Array]:
        """Return which rows have a newest value, the planes of these, and copies of them."""
        header, slots = self._current_header(), positions % self._rows
        marked = self._marks(slots).nonzero()[0]
        if len(marked) < len(slots):
            positions, slots = positions[marked], slots[marked]
        if not len(marked):
            return marked, marked, np.empty(0, self._copy)
        places, generations = self._heads(slots)
        good = (places == positions) & (generations > 0)
        if header.voids:
            good &= ~header.is_void(positions, generations)
        generations = np.where(good, generations, 0)
        planes = generations.argmax(axis=0)
        top = generations[planes, np.arange(len(slots))]
        which = top.nonzero()[0]
        planes = planes[which]
        records = self._take(planes, slots[which])
        whole = (records["position"] == positions[which]) & (records["generation"] >= top[which])
        whole &= self._are_whole(records)
        if whole.all():
            return marked[which], planes, records
        kept = np.ones(len(which), np.bool_)
        for at in np.flatnonzero(~whole).tolist():
            plane, record = self._look(int(positions[which[at]]))
            planes[at], kept[at] = max(plane, 0), plane >= 0
            if record is not None:
                records[at] = record
        return marked[which[kept]], planes[kept], records[kept]

    def _look(self, position: int) -> tuple[int, Array | None]:
        """Return the plane and a copy of the newest whole copy of a position, -1 and None for none, whatever is being
        written.

        All copies are those of one moment: they are taken twice, with the same bytes, and the header is the same
        afterwards. Of that moment, the newest whole copy is that of the newest update that had ended. One that is not
        whole is being written, or a kill or a power cut tore it. Or its row is gone, and its reader looks again.
        """
        slot = np.array([position % self._rows])
        for _ in range(_LOOKS):
            header = self._current_header()
            records = self._take(_EACH_PLANE, slot)
            if not self._is_still(header, records, slot):
                continue
            generations = records["generation"]
            good = (records["position"] == position) & (generations > 0)
            good &= ~header.is_void(records["position"], generations)
            whole, torn = self._are_whole(records), list[int]()
            found: tuple[int, Array | None] = (-1, None)
            for plane in sorted(np.flatnonzero(good).tolist(), key=lambda one: -generations[one]):
                if whole[plane]:
                    found = plane, records[plane]
                    break
                torn.append(int(generations[plane]))
            damaged = [*filter(header.is_damage, torn)]
            # Over a copy of a row that is gone, one of the next row of its slot may be written.
            if damaged and position >= self._tail():
                raise CorruptError(
                    f"{self.path}: the value of position {position} (generation {damaged[0]}) is damaged; run "
                    "ringmap.check and ringmap.repair on the buffer"
                )
            return found
        raise LappedError(
            f"{self.path}: the value of position {position} was updated {_LOOKS} times while it was read; update less "
            "often"
        )

    def _is_still(self, header: _Header, records: Array, slot: Array) -> bool:
        """Tell whether the copies of a slot have the same bytes again, and the header is the same."""
        again = self._take(_EACH_PLANE, slot)
        return again.tobytes() == records.tobytes() and self._current_header() == header

    def _are_whole(self, records: Array) -> Array:
        """Tell which of the copies match their checksums."""
        hashed = _cut(records.view(np.uint8).reshape(-1).data, self._copy.itemsize, 8)
        whole: Array = records["check"] == _checks_of(hashed, self._seed)
        return whole

    def _current_header(self) -> _Header:
        """Return the newest header: a writer may have written one since this handle was opened to read."""
        if not self._writes and self._numbers() != self._header.number:
            for _ in range(_LOOKS):  # one may be torn just now, and not both
                headers = _headers(self._file, self._home)
                if headers:
                    self._header, self._session = _newest_of(headers)
                    break
            else:
                raise CorruptError(f"{self.path}: neither header is valid; run ringmap.check on the buffer")
        return self._header

    def _numbers(self) -> int:
        """Return the greatest number of a header, whole or not."""
        if self._mapped:
            first, second = self._maps().numbers
        else:
            data = [self._file.read(8, slot * _SLOT + 8) for slot in (0, 1)]
            first, second = (int.from_bytes(part, "little") for part in data)
        return int(max(first, second))

    def _maps(self) -> _Maps:
        """Return the parts of the map."""
        maps = self._map
        if maps is None:
            file = self._file
            raw = file.map(random=True)
            if len(raw) < self.nbytes(self._home.schema, self._rows):
                raise CorruptError(f"{self.path}: was cut since it was opened; run ringmap.check on the buffer")
            words = raw.view("<u8")
            copies = words[self._first // 8 :].reshape(_PLANES * self._rows, -1)
            marks = raw[_MARKS : _MARKS + self._rows]
            maps = _Maps(words[1 : _MARKS // 8 : _SLOT // 8], marks, copies)
            self._map = maps if self._file is file else None  # else it was closed meanwhile
        return maps

    def _marks(self, slots: Array) -> Array:
        """Return the marks of slots."""
        if self._mapped:
            return self._maps().marks.take(slots)
        return self._read(_MARKS + slots, np.dtype(np.uint8))

    def _heads(self, slots: Array) -> tuple[Array, Array]:
        """Return positions and generations of all copies of rows, each `(3, n)`."""
        planes = np.arange(_PLANES)[:, None]
        if self._mapped:
            copies, index = self._maps().copies, planes * self._rows + slots
            # A copy is written from its beginning on: the generation is not older than the position that is read
            # before.
            positions = copies[:, _POSITION][index].view(np.int64)
            return positions, copies[:, _GENERATION][index].view(np.int64)
        heads = self._read(self._offsets(planes, slots).reshape(-1), _HEAD)
        heads = heads.reshape(_PLANES, len(slots))
        return heads["position"], heads["generation"]

    def _take(self, planes: Array, slots: Array) -> Array:
        """Return copies of copies, `(n,)`."""
        if self._mapped:
            taken: Array = self._maps().copies.take(planes * self._rows + slots, 0)
            return taken.view(self._copy).reshape(-1)
        return self._read(self._offsets(planes, slots), self._copy)

    def _read(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        """Return what is at these offsets, by reads."""
        found = np.zeros(len(offsets), dtype)
        room, size, file = found.view(np.uint8).reshape(-1).data, dtype.itemsize, self._file
        try:
            for at, offset in enumerate(offsets.tolist()):
                if file.read_into(room[at * size : (at + 1) * size], offset) < size:
                    raise CorruptError(f"{self.path}: was cut since it was opened; run ringmap.check on the buffer")
        except OSError as error:
            raise EnvironmentFault(
                error.errno,
                f"{self.path}: values can't be read ({error.strerror or error}); run ringmap.check on the buffer, and "
                "move it to a sound disk",
            ) from error
        return found

    # -- as a sidecar ------------------------------------------------------------------------

    @classmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return the faults of the file, in words. Reads all of it."""
        if faults := cls._faults_of_file(home):
            return faults
        with closing(cls.open(home, write=False, mapped=False)) as opened:
            found = len(_headers(opened._file, home))
            faults = [] if found == 2 else ["a header is damaged"]
            for slots, copies in opened._blocks():
                lost = np.flatnonzero(opened._lack_marks(copies, slots)).tolist()
                faults += [f"the mark of slot {slots[at]} is damaged" for at in lost]
                for at in np.flatnonzero(opened._damaged(copies, slots).any(axis=0)).tolist():
                    again = opened._copies(slots[at], 1)
                    position = again["position"][:, 0]
                    gone = position < (0 if newest is None else newest.tail)  # it may be written over at any time
                    gone &= (position >= 0) & (position % home.rows == slots[at])
                    for plane in np.flatnonzero(opened._damaged(again, slots[[at]])[:, 0] & ~gone):  # now, too
                        generation = int(again["generation"][plane, 0])
                        faults.append(f"the value of slot {slots[at]}, of generation {generation}, is damaged")
            return faults

    def _damaged(self, copies: Array, slots: Array) -> Array:
        """Tell which of the copies `(3, n)` of slots are damaged: not whole, though no kill and no power cut can have
        torn them.

        A copy that is being written over may be torn behind its old head; so a damaged one is newer than all that are
        whole.
        """
        wrong = np.zeros(copies.shape, np.bool_)
        written = copies["generation"] != 0
        if written.any():
            whole = wrong.copy()
            whole[written] = self._are_whole(copies[written])
            whole &= copies["position"] % self._rows == slots
            newest = np.where(whole, copies["generation"], 0).max(axis=0)
            header = self._current_header()
            for plane, at in np.argwhere(written & ~whole).tolist():
                generation = int(copies["generation"][plane, at])
                newer = generation > newest[at] and header.is_damage(generation)
                wrong[plane, at] = newer or generation < 0  # which none ever was
        return wrong

    def _lack_marks(self, copies: Array, slots: Array) -> Array:
        """Tell which of the slots have a copy that a sync covered, and no mark. What is being written has its mark
        already."""
        header, lost = self._current_header(), np.zeros(len(slots), np.bool_)
        for at in np.flatnonzero(self._marks(slots) == 0).tolist():
            of_slot = copies["generation"][:, at].tolist()
            lost[at] = any(0 < n <= header.highest and header.is_damage(n) for n in of_slot)
        return lost

    @classmethod
    def mend(cls, home: Home, newest: Record | None) -> Mend | None:
        """Make damaged values not count; without a header, all of them. None if the file does not belong to the
        buffer."""
        if not cls.nbytes(home.schema, home.rows):
            return None
        if cls._faults_of_file(home):
            return "make it again, empty: rows have the values that they were stored with", partial(cls._renew, home)
        return "drop damaged values: these rows have the values before", partial(cls._drop, home)

    @classmethod
    def _renew(cls, home: Home) -> None:
        home.disk.discard(home.path(cls.names[0]))
        cls.create(home)

    @classmethod
    def _drop(cls, home: Home) -> None:
        with closing(cls.open(home, write=True, mapped=False)) as opened:
            for slots, copies in opened._blocks():
                opened._mark(slots[(copies["generation"] != 0).any(axis=0)])
            opened._blank(opened._damaged)
            for _ in range(2):
                opened._put_header(opened._header)
                opened._sync_file()

    @classmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write the newest values of the copy's rows."""
        if not cls.nbytes(source.schema, source.rows):
            return
        cls.create(target)
        with (
            closing(cls.open(source, write=False)) as old,
            closing(cls.open(target, write=True)) as made,
        ):
            made.begin(state.head, trusted=True)
            step = _block_of(old._copy)
            for at in range(state.tail, state.head, step):
                positions = np.arange(at, min(at + step, state.head))
                which, _, newest = old._find(positions)
                if len(which):
                    values = {name: newest[_field(name)] for name in old.columns}
                    made.update(positions[which], values, _unneeded)
            made.sync()

    def promise(self) -> None:
        """Begin a sync: it covers the updates that have returned. Not during an update."""
        self._forget_interrupted()  # and this sync makes durable what it has written
        for slot in np.flatnonzero((self._newest == _UNKNOWN) & (self._durable != _UNKNOWN)):
            places, generations = self._heads(np.array([slot]))
            position = int(places[generations.argmax(), 0])
            with contextlib.suppress(CorruptError):
                self._newest[slot] = max(self._look(position)[0], 0)
        with self._lock:
            self._sync_ended = threading.Event()
            self._promised = self._newest.copy()
            self._promise = self._generation
            self.is_dirty = False

    def sync(self, mark: bool = True) -> None:
        """Return once all updates that had returned when it began are durable on the disk.

        Args:
            mark: whether to note in the header that they are.

        Raises:
            OSError: the disk fails. The next opening writes all values again: a later sync would report success
                wrongly.
        """
        if self._promised is None and not self.is_dirty:
            return
        try:
            if self._promised is None:
                self.promise()
            self._sync_file()
            promised = self._promised
            with self._lock:
                assert promised is not None
                self._durable = np.where(promised == _UNKNOWN, self._durable, promised)
            if mark:
                self._put_header(replace(self._header, synced=self._promise))
        except BaseException as error:  # an interrupt, too: the next call syncs
            self.is_dirty = True
            if isinstance(error, OSError):
                with contextlib.suppress(OSError):
                    self._put_header(replace(self._header, unsure=True))
            raise
        finally:
            self._promised = None
            self._sync_ended.set()

    def seal(self) -> None:
        """Note that this session is over, if all of its updates are durable: no copy of it can be torn."""
        if not self.is_dirty:
            with contextlib.suppress(OSError):  # then less damage is found
                self._put_header(replace(self._header, synced=self._header.highest))

    def close(self) -> None:
        """Release the file."""
        self._file, self._map, self._staged = closed(self._file), None, None


_PLACES = np.array([1, 2, 1, 2, 2, 0, 1, 0, 0])
"""The plane to write, by that of the newest copy (times 3) and that of the newest durable one."""

_HEAD = np.dtype([("check", "<u8"), ("generation", "<i8"), ("position", "<i8")])
_EACH_PLANE = np.arange(_PLANES)
_GENERATION, _POSITION = 1, 2
"""Words of a copy."""


def _field(name: str) -> str:
    return f"={name}"


def rows_in(taken: Array, positions: Array) -> Array:
    """Return an array `(*positions.shape, ...)` of rows as one of `positions.size` rows, over the same memory."""
    if not taken.flags.c_contiguous:
        raise ValueError("expected a C-contiguous array")
    return taken.reshape(positions.size, *taken.shape[positions.ndim :])


def _newest_of(headers: list[_Header]) -> tuple[_Header, int]:
    """Return the newest header, and the session that is durable: an opening syncs the first of its headers before it
    writes the other."""
    newest = max(headers, key=lambda header: header.number)
    return newest, min(header.highest for header in headers)


def _first_copy(rows: int) -> int:
    return _MARKS + -(-rows // _SLOT) * _SLOT


def _block_of(copy: np.dtype[Any]) -> int:
    """Return how many rows are read at a time."""
    return max(1, _BLOCK_NBYTES // copy.itemsize)


def _copy_of(columns: Schema) -> np.dtype[Any]:
    """Return the dtype of a copy: whole words, so that its head is read in one piece. NumPy copies no bytes that are in
    no field."""
    fields: list[Any] = list(_HEAD.descr)
    fields += [(_field(s.name), s.dtype, s.shape) for s in columns.columns]
    pad = -sum(s.row_nbytes for s in columns.columns) % 8
    return np.dtype([*fields, ("pad", "u1", (pad,))] if pad else fields)


def _cut(raw: memoryview, size: int, without: int = 0) -> list[memoryview]:
    """Return pieces of this size, without so many bytes at the beginning of each. Slices in a loop cost three times as
    much."""
    stop = len(raw)
    slices = map(slice, range(without, stop, size), range(size, stop + 1, size))
    return list(map(raw.__getitem__, slices))


def _checks_of(rows: list[memoryview], seed: int) -> Array:
    """Return the checksum of each piece, `(n,)`: from the bytes of the digests, since NumPy takes long for large
    integers."""
    digests = b"".join(map(xxhash.xxh3_64_digest, rows, repeat(seed)))
    return np.frombuffer(digests, ">u8")


def _with(torn: tuple[tuple[int, int], ...], after: int, upto: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges with one more; where they are too many, the two oldest become one."""
    torn = (*torn, (after, upto))
    return torn if len(torn) <= _TORN_MOST else ((torn[0][0], torn[1][1]), *torn[2:])


def _salt_of(home: Home) -> bytes:
    """Return the buffer's UUID, with what the columns are."""
    assert home.schema is not None
    columns = [[s.name, list(s.shape), s.dtype.str] for s in home.schema.mutable.columns]
    return home.uuid + json.dumps([home.rows, columns]).encode()


def _write_header(file: File, home: Home, header: _Header) -> None:
    body = {
        "highest": header.highest,
        "synced": header.synced,
        "torn": header.torn,
        "voids": header.voids,
        "since": header.since,
        "unsure": header.unsure,
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    data = header.number.to_bytes(8, "little") + _MAGIC + len(text).to_bytes(8, "little") + text
    check = xxhash.xxh3_64_intdigest(_salt_of(home) + data).to_bytes(8, "little")
    file.write(check + data, header.number % 2 * _SLOT)


def _headers(file: File, home: Home) -> list[_Header]:
    """Return the valid headers."""
    found = []
    for slot in (0, 1):
        data = file.read(_SLOT, slot * _SLOT)
        size = min(int.from_bytes(data[24:32], "little"), _SLOT)
        check = xxhash.xxh3_64_intdigest(_salt_of(home) + data[8 : 32 + size])
        if data[:8] == check.to_bytes(8, "little") and data[16:24] == _MAGIC:
            body = json.loads(data[32 : 32 + size])
            torn, voids = (tuple(map(tuple, body[name])) for name in ("torn", "voids"))
            number, since = int.from_bytes(data[8:16], "little"), body.get("since", 0)
            numbers = number, body["highest"], body["synced"]
            found.append(_Header(*numbers, torn, voids, since, body["unsure"]))
    return found


def _unneeded(name: str, positions: Array) -> Array:
    raise AssertionError("a copy has the values of all columns")
