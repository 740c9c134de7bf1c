"""The slots that batches travel in: used again, bounded, never written under a reader, gone with the processes."""

import contextlib
import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from ringmap import ReplayBuffer
from ringmap.buffers.batch import Batch
from ringmap.datasets import worker_slots
from ringmap.datasets import worker_slots as glue
from ringmap.errors import RoleError
from tests import ROOT
from tests.tiers import few
from tests.unit.buffers.loading.conftest import end, everything, prove

SHM = Path("/dev/shm")
linux = pytest.mark.skipif(not SHM.is_dir(), reason="looks into /dev/shm")


MARK = "RINGMAP_TEST_OF_SLOTS"
"""In the environment of the processes that a test starts, so that they are found when their parent is gone."""


def family():
    """Return the pids of this process, of its descendants, and of processes that were started with this `MARK`."""
    parents, found = {}, {os.getpid()}
    mark = f"{MARK}={os.environ.get(MARK)}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{pid}")
            parents[pid] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if mark in (place / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def is_mapped(name, but):
    """Tell whether a process other than these maps a file: one that is shared by name outlives the worker that made
    it."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if int(path.parent.name) not in but and name in path.read_text():
                return True
    return False


def in_use():
    """Return what is left in /dev/shm of the names that PyTorch gives, and the bytes that this family of processes has
    there."""
    pids, sizes = family(), {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                span, _, _, _, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith("/dev/shm/torch_"):
                    start, end = (int(place, 16) for place in span.split("-"))
                    sizes[inode] = max(end - start, sizes.get(inode, 0))
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file).startswith("/dev/shm/torch_"):
                        sizes[str(file.stat().st_ino)] = file.stat().st_size
    names = set()
    for name in os.listdir(SHM):
        if name.startswith("torch_"):
            pid = int(name.split("_")[1])
            dead = not os.path.exists(f"/proc/{pid}")
            if pid in pids or (dead and not is_mapped(name, pids)):  # else another test's
                names.add(name)
    return names, sum(sizes.values())


@contextlib.contextmanager
def nothing_left(slack=1 << 20, lasts_s=40):
    """Make sure that this family of processes has in the end no more shared memory than before."""
    gc.collect()
    names, used = in_use()
    os.environ[MARK] = str(time.monotonic_ns())
    try:
        yield
        gc.collect()
        for _ in range(10 * lasts_s):  # a killed process is gone when the kernel gets round to it
            now, still = in_use()
            if now <= names and still <= used + slack:
                return
            time.sleep(0.1)
    finally:
        del os.environ[MARK]
    raise AssertionError(f"left in /dev/shm: {now - names}, {still - used:,} bytes")


def test_control_what_is_left_is_seen():
    """A block that is kept, and a process without its parent that keeps one."""
    with pytest.raises(AssertionError, match=r"\d,\d{3},\d{3} bytes"), nothing_left(lasts_s=1):
        kept = torch.zeros(1 << 20).share_memory_()
    assert kept.is_shared()
    program = """
import mmap, os, time
name = f"/dev/shm/torch_{os.getpid()}_1"  # as PyTorch's, whose import takes two seconds
file = os.open(name, os.O_RDWR | os.O_CREAT)
os.unlink(name)
os.truncate(file, 4 << 20)
kept = mmap.mmap(file, 4 << 20)
if (pid := os.fork()) == 0:
    time.sleep(60)
print(pid, flush=True)
os._exit(0)
"""
    with pytest.raises(AssertionError, match=r"\d,\d{3},\d{3} bytes"), nothing_left(lasts_s=1):
        parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        orphan = int(parent.stdout.readline())
        parent.stdout.close()
        parent.wait()
    os.kill(orphan, signal.SIGKILL)


@pytest.fixture
def wide(tmp_path):
    """A buffer whose batches of 16 take 3 MB, in all 20 of them."""
    made = ReplayBuffer(4000, 4, path=tmp_path / "wide", seed=0, sync_every_s=0)
    for number in range(6):
        made.write_episode({"pixels": np.full((60, 128, 128, 3), number, np.uint8), "step": np.arange(60)})
    yield made
    made.close()


def test_a_slot_is_used_again_once_its_batch_is_gone():
    slots = glue.Slots()
    layout = {"a": ((100, 100), np.dtype("f4")), "text": ((100,), np.dtype("U5"))}
    room = slots.allocate(layout)
    assert [*room] == ["a"]
    where = room["a"].ctypes.data
    del room
    assert slots.allocate(layout)["a"].ctypes.data == where
    kept = [slots.allocate(layout) for _ in range(glue.MAX_SLOTS)]
    assert len({room["a"].ctypes.data for room in kept}) == glue.MAX_SLOTS
    assert slots.allocate(layout) is None
    view = kept.pop()["a"][3:5].T  # a view keeps its slot
    assert slots.allocate(layout) is None
    del view
    assert slots.allocate(layout) is not None


def test_a_slot_that_is_too_small_makes_room_for_a_larger_one():
    slots = glue.Slots()
    for rows in range(1, 3 * glue.MAX_SLOTS):
        assert slots.allocate({"a": ((rows, 1000), np.dtype("f8"))})["a"].shape == (rows, 1000)
    assert len(slots._slots) <= glue.MAX_SLOTS


def test_a_sent_slot_waits_for_the_other_side():
    slots = glue.Slots()
    layout = {"a": ((1000,), np.dtype("f8"))}
    slots.allocate(layout)
    (slot,) = slots._slots
    slot.sent = True
    assert not slot.is_free
    batch = glue._unpack(slot.block, {}, {"a": (64, (1000,), "<f8")})
    part = batch["a"][10:20]
    del batch
    gc.collect()
    assert not slot.is_free
    del part
    gc.collect()
    assert slot.is_free


def test_a_batch_outside_of_slots_is_copied_into_one_when_it_is_sent():
    kept = torch.arange(1000.0)
    make, args = glue._send(glue.SlotBatch({"a": kept, "text": ["x"]}))
    assert make is glue._unpack_new
    batch = make(*args)
    assert torch.equal(batch["a"], kept)
    assert batch["text"] == ["x"]
    batch["a"].zero_()
    assert torch.equal(kept, torch.arange(1000.0))
    layout = {"a": ((1000,), np.dtype("f4"))}
    held = [glue.worker_slots().allocate(layout) for _ in range(glue.MAX_SLOTS)]
    assert held[-1] is None
    assert glue._send(glue.SlotBatch({"a": kept}))[0] is dict


def test_no_two_threads_get_one_slot():
    """PyTorch sends from a thread of its own, while the worker gathers the next batch."""
    slots, clashes = glue.Slots(), []
    layout = {"a": ((500,), np.dtype("i8"))}

    def take(mine):
        for _ in range(400):
            room = slots.allocate(layout)
            room["a"][:] = mine
            time.sleep(0)
            clashes.extend(set(room["a"].tolist()) - {mine})
            del room

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not clashes


def test_a_child_that_drops_its_copy_of_a_batch_frees_nothing():
    slots = glue.Slots()
    slots.allocate({"a": ((1000,), np.dtype("f8"))})
    (slot,) = slots._slots
    slot.sent = True
    batch = glue._unpack(slot.block, {}, {"a": (64, (1000,), "<f8")})
    child = os.fork()
    if child == 0:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert not slot.is_free


def test_a_child_that_was_forked_with_a_batch_keeps_what_it_saw(disk):
    """The loop goes on to other batches while the child looks at this one."""
    loader = DataLoader(disk, 4, shuffle=True, num_workers=1, persistent_workers=True)
    passing = iter(loader)
    batch = next(passing)
    before = batch["place"].clone()
    go, said = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go[0], 1)
        os.write(said[1], b"1" if torch.equal(before, batch["place"]) else b"0")
        os._exit(0)
    for _ in range(3):
        for batch in passing:
            prove(batch)
        passing = iter(loader)
    os.write(go[1], b"x")
    assert os.read(said[0], 1) == b"1"
    os.waitpid(child, 0)
    for end_of_pipe in (*go, *said):
        os.close(end_of_pipe)
    end(loader)


def test_a_slot_that_a_child_may_look_at_is_replaced():
    slots = glue.Slots()
    layout = {"a": ((1000,), np.dtype("f8"))}
    slots.allocate(layout)
    (slot,) = slots._slots
    slot.sent = True
    batch = glue._unpack(slot.block, {}, {"a": (64, (1000,), "<f8")})
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    del batch
    assert not slot.is_free
    for _ in range(3 * glue.MAX_SLOTS):
        assert slots.allocate(layout) is not None
    assert slot not in slots._slots
    assert len(slots._slots) == 1


def twice(clips):
    batch = default_collate(clips)
    return batch, copy.copy(batch)


def collated_twice(clips):
    return default_collate(clips), default_collate(clips)


def with_its_past(clips, past=[]):  # noqa: B006 - what a worker remembers between two batches
    batch = default_collate(clips)
    past.append(batch)
    return past[max(0, len(past) - 3)], batch


@pytest.mark.parametrize("collate", [twice, collated_twice, with_its_past])
def test_a_slot_that_two_batches_lie_in(disk, collate):
    kept = []
    for one, other in DataLoader(disk, 4, num_workers=1, collate_fn=collate, prefetch_factor=4):
        prove(one)
        kept.append((other, {name: values.clone() for name, values in other.items()}))
        del one, other
        for batch, twin in kept:
            assert all(torch.equal(values, twin[name]) for name, values in batch.items())
        kept = kept[-5:]


def with_gradient(batch):
    batch["action"].requires_grad_()
    return batch


def as_bfloat16(batch):
    batch["action"] = batch["action"].view(torch.bfloat16)
    return batch


@pytest.mark.parametrize(
    "change",
    [with_gradient, as_bfloat16, copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))],
)
def test_a_batch_that_a_collate_fn_changed_arrives_as_it_is(disk, change):
    loader = DataLoader(
        disk,
        8,
        num_workers=1,
        timeout=60,
        collate_fn=lambda clips: change(default_collate(clips)),
    )
    plain = DataLoader(disk, 8)
    for got, expected in zip(loader, plain, strict=True):
        assert type(got) is Batch
        np.testing.assert_array_equal(got.ids, expected.ids)
        expected = change(expected)
        for name, values in expected.items():
            assert got[name].dtype == values.dtype
            assert got[name].requires_grad == values.requires_grad
            assert torch.equal(got[name], values)


def test_a_copy_that_a_worker_makes_takes_no_slot_for_ever(disk):
    """A deep copy, or a plain pickle, is no way to the loader's process."""

    def collate(clips):
        batch = default_collate(clips)
        pickle.dumps(batch)
        copy.deepcopy(batch)
        return batch, len(glue.worker_slots()._slots)

    slots = []
    for batch, count in DataLoader(disk, 4, num_workers=1, collate_fn=collate):
        prove(batch)
        slots.append(count)
    assert len(slots) > 20
    assert max(slots) < 8


@linux
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("persistent", few([True, False]))
def test_after_the_normal_end(wide, method, persistent):
    with nothing_left():
        loader = DataLoader(wide, 16, num_workers=2, multiprocessing_context=method, persistent_workers=persistent)
        for _ in range(2):
            assert sum(len(batch["step"]) for batch in loader) == len(wide)
        end(loader)
        del loader


@linux
@pytest.mark.parametrize("persistent", few([True, False]))
def test_after_a_break_in_mid_pass(wide, persistent):
    with nothing_left():
        loader = DataLoader(wide, 16, num_workers=2, persistent_workers=persistent)
        for _ in range(3):
            for number, batch in enumerate(loader):
                assert (batch["pixels"] == batch["pixels"][:, :, :1, :1, :1]).all()
                if number == 5:
                    break
        assert sum(len(batch["step"]) for batch in loader) == len(wide)
        end(loader)
        del loader, batch


@pytest.mark.slow
@linux
def test_after_the_main_process_is_killed(wide):
    program = f"""
import sys
from torch.utils.data import DataLoader
from ringmap import ReplayBuffer
buf = ReplayBuffer.open({str(wide.path)!r})
for batch in DataLoader(buf, 16, num_workers=2):
    print("going", flush=True)
    sys.stdin.readline()
"""
    with nothing_left():
        child = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout.readline() == b"going\n"
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def test_no_batch_changes_while_it_is_kept(disk):
    loader = DataLoader(disk, 8, num_workers=2, persistent_workers=True)
    window = []
    for _ in range(4):
        for batch in loader:
            window.append((batch, {name: values.clone() for name, values in batch.items()}))
            for one, twin in window:
                prove(one)
                assert all(torch.equal(values, twin[name]) for name, values in one.items())
            window = window[-3:]
    end(loader)


def test_a_full_shared_memory_is_left_alone(disk, monkeypatch):
    monkeypatch.setattr(glue, "_has_space", lambda nbytes: False)
    found = [clip for batch in DataLoader(disk, 16, num_workers=2) for clip in prove(batch)]
    assert sorted(found) == everything(disk)


def test_control_a_slot_that_is_written_too_early(disk, monkeypatch):
    monkeypatch.setattr(glue._Slot, "is_free", property(lambda slot: True))
    with pytest.raises(AssertionError):
        test_no_batch_changes_while_it_is_kept(disk)


def counted(monkeypatch):
    """Return a list that grows by one for each block that comes: the worker and the number of the slot."""
    came, keep = [], worker_slots.keep

    def count(sender, number, block):
        came.append((sender.name, number))
        return keep(sender, number, block)

    monkeypatch.setattr(glue, "keep", count)
    return came


@pytest.fixture
def alone():
    """Wait until loaders of earlier tests, which their tracebacks hold, are gone."""
    gc.collect()
    assert not maps()


def maps():
    """Return the numbers of the slots that this process has mapped, by worker."""
    return {name: set(kept) for name, (_, kept) in worker_slots._maps._of.items()}


@linux
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.campaign)])
def test_a_block_comes_once(disk, monkeypatch, method, alone):
    came, batches, looked = counted(monkeypatch), 0, 0
    loader = DataLoader(disk, 4, shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context=method)
    for _ in range(4):
        for batch in loader:
            looked += len(prove(batch))
            batches += 1
        assert {(name, n) for name, numbers in maps().items() for n in numbers} == set(came)
    assert looked == 4 * len(everything(disk))
    assert len(came) == len(set(came)) < batches / 3
    end(loader)
    del loader
    gc.collect()
    assert not maps()


@linux
def test_batches_that_are_kept_are_mapped_once_too(disk, monkeypatch):
    """Up to MAX_SLOTS, and in the next pass none again."""
    came = counted(monkeypatch)
    loader = DataLoader(disk, 4, num_workers=1, persistent_workers=True)
    kept = list(loader)
    assert len(came) == glue.MAX_SLOTS < len(kept)
    assert [clip for batch in kept for clip in prove(batch)] == everything(disk)
    del kept
    for batch in loader:
        prove(batch)
    assert len(came) == glue.MAX_SLOTS
    end(loader)


class Growing:
    """Batches of which each is larger than all before."""

    def __init__(self, buffer):
        self.buffer = buffer

    def __len__(self):
        return 50

    def __getitem__(self, number):
        return self.buffer[list(range(2 * number + 1))]


@pytest.mark.slow
@linux
def test_the_map_of_a_slot_that_was_given_up_is_dropped(wide, alone):
    loader = DataLoader(Growing(wide), None, num_workers=1, persistent_workers=True)
    for number, batch in enumerate(loader):
        assert len(batch["step"]) == 2 * number + 1
        assert sum(map(len, maps().values())) <= glue.MAX_SLOTS
    end(loader)


@pytest.mark.slow
@linux
def test_control_maps_that_outlive_their_worker(wide, monkeypatch, alone):
    monkeypatch.setattr(worker_slots, "_drop", lambda name: None)
    try:
        with pytest.raises(AssertionError, match="bytes"), nothing_left(lasts_s=1):
            for _ in DataLoader(wide, 16, num_workers=1):
                pass
        assert maps()
        for _ in DataLoader(wide, 16, num_workers=1):  # whose first slot finds that they ended
            assert len(maps()) == 1
    finally:
        monkeypatch.undo()
        worker_slots._forget_after_fork()


@linux
def test_a_forked_child_has_no_maps(wide, alone):
    loader = DataLoader(wide, 16, num_workers=1, persistent_workers=True)
    for batch in loader:
        pass
    del batch
    (numbers,) = maps().values()
    mapped = Path("/proc/self/maps")
    before = mapped.read_text().count("/dev/shm/torch_")
    child = os.fork()
    if child == 0:
        left = mapped.read_text().count("/dev/shm/torch_")
        os._exit(0 if not maps() and left == before - len(numbers) else 1)
    assert os.waitpid(child, 0)[1] == 0
    end(loader)


@linux
def test_a_batch_that_another_process_takes_from_the_loader(disk, alone):
    """What PyTorch does not promise either: here it is refused, and nothing else is read."""
    loader = DataLoader(disk, 4, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for _ in loader:
            pass
    ((name, numbers),) = maps().items()
    child = os.fork()
    if child == 0:
        try:
            worker_slots.kept(name, numbers.pop())
        except RoleError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    end(loader)


def test_a_block_of_a_process_that_is_none_of_ours_is_not_kept():
    sender = worker_slots.Sender(b"stranger", os.getpid(), (0,))
    assert not worker_slots.keep(sender, 0, torch.zeros(8, dtype=torch.uint8))
    assert b"stranger" not in maps()


@linux
def test_files_by_name_are_mapped_anew(disk, monkeypatch, alone):
    came, batches = counted(monkeypatch), 0
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        loader = DataLoader(disk, 4, num_workers=1, persistent_workers=True)
        for _ in range(2):
            for batch in loader:
                prove(batch)
                batches += 1
        (worker,) = loader._iterator._workers
        del batch
        end(loader)
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
    for name in os.listdir(SHM):
        if name.startswith(f"torch_{worker.pid}_"):  # PyTorch leaves them
            os.unlink(os.path.join(SHM, name))
    assert len(came) == batches
    assert not maps()


@pytest.mark.slow
@linux
def test_after_a_worker_is_killed(wide):
    # In a process of its own: PyTorch's handler of SIGCHLD raises wherever the main thread happens to be.
    program = f"""
import gc, os, signal
from torch.utils.data import DataLoader
from ringmap import ReplayBuffer
from ringmap.buffers.batch import Batch
from ringmap.datasets import worker_slots
buf = ReplayBuffer.open({str(wide.path)!r})
passing = iter(DataLoader(buf, 16, num_workers=2))
def go_on():
    try:
        for number, batch in enumerate(passing):
            if number == 8:
                assert len(worker_slots._maps._of) == 2
                os.kill(passing._workers[0].pid, signal.SIGKILL)
    except (RuntimeError, OSError, EOFError):
        print("ended", flush=True)
go_on()
del passing
gc.collect()
print(len(worker_slots._maps._of), "left", flush=True)
os._exit(0)
"""
    with nothing_left(), open(wide.path.parent / "said", "w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        process.wait(60)
        # A worker that is killed may hold the lock of PyTorch's queue: the other one then waits for it as it ends.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        assert said.read().split() == ["ended", "0", "left"]
