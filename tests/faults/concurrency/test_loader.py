"""A plain DataLoader goes on whatever is written in mid-pass, and every clip proves itself."""

import contextlib
import dataclasses
import multiprocessing
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.proof import Episodes, num_torn
from benchmarks.harness.race import Ring, a_writer, one_look
from ringmap import ReplayBuffer, Zarr
from ringmap.errors import NoClipsError

RING = Ring(max_steps=512, spare=64, longest=16, row_nbytes=1024)
STORAGES = {"memmap": "memmap", "zarr": Zarr("lz4", 12)}
storages = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
BATCH = 16
WORKERS = 2
WAIT_S = 120

methods = pytest.mark.parametrize("method", ["fork", "forkserver"])
both = pytest.mark.parametrize(
    ("buffer", "method"),
    [
        ("writer", "fork"),
        ("reader", "fork"),
        ("writer", "forkserver"),
    ],  # a pickled copy is a reader
    indirect=["buffer"],
)


class Pen:
    """Writes numbered episodes of different lengths."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.number = 0
        self._episodes = Episodes(RING.row_nbytes // 8, RING.longest)

    def write(self, episodes):
        for _ in range(episodes):
            length = RING.longest - self.number * 5 % (RING.longest // 2)
            self.buffer.write_episode(self._episodes(self.number, length))
            self.number += 1

    def write_a_round(self):
        """Write until nothing is left of what was stored; return the oldest number that is."""
        first = self.number
        self.write(RING.max_steps // (RING.longest // 2))
        assert self.buffer.load_episode(0)["episode"][0] >= first
        return first


@pytest.fixture
def storage():
    return "memmap"


@pytest.fixture
def pen(fast, storage):
    buffer = ReplayBuffer(
        RING.max_steps,
        RING.history,
        path=fast / "buf",
        spare_rows=RING.spare,
        seed=0,
        sync_every_s=0,
        storage=storage,
    )
    pen = Pen(buffer)
    pen.write_a_round()
    yield pen
    buffer.close()


@pytest.fixture
def buffer(request, pen):
    """The writer itself, or a reader beside it: what the loader is given."""
    if request.param == "writer":
        yield pen.buffer
        return
    reader = ReplayBuffer.open(pen.buffer.path, seed=0)
    yield reader
    reader.close()


@contextlib.contextmanager
def loading(buffer, method, workers=WORKERS, **options):
    """Give a loader; end workers that wait for another pass."""
    torch.manual_seed(0)
    loader = DataLoader(buffer, BATCH, shuffle=True, num_workers=workers, multiprocessing_context=method, **options)
    try:
        yield loader
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()


class Gate:
    """A transform at which every worker waits, its first batch gathered, until it is opened."""

    def __init__(self, method):
        context = multiprocessing.get_context(method)
        self.waiting = context.Semaphore(0)
        self.opened = context.Event()

    def __call__(self, clip):
        if not self.opened.is_set():
            self.waiting.release()
            assert self.opened.wait(WAIT_S)
        return clip


@contextlib.contextmanager
def parked(buffer, method, workers=WORKERS):
    """Give a pass each of whose workers has gathered one batch, and gathers no other in the `with` block."""
    buffer.transform = gate = Gate(method)
    with loading(buffer, method, workers) as loader:
        passing = iter(loader)
        for _ in range(workers):
            assert gate.waiting.acquire(timeout=WAIT_S)
        yield passing
    gate.opened.set()


def next_ones(passing):
    """Return the batches that were gathered before the `with` block."""
    return [next(passing) for _ in range(WORKERS)]


def clips_in(batches):
    """Count the clips of whole batches; fail on one that is not."""
    count = 0
    for batch in batches:
        assert num_torn(batch) == 0
        count += len(batch["row"])
    return count


@pytest.mark.slow
@pytest.mark.parametrize("passes", [3, pytest.param(25, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    ("method", "storage"),
    [("fork", STORAGES["zarr"]), ("forkserver", "memmap")],
    ids=["fork", "forkserver"],
)
def test_while_another_process_writes_without_a_pause(fast, method, storage, passes):
    with a_writer(str(fast / "buf"), dataclasses.replace(RING, storage=storage)) as written:
        reader = ReplayBuffer.open(fast / "buf", seed=0)
        with loading(reader, method, persistent_workers=True) as loader:
            for _ in range(passes):
                assert clips_in(loader) == len(reader)
        reader.close()
    assert written[0].episodes > 0


@methods
def test_while_a_thread_of_its_own_process_writes(pen, method):
    stop = threading.Event()

    def write():
        while not stop.is_set():
            pen.write(1)

    thread = threading.Thread(target=write)
    with loading(pen.buffer, method) as loader:
        passing = iter(loader)
        thread.start()
        try:
            assert clips_in(passing) > RING.max_steps // 2
        finally:
            stop.set()
            thread.join()


@storages
@both
def test_everything_is_evicted_in_mid_pass(pen, buffer, method):
    clips = len(buffer)
    with parked(buffer, method) as passing:
        oldest = pen.write_a_round()
    early, late = next_ones(passing), list(passing)
    assert clips_in(early) + clips_in(late) in range(clips - RING.longest, clips + RING.longest)
    assert all(int(batch["episode"].min()) >= oldest for batch in late)


def test_control_workers_that_look_once(pen):
    # Those of a reader: those of the writer look for what is newest before each batch.
    with ReplayBuffer.open(pen.buffer.path, seed=0) as reader:
        with one_look(), parked(reader, "fork") as passing:
            pen.write_a_round()
        assert sum(num_torn(batch) for batch in passing) > 0
    reader.close()


@both
def test_cleared_in_mid_pass_and_filled_again(pen, buffer, method):
    with parked(buffer, method) as passing:
        pen.buffer.clear()
        oldest = pen.number
        pen.write(3)  # far fewer clips than the pass was to have
    early, late = next_ones(passing), list(passing)
    assert clips_in(early) == WORKERS * BATCH
    assert clips_in(late) > 0
    assert all(int(batch["episode"].min()) >= oldest for batch in late)


def drain(batches):
    for batch in batches:
        assert num_torn(batch) == 0


def test_cleared_in_mid_pass_for_good(pen, workers_end_soon):
    with parked(pen.buffer, "fork", workers=1) as passing:
        pen.buffer.clear()
    assert clips_in([next(passing)]) == BATCH
    with pytest.raises(NoClipsError, match="no clips"):
        drain(passing)
    passing._shutdown_workers()


@both
def test_a_pass_after_everything_was_replaced_shows_what_is_there(pen, buffer, method):
    with loading(buffer, method, persistent_workers=True) as loader:
        assert clips_in(loader) == len(buffer)
        oldest = pen.write_a_round()
        batches = list(loader)
    assert clips_in(batches) > 0
    assert min(int(batch["episode"].min()) for batch in batches) >= oldest
