"""What a world costs beside the bare loop, what workers bring, and what a disk costs beside RAM.

PushT where gym-pusht is installed (the extra pusht), else CartPole; both draw with pygame, at
what they are drawn at, and are resized to 64x64.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from time import process_time
from typing import Any

import gymnasium
import numpy as np
from PIL import Image

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import ReplayBuffer, World
from ringmap.world.envs import register

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

SHAPE = (64, 64)
NUM_ENVS = 4


def run(place: Place) -> list[Table]:
    """Time all three."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of pymunk
    names = [name for name in ("swm/PushT-v1", "CartPole-v1", "ringmap/TwoRoom-v1") if _there(name)]
    return [
        *(_overhead(place, name) for name in names),
        _workers(place, names[0]),
        _disk(place, names[0]),
    ]


def _there(name: str) -> bool:
    register()
    try:
        gymnasium.make(name, render_mode="rgb_array").close()
    except ImportError:
        return False
    return True


class Fixed:
    """A policy of actions that were drawn beforehand: it costs nothing beside what is timed."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def set_env(self, envs: Any) -> None:
        self.actions = _actions(envs.single_action_space, self.steps)
        self.at = 0

    def get_action(self, infos: Any) -> Any:
        self.at = (self.at + 1) % self.steps
        return self.actions[self.at]


def _actions(space: Any, steps: int) -> Any:
    space.seed(0)
    return np.array([[space.sample() for _ in range(NUM_ENVS)] for _ in range(steps)])


class Nowhere:
    """A writer that keeps nothing."""

    def __enter__(self) -> Nowhere:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write_episode(self, ep_data: Any) -> None:
        pass

    def write_episodes(self, episodes: Any) -> None:
        pass


def _world(name: str, steps: int, **options: Any) -> World:
    world = World(name, NUM_ENVS, SHAPE, max_episode_steps=steps, **options)
    world.set_policy(Fixed(steps))
    return world


class Processor:
    """A call that notes the processor time it took, after the first, which warms up."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._taken: list[float] = []

    def __call__(self) -> None:
        start = process_time()
        self._call()
        self._taken.append(process_time() - start)

    @property
    def seconds(self) -> list[float]:
        return self._taken[1:]


def _overhead(place: Place, name: str) -> Table:
    """Compare `collect` with a loop over the same environments: step, render, resize."""
    steps = place.size(25, 3)
    world = _world(name, steps)
    envs = [
        gymnasium.make(name, max_episode_steps=steps, render_mode="rgb_array", disable_env_checker=True)
        for _ in range(NUM_ENVS)
    ]
    actions = _actions(envs[0].action_space, steps)
    frames = 0

    def picture(env: Any) -> Any:
        nonlocal frames
        frames += 1
        return np.asarray(Image.fromarray(env.render()).resize(SHAPE, Image.Resampling.BILINEAR))

    def bare() -> None:
        for number, env in enumerate(envs):
            env.reset(seed=number)
            picture(env)
        ended = [False] * NUM_ENVS
        at = 0
        while not all(ended):
            at = (at + 1) % steps
            for number, env in enumerate(envs):
                if not ended[number]:
                    _, _, terminated, truncated, _ = env.step(actions[at, number])
                    picture(env)
                    ended[number] = terminated or truncated

    def ours() -> None:
        world.policy.at = 0
        world.collect(writer=Nowhere(), episodes=NUM_ENVS, seed=0, progress=False)

    bare()
    count = frames
    rows = ReplayBuffer(max_steps=10_000)
    world.policy.at = 0
    world.collect(writer=rows, episodes=NUM_ENVS, seed=0, progress=False)
    assert count == rows.num_steps_stored, "the two do not play the same"
    table = Table(
        f"{name}: {NUM_ENVS} environments in this process, {count} frames resized to 64x64, whole runs in turn"
    )
    calls: dict[str, Callable[[], object]] = {"World.collect": ours, "bare loop": bare}
    processor = {key: Processor(call) for key, call in calls.items()}
    table.add_all(in_turn(processor, place.size(60, 2)))
    for key, timed in processor.items():
        table.add(f"{key}, processor time", timed.seconds)
    names = [f"{key}, processor time" for key in calls]
    table.ratio(*names, at_most=None if "TwoRoom" in name else 1.15)
    ours_s, bare_s = (table.times[key]["median"] for key in names)
    table.fact("us more per frame", f"{1e6 * (ours_s - bare_s) / count:.0f}")
    table.notes.append("processor time is judged: it does not count what else the machine does")
    if "TwoRoom" in name:
        table.notes.append("TwoRoom takes next to no time itself: no bar is set for it")
    world.close()
    return table


def _workers(place: Place, name: str) -> Table:
    """Compare stepping in two processes with stepping in this one."""
    steps = place.size(25, 3)
    table = Table(f"{name}: {NUM_ENVS} environments with pixels, in this process and in two workers")
    worlds = {"workers=0": _world(name, steps), "workers=2": _world(name, steps, workers=2)}
    calls: dict[str, Callable[[], object]] = {}
    found = {}
    for key, world in worlds.items():
        buffer = ReplayBuffer(max_steps=10_000)
        world.collect(writer=buffer, episodes=NUM_ENVS, seed=0, progress=False)
        found[key] = buffer.get_col_data("pixels")
        calls[key] = lambda world=world: world.collect(writer=Nowhere(), episodes=NUM_ENVS, seed=0, progress=False)
    assert np.array_equal(*found.values()), "workers give other pixels"
    table.add_all(in_turn(calls, place.size(60, 2)))
    table.faster("workers=2", "workers=0", at_least=1.5)
    for world in worlds.values():
        world.close()
    return table


def _disk(place: Place, name: str) -> Table:
    """Compare collecting into a directory with collecting into RAM."""
    steps = place.size(25, 3)
    table = Table(f"{name}: {NUM_ENVS} episodes into a buffer on disk, and into one in RAM")
    world = _world(name, steps)
    with place.folder() as folder:
        buffers = {
            "disk": ReplayBuffer(max_steps=2_000, path=folder / "buffer"),
            "RAM": ReplayBuffer(max_steps=2_000),
        }
        calls: dict[str, Callable[[], object]] = {
            key: lambda buffer=buffer: world.collect(writer=buffer, episodes=NUM_ENVS, seed=0, progress=False)
            for key, buffer in buffers.items()
        }
        table.add_all(in_turn(calls, place.size(60, 2)))
        table.ratio("disk", "RAM", at_most=1.05)
        buffers["disk"].close()
    world.close()
    return table
