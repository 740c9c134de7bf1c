"""The column protocol: one fixed-size array of rows that wraps.

A backend keeps `rows` rows of one shape and dtype. It knows slots, not positions or
episodes: which rows may be overwritten, and when, is the store's business. Its
obligations are tested by `ringmap.testing.ColumnTests`, which a new backend inherits.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ringmap.storage.schema import ColumnSpec

__all__ = ["Column"]

Array = np.ndarray[Any, np.dtype[Any]]


class Column(Protocol):
    """Rows of one column.

    `write`, `reserve` and `sync` are called by the one writer; `take` and `read` by any thread of
    any process, at any time, also while rows are written: what comes back may then mix old and
    new rows, and the caller looks again.
    """

    spec: ColumnSpec
    rows: int

    def reserve(self, slot: int, count: int) -> None:
        """Make sure that `count` rows from `slot` (no wrap) can be written, or raise OSError."""
        ...

    def write(self, slot: int, values: Array) -> None:
        """Write rows from `slot` on (no wrap). `values`: (n, *shape), the column's dtype, C-contiguous."""
        ...

    @property
    def is_large(self) -> bool:
        """Whether its rows may be on the disk only, so that it pays to call `want`."""
        ...

    def want(self, slots: Array) -> None:
        """Ask for the rows at `slots`, which are to be taken soon. A hint: nothing changes."""
        ...

    def take(self, slots: Array, out: Array | None = None) -> Array:
        """Return a copy of the rows at `slots` (int64, any order, duplicates welcome), shape `slots.shape + shape`."""
        ...

    def read(self, slot: int, count: int) -> Array:
        """Return a copy of `count` rows from `slot` (no wrap)."""
        ...

    def sync(self) -> None:
        """Return once every row written is on the disk itself."""
        ...

    def close(self) -> None:
        """Give files back. Arrays handed out stay valid."""
        ...
