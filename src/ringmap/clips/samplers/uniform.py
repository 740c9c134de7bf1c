"""The uniform sampler: every clip is equally likely."""

from __future__ import annotations

import numpy as np

from ringmap.clips.drawing import integers
from ringmap.clips.samplers.base import Array, DrawingSampler, HasClips

__all__ = ["UniformSampler", "uniform"]


def uniform(rng: np.random.Generator, buffer: HasClips, batch_size: int, history_len: int) -> Array:
    """Return ids drawn uniformly, with replacement. A buffer without a sampler draws positions instead:
    `ClipReader.draw`."""
    return integers(rng, 0, buffer.num_valid_ends(history_len), batch_size)


class UniformSampler(DrawingSampler):
    """Draw clips uniformly, with replacement, from its own generator.

    Args:
        rng: the generator, or its seed; None makes a new one.

    Example:
        >>> import numpy as np
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, sampler=UniformSampler(0))
        >>> buf.write_episode({"obs": np.arange(10)})
        >>> buf.sample(4)["obs"].shape
        (4, 1)
    """

    any_order = True

    def __call__(self, step: int, buffer: HasClips, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size)."""
        return uniform(self.rng, buffer, batch_size, history_len)
