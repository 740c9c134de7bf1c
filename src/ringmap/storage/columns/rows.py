"""The rows of all columns at ring positions.

    position, count -> Ring.pieces -> (slot, steps) once or twice -> each Column

Invariants: every column has as many rows as the ring; the sum of an episode is the hash of its
columns' hashes, in schema order.
Not here: which positions are live.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from ringmap.errors import CorruptError
from ringmap.storage.columns.backends import StoredColumn
from ringmap.storage.columns.base import Column, Live
from ringmap.storage.columns.changed import ChangedColumn, Changes, Layers
from ringmap.storage.columns.codecs import Undecodable
from ringmap.storage.columns.pending import PendingColumn, PendingRows
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.files import Disk
from ringmap.storage.ring.arithmetic import Ring
from ringmap.storage.ring.extremes import highest
from ringmap.storage.ring.integers import Position

__all__ = ["UNREADABLE", "Rows", "combine", "sum_of"]

Array = np.ndarray[Any, np.dtype[Any]]

UNREADABLE = (1 << 64) - 1
"""Replaces the checksum of rows that can't be decoded: it differs from every rows' checksum, except with a chance of 2**-64."""


def sum_of(values: Array) -> int:
    """Return the checksum of one column's rows. Runs at memory speed."""
    return xxhash.xxh3_64_intdigest(values)  # type: ignore[arg-type]  # NumPy's stub lacks it


def combine(sums: list[int]) -> int:
    """Return the checksum of an episode from the checksums of its columns."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums)}Q", *sums))


class Rows:
    """The open columns of one buffer.

    Args:
        schema: of the columns.
        columns: one per column of the schema, in order.
        ring: how positions map to slots.
    """

    changes: Changes | None = None
    """Newer values of mutable columns."""

    def __init__(self, schema: Schema, columns: list[Column], ring: Ring) -> None:
        self.schema = schema
        self.columns = columns
        self.ring = ring
        self._rows = ring.rows
        self._files: dict[str, Column] = dict(zip(schema.names, columns, strict=True))
        self.by_name = self._files
        self.large = [name for name, column in self.by_name.items() if column.is_large]
        self._pending: Callable[[], PendingRows | None] | None = None
        self.row_nbytes = sum(spec.row_nbytes for spec in schema.columns)

    @classmethod
    def open(
        cls, disk: Disk, folder: str, schema: Schema, stored: Sequence[StoredColumn], ring: Ring, write: bool,
        head: int, mapped: bool = True,
    ) -> Rows:  # fmt: skip
        """Open every column, after comparing all sizes.

        Raises:
            CorruptError: a file is missing, truncated, too long, swapped or foreign.
        """
        columns: list[Column] = []
        reserved = min(head, ring.rows)
        try:
            for one in stored:
                if not one.is_known:
                    raise CorruptError(
                        f"{folder}: column {one.spec.name!r} has unknown backend {one.kind!r}"
                    )
                path = os.path.join(folder, *one.file.split("/"))
                opened = one.backend.open(disk, path, *one.about, write, reserved, mapped)
                columns.append(opened)
        except BaseException:
            for column in columns:
                column.close()
            raise
        return cls(schema, columns, ring)

    def with_changes(self, changes: Changes) -> Rows:
        """Return these rows so that reads find the newer values of mutable columns; those of a later call count more."""
        rows = Rows(self.schema, self.columns, self.ring)
        changes = changes if self.changes is None else Layers(self.changes, changes)
        rows.changes = changes
        for name in changes.columns:
            rows.by_name[name] = ChangedColumn(rows.by_name[name], changes)
        return rows

    def showing(self, pending: Callable[[], PendingRows | None]) -> Rows:
        """Return these rows so that reads by name find rows that are in memory, too; see `PendingColumn`."""
        rows = Rows(self.schema, self.columns, self.ring)
        rows.by_name = {name: PendingColumn(c, pending) for name, c in self.by_name.items()}
        rows._pending = pending
        return rows

    @property
    def shows_pending(self) -> bool:
        """Whether reads by name find rows that are in memory."""
        return self._pending is not None

    def reserve(self, position: Position, count: int) -> None:
        """Make sure that rows can be written, or raise OSError."""
        for slot, steps in self.ring.pieces(position, count):
            for column in self.columns:
                column.reserve(slot, steps)

    def writable(self, position: Position, count: int) -> list[Array] | None:
        """Return `count` rows of every column from `position` (no wrap) to write to; None where a column returns None."""
        found = list[Array]()
        for column in self.columns:
            rows = column.writable(position % self.ring.rows, count)
            if rows is None:
                return None
            found.append(rows)
        return found

    def write(self, position: Position, arrays: list[Array], live: Live | None = None) -> None:
        """Write rows of every column. `arrays`: schema order, dtype and shape, C-contiguous; `live`: as for `Column.write`."""
        pieces = self.ring.pieces(position, len(arrays[0]))
        if len(pieces) == 1:
            slot = pieces[0][0]
            for column, values in zip(self.columns, arrays, strict=True):
                column.write(slot, values, live)
            return
        (slot, steps), (begin, _) = pieces
        for column, values in zip(self.columns, arrays, strict=True):
            column.write(slot, values[:steps], live)
            column.write(begin, values[steps:], live)

    def renew(self, position: Position, steps: list[Array]) -> None:
        """Give rows that `read` returned the newest values of the mutable columns."""
        if self.changes is not None:
            for spec, values in zip(self.schema.columns, steps, strict=True):
                if spec.name in self.changes.columns:
                    positions = np.arange(position, position + len(values))
                    self.changes.put_into(spec.name, positions, values)

    def read_column(self, name: str, position: Position, count: int) -> Array:
        """Return a copy of one column's rows, with the newest values."""
        pieces = [self.by_name[name].read(*piece) for piece in self.ring.pieces(position, count)]
        values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if self.changes is not None and name in self.changes.columns:
            self.changes.put_into(name, np.arange(position, position + count), values)
        return values

    def take_stored(self, name: str, positions: Array) -> Array:
        """Return a copy of one column's rows as they were stored."""
        column = self.columns[self.schema.names.index(name)]
        return column.take(positions % self.ring.rows)

    def read(self, position: Position, count: int) -> list[Array]:
        """Return a copy of the rows of every column as they were stored, schema order; see `renew`."""
        pieces = self.ring.pieces(position, count)
        if len(pieces) == 1:
            slot, steps = pieces[0]
            return [column.read(slot, steps) for column in self.columns]
        return [
            np.concatenate([c.read(slot, steps) for slot, steps in pieces]) for c in self.columns
        ]

    def take(self, name: str, positions: Array) -> Array:
        """Return a copy of one column's rows at positions `(n,)` in any order, `(n, ...)`."""
        if self.changes is not None and len(positions):  # which are less than a lap apart
            head = int(positions.max()) + 1
            return self.by_name[name].take(positions % self.ring.rows, None, head)
        return self.by_name[name].take(positions % self.ring.rows)

    def take_all(self, names: Sequence[str], positions: Array, head: int) -> list[Array]:
        """Return copies of rows of several columns at positions `(n,)` in any order, `(n, ...)` each.

        Args:
            names: of the columns.
            positions: of the rows.
            head: of the ring, at a look before this.
        """
        slots, files = positions % self._rows, self._files
        pending = None if self._pending is None else self._pending()
        if pending is not None:
            head = min(head, pending.start)  # a chunk that is read now is not whole beyond
        if pending is None or not len(positions) or highest(positions) < pending.start:
            return [files[name].take(slots, None, head) for name in names]
        here = (positions >= pending.start).nonzero()[0]
        rows = pending.rows_of(names, positions.take(here) - pending.start) if len(here) else []
        if len(here) == len(positions) and rows:
            return [
                np.array(values, order="C") for values in rows
            ]  # of one row `ascontiguousarray` keeps the strides
        if rows:
            slots[here] = slots[positions.argmin()]  # not from a chunk that has no file yet
        taken = [files[name].take(slots, None, head) for name in names]
        for values, ours in zip(taken, rows, strict=False):
            values[here] = ours
        return taken

    def sums(self, position: Position, count: int) -> list[int]:
        """Return the present checksum of each column's rows; UNREADABLE where they can't be decoded."""
        return [self._sum(column, position, count) for column in self.columns]

    def _sum(self, column: Column, position: Position, count: int) -> int:
        pieces = self.ring.pieces(position, count)
        try:
            if len(pieces) == 1:
                return sum_of(column.read(*pieces[0]))
            return sum_of(np.concatenate([column.read(slot, steps) for slot, steps in pieces]))
        except Undecodable:
            return UNREADABLE

    def rewrite(self, position: Position, count: int) -> None:
        """Write rows again, with the same bytes, so that the next `sync` counts."""
        for slot, steps in self.ring.pieces(position, count):
            for column in self.columns:
                column.rewrite(slot, steps)

    def touched(self, position: Position, count: int) -> None:
        """Let the next `sync` cover these rows, whichever process wrote them."""
        for slot, steps in self.ring.pieces(position, min(count, self.ring.rows)):
            for column in self.columns:
                column.touched(slot, steps)

    def forget(self) -> None:
        """Drop all rows cached by earlier calls."""
        for column in self.columns:
            column.forget()

    def sync(self) -> None:
        """Return once every written row is durable on the disk."""
        for column in self.columns:
            column.sync()

    def close(self) -> None:
        """Release the files."""
        for column in self.columns:
            column.close()
