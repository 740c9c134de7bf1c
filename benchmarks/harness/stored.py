"""The episodes that every rival is filled with, and the proof that a batch came from them.

Each step carries the number of its episode, and its own: a batch says itself what should be in it,
so that batches drawn by other people's generators can be compared with what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.harness.data import noise, pixels, states

__all__ = ["Stored"]

Array = np.ndarray[Any, np.dtype[Any]]


class Stored:
    """So many episodes, all of one length.

    Args:
        episode: number -> columns of that episode; may use its arrays again.
        number_in: the column whose first value is the number. The number of the step is in "reward".
        num_episodes: how many.
        length: steps in each.
    """

    def __init__(
        self,
        episode: Callable[[int], Mapping[str, Array]],
        number_in: str,
        num_episodes: int,
        length: int,
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

    def assert_holds(
        self,
        batch: Mapping[str, Any],
        batch_size: int,
        history: int,
        whole: bool = True,
        lacks: tuple[str, ...] = (),
    ) -> None:
        """Raise unless every step of the batch is, in every column, the one that it says it is.

        Args:
            batch: column -> `(B, H, ...)`, or the same values in another shape.
            batch_size: B.
            history: H.
            whole: whether the steps of a clip must follow each other in one episode.
            lacks: columns that this library does not return.
        """
        shapes = {name: values.shape[1:] for name, values in self.first.items()}
        clips = {
            name: np.asarray(batch[name]).reshape(batch_size, history, *shape)
            for name, shape in shapes.items()
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
                wanted = expected[name][steps[there]]
                assert np.array_equal(values[there], wanted), f"{name} of episode {number} differs"
