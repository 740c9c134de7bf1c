"""A fork while another thread draws: NumPy holds the generator's lock, and no child waits for it.

The lock is held at the fork, by a thread that the child has not: as exact as a race is not. The campaign races as well.
"""

import os
import signal
import threading

import numpy as np
import pytest

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.buffers.workers import WorkerGenerator
from ringmap.data import DistillationBuffer, GoalDataset, OfflineToOnlineReplayBuffer
from ringmap.samplers import (
    EpisodeSampler,
    MixtureSampler,
    PrioritizedSampler,
    RecencySampler,
    UniformSampler,
)
from ringmap.storage.disk import process
from tests.busy import held
from tests.unit.buffers.processes import Child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

WATCHDOG_S = 60  # for a child that would wait for ever; none ever comes near it
CONTROL_S = 1

BITS = [getattr(np.random, n) for n in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")]


def filled(**options):
    buf = ReplayBuffer(max_steps=1000, seed=0, **options)
    for number in range(4):
        buf.write_episode({"obs": np.arange(100) + 1000 * number, "action": np.zeros((100, 1))})
    return buf


def forked(work, seconds=WATCHDOG_S):
    """Return what `work` returns in a forked child; EOFError if it hangs."""

    def watched(_):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        return work()

    return Child(watched).result()


def generators_of(*things):
    """Return the locks of all generators that these keep."""
    found = {v for thing in things for v in vars(thing).values() if isinstance(v, np.random.Generator)}
    assert found
    return [rng.bit_generator.lock for rng in found]


def of_a_buffer(path=None):
    buf = filled(path=path)
    return buf, [buf.engine, buf.engine.reader], lambda: len(buf.sample(8)["obs"])


def of_a_sampler(sampler):
    buf = filled(sampler=sampler)
    buf.sample(8)
    return buf, [sampler], lambda: len(buf.sample(8)["obs"])


def of_transitions():
    buf = TransitionReplayBuffer(64, (1,), device=None, seed=0)
    for t in range(32):
        buf.add(np.full(1, t), 0, 0.0, np.full(1, t + 1), False)
    return buf, [buf.engine], lambda: len(buf.sample(8)["dones"])


def of_distillation():
    buf = DistillationBuffer(64, seed=0)
    buf.add(np.zeros((8, 4), np.float32), np.arange(8))
    return buf, [buf._rounds.draws], lambda: len(buf.batch(8)["ids"])


def of_a_mix():
    buf = OfflineToOnlineReplayBuffer(filled(), online_capacity=64, seed=0)
    buf.extend({"obs": np.arange(9), "action": np.zeros((9, 1))})
    return buf, [buf._draws, buf._offline.holder.engine], lambda: len(buf.sample(8)["obs"])


def of_goals(path):
    filled(path=path).close()
    goals = GoalDataset(ReplayBuffer.open(path), seed=0, goal_keys={"obs": "goal"})
    goals[0]
    return goals, [goals], lambda: len(goals[0])


CASES = {
    "in memory": lambda path: of_a_buffer(),
    "on disk": of_a_buffer,
    "uniform": lambda path: of_a_sampler(UniformSampler(0)),
    "episodes": lambda path: of_a_sampler(EpisodeSampler(0)),
    "recency": lambda path: of_a_sampler(RecencySampler(window=50, rng=0)),
    "prioritized": lambda path: of_a_sampler(PrioritizedSampler(rng=0)),
    "mixture": lambda path: of_a_sampler(MixtureSampler([(UniformSampler(0), 1)], rng=0)),
    "transitions": lambda path: of_transitions(),
    "distillation": lambda path: of_distillation(),
    "offline to online": lambda path: of_a_mix(),
    "goals": of_goals,
}


@pytest.mark.parametrize("case", CASES)
def test_a_child_draws_though_a_thread_held_the_generator(tmp_path, case):
    _kept, keepers, draw = CASES[case](tmp_path / "buf")
    with held(*generators_of(*keepers)):
        assert forked(draw) > 0


def test_a_child_waits_for_ever_where_nothing_is_replaced(monkeypatch):
    """The control."""
    buf, keepers, draw = of_a_buffer()
    monkeypatch.setattr(process, "_made", set())
    with held(*generators_of(*keepers)), pytest.raises(EOFError):
        forked(draw, CONTROL_S)
    assert buf.sample(8)


@pytest.mark.parametrize("call", ["state_dict", "update", "probabilities", "close", "pickled"])
def test_a_child_asks_a_sampler_whose_lock_a_thread_held(call):
    sampler = PrioritizedSampler(rng=0)
    buf = filled(sampler=sampler)
    ids = buf.sample(8).ids
    calls = {
        "state_dict": lambda: bool(sampler.state_dict()),
        "update": lambda: sampler.update_priorities(ids, np.ones(8)) == 8,
        "probabilities": lambda: sampler.probabilities(ids).all(),
        "close": lambda: sampler.close() is None,
        "pickled": lambda: bool(sampler.__getstate__()),
    }
    with held(sampler._lock, sampler.rng.bit_generator.lock):
        assert forked(calls[call])


@pytest.mark.parametrize("kind", BITS)
def test_a_child_goes_on_from_the_state_of_its_parent(kind):
    """Whatever bit generator a user passes: nothing waits, and a copy of a buffer in memory draws as the buffer
    would."""
    one, other = (WorkerGenerator(np.random.Generator(kind(7))) for _ in range(2))
    one.rng.integers(0, 9, 100), other.rng.integers(0, 9, 100)
    with held(one.rng.bit_generator.lock):
        drawn = forked(lambda: one.rng.integers(0, 1 << 40, 10).tolist())
    assert drawn == other.rng.integers(0, 1 << 40, 10).tolist()


def test_one_generator_of_two_stays_one():
    shared = np.random.default_rng(0)
    one, other = WorkerGenerator(shared), UniformSampler(shared)
    assert forked(lambda: one.rng is other.rng and one.rng is not shared)


def test_copies_that_were_unpickled_are_found_too():
    import pickle

    sampler = pickle.loads(pickle.dumps(UniformSampler(0)))
    with held(sampler.rng.bit_generator.lock):
        assert forked(lambda: bool(sampler.rng.random() < 1))


def hung_of(forks_, sampler):
    """Return how many children hang of so many that are forked while threads draw flat out."""
    buf, stop, hung = filled(sampler=sampler), threading.Event(), 0

    def draw():
        while not stop.is_set():
            buf.sample(4096)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(forks_):
            try:
                assert forked(lambda: len(buf.sample(16)["obs"]), seconds=30) == 16
            except EOFError:
                hung += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return hung


@pytest.mark.campaign
@pytest.mark.parametrize("make", [lambda: None, lambda: UniformSampler(0), lambda: PrioritizedSampler(rng=0)])
def test_none_of_300_children_hangs(make):
    assert hung_of(300, make()) == 0
