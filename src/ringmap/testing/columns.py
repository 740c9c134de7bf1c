"""What every column backend owes. A test class inherits `ColumnTests` and names the backend.

    class TestMine(ColumnTests):
        backend = MyColumn          # a `ringmap.storage.columns.base.Column`
        options = {"level": 3}      # what its label has beside the name, if anything

Not here: what a backend's files look like, and which damage it finds; wrapping and liveness,
which are the caller's.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest

from ringmap.storage.columns.base import Column
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.files import Disk
from ringmap.storage.ring.ring import Position, Ring

__all__ = ["SPECS", "ColumnTests", "rows_of"]

Array = np.ndarray[Any, np.dtype[Any]]
MakeColumn = Callable[[ColumnSpec, int], Column]


class Reopen(Protocol):
    """Opens the rows of a column anew."""

    def __call__(self, column: Column, write: bool = False) -> Column:
        """Return another column over the same rows."""
        ...


_ROWS = 37
_CALLS = ["write all", "write", "take", "take into out", "read", "want", "reserve", "pieces", "reopen"]
_SHAPES = [(), (3,), (0,), (2, 2)]
_DTYPES = ["?", "i1", "u1", "i8", "u8", "f2", "f4", "f8", "c8", "U5", "S3", "M8[ns]", "m8[s]"]

SPECS = [
    ColumnSpec("obs", shape, np.dtype(dtype))
    for shape, dtype in [((3,), dtype) for dtype in _DTYPES] + [(s, "i8") for s in _SHAPES if s != (3,)]
]
"""Every dtype in rows of one shape, and every shape of one dtype: scalars, empty rows, matrices; strings, dates."""


def rows_of(spec: ColumnSpec, count: int, first: int = 0) -> Array:
    """Return `count` rows `(count, *shape)` that differ from row to row and from value to value.

    Args:
        spec: what a row is.
        count: how many.
        first: number of the first row; other numbers give other rows.
    """
    size = int(np.prod(spec.shape, dtype=np.int64))
    numbers = (np.arange(count * size) + first * max(size, 1)).reshape(count, *spec.shape)
    kind = spec.dtype.kind
    if kind in "SU":
        return (numbers % 1000).astype(f"U{min(3, spec.dtype.itemsize)}").astype(spec.dtype)
    if kind == "b":
        return np.asarray((numbers * 2654435761 >> 7) % 2 == 1)
    if kind == "c":
        return np.asarray(numbers + 1j * (numbers + 0.5)).astype(spec.dtype)
    if kind in "iu":
        return np.asarray(numbers % 127).astype(spec.dtype)
    return np.asarray(numbers).astype(spec.dtype)


class ColumnTests:
    """The obligations of `ringmap.storage.columns.base.Column`.

    Attributes:
        backend: the class of the columns.
        options: what their label has, beside the name.
        mapped: whether they may be read through a map.
        specs: what rows are made of; each test takes in turn those that suit the backend.
        num_writes: how many are made beside threads that read.
    """

    backend: ClassVar[type[Column]]
    options: ClassVar[dict[str, Any]] = {}
    mapped: ClassVar[bool] = True
    specs: ClassVar[Sequence[ColumnSpec]] = SPECS
    num_writes: ClassVar[int] = 50

    @pytest.fixture
    def disk(self) -> Disk:
        """Return the disk that the columns are on."""
        return Disk()

    @pytest.fixture
    def make_column(self, disk: Disk, tmp_path: Path) -> MakeColumn:
        """Return what makes a new column of `rows` rows, open for writing."""
        numbers = itertools.count()

        def make(spec: ColumnSpec, rows: int) -> Column:
            path = str(tmp_path / f"{next(numbers):03d}")
            column = self.backend(disk, path, spec, rows, {"name": spec.name, **self.options})
            column.create()
            return column.open(write=True, mapped=self.mapped)

        return make

    @pytest.fixture
    def reopen(self) -> Reopen:
        """Return what opens a column's rows anew."""

        def again(column: Column, write: bool = False) -> Column:
            made = type(column)(column.disk, column.path, column.spec, column.rows, column.label)
            return made.open(write, mapped=self.mapped)

        return again

    def each_spec(self) -> Iterator[ColumnSpec]:
        """Yield one kind of row after the other; where a test fails, the last one printed is at fault."""
        for spec in filter(self.backend.suits, self.specs):
            print(spec)
            yield spec

    def test_says_what_it_is(self, make_column: MakeColumn) -> None:
        """A column knows its rows."""
        for spec in self.each_spec():
            column = make_column(spec, _ROWS)
            assert column.spec == spec
            assert column.rows == _ROWS
            assert column.exists()
            assert column.faults() == column.strays() == []

    def test_acts_as_an_array(self, make_column: MakeColumn, reopen: Reopen) -> None:
        """Whatever is called in whatever order, a column holds what an array would, bit for bit, and so does another
        handle; what came out changes nothing, and nothing changes it."""
        for spec in self.each_spec():
            rng, held = np.random.default_rng(0), list[tuple[Array, Array]]()
            column, rows = make_column(spec, _ROWS), rows_of(spec, _ROWS)
            _write(column, 0, rows)
            other = reopen(column)
            for number, call in enumerate([*_CALLS, *rng.choice(_CALLS, 50)]):
                slot = int(rng.integers(_ROWS))
                count = int(rng.integers(_ROWS - slot + 1))
                slots = rng.integers(0, _ROWS, [(5,), (), (2, 3), (2, 0)][number % 4])
                print(call, slot, count, slots)
                column = self._call(str(call), column, reopen, rows, slot, count, np.asarray(slots), held)
                _same(column.read(0, _ROWS), rows)
                _same(other.read(0, _ROWS), rows)
                for found, expected in held:
                    _same(found, expected)
            for found, _ in held:
                found[...] = rows_of(spec, 1, 500)[0]
            _same(column.read(0, _ROWS), rows)

    @staticmethod
    def _call(
        call: str, column: Column, reopen: Reopen, rows: Array, slot: int, count: int, slots: Array, held: Any
    ) -> Column:
        """Call a column, and do the same to the rows; return the column to go on with."""
        spec, which = column.spec, slice(slot, slot + count)
        if call in ("write", "write all"):
            which, slot = (which, slot) if call == "write" else (slice(_ROWS), 0)
            fresh = rows_of(spec, len(rows[which]), 100 + len(held) + slot)
            rows[which] = fresh
            _write(column, slot, fresh)
            fresh[...] = rows_of(spec, 1, 900)[0]
        elif call == "take":
            held.append((np.asarray(column.take(slots)), rows[slots].copy()))
        elif call == "take into out":
            slots = np.atleast_1d(slots)
            out = rows_of(spec, slots.size, 200).reshape(*slots.shape, *spec.shape)
            assert column.take(slots, out) is out
            held.append((out, rows[slots].copy()))
        elif call == "read":
            held.append((column.read(slot, count), rows[which].copy()))
        elif call == "want":
            column.want(slots)
        elif call == "reserve":
            column.reserve(slot, count)
        elif call == "pieces":
            closed = type(column)(column.disk, column.path, spec, _ROWS, column.label)  # `check` reads such
            for one in (column, closed):
                assert b"".join(p for p in one.pieces(slot, count) if isinstance(p, bytes)) == rows[which].tobytes()
            closed.close()
        else:
            column.sync()
            again = reopen(column, write=True)
            column.close()
            again.touched(slot, count)  # another process wrote these: they are written, or noted, for the next sync
            if count:
                again.rewrite(slot, count)
            again.sync()
            again.forget()
            return again
        return column

    def test_copies_rows_of_another(self, make_column: MakeColumn, reopen: Reopen) -> None:
        """Rows come over from the same slots; none changes beyond those that it says it copied."""
        for spec in self.each_spec():
            source, target = make_column(spec, _ROWS), make_column(spec, _ROWS)
            theirs, ours = rows_of(spec, _ROWS), rows_of(spec, _ROWS, 700)
            _write(source, 0, theirs)
            _write(target, 0, ours)
            for slot, count in ((5, 7), (_ROWS - 2, 2), (20, 0)):
                first, stop = target.copy_from(source, slot, count)
                assert first <= slot
                assert slot + count <= stop <= _ROWS
                ours[first:stop] = theirs[first:stop]
                _same(target.read(0, _ROWS), ours)
            target.sync()
            _same(reopen(target).read(0, _ROWS), ours)

    def test_what_is_kept_never_stands_for_what_came_later(self, make_column: MakeColumn, reopen: Reopen) -> None:
        """Rows that a take kept may serve the positions below its `head`, and no others."""
        for spec in self.each_spec():
            column, ring = make_column(spec, _ROWS), Ring(_ROWS, 0)
            rows = rows_of(spec, _ROWS)
            _write(column, 0, rows)
            other, head = reopen(column), _ROWS
            for number in range(6):
                asked = np.arange(head - 9, head)
                _same(other.take(asked % _ROWS, None, head), rows[asked % _ROWS])
                fresh = rows_of(spec, 7, 700 + 10 * number)
                done = 0
                for slot, count in ring.pieces(Position(head), 7):
                    _write(column, slot, fresh[done : done + count])
                    rows[slot : slot + count] = fresh[done : done + count]
                    done += count
                _same(other.take(asked[7:] % _ROWS, None, head), rows[asked[7:] % _ROWS])
                head += 7

    def test_keeps_every_bit(self, make_column: MakeColumn) -> None:
        """NaNs keep their payload, zeros their sign, dates that are none stay so."""
        for dtype, raw in (
            ("<f4", b"\x01\x00\xc0\x7f\x00\x00\x00\x80"),
            ("<f8", b"\x07\x00\x00\x00\x00\x00\xf8\xff\x00\x00\x00\x00\x00\x00\x00\x80"),
            ("<M8[us]", b"\x00\x00\x00\x00\x00\x00\x00\x80\x01\x00\x00\x00\x00\x00\x00\x00"),
        ):
            values, spec = np.frombuffer(raw, dtype), ColumnSpec("odd", (), np.dtype(dtype))
            if not self.backend.suits(spec):
                continue
            column = make_column(spec, 2)
            _write(column, 0, values)
            assert column.read(0, 2).tobytes() == raw
            assert column.take(np.array([0, 1])).tobytes() == raw

    def test_is_read_by_threads_while_it_is_written(self, make_column: MakeColumn) -> None:
        """Rows that nobody writes come back whole, whatever is written beside them."""
        spec = ColumnSpec("obs", (64,), np.dtype("i8"))
        column, rows = make_column(spec, _ROWS), rows_of(spec, _ROWS)
        _write(column, 0, rows)
        stop, slots, wrong = threading.Event(), np.arange(20, _ROWS), []

        def look() -> None:
            while not stop.is_set():
                if not np.array_equal(column.take(slots), rows[20:]):
                    wrong.append("take")
                if not np.array_equal(column.read(20, 5), rows[20:25]):
                    wrong.append("read")

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for i in range(self.num_writes):
            column.write(0, rows_of(spec, 20, i))
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []


def _write(column: Column, slot: int, values: Array) -> None:
    column.reserve(slot, len(values))
    column.write(slot, np.ascontiguousarray(values))


def _same(got: Array, expected: Array) -> None:
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert got.tobytes() == expected.tobytes(), (got, expected)
