"""The file of priorities by itself: kills and then power cuts, readers beside a writer that begins logs, interrupts,
and syncs that fail.

No two updates give the same priority, so one that stands says when it was given.
"""

import contextlib
import errno
import os
import random
from dataclasses import replace

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.system import System
from ringmap.storage.sidecars import priorities
from ringmap.storage.sidecars.priorities import Leaves, Points, PriorityFile, Range, StoredPriorities
from tests.disks import descriptor_of, ram_folder
from tests.faults.crash.priorities import make_small
from tests.faults.crash.recording import Always, Model, RecordingDisk, materialise
from tests.tiers import few
from tests.unit.storage.sidecars.test_mutable import home_of

ROWS = 20


class Handle:
    """A writer of the file, as a sampler is: `given` notes what each position was given, in order."""

    def __init__(self, home, given):
        PriorityFile.recover(home, ROWS)
        self.file, self.leaves, _ = PriorityFile.open(home, ROWS, write=True)
        self.home, self.given = home, given

    def update(self, position, value):
        self.given.setdefault(position, []).append(value)
        self.change(np.array([position]), np.array([value], np.float32))

    def change(self, positions, values):
        self.file.append(self.leaves, Points(positions, values, positions))
        self.leaves.values[positions] = values


def loaded(home):
    file, leaves, faults = PriorityFile.open(home, ROWS, write=False)
    file.close()
    return leaves, faults


def made(folder, disk=None, rows=ROWS):
    os.makedirs(os.path.join(folder, "buf"), exist_ok=True)
    home = home_of(disk or Disk(), str(folder), rows)
    PriorityFile.create(home, Leaves(np.zeros(rows, np.float32), rows))
    return home


def synced(folder):
    """Return where a file of the priorities 7, 8, 9, ... is, that file open for writing, and these."""
    home = made(folder)
    file, leaves, _ = PriorityFile.open(home, ROWS, write=True)
    leaves.values[:] = np.arange(ROWS) + 7
    file.sync(leaves)
    return home, file, leaves


def values_now(home):
    found, faults = loaded(home)
    assert faults == []
    return found.values


def fill(handle, count=60):
    for number in range(count):
        handle.update(number % 7, 1.0 + len(handle.given.get(number % 7, ())) * 7 + number % 7)


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)
    return monkeypatch


def test_positions_of_a_log_before_are_no_frame(small):
    """What an earlier log left behind the end of a log may look like the number of this one."""
    with ram_folder() as folder:
        handle, rng = Handle(home := made(folder), {}), random.Random(0)
        fill(handle, 1)
        for _ in range(120):
            places = np.full(rng.randint(1, 6), min(handle.file._number + 2, ROWS - 1))
            handle.change(places, np.ones(len(places), np.float32))
            np.testing.assert_array_equal(values_now(home), handle.leaves.values)


@pytest.mark.parametrize("rows", [8, 20, 64, 200])
def test_words_are_written_before_the_log_that_they_need_is_gone(small, rows):
    """Of changes of all sizes, some of them longer than a log."""
    with ram_folder() as folder:
        rng, home = random.Random(rows), made(folder, rows=rows)
        file, leaves, _ = PriorityFile.open(home, rows, write=True)
        value = 0.0
        for _ in range(400):
            places = np.array(rng.choices(range(rows), k=rng.choice([1, 2, 5, 12, 40])))
            values = np.arange(len(places), dtype=np.float32) + value
            value += len(places)
            change = Points(places, values, places)
            file.append(leaves, change)
            change.apply(leaves)
            again, found, faults = PriorityFile.open(home, rows, write=False)
            again.close()
            assert faults == []
            np.testing.assert_array_equal(found.values, leaves.values)
            assert found.highest == leaves.highest
        file.close()


def test_a_position_has_no_priority_of_another_lap(small):
    small.setattr(priorities, "_LOG_LEAST", 1024)
    with ram_folder() as folder:
        home = made(folder)
        file, leaves, _ = PriorityFile.open(home, ROWS, write=True)
        for change in (
            Points(np.arange(20), np.arange(20, dtype=np.float32), np.arange(20)),
            Range(20, 33, 19.0),
            Points(np.arange(28, 33), np.arange(28, 33, dtype=np.float32), np.arange(8, 13)),
        ):
            file.append(leaves, change)
            change.apply(leaves)
        for is_written in (False, True):
            if is_written:
                file.sync(leaves)
            expected = {33: [*[19.0] * 8, *range(28, 33), *range(13, 20)], 30: [*[19.0] * 8, 28, 29, *range(10, 20)]}
            for head in (33, 30):
                again, found, faults = PriorityFile.open(home, head, write=False)
                assert again._is_ahead == (head < 33)
                again.close()
                assert faults == []
                assert found.upto == head
                if is_written:  # a word of a lost row is no longer that of the lap before
                    expected[30][10:13] = [32.0] * 3
                assert found.values.tolist() == expected[head]
        PriorityFile.recover(home, 30)
        again, found, faults = PriorityFile.open(home, 33, write=False)
        again.close()
        assert faults == []
        assert found.values[10:13].tolist() == [32.0] * 3
        file.close()


def test_words_of_lost_rows_are_dropped_behind_the_newest_row_of_all(small):
    """In pieces of the words that no row has now."""
    with ram_folder() as folder:
        home, file, leaves = synced(folder)
        file.close()
        PriorityFile.recover(home, 5)
        found, faults = loaded(home)
        assert (faults, found.upto) == ([], 5)
        assert found.values.tolist() == [*range(7, 12), *[1.0] * (ROWS - 5)]


@pytest.mark.parametrize(
    "change", [Points(np.array([3]), np.array([0.5], np.float32), np.array([3])), Range(0, 4, 0.5)]
)
def test_a_row_that_nobody_has_drawn_yet_has_none_of_the_row_before_it(change):
    """Rows were written since, over those that the newest frame names."""
    with ram_folder() as folder:
        home = made(folder)
        file, leaves, _ = PriorityFile.open(home, ROWS, write=True)
        file.append(leaves, change)
        found, faults = file.load(ROWS + 4)
        file.close()
        assert (faults, found.upto) == ([], ROWS)
        assert found.values.tolist() == [1.0] * 4 + [0.0] * (ROWS - 4)


@pytest.mark.parametrize(
    "change", [Points(np.array([22]), np.array([90], np.float32), np.array([2])), Range(ROWS, 23, 90.0)]
)
def test_a_frame_alone_of_a_lost_row_is_dropped(change):
    """A cut has lost the words of that row, and kept the log."""
    with ram_folder() as folder:
        home = made(folder)
        file, leaves, _ = PriorityFile.open(home, ROWS, write=True)
        file.append(leaves, Points(np.array([5]), np.array([7], np.float32), np.array([5])))
        file.append(leaves, change)
        file.close()
        PriorityFile.recover(home, ROWS)
        again, found, faults = PriorityFile.open(home, 23, write=False)
        again.close()
        assert (faults, found.upto, found.values[5]) == ([], ROWS, 7)
        assert found.values[2] == found.highest


def test_of_priorities_from_before_those_of_rows_that_are_there_stay():
    """A copy of a buffer in RAM may be older than that of its sampler."""
    buf = ReplayBuffer(ROWS)
    buf.write_episode({"x": np.arange(5)})
    store = buf.engine.owned
    rows = store.home.rows
    kept = StoredPriorities(store, Leaves(np.full(rows, 7, np.float32), 9, 8.0)).leaves
    assert (kept.upto, kept.highest, kept.values[0]) == (5, 8.0, 7.0)
    other = StoredPriorities(store, Leaves(np.full(rows + 1, 7, np.float32), 5, 8.0)).leaves
    assert (other.upto, other.highest, len(other.values)) == (0, 1.0, rows)


def test_the_highest_priority_is_known_though_its_row_was_lost(small):
    with ram_folder() as folder:
        home = made(folder)
        file, leaves, _ = PriorityFile.open(home, ROWS, write=True)
        change = Points(np.array([3, 17, 17, 18]), np.array([5, 90, 7, 9], np.float32), np.array([3, 17, 17, 18]))
        file.append(leaves, change)
        change.apply(leaves)
        assert leaves.highest == 9
        for is_written in (False, True):  # of a value that was replaced within the call nobody was told
            if is_written:
                file.sync(leaves)
            again, found, faults = PriorityFile.open(home, 17, write=False)
            again.close()
            assert (faults, found.highest) == ([], 9)
        file.close()
        with open(home.path("priorities.bin"), "r+b") as one:
            one.seek(2)
            one.write(b"?")
        assert loaded(home)[1] == ["the word of the highest priority is damaged"]


def test_a_word_that_is_damaged_is_no_priority(small):
    with ram_folder() as folder:
        home, file, leaves = synced(folder)
        file.close()
        path = home.path("priorities.bin")
        with open(path, "rb") as one:
            whole = one.read()
        for bit in range(64 * ROWS):
            data = bytearray(whole)
            data[64 + bit // 8] ^= 1 << bit % 8
            with open(path, "wb") as one:
                one.write(data)
            found, faults = loaded(home)
            expected = leaves.values.tolist()
            expected[bit // 64] = found.highest
            assert found.values.tolist() == expected
            assert faults == ["1 words are damaged: these priorities are lost"]


def test_a_file_whose_log_is_damaged_is_written_again(small):
    with ram_folder() as folder:
        home, file, leaves = synced(folder)
        with open(home.path("priorities.bin"), "r+b") as one:
            one.seek(file._begin)
            one.write(b"\xff" * 20)
        file.close()
        assert "frame 0 of the log is damaged" in str(PriorityFile.recover(home, ROWS))
        np.testing.assert_array_equal(values_now(home), leaves.values)


class Striking(File):
    """A file whose owner writes between its reads, as often as a script says."""

    strike = None

    def read(self, size, offset):
        if self.strike is not None:
            self.strike()
        return super().read(size, offset)


class StrikingDisk(Disk):
    def open(self, path, write=False):
        return Striking(self, descriptor_of(super().open(path, write)), path)


@pytest.mark.parametrize("at", range(1, 14))
def test_a_reader_has_what_was_given_before_however_often_the_writer_turns_meanwhile(small, at, monkeypatch):
    """A writer that turns twice before a read writes over the log that was to be read."""
    with ram_folder() as folder:
        home = made(folder)
        handle = Handle(home, {})
        for number in range(1, 30 + at):
            handle.update(number % 4, 1000.0 + number)
        known, reads = handle.leaves.values.copy(), [0]

        def strike():
            reads[0] += 1
            if reads[0] == at:
                for number in range(40):
                    handle.update(5, number + 1.0)

        monkeypatch.setattr(Striking, "strike", staticmethod(strike))
        found, faults = loaded(replace(home, disk=StrikingDisk()))
        assert faults == []
        np.testing.assert_array_equal(found.values[:4], known[:4])


@pytest.mark.parametrize("is_new_log", [False, True])
def test_a_writer_that_is_not_scheduled_within_its_write_is_no_damage(monkeypatch, is_new_log):
    """However often a reader tries meanwhile: it waits."""
    with ram_folder() as folder:
        handle = Handle(home := made(folder), {})
        fill(handle, 10)
        path = home.path("priorities.bin")
        with open(path, "rb") as file:
            before = file.read()
        if is_new_log:
            handle.file.write(handle.leaves)
        else:
            handle.update(3, 99.0)
        with open(path, "r+b") as file:
            whole = file.read()
            changed = [at for at, (old, new) in enumerate(zip(before, whole, strict=True)) if old != new]
            middle = handle.file._begin + 12 if is_new_log else changed[-1]
            file.seek(middle)
            file.write(before[middle:])

            def scheduled(_):
                file.seek(0)
                file.write(whole)
                file.flush()

            file.flush()
            monkeypatch.setattr(System, "is_locked", lambda *_: True)
            monkeypatch.setattr(priorities.time, "sleep", scheduled)
            np.testing.assert_array_equal(values_now(home), handle.leaves.values)


def test_no_log_has_the_number_of_an_earlier_one():
    """Else frames of an earlier session could follow those of this one, where a cut has lost the end of a log."""
    with ram_folder() as folder:
        home = made(folder)
        path = home.path("priorities.bin")
        for session in range(2):
            handle = Handle(home, {})
            fill(handle, 10)
            handle.file.sync(handle.leaves)
            for number in range(30 - session * 8):
                handle.update(3, 1000.0 * (session + 1) + number)
            with open(path, "rb") as file:
                whole = file.read()
            if not session:
                before, end = whole, handle.file._begin + 1024  # that of 22 frames, and of a sector
        assert handle.file._end[0] == end
        handle.file.close()
        with open(path, "wb") as file:
            file.write(whole[:end] + before[end:])
        assert loaded(home)[0].values[3] == 2021.0


def test_what_a_cut_leaves_of_an_earlier_log_behind_the_newest_frame_is_no_damage():
    with ram_folder() as folder:
        handle = Handle(home := made(folder), {})
        fill(handle, 10)
        path, end = home.path("priorities.bin"), handle.file._begin + priorities._FIRST_NBYTES
        with open(path, "r+b") as file:
            before = file.read()
            handle.file.write(handle.leaves)
            file.seek(end)
            file.write(before[end:])
        np.testing.assert_array_equal(values_now(home), handle.leaves.values)


@pytest.mark.parametrize("used", [0, 1])
def test_a_change_of_any_size_leaves_the_file_its_size(small, used):
    """Also one that fills the log exactly, or would if it were the first in it."""
    small.setattr(priorities, "_LOG_LEAST", 64 * 12)
    with ram_folder() as folder:
        home = made(folder)
        nbytes = PriorityFile.nbytes(ROWS)
        for count in range(1, 70):
            handle = Handle(home, {})
            fill(handle, used)
            places = np.arange(count) % ROWS
            handle.change(places, np.arange(count, dtype=np.float32) + 1)
            assert os.path.getsize(home.path("priorities.bin")) == nbytes
            np.testing.assert_array_equal(values_now(home), handle.leaves.values)
            handle.file.close()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("at", range(1, 13))
def test_a_change_that_is_interrupted_harms_no_later_one(small, at, partial):
    """At each change of the disk: of an update, of one that begins a log, and of words."""
    error = OSError(errno.ENOSPC, "planted") if partial else KeyboardInterrupt()
    with ram_folder() as folder:
        root = str(folder / "root")
        materialise({"buf": {}}, root)
        disk = RecordingDisk(root, tree={"buf": {}})
        home = made(root, disk)
        for skipped in range(0, 30, 3):
            handle = Handle(home, {})
            fill(handle, skipped)
            disk.fail(at, error, partial=partial)
            with pytest.raises(type(error)):
                fill(handle, 30)
            disk.lift()
            fill(handle, 10)
            np.testing.assert_array_equal(values_now(home), handle.leaves.values)
            handle.file.close()


@pytest.mark.parametrize("at", range(1, 5))
def test_a_change_longer_than_the_log_that_fails_leaves_nothing_to_later_ones(small, at):
    with ram_folder() as folder:
        root = str(folder / "root")
        materialise({"buf": {}}, root)
        disk = RecordingDisk(root, tree={"buf": {}})
        handle = Handle(made(root, disk), {})
        fill(handle, 1)
        disk.fail(at, OSError(errno.ENOSPC, "planted"), partial=True)
        with pytest.raises(OSError, match="planted"):
            handle.change(np.arange(ROWS), np.full(ROWS, 500, np.float32))
        disk.lift()
        assert handle.leaves.values.max() < 500
        handle.update(5, 9.0)
        np.testing.assert_array_equal(values_now(handle.home), handle.leaves.values)


def after_a_failed_sync(folder, at):
    """Let sync `at` from here on fail, reopen, update, sync, and cut the power after each later change; return what was
    lost."""
    root = str(folder / f"root{at}")
    materialise({"buf": {}}, root)
    disk = RecordingDisk(root, tree={"buf": {}})
    home = made(root, disk)
    handle = Handle(home, {})
    fill(handle, 10)
    handle.file.sync(handle.leaves)
    first, least = len(disk.log), handle.leaves.values.copy()
    disk.fail(at, OSError(errno.EIO, "planted"), only="sync")
    while not any(entry[0] == "failed" for entry in disk.log):  # of a flush, or of a helper
        with contextlib.suppress(OSError):
            fill(handle, 3)
            handle.file.sync(handle.leaves)
    disk.lift()
    handle.file.close()
    handle = Handle(home, handle.given)
    fill(handle, 3)
    handle.file.sync(handle.leaves)
    synced, last = handle.leaves.values.copy(), len(disk.log)
    fill(handle, 40)
    lost = []
    for moment in range(first, len(disk.log) + 1):
        model = Model({"buf": {}})
        for entry in disk.log[:moment]:
            model.apply(entry)
        expected = synced if moment >= last else least
        for seed in range(4):
            left = f"{root}-{moment}-{seed}"
            materialise(model.crash(random.Random(seed)), left)
            found = loaded(home_of(Disk(), left, ROWS))[0]
            if found is None or (found.values < expected).any():
                lost.append((moment, seed))
    return lost


@pytest.mark.parametrize("at", few([4, 17, 1, 2, 3, *range(5, 17), 18, 19], 2))
def test_a_failed_sync_is_known_to_who_opens_the_file_again(small, at):
    with ram_folder() as folder:
        assert after_a_failed_sync(folder, at) == []


def test_control_nobody_knows_of_a_failed_sync(small):
    """A file that is opened again goes on, and its next sync is only a sync."""
    write, write_words = PriorityFile.write, PriorityFile._write_words

    def not_again(self, leaves):
        small.setattr(PriorityFile, "_write_words", write_words if not any(self._read_begin()) else lambda *_: None)
        return write(self, leaves)

    small.setattr(PriorityFile, "write", not_again)
    with ram_folder() as folder:
        assert after_a_failed_sync(folder, 2)


def test_a_flush_after_a_failed_one_writes_all_again():
    """What the failed one left counts as clean. The log is of full size: a small one would go over it again."""
    with ram_folder() as folder:
        root = str(folder / "root")
        materialise({"buf": {}}, root)
        disk = RecordingDisk(root, tree={"buf": {}})
        handle = Handle(made(root, disk), {})
        fill(handle, 10)
        disk.fail(1, OSError(errno.EIO, "planted"), only="sync")
        with pytest.raises(OSError, match="planted"):
            handle.file.sync(handle.leaves)
        disk.lift()
        handle.file.sync(handle.leaves)
        materialise(disk.model.crash(Always(0)), f"{root}-left")
        assert values_now(home_of(Disk(), f"{root}-left", ROWS)).tolist() == handle.leaves.values.tolist()


def test_control_words_are_not_written_when_the_log_is_full(small):
    small.setattr(PriorityFile, "_write_words", lambda *_: None)
    with pytest.raises(AssertionError):
        test_words_are_written_before_the_log_that_they_need_is_gone(small, 64)
