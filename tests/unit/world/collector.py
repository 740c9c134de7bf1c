"""A collector to be killed.

It says each step, so that whoever kills it chooses the moment.
"""

import os
import sys

from ringmap import World
from ringmap.data import ReplayBuffer
from ringmap.policy import RandomPolicy


class Saying(RandomPolicy):
    """Random, and says so."""

    def get_action(self, infos):
        print("step", flush=True)
        return super().get_action(infos)


def world_of(num_envs, policy):
    world = World("ringmap/TwoRoom-v1", num_envs, (16, 16), max_episode_steps=20)
    world.set_policy(policy)
    return world


def collect(path, episodes, max_steps, num_envs, *parts, policy):
    """Collect the seeds 100, 101, ... into the buffer or dataset at `path`; `parts`: `commit_every`, and what is kept
    of a kill."""
    world = world_of(num_envs, policy)
    options = {"variation": ["agent.color"]}
    if str(path).endswith((".h5", ".lance")):
        world.collect(path, episodes, seed=100, options=options, resume=True, progress=False)
    else:
        every, interrupted = parts or (None, "drop")
        buf = ReplayBuffer(max_steps, history_len=4, path=path, interrupted=interrupted)
        world.collect(
            writer=buf, episodes=episodes, seed=100, options=options, resume=True, progress=False, commit_every=every
        )
        buf.close()
    world.close()


def collect_and_say(said, path, *numbers):
    """Be the process of a collector: what it prints goes into the pipe `said`."""
    os.dup2(said.fileno(), 1)
    said.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process lives
    collect(path, *numbers, policy=Saying(seed=9))
