"""Episodes and full buffers to measure on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
from tqdm import tqdm

from ringmap import ReplayBuffer

__all__ = ["fill", "noise", "pixels", "states"]

Array = np.ndarray[Any, np.dtype[Any]]


def states(length: int, first: int = 0) -> Iterator[dict[str, Array]]:
    """Yield episodes of 4 small columns, 64 bytes a step: the same arrays again, numbered anew from `first` on."""
    episode = {
        "obs": np.zeros((length, 12), np.float32),
        "action": np.zeros((length, 2), np.float32),
        "reward": np.arange(length, dtype=np.float32),
        "discount": np.ones(length, np.float32),
    }
    for number in count(first):
        episode["obs"][:, 0] = number
        yield episode


def noise(length: int, different: int = 32) -> Array:
    """Return the frames of so many episodes of 64x64x3 pixels, 12 KiB a step."""
    shape = (different, length, 64, 64, 3)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def pixels(frames: Array, first: int = 0) -> Iterator[dict[str, Array]]:
    """Yield episodes of these frames, over and over, and 3 small columns that number them from `first` on."""
    different, length = frames.shape[:2]
    for number in count(first):
        yield {
            "pixels": frames[number % different],
            "action": np.full((length, 2), number, np.float32),
            "reward": np.arange(length, dtype=np.float32),
            "terminated": np.zeros(length, np.bool_),
        }


def fill(buffer: ReplayBuffer, episodes: Iterator[dict[str, Array]], number: int) -> None:
    """Write `number` episodes."""
    for _ in tqdm(range(number), desc=f"writing {number:,} episodes", delay=2, leave=False):
        buffer.write_episode(next(episodes))
