"""Snapshots: a copy that is a buffer of its own; what it takes along, what it refuses, what it leaves behind."""

import errno
import os
import pickle
import random
import shutil
import signal
import sys
import threading

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import (
    ClosedError,
    CorruptError,
    EnvironmentFault,
    ExistsError,
    InputError,
    LockedError,
    ReplacedError,
    RoleError,
    SyncFailedError,
)
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.lock import WriterLock
from ringmap.storage.disk.system import System
from ringmap.storage.records.manifest import read_manifest
from tests.disks import FaultyDisk, Through, kill
from tests.faults.crash.recording import Model, RecordingDisk, materialise
from tests.tiers import few
from tests.unit.buffers.steps import episode, stored
from tests.unit.storage.snapshots.race import state_of

LEFT = ".copy.ringmap-unfinished"


def filled(path, episodes=9, **options):
    """Return a buffer of 40 steps whose ring has wrapped, with episode data."""
    buffer = ReplayBuffer(40, path=path, seed=0, spare_rows=8, sync_every_s=0, **options)
    for number in range(episodes):
        buffer.write_episode(episode(number, 5 + number % 3, {"number": number, "text": "x" * 50}))
    return buffer


def same_buffers(one, other):
    assert state_of(one.engine.source) == state_of(other.engine.source)
    assert one.get_episode_data() == other.get_episode_data()
    assert one.column_names == other.column_names
    for i in range(one.num_episodes):
        theirs = other.load_episode(i)
        for name, values in one.load_episode(i).items():
            assert values.dtype == theirs[name].dtype
            np.testing.assert_array_equal(values, theirs[name])


@pytest.fixture(params=["writer", "reader", "ram"])
def handle(request, tmp_path):
    home = None if request.param == "ram" else tmp_path / "buf"
    buffer = filled(home)
    who = ReplayBuffer.open(home) if request.param == "reader" else buffer
    yield who
    who.close()
    buffer.close()


# -- what a snapshot is ----------------------------------------------------------------------------


def test_a_snapshot_is_a_buffer_of_its_own(handle, tmp_path):
    path = tmp_path / "new" / "copy"
    handle.snapshot(path)
    assert ringmap.check(path) == []
    with ReplayBuffer.open(path) as copied:
        same_buffers(copied, handle)
        assert copied.check() == []
    copied.close()
    before = state_of(handle.engine.source)
    own = ReplayBuffer(40, path=path, sync_every_s=0)
    for number in range(20, 40):
        own.write_episode(episode(number, 6, {"number": number}))
    assert stored(own) == list(range(34, 40))
    assert own.check() == []
    own.close()
    assert state_of(handle.engine.source) == before
    assert stored(handle) == [3, 4, 5, 6, 7, 8]
    assert handle.check() == []


def test_it_is_durable_and_needs_no_verification_after_a_reboot(handle, tmp_path, caplog):
    handle.snapshot(tmp_path / "copy")

    Rebooted = Through(ReplayBuffer, Disk(System(portable=True)))

    with caplog.at_level("INFO", "ringmap"), Rebooted.open(tmp_path / "copy", mode="r+") as copied:
        same_buffers(copied, handle)
    copied.close()
    assert "verifying" not in caplog.text


@pytest.mark.parametrize("episodes", [0, 1, 5, 9, 100])
def test_every_filling(tmp_path, episodes):
    with filled(tmp_path / "buf", episodes) as buffer:
        buffer.snapshot(tmp_path / "copy")
        assert ringmap.check(tmp_path / "copy") == []
        copied = ReplayBuffer.open(tmp_path / "copy", mode="r+")
        same_buffers(copied, buffer)
        copied.write_episode(episode(200, 7))
        assert stored(copied)[-1:] == [200]
        copied.close()
    buffer.close()


def test_a_schema_without_an_episode_and_a_cleared_buffer(tmp_path):
    schema = {"obs": ((3,), "f4"), "none": ((0,), "u1")}
    buffer = ReplayBuffer(50, path=tmp_path / "buf", schema=schema)
    buffer.snapshot(tmp_path / "empty")
    buffer.write_episode({"obs": np.ones((9, 3), np.float32), "none": np.zeros((9, 0), np.uint8)})
    buffer.snapshot(tmp_path / "one")
    buffer.clear()
    buffer.snapshot(tmp_path / "cleared")
    buffer.close()
    for name, count in (("empty", 0), ("one", 1), ("cleared", 0)):
        assert ringmap.check(tmp_path / name) == []
        with ReplayBuffer.open(tmp_path / name) as copied:
            assert copied.num_episodes == count
            assert copied.column_names == ["obs", "none"]
        copied.close()
        with pytest.raises(InputError, match="schema"):
            ReplayBuffer(50, path=tmp_path / name, schema={"obs": ((4,), "f4")})


def test_the_columns_of_a_refused_first_episode_are_not_taken(tmp_path):
    class Full(Disk):
        def before(self, change, path, *details):
            if change == "write" and "/columns/" in path:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Buffer = Through(ReplayBuffer, Full())

    buffer = Buffer(40, path=tmp_path / "buf")
    with pytest.raises(EnvironmentFault):
        buffer.write_episode(episode(0, 5))
    snapshot_through(Disk(), buffer, tmp_path / "copy")
    assert ringmap.check(tmp_path / "copy") == []
    with ReplayBuffer(40, path=tmp_path / "copy") as copied:
        copied.write_episode({"another": np.arange(3)})
    copied.close()
    buffer.close()


def test_parts_of_the_two_can_t_be_mixed_up(tmp_path):
    buffer = filled(tmp_path / "buf")
    buffer.snapshot(tmp_path / "copy")
    buffer.close()
    one, other = (read_manifest(Disk(), str(tmp_path / name)) for name in ("buf", "copy"))
    assert one.uuid != other.uuid
    for name in ("episodes.npy", "state.bin", "columns/000-episode.npy", "columns/003-action.npy"):
        shutil.copytree(tmp_path / "copy", tmp_path / "mixed")
        shutil.copy(tmp_path / "buf" / name, tmp_path / "mixed" / name)
        findings = ringmap.check(tmp_path / "mixed")
        assert name in {finding.file for finding in findings}, findings
        with pytest.raises(CorruptError, match=os.path.basename(name)):
            ReplayBuffer.open(tmp_path / "mixed").load_episode(0)
        shutil.rmtree(tmp_path / "mixed")


def test_the_small_state_comes_along(tmp_path):
    buffer = filled(tmp_path / "buf")
    buffer.sample(3)
    buffer.write_episode(episode(50, 5))  # carries the sampling state
    buffer.snapshot(tmp_path / "commit")
    there = buffer.state_dict()
    buffer.sample(3)
    buffer.flush()
    buffer.snapshot(tmp_path / "flush")
    flushed = buffer.state_dict()
    buffer.sample(3)
    buffer.snapshot(tmp_path / "later")  # not stored yet
    buffer.close()
    for name, expected in (("commit", there), ("flush", flushed), ("later", flushed)):
        copied = ReplayBuffer.open(tmp_path / name, mode="r+")
        assert copied.state_dict() == expected, name
        copied.close()


def test_settings_come_along_and_open_episodes_don_t(tmp_path):
    buffer = filled(tmp_path / "buf", history_len=3, durability="power", interrupted="keep")
    ended, recorded = buffer.begin_episode(), buffer.begin_episode()
    for t in range(4):
        for stream in (ended, recorded):
            stream.append({name: values[t] for name, values in episode(60, 6).items()})
    ended.finish()
    assert buffer.engine.source.carried["finished"] != []
    buffer.snapshot(tmp_path / "copy")
    recorded.abandon()
    copied = ReplayBuffer.open(tmp_path / "copy", mode="r+")
    same_buffers(copied, buffer)
    assert copied.options == buffer.options
    assert copied.engine.source.carried.get("finished", []) == []
    copied.close()
    buffer.close()


def test_sparse_files_stay_sparse(tmp_path):
    buffer = ReplayBuffer(100_000, path=tmp_path / "buf")
    buffer.write_episode({"obs": np.ones((50, 4096), np.uint8)})
    buffer.snapshot(tmp_path / "copy")
    buffer.close()
    taken = {
        str(p.relative_to(tmp_path / "copy")): (p.stat().st_blocks * 512, p.stat().st_size)
        for p in (tmp_path / "copy").rglob("*.npy")
    }
    assert taken["columns/000-obs.npy"][1] > 400 << 20
    assert 50 * 4096 <= taken["columns/000-obs.npy"][0] < 1 << 20
    assert taken["episodes.npy"][0] < 1 << 16


def test_segments_that_nobody_names_are_left_out(tmp_path):
    buffer = ReplayBuffer(40, path=tmp_path / "buf", sync_every_s=0)
    for number in range(12):  # a segment is full after three
        buffer.write_episode(episode(number, 10, {"big": bytes([number]) * 1_500_000}))
    assert len(list((tmp_path / "buf/data").iterdir())) > 1
    reader = ReplayBuffer.open(tmp_path / "buf")
    reader.snapshot(tmp_path / "copy")
    assert ringmap.check(tmp_path / "copy") == []
    with ReplayBuffer.open(tmp_path / "copy") as copied:
        same_buffers(copied, reader)
    copied.close()
    reader.close()
    buffer.close()


def test_segments_that_go_while_they_are_copied(tmp_path, monkeypatch):
    buffer = ReplayBuffer(40, path=tmp_path / "buf", spare_rows=10, sync_every_s=0)
    numbers = iter(range(100))

    def write(count):
        for number in [next(numbers) for _ in range(count)]:
            buffer.write_episode(episode(number, 10, {"big": bytes([number]) * 3_000_000}))

    write(6)
    reader = ReplayBuffer.open(tmp_path / "buf")
    size, struck = File.size, []

    def size_and_strike(file):
        if "/buf/data/" in file.path and len(struck) < 2:
            struck.append(file.path)
            write(8)
        return size(file)

    monkeypatch.setattr(File, "size", size_and_strike)
    reader.snapshot(tmp_path / "copy")
    assert len(struck) == 2
    assert ringmap.check(tmp_path / "copy") == []
    with ReplayBuffer.open(tmp_path / "copy") as copied:
        same_buffers(copied, buffer)
        named = {f"{int(n):012d}.bin" for n in copied.engine.source.table.read_range(19, 22)[0]["blob_segment"]}
    copied.close()
    assert {path.name for path in (tmp_path / "copy/data").iterdir()} == named
    reader.close()
    buffer.close()


def test_what_a_reader_knows_to_be_damaged_is_not_taken(tmp_path):
    Rebooted = Through(ReplayBuffer, Disk(System(portable=True)))

    buffer = Rebooted(40, path=tmp_path / "buf", sync_every_s=0)
    buffer.write_episode(episode(0, 5))
    buffer.flush()
    for number in (1, 2):
        buffer.write_episode(episode(number, 5))
    shutil.copytree(tmp_path / "buf", tmp_path / "cut")
    buffer.close()
    with open(tmp_path / "cut/columns/003-action.npy", "r+b") as file:
        file.seek(4096 + 16 * 7)
        file.write(b"\xff")
    reader = Rebooted.open(tmp_path / "cut")
    assert stored(reader) == [0, 2]
    reader.snapshot(tmp_path / "copy")
    assert ringmap.check(tmp_path / "copy") == []
    copied = ReplayBuffer.open(tmp_path / "copy", mode="r+")
    assert stored(copied) == [0, 2]
    copied.write_episode(episode(3, 5))
    assert stored(copied) == [0, 2, 3]
    copied.close()
    reader.close()


def test_copies_of_a_handle_make_snapshots_too(tmp_path):
    for home in (None, tmp_path / "buf"):
        buffer = filled(home)
        copied = pickle.loads(pickle.dumps(buffer))
        copied.snapshot(tmp_path / f"copy of {home is None}")
        child = os.fork()
        if child == 0:
            try:
                buffer.snapshot(tmp_path / f"fork of {home is None}")
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        for name in ("copy", "fork"):
            path = tmp_path / f"{name} of {home is None}"
            assert ringmap.check(path) == []
            with ReplayBuffer.open(path) as found:
                assert stored(found) == stored(buffer)
            found.close()
        copied.close()
        buffer.close()


# -- how the bytes get there -----------------------------------------------------------------------


class Counting(System):
    def __init__(self, copies):
        super().__init__()
        self.copies, self.calls = copies, []

    def share(self, source, fd):
        self.calls.append("share")
        return False

    def copy_range(self, source, fd, offset, nbytes):
        self.calls.append("copy")
        return super().copy_range(source, fd, offset, nbytes) if self.copies else 0


@pytest.mark.parametrize("way", ["kernel", "reads", "portable"])
def test_every_way_to_copy(tmp_path, way):
    system = System(portable=True) if way == "portable" else Counting(way == "kernel")
    buffer = filled(tmp_path / "buf")
    snapshot_through(Disk(system), buffer, tmp_path / "copy")
    assert ringmap.check(tmp_path / "copy") == []
    copied = ReplayBuffer.open(tmp_path / "copy")
    same_buffers(copied, buffer)
    copied.close()
    if way != "portable":
        assert {"share", "copy"} <= set(system.calls)
    buffer.close()


def test_rows_shared_by_the_file_system_are_not_copied(tmp_path):
    """As a reflink: the target has all bytes of the source at once. The real one is in test_file_systems.py."""

    class Sharing(System):
        copied = 0

        def share(self, source, fd):
            data = os.pread(source, 1 << 20, 0)
            return os.pwrite(fd, data, 0) == len(data)

        def copy_range(self, source, fd, offset, nbytes):
            self.copied += "/columns/" in os.readlink(f"/proc/self/fd/{fd}") and nbytes > 0
            return super().copy_range(source, fd, offset, nbytes)

    buffer, system = filled(tmp_path / "buf"), Sharing()
    snapshot_through(Disk(system), buffer, tmp_path / "copy")
    assert system.copied == 0
    assert ringmap.check(tmp_path / "copy") == [], "with a label of its own"
    copied = ReplayBuffer.open(tmp_path / "copy")
    same_buffers(copied, buffer)
    copied.close()
    buffer.close()


# -- refusals --------------------------------------------------------------------------------------


def test_the_target_is_new_or_empty(handle, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("file", "full"):
        with pytest.raises(ExistsError, match=f"{name} already"):
            handle.snapshot(tmp_path / name)
    assert (tmp_path / "full/mine").read_text() == (tmp_path / "file").read_text() == "mine"
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "ismount", lambda path: True)
        with pytest.raises(InputError, match="mount point"):
            handle.snapshot(tmp_path / "empty")
    handle.snapshot(tmp_path / "link")
    assert ringmap.check(tmp_path / "empty") == []
    assert not [p for p in os.listdir(tmp_path) if "unfinished" in p]


def test_not_inside_itself(tmp_path):
    buffer = filled(tmp_path / "buf")
    for inside in (tmp_path / "buf", tmp_path / "buf/data", tmp_path / "buf/a/b"):
        with pytest.raises(InputError, match="inside the buffer"):
            buffer.snapshot(inside)
    assert buffer.check() == []
    buffer.snapshot(tmp_path / "buffer")
    buffer.close()


def test_roles(tmp_path):
    buffer = filled(tmp_path / "buf")
    errors = []

    def in_the_middle(columns):
        try:
            buffer.engine.source.exclusively("test", lambda _: buffer.snapshot(tmp_path / "copy"))
        except RoleError as error:
            errors.append(str(error))
        return columns

    in_the_middle(None)
    assert len(errors) == 1
    assert "in the middle of another call of the same thread" in errors[0]
    reader = ReplayBuffer.open(tmp_path / "buf")
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.snapshot(tmp_path / "copy")
    os.rename(tmp_path / "buf", tmp_path / "moved")
    filled(tmp_path / "buf").close()
    with pytest.raises(ReplacedError):
        reader.snapshot(tmp_path / "copy")
    reader.close()
    assert sorted(os.listdir(tmp_path)) == ["buf", "moved"]


def test_two_at_once_to_the_same_path(tmp_path):
    buffer = filled(tmp_path / "buf")
    os.mkdir(tmp_path / LEFT)
    lock = WriterLock(Disk(), str(tmp_path / LEFT / "lock"), "other")
    lock.acquire()
    (tmp_path / LEFT / "state.bin").write_text("theirs")
    with pytest.raises(LockedError, match=f"is being made by process {os.getpid()}"):
        buffer.snapshot(tmp_path / "copy")
    assert (tmp_path / LEFT / "state.bin").read_text() == "theirs"
    lock.release()
    buffer.snapshot(tmp_path / "copy")
    assert not (tmp_path / LEFT).exists()
    buffer.close()


def test_many_threads_to_the_same_path(tmp_path):
    buffer, outcomes = filled(tmp_path / "buf"), []

    def make():
        try:
            buffer.snapshot(tmp_path / "copy")
            outcomes.append("made")
        except (LockedError, ExistsError):
            outcomes.append("refused")

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["made", "refused", "refused", "refused"]
    assert ringmap.check(tmp_path / "copy") == []
    assert sorted(os.listdir(tmp_path)) == ["buf", "copy"]
    buffer.close()


def test_another_one_that_ends_just_before_the_lock(tmp_path, monkeypatch):
    """Its folder got its name, so that none is there to be locked."""
    buffer, acquire = filled(tmp_path / "buf"), WriterLock.acquire

    def late(lock):
        if "unfinished" in lock.path:
            os.rename(os.path.dirname(lock.path), tmp_path / "copy")
            raise EnvironmentFault(errno.ENOENT, lock.path)  # of the file that was to be locked
        acquire(lock)

    monkeypatch.setattr(WriterLock, "acquire", late)
    with pytest.raises(LockedError, match="ended just now"):
        buffer.snapshot(tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["buf", "copy"]
    buffer.close()


def test_what_is_not_a_leftover_stays(tmp_path):
    buffer = filled(tmp_path / "buf")
    os.mkdir(tmp_path / LEFT)
    (tmp_path / LEFT / "thesis.txt").write_text("mine")
    with pytest.raises(ExistsError, match="thesis.txt"):
        buffer.snapshot(tmp_path / "copy")
    assert (tmp_path / LEFT / "thesis.txt").read_text() == "mine"
    buffer.close()


@pytest.mark.parametrize("damage", ["segment gone", "segment cut", "column cut"])
def test_damage_is_named(tmp_path, damage):
    buffer = filled(tmp_path / "buf")
    name = "data/000000000001.bin" if "segment" in damage else "columns/002-obs-x.npy"
    path = tmp_path / "buf" / name
    if damage == "segment gone":
        path.unlink()
    else:
        os.truncate(path, 100)
    with pytest.raises(CorruptError, match=os.path.basename(name)):
        buffer.snapshot(tmp_path / "copy")
    assert os.listdir(tmp_path) == ["buf"]
    buffer.engine.source.abandon()


# -- errors, interrupts, kills, power cuts ----------------------------------------------------------


def failing(at, error):
    """Return a disk whose N-th change fails."""
    disk = FaultyDisk()
    disk.fail(at, error)
    return disk


def snapshot_through(disk, buffer, path):
    """Make a snapshot whose own changes go through `disk`."""
    before, buffer.engine.disk = buffer.engine.disk, disk
    try:
        buffer.snapshot(path)
    finally:
        buffer.engine.disk = before


ERRORS = {
    "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "broken": OSError(errno.EIO, os.strerror(errno.EIO)),
    "interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize("role", few(["writer", "reader", "ram"]))
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
def test_an_error_at_every_change_leaves_nothing(tmp_path, role, error):
    buffer = filled(None if role == "ram" else tmp_path / "buf")
    who = ReplayBuffer.open(tmp_path / "buf") if role == "reader" else buffer
    there = sorted(os.listdir(tmp_path))
    at = 0
    while True:
        at += 1
        disk = failing(at, error)
        wanted = EnvironmentFault if isinstance(error, OSError) else KeyboardInterrupt
        try:
            snapshot_through(disk, who, tmp_path / "copy")
        except wanted as raised:
            if wanted is EnvironmentFault:
                assert raised.errno == error.errno
                assert "the buffer is as it was" in str(raised) or "can't be locked" in str(raised)
        if not disk.struck:
            break
        if (tmp_path / "copy").exists():  # the lock's signature may fail, and a rename be interrupted
            assert ringmap.check(tmp_path / "copy") == []
            shutil.rmtree(tmp_path / "copy")
        assert sorted(os.listdir(tmp_path)) == there, (at, sorted(os.listdir(tmp_path)))
    assert at > 40
    assert ringmap.check(tmp_path / "copy") == []
    buffer.write_episode(episode(80, 5))
    assert buffer.check() == []
    who.close()
    buffer.close()


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_kill_at_every_change(tmp_path, every):
    buffer = filled(tmp_path / "buf")
    reader = ReplayBuffer.open(tmp_path / "buf")
    at, killed = 1 - every, True
    while killed:
        at += every
        child = os.fork()
        if child == 0:
            try:
                snapshot_through(failing(at, kill), reader, tmp_path / "copy")
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        if (tmp_path / "copy").exists():
            assert ringmap.check(tmp_path / "copy") == []
            with ReplayBuffer.open(tmp_path / "copy") as copied:
                same_buffers(copied, reader)
            copied.close()
            shutil.rmtree(tmp_path / "copy")
        elif at % 5 == 0:
            assert set(os.listdir(tmp_path)) <= {"buf", LEFT}
            reader.snapshot(tmp_path / "copy")
            assert ringmap.check(tmp_path / "copy") == []
            assert sorted(os.listdir(tmp_path)) == ["buf", "copy"]
            shutil.rmtree(tmp_path / "copy")
    assert at > 40
    reader.close()
    buffer.close()


def test_a_full_disk_is_told_beforehand(tmp_path):
    class Small(Disk):
        def free(self, path):
            return 1000

    buffer = filled(None)
    with pytest.raises(EnvironmentFault, match="only 1,000 are free") as raised:
        snapshot_through(Small(), buffer, tmp_path / "copy")
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def cuts_of(tmp_path, buffer, cheats=lambda *_: False, each=False, count=10):
    """Yield what some power cuts leave of a snapshot: `(has returned, folder)`, after each change, or once it has
    returned."""
    (tmp_path / "root").mkdir()
    disk, rng, model = RecordingDisk(str(tmp_path / "root"), cheats=cheats), random.Random(0), Model({})
    snapshot_through(disk, buffer, tmp_path / "root/copy")
    for at, entry in enumerate([None, *disk.log]):
        if entry:
            model.apply(entry)
        for case in range(count if each or at == len(disk.log) else 0):
            root = tmp_path / f"{at}-{case}"
            materialise(model.crash(rng), str(root))
            yield at == len(disk.log), root / "copy"
            shutil.rmtree(root)


def test_a_power_cut_at_every_change(tmp_path):
    """Nothing, or all of it: whatever part of what was not synced reaches the disk."""
    whole = nothing = 0
    for has_returned, copy in cuts_of(tmp_path, filled(None), each=True, count=3):
        if copy.exists():
            whole += 1
            assert ringmap.check(copy) == []
        else:
            nothing += 1
            assert not has_returned
    assert whole >= 3
    assert nothing > 40


def priorities_after_cuts(tmp_path, cheats):
    """Return whether each of some cuts after a snapshot had returned left its priorities as they were."""
    sampler, found = PrioritizedSampler(rng=0), []
    buffer = filled(None, sampler=sampler)
    buffer.sample(4)
    ids = np.arange(buffer.engine.source.tail, buffer.engine.source.head)
    buffer.update_priorities(ids, np.arange(len(ids)))
    for _, path in cuts_of(tmp_path, buffer, cheats):
        copied = PrioritizedSampler(rng=0)
        with ReplayBuffer.open(path, sampler=copied) as copy:
            copy.sample(1)
            same = np.array_equal(copied.probabilities(ids), sampler.probabilities(ids))
        found.append(same and ringmap.check(path) == [])
    return found


def test_priorities_are_durable_when_it_returns(tmp_path):
    assert all(priorities_after_cuts(tmp_path, lambda *_: False))


def test_control_of_durable_priorities(tmp_path):
    def without(change, path, details):
        return change == "sync" and "priorities" in path

    assert not all(priorities_after_cuts(tmp_path, without))


def test_control_of_the_power_cuts(tmp_path):
    """Without the syncs of columns, some cut leaves a snapshot that is not whole."""

    def without(change, path, details):
        return change == "sync" and "/columns/" in path

    assert any(copy.exists() and ringmap.check(copy) for _, copy in cuts_of(tmp_path, filled(None), without))


def test_a_sync_that_fails_is_the_snapshot_s_alone(tmp_path):
    buffer = filled(tmp_path / "buf")
    disk = RecordingDisk(str(tmp_path))
    disk.fail(1, OSError(errno.EIO, "broken"), only="sync")
    with pytest.raises(EnvironmentFault) as raised:
        snapshot_through(disk, buffer, tmp_path / "copy")
    assert not isinstance(raised.value, SyncFailedError)
    buffer.write_episode(episode(90, 5))
    assert os.listdir(tmp_path) == ["buf"]
    buffer.close()


# -- compressed columns ----------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["disk", "ram"])
def test_compressed_columns(tmp_path, home):
    buffer = filled(tmp_path / "buf" if home == "disk" else None, storage="zarr")
    buffer.snapshot(tmp_path / "copy")
    assert ringmap.check(tmp_path / "copy") == []
    assert any((tmp_path / "copy/columns").glob("*.zarr"))
    copied = ReplayBuffer.open(tmp_path / "copy", mode="r+")
    same_buffers(copied, buffer)
    for number in range(20, 30):
        copied.write_episode(episode(number, 6))
    assert copied.check() == []
    copied.close()
    buffer.close()


def test_a_power_cut_after_a_snapshot_of_compressed_columns(tmp_path):
    assert all(ringmap.check(copy) == [] for _, copy in cuts_of(tmp_path, filled(None, storage="zarr")))
