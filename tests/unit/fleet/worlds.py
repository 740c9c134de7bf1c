"""Worlds for collectors: tiny, and the same episode for the same seed, whoever plays it."""

import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium import spaces

import ringmap
from ringmap.policy import RandomPolicy


class Walk(gymnasium.Env):
    """Episodes of 3 to 12 steps, whose observation is (seed, step, something drawn); the reward follows the action.

    Args:
        pause_s: that each step takes, without work.
        fault: what happens in the first step of the seed `at` (None: of any): "dies", "raises", "prints and dies",
            "hangs", or "waits" in its third step.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, pause_s=0.0, fault="", at=None, render_mode=None):
        self.pause_s, self.fault, self.at = pause_s, fault, at

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = seed
        self.at_step, self.length = 0, int(self.np_random.integers(3, 13))
        return self.look(), {}

    def look(self):
        return np.array([self.seed, self.at_step, self.np_random.normal()])

    def step(self, action):
        if self.fault and self.at in (None, self.seed) and (self.fault != "waits" or self.at_step == 2):
            self.go_wrong()
        if self.pause_s:
            time.sleep(self.pause_s)
        self.at_step += 1
        return self.look(), float(action.sum()), self.at_step == self.length, False, {}

    def go_wrong(self):
        if self.fault == "raises":
            raise ZeroDivisionError("planted")
        if self.fault == "prints and dies":
            print("the last words", flush=True)
        if "dies" in self.fault:
            os.kill(os.getpid(), signal.SIGKILL)
        print(self.fault, flush=True)
        if self.fault == "waits":
            time.sleep(60)
        while True:  # nothing but a kill ends it
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                continue


gymnasium.register("RingmapTest/Walk-v0", entry_point=Walk)


def make_world(number, num_envs=2, **options):
    world = ringmap.World(
        "tests.unit.fleet.worlds:RingmapTest/Walk-v0", num_envs, add_pixels=False, max_episode_steps=None, **options
    )
    world.set_policy(RandomPolicy(seed=9))
    return world
