"""A column as a standard .npy file, read through a map and written with `pwrite`.

    |header, padded to 4096|row 0|row 1|...|row rows-1|label, padded to 4096|

The label after the rows names the buffer and the column of the file, so that
swapped files are detected; `np.load` stops before it. A RAM column is the
same file on a disk in RAM: its map is the array itself.

With `mapped=False` rows are read with `pread` instead: a bad sector, or a file that another program truncated, is then
an error and does not end the process.

Invariants: the header and the size never change; nothing is written through the map (a write
to a hole on a full disk kills the process, a `pwrite` returns an error).
Not here: which rows are live.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Self

import numpy as np
import xxhash

from ringmap.errors import CorruptError, EnvironmentFault
from ringmap.storage.columns.base import Column, Live
from ringmap.storage.columns.copying import LEAST_NBYTES, empty, runs
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.files import Disk, File, closed
from ringmap.storage.disk.system import Room

__all__ = ["HEADER_NBYTES", "AdjacentColumn", "MemmapColumn", "npy_header", "read_label"]

Array = np.ndarray[Any, np.dtype[Any]]

HEADER_NBYTES = _PAGE = 4096
"""The size of a header: rows begin on a page."""

_EXTENT_MIN, _EXTENT_MAX = 1 << 20, 64 << 20
"""Blocks are reserved in proportion to those already reserved, within these bounds: few calls, little waste."""

_AHEAD = 8 << 20
_PIECE = 4 << 20

_LABEL = b"ringmap-column "
_LABEL_LIMIT = 1 << 20
_DESCRIBED = re.compile(rb"'descr': '([<|][biufcSUMm][0-9]{1,9}[^']{0,12})'.{1,40}'shape': \(([0-9, ]{1,400})\)")


def npy_header(descr: Any, shape: tuple[int, ...]) -> bytes:
    """Return the header of an array in C order. `descr`: its dtype, as `np.dtype.descr` or `str` gives it."""
    described = {"descr": descr, "fortran_order": False, "shape": shape}
    start = np.lib.format.magic(1, 0)
    room = HEADER_NBYTES - len(start) - 2
    text = repr(described).encode("latin1")
    return start + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"


class MemmapColumn(Column):
    """Rows of one column in one file. See `Column` for the arguments and the obligations."""

    def __init__(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> None:
        super().__init__(disk, path, spec, rows, label)
        self._row = spec.row_nbytes
        self._many = -(-LEAST_NBYTES // max(1, self._row))
        self._file: File = closed(path)
        self._is_open = False
        self._reserved = 0
        self._mapped = False
        self._map: Array | None = None

    @property
    def nbytes(self) -> int:
        """The exact size of the file."""
        return _PAGE + self.rows * self._row + len(_label_bytes(self.label))

    def _frame(self) -> list[tuple[int, bytes]]:
        """Return the parts around the rows, as `(offset, bytes)`: header and label."""
        header = npy_header(self.spec.dtype.str, (self.rows, *self.spec.shape))
        return [(0, header), (_PAGE + self.rows * self._row, _label_bytes(self.label))]

    def _put_frame(self, file: File) -> None:
        for offset, data in self._frame():
            file.write(data, offset)

    def create(self) -> None:
        """Make the file, at its full (sparse) size, and sync it."""
        with closing(self.disk.create(self.path, self.nbytes)) as file:
            self._put_frame(file)
            file.sync()

    def create_copy(self, source: Column) -> bool:
        """Make the file for a copy of `source`; return whether it already shares its rows, by a reflink."""
        assert isinstance(source, MemmapColumn)
        file = self.disk.share(source._file.held(), self.path)
        if file is None:
            return super().create_copy(source)
        with closing(file):
            self._put_frame(file)
        return True

    def open(self, write: bool = False, reserved: int = 0, mapped: bool = True) -> Self:
        """Open the file after comparing its size, header and label with the expected ones."""
        super().open(write, reserved, mapped)
        path, disk = self.path, self.disk
        self._file = disk.open_briefly(path) if mapped and not write else disk.open(path, write)
        self._is_open, self._reserved = True, reserved
        self._mapped = mapped
        return self

    def faults(self) -> list[str]:
        """Return the faults of the file as a whole, in words; rows are not read."""
        if faults := self.disk.size_faults(self.path, "column file", self.nbytes):
            return faults
        header = f"header is not that of {self.rows} rows of {self.spec}"
        words = header, "label after the rows is not that of this column: swapped or foreign file"
        with closing(self.disk.open(self.path)) as file:
            parts = zip(self._frame(), words, strict=True)
            return [fault for (offset, data), fault in parts if file.read(len(data), offset) != data]

    def repair(self) -> None:
        """Restore the size, header and label of the file, the header first: it shows that the file is ours."""
        size = self.nbytes
        for offset, data in self._frame():
            with closing(self.disk.open(self.path, write=True)) as file:
                file.write(data, offset)
                file.sync()
            if self.disk.size(self.path) != size:
                self.disk.extend(self.path, size)

    def reserve(self, slot: int, count: int) -> int:
        """Allocate blocks for rows written for the first time, in extents of at most 64 MiB."""
        stop = slot + count
        if not self._row:
            return self.rows
        if stop <= self._reserved:
            return self._reserved
        ahead = min(max(self._reserved * self._row, _EXTENT_MIN), _EXTENT_MAX) // self._row
        goal = min(self.rows, max(stop, self._reserved + ahead))
        while self._reserved < goal:
            step = min(goal - self._reserved, max(1, _EXTENT_MAX // self._row))
            self._file.reserve(_PAGE + self._reserved * self._row, step * self._row)
            self._reserved += step
        return self._reserved

    def write(self, slot: int, values: Array, live: Live | None = None) -> None:
        """Write rows from `slot` on: no other row changes, live or not."""
        if self._row:
            # A copy of little takes less time than a view of it.
            data = values.tobytes() if values.nbytes <= _PAGE else _bytes_of(values)
            self._file.write(data, _PAGE + slot * self._row)

    def writable(self, slot: int, count: int) -> Array | None:
        """Return rows in RAM to write to; None for those in a file."""
        raw = self._file.writable(_PAGE + slot * self._row, count * self._row)
        if raw is None or not self._row:
            return None
        return raw.view(self.spec.dtype).reshape(count, *self.spec.shape)

    def view(self) -> Array:
        """Return the rows as one read-only array `(rows, *shape)` over the map."""
        view = self._map
        if view is None:
            file = self._file
            raw = file.map(random=self.is_large)[_PAGE : _PAGE + self.rows * self._row]
            if len(raw) < self.rows * self._row:
                raise self._was_cut()
            shape = (self.rows, *self.spec.shape)
            view = raw.view(self.spec.dtype).reshape(shape) if self._row else np.empty(shape, self.spec.dtype)
            self._map = view
            if self._file is not file:  # closed meanwhile: not cached, but this read goes on
                self._map = None
        return view

    def map_into(self, room: Room, at: int) -> bool:
        """Map all rows into a room, unless they are read with reads; False if the file was cut since it was opened."""
        nbytes = self.rows * self._row
        return self._mapped and self._file.map_into(room, at, _PAGE, nbytes, self.is_large)

    def want(self, slots: Array) -> None:
        """Ask for the pages that hold the rows at `slots`."""
        if self.is_large and slots.size:
            file = self._file.held()
            for offset, nbytes in runs(slots, self._row, _PAGE):
                file.will_need(offset, nbytes)

    def take(self, slots: Array, out: Array | None = None, head: int = 0) -> Array:
        """Return a copy of the rows at `slots`. One copy, GIL released."""
        rows = self._map
        if rows is None:
            if not self._mapped:
                return self._take_by_reads(slots, out)
            rows = self.view()
        if out is None and slots.size >= self._many:
            out = empty((*slots.shape, *self.spec.shape), self.spec.dtype)
        # mode="clip" lets NumPy write into `out` at once; slots are in range by arithmetic.
        taken: Array = rows.take(slots, 0, out, "clip")
        return taken

    def _take_by_reads(self, slots: Array, out: Array | None) -> Array:
        """Return a copy of the rows at `slots`: one read for each run of consecutive slots."""
        taken = empty((*slots.shape, *self.spec.shape), self.spec.dtype) if out is None else out
        room, numbers = _bytes_of(taken), slots.reshape(-1)
        if len(room):
            ends = np.flatnonzero(np.diff(numbers) != 1) + 1
            bounds = np.concatenate(([0], ends, [len(numbers)]))
            offsets = (_PAGE + numbers[bounds[:-1]] * self._row).tolist()
            self._read_runs(room, (bounds * self._row).tolist(), offsets)
        scalar: Array = taken if taken.ndim or out is not None else taken[()]  # as NumPy's own take
        return scalar

    def _read_runs(self, room: memoryview, bounds: list[int], offsets: list[int]) -> None:
        """Fill `room`, piece by piece between these bounds, from these offsets, or raise."""
        file = self._file.held()  # until the last piece: its descriptor stays this file's
        read = file.read_into
        try:
            for start, stop, offset in zip(bounds, bounds[1:], offsets, strict=False):
                if read(room[start:stop], offset) < stop - start:
                    raise self._was_cut()
        except OSError as error:
            raise EnvironmentFault(
                error.errno,
                f"{self.path}: rows can't be read ({error.strerror or error}); run ringmap.check on the buffer, and "
                "move it to a sound disk",
            ) from error

    def copy_from(self, source: Column, slot: int, count: int) -> tuple[int, int]:
        """Copy rows from the same slots of another column."""
        assert isinstance(source, MemmapColumn)
        nbytes = count * self._row
        if self._file.copy_from(source._file.held(), _PAGE + slot * self._row, nbytes) < nbytes:
            raise source._was_cut()
        return slot, slot + count

    def read(self, slot: int, count: int) -> Array:
        """Return a copy of `count` rows from `slot`.

        Of a large column by reads: pages of a map that were touched stay in the memory of this process, all of them
        once every episode was read.
        """
        if self._mapped and not self.is_large:
            return self.view()[slot : slot + count].copy()
        rows = np.empty((count, *self.spec.shape), self.spec.dtype)
        room, size = _bytes_of(rows), self._row
        step = max(1, _AHEAD // max(1, size))
        if self.is_large:
            self._file.will_need(_PAGE + slot * size, min(step, count) * size)
        for at in range(0, count if len(room) else 0, step):
            stop, then = min(at + step, count), min(at + 2 * step, count)
            if self.is_large:  # the next piece is read ahead while this one is copied
                self._file.will_need(_PAGE + (slot + stop) * size, (then - stop) * size)
            self._read_runs(room, [at * size, stop * size], [_PAGE + (slot + at) * size])
        return rows

    def pieces(self, slot: int, count: int) -> Iterator[bytes | str]:
        """Yield the bytes of rows by plain reads; a file that ends early continues with zeros."""
        at, stop = _PAGE + slot * self._row, _PAGE + (slot + count) * self._row
        while at < stop:
            size = min(_PIECE, stop - at)
            try:
                if not self._is_open:
                    self._file, self._is_open = self.disk.open(self.path), True
                data = self._file.read(size, at)
            except OSError as error:
                yield f"can't be read: {error.strerror or error}"
            else:
                yield data.ljust(size, b"\0")
            at += size

    def sync(self) -> None:
        """Return once every written row is durable on the disk."""
        self._file.sync()

    def _was_cut(self) -> CorruptError:
        return CorruptError(f"{self.path}: column file was cut since it was opened; run ringmap.check on the buffer")

    def close(self) -> None:
        """Release the descriptor and the map; a running read keeps them until it is done."""
        self._file, self._map = closed(self.path), None


class AdjacentColumn(MemmapColumn):
    """Rows of one column of several rings in one map, for `take` alone: the map has no file of its own."""

    _map: Array | None

    @classmethod
    def of(cls, columns: Sequence[Column], stride: int) -> AdjacentColumn | None:
        """Return these columns as one, in which row 0 of number `i` is row `i * stride`; None if they can't be mapped.

        `stride`: at least the rows of each; so many rows are whole pages.
        """
        first, spec, size = columns[0], columns[0].spec, stride * columns[0].spec.row_nbytes
        room = first.disk.system.room(len(columns) * size)
        if room is None or not all(column.map_into(room, n * size) for n, column in enumerate(columns)):
            return None
        made = cls(first.disk, first.path, spec, len(columns) * stride, first.label)
        made._map = room.bytes.view(spec.dtype).reshape(made.rows, *spec.shape)
        return made


def _bytes_of(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array, for a write of it or a read into it."""
    if not array.flags.c_contiguous:  # a copy would be filled instead of it
        raise ValueError("expected a C-contiguous array")
    try:
        return array.data.cast("B")  # a tenth of the time
    except (TypeError, ValueError):  # no rows, or a dtype that a memoryview does not know
        return array.reshape(-1).view(np.uint8).data


def read_label(file: File) -> dict[str, Any] | None:
    """Return the label of a file, or None. The file may be truncated, too long, or not a column at all."""
    head, size = file.read(_PAGE, 0), file.size()
    places = [size - at for at in range(_PAGE, min(size, _LABEL_LIMIT) + 1, _PAGE)]
    if described := _DESCRIBED.search(head):  # in a file that grew, the label is where the rows end
        with suppress(TypeError, ValueError):
            shape = [int(n) for n in described[2].split(b",") if n.strip()]
            places.insert(0, _PAGE + math.prod(shape) * np.dtype(described[1].decode("ascii")).itemsize)
    for at in places:
        if 0 <= at < size and file.read(len(_LABEL), at) == _LABEL:
            line = file.read(min(_LABEL_LIMIT, size - at), at).partition(b"\n")[0]
            check, _, text = line[len(_LABEL) :].partition(b" ")
            if check == xxhash.xxh3_64_hexdigest(text).encode():
                label = json.loads(text)
                return label if isinstance(label, dict) else None
    return None


def _label_bytes(label: dict[str, Any]) -> bytes:
    """Return the label as checksummed JSON, padded with spaces to whole pages."""
    text = json.dumps(label, sort_keys=True, ensure_ascii=True).encode()
    line = _LABEL + xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"
    return line.ljust(-(-len(line) // _PAGE) * _PAGE)
