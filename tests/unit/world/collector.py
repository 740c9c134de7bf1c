"""Collections that are killed before a change to a file, and go on."""

from functools import partial

import pytest

from ringmap import World
from ringmap.data import ReplayBuffer
from ringmap.policy import RandomPolicy
from ringmap.testing import kills


def world_of(num_envs, policy):
    world = World("ringmap/TwoRoom-v1", num_envs, (16, 16), max_episode_steps=20)
    world.set_policy(policy)
    return world


def collect(path, episodes, max_steps, num_envs, every=None, interrupted="drop"):
    """Collect the seeds 100, 101, ... into the buffer or dataset at `path`, in parts of so many steps."""
    world = world_of(num_envs, RandomPolicy(seed=9))
    options = {"seed": 100, "options": {"variation": ["agent.color"]}, "resume": True, "progress": False}
    if str(path).endswith(".h5"):
        world.collect(path, episodes, **options)
    else:
        with ReplayBuffer(max_steps, history_len=4, path=path, interrupted=interrupted) as buf:
            world.collect(writer=buf, episodes=episodes, commit_every=every, **options)
    world.close()


def killed_after(changes, path, *numbers):
    """Collect in a child that is killed after so many changes to files; tell whether it was still at it."""
    if reason := kills.reason_why_not():
        pytest.skip(reason)
    return kills.killed_after(changes, partial(collect, path, *numbers)).killed
