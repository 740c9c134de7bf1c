"""Samplers without weights: every clip is equally likely, or new ones more than old ones."""

from __future__ import annotations

import numpy as np

from ringmap.arguments import positive, positive_real
from ringmap.clips.draws import integers
from ringmap.clips.samplers.base import Array, DrawingSampler, HasClips, Seed
from ringmap.errors import InputError

__all__ = ["RecencySampler", "UniformSampler", "uniform"]


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


class RecencySampler(DrawingSampler):
    """Draw recent clips: with exponentially decreasing probability, or from the newest clips only.

    The age of a clip is the number of newer clips.

    Args:
        half_life: age at which a clip is drawn half as often; exponential.
        window: draw uniformly from this many newest clips, and no others.
        rng: the generator, or its seed; None makes a new one.

    Raises:
        InputError: neither or both of `half_life` and `window`, or a value that is not positive.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=1000, sampler=RecencySampler(window=100, rng=0))
        >>> buf.write_episode({"step": np.arange(1000)})
        >>> int(buf.sample(500)["step"].min()) >= 900
        True
    """

    by_age = True

    def __init__(self, half_life: float | None = None, window: int | None = None, rng: Seed = None) -> None:
        super().__init__(rng)
        if (half_life is None) == (window is None):
            raise InputError("RecencySampler: give half_life= or window=, and not both")
        where = "RecencySampler"
        self.half_life = None if half_life is None else positive_real(where, "half_life", half_life)
        self.window = None if window is None else positive(where, "window", window)

    def __call__(self, step: int, buffer: HasClips, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size)."""
        count = buffer.num_valid_ends(history_len)
        if self.window is not None:
            return self.rng.integers(max(0, count - self.window), count, batch_size)
        assert self.half_life is not None
        # The inverse of 1 - q**age, truncated at the oldest clip: no mass is lost, and no draw is rejected.
        log_q = -np.log(2.0) / self.half_life
        reached = self.rng.random(batch_size) * -np.expm1(log_q * count)
        ages = np.floor(np.log1p(-reached) / log_q).astype(np.int64)
        ids: Array = count - 1 - np.minimum(ages, count - 1)
        return ids
