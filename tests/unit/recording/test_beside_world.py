"""An episode has the rows that `World.collect` gives it, to the dtype."""

import gymnasium
import numpy as np
import pytest

from ringmap import ReplayBuffer, World
from ringmap.recording import ReplayBufferCollectionWrapper

PAIRS = {"observation": "obs", **{n: n for n in ("action", "reward", "terminated", "truncated")}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_the_rows_are_those_of_a_world(name, stream):
    env = gymnasium.make(name, max_episode_steps=30)
    env.action_space.seed(0)
    action = env.action_space.sample()
    collected = ReplayBuffer(1000)
    with_world = World(name, num_envs=1, add_pixels=False, max_episode_steps=30, render_mode=None)
    with_world.set_policy(lambda infos: np.asarray(action)[None])
    with_world.collect(writer=collected, episodes=4, seed=5, progress=False)
    with_world.close()

    recorded = ReplayBuffer(1000)
    wrapper = ReplayBufferCollectionWrapper(env, recorded, stream=stream)
    for seed in range(5, 9):
        wrapper.reset(seed=seed)
        over = False
        while not over:
            _, _, terminated, truncated, _ = wrapper.step(action)
            over = terminated or truncated
    wrapper.close()

    assert recorded.lengths.tolist() == collected.lengths.tolist()
    for number in range(4):
        ours, theirs = recorded.load_episode(number), collected.load_episode(number)
        for there, here in PAIRS.items():
            assert ours[here].dtype == theirs[there].dtype, here
            np.testing.assert_array_equal(ours[here], theirs[there], err_msg=here)


def test_gymnasium_s_own_vector_environment():
    """CartPole has one that is no SyncVectorEnv; what it records says of itself that nothing is glued."""
    buf = ReplayBuffer(5000)
    envs = gymnasium.make_vec("CartPole-v1", num_envs=5)
    assert type(envs.unwrapped).__name__ == "CartPoleVectorEnv"
    wrapper = ReplayBufferCollectionWrapper(envs, buf)
    wrapper.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(150):
        wrapper.step(rng.integers(0, 2, 5))
    assert buf.num_episodes > 20
    for episode in buf.episodes():
        obs, actions = np.array(episode["obs"], float), np.array(episode["action"][:-1])
        # CartPole's Euler step: the position moves by the velocity, which the force changes by its sign.
        np.testing.assert_allclose(obs[1:, 0], obs[:-1, 0] + 0.02 * obs[:-1, 1], atol=1e-5)
        assert ((obs[1:, 1] > obs[:-1, 1]) == (actions == 1)).all()
        assert abs(obs[0]).max() <= 0.05 and episode["terminated"][-1]
