"""Newer values of rows, which lie beside their columns. `Rows.take` lays them over the files.

Invariant: a row without a newer value has the value that it was stored with.
Not here: where newer values are kept (sidecars/mutable.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np

__all__ = ["Changes"]

Array = np.ndarray[Any, np.dtype[Any]]


class Changes(Protocol):
    """Newer values of rows."""

    @property
    def columns(self) -> Collection[str]:
        """The names of the columns that may have some."""
        ...

    def put_into(self, name: str, positions: Array, taken: Array) -> None:
        """Replace the rows that have a newer value, in an array `(*positions.shape, ...)` of the rows at these
        positions."""
        ...
