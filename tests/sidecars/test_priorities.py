"""The file of priorities by itself: kills and then power cuts, readers beside turns, helpers that fail or go on
unknown.

No two updates give the same priority, so one that stands says when it was given.
"""

import contextlib
import errno
import os
import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from ringmap.storage.disk.files import Disk, FileHandle
from ringmap.storage.disk.frames import FrameWriter
from ringmap.storage.disk.process import Begun
from ringmap.storage.sidecars import priorities
from ringmap.storage.sidecars.priorities import Leaves, PriorityFile
from tests.crash.priorities import Late, recover_if_stale
from tests.crash.recording import Always, Model, RecordingDisk, materialise
from tests.disks import Cut, descriptor_of, ram_folder
from tests.sidecars.test_mutable import home_of
from tests.tiers import few

ROWS = 20


class Handle:
    """A writer of the file, as a sampler is: `given` notes what each position was given, in order."""

    def __init__(self, home, given):
        assert PriorityFile.recover(home, ROWS) is not None
        self.file = PriorityFile.open(home, write=True)
        self.leaves, _ = self.file.load()
        self.given = given

    def update(self, position, value):
        self.given.setdefault(position, []).append(value)
        positions, values = np.array([position]), np.array([value], np.float32)
        if not self.file.append_points(positions, values):
            self.file.turn(self.leaves)
            assert self.file.append_points(positions, values)
        self.leaves.values[position] = value


def loaded(home):
    with contextlib.closing(PriorityFile.open(home, write=False)) as file:
        return file.load()


def made(folder, disk=None, rows=ROWS):
    os.makedirs(os.path.join(folder, "buf"), exist_ok=True)
    home = home_of(disk or Disk(), str(folder), rows)
    PriorityFile.create(home, Leaves(np.zeros(rows, np.float32), rows))
    return home


def values_now(home):
    found, faults = loaded(home)
    assert faults == []
    return found.values


def fill(handle, count=60):
    for number in range(count):
        handle.update(number % 7, 1.0 + len(handle.given.get(number % 7, ())) * 7 + number % 7)


def lost_by(seed, folder, sessions=3, cuts=60):
    """Return what is lost, in words, after sessions that are killed, and a power cut at a random moment."""
    rng, given, synced = random.Random(seed), {}, [(0, {})]
    root = str(folder / str(seed))
    materialise({"buf": {}}, root)
    disk = RecordingDisk(root, tree={"buf": {}})
    home = made(root, disk)
    first, value, at = len(disk.log), 1.0, [(0, {})]
    for _ in range(sessions):
        disk.fail(rng.randint(3, 60), Cut(), sticky=True)
        with contextlib.suppress(Cut):
            handle = Handle(home, given)
            for _ in range(60):
                value += 1
                handle.update(rng.randrange(4), value)
                at.append((len(disk.log), {p: len(v) for p, v in given.items()}))
                if rng.random() < 0.1:
                    handle.file.keep(handle.leaves)
                    synced.append((len(disk.log), {p: len(v) for p, v in given.items()}))
        disk.lift()
        found = loaded(home)[0].values  # a kill takes nothing that had returned
        for position, values in given.items():
            newest = at[-1][1].get(position, 0)
            allowed = [0.0, *values][newest:]
            if found[position] not in allowed:
                return f"a kill left {found[position]} at {position}, expected {allowed}"
            if values and found[position] != values[-1]:
                values.pop()  # the call that was killed did nothing
    for cut in range(cuts):
        moment = rng.randint(first, len(disk.log))
        model = Model({"buf": {}})
        for entry in disk.log[:moment]:
            model.apply(entry)
        left = str(folder / f"{seed}-{cut}")
        materialise(model.crash(rng), left)
        after = home_of(Disk(), left, ROWS)
        found = loaded(after)[0]
        counts = [known for logged, known in synced if logged <= moment][-1]
        for position, values in given.items():
            allowed = [0.0, *values][counts.get(position, 0) :]
            if found is None or found.values[position] not in allowed:
                got = None if found is None else found.values[position]
                return f"a cut left {got} at {position}, expected {allowed}"
    return ""


@pytest.fixture
def small(monkeypatch):
    recover_if_stale(monkeypatch)
    return monkeypatch


@pytest.mark.parametrize("seed", few(range(40), 1))
def test_a_power_cut_after_a_kill_leaves_what_was_synced(small, seed):
    with ram_folder() as folder:
        assert [lost for at in range(10) if (lost := lost_by(10 * seed + at, folder))] == []


def test_nothing_rests_on_what_a_killed_helper_did_not_sync(small):
    with ram_folder() as folder:
        root = str(folder / "root")
        materialise({"buf": {}}, root)
        disk = RecordingDisk(root, tree={"buf": {}})
        handle = Handle(home := made(root, disk), {})
        fill(handle, 10)
        synced = handle.leaves.values.copy()
        handle.file.keep(handle.leaves)
        disk.fail(1, Cut(), only="sync")
        with pytest.raises(Cut):
            fill(handle, 40)
        disk.lift()
        first = len(disk.log)
        fill(Handle(home, handle.given), 40)
        for moment in range(first, len(disk.log) + 1):
            model = Model({"buf": {}})
            for entry in disk.log[:moment]:
                model.apply(entry)
            for seed in range(10):
                materialise(model.crash(random.Random(seed)), left := f"{root}-{moment}-{seed}")
                found, _ = loaded(home_of(Disk(), left, ROWS))
                assert found is not None
                assert (found.values >= synced).all(), "values only rise"


def test_a_log_that_lost_its_end_is_told(small):
    with ram_folder() as folder:
        handle = Handle(home := made(folder), {})
        generation, log = handle.file._newest
        while handle.file._newest[0] == generation:
            end, _ = log.end
            fill(handle, 1)
        with contextlib.closing(home.disk.open(home.path("priorities.bin"), write=True)) as file:
            file.write(bytes(40), end - 40)
        assert "has lost its end" in str(loaded(home)[1])


def test_positions_of_a_log_before_are_no_frame(small):
    """What an earlier generation left behind the end of a log may look like the number of this one."""
    with ram_folder() as folder:
        handle, rng = Handle(home := made(folder), {}), random.Random(0)
        for _ in range(120):
            places = np.full(rng.randint(1, 6), min(handle.file._newest[0] + 2, ROWS - 1))
            values = np.ones(len(places), np.float32)
            if not handle.file.append_points(places, values):
                handle.file.turn(handle.leaves)
                assert handle.file.append_points(places, values)
            handle.leaves.values[places] = values
            np.testing.assert_array_equal(values_now(home), handle.leaves.values)


class Striking(FileHandle):
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


@pytest.mark.parametrize("moment", [0, 2])
def test_a_helper_that_an_interrupt_left_behind_writes_over_nothing(small, moment):
    """The interrupt comes when the helper has the work, and its caller does not know of it yet.

    moment: the change before which the helper has no processor; 0: before its work.
    """
    gate, begun, written = threading.Event(), [], []

    class Slow(Disk):
        def before(self, change, path, *details):
            if threading.current_thread() in begun:
                written.append(change)
                if len(written) == moment:
                    gate.wait(10)

    def interrupted(work):
        begun.append(threading.Thread(target=lambda: (moment or gate.wait(10), work())))
        begun[0].start()
        raise KeyboardInterrupt

    with ram_folder() as folder:
        handle = Handle(home := made(folder, Slow()), {})
        with small.context() as patch:
            patch.setattr(priorities, "begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fill(handle)
        threading.Timer(0.2, gate.set).start()
        generation = handle.file._newest[0]
        while handle.file._newest[0] == generation:
            fill(handle, 1)
        gate.set()
        begun[0].join()
        fill(handle, 1)
        np.testing.assert_array_equal(values_now(home), handle.leaves.values)
        handle.file.close()


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_a_helper_that_fails_keeps_no_later_update_from_being_stored(small, error, caplog):
    struck = []

    class Failing(Disk):
        def before(self, change, path, *details):
            if threading.current_thread() is not threading.main_thread():
                struck.append(change)
                raise error("planted")

    def done(work):
        helper = threading.Thread(target=work)
        helper.start()
        helper.join()
        return Begun(work, None)

    small.setattr(priorities, "begin", done)
    with ram_folder() as folder:
        handle = Handle(home := made(folder, Failing()), {})
        fill(handle)
        handle.file.close()
        assert struck
        assert "the priorities are written again" in caplog.text
        np.testing.assert_array_equal(values_now(home), handle.leaves.values)


def test_what_a_handler_of_signals_raises_arrives(small):
    """It is not taken for an error of the helper that is waited for."""

    class Interrupted(Late):
        def drop(self):
            raise TimeoutError("planted")

        end = drop

    with ram_folder() as folder:
        handle = Handle(home := made(folder), {})
        with small.context() as patch:
            patch.setattr(priorities, "begin", Interrupted)
            with pytest.raises(TimeoutError, match="planted"):
                fill(handle)
        handle.file._helper = None
        fill(handle)
        np.testing.assert_array_equal(values_now(home), handle.leaves.values)


def test_a_turn_that_was_interrupted_is_no_damage(small):
    with ram_folder() as folder:
        handle = Handle(home := made(folder), {})
        write = FrameWriter.write

        def interrupted(self, payload):
            write(self, payload)
            if priorities._FRAME.unpack_from(payload)[1] == priorities._TURNS:
                raise KeyboardInterrupt

        small.setattr(FrameWriter, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            while True:  # four at a time: behind them is room for one
                values = np.arange(4, dtype=np.float32)
                if not handle.file.append_points(np.arange(4), values):
                    handle.file.turn(handle.leaves)
                handle.leaves.values[:4] = values
        small.setattr(FrameWriter, "write", write)
        handle.update(3, 3.0)
        np.testing.assert_array_equal(values_now(home), handle.leaves.values)


def after_a_failed_sync(folder, at):
    """Let sync `at` from here on fail, reopen, update, sync, and cut the power after each later change; return what was
    lost."""
    root = str(folder / f"root{at}")
    materialise({"buf": {}}, root)
    disk = RecordingDisk(root, tree={"buf": {}})
    home = made(root, disk)
    handle = Handle(home, {})
    fill(handle, 10)
    handle.file.keep(handle.leaves)
    first, least = len(disk.log), handle.leaves.values.copy()
    disk.fail(at, OSError(errno.EIO, "planted"), only="sync")
    while not any(entry[0] == "failed" for entry in disk.log):  # of a flush, or of a helper
        with contextlib.suppress(OSError):
            fill(handle, 3)
            handle.file.keep(handle.leaves)
    disk.lift()
    handle.file.close()
    handle = Handle(home, handle.given)
    fill(handle, 3)
    handle.file.keep(handle.leaves)
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
    small.setattr(PriorityFile, "_renew_bytes", lambda self: None)
    with ram_folder() as folder:
        assert after_a_failed_sync(folder, 4)


def test_a_sync_that_failed_in_a_helper_is_known_to_a_flush():
    """The frames before it count as clean, too: the flush writes all again, in place of a sync that would tell
    nothing. The log is of full size: a small one would be full again, and written anew, before the flush."""
    with ram_folder() as folder:
        root = str(folder / "root")
        materialise({"buf": {}}, root)
        disk = RecordingDisk(root, tree={"buf": {}})
        handle = Handle(made(root, disk), {})
        disk.fail(1, OSError(errno.EIO, "planted"), only="sync")
        number = 0
        while not any(entry[0] == "failed" for entry in disk.log[-9:]):
            handle.update(number % 7, number := number + 1)
        disk.lift()
        handle.file.keep(handle.leaves)
        materialise(disk.model.crash(Always(0)), f"{root}-left")
        assert values_now(home_of(Disk(), f"{root}-left", ROWS)).tolist() == handle.leaves.values.tolist()


def test_a_sync_that_succeeds_forgets_no_other_one_that_failed_beside_it(small):
    """A helper's, beside that of a flush: the byte says that one of them failed."""
    with ram_folder() as folder:
        home = made(folder)
        file = PriorityFile.open(home, write=True)
        real, begun = FileHandle.sync, []

        def beside():
            with pytest.raises(OSError, match="planted"):
                file.sync()

        def sync(self):
            if begun:
                raise OSError(errno.EIO, "planted")
            begun.append(threading.Thread(target=beside))
            begun[0].start()
            begun[0].join(0.1)
            real(self)

        small.setattr(FileHandle, "sync", sync)
        file.sync()
        begun[0].join()
        assert file.is_unsure
        file.close()
