"""Values of episodes as JSON that a browser can show: small, and never more than was asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["plain"]

_MOST_TEXT, _MOST_ITEMS = 400, 32
_EXACT = 2**53
"""Greater integers are not exact in a browser."""


def plain(value: Any) -> Any:
    """Return a value as JSON: a number, a text, a short list; of anything larger its dtype and shape.

    Example:
        >>> plain(np.arange(3)), plain(np.zeros((4, 50), "f4")), plain(2**60)
        ([0, 1, 2], 'float32 (4, 50)', '1152921504606846976')
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        if value.size == 1:
            return plain(value.reshape(-1)[0])
        if value.size > _MOST_ITEMS or value.dtype.kind == "O":
            return f"{value.dtype} {value.shape}"
        return [plain(item) for item in value] if value.ndim else plain(value.item())
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _EXACT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes: {value[:16].hex(' ')}"
    if isinstance(value, list | tuple):
        if len(value) == 1:
            return plain(value[0])
        return [plain(v) for v in value[:_MOST_ITEMS]]
    if isinstance(value, dict):
        return {str(k)[:_MOST_TEXT]: plain(v) for k, v in list(value.items())[:_MOST_ITEMS]}
    return str(value)[:_MOST_TEXT]
