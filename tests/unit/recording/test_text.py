"""Environments whose observations have text of other lengths in each episode, as BabyAI's missions have: recorded, and
in a World."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from ringmap import ReplayBuffer
from ringmap.data import load_dataset
from ringmap.recording import ReplayBufferCollectionWrapper
from ringmap.world import World
from ringmap.world.policies import RandomPolicy

LETTERS = "abcdefghijklmnopqrstuvwxyz "
STEPS = 4


class Missions(gym.Env):
    """The mission is longer in each episode, and in its second half; the step stands beside it."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium has it
    observation_space = spaces.Dict(
        {"at": spaces.Box(0, 1000, (2,), np.int64), "mission": spaces.Text(300, charset=LETTERS)}
    )
    action_space = spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.render_mode, self.number, self.at = render_mode, -1, 0

    def see(self):
        at = np.array([self.number, self.at])
        return {"at": at, "mission": mission(*at)}, {"note": f"note {self.number} of {'x' * self.at}"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.at = self.number + 1, 0
        return self.see()

    def step(self, action):
        self.at += 1
        obs, info = self.see()
        return obs, 1.0, self.at == STEPS, False, info

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)


def mission(number, at):
    return "go to the ball" + " and on" * int(number) + " now" * int(at > STEPS // 2)


gym.register("ringmap-tests/Missions-v0", entry_point=Missions)


def check(buf, at, text):
    assert buf.num_episodes >= 6
    for number in range(buf.num_episodes):
        rows = buf.load_episode(number)
        assert rows[text].tolist() == [mission(*pair) for pair in rows[at].tolist()]


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"commit_every": 2}], ids=str)
@pytest.mark.parametrize("num", [1, 3])
def test_text_is_recorded(tmp_path, num, options):
    env = Missions() if num == 1 else gym.vector.SyncVectorEnv([Missions] * num)
    schema = None
    if num == 1:
        schema = {
            "obs/at": ((2,), int),
            "obs/mission": ((), str),
            "next_obs/mission": ((), "U99"),
            "info/note": ((), str),
        }
    buf = ReplayBuffer(500, path=tmp_path / "ring", schema=schema)
    env = ReplayBufferCollectionWrapper(env, buf, **options)
    env.reset()
    for _ in range(6 * (STEPS + 1)):
        over = env.step(env.action_space.sample())[2]
        if num == 1 and over:
            env.reset()
    env.close()
    check(buf, "obs/at", "obs/mission")
    if num == 1:
        rows = buf.load_episode(5)
        assert rows["next_obs/mission"].tolist() == [*rows["obs/mission"].tolist()[1:], ""]
        assert rows["info/note"].tolist() == [f"note 5 of {'x' * at}" for at in range(STEPS + 1)]
    buf.close()


def test_text_that_a_column_can_not_hold_is_refused(tmp_path):
    env = ReplayBufferCollectionWrapper(Missions(), ReplayBuffer(500, schema={"obs/mission": ((), "U20")}))
    env.reset()
    with pytest.raises(ValueError, match="'obs/mission': step .*; shorten it, or name a greater width"):
        for _ in range(6 * STEPS):
            if env.step(0)[2]:
                env.reset()
    with pytest.raises(ValueError, match="'obs/at' of <U9"):
        ReplayBufferCollectionWrapper(Missions(), ReplayBuffer(500, schema={"obs/at": ((2,), "U9")}))
    env.close()


@pytest.mark.parametrize("to", ["ring", "hdf5"])
def test_a_world_collects_text(tmp_path, to):
    path = tmp_path / ("made.h5" if to == "hdf5" else "made")
    world = World("ringmap-tests/Missions-v0", 2, (8, 8))
    world.set_policy(RandomPolicy(seed=0))
    if to == "ring":
        with ReplayBuffer(500, path=path) as buf:
            world.collect(writer=buf, episodes=6, seed=0)
        made = ReplayBuffer.open(path)
    else:
        world.collect(path, episodes=6, seed=0, format=to)
        made = load_dataset(path)
    for number in range(6):
        rows = made.load_episode(number)
        assert np.asarray(rows["mission"]).tolist() == [mission(*at) for at in np.asarray(rows["at"]).tolist()]
    made.close()
    world.close()
