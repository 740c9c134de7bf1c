"""Episodes to measure on, and the proof that a batch came from them.

Each step carries the number of its episode, and its own: a batch says itself what should be in it,
so that batches drawn by other people's generators can be compared with what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ringmap import ReplayBuffer

__all__ = ["Stored", "columns_of", "fill", "noise", "pixels", "states"]

Array = np.ndarray[Any, np.dtype[Any]]


def states(length: int, first: int = 0) -> Iterator[dict[str, Array]]:
    """Yield episodes of 4 small columns, 64 bytes a step: the same arrays each time, numbered from `first` on."""
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
    return np.random.default_rng(0).integers(0, 256, (different, length, 64, 64, 3), np.uint8)


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


def fill(buffer: ReplayBuffer, episodes: Iterator[Mapping[str, Array]], number: int) -> ReplayBuffer:
    """Write `number` episodes; return the buffer."""
    for _ in range(number):
        buffer.write_episode(next(episodes))
    return buffer


def columns_of(folder: Path) -> dict[str, Array]:
    """Return a buffer's column files as NumPy alone opens them."""
    files = sorted((folder / "columns").glob("*.npy"))
    return {file.stem.partition("-")[2]: np.asarray(np.load(file, mmap_mode="r")) for file in files}


class Stored:
    """So many episodes, all of one length.

    Args:
        episode: number -> columns of that episode; may use its arrays again.
        number_in: the column whose first value is the number. The number of the step is in "reward".
        num_episodes: how many.
        length: steps in each.
    """

    def __init__(
        self, episode: Callable[[int], Mapping[str, Array]], number_in: str, num_episodes: int, length: int
    ) -> None:
        self.episode, self._number_in = episode, number_in
        self.num_episodes, self.length = num_episodes, length
        self.num_steps = num_episodes * length

    @classmethod
    def of_pixels(cls, num_episodes: int, length: int) -> Stored:
        """64x64x3 pixels and 3 small columns."""
        frames = noise(length)
        return cls(lambda number: next(pixels(frames, number)), "action", num_episodes, length)

    @classmethod
    def of_states(cls, num_episodes: int, length: int) -> Stored:
        """4 small columns."""
        return cls(lambda number: next(states(length, number)), "obs", num_episodes, length)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for number in range(self.num_episodes):
            yield dict(self.episode(number))

    def ring(self, path: Path, history: int = 1) -> ReplayBuffer:
        """Return a full ring of them, in a directory."""
        return fill(ReplayBuffer(self.num_steps, history, path=path, seed=0), iter(self), self.num_episodes)

    def chunks(self, steps: int = 2_000) -> Iterator[dict[str, Array]]:
        """Yield whole episodes end to end, and the number of the episode in a column of its own."""
        group = max(1, steps // self.length)
        for first in range(0, self.num_episodes, group):
            numbers = range(first, min(first + group, self.num_episodes))
            episodes = [{name: values.copy() for name, values in self.episode(number).items()} for number in numbers]
            chunk = {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]}
            yield {**chunk, "episode": np.repeat(np.array(numbers), self.length)}

    @property
    def first(self) -> dict[str, Array]:
        """The first episode."""
        return dict(self.episode(0))

    def starts(self, size: int, history: int, rng: np.random.Generator) -> Array:
        """Return the rows at which random clips begin, `(size,)`."""
        steps = rng.integers(self.length - history + 1, size=size)
        found: Array = rng.integers(self.num_episodes, size=size) * self.length + steps
        return found

    def assert_holds(
        self, batch: Mapping[str, Any], batch_size: int, history: int, whole: bool = True, lacks: tuple[str, ...] = ()
    ) -> None:
        """Raise unless every step of the batch is, in every column, the one that it says it is.

        Args:
            batch: column -> `(B, H, ...)`, or the same values in another shape.
            batch_size: B.
            history: H.
            whole: whether the steps of a clip must follow each other in one episode.
            lacks: columns that this library does not return.
        """
        clips = {
            name: np.asarray(batch[name]).reshape(batch_size, history, *values.shape[1:])
            for name, values in self.first.items()
            if name not in lacks
        }
        numbers = clips[self._number_in][..., 0].astype(int)
        steps = clips["reward"].astype(int)
        assert len(np.unique(numbers)) > 1, "every clip is of one episode"
        if whole:
            assert (numbers == numbers[:, :1]).all(), "a clip crosses into another episode"
            assert (steps == steps[:, :1] + np.arange(history)).all(), "steps out of order"
        for number in np.unique(numbers):
            there, expected = numbers == number, self.episode(int(number))
            for name, values in clips.items():
                assert np.array_equal(values[there], expected[name][steps[there]]), f"{name} of episode {number}"
