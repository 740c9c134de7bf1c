"""The uniform sampler: every clip as likely as any other."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

__all__ = ["HasClips", "Sampler", "UniformSampler"]

Array = np.ndarray[Any, np.dtype[Any]]


class HasClips(Protocol):
    """What a sampler needs to know of a buffer."""

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips of this length."""
        ...


class Sampler(Protocol):
    """Draws clip ids: any callable with this signature.

    Returns an integer array of shape `(batch_size,)` in `[0, buffer.num_valid_ends(history_len))`.
    It may keep state; one with `state_dict` and `load_state_dict` has it saved by the buffer's own.
    """

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return the ids of `batch_size` clips."""
        ...


class UniformSampler:
    """Draw clips uniformly, with replacement, from a generator of its own.

    Args:
        rng: the generator; None makes a fresh one.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, sampler=UniformSampler(np.random.default_rng(0)))
        >>> buf.write_episode({"obs": np.arange(10)})
        >>> buf.sample(4)["obs"].shape
        (4, 1)
    """

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self.rng = rng if rng is not None else np.random.default_rng()

    def __call__(self, step: int, buffer: HasClips, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size)."""
        return self.rng.integers(0, buffer.num_valid_ends(history_len), batch_size)
