"""stable-worldmodel's own World and policies, and ours: each works with the other."""

import warnings

import numpy as np
import pytest

from ringmap import World
from ringmap.data import ReplayBuffer
from ringmap.policy import RandomPolicy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip(
        "stable_worldmodel",
        reason="stable-worldmodel is not installed (pip install --no-deps stable-worldmodel==0.1.1)",
        exc_type=ImportError,
    )

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("home", ["ram", "disk"])
def test_their_world_into_our_buffer(tmp_path, home):
    world = theirs.World("swm/TwoRoom-v1", num_envs=3, image_shape=(32, 32), max_episode_steps=20)
    world.set_policy(theirs.policy.RandomPolicy(seed=0))
    path = tmp_path / "buffer" if home == "disk" else None
    buf = ReplayBuffer(max_steps=5000, history_len=4, path=path)
    world.collect(writer=buf, episodes=5, seed=0)
    assert buf.num_episodes == 5
    batch = buf.sample(16)
    assert batch["pixels"].shape == (16, 4, 32, 32, 3)
    assert (np.diff(batch["step_idx"].reshape(16, 4), axis=1) == 1).all()
    assert (batch["id"].reshape(16, 4) == batch["id"].reshape(16, 4)[:, :1]).all()
    buf.close()
    world.close()


def test_their_policy_in_our_world_and_ours_in_theirs():
    with World("ringmap/TwoRoom-v1", 3, (32, 32), max_episode_steps=9) as world:
        world.set_policy(theirs.policy.RandomPolicy(seed=0))
        buf = ReplayBuffer(max_steps=5000)
        world.collect(writer=buf, episodes=4, seed=0)
        assert buf.lengths.tolist() == [10] * 4
    world = theirs.World("swm/TwoRoom-v1", num_envs=2, image_shape=(32, 32), max_episode_steps=9)
    world.set_policy(RandomPolicy(seed=0))
    buf = ReplayBuffer(max_steps=5000)
    world.collect(writer=buf, episodes=3, seed=0)
    assert buf.num_episodes == 3
    world.close()
