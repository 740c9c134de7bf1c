"""Environments that prove things: an observation says whose it is, a reward what was done."""

import itertools

import gymnasium
import numpy as np
from gymnasium import spaces

_count = itertools.count()


class Proof(gymnasium.Env):
    """`observation` = (environment, its episode, step); the reward is the action's number.

    Episodes are 1 to 12 steps long, by the seed; odd ones are terminated, even ones truncated.
    """

    def __init__(self, kind="box", render_mode=None):
        self.kind = kind
        self.render_mode = render_mode
        self.number, self.episode = next(_count), -1
        self.action_space = {
            "discrete": spaces.Discrete(1000),
            "box": spaces.Box(-1e6, 1e6, (2,), np.float32),
            "dict": spaces.Dict({"a": spaces.Discrete(1000), "b": spaces.Box(-1e6, 1e6, (), np.float64)}),
            "tuple": spaces.Tuple((spaces.Discrete(1000), spaces.MultiBinary(2))),
            "multi": spaces.MultiDiscrete([1000, 7]),
        }[kind.partition("-")[0]]
        self.place = spaces.Box(-1, 1e6, (3,), np.int64)
        self.as_dict = kind.endswith("-named")
        self.observation_space = spaces.Dict({"place": self.place, "twice": self.place}) if self.as_dict else self.place

    def look(self):
        place = np.array([self.number, self.episode, self.t], np.int64)
        return {"place": place, "twice": 2 * place} if self.as_dict else place

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        self.end = int(self.np_random.integers(1, 13))
        return self.look(), {"length": self.end, "drawn": float(self.np_random.random())}

    def step(self, action):
        assert self.t < self.end, "stepped beyond the end"
        self.t += 1
        ended = self.t == self.end
        odd = bool(self.end % 2)
        info = {"length": self.end, "drawn": float(self.np_random.random())}
        return self.look(), float(number_of(action)), ended and odd, ended and not odd, info

    def get_episode_data(self):
        return {"end": self.end, "maker": "proof"}


def number_of(action):
    """Return the number that an action of any kind carries."""
    if isinstance(action, dict):
        return action["a"]
    if isinstance(action, tuple):
        return action[0]
    return np.asarray(action).reshape(-1)[0]


class Faulty(gymnasium.Env):
    """Goes wrong in the way that its name says, in the episode and at the step that `at` says."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, fault="", at=(1, 2), render_mode=None):
        self.fault, self.at, self.render_mode = fault, at, render_mode
        self.episode = -1

    @property
    def now(self):
        return (self.episode, self.t) == self.at

    def look(self):
        if self.fault == "shape" and self.now:
            return np.zeros(3, np.float32)
        if self.fault == "dtype" and self.now:
            return np.zeros(2, np.complex64)
        return np.zeros(2, np.float32)

    def info(self):
        info = {"grows": np.zeros(1 + (self.fault == "grows" and self.now)), "stays": 1}
        if self.fault == "comes" and (self.episode, self.t) >= self.at and self.episode == self.at[0]:
            info["new"] = 1.0
        if self.fault == "goes" and self.now:
            del info["stays"]
        if self.fault == "late" and self.t > 0:
            info |= {"late": 2.5, "count": 3, "word": "yes", "flag": True}
        return info

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        if self.fault == "reset" and self.now:
            raise ZeroDivisionError("planted")
        return self.look(), self.info()

    def step(self, action):
        self.t += 1
        if self.fault == "step" and self.now:
            raise KeyError("planted")
        if self.fault == "dies" and self.now:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return self.look(), 0.0, self.t == 4, False, self.info()

    def render(self):
        if self.fault == "blank":
            return None
        if self.fault == "floats":
            return np.zeros((8, 8, 3))
        if self.fault == "several":
            return {"front": np.zeros((8, 8, 3), np.uint8), "back": np.ones((4, 6, 3), np.uint8)}
        return np.full((8, 8, 3), 7, np.uint8)


IDS = {"RingmapTest/Proof-v0": Proof, "RingmapTest/Faulty-v0": Faulty}
