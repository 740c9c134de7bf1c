"""The columns of several rings side by side: one copy takes rows of all of them.

    ring 0 |slot 0 1 2 ... n|   | ring 1 |slot 0 1 2 ... n|   | ...       one array of rows
            row 0                         row stride           row 2 * stride

The files of a column are mapped once more, one after the other, each from a multiple of `stride` rows on. So slot s of
ring i is row s + i * stride, whatever the column. A copy for each ring would take 1 us for each, and a second copy to
bring small rows into the order of the batch; a call for each large row takes 2 us.

Invariants: as of `MemmapColumn`: a row is copied as it is at that moment. The map of a ring that was closed stays until
the last array over it is gone.
Not here: which rings, and whether rows stayed live (clips/adjacent.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.storage.columns.aligned import LEAST_NBYTES, empty
from ringmap.storage.columns.base import Takes
from ringmap.storage.columns.rows import Rows
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.npy import HEADER_NBYTES
from ringmap.storage.disk.room import Room
from ringmap.storage.disk.system import System

__all__ = ["AdjacentColumn", "AdjacentRows"]

Array = np.ndarray[Any, np.dtype[Any]]


class AdjacentColumn:
    """A column of several rings, for `take` alone.

    Args:
        spec: of a row.
        rows: of all rings, `(rings * stride, *shape)`.
    """

    def __init__(self, spec: ColumnSpec, rows: Array) -> None:
        self.spec = spec
        self._rows = rows
        self._many = -(-LEAST_NBYTES // spec.row_nbytes)

    def take(self, slots: Array, out: Array | None = None, head: int = 0) -> Array:
        """Return a copy of the rows at these slots, each with `stride` added for every ring before its own; see
        `Column.take`."""
        if out is None and slots.size >= self._many:
            out = empty((*slots.shape, *self.spec.shape), self.spec.dtype)
        taken: Array = self._rows.take(slots, 0, out, "clip")
        return taken


class AdjacentRows:
    """The rows of several rings.

    Args:
        by_name: the columns.
        stride: rows from one ring to the next; 0: there is one ring.
        large: names of the columns whose rows may be on the disk only.
        texts: names of the columns of text, which are not among them: each ring has its own words.
    """

    def __init__(
        self, by_name: Mapping[str, Takes], stride: int, large: Sequence[str], texts: Collection[str] = ()
    ) -> None:
        self.by_name, self.stride, self.large, self.texts = by_name, stride, large, texts
        self.row_nbytes = sum(column.spec.row_nbytes for column in by_name.values())

    @classmethod
    def of(cls, rings: Sequence[Rows], system: System) -> AdjacentRows | None:
        """Return the rows of these rings, which have the same columns; None if a column is no file that can be mapped.

        None too where rows may be elsewhere than in the files.

        Cost: a system call for each column of each ring. A page that is touched for the first time costs a fault, as
        ever.
        """
        first = rings[0]
        if any(rows.is_covered for rows in rings):
            return None
        texts = first.texts
        columns = {name: one for name, one in first.by_name.items() if name not in texts}
        if len(rings) == 1:
            return cls(columns, 0, first.large, texts)
        # A multiple of so many rows begins at a page, whatever the size of a row.
        stride = -(-max(rows.ring.rows for rows in rings) // HEADER_NBYTES) * HEADER_NBYTES
        made = dict[str, Takes]()
        for name, column in columns.items():
            spec = column.spec
            room = Room.of(system, len(rings) * stride * spec.row_nbytes)
            if room is None:
                return None
            for number, rows in enumerate(rings):
                if not rows.by_name[name].map_into(room, number * stride * spec.row_nbytes):
                    return None
            whole = room.bytes.view(spec.dtype).reshape(len(rings) * stride, *spec.shape)
            made[name] = AdjacentColumn(spec, whole)
        return cls(made, stride, [name for rows in rings for name in rows.large], texts)
