"""Public arguments that are numbers: what a user gives, as the Python number that we keep.

    3, np.int64(3), np.array(3), torch.tensor(3)    --integer-->  3
    0.6, np.float32(0.6), 1, np.array(0.6)          --real-->     0.6
    True, np.bool_(True)                            --flag-->     True

A NumPy scalar that was kept could not be hashed alike, written as JSON, or has no `bit_length`.

Invariants: `integer`, `real` and `flag` return Python's own types, or None for what is no such number.
Not here: arrays of data (storage/columns/values.py).
"""

from __future__ import annotations

import math
import operator
from typing import Any

from ringmap.errors import InputError

__all__ = [
    "count",
    "finite",
    "flag",
    "fraction",
    "integer",
    "positive",
    "positive_real",
    "real",
    "whole",
]


def integer(value: Any) -> int | None:
    """Return an integer of any kind as Python's; None for anything else, flags too.

    Example:
        >>> import numpy as np
        >>> integer(np.uint8(3)), integer(np.array(3)), integer(3.0), integer(True)
        (3, 3, None, None)
    """
    if type(value) is int:
        return value
    if flag(value) is not None:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def real(value: Any) -> float | None:
    """Return a number of any kind as Python's float; None for anything else, flags and text too.

    Example:
        >>> import numpy as np
        >>> real(np.float32(0.5)), real(2), real(np.array(0.5)), real("2"), real(True)
        (0.5, 2.0, 0.5, None, None)
    """
    if type(value) is float:
        return value
    whole = integer(value)
    if whole is None and (flag(value) is not None or isinstance(value, str | bytes | bytearray)):
        return None
    try:
        return float(value) if whole is None else float(whole)
    except (TypeError, ValueError, OverflowError):
        return None


def flag(value: Any) -> bool | None:
    """Return a flag of any kind as Python's bool; None for anything else, numbers too.

    Example:
        >>> import numpy as np
        >>> flag(np.bool_(True)), flag(1), flag("yes")
        (True, None, None)
    """
    if type(value) is bool:
        return value
    kind = getattr(value, "dtype", None)
    if kind is not None and not getattr(value, "shape", (0,)) and str(kind) in ("bool", "torch.bool"):
        return bool(value)
    return None


def positive(where: str, name: str, value: Any) -> int:
    """Return a positive integer.

    Raises:
        InputError: `value` is none.
    """
    number = value if type(value) is int else integer(value)
    if number is None or number < 1:
        raise InputError(f"{where}: {name} must be positive (an integer), got {value!r}")
    return number


def count(where: str, name: str, value: Any, least: int = 0) -> int:
    """Return an integer that is not below the least.

    Raises:
        InputError: `value` is none.
    """
    number = integer(value)
    if number is None or number < least:
        which = f", {least} or more" if least else " that is not negative"
        raise InputError(f"{where}: {name} must be an integer{which}, got {value!r}")
    return number


def whole(where: str, name: str, value: Any) -> int:
    """Return an integer.

    Raises:
        InputError: `value` is none.
    """
    number = integer(value)
    if number is None:
        raise InputError(f"{where}: {name} must be an integer, got {value!r}")
    return number


def fraction(where: str, name: str, value: Any) -> float:
    """Return a number between 0 and 1.

    Raises:
        InputError: `value` is none.
    """
    number = real(value)
    if number is None or not 0 <= number <= 1:
        raise InputError(f"{where}: {name} must lie between 0 and 1, got {value!r}")
    return number


def positive_real(where: str, name: str, value: Any) -> float:
    """Return a positive, finite number.

    Raises:
        InputError: `value` is none.
    """
    number = real(value)
    if number is None or not 0 < number < math.inf:
        raise InputError(f"{where}: {name} must be a positive number, got {value!r}")
    return number


def finite(where: str, name: str, value: Any) -> float:
    """Return a finite number.

    Raises:
        InputError: `value` is none.
    """
    number = real(value)
    if number is None or not math.isfinite(number):
        raise InputError(f"{where}: {name} must be a finite number, got {value!r}")
    return number
