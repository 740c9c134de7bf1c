"""Steps per second, as a ratio of integers.

    12.5 -> 25/2        29.97 -> 2997/100        Fraction(30000, 1001) -> 30000/1001

A float is taken as the decimal number that it is printed as, so that 29.97 of every width is one rate.
Invariants: `parse_rate(rate_text(rate)) == rate`.
Not here: who knows a rate (clips/facts.py).
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import numpy as np

__all__ = ["as_rate", "parse_rate", "rate_text", "same_rate"]

_TEXT = re.compile(r"[1-9][0-9]{0,400}/[1-9][0-9]{0,400}")

_TOLERANCE = Fraction(1, 10_000)


def as_rate(value: Any) -> Fraction:
    """Return a rate as it is kept.

    Args:
        value: a positive number, of Python or NumPy, or the text "num/den".

    Raises:
        ValueError: it is something else.

    Example:
        >>> as_rate(12.5), as_rate(np.float32(29.97)), as_rate("30000/1001")
        (Fraction(25, 2), Fraction(2997, 100), Fraction(30000, 1001))
    """
    if isinstance(value, str):
        return parse_rate(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction | np.integer | np.floating):
        raise ValueError(f"{value!r} is no rate")
    return _positive(Fraction(str(value)))


def rate_text(rate: Fraction) -> str:
    """Return a rate as "num/den"."""
    return f"{rate.numerator}/{rate.denominator}"


def parse_rate(text: Any) -> Fraction:
    """Return the rate of a text "num/den".

    Raises:
        ValueError: it is none.
    """
    if not isinstance(text, str) or not _TEXT.fullmatch(text):
        raise ValueError(f"{text!r} is no rate")
    return _positive(Fraction(text))


def same_rate(one: Fraction, other: Fraction) -> bool:
    """Tell whether two rates are one: 29.97 is 30000/1001. Below one step per second their ratio decides."""
    return abs(one - other) <= _TOLERANCE * min(Fraction(1), one, other)


def _positive(rate: Fraction) -> Fraction:
    """Return a rate that is positive, and a number of NumPy, too."""
    try:
        fits = 0 < float(rate) < math.inf
    except OverflowError:
        fits = False
    if not fits:
        raise ValueError(f"{rate} is no rate")
    return rate
