"""A column whose values may change: the newest ones lie beside it.

    take(slots) -> the column's rows -> those that have a newer value take their place

Everything that reads columns by name reads through this.

Invariant: a row without a newer value has the value that it was stored with.
Not here: where newer values are kept (sidecars/mutable.py, and for a learner buffers/sharded/values.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np

from ringmap.storage.columns.base import Column
from ringmap.storage.columns.pending import PendingColumn

__all__ = ["ChangedColumn", "Changes", "Layers"]

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


class Layers:
    """Newer values from two places: those of the upper one count more.

    Args:
        lower: of the same columns.
        upper: see there.
    """

    def __init__(self, lower: Changes, upper: Changes) -> None:
        self._lower, self._upper = lower, upper

    @property
    def columns(self) -> Collection[str]:
        """The names of the columns."""
        return self._lower.columns

    def put_into(self, name: str, positions: Array, taken: Array) -> None:
        """Replace the rows that have a newer value."""
        self._lower.put_into(name, positions, taken)
        self._upper.put_into(name, positions, taken)


class ChangedColumn(PendingColumn):
    """A column, with the newer values of its rows; none of them is pending.

    Args:
        column: its rows as they were stored.
        changes: the newer values.
    """

    def __init__(self, column: Column, changes: Changes) -> None:
        super().__init__(column, lambda: None)
        self._changes = changes

    def take(self, slots: Array, out: Array | None = None, head: int = 0) -> Array:
        """Return a copy of the rows at `slots`, each with its newest value.

        `head`: a position at or after the end of these rows, less than a lap: it tells which position a slot has.
        """
        taken = super().take(slots, out, head)
        if not taken.flags.writeable or not taken.ndim:
            taken = np.array(taken)
        positions = head - 1 - (head - 1 - slots) % self.rows
        self._changes.put_into(self.spec.name, positions, taken)
        return taken
