"""`batches()`: drawn ahead by a thread, in order, and closed without a trace; `out=` and `threads=`."""

import gc
import math
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from ringmap import ReplayBuffer
from ringmap.errors import ClosedError, InputError, NoClipsError, RoleError
from ringmap.storage.columns import copying
from ringmap.storage.disk import system
from tests.unit.buffers.loading.conftest import HISTORY, SKIP, fill, prove


def ours():
    return [t for t in threading.enumerate() if t.name == "ringmap-batches"]


def same_seed():
    buf = ReplayBuffer(2000, HISTORY, SKIP, seed=3)
    fill(buf, 20)
    return buf


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
@pytest.mark.parametrize("to", ["numpy", "torch"])
def test_they_are_what_sample_draws(prefetch, to):
    expected = [(buf := same_seed()).sample(8), *[buf.sample(8) for _ in range(4)]]
    with same_seed().batches(8, 5, prefetch, to) as batches:
        got = list(batches)
    assert len(got) == 5
    for one, other in zip(got, expected, strict=True):
        for name, values in other.items():
            assert isinstance(one[name], torch.Tensor if to == "torch" else np.ndarray)
            assert np.array_equal(np.asarray(one[name]), values)
    assert not ours()


def test_endless_until_it_is_closed(buffer):
    batches = buffer.batches(4, to="torch")
    for _ in range(50):
        prove(next(batches))
    assert len(ours()) == 1
    assert batches._shelf._items.qsize() <= 2
    assert batches._shelf._taken.qsize() <= 4
    batches.close()
    batches.close()
    assert batches._shelf._items.empty()
    assert not ours()
    with pytest.raises(StopIteration):
        next(batches)


def test_its_thread_ends_when_nobody_holds_it(buffer):
    batches = buffer.batches(4)
    next(batches)
    gone = weakref.ref(batches)
    del batches
    gc.collect()
    assert gone() is None
    for thread in ours():
        thread.join(5)
    assert not ours()


def test_an_error_comes_where_its_batch_would():
    buf = ReplayBuffer(100)
    batches = buf.batches(4)
    with pytest.raises(NoClipsError, match="no clips"):
        next(batches)
    assert not ours()
    buf.write_episode({"x": np.arange(10)})
    drawn = iter([np.arange(3), np.arange(3), np.array([99, 0, 0])])
    buf.sampler = lambda *_: next(drawn)
    batches = buf.batches(3, prefetch=2)
    assert [next(batches)["x"][:, 0].tolist() for _ in range(2)] == [[0, 1, 2]] * 2
    with pytest.raises(IndexError, match="out of range"):
        next(batches)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2, "steps": -1}, "steps"),
        ({"batch_size": 2, "prefetch": -1}, "prefetch"),
        ({"batch_size": 2, "to": "jax"}, "to"),
        ({"batch_size": 2, "device": "cpu"}, "torch"),
        ({"batch_size": 2, "pin_memory": True}, "torch"),
    ],
)
def test_wrong_arguments(buffer, options, word):
    with pytest.raises(InputError, match=word):
        buffer.batches(**options)


def test_a_forked_child_is_told_that_its_thread_is_not_there(buffer):
    batches = buffer.batches(4)
    next(batches)
    said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except RoleError as error:
            os.write(said[1], str(error).encode())
        batches.close()
        os._exit(0)
    answer = os.read(said[0], 1000).decode()
    os.waitpid(child, 0)
    assert "call batches() in this one" in answer
    next(batches)
    batches.close()
    os.close(said[0])
    os.close(said[1])


def test_closed_while_another_thread_waits_for_a_batch():
    buf, gate = same_seed(), threading.Event()

    def wait(step, buffer, size, history):
        gate.wait(20)
        return np.zeros(size, int)

    buf.sampler = wait
    batches, got = buf.batches(4), []
    waiting = threading.Thread(target=lambda: got.append(list(batches)), daemon=True)
    waiting.start()
    threading.Timer(0.2, gate.set).start()
    batches.close()
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that interrupt")
def test_interrupts_leave_no_lock_taken():
    """Ctrl-C comes anywhere in next(); the next one, and close(), must not wait for ever."""
    rng, buf, count = np.random.default_rng(0), same_seed(), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    batches, until = buf.batches(2), time.monotonic() + 2
    try:
        while time.monotonic() < until:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
                for batch in batches:
                    assert len(batch["place"]) == 2
            except KeyboardInterrupt:
                count += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert count > 100
        closing = threading.Thread(target=lambda: (next(batches), batches.close()), daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
        assert not ours()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_buffer_that_is_closed_under_it_says_so(tmp_path):
    for number in range(20):
        buf = ReplayBuffer(2000, HISTORY, SKIP, path=tmp_path / str(number), seed=0, sync_every_s=0)
        fill(buf, 20)
        batches = buf.batches(64, prefetch=1 + number % 3)
        next(batches)
        buf.close()
        with pytest.raises(ClosedError, match="open it again"):
            for _ in range(10):
                next(batches)
        assert not ours()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_reader_that_is_closed_under_threads_says_so(disk, ahead):
    fill(disk, 100, 20)
    for _ in range(10):
        reader, found = ReplayBuffer.open(disk.path), []

        def draw(reader=reader, found=found):
            try:
                for batch in reader.batches(64) if ahead else iter(lambda: reader.sample(64), None):
                    found.append(len(batch))
            except Exception as raised:
                found.append(raised)

        drawing = [threading.Thread(target=draw) for _ in range(2)]
        for thread in drawing:
            thread.start()
        time.sleep(0.005)
        reader.close()
        for thread in drawing:
            thread.join()
        errors = [error for error in found if not isinstance(error, int)]
        assert [type(error) for error in errors] == [ClosedError] * 2, errors


def test_a_reader_is_counted_while_a_thread_draws_from_it(tmp_path):
    """`sample` drops what `len` found, in another thread, between two steps of it."""
    with ReplayBuffer(2000, HISTORY, SKIP, path=tmp_path / "buf") as buf:
        fill(buf, 20)
        reader = ReplayBuffer.open(buf.path)

        class Forgetful(dict):
            def __setitem__(self, key, value):
                """As if `sample` came just now."""

        reader.engine.pins._of = Forgetful()
        assert len(reader) == len(buf)
        reader.close()
    buf.close()


# -- out= --------------------------------------------------------------------------------------


def test_a_batch_into_arrays_that_are_there(buffer):
    first = buffer.sample(8)
    twin = {name: values.copy() for name, values in first.items()}
    second = buffer.sample(8, out=first)
    assert second.keys() == first.keys()
    assert all(np.shares_memory(second[name], first[name]) for name in first)
    assert any(not np.array_equal(second[name], twin[name]) for name in first)
    prove({name: torch.from_numpy(values) for name, values in second.items()})
    part = buffer.sample(8, out={"pixels": first["pixels"]})
    assert np.shares_memory(part["pixels"], first["pixels"])
    assert not np.shares_memory(part["place"], first["place"])


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out | {"pixels": out["pixels"].astype(float)},
        lambda out: out | {"pixels": out["pixels"][:4]},
        lambda out: out | {"nothing": out["pixels"]},
        lambda out: out | {"pixels": out["pixels"].tolist()},
        lambda out: out | {"action": np.asfortranarray(out["action"])},
    ],
)
def test_arrays_that_do_not_fit_are_refused(buffer, change):
    out = buffer.sample(8)
    with pytest.raises(InputError, match="out"):
        buffer.sample(8, out=change(out))


# -- threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("into", [False, True])
def test_threads_gather_what_one_does(monkeypatch, tmp_path, count, into):
    monkeypatch.setattr(copying, "SPLIT_NBYTES", 2)
    monkeypatch.setattr("ringmap.clips.gather.SPLIT_NBYTES", 2)
    for path in (None, tmp_path / "buf"):
        buf = ReplayBuffer(2000, HISTORY, SKIP, path=path, seed=0, threads=count)
        fill(buf, 20)
        for size in (1, 2, 7, 64):
            out = buf.sample(size) if into else None
            batch = buf.sample(size, out=out)
            assert len(prove({name: torch.from_numpy(values) for name, values in batch.items()})) == size
        buf.close()


def test_threads_must_be_some():
    with pytest.raises(InputError, match="threads"):
        ReplayBuffer(10, threads=0)


def test_cores_are_those_that_may_be_used(tmp_path, monkeypatch):
    given = len(system.os.sched_getaffinity(0)) if hasattr(system.os, "sched_getaffinity") else system.os.cpu_count()
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert given >= 1
    here = tmp_path / "cgroup"

    def cores(line, **files):
        root = tmp_path / "root"
        for name, text in files.items():
            path = root / name.replace("__", "/").replace("_max", ".max")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        here.write_text(line)
        found = system.cores(str(here), str(root))
        for path in sorted(root.rglob("*.max")):
            path.unlink()
        return found

    assert cores("0::/a/b\n", a__b__cpu_max="250000 100000\n") == 3
    assert cores("0::/a/b\n", a__b__cpu_max="max 100000\n") == 8
    assert cores("0::/a/b\n", a__cpu_max="100000 100000\n", a__b__cpu_max="400000 100000\n") == 1
    assert cores("0::/\n", cpu_max="50000 100000\n") == 1
    assert cores("garbage\n0::/a\n", a__cpu_max="what\n") == 8
    assert system.cores(str(tmp_path / "nothing"), str(tmp_path)) == 8
    monkeypatch.delattr(system.os, "sched_getaffinity")
    monkeypatch.setattr(system.os, "cpu_count", lambda: None)
    assert system.cores(str(tmp_path / "nothing"), str(tmp_path)) == 1


def test_memory_left_is_what_may_be_taken(tmp_path):
    def left(line="", meminfo="MemTotal: 9 kB\nMemAvailable:  64 kB\n", **files):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        for name, text in files.items():
            path = root / name.replace("__", "/").replace("memory_", "memory.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "cgroup").write_text(line)
        (root / "meminfo").write_text(meminfo)
        return system.memory_left(str(root / "cgroup"), str(root), str(root / "meminfo"))

    assert left() == 65536
    assert left(meminfo="nonsense") == math.inf
    assert left("0::/a\n", a__memory_max="5000\n", a__memory_current="2000\n") == 3000
    cache = {"a__memory_stat": "anon 5\ninactive_file 900\n"}
    assert left("0::/a/b\n", a__memory_max="5000", a__memory_current="4500", **cache) == 1400
    assert left("0::/a\n", a__memory_max="max\n", a__memory_current="2000\n") == 65536
    assert left("0::/a\n", a__memory_max="5\n", a__memory_current="2000\n") == 0
    assert 0 < system.memory_left() < math.inf
