"""Values that change: whole after every kill and cut, of their own row, and never older than the last sync.

The file is written through a recording disk; after each change what a kill or a cut may leave is opened by the real
code.
"""

import contextlib
import errno
import os
from dataclasses import replace

import numpy as np
import pytest

from ringmap import Column, ReplayBuffer
from ringmap.errors import CorruptError
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from ringmap.storage.records.table import Record
from ringmap.storage.sidecars import values as mutable
from ringmap.storage.sidecars.base import Copied, Home
from ringmap.storage.sidecars.values import MutableValues
from tests.disks import Cut, ram_folder
from tests.faults.crash.recording import Always, Machine, Model, RecordingDisk, materialise

SCHEMA = Schema(
    (
        ColumnSpec("obs", (), np.dtype("<f4")),
        ColumnSpec("latent", (30,), np.dtype("<i8"), True),
        ColumnSpec("label", (), np.dtype("<i4"), True),
    )
)
NAMES = ("latent", "label")
ROWS = 4


def home_of(disk, root, rows=ROWS):
    return Home(disk, os.path.join(root, "buf"), b"u" * 16, rows, SCHEMA)


def values_of(numbers):
    numbers = np.asarray(numbers)
    return {"latent": np.repeat(numbers[:, None], 30, 1), "label": numbers.astype(np.int32)}


def look(file, positions):
    """Return the value of each position, 0 for none; each is proven by all its bytes."""
    found = values_of(positions * 0)
    for name in NAMES:
        file.put_into({name: found[name]}, positions)
    latent, label = found["latent"], found["label"]
    assert (latent == latent[:, :1]).all(), f"torn: {latent}"
    assert (label == latent[:, 0]).all()
    return dict(zip(positions.tolist(), latent[:, 0].tolist(), strict=True))


@contextlib.contextmanager
def a_file(disk=None, rows=ROWS):
    with ram_folder() as folder:
        os.mkdir(folder / "buf")
        home = home_of(disk or Disk(Machine()), str(folder), rows)
        MutableValues.create(home)
        with opened(home) as file:
            yield file, home


@contextlib.contextmanager
def opened(home, head=0, trusted=True):
    """Open the file as a writer does; not `trusted`: after a power cut."""
    home.disk.system.boot += not trusted
    with contextlib.closing(MutableValues(home, write=True)) as file:
        file.begin(head)
        yield file


def recorded(folder, name="root"):
    """Return a recording disk, with the file on it."""
    root = os.path.join(folder, name)
    materialise({"buf": {}}, root)
    disk = RecordingDisk(root, tree={"buf": {}})
    home = home_of(disk, root)
    MutableValues.create(home)
    return disk, home


def reader(home, mapped=True):
    return contextlib.closing(MutableValues(home, write=False, mapped=mapped))


def update(file, positions, numbers):
    file.update(np.asarray(positions), values_of(numbers))


@pytest.mark.parametrize("mapped", [True, False])
def test_the_newest_value_of_a_row_counts(mapped):
    with a_file() as (file, home), reader(home, mapped) as other:
        assert look(file, np.arange(4)) == {0: 0, 1: 0, 2: 0, 3: 0}
        for number in range(1, 9):
            update(file, [1, 2], [number, number + 10])
            assert look(file, np.arange(4)) == {0: 0, 1: number, 2: number + 10, 3: 0}
        update(file, [2], [18])
        update(file, [5], [50])  # evicts position 1
        assert look(file, np.arange(4) + 2) == {2: 18, 3: 0, 4: 0, 5: 50}
        assert look(other, np.arange(4) + 2) == {2: 18, 3: 0, 4: 0, 5: 50}


def test_a_column_that_is_left_out_keeps_its_value():
    schema = {"x": ((), "i8"), **{name: Column((), "i8", mutable=True) for name in ("latent", "label")}}
    buf = ReplayBuffer(10, schema=schema)
    buf.write_episode({"x": np.arange(4), "latent": np.arange(4), "label": np.arange(4)})
    buf.update([1, 3], {"label": [14, 14]})
    buf.update([2], {"latent": [15], "label": [25]})
    buf.update([1, 2, 1], {"latent": [16, 17, 18]})
    assert buf.get_col_data("label").tolist() == [0, 14, 25, 14]
    assert buf.get_col_data("latent").tolist() == [0, 18, 17, 3]


def test_the_last_value_of_a_row_that_is_named_twice_counts():
    with a_file() as (file, _):
        update(file, [1, 2, 3, 1, 2], [1, 2, 3, 4, 5])
        assert look(file, np.arange(4)) == {0: 0, 1: 4, 2: 5, 3: 3}


def test_a_position_that_is_given_again_has_no_value():
    with a_file() as (file, home), reader(home) as before:
        update(file, np.arange(4), [1, 2, 3, 4])
        assert look(before, np.arange(4)) == {0: 1, 1: 2, 2: 3, 3: 4}
        for _ in range(2):
            with opened(home, 2, trusted=False), reader(home) as again:
                assert look(again, np.arange(4)) == {0: 1, 1: 2, 2: 0, 3: 0}
        with opened(home, 2, trusted=False) as again:
            update(again, [3], [9])
            assert look(again, np.arange(4)) == {0: 1, 1: 2, 2: 0, 3: 9}
            assert look(before, np.arange(4)) == {0: 1, 1: 2, 2: 0, 3: 9}
        with opened(home, 2) as again:  # no row was lost since
            assert look(again, np.arange(4)) == {0: 1, 1: 2, 2: 0, 3: 9}


def test_copies_of_lost_rows_never_count_again():
    with a_file() as (file, home):
        update(file, np.arange(4), [1, 2, 3, 4])
        for head in (3, 4, 5, 3, 6, 5, 3, 6):
            with opened(home, head, trusted=False):
                pass
        with opened(home, 6) as again:
            assert look(again, np.arange(4)) == {0: 1, 1: 2, 2: 3, 3: 0}
            assert MutableValues.faults(home, None) == []


def test_a_copy_has_the_newest_values():
    with a_file() as (file, home), ram_folder() as folder:
        update(file, np.arange(4), [1, 2, 3, 4])
        update(file, [1], [7])
        os.mkdir(folder / "buf")
        target = home_of(Disk(Machine()), str(folder))
        MutableValues.copy(home, target, Copied(1, 3, None), None)
        assert MutableValues.faults(target, None) == []
        with reader(target) as made:
            assert look(made, np.arange(4)) == {0: 0, 1: 7, 2: 3, 3: 0}


def test_rows_side_by_side_are_one_write():
    class Counting(Disk):
        writes = 0

        def before(self, change, path, *details):
            self.writes += change == "write"

    disk = Counting(Machine())
    with a_file(disk, 100) as (file, _):
        for number in range(1, 6):
            before = disk.writes
            update(file, np.arange(10, 60), np.arange(50) + number)
            assert disk.writes == before + 1 + (number == 1)  # the marks
        assert look(file, np.arange(10, 60)) == {p: p - 5 for p in range(10, 60)}


# -- errors and damage -----------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [True, False])
def test_an_update_that_the_disk_refuses_changes_nothing(partial):
    with ram_folder() as folder:
        disk, home = recorded(str(folder))
        with opened(home) as file:
            update(file, np.arange(4), [1, 2, 3, 4])
            for at in (1, 2, 3):
                disk.fail(at, OSError(errno.ENOSPC, "planted"), partial=partial)
                with pytest.raises(OSError, match="planted"):
                    update(file, [0, 2, 1], [7, 8, 9])
                disk.lift()
                assert look(file, np.arange(4)) == {0: 1, 1: 2, 2: 3, 3: 4}
            file.sync()
            assert MutableValues.faults(home, None) == []
            update(file, [0, 2, 1], [7, 8, 9])
            assert look(file, np.arange(4)) == {0: 7, 1: 9, 2: 8, 3: 4}


def test_an_update_that_can_not_be_undone_is_old_or_new_row_by_row():
    with ram_folder() as folder:
        disk, home = recorded(str(folder))
        with opened(home) as file:
            update(file, np.arange(4), [1, 2, 3, 4])
            disk.fail(2, OSError(errno.EIO, "planted"), sticky=True, partial=True)
            with pytest.raises(OSError, match="planted"):
                update(file, [0, 2, 1], [7, 8, 9])
            disk.lift()
            seen = look(file, np.arange(4))
            assert seen in ({0: first, 1: 2, 2: 3, 3: 4} for first in (1, 7))
            file.sync()  # the copy that is torn is no damage
            assert look(file, np.arange(4)) == seen
            assert MutableValues.faults(home, None) == []
            update(file, [0, 2, 1], [17, 18, 19])
            assert look(file, np.arange(4)) == {0: 17, 1: 19, 2: 18, 3: 4}


def places_of(home):
    """Return the offsets of all copies that were written."""
    size = mutable._copy_of(SCHEMA.mutable).itemsize
    with contextlib.closing(home.disk.open(home.path("mutable.bin"))) as file:
        offsets = range(8192 + 4096, file.size(), size)
        return [at for at in offsets if file.read(8, at + 8).strip(b"\0")], size


def flip(home, offset):
    with contextlib.closing(home.disk.open(home.path("mutable.bin"), write=True)) as file:
        file.write(bytes([file.read(1, offset)[0] ^ 4]), offset)


def test_damage_is_found_never_served_and_mended():
    with a_file() as (file, home):
        update(file, np.arange(4), [1, 2, 3, 4])
        update(file, [1], [7])
        file.sync()
        file.note_closed()
        assert MutableValues.faults(home, None) == []
        offsets, size = places_of(home)
        assert len(offsets) == 5
        newest, older = offsets[0], offsets[2]  # of position 1
        for offset in offsets:
            for at in (0, 8, 14, 15, 16, 17, 24, size - 6):
                flip(home, offset + at)
                # An older one is not served, and no damage: it is torn while it is written over.
                old = offset == older and not 8 <= at < 16
                assert len(MutableValues.faults(home, None)) == (not old), f"{offset} + {at}"
                with reader(home) as again, contextlib.suppress(CorruptError):
                    seen = look(again, np.arange(4))
                    assert all(seen[p] in {0: (0, 1), 1: (0, 2, 7), 2: (0, 3), 3: (0, 4)}[p] for p in seen)
                flip(home, offset + at)
        flip(home, newest + 40)
        with reader(home) as again, pytest.raises(CorruptError, match="position 1 .* is damaged"):
            look(again, np.arange(4))
        what, work = MutableValues.repair(home, None)
        assert "drop" in what
        work()
        assert MutableValues.faults(home, None) == []
        with reader(home) as again:
            assert look(again, np.arange(4)) == {0: 1, 1: 2, 2: 3, 3: 4}


def test_a_mark_that_is_damaged_is_found_and_mended():
    with a_file() as (file, home):
        update(file, [0, 1, 3], [1, 2, 4])
        file.sync()
        with contextlib.closing(home.disk.open(home.path("mutable.bin"), write=True)) as raw:
            assert raw.read(5, 8192) == b"\xff\xff\0\xff\0"
            raw.write(b"\0", 8193)
        assert MutableValues.faults(home, None) == ["the mark of slot 1 is damaged"]
        MutableValues.repair(home, None)[1]()
        assert MutableValues.faults(home, None) == []
        assert look(file, np.arange(4)) == {0: 1, 1: 2, 2: 0, 3: 4}


def test_a_header_that_is_damaged_is_found_and_mended():
    with a_file() as (file, home):
        update(file, np.arange(4), [1, 2, 3, 4])
        for _ in range(2):
            file.sync()
        for slot in (0, 4096):
            flip(home, slot + 40)
            assert MutableValues.faults(home, None) == ["a header is damaged"]
            MutableValues.repair(home, None)[1]()
            assert MutableValues.faults(home, None) == []
            with reader(home) as again:
                assert look(again, np.arange(4)) == {0: 1, 1: 2, 2: 3, 3: 4}
        for slot in (0, 4096):
            flip(home, slot + 40)
        with pytest.raises(CorruptError, match="neither header"):
            MutableValues(home, write=False)
        what, work = MutableValues.repair(home, None)
        assert "empty" in what
        work()
        assert MutableValues.faults(home, None) == []


def test_a_file_that_is_missing_or_cut_is_refused_and_made_again():
    with a_file() as (_, home):
        for spoil in (os.remove, lambda path: os.truncate(path, 5000)):
            spoil(home.path("mutable.bin"))
            assert len(MutableValues.faults(home, None)) == 1
            with pytest.raises(CorruptError, match=r"mutable\.bin"):
                MutableValues(home, write=True)
            MutableValues.repair(home, None)[1]()
            assert MutableValues.faults(home, None) == []


def test_after_a_failed_sync_the_next_opening_writes_all_values_again():
    with ram_folder() as folder:
        disk, home = recorded(str(folder))
        with opened(home) as file:
            update(file, [1, 2], [1, 2])
            file.sync()
            update(file, [1, 2], [3, 4])
            disk.fail(1, OSError(errno.EIO, "planted"), only="sync")
            with pytest.raises(OSError, match="planted"):
                file.sync()
            disk.lift()
        with opened(home, ROWS) as file:
            assert look(file, np.arange(4)) == {0: 0, 1: 3, 2: 4, 3: 0}
            file.sync()
        model = Model(disk.tree)
        for change in disk.log:
            model.apply(change)
        place = os.path.join(folder, "cut")
        materialise(model.crash(Always(0)), place)
        with reader(home_of(Disk(Machine(2)), place)) as again:
            assert look(again, np.arange(4)) == {0: 0, 1: 3, 2: 4, 3: 0}


# -- a write that stops in the middle, and reads between its halves ------------------------------

COPY = mutable._copy_of(SCHEMA.mutable).itemsize


class Halved(Disk):
    """The next write to the file goes on the disk up to byte `cut`, and the process dies there."""

    cut, is_dead = None, False

    def before(self, change, path, *details):
        if self.cut is None or change != "write":
            return
        if not self.is_dead:
            offset, data = details
            with open(path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), memoryview(data).cast("B")[: self.cut], offset)
        self.is_dead = True
        raise Cut


class Between(Machine):
    """Calls `strike` before its `at`-th read."""

    def __init__(self, at, strike):
        super().__init__()
        self.left, self.strike = at, strike

    def count(self):
        self.left -= 1
        if self.left == 0:
            self.strike()

    def pread(self, *args):
        self.count()
        return super().pread(*args)

    def pread_into(self, *args):
        self.count()
        return super().pread_into(*args)


def cut_update(home, file_head, position, number, cut):
    """Open the file as a writer that is killed in the middle of an update."""
    disk = Halved(home.disk.system)
    with opened(replace(home, disk=disk), file_head) as file:
        file._mark(np.array([position % ROWS]))
        disk.cut = cut
        with pytest.raises(Cut):
            update(file, [position], [number])


@pytest.mark.parametrize("position", [1, 5], ids=["of its own row", "of the row before it"])
def test_a_copy_that_a_kill_cut_at_any_word_counts_as_none(position):
    """The copy that is written over was durable, and whole."""
    for cut in range(0, COPY + 1, 8):
        with a_file() as (file, home):
            update(file, [1], [1])
            file.sync()
            file.note_closed()
            file.close()
            cut_update(home, 2, position, 2, cut)
            with (
                opened(home, 6) as again,
                reader(home) as other,
                reader(home, mapped=False) as third,
            ):
                for one in (again, other, third):
                    known = {1} if position == 1 else {0}
                    assert look(one, np.array([position]))[position] in ({2} if cut == COPY else known)
                assert MutableValues.faults(home, Record(1, 2, position, 1)) == []
                update(again, [position], [3])
                assert look(other, np.array([position])) == {position: 3}


def test_control_a_copy_that_begins_with_its_position(monkeypatch):
    def other_way(columns):
        made = whole(columns)
        names = [n for n in made.names if n not in ("check", "position", "generation")]
        order = ["check", "position", "generation", *names]
        return np.dtype([(name, made[name].base, made[name].shape) for name in order])

    whole = mutable._copy_of
    monkeypatch.setattr(mutable, "_copy_of", other_way)
    monkeypatch.setattr(mutable, "_HEAD", np.dtype([("check", "<u8"), ("position", "<i8"), ("generation", "<i8")]))
    whole_maps = MutableValues._maps

    def other_maps(self):
        maps = whole_maps(self)
        return maps._replace(generations=maps.positions, positions=maps.generations)

    monkeypatch.setattr(MutableValues, "_maps", other_maps)
    with pytest.raises(CorruptError):
        test_a_copy_that_a_kill_cut_at_any_word_counts_as_none(5)


def a_slow_read(home, steps, at):
    """Return the value of row 1, with `steps()` before the `at`-th read of it; and whether it came to that."""
    system = Between(0, steps)
    with reader(replace(home, disk=Disk(system)), mapped=False) as other:
        system.left = at
        which, _, found = other._find(np.array([1]))
        latent, label = (found[mutable._field(name)] for name in NAMES)
        assert (latent == label[:, None]).all()
        return (int(label[0]) if len(which) else 0), system.left <= 0


class Recorded(Disk):
    """Keeps what is written."""

    def __init__(self, system):
        super().__init__(system)
        self.writes = []

    def before(self, change, path, *details):
        if change == "write":
            self.writes.append((details[0], bytes(details[1])))


def a_late_look(at, earlier):
    """Return the value of a row, of which an update returned. The next one returns during the read, and another
    begins."""
    with a_file() as (first, home):
        first.close()
        disk = Recorded(home.disk.system)
        with opened(replace(home, disk=disk)) as file, open(file.path, "r+b", buffering=0) as raw:
            for number in range(1, earlier + 1):
                update(file, [1], [number])
                file.sync()
            before = raw.read()
            update(file, [1], [earlier + 1])
            update(file, [1], [earlier + 2])
            (next_one, whole), (last, begun) = disk.writes[-2:]

            def go_on():
                os.pwrite(raw.fileno(), whole, next_one)
                os.pwrite(raw.fileno(), begun[:8], last)

            os.pwrite(raw.fileno(), before, 0)
            os.pwrite(raw.fileno(), whole[:32], next_one)
            return a_slow_read(home, go_on, at)


@pytest.mark.parametrize("earlier", [1, 2])
def test_a_value_is_never_older_than_an_update_that_had_returned(earlier):
    """Before and after a look, the heads of both copies were the same: the last update had written its checksum
    alone."""
    at, more = 0, True
    while more:
        at += 1
        found, more = a_late_look(at, earlier)
        assert found in (earlier, earlier + 1), at
    assert at > 6


def test_a_reader_takes_no_copy_for_damaged_by_a_header_of_before():
    """A writer was killed in an update; the next one opens the file during the read, and is killed, too."""
    at, more = 0, True
    while more:
        at += 1
        with a_file() as (file, home):
            update(file, [1], [1])
            file.sync()
            file.note_closed()
            file.close()
            cut_update(home, 2, 1, 2, 40)
            found, more = a_slow_read(home, lambda: cut_update(home, 2, 1, 3, 40), at)
            assert found == 1, at
    assert at > 4


def test_a_value_is_not_lost_between_the_heads_of_its_copies():
    """The first value stands in the second copy; the next one comes to the first copy, of which the reader has the head
    already, and then a kill cuts one that comes to the second copy, which an opening blanks."""
    at, more = 0, True
    while more:
        at += 1
        with a_file() as (file, home):
            update(file, [1], [1])

            def go_on(home=home):
                with opened(home, 2) as next_one:
                    update(next_one, [1], [2])
                cut_update(home, 2, 1, 3, 24)
                with opened(home, 2):
                    pass

            found, more = a_slow_read(home, go_on, at)
            assert found in (1, 2), at
    assert at > 4


def test_control_a_look_that_is_taken_once(monkeypatch):
    monkeypatch.setattr(MutableValues, "_is_still", lambda *_: True)
    with pytest.raises((AssertionError, CorruptError)):
        for earlier in (1, 2):
            test_a_value_is_never_older_than_an_update_that_had_returned(earlier)
    with pytest.raises(CorruptError):
        test_a_reader_takes_no_copy_for_damaged_by_a_header_of_before()


def test_where_loads_are_not_ordered_nothing_is_read_through_a_map(monkeypatch):
    monkeypatch.setattr(System, "loads_are_ordered", property(lambda self: False))
    with a_file() as (file, home), reader(home) as other:
        update(file, [1], [1])
        monkeypatch.setattr(MutableValues, "_maps", None)
        assert look(file, np.array([1])) == look(other, np.array([1])) == {1: 1}
