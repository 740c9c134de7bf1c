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
    """A random walk of 3 to 12 steps.

    Args:
        pause_s: that each step takes, without work.
        fault: what happens in the first step of the seed `at`: "dies", "raises", "prints and dies", "hangs".
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, pause_s=0.0, fault="", at=-1, render_mode=None):
        self.pause_s, self.fault, self.at = pause_s, fault, at

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = seed
        self.where = self.np_random.normal(size=3)
        self.left = int(self.np_random.integers(3, 13))
        return self.where, {"draw": float(self.np_random.random())}

    def step(self, action):
        if self.fault and self.seed == self.at:
            self.go_wrong()
        if self.pause_s:
            time.sleep(self.pause_s)
        self.where = self.where + action + self.np_random.normal(size=3)
        self.left -= 1
        return self.where, float(self.where.sum()), self.left == 0, False, {"draw": 0.5}

    def go_wrong(self):
        if self.fault == "raises":
            raise ZeroDivisionError("planted")
        if self.fault == "prints and dies":
            print("the last words", flush=True)
        if "dies" in self.fault:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # nothing but a kill ends it
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                continue


gymnasium.register("RingmapTest/Walk-v0", entry_point=Walk)


def make_world(number, num_envs=2, **options):
    world = ringmap.World(
        "RingmapTest/Walk-v0", num_envs, add_pixels=False, max_episode_steps=None, **options
    )
    world.set_policy(RandomPolicy(seed=9))
    return world


def slow(number):
    return make_world(number, pause_s=0.002)


def single(number):
    return make_world(number, num_envs=1)
