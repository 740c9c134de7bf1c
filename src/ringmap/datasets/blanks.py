"""Blanks: the values of a row for which there is no data.

    floats, complex   NaN         text    ""
    integers, flags   0           dates   NaT

An episode has one row more than it has steps: no reward came with its first observation, and no
action was taken at its last one.
Not here: which rows are blank (world/episodes.py, recording/open_episodes.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["blank"]

Array = np.ndarray[Any, np.dtype[Any]]


def blank(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a blank value of a shape and dtype.

    Example:
        >>> blank((2,), np.float32), blank((), np.int64), blank((), "<U3")
        (array([nan, nan], dtype=float32), array(0), array('', dtype='<U3'))
    """
    kind = np.dtype(dtype).kind
    if kind in "fcmM":
        return np.full(shape, "NaT" if kind in "mM" else np.nan, dtype)
    return np.zeros(shape, dtype)
