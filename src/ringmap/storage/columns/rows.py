"""The rows of all columns at ring positions, and of several rings side by side.

    take    positions -> files -> words of text, newer values of mutable columns -> rows of the open group
            what a reader sees
    read    position, count -> files
            what was stored

Invariants: every column has as many rows as the ring; the sum of an episode is the hash of its columns' hashes, in
schema order; a row without a newer value has the one that it was stored with. The open group is looked up before the
first file is read: a row that is not in it was in the file by then, and until the group is let go it is right in both.
Not here: which positions are live; where newer values (sidecars/values.py), pending rows (commit/group.py) and words
(read/handle.py) are; which rings are side by side (clips/rings.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import xxhash

from ringmap.storage.columns.base import Column, Live, Undecodable
from ringmap.storage.columns.copying import take
from ringmap.storage.columns.memmap import HEADER_NBYTES, AdjacentColumn
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import put
from ringmap.storage.ring.arrays import all_true, highest
from ringmap.storage.ring.ring import Position, Ring

__all__ = ["UNREADABLE", "AdjacentRows", "Changes", "PendingRows", "Rows", "combine", "sum_of"]

Array = np.ndarray[Any, np.dtype[Any]]
Words = Callable[[Array, Array], Array]
"""Returns strings, given the positions of rows and their codes `(*positions.shape, ...)`."""

UNREADABLE = (1 << 64) - 1
"""Replaces the checksum of rows that can't be decoded: it differs from every rows' checksum, except with a chance of
2**-64."""


sum_of: Callable[[Array], int] = xxhash.xxh3_64_intdigest  # type: ignore[assignment]  # NumPy's stub lacks it
"""Returns the checksum of one column's rows, which are C-contiguous. Runs at memory speed."""


def combine(sums: list[int]) -> int:
    """Return the checksum of an episode from the checksums of its columns."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums)}Q", *sums))


class Changes(Protocol):
    """Newer values of rows."""

    @property
    def columns(self) -> Collection[str]:
        """The names of the columns that may have some."""

    def put_into(self, taken: Mapping[str, Array], positions: Array) -> None:
        """Replace the rows that have newer values, in an array `(*positions.shape, ...)` of each column. What it puts
        into one row is of one update."""


class PendingRows(Protocol):
    """Rows in memory: they belong to a group that is not committed yet. Only the owner of a ring has some.

    `start`: the position of the first one; `count`: how many there are.
    """

    start: Position
    count: int

    def rows_of(self, names: Sequence[str], numbers: Array) -> list[Array]:
        """Return rows of columns by number."""

    def unlinked_at(self, positions: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of these positions are of these rows, bool `(n,)`, and what is kept with these, beside their
        columns."""

    def newest_unlinked(self) -> dict[str, Array]:
        """Return what is kept with the rows of the newest call."""

    def earlier_at(self, positions: Array) -> tuple[Array | slice, dict[str, Array]]:
        """Return for which of these positions, of rows before these, something is kept, bool `(n,)`, and this."""


class Rows:
    """The open columns of one buffer, in the order of its schema. `ring`: how positions map to slots."""

    def __init__(self, schema: Schema, columns: list[Column], ring: Ring) -> None:
        self.schema, self.columns, self.ring = schema, columns, ring
        self.by_name: dict[str, Column] = dict(zip(schema.names, columns, strict=True))
        """The files."""
        self.large = [name for name, column in self.by_name.items() if column.is_large]
        self.texts = schema.texts
        self.row_nbytes = sum(spec.row_nbytes for spec in schema.columns)
        self.is_covered = False
        """Whether rows may be elsewhere than in the files: then they are read by `take` alone. Columns of text always
        are."""
        self._reserved = 0
        """Slots below it have blocks in every column."""
        self._changes: Changes | None = None
        self._pending: Callable[[], PendingRows | None] | None = None
        self._words: Words | None = None

    def open(self, write: bool, head: int, mapped: bool = True) -> Self:
        """Open every column, after comparing all sizes, and return these rows.

        Raises:
            CorruptError: a file is missing, truncated, too long, swapped or foreign.
        """
        try:
            for column in self.columns:
                column.open(write, min(head, self.ring.rows), mapped)
        except BaseException:
            self.close()
            raise
        return self

    def show(
        self,
        changes: Changes | None = None,
        pending: Callable[[], PendingRows | None] | None = None,
        words: Words | None = None,
    ) -> None:
        """Let reads find, from now on, newer values of mutable columns, rows in memory (None while there are none), and
        words of columns of text."""
        self._changes, self._words = changes or self._changes, words or self._words
        self._pending = pending or self._pending
        self.is_covered = self._changes is not None or self._pending is not None

    def may_change(self, name: str) -> bool:
        """Whether values of a column that are stored may become others."""
        return self._changes is not None and name in self._changes.columns

    def reserve(self, position: Position, count: int) -> None:
        """Make sure that rows can be written, or raise OSError."""
        for slot, steps in self.ring.pieces(position, count):
            if slot + steps > self._reserved:
                self._reserved = min(column.reserve(slot, steps) for column in self.columns)

    def writable(self, position: Position, count: int) -> list[Array] | None:
        """Return `count` rows of every column from `position` (no wrap) to write to; None where a column returns
        None."""
        found = [column.writable(position % self.ring.rows, count) for column in self.columns]
        known = [rows for rows in found if rows is not None]
        return known if len(known) == len(found) else None

    def write(self, position: Position, arrays: Sequence[Array], live: Live | None = None) -> None:
        """Write rows of every column. `arrays`: schema order, dtype and shape, C-contiguous; `live`: as for
        `Column.write`."""
        pieces = self.ring.pieces(position, len(arrays[0]))
        for column, values in zip(self.columns, arrays, strict=True):
            done = 0
            for slot, steps in pieces:
                # A view of little takes as long as its copy.
                column.write(slot, values if len(pieces) == 1 else values[done : done + steps], live)
                done += steps

    def read(self, position: Position, count: int) -> list[Array]:
        """Return a copy of the rows of every column as they were stored, schema order; see `renew`."""
        return self._read(self.columns, position, count)

    def _read(self, columns: Sequence[Column], position: int, count: int) -> list[Array]:
        pieces = self.ring.pieces(Position(position), count)
        if len(pieces) == 1:
            slot, steps = pieces[0]
            return [column.read(slot, steps) for column in columns]
        return [np.concatenate([c.read(slot, steps) for slot, steps in pieces]) for c in columns]

    def take_stored(self, name: str, positions: Array) -> Array:
        """Return a copy of one column's rows as they were stored."""
        return self.by_name[name].take(positions % self.ring.rows)

    def renew(self, position: Position, steps: list[Array]) -> None:
        """Give rows that `read` returned the newest values of the mutable columns."""
        if self._changes is not None:
            self._lay_changes(self.schema.names, np.arange(position, position + len(steps[0])), steps)

    def _lay_changes(self, names: Sequence[str], positions: Array, taken: Sequence[Array]) -> None:
        if (changes := self._changes) is not None:
            columns = changes.columns
            mutable = {name: values for name, values in zip(names, taken, strict=True) if name in columns}
            if mutable:
                changes.put_into(mutable, positions)

    def take(
        self,
        names: Sequence[str],
        positions: Array | range,
        head: int = 0,
        out: Sequence[Array | None] | None = None,
        threads: int = 1,
        slots: Array | None = None,
    ) -> list[Array]:
        """Return copies of rows of some columns, as a reader sees them: `(*positions.shape, ...)` each.

        Args:
            names: of the columns.
            positions: of the rows: int64 of any shape and in any order, or a range of rows that follow one another.
            head: of the ring, as of a time before this; see `Column.take`.
            out: an array to fill and return for each column, None for a new one. Not with a range. Text comes in a new
                array.
            threads: maximum number of threads for the copy. Not with a range.
            slots: of the positions, if the caller has them.
        """
        pending = None if self._pending is None else self._pending()  # before the first file is read
        if isinstance(positions, range):
            return self._take_run(names, positions, pending)
        here, known = None, positions
        if out is not None and self.texts:
            out = [None if n in self.texts else to for n, to in zip(names, out, strict=True)]
        if pending is not None:
            head = min(head, pending.start)  # a chunk that is read now is not whole beyond
            if positions.size and highest(positions) >= pending.start:
                here = positions >= pending.start
                rows = pending.rows_of(names, positions[here] - pending.start)
                if all_true(here):
                    return [_placed(v, positions.shape, to) for v, to in zip(rows, out or rows, strict=True)]
                known = np.where(here, positions.min(), positions)  # not from a chunk that has no file yet
                slots = known % self.ring.rows
        if slots is None:
            slots = positions % self.ring.rows
        files = self.by_name
        if out is None and threads == 1:
            taken = [files[name].take(slots, None, head) for name in names]
        else:
            into = zip(names, out or [None] * len(names), strict=True)
            taken = [take(files[name], slots, to, threads, head) for name, to in into]
        if self.texts or self._changes is not None:
            taken = self._newest(names, known, taken)
        if here is not None:
            taken = [put(values, here, newest) for values, newest in zip(taken, rows, strict=True)]
        return taken

    def _take_run(self, names: Sequence[str], positions: range, pending: PendingRows | None) -> list[Array]:
        start, stop = positions.start, positions.stop
        first = stop if pending is None else min(max(pending.start, start), stop)
        taken = self._read([self.by_name[name] for name in names], start, first - start)
        if self.texts or self._changes is not None:
            taken = self._newest(names, np.arange(start, first), taken)
        if pending is None or first == stop:
            return taken
        rows = pending.rows_of(names, np.arange(first, stop) - pending.start)
        return [np.concatenate(both) for both in zip(taken, rows, strict=True)]

    def _newest(self, names: Sequence[str], positions: Array, taken: list[Array]) -> list[Array]:
        """Return rows of the files with strings in place of their codes, and with newer values."""
        words, texts = self._words, self.texts
        if texts and words is not None:
            columns = zip(names, taken, strict=True)
            taken = [words(positions, values) if name in texts else values for name, values in columns]
        self._lay_changes(names, positions, taken)
        return taken

    def sums(self, position: Position, count: int) -> list[int]:
        """Return the present checksum of each column's rows; UNREADABLE where they can't be decoded."""
        sums = []
        for column in self.columns:
            try:
                sums.append(sum_of(self._read([column], position, count)[0]))
            except Undecodable:
                sums.append(UNREADABLE)
        return sums

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


def _placed(rows: Array, shape: tuple[int, ...], out: Array | None) -> Array:
    """Return a copy of rows in an array of this shape, C-contiguous: in `out`, if that is another one."""
    if out is None or out is rows:
        # Of one row `ascontiguousarray` keeps the strides.
        return np.array(rows, order="C").reshape(*shape, *rows.shape[1:])
    out[...] = rows.reshape(out.shape)
    return out


class AdjacentRows:
    """The rows of several rings side by side: one copy takes rows of all of them.

        ring 0 |slot 0 1 2 ... n|   | ring 1 |slot 0 1 2 ... n|   | ...       one array of rows
                row 0                         row stride           row 2 * stride

    The files of a column are mapped once more: slot s of ring i is row s + i * stride, whatever the column. The map of
    a ring that was closed stays until the last array over it is gone.

    Args:
        by_name: the columns.
        stride: rows from one ring to the next; 0: there is one ring.
        large: names of the columns whose rows may be on the disk only.
        texts: names of the columns of text, which are not among them: each ring has its own words.
    """

    def __init__(
        self, by_name: Mapping[str, Column], stride: int, large: Sequence[str], texts: Collection[str] = ()
    ) -> None:
        self.by_name, self.stride, self.large, self.texts = by_name, stride, large, texts
        self.row_nbytes = sum(column.spec.row_nbytes for column in by_name.values())

    @classmethod
    def of(cls, rings: Sequence[Rows]) -> AdjacentRows | None:
        """Return the rows of these rings, which have the same columns; None if a column is no file that can be mapped,
        and where rows may be elsewhere than in the files.

        Cost: a system call for each column of each ring.
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
        made = dict[str, Column]()
        for name in columns:
            column = AdjacentColumn.of([rows.by_name[name] for rows in rings], stride)
            if column is None:
                return None
            made[name] = column
        return cls(made, stride, [name for rows in rings for name in rows.large], texts)
