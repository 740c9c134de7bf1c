"""Newest values of mutable columns: two copies for each row of the ring, written in turn.

    mutable.bin   [header 0][header 1][marks][plane 0][plane 1]     a plane: one copy for each slot
    mark          a byte for each slot, not 0 once the slot has had a copy: else no look at copies is needed
    copy          checksum · generation · position · the values of all mutable columns

An update writes, for each of its rows, the copy that is not the newest one. So a kill leaves the value before it; what
an interrupted update wrote is blanked. A power cut may take or tear all that no sync covered: then a row has an earlier
value, or the one that it was stored with. At durability "power" each update is synced before it returns, and so is what
an interrupted one left before the next one begins. A reader takes the newest copy that is whole and belongs to its
position. A row without one has the value that it was stored with.

The generation stands before the position: a copy that a kill cut at some word, and that names a new row, never has the
generation of the old one, of which a sync may say that it is whole.

A copy that is not whole is damaged if a sync covered it; else it was torn. An opening blanks what was torn before it
takes a generation that will be covered: after a kill that is newer than the last sync, after a power cut or a failed
sync anything. Then it blanks the copies of rows that were lost, too, as their positions are given again. The header
names the boot in which the newest opening did so: in another one nothing is called damaged.

Invariants: a header and a copy count with their checksums, which cover the buffer's UUID and the columns; generations
of a row rise; a copy that a sync covered is whole: else it is damaged.
Not here: which positions are live, and the values that rows were stored with.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ringmap.errors import CorruptError, EnvironmentFault, LappedError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.checksums import SLOT_NBYTES, TwoSlots
from ringmap.storage.disk.files import File, closed
from ringmap.storage.disk.paths import UNFINISHED, VALUES
from ringmap.storage.records.state import NO_BOOT
from ringmap.storage.records.table import Record
from ringmap.storage.ring.arrays import distinct
from ringmap.storage.sidecars.base import Copied, Home, Kept, Repair, Sidecar

__all__ = ["MutableValues"]

Array = np.ndarray[Any, np.dtype[Any]]

_PLANES = 2
_SESSION = 1 << 40
"""Generations that one opening may use."""
_UNKNOWN = -1
_PEEKS = 1000
_BLOCK_NBYTES = 1 << 22
_STAGED_MOST = 1 << 26
_Staged = tuple[Array, list[memoryview], list[memoryview]]
"""Copies to be written, the bytes of each, and those without the checksum."""
_MARKS, _MARKED = 2 * SLOT_NBYTES, b"\xff"
_HEAD = np.dtype([("check", "<u8"), ("generation", "<i8"), ("position", "<i8")])
_BLANK = bytes(_HEAD.itemsize)
"""The head of a copy that does not count."""
_EACH = np.arange(_PLANES)[:, None]
_OTHER = np.array([1, 0])
"""The plane to write, by that of the newest copy."""


class _Header(NamedTuple):
    """What the newest header says.

    `highest`: no generation beyond it is used; `synced`: copies up to this generation are durable, and whole; all are
    where both are the same; `boot`: the boot of the last opening, zero after a failed sync.
    """

    generation: int = 0
    highest: int = 0
    synced: int = 0
    boot: bytes = NO_BOOT

    @property
    def is_closed(self) -> bool:
        """Whether its writer closed the file, when all was durable."""
        return self.synced == self.highest

    def is_of(self, boot: bytes) -> bool:
        """Tell whether no power cut and no failed sync came since the last opening."""
        return self.boot == boot != NO_BOOT

    def covers(self, generations: Array, boot: bytes) -> Array:
        """Tell which copies of these generations were whole once: one that is not, and newer than a whole one, is
        damaged."""
        covered: Array = (generations > 0) & (generations <= self.synced) | (generations > self.highest)
        return covered & (self.is_closed or self.is_of(boot))


class _Headers(TwoSlots[_Header]):
    magic = b"RINGMAPM"
    form = struct.Struct("<8sQQQ16s")
    decode = _Header


class _Maps(NamedTuple):
    """Parts of the file, over a map: the marks, generation and position of each copy, and all copies as words `(2 *
    rows, n)`."""

    marks: Array
    generations: Array
    positions: Array
    copies: Array


class MutableValues(Sidecar):
    """The open file. `write`: whether it is for updates; `mapped`: whether values are read through a map, or with
    reads; `tail`: returns the position of the oldest row by now. CorruptError: nothing in it counts.

    Processes and threads: one thread at a time may update; any thread of any process may read.
    """

    names = (VALUES,)
    temporary = (VALUES + UNFINISHED,)

    def __init__(self, home: Home, write: bool, mapped: bool = True, tail: Callable[[], int] = lambda: 0) -> None:
        if faults := self._faults_of_file(home):
            raise CorruptError(f"{home.path(self.names[0])}: {faults[0]}; run ringmap.check on the buffer")
        assert home.schema is not None
        self._home, self._rows = home, home.rows
        self._columns = home.schema.mutable
        self._first, self._copy = _first_copy(home.rows), _copy_of(self._columns)
        self._seed = xxhash.xxh3_64_intdigest(_salt_of(home))
        self.path = home.path(self.names[0])
        self._file: File = home.disk.open(self.path, write)
        self._headers = _Headers(self._file, _salt_of(home))
        self._header = self._headers.newest() or _Header()
        self._synced_header = self._header.generation
        """Of the newest header that a sync covers. For a writer, from `begin` on."""
        self._mapped = mapped and home.disk.system.loads_are_ordered  # a read is a system call, which orders them
        self._map: _Maps | None = None
        self._writes, self._tail = write, tail
        self._boot = home.disk.boot_id() or NO_BOOT
        self._generation = self._ended = self._durable = self._header.highest
        """Of the newest update that began, that ended, and that a sync covers."""
        self._newest = np.full(self._rows if write else 0, _UNKNOWN, np.int8)
        """The plane of each slot's newest copy, where known."""
        self._under_way: Array | None = None
        """Where an update that has not ended writes its copies."""
        self._staged: _Staged | None = None

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self._columns.names

    @property
    def is_dirty(self) -> bool:
        """Whether there are updates that no sync covers."""
        return self._generation > self._durable

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
            headers = _Headers(file, _salt_of(home))
            for generation in (0, 1):
                headers.write(_Header(generation))
            file.sync()
        disk.rename(beside, path)
        (sync_folder or disk.sync_folder)(home.folder)

    @classmethod
    def _faults_of_file(cls, home: Home) -> list[str]:
        """Return why nothing in the file counts, in words."""
        path, nbytes = home.path(cls.names[0]), cls.nbytes(home.schema, home.rows)
        if not nbytes:
            return ["is here, but no column is mutable"]
        if faults := home.disk.size_faults(path, "file of mutable columns", nbytes):
            return faults
        with closing(home.disk.open(path)) as file:
            there = _Headers(file, _salt_of(home)).newest() is not None
        return [] if there else ["neither header is valid: damaged, or of another buffer"]

    def distrust(self) -> None:
        """Note that a sync failed: what the file shows may not be on the disk. The next `begin` writes it again."""
        if self._header.boot == self._boot:
            self._put_header(self._header._replace(boot=NO_BOOT))

    def begin(self, head: int) -> None:
        """Blank what is torn and what belongs to rows that were lost, and take generations that no copy has. Durable.
        `head`: the end of the rows that are stored.

        Cost: after a `close`, nothing; after a kill, a look at each copy that was written; after a power cut or a
        failed sync, a checksum of each.
        """
        header, is_lost = self._header, not self._header.is_of(self._boot)
        if is_lost or not header.is_closed:
            for slots in self._blocks():
                positions, generations = self._heads(slots)
                written = generations != 0
                wrong = written & (positions >= head) & is_lost
                if is_lost and not header.is_closed:
                    wrong |= written & (self._marks(slots) == 0)
                    wrong |= self._are_torn(slots, written & ~wrong)
                elif not is_lost:
                    wrong = self._are_torn(slots, (generations > header.synced) & (generations <= header.highest))
                self._blank(slots, wrong)
                if header.boot == NO_BOOT:  # pages that count as clean may not be on the disk
                    self._write_again(slots, written & ~wrong)
        self._sync_file()
        self._generation = self._ended = self._durable = header.highest
        header = _Header(header.generation, header.highest + _SESSION, header.highest, self._boot)
        for _ in range(2):  # both are valid from here on
            header = self._put_header(header)
            self._sync_file()

    def _put_header(self, header: _Header) -> _Header:
        """Write a header with the next generation whose slot is not that of the newest synced one: a power cut may tear
        all later ones."""
        generation = header.generation + 1
        if (generation - self._synced_header) % 2 == 0:
            generation += 1
        header = header._replace(generation=generation)
        self._headers.write(header)
        self._header = header
        return header

    def _sync_file(self) -> None:
        generation = self._header.generation
        self._file.sync()
        self._synced_header = generation

    def _blocks(self) -> Iterator[Array]:
        """Yield all slots block by block, but for blocks that were never written."""
        step = max(1, _BLOCK_NBYTES // self._copy.itemsize)
        for at in range(0, self._rows, step):
            slots = np.arange(at, min(at + step, self._rows))
            ends = self._offsets(_EACH, slots[[0, -1]])
            if any(self._file.next_data(begin) < end + self._copy.itemsize for begin, end in ends.tolist()):
                yield slots

    def _are_torn(self, slots: Array, which: Array) -> Array:
        """Tell which copies `(2, n)` of slots are not whole, of some of them."""
        torn = np.zeros(which.shape, np.bool_)
        planes, at = which.nonzero()
        if len(at):
            torn[planes, at] = ~self._are_whole(self._take(planes, slots[at]))
        return torn

    def _blank(self, slots: Array, which: Array) -> None:
        """Make copies `(2, n)` of slots not count."""
        planes, at = which.nonzero()
        self._file.write_each([_BLANK] * len(at), self._offsets(planes, slots[at]).tolist())

    def _write_again(self, slots: Array, which: Array) -> None:
        """Write copies `(2, n)` of slots, and the marks of slots, over themselves, so that the next sync counts."""
        planes, at = which.nonzero()
        pieces = [copy.tobytes() for copy in self._take(planes, slots[at])]
        self._file.write_each(pieces, self._offsets(planes, slots[at]).tolist())
        begin = _MARKS + int(slots[0])
        self._file.write(self._file.read(len(slots), begin), begin)

    def _offsets(self, planes: Array, slots: Array) -> Array:
        offsets: Array = planes * self._rows + slots
        offsets *= self._copy.itemsize
        offsets += self._first
        return offsets

    # -- updates -----------------------------------------------------------------------------

    def update(self, positions: Array, values: Mapping[str, Array]) -> None:
        """Store values of rows, the last one where a position comes twice: `positions`, int64 `(n,)`, of live rows; and
        column -> `(n, *shape)`, of its dtype, of all columns. If the disk fails, no row has its new value, if it can
        still be written.

        Cost: one checksum for each row, and one write for each run of rows that lie side by side.
        """
        self.undo()
        slots = positions % self._rows
        planes = self._newest.take(slots)
        unknown = (planes == _UNKNOWN).nonzero()[0]
        if len(unknown):
            self._mark(slots[unknown])
            which, known, _ = self._find(positions[unknown])
            planes[unknown] = 0
            planes[unknown[which]] = known
        planes = _OTHER.take(planes)
        records, rows, hashed = self._stage(len(positions))
        records["position"] = positions
        for name, given in values.items():
            records[_field(name)] = given
        self._generation += 1
        records["generation"] = self._generation
        records["check"] = _checks_of(hashed, self._seed)
        offsets = starts = self._offsets(planes, slots)
        size = self._copy.itemsize
        breaks = np.flatnonzero(offsets[1:] - offsets[:-1] != size) + 1
        if len(breaks) < len(rows) - 1:
            raw, bounds = records.view(np.uint8).data, [0, *breaks.tolist(), len(rows)]
            rows = [raw[a * size : b * size] for a, b in pairwise(bounds)]
            offsets = offsets[bounds[:-1]]
        self._newest[slots], self._under_way = _UNKNOWN, starts
        try:
            self._file.write_each(rows, offsets.tolist())
        except BaseException:
            with contextlib.suppress(OSError):
                self.undo()
            raise
        self._ended, self._under_way = self._generation, None
        self._newest[slots] = planes

    def undo(self) -> None:
        """Blank what an update that did not end has written, before a sync covers it as whole: the copies before are
        the newest again. For a caller that takes values from them."""
        if self._under_way is not None:
            self._file.write_each([_BLANK] * len(self._under_way), self._under_way.tolist())
            self._ended, self._under_way = self._generation, None

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

    def _mark(self, slots: Array) -> None:
        """Mark slots that are about to have their first copy."""
        new = distinct(slots[self._marks(slots) == 0])
        if len(new):
            runs = np.split(new, np.flatnonzero(np.diff(new) != 1) + 1)
            self._file.write_each([_MARKED * len(run) for run in runs], [_MARKS + int(run[0]) for run in runs])

    def sync(self, note: bool = True) -> None:
        """Return once all updates that had returned when it began are durable on the disk; also beside an update.
        `note`: whether the header says so. After an error the next opening writes all values again: a later sync would
        report success wrongly.
        """
        if not self.is_dirty:
            return
        upto = self._ended
        try:
            self._sync_file()
            if note:
                self._put_header(self._header._replace(synced=upto))
        except OSError:
            with contextlib.suppress(OSError):
                self.distrust()
            raise
        self._durable = upto

    def note_closed(self) -> None:
        """Note that this opening updates no more, if all of its updates are durable: no copy of it can be torn. The
        note is durable: a copy of a buffer is whole."""
        if not self.is_dirty:
            with contextlib.suppress(OSError):  # then the next opening looks for what is torn
                self._put_header(self._header._replace(synced=self._header.highest))
                self._sync_file()

    def close(self) -> None:
        """Release the file."""
        self._headers.close()
        self._file, self._map, self._staged = closed(self._file.path), None, None

    # -- reads -------------------------------------------------------------------------------

    def put_into(self, taken: Mapping[str, Array], positions: Array) -> None:
        """Replace the rows that have newer values, in a C-contiguous array `(*positions.shape, ...)` of each column.
        What it puts into one row is of one update. CorruptError: one is damaged; LappedError: it was updated again and
        again meanwhile.

        Cost: the heads of two copies for each row; for one that has newer values, a copy and a checksum of it.
        """
        which, _, newest = self._find(positions.reshape(-1))
        if len(which):
            for name, values in taken.items():
                if not values.flags.c_contiguous:
                    raise ValueError("expected a C-contiguous array")
                values.reshape(positions.size, *values.shape[positions.ndim :])[which] = newest[_field(name)]

    def _find(self, positions: Array) -> tuple[Array, Array, Array]:
        """Return which rows have a newest value, the planes of these, and copies of them."""
        slots = positions % self._rows
        marked = self._marks(slots).nonzero()[0]
        if len(marked) < len(slots):
            positions, slots = positions[marked], slots[marked]
        if not len(marked):
            return marked, marked, np.empty(0, self._copy)
        heads = places, generations = self._heads(slots)
        generations = np.where((places == positions) & (generations > 0), generations, 0)
        planes = generations.argmax(axis=0)
        top = generations[planes, np.arange(len(slots))]
        found = top > 0
        if not found.all():  # one head may be of before an update, and the other of a copy that was blanked after it
            lost = (~found).nonzero()[0]
            again = zip(heads, self._heads(slots[lost]), strict=True)
            found[lost] = np.any([(before[:, lost] != now).any(axis=0) for before, now in again], axis=0)
        which = found.nonzero()[0]
        planes = planes[which]
        records = self._take(planes, slots[which])
        whole = (records["position"] == positions[which]) & (records["generation"] >= top[which]) & (top[which] > 0)
        whole &= self._are_whole(records)
        if whole.all():
            return marked[which], planes, records
        kept = np.ones(len(which), np.bool_)
        for at in np.flatnonzero(~whole).tolist():
            plane, record = self._peek(int(positions[which[at]]))
            planes[at], kept[at] = max(plane, 0), plane >= 0
            if record is not None:
                records[at] = record
        return marked[which[kept]], planes[kept], records[kept]

    def _peek(self, position: int) -> tuple[int, Array | None]:
        """Return the plane and a copy of the newest whole copy of a position, -1 and None for none, whatever is being
        written.

        Both copies are those of one moment: they are taken twice, with the same bytes, and the header is the same
        afterwards. Of that moment, the newest whole copy is that of the newest update that had ended. One that is not
        whole is being written, or a kill or a power cut tore it. Or its row is gone, and the
        reader's validation says so.
        """
        slot = np.array([position % self._rows])
        for _ in range(_PEEKS):
            header = self._current_header()
            records = self._take(_EACH, slot)
            if not self._is_still(header, records, slot):
                continue
            mine = records["position"] == position
            newest, damaged = self._judge(header, records, mine)
            # Over a copy of a row that is gone, one of the next row of its slot may be written.
            if (damaged := damaged & mine).any() and position >= self._tail():
                raise CorruptError(
                    f"{self.path}: the value of position {position} (generation {records['generation'][damaged][0]}) "
                    "is damaged; run ringmap.check and ringmap.repair on the buffer"
                )
            plane = int(newest.argmax())
            return (plane, records[plane, 0]) if newest.any() else (-1, None)
        raise LappedError(
            f"{self.path}: the value of position {position} was updated {_PEEKS} times while it was read; update less "
            "often"
        )

    def _is_still(self, header: _Header, records: Array, slot: Array) -> bool:
        """Tell whether the copies of a slot have the same bytes again, and the header is the same."""
        return self._take(_EACH, slot).tobytes() == records.tobytes() and self._current_header() == header

    def _judge(self, header: _Header, copies: Array, mine: Array) -> tuple[Array, Array]:
        """Return the generation of each of the copies `(2, n)` that is whole, 0 for others; and which are damaged: not
        whole, though no kill and no power cut can have torn them. `mine`: which have a position that is sought.

        A copy that is being written over may be torn behind its old head; so a damaged one is newer than the whole one.
        """
        generations = copies["generation"]
        whole = np.where(mine & (generations > 0) & self._are_whole(copies), generations, 0)
        damaged = (generations > whole.max(axis=0)) & header.covers(generations, self._boot)
        return whole, damaged | (generations < 0)  # which none ever was

    def _are_whole(self, records: Array) -> Array:
        """Tell which of the copies match their checksums."""
        hashed = _cut(records.reshape(-1).view(np.uint8).data, self._copy.itemsize, 8)
        whole: Array = records["check"] == _checks_of(hashed, self._seed).reshape(records.shape)
        return whole

    def _current_header(self) -> _Header:
        """Return the newest header: a writer may have written one since this handle was opened to read."""
        for _ in range(_PEEKS):  # one may be torn just now, and not both
            if header := self._header if self._writes else self._headers.newest():
                return header
        raise CorruptError(f"{self.path}: neither header is valid; run ringmap.check on the buffer")

    def _maps(self) -> _Maps:
        maps = self._map
        if maps is None:
            file = self._file
            raw = file.map(random=True)
            if len(raw) < self.nbytes(self._home.schema, self._rows):
                raise CorruptError(f"{self.path}: was cut since it was opened; run ringmap.check on the buffer")
            copies = raw[self._first :].view("<i8").reshape(_PLANES * self._rows, -1)
            maps = _Maps(raw[_MARKS : _MARKS + self._rows], copies[:, 1], copies[:, 2], copies)
            self._map = maps if self._file is file else None  # else it was closed meanwhile
        return maps

    def _marks(self, slots: Array) -> Array:
        """Return the marks of slots."""
        if self._mapped:
            return self._maps().marks.take(slots)
        return self._read(_MARKS + slots, np.dtype(np.uint8))

    def _heads(self, slots: Array) -> tuple[Array, Array]:
        """Return positions and generations of both copies of slots, each `(2, n)`."""
        if self._mapped:
            maps, index = self._maps(), _EACH * self._rows + slots
            return maps.positions[index], maps.generations[index]
        heads = self._read(self._offsets(_EACH, slots), _HEAD)
        return heads["position"], heads["generation"]

    def _take(self, planes: Array, slots: Array) -> Array:
        """Return copies of copies, of the shape of planes and slots together."""
        if self._mapped:
            index = planes * self._rows + slots
            taken: Array = self._maps().copies.take(index, 0)
            return taken.view(self._copy).reshape(index.shape)
        return self._read(self._offsets(planes, slots), self._copy)

    def _read(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        """Return what is at these offsets, by reads."""
        found = np.zeros(offsets.shape, dtype)
        room, size, file = found.view(np.uint8).reshape(-1).data, dtype.itemsize, self._file
        try:
            for at, offset in enumerate(offsets.ravel().tolist()):
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
        with closing(cls(home, write=False, mapped=False)) as opened:
            faults = [] if None not in opened._headers.slots() else ["a header is damaged"]
            for slots in opened._blocks():
                copies = opened._take(_EACH, slots)
                lost = slots[opened._lack_marks(copies, slots)]
                faults += [f"the mark of slot {slot} is damaged" for slot in lost.tolist()]
                slots = slots[opened._are_damaged(copies, slots).any(axis=0)]
                copies = opened._take(_EACH, slots)
                positions = copies["position"]
                gone = positions < (0 if newest is None else newest.tail)  # it may be written over at any time
                gone &= (positions >= 0) & (positions % home.rows == slots)
                for plane, at in np.argwhere(opened._are_damaged(copies, slots) & ~gone).tolist():  # now, too
                    generation = copies["generation"][plane, at]
                    faults.append(f"the value of slot {slots[at]}, of generation {generation}, is damaged")
            return faults

    def _are_damaged(self, copies: Array, slots: Array) -> Array:
        """Tell which of the copies `(2, n)` of slots are damaged."""
        return self._judge(self._current_header(), copies, copies["position"] % self._rows == slots)[1]

    def _lack_marks(self, copies: Array, slots: Array) -> Array:
        """Tell which of the slots have a copy that a sync covered, and no mark. What is being written has its mark
        already."""
        header, generations = self._current_header(), copies["generation"]
        covered = header.covers(generations, self._boot) & (generations <= header.highest)
        lost: Array = covered.any(axis=0) & (self._marks(slots) == 0)
        return lost

    @classmethod
    def repair(cls, home: Home, newest: Record | None) -> Repair | None:
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
        with closing(cls(home, write=True, mapped=False)) as opened:
            for slots in opened._blocks():
                copies = opened._take(_EACH, slots)
                opened._mark(slots[(copies["generation"] != 0).any(axis=0)])
                opened._blank(slots, opened._are_damaged(copies, slots))
            opened._sync_file()
            for _ in range(2):
                opened._put_header(opened._header)
                opened._sync_file()

    @classmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write the newest values of the copy's rows."""
        if not cls.nbytes(source.schema, source.rows):
            return
        cls.create(target)
        with closing(cls(source, write=False)) as old, closing(cls(target, write=True)) as made:
            made.begin(state.head)
            step = max(1, _BLOCK_NBYTES // old._copy.itemsize)
            for at in range(state.tail, state.head, step):
                positions = np.arange(at, min(at + step, state.head))
                which, _, newest = old._find(positions)
                if len(which):
                    made.update(positions[which], {name: newest[_field(name)] for name in old.columns})
            made.sync()
            made.note_closed()


def _field(name: str) -> str:
    return f"={name}"


def _first_copy(rows: int) -> int:
    return _MARKS + -(-rows // SLOT_NBYTES) * SLOT_NBYTES


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


def _salt_of(home: Home) -> bytes:
    """Return the buffer's UUID, with what the columns are."""
    assert home.schema is not None
    columns = [[s.name, list(s.shape), s.dtype.str] for s in home.schema.mutable.columns]
    return home.uuid + json.dumps([home.rows, columns]).encode()
