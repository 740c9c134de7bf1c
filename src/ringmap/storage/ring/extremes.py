"""The smallest and the greatest of some integers, and whether all of some booleans are true, for batches.

NumPy's reductions cost 1.1 to 1.3 us a call, however short the array; `argmin` and `argmax` 0.3 to 0.5, and a search in
the bytes of booleans 0.1. A small batch needs three such answers, in a call of 15 us.

Not here: positions and what they mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["all_true", "highest", "lowest"]

Array = np.ndarray[Any, np.dtype[Any]]


def lowest(values: Array) -> int:
    """Return the smallest of some integers; there must be one.

    Example:
        >>> lowest(np.array([5, 3, 9]))
        3
    """
    found: int = values.item(values.argmin())
    return found


def highest(values: Array) -> int:
    """Return the greatest of some integers; there must be one.

    Example:
        >>> highest(np.array([5, 3, 9]))
        9
    """
    found: int = values.item(values.argmax())
    return found


def all_true(flags: Array) -> bool:
    """Tell whether all of some booleans are true; so are none.

    Example:
        >>> all_true(np.array([True, False])), all_true(np.array([], np.bool_))
        (False, True)
    """
    return b"\0" not in flags.tobytes()
