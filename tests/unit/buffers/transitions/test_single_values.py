"""Observations that are one number, or none: Discrete spaces, 0-d arrays, parts of shape (0,)."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import ringmap

KINDS = {"int": int, "NumPy": np.int64, "0-d": np.array, "tensor": torch.tensor}


@pytest.mark.parametrize("lane", [None, 0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), spaces.Discrete(9)], ids=str)
def test_observations_of_one_number(shape, kind, lane):
    of = KINDS[kind]
    buf = ringmap.TransitionReplayBuffer(20, shape, device=None, obs_dtype=np.int64, seed=0)
    for i in range(4):
        buf.add(of(i), of(1), 1.0, of(i + 1), i == 3, lane=lane)
    batch = buf.sample(4)
    assert (batch["next_observations"] == batch["observations"] + 1).all()
    assert batch["observations"].dtype == np.int64 and batch["observations"].shape == (4,)


EMPTY = np.zeros(0, np.float32)
SPACE = spaces.Dict(none=spaces.Box(0, 1, (0,)), one=spaces.Discrete(9))


class Nothing(gymnasium.Env):
    """Shows a part of shape (0,), and the step."""

    observation_space = SPACE
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return {"none": EMPTY, "one": 0}, {}

    def step(self, action):
        self.t += 1
        return {"none": EMPTY, "one": self.t}, 1.0, self.t == 3, False, {}


def test_a_part_of_shape_0_of_transitions(tmp_path):
    buf = ringmap.TransitionReplayBuffer(20, SPACE, device=None, path=tmp_path / "ring", seed=0)
    for i in range(3):
        buf.add({"none": EMPTY, "one": i}, 0, 1.0, {"none": EMPTY, "one": i + 1}, i == 2)
    batch = buf.sample(3)["observations"]
    assert batch["none"].shape == (3, 0) and batch["one"].shape == (3,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ringmap.ReplayBuffer(100),
        lambda: ringmap.TransitionReplayBuffer(100, SPACE, device=None),
    ],
)
def test_a_part_of_shape_0_is_recorded(make):
    buf = make()
    env = ringmap.ReplayBufferCollectionWrapper(Nothing(), buf)
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    assert len(buf) == (4 if isinstance(buf, ringmap.ReplayBuffer) else 3)
