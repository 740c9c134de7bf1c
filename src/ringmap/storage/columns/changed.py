"""A column whose values may change: the newest ones lie beside it.

    take(slots) -> the column's rows -> those that have a newer value take their place

Everything that reads columns by name reads through this.

Invariant: a row without a newer value has the value that it was stored with.
Not here: where newer values are kept (sidecars/mutable.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np

from ringmap.storage.columns.base import RowSource
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["ChangedColumn", "Changes"]

Array = np.ndarray[Any, np.dtype[Any]]


class Changes(Protocol):
    """Newer values of rows."""

    @property
    def columns(self) -> Collection[str]:
        """The names of the columns that may have some."""
        ...

    def put_into(self, name: str, positions: Array, taken: Array) -> None:
        """Replace the rows that have a newer value, in an array `(*positions.shape, ...)` of the rows at these positions."""
        ...


class ChangedColumn:
    """A column, with the newer values of its rows.

    Args:
        name: of the column.
        column: its rows as they were stored.
        changes: the newer values.
    """

    def __init__(self, name: str, column: RowSource, changes: Changes) -> None:
        self._name, self._column, self._changes = name, column, changes
        self.spec: ColumnSpec = column.spec
        self.rows = column.rows

    @property
    def is_large(self) -> bool:
        """Whether a call of `want` pays off."""
        return self._column.is_large

    def want(self, slots: Array) -> None:
        """Ask for the rows at `slots`."""
        self._column.want(slots)

    def take(self, slots: Array, out: Array | None = None, head: int = 0) -> Array:
        """Return a copy of the rows at `slots`, each with its newest value.

        `head`: a position at or after the end of these rows, less than a lap: it tells which position a slot has.
        """
        taken = self._column.take(slots, out, head)
        if not taken.flags.writeable or not taken.ndim:
            taken = np.array(taken)
        positions = head - 1 - (head - 1 - slots) % self.rows
        self._changes.put_into(self._name, positions, taken)
        return taken
