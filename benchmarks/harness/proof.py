"""Steps that say which they are, so that a clip can be asked whether it is whole.

    row                              8-byte words: [episode][step][filler of both ...]
    episode, step, length            the same once more, in columns of their own

A clip is whole if its rows are consecutive steps of one episode, inside the length that each
names, every word of every row is that step's, and all columns agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Episodes", "num_torn"]

Array = np.ndarray[Any, np.dtype[Any]]

# Signed, because torch does no arithmetic on uint64; a product wraps, which is what a hash wants.
_EPISODE, _STEP, _WORD = (np.int64(k) for k in (-7046029254386353131, -4417276706812531889, 3))


class Episodes:
    """Makes episodes as fast as memory is filled: what it gives is valid until the next one.

    Args:
        words: 8-byte words in a row of the column `row`, at least 2.
        longest: steps of the longest episode.
    """

    def __init__(self, words: int, longest: int) -> None:
        self._ramp = _ramp(words)
        self._rows = np.empty((longest, words), np.int64)
        self._steps = np.arange(longest)

    def __call__(self, number: int, length: int) -> dict[str, Array]:
        """Return episode `number`, of `length` steps."""
        rows, steps = self._rows[:length], self._steps[:length]
        episode = np.full(length, number)
        np.add(_key(episode, steps)[:, None], self._ramp, out=rows)
        rows[:, 0], rows[:, 1] = episode, steps
        return {"row": rows, "episode": episode, "step": steps, "length": np.full(length, length)}


def num_torn(batch: Mapping[str, Any]) -> int:
    """Return how many clips of a batch, column -> `(B, H, ...)` array or tensor, are not whole."""
    rows, *columns = (np.asarray(batch[name]) for name in ("row", "episode", "step", "length"))
    episode, step, length = columns
    whole = (episode == episode[:, :1]) & (step == step[:, :1] + np.arange(step.shape[1]))
    whole &= (rows[:, :, 0] == episode) & (rows[:, :, 1] == step) & (step < length)
    whole &= length == length[:, :1]
    filler = _key(episode, step)[:, :, None] + _ramp(rows.shape[2])[2:]
    whole &= (rows[:, :, 2:] == filler).all(2)
    return int((~whole.all(1)).sum())


def _key(episode: Array, step: Array) -> Array:
    key: Array = episode * _EPISODE ^ step * _STEP
    return key


def _ramp(words: int) -> Array:
    ramp: Array = np.arange(words) * _WORD
    return ramp
