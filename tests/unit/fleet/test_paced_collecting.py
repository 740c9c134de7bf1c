"""A pace counts exactly the steps that each way of collecting commits, when it commits them."""

import contextlib

import gymnasium
import numpy as np
import pytest

import ringmap
from ringmap import Pace, ReplayBuffer, ReplayBufferCollectionWrapper, TransitionReplayBuffer, World
from ringmap.errors import InputError
from tests.unit.world.envs import Proof


class Noted(Pace):
    """Notes what was asked for, and what came in meanwhile."""

    def __init__(self, path):
        super().__init__(path, samples_per_insert=1, min_steps=1000)
        self.noted, self.refuse = [], 0

    def _may_insert(self, count, where):
        self.refuse, refused = 0, self.refuse
        return not refused and super()._may_insert(count, where)

    @contextlib.contextmanager
    def insert(self, num_steps, flush=None):
        with super().insert(num_steps, flush):
            before = self.inserted
            yield
            self.noted.append((num_steps, self.inserted - before))

    def check(self, total):
        assert len(self.noted) > 3
        assert all(asked == came for asked, came in self.noted), self.noted
        assert sum(came for _, came in self.noted) == self.inserted == total


@pytest.fixture
def pace(tmp_path):
    return Noted(tmp_path)


@pytest.mark.parametrize("commit_every", [None, 1, 3])
def test_world(tmp_path, pace, commit_every):
    buf = ReplayBuffer(1000, path=tmp_path / "ring")
    world = World("RingmapTest/Proof-v0", 3, add_pixels=False)
    policy = ringmap.policy.RandomPolicy(seed=0)
    world.collect(writer=buf, episodes=12, policy=policy, seed=0, pace=pace, commit_every=commit_every, progress=False)
    pace.check(int(buf.lengths.sum()))
    with pytest.raises(InputError, match="World.collect: pace= is for a ReplayBuffer"):
        world.collect(tmp_path / "x.h5", episodes=1, pace=pace)
    with pytest.raises(InputError, match="World.collect: pace= counts the rings in .* in RAM"):
        world.collect(writer=ReplayBuffer(100), episodes=1, pace=pace)
    with pytest.raises(InputError, match="World.collect: pace= must be a ringmap.Pace, got int"):
        world.collect(writer=buf, episodes=1, pace=3)
    world.close()
    buf.close()


def transitions(tmp_path):
    return TransitionReplayBuffer(1000, (3,), (2,), None, np.int64, np.float32, path=tmp_path / "ring")


WAYS = {"whole": {}, "stream": {"stream": True}, "parts": {"commit_every": 3}}


def play(env, steps):
    vector = isinstance(env, gymnasium.vector.VectorEnv)
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if not vector and (terminated or truncated):
            env.reset()
    env.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("many", [False, True])
def test_wrapper(tmp_path, pace, way, many):
    buf = ReplayBuffer(1000, path=tmp_path / "ring")
    env = gymnasium.vector.SyncVectorEnv([Proof] * 3) if many else Proof()
    play(ReplayBufferCollectionWrapper(env, buf, pace=pace, **WAYS[way]), 60)
    pace.check(int(buf.lengths.sum()))
    buf.close()


def test_wrapper_of_transitions(tmp_path, pace):
    """They come in when their group is committed, by a flush at the latest."""
    buf = transitions(tmp_path)
    play(ReplayBufferCollectionWrapper(Proof(), buf, pace=pace), 60)
    assert [asked for asked, _ in pace.noted] == [1] * 60
    buf.flush()
    assert pace.inserted == len(buf) == 60
    buf.close()


def test_a_collector_flushes_before_it_waits(tmp_path, pace):
    flushed = []
    buf = transitions(tmp_path)
    wrapped = ReplayBufferCollectionWrapper(Proof(), buf, pace=pace)
    play(wrapped, 60)
    assert pace.inserted < 60, "the control: they are in an open group"
    with pace.insert(1, lambda: flushed.append(1)):
        pass
    assert not flushed, "there is room"
    pace.refuse = 1
    with pace.insert(1, buf.flush):
        assert pace.inserted == 60
    buf.close()


def test_wrapper_says_what_is_wrong(tmp_path, pace):
    with pytest.raises(InputError, match="ReplayBufferCollectionWrapper: pace= counts the rings in"):
        ReplayBufferCollectionWrapper(Proof(), ReplayBuffer(100), pace=pace)
    with pytest.raises(InputError, match="ReplayBufferCollectionWrapper: pace= must be a ringmap.Pace, got str"):
        ReplayBufferCollectionWrapper(Proof(), ReplayBuffer(100), pace="pace")
    deeper = ReplayBuffer(100, path=tmp_path / "deeper" / "ring")
    with pytest.raises(InputError, match="at .*deeper"):
        ReplayBufferCollectionWrapper(Proof(), deeper, pace=pace)
    deeper.close()
