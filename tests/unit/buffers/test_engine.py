"""An engine of its own, over a ring, without a buffer around it."""

import os
import pickle
import threading
import traceback

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.buffers.engine import Engine
from ringmap.buffers.options import Options, settings_of
from ringmap.clips.cut import Cut
from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.errors import ClosedError, InputError, NoClipsError, ReadOnlyError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.commit.commit import Commit, NewRecord
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.read.reader import Reader

ONE = Cut.clip(1)
SCHEMA = Schema.parse({"x": ((), "i8")})


@pytest.fixture(params=["disk", "ram"])
def folder(request, home):
    return str(home / "ring") if request.param == "disk" else "RAM"


def writer(folder, disk=None, **options):
    disk = disk or (MemoryDisk() if folder == "RAM" else Disk())
    store = Store.create(disk, folder, 100, 16, settings_of(Options(sync_every_s=0), "memmap"), SCHEMA)
    return Engine(store, **options)


def reader(folder, **options):
    return Engine(Reader(Disk(), folder), **options)


def put(engine, first, count=10):
    store = engine.writer("put")
    with engine.committing() as small:
        rows = [np.arange(first, first + count)]
        store.commit(Commit([NewRecord(count)], "put", SCHEMA, rows, small=small))


def clips(engine, ids, cut):
    return engine.read(engine.anchors(np.array(ids), cut), cut)


def drawn(engine, size=32, span=1, step=None):
    positions, crossing, _ = engine.draw(None, size, Cut.clip(span), step)
    return engine.read(positions, Cut.clip(span), crossing=crossing)["x"]


def in_child(work):
    """Return what `work` returns, or raises, in a forked child."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ours)
            try:
                found = work()
            except Exception as error:
                found = error
            with open(theirs, "wb") as pipe:
                pickle.dump(found, pipe)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        found = pickle.load(pipe)
    assert os.waitpid(pid, 0)[1] == 0
    return found


def test_it_writes_draws_and_reads(folder):
    engine = writer(folder, seed=0)
    with pytest.raises(NoClipsError, match="ReplayBuffer.sample: no clips of 1 steps are stored"):
        engine.draw(None, 1, ONE)
    put(engine, 0)
    put(engine, 10)
    assert set(drawn(engine).ravel()) <= set(range(20))
    assert (np.diff(drawn(engine, span=4), axis=1) == 1).all()
    assert engine.pin(Cut.clip(4)).count == engine.window(Cut.clip(4)).count == 14
    np.testing.assert_array_equal(clips(engine, [0, 6, 7, -1], Cut.clip(4))["x"][:, 0], [0, 6, 10, 16])
    cut = Cut.clip(4)
    assert engine.reader.starts(np.array([6, 7, 10]), cut).tolist() == [True, False, True]
    found = engine.replaced(engine.anchors_at(np.array([6, 7, 10]), cut), cut)
    assert found[[0, 2]].tolist() == [6, 10]
    assert engine.num_redraws == 1
    assert engine.reader.starts(found, cut).all()
    assert [values.tolist() for values in engine.episodes.one(1, "here")] == [list(range(10, 20))]
    (ring,) = engine.rings
    assert ring.source is engine.source is engine.owned
    assert ring.reader is engine.reader
    engine.close()


def test_the_same_state_draws_the_same(folder):
    engine = writer(folder, seed=0)
    put(engine, 0)
    drawn(engine)
    state = engine.state_dict()
    assert state["step"] == engine.counter == 1
    expected = drawn(engine)
    drawn(engine, step=7)
    assert engine.counter == 2
    engine.load_state_dict(state)
    np.testing.assert_array_equal(drawn(engine), expected)
    with pytest.raises(InputError, match=r"the state has no \['rng', 'step'\]"):
        engine.load_state_dict({})
    engine.close()


def test_the_sampling_state_rides_with_commits(home):
    folder = str(home / "ring")
    engine = writer(folder, seed=0)
    put(engine, 0)
    drawn(engine)
    with engine.committing() as small:
        assert small["sampling"]["step"] == 1
    with engine.committing() as small:
        assert small is None, "it counts as stored, and did not change"
    with engine.committing({"a": 1}) as small:
        assert small == {"notes": {"a": 1}}
    drawn(engine)
    with pytest.raises(ZeroDivisionError), engine.committing():
        raise ZeroDivisionError
    put(engine, 10)  # it was not stored, so it rides now
    engine.owned.abandon()
    again = Engine(Store.open(Disk(), folder, settings_of(Options(sync_every_s=0), "memmap")))
    assert again.counter == 2
    assert again.state_dict() == engine.state_dict()
    again.close()


def test_a_closed_one_says_so_wherever_it_is_asked(folder):
    engine = writer(folder, seed=0)
    put(engine, 0)
    engine.close()
    engine.close()
    assert engine.is_closed
    for ask in (
        lambda: engine.source,
        lambda: engine.episodes,
        lambda: engine.pin(ONE),
        lambda: engine.window(ONE),
        lambda: engine.anchors(np.array([0]), ONE),
        lambda: engine.draw(None, 1, ONE),
        lambda: engine.look(),
        lambda: engine.refresh(),
        lambda: engine.use(None),
        lambda: engine.read(np.array([0]), ONE),
        lambda: engine.clear("here"),
        lambda: engine.load_state_dict(engine.state_dict()),
    ):
        with pytest.raises(ClosedError, match="closed"):
            ask()


def test_a_close_that_fails_gives_files_and_lock_back(home):
    class Full(Disk):
        full = False

        def before(self, change, path, *details):
            if self.full and change != "unlink":
                raise OSError(28, "No space left on device", path)

    disk, folder = Full(), str(home / "ring")
    engine = writer(folder, disk)
    put(engine, 0)
    disk.full = True
    with pytest.raises(OSError, match="No space left"):
        engine.close()
    assert engine.is_closed
    Store.open(Disk(), folder, settings_of(Options(), "memmap")).close()


def test_a_reader_follows_and_does_not_write(home):
    folder = str(home / "ring")
    engine = writer(folder)
    put(engine, 0)
    follower = reader(folder, seed=1)
    assert (engine.is_writer, follower.is_writer) == (True, False)
    assert engine.path == follower.path == home / "ring"
    for write in (
        lambda: follower.writer("here"),
        lambda: follower.clear("here"),
        lambda: follower.flush("here"),
    ):
        with pytest.raises(ReadOnlyError, match=r"^(here|ReplayBuffer): this handle .* only reads"):
            write()
    assert follower.pin(ONE).count == 10
    put(engine, 10)
    assert follower.pin(ONE).count == 10, "its ids stand still"
    assert follower.refresh()
    assert follower.pin(ONE).count == 20
    follower.close()
    engine.close()


def test_a_fork_reads(folder):
    engine = writer(folder, seed=0)
    put(engine, 0)

    def work():
        with pytest.raises(ReadOnlyError):
            engine.writer("here")
        return type(engine.source).__name__, engine.is_writer, drawn(engine).max() < 10

    kind = "Store" if folder == "RAM" else "Reader"
    assert in_child(work) == (kind, False, True)
    put(engine, 10)
    assert engine.is_writer
    engine.close()


def test_a_fork_does_not_wait_for_a_draw_of_the_parent(folder):
    engine = writer(folder, seed=0)
    put(engine, 0)
    with engine.rng.bit_generator.lock:
        assert in_child(lambda: len(drawn(engine))) == 32
    engine.close()


def test_a_pickled_copy_of_a_ring_on_disk_is_a_reader(home):
    class Injected(Disk):
        def __reduce__(self):
            raise AssertionError("a disk never travels")

    engine = writer(str(home / "ring"), Injected(), seed=0)
    engine.threads = 2
    put(engine, 0)
    copy = pickle.loads(pickle.dumps(engine))
    assert (type(copy.source), copy.is_writer, copy.threads) == (Reader, False, 2)
    put(engine, 10)
    copy.refresh()
    assert copy.source.head == 20
    copy.close()
    engine.close()
    with pytest.raises(ClosedError):
        copy.source  # noqa: B018


def test_a_pickled_copy_of_a_ring_in_ram_has_what_was_stored():
    engine = writer("RAM", seed=0)
    for first in range(0, 150, 10):
        put(engine, first)
    drawn(engine)
    copy = pickle.loads(pickle.dumps(engine))
    assert (copy.source.tail, copy.source.head) == (engine.source.tail, engine.source.head)
    np.testing.assert_array_equal(drawn(copy), drawn(engine))
    put(copy, 1000)
    assert (copy.source.head, engine.source.head) == (160, 150)
    engine.close()
    with pytest.raises(ClosedError):
        pickle.dumps(engine)


def test_samplers_are_attached_and_given_up(folder):
    engine = writer(folder, sampler=PrioritizedSampler(rng=0))
    put(engine, 0)
    first = engine.sampler
    assert first.given is not None
    engine.use(None)
    assert engine.sampler.given is None
    engine.use(first.given)
    with pytest.raises(InputError, match="callable"):
        engine.use(7)
    assert engine.sampler.given is first.given
    engine.close()


def test_threads_draw_while_one_writes(folder):
    engine, errors = writer(folder, seed=0), []
    put(engine, 0)

    def draw():
        try:
            for _ in range(100):
                assert (np.diff(drawn(engine, span=3), axis=1) == 1).all()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for first in range(10, 2000, 10):
        put(engine, first)
    for thread in threads:
        thread.join()
    assert errors == []
    assert engine.num_redraws == engine.reader.num_redraws
    engine.close()


def test_a_buffer_shows_its_engine(tmp_path):
    disk = Disk()
    buf = ReplayBuffer(100, path=tmp_path / "buf", disk=disk)
    buf.write_episode({"x": np.arange(10)})
    assert buf.engine.disk is disk
    with ReplayBuffer.open(buf.path, disk=disk) as live:
        assert live.engine.disk is disk
        assert pickle.loads(pickle.dumps(live)).engine.disk is not disk
        live.close()
    buf.close()
