"""The episode sampler: every episode is equally likely, then every clip in it."""

from __future__ import annotations

import numpy as np

from ringmap.clips.clip_range import HasClipRange
from ringmap.clips.samplers.base import Array, DrawingSampler, window_of
from ringmap.errors import InputError

__all__ = ["EpisodeSampler"]

_TRIES = 8


class EpisodeSampler(DrawingSampler):
    """Draw an episode uniformly, then a clip of it uniformly: short episodes count as much as long ones.

    Episodes too short for a clip are never drawn.

    Args:
        rng: the generator, or its seed; None makes a new one.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=1000, sampler=EpisodeSampler(0))
        >>> for number, length in enumerate([10, 900]):
        ...     buf.write_episode({"number": np.full(length, number)})
        >>> bool(0.4 < buf.sample(1000)["number"].mean() < 0.6)
        True
    """

    def __call__(self, step: int, buffer: HasClipRange, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size log episodes); O(episodes) where most are too short.

        Raises:
            InputError: the buffer does not know where its episodes begin.
        """
        window = window_of(self, buffer, history_len)
        if not window.has_episodes:
            raise InputError(
                f"EpisodeSampler: {type(buffer).__name__} stores transitions of many lanes, and no episodes; draw "
                "with another sampler"
            )
        with window.lock:
            starts, lengths = window.live.starts, window.live.lengths
            whole = window.index.whole if window.index.is_joined else None
            if whole is not None:
                starts, lengths = whole.places, whole.lengths
            chosen = self.rng.integers(0, len(lengths), batch_size)
            for _ in range(_TRIES):
                short = window.in_episodes(lengths[chosen]) == 0
                if not short.any():
                    break
                chosen[short] = self.rng.integers(0, len(lengths), int(short.sum()))
            else:
                long_enough = np.flatnonzero(window.in_episodes(lengths))
                chosen = long_enough[self.rng.integers(0, len(long_enough), batch_size)]
            steps = self.rng.integers(0, window.in_episodes(lengths[chosen]))
            anchors = starts[chosen] + steps + window.before
            if whole is not None:
                anchors = whole.positions(anchors)
            ids: Array = window.ids(anchors)
        return ids
