"""Calls inside calls: what a callable may call, by the table in docs/reference/errors.md; what a handler is refused."""

import dis
import gc
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.data import Window
from ringmap.errors import ClosedError, RoleError
from ringmap.samplers import EpisodeSampler, MixtureSampler, PrioritizedSampler, RecencySampler, UniformSampler
from ringmap.storage.disk.calls import Turn, end_noted, thread
from ringmap.storage.disk.files import Disk
from tests.unit.buffers.processes import Child


@pytest.fixture(params=[True, False], ids=["ram", "disk"])
def buf(request, tmp_path):
    made = ReplayBuffer(200, 2, path=None if request.param else tmp_path / "buf", seed=0, spare_rows=40)
    for number in range(5):
        made.write_episode(episode(number))
    yield made
    made.close()
    assert not thread.inside
    assert not thread.searching.locked()


def episode(number, steps=10):
    return {"x": np.arange(steps) + 1000 * number}


# -- the table: what a callable may call ------------------------------------------------------------


def test_a_sampler_reads_what_is_stored(buf):
    seen = []

    def sampler(step, buffer, size, history):
        seen.append((buffer.num_valid_ends(history), buffer.num_episodes, buffer.num_steps_stored, len(buffer.lengths)))
        return np.zeros(size, np.int64)

    buf.sampler = sampler
    buf.sample(3)
    assert seen == [(45, 5, 50, 5)]


def test_a_sampler_loads_an_episode(buf):
    def sampler(step, buffer, size, history):
        assert buffer.load_episode(4)["x"][0] == 4000
        return np.zeros(size, np.int64)

    buf.sampler = sampler
    assert buf.sample(3)["x"].shape == (3, 2)


def test_a_sampler_writes(buf):
    def sampler(step, buffer, size, history):
        buffer.write_episode(episode(5))
        return np.zeros(size, np.int64)

    buf.sampler = sampler
    assert buf.sample(3)["x"].tolist() == [[0, 1]] * 3
    assert buf.num_episodes == 6


def test_a_transform_samples(buf):
    buf.transform = lambda clip: {"x": clip["x"], "y": buf.sample(2)["x"][0]}
    assert buf[0]["y"].shape == (2,)


def test_write_episodes_of_a_generator_that_samples(buf):
    def made():
        for number in range(5, 8):
            buf.sample(2)
            yield episode(number)

    buf.write_episodes(made())
    assert buf.num_episodes == 8


def test_writes_inside_episodes_and_batches(buf):
    for number, _ in enumerate(buf.episodes()):
        buf.write_episode(episode(10 + number))
    assert buf.num_episodes == 10
    for batch in buf.batches(4, steps=2, prefetch=0):
        buf.write_episode(episode(20))
        assert batch["x"].shape == (4, 2)
    assert buf.num_episodes == 12


def test_a_window_function_reads(buf):
    view = buf.view(window={"x": Window([0, 1]), "n": lambda batch: np.full(len(batch["x"]), buf.num_episodes)})
    assert view.sample(3)["n"].tolist() == [5, 5, 5]


def test_a_condition_reads(buf):
    chosen = buf.view(where=lambda data: buf.num_episodes == 5 and len(buf.load_episode(0)["x"]) == 10)
    assert len(chosen.lengths) == 5


def test_a_schedule_of_priorities_reads(buf):
    buf.sampler = PrioritizedSampler(beta=lambda step: 0.4 + 0.0 * buf.num_episodes, rng=0)
    assert buf.sample(3).weights.shape == (3,)


def test_a_writer_in_another_thread_goes_on_while_a_sampler_runs(buf):
    def sampler(step, buffer, size, history):
        other = threading.Thread(target=lambda: buffer.write_episode(episode(5)), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive()
        return np.zeros(size, np.int64)

    buf.sampler = sampler
    buf.sample(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RecencySampler(window=20, rng=0),
        lambda: UniformSampler(0),
        lambda: EpisodeSampler(0),
        lambda: PrioritizedSampler(rng=0),
        lambda: MixtureSampler([(UniformSampler(0), 1), (RecencySampler(window=9, rng=0), 1)], rng=0),
    ],
)
def test_no_lock_is_held_while_a_sampler_of_ours_runs(buf, make):
    sampler = make()

    class Asked(type(sampler)):
        def __call__(self, *args):
            assert not buf.engine.owned.lock.locked()
            return super().__call__(*args)

    sampler.__class__ = Asked
    buf.sampler = sampler
    assert buf.sample(6)["x"].shape == (6, 2)


def test_a_sampler_in_the_middle_of_its_draw_is_not_asked_again(buf):
    class Asks(PrioritizedSampler):
        def weigh(self):
            with pytest.raises(RoleError, match="in the middle of another call"):
                buf.sample(5)
            return super().weigh()

    buf.sampler = Asks(rng=0)
    assert buf.sample(12).weights.shape == (12,)


def test_two_threads_with_one_sampler_get_their_own_weights(buf):
    sampler, sizes = PrioritizedSampler(rng=0), []

    class Slow(PrioritizedSampler):
        def weigh(self):
            if not sizes:
                sizes.append(None)
                other = threading.Thread(target=lambda: sizes.append(buf.sample(5).weights.shape))
                other.start()
                other.join()
            return super().weigh()

    sampler.__class__ = Slow
    buf.sampler = sampler
    assert buf.sample(12).weights.shape == (12,)
    assert sizes == [None, (5,)]


# -- what a handler is refused, and what is noted ----------------------------------------------------


class Struck(Disk):
    """Calls something in the middle of the next write, as a signal handler would."""

    act = None

    def before(self, change, path, *details):
        if self.act is not None and change == "write":
            act, self.act = self.act, None
            act()


def struck(tmp_path):
    disk = Struck()
    made = ReplayBuffer(200, 2, path=tmp_path / "buf", seed=0, disk=disk)
    for number in range(3):
        made.write_episode(episode(number))
    return made, disk


@pytest.mark.parametrize(
    "call",
    [
        lambda buf: buf.sample(2),
        lambda buf: buf.write_episode(episode(9)),
        lambda buf: buf.num_episodes,
        lambda buf: buf[0],
        lambda buf: buf.clear(),
        lambda buf: ReplayBuffer.open(buf.path),
        lambda buf: ReplayBuffer(9).write_episode(episode(9)),
    ],
)
def test_a_call_in_the_middle_of_a_write_is_refused(tmp_path, call):
    made, disk = struck(tmp_path)
    told = []

    def act():
        with pytest.raises(RoleError, match="in the middle of another call") as error:
            call(made)
        told.append(error)

    disk.act = act
    made.write_episode(episode(3))
    assert len(told) == 1
    assert made.num_episodes == 4
    assert made.check() == []
    made.close()


def test_a_close_in_the_middle_of_a_write_is_done_when_it_ends(tmp_path):
    made, disk = struck(tmp_path)
    disk.act = made.close
    made.write_episode(episode(3))
    assert made.engine.is_closed
    with pytest.raises(ClosedError):
        made.write_episode(episode(4))
    with ReplayBuffer.open(tmp_path / "buf", mode="r+") as again:  # no lock is left
        assert again.num_episodes == 4


def test_a_flush_in_the_middle_of_a_write_is_done_when_it_ends(tmp_path):
    made, disk = struck(tmp_path)
    disk.act = made.flush
    made.write_episode(episode(3))
    store = made.engine.owned
    assert store.files.state.synced == store.seq == 4
    made.close()


def test_a_flush_in_the_middle_of_a_close_has_nothing_left_to_do(tmp_path):
    made, disk = struck(tmp_path)
    disk.act = made.flush
    made.close()
    assert made.engine.is_closed


def test_a_close_in_the_middle_of_a_search_is_done_by_the_next_call(buf):
    with thread.searching, buf.engine.owned.lock:
        with pytest.raises(RoleError):
            buf.sample(2)
        buf.close()
        assert not buf.engine.is_closed
    with pytest.raises(ClosedError):
        buf.sample(2)
    assert buf.engine.is_closed


def test_an_add_is_not_entered_twice(tmp_path):
    disk = Struck()
    made = TransitionReplayBuffer(64, (1,), device=None, path=tmp_path / "buf", disk=disk)
    made.add(np.zeros(1), 0, 0.0, np.ones(1), False)

    def act():
        for call in (lambda: made.add(np.zeros(1), 0, 0.0, np.ones(1), False), lambda: made.sample(1)):
            with pytest.raises(RoleError, match="in the middle of another call"):
                call()

    disk.act = act
    made.add(np.ones(1), 0, 0.0, np.ones(1), False)
    assert len(made) == 2
    made.close()


PREEMPTED = """
import os, signal, sys
import numpy as np
from ringmap import ReplayBuffer
from ringmap.storage.disk.files import Disk

class Struck(Disk):
    def before(self, change, path, *details):
        if change == "write" and armed:
            armed.clear()
            signal.raise_signal(signal.SIGTERM)

def preempted(*_):
    buf.close()
    sys.exit(3)

armed = []
signal.signal(signal.SIGTERM, preempted)
buf = ReplayBuffer(200, path=sys.argv[1], disk=Struck(), sync_every_s=0)
buf.write_episode({"x": np.arange(9)})
armed.append(1)
buf.write_episode({"x": np.arange(9)})
"""


def test_a_preempted_job_closes_in_its_handler(tmp_path):
    done = subprocess.run([sys.executable, "-c", PREEMPTED, tmp_path / "buf"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    with ReplayBuffer.open(tmp_path / "buf", mode="r+") as again:
        assert again.num_episodes in (1, 2)
        assert again.engine.owned.manifest.table["seq"] >= 1  # it was flushed


def test_a_finalizer_closes_a_buffer_that_others_use(tmp_path):
    made, disk = struck(tmp_path)

    class Owner:
        def __del__(self):
            made.close()

    owners = [Owner()]

    def act():
        owners.clear()
        gc.collect()

    disk.act = act
    made.write_episode(episode(3))
    assert made.engine.is_closed


def test_what_is_noted_waits_for_its_call_although_another_buffer_ends_in_the_middle(tmp_path):
    made, disk = struck(tmp_path)
    others = [ReplayBuffer(200, path=tmp_path / "other")]
    others[0].write_episode(episode(1))

    def act():
        made.close()
        others.clear()
        gc.collect()

    disk.act = act
    made.write_episode(episode(3))
    assert made.engine.is_closed


def test_a_buffer_that_nobody_has_ends_in_the_middle_of_a_call(tmp_path):
    made, disk = struck(tmp_path)
    others = [ReplayBuffer(200, path=tmp_path / "other")]
    others[0].write_episode(episode(1))

    def act():
        others.clear()
        gc.collect()

    disk.act = act
    made.write_episode(episode(3))
    with ReplayBuffer.open(tmp_path / "other", mode="r+") as again:
        assert again.num_episodes == 1
    made.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_begins_without_a_mark(tmp_path):
    made, disk = struck(tmp_path)
    children = []

    def read():
        signal.alarm(30)
        return made.num_episodes, len(made.sample(4)["x"])

    disk.act = lambda: children.append(Child(lambda _: read()))
    made.write_episode(episode(3))
    assert children[0].result() in ((3, 4), (4, 4))
    made.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_what_interrupts_a_call_leaves_no_mark(tmp_path, error):
    made, disk = struck(tmp_path)

    def act():
        raise error

    disk.act = act
    with pytest.raises((error, OSError)):
        made.write_episode(episode(3))
    assert not thread.inside
    made.write_episode(episode(4))
    assert made.check() == []
    made.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_has_the_turn_that_a_thread_of_its_parent_had():
    turn, begun, done = Turn(), threading.Event(), threading.Event()
    other = threading.Thread(target=turn.take, args=("call", lambda: (begun.set(), done.wait(60))))
    other.start()
    assert begun.wait(60)
    child = Child(lambda _: (signal.alarm(30), turn.is_here, turn.take("call", lambda: turn.is_here))[1:])
    assert child.result() == (False, True)
    done.set()
    other.join()
    assert turn.take("call", lambda: Child(lambda _: turn.is_here).result())  # the call goes on in the child


def looks_for_signals(code):
    """Return the offsets in a code at which the interpreter runs handlers: at its begin, after a call, in a loop."""
    steps = list(dis.get_instructions(code))
    before = ["", *(step.opname for step in steps)]
    return {
        step.offset
        for step, last in zip(steps, before, strict=False)
        if last.startswith("CALL") or step.opname in ("RESUME", "JUMP_BACKWARD")
    }


def interrupted(call, at):
    """Do a call, with Ctrl-C at the `at`-th place where the interpreter looks for it; tell whether it has so many."""
    left, places = at, {}

    def each(frame, event, value):
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            code = frame.f_code
            if code not in places:
                places[code] = looks_for_signals(code)
            left -= frame.f_lasti in places[code]
            if left == 0:
                left = -1
                raise KeyboardInterrupt
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


def test_what_is_noted_is_done_wherever_it_is_interrupted():
    """By the next call of the thread, or at the end of the process."""
    done = []

    def close():
        done.append("close")

    at = 0
    while True:
        at += 1
        done.clear()
        thread.noted[:] = [close]
        if not interrupted(end_noted, at):
            break
        end_noted()
        assert done, at
        assert not thread.noted
    assert at > 3


def test_what_is_noted_is_done_once_though_it_ends_as_a_call_does():
    done = []

    def flush():
        done.append("flush")
        if len(done) < 5:
            end_noted()

    thread.noted.append(flush)
    end_noted()
    assert done == ["flush"]


def test_what_is_noted_and_fails_is_not_done_again():
    def fail():
        raise OSError("no space")

    thread.noted.append(fail)
    with pytest.raises(OSError, match="no space"):
        end_noted()
    end_noted()
