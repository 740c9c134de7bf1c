"""Episodes that are recorded in parts: the rows of an episode that is recorded whole, before it ends."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import InputError
from ringmap.recording import ReplayBufferCollectionWrapper

SCHEMA = {
    "obs": ((1,), "f4"),
    "action": ((), "i8"),
    "reward": ((), "f8"),
    "terminated": ((), "?"),
    "t": ((), "i8"),
    "is_first": ((), "?"),
    "is_last": ((), "?"),
    "next_obs": ((1,), "f4"),
    "env_index": ((), "i8"),
}


class Counting(gymnasium.Env):
    """Observes its number and step; ends after `steps`."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(1000)

    def __init__(self, number=0, steps=10**9):
        self.number, self.steps = number, steps

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.float32([self.number * 10_000]), {}

    def step(self, action):
        self.t += 1
        obs = np.float32([self.number * 10_000 + self.t])
        return obs, float(action), self.t == self.steps, False, {}


def recorded(steps, **options):
    buf = ReplayBuffer(1000, schema=SCHEMA)
    env = ReplayBufferCollectionWrapper(
        SyncVectorEnv([lambda n=n: Counting(n, 7 + 6 * n) for n in range(3)]), buf, **options
    )
    env.reset()
    for t in range(steps):
        env.step(np.full(3, t))
    env.close()
    episodes = [buf.load_episode(i) for i in range(buf.num_episodes)]
    return sorted(episodes, key=lambda e: (int(e["env_index"][0]), int(e["action"][0])))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_rows_are_those_of_whole_episodes(every):
    ours, theirs = recorded(40, commit_every=every), recorded(40)
    assert len(ours) == len(theirs) > 6
    for one, other in zip(ours, theirs, strict=True):
        for name in SCHEMA:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("built", [False, True])
def test_an_endless_task_is_drawn_from_and_takes_no_more_memory(tmp_path, built):
    options = {"transition_builder": lambda **k: {"obs": k["next_obs"]}} if built else {}
    buf = ReplayBuffer(64, history_len=4, path=tmp_path / "buf", seed=0)
    env = ReplayBufferCollectionWrapper(Counting(), buf, commit_every=8, **options)
    env.reset()
    for t in range(500):
        env.step(t)
        if t == 10:
            assert buf.lengths.tolist() == [8]
            with ReplayBuffer.open(tmp_path / "buf", seed=0) as learner:
                assert (np.diff(learner.sample(20)["obs"][:, :, 0], axis=1) == 1).all()
    rows = env._recorder._open.arrays["obs"]
    assert rows.shape[1] <= 64
    assert buf.lengths.tolist() == [64]
    first = buf.get_episode_data()["first_step"][0]
    assert buf.load_episode(0)["obs"][:, 0].tolist() == list(range(first + built, first + built + 64))
    env.close()
    last = buf.load_episode(0)["obs"][-1, 0]
    assert last == 500
    assert not buf.engine.source.live.whole.is_open.any()


def test_bad_input():
    buf = ReplayBuffer(20)
    for wrong, why in ((0, "positive"), (21, "don't fit in the 20 spare rows")):
        with pytest.raises(InputError, match=why):
            ReplayBufferCollectionWrapper(Counting(), buf, commit_every=wrong)
    with pytest.raises(InputError, match="for buffers of episodes"):
        ReplayBufferCollectionWrapper(Counting(), TransitionReplayBuffer(20, (1,), device=None), commit_every=4)
