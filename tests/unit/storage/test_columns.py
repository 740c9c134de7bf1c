"""Column backends: the conformance suite, and what is the memmap's own: its file."""

import inspect
import itertools
import os
from contextlib import closing
from typing import ClassVar

import numpy as np
import pytest

from ringmap.errors import CorruptError
from ringmap.storage.columns.backends import BACKENDS
from ringmap.storage.columns.base import Column
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.testing.columns import SPECS, ColumnTests, rows_of

EVERY_SPEC = [
    ColumnSpec("obs", shape, dtype)
    for shape in {spec.shape: None for spec in SPECS}
    for dtype in {spec.dtype: None for spec in SPECS}
]
FEW = [
    ColumnSpec("obs", shape, np.dtype(dtype))
    for shape, dtype in [
        ((), "?"),
        ((3,), "f4"),
        ((2, 2), "i8"),
        ((0,), "u1"),
        ((3,), "U5"),
        ((), "M8[ns]"),
    ]
]
LABEL = {"uuid": "00" * 16, "column": 0, "name": "obs"}


class TestMemmapOnDisk(ColumnTests):
    backend = MemmapColumn


class TestMemmapInRam(TestMemmapOnDisk):
    specs = FEW

    @pytest.fixture
    def disk(self):
        return MemoryDisk()


class TestMemmapByReads(TestMemmapOnDisk):
    specs, mapped = FEW, False

    @pytest.fixture
    def disk(self, monkeypatch):
        monkeypatch.setattr(File, "map", None)  # no path may touch it
        return Disk()


@pytest.mark.campaign
class TestEveryShapeOfEveryDtype(TestMemmapOnDisk):
    """The suite takes all dtypes in one shape and all shapes of one dtype; here is each with each."""

    specs, num_writes = EVERY_SPEC, 200


def test_the_suite_has_every_dtype_and_every_shape():
    assert len(SPECS) == len({(s.shape, s.dtype) for s in SPECS}) == 16
    assert len(EVERY_SPEC) == 52


def test_every_backend_is_under_the_suite():
    assert set(BACKENDS) == {"memmap", "zarr"}, "a new backend inherits ColumnTests, as these do"


class Least(Column):
    """The seven methods that a backend must write, and no other."""

    @property
    def nbytes(self):
        return self.rows * self.spec.row_nbytes

    def create(self):
        self.disk.create(self.path, self.nbytes).close()

    def faults(self):
        return self.disk.size_faults(self.path, "file", self.nbytes)

    def repair(self):
        self.disk.extend(self.path, self.nbytes)

    def write(self, slot, values, live=None):
        with closing(self.disk.open(self.path, write=True)) as file:
            file.write(values.tobytes(), slot * self.spec.row_nbytes)

    def sync(self):
        with closing(self.disk.open(self.path, write=True)) as file:
            file.sync()

    def take(self, slots, out=None, head=0):
        with closing(self.disk.open(self.path)) as file:
            data = file.read(self.nbytes, 0)
        rows = np.ndarray((self.rows, *self.spec.shape), self.spec.dtype, data)
        return np.take(rows, slots, 0, out, "clip")


class TestLeast(ColumnTests):
    """What a backend need not write does what it must."""

    backend, specs = Least, FEW


# -- controls: a backend with one flaw fails the suite -----------------------------------------


NUMBERS = itertools.count()


class Flawed(Column):
    """Rows in one array for each path, with one obligation broken."""

    arrays: ClassVar = {}

    def __init__(self, disk, path, spec, rows, label):
        super().__init__(disk, path, spec, rows, label)
        self.flaw, self.handed = label["flaw"], []
        self.array = self.arrays.setdefault(path, np.zeros((rows, *spec.shape), spec.dtype))

    def exists(self):
        return True

    def faults(self):
        return ["it is gone"] if self.flaw == "finds faults" else []

    def reserve(self, slot, count):
        if self.flaw == "reserve wipes":
            self.array[slot : slot + count] = np.zeros(1, self.spec.dtype)

    def write(self, slot, values, live=None):
        if self.flaw == "write is off by one":
            slot = min(slot + 1, self.rows - len(values))
        if self.flaw == "write keeps what it was given" and len(values) == self.rows:
            self.array = values
            return
        if self.flaw == "write casts" and self.spec.dtype.kind == "f":
            values = values + 0.0
        self.array[slot : slot + len(values)] = values
        if self.flaw == "write spills" and slot + len(values) < self.rows and len(values):
            self.array[slot + len(values)] = values[-1]

    def want(self, slots):
        if self.flaw == "asking wipes" and slots.size:
            self.array[slots] = np.zeros(1, self.spec.dtype)

    def take(self, slots, out=None, head=0):
        if self.flaw == "take sorts":
            slots = np.sort(slots, axis=None).reshape(slots.shape)
        if self.flaw == "take flattens":
            slots = slots.reshape(-1)
        taken = self.array[slots]
        if self.flaw == "take hands out a view" and slots.ndim == 1 and len(slots):
            taken = self.array[slots[0] : slots[0] + len(slots)]
        self.handed.append(taken)
        if out is None:
            return taken
        if self.flaw != "take ignores out":
            out[...] = taken
        return taken if self.flaw == "take returns another array" else out

    def copy_from(self, source, slot, count):
        spilt = self.flaw == "copy spills" and slot > 0
        self.array[slot - spilt : slot + count] = source.array[slot - spilt : slot + count]
        return slot, slot + count

    def read(self, slot, count):
        view = self.array[slot : slot + count]
        self.handed.append(view if self.flaw == "read hands out a view" else view.copy())
        return self.handed[-1]

    def sync(self):
        pass

    def close(self):
        if self.flaw == "close wipes":
            for array in self.handed:
                array[...] = np.zeros(1, self.spec.dtype)

    def pieces(self, slot, count):
        return super().pieces(slot, count - (self.flaw == "pieces end early" and count > 1))

    def rewrite(self, slot, count):
        if self.flaw == "rewrite wipes":
            self.array[slot] = np.zeros(1, self.spec.dtype)

    def again(self, write=False):
        if self.flaw in ("nothing survives", "reopened rows are a snapshot"):
            other = made("")(self.spec, self.rows)
            if self.flaw != "nothing survives":
                other.array = self.array.copy()
            return other
        return self


class Suite(ColumnTests):
    """Collected by no one: `broken` runs it."""

    __test__ = False
    backend = Flawed


def made(flaw):
    """Return what makes a column with a flaw."""
    return lambda spec, rows: Flawed(MemoryDisk(), f"{next(NUMBERS)}", spec, rows, {"flaw": flaw})


def broken(flaw):
    """Return the tests of the suite that a backend with this flaw fails."""
    names = []
    for name, test in inspect.getmembers(ColumnTests, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        wanted = inspect.signature(test).parameters
        given = {
            "make_column": made(flaw),
            "reopen": Flawed.again,
        }
        try:
            test(Suite(), **{k: v for k, v in given.items() if k in wanted})
        except (AssertionError, ValueError):
            names.append(name)
    return names


@pytest.mark.parametrize(
    ("flaw", "test"),
    [
        ("finds faults", "test_says_what_it_is"),
        ("pieces end early", "test_acts_as_an_array"),
        ("rewrite wipes", "test_acts_as_an_array"),
        ("reserve wipes", "test_acts_as_an_array"),
        ("write is off by one", "test_acts_as_an_array"),
        ("write keeps what it was given", "test_acts_as_an_array"),
        ("write casts", "test_keeps_every_bit"),
        ("write spills", "test_acts_as_an_array"),
        ("copy spills", "test_copies_rows_of_another"),
        ("asking wipes", "test_acts_as_an_array"),
        ("take sorts", "test_acts_as_an_array"),
        ("take flattens", "test_acts_as_an_array"),
        ("take hands out a view", "test_acts_as_an_array"),
        ("take ignores out", "test_acts_as_an_array"),
        ("take returns another array", "test_acts_as_an_array"),
        ("read hands out a view", "test_acts_as_an_array"),
        ("close wipes", "test_acts_as_an_array"),
        ("nothing survives", "test_acts_as_an_array"),
        ("reopened rows are a snapshot", "test_acts_as_an_array"),
    ],
)
def test_control_the_suite_catches(flaw, test):
    assert broken("") == [], "a sound backend passes"
    assert test in broken(flaw)


# -- the file ----------------------------------------------------------------------------------


@pytest.fixture
def disk():
    return Disk()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.shape}-{spec.dtype.str}")
def test_numpy_reads_the_file(disk, tmp_path, spec):
    path = str(tmp_path / "000-obs.npy")
    column = MemmapColumn(disk, path, spec, 9, LABEL)
    column.create()
    column.open(write=True)
    rows = rows_of(spec, 9)
    column.reserve(0, 9)
    column.write(0, rows)
    loaded = np.load(path)
    assert (loaded.dtype, loaded.shape) == (spec.dtype, (9, *spec.shape))
    assert loaded.tobytes() == rows.tobytes()
    if spec.row_nbytes:  # NumPy maps no empty array
        mapped = np.load(path, mmap_mode="r")
        assert mapped.offset == 4096, "rows start at a page"
        assert mapped.tobytes() == rows.tobytes()
    column.close()


def test_the_file_has_its_full_size_from_birth_and_no_blocks(disk, tmp_path):
    spec, path = ColumnSpec("obs", (1024,), np.dtype("f8")), str(tmp_path / "000-obs.npy")
    column = MemmapColumn(disk, path, spec, 100_000, LABEL)
    column.create()
    stat = os.stat(path)
    assert stat.st_size == column.nbytes > 100_000 * 8192
    assert stat.st_blocks * 512 < 1 << 20
    column.open(write=True)
    column.reserve(0, 10)
    assert os.stat(path).st_size == stat.st_size
    assert os.stat(path).st_blocks * 512 >= 10 * 8192, "reserved"
    column.close()


def test_reserving_goes_in_few_steps_of_bounded_size(tmp_path):
    class Recording(Disk):
        calls: ClassVar = []

        def before(self, change, path, *details):
            if change == "reserve":
                self.calls.append(details)

    disk, spec = Recording(), ColumnSpec("obs", (1 << 17,), np.dtype("f8"))  # 1 MiB a row
    path = str(tmp_path / "000-obs.npy")
    column = MemmapColumn(disk, path, spec, 300, LABEL)
    column.create()
    column.open(write=True)
    for slot in range(0, 300, 3):
        column.reserve(slot, 3)
    column.close()
    assert max(nbytes for _, nbytes in disk.calls) <= 64 << 20
    assert len(disk.calls) < 20, "few calls"
    ends = [offset + nbytes for offset, nbytes in disk.calls]
    assert [offset for offset, _ in disk.calls] == [4096, *ends[:-1]], "in order, no gap, once each"
    assert ends[-1] == 4096 + (300 << 20), "never past the rows"


def test_nothing_is_written_through_the_map(disk, tmp_path):
    spec, path = ColumnSpec("obs", (3,), np.dtype("f4")), str(tmp_path / "000-obs.npy")
    column = MemmapColumn(disk, path, spec, 5, LABEL)
    column.create()
    column.open(write=True)
    with pytest.raises(ValueError, match="read-only"):
        column.view()[0] = 1
    column.close()


SPEC = ColumnSpec("obs", (2,), np.dtype("f4"))


@pytest.fixture
def column_file(disk, tmp_path):
    path = tmp_path / "000-obs.npy"
    MemmapColumn(disk, str(path), SPEC, 8, LABEL).create()
    return path


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def grow(path):
    os.truncate(path, path.stat().st_size + 1)


def empty(path):
    os.truncate(path, 0)


def remove(path):
    path.unlink()


def edit_header(path):
    path.write_bytes(path.read_bytes().replace(b"False", b"True ", 1))


def edit_label(path):
    path.write_bytes(path.read_bytes().replace(b'"name": "obs"', b'"name": "abs"'))


def swap(path):
    MemmapColumn(Disk(), f"{path}.other", SPEC, 8, {**LABEL, "column": 1}).create()
    os.replace(f"{path}.other", path)


def swap_uuid(path):
    MemmapColumn(Disk(), f"{path}.other", SPEC, 8, {**LABEL, "uuid": "11" * 16}).create()
    os.replace(f"{path}.other", path)


def foreign(path):
    size = path.stat().st_size
    path.write_bytes(b"\x93NUMPY" + bytes(size - 6))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "bytes, expected"),
        (grow, "bytes, expected"),
        (empty, "0 bytes, expected"),
        (remove, "missing"),
        (edit_header, "header is not that of 8 rows"),
        (edit_label, "swapped or foreign"),
        (swap, "swapped or foreign"),
        (swap_uuid, "swapped or foreign"),
        (foreign, "header is not"),
    ],
)
def test_a_damaged_file_is_refused(disk, column_file, damage, words):
    assert MemmapColumn(disk, str(column_file), SPEC, 8, LABEL).faults() == []
    damage(column_file)
    before = column_file.read_bytes() if column_file.exists() else None
    assert any(words in fault for fault in MemmapColumn(disk, str(column_file), SPEC, 8, LABEL).faults())
    for write in (False, True):
        with pytest.raises(CorruptError, match=words) as raised:
            MemmapColumn(disk, str(column_file), SPEC, 8, LABEL).open(write)
        assert str(column_file) in str(raised.value)
        assert "ringmap.check" in str(raised.value)
    assert (column_file.read_bytes() if column_file.exists() else None) == before, "looking changes nothing"


@pytest.mark.parametrize(
    "other",
    [
        ColumnSpec("obs", (2,), np.dtype("i4")),
        ColumnSpec("obs", (1, 2), np.dtype("f4")),
        ColumnSpec("obs", (), np.dtype("f8")),
    ],
    ids=str,
)
def test_a_file_of_the_same_size_but_other_rows_is_refused(disk, column_file, other):
    with pytest.raises(CorruptError, match="header is not"):
        MemmapColumn(disk, str(column_file), other, 8, LABEL).open()


def test_a_label_of_300_characters_has_its_page(disk, tmp_path):
    label = {**LABEL, "name": "é" * 3000}
    path = str(tmp_path / "000-.npy")
    MemmapColumn(disk, path, SPEC, 8, label).create()
    assert MemmapColumn(disk, path, SPEC, 8, label).faults() == []
    assert np.load(path).shape == (8, 2)
