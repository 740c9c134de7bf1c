"""A group: rows that count as soon as their call returns, and that one commit stores together.

    open/<id>/steps.bin   [heading][call 0][call 1] ...                      a StepFile; the next group empties it
    in memory             the same rows, in order     |start ... start + count|

A call appends one frame, in one write. The owner reads the rows from memory; other processes see them once the group is
committed, by an ordinary commit, for which the columns have blocks. A recovery commits a group only if the record that
it follows is the newest one: else it was committed already, or the rows before it were lost.

A ring in RAM has no use for a second copy: there the rows stand in the columns themselves, at the slots that the commit
gives them, where no live row is, since a group is no longer than the spare rows.

*Unlinked* columns hold values that most rows don't need once the rows after them are known: the next observation of a
transition is the row of the lane's next step. A frame has them for all its rows; the commit keeps those that need them.

Invariants: the frames in the file are whole calls, in order; `count` is changed last, so an interrupted append changes
nothing; rows below `count` never change, and their memory is not used for another group.
Not here: when a group is committed (store.py), what its file holds (records/step_file.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import Words
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.step_file import End, Heading, StepFile, StoredSteps, Unlinked
from ringmap.storage.records.table import DROPPED, Record
from ringmap.storage.ring.arrays import found_in
from ringmap.storage.ring.ring import Position

__all__ = ["OpenGroup", "follows", "rows_left", "split_unlinked"]

Array = np.ndarray[Any, np.dtype[Any]]

Values = Mapping[str, Array]

_DROPPED = (1 << 64) - 1

_FULL_NBYTES = 1 << 24
"""Of words: a group that has more is committed before the next call."""


def follows(record: Record | None) -> list[int]:
    """Return how a group names the record that it follows; None: the ring has no record yet.

    A record that is dropped has another name than before: a group that followed it then has lost the rows before it,
    one that was begun since has not.
    """
    if record is None:
        return [0, 0, 0, 0]
    blob_sum = record.blob_sum ^ _DROPPED if record.flags & DROPPED else record.blob_sum
    return [record.seq, record.head, record.rows_sum, blob_sum]


def split_unlinked(lanes: Array, unlinked: Values, earlier: Values) -> tuple[Values, Values]:
    """Return the unlinked values that a group's commit keeps as its data, {} for none, and those of its newest call.

    Row i with n or -n in `lanes` needs none if row i + n has n: that row continues its lane. The newest call is that of
    as many rows as the last one says. `earlier`: values of rows before the group, which `rows` numbers from its start:
    -1, -2, ...
    """
    number, each = np.arange(len(lanes)), np.maximum(np.abs(lanes.astype(np.int64)), 1)
    newest = max(0, len(lanes) - int(each[-1]))
    after = number + each
    is_row = after < len(lanes)
    goes_on = is_row & (lanes[np.where(is_row, after, 0)] == each)
    # Where lanes come out of turn, one of the newest rows may not be its lane's last one: no later group asks for its
    # values.
    in_turn = bool((each[newest:] == each[-1]).all())
    left = np.flatnonzero(~goes_on[:newest] if in_turn else ~goes_on)
    newest_values = {name: np.ascontiguousarray(values[newest:]) for name, values in unlinked.items()}
    kept = {"rows": left.astype(np.int32), **{n: v[left] for n, v in unlinked.items()}}
    if earlier:
        kept = {n: np.concatenate([earlier[n], values]) for n, values in kept.items()}
    return (kept if len(kept["rows"]) else {}), newest_values


class OpenGroup:
    """The rows of one group.

    Args:
        schema: of the ring's columns.
        unlinked: further columns, and the column that tells which rows keep them.
        start: the position of the first row.
        limit: rows that fit.
        after: the record that the group follows, as `follows` names it.
        earlier: unlinked values of rows before the group, as for `split_unlinked`.
        in_place: the rows of the columns at its slots, to write to; None: the group keeps its rows.
    """

    def __init__(
        self,
        schema: Schema,
        unlinked: Unlinked | None,
        start: Position,
        limit: int,
        after: list[int],
        earlier: Values | None = None,
        in_place: Sequence[Array] | None = None,
    ) -> None:
        self.schema, self.unlinked, self.earlier = schema, unlinked, earlier or {}
        self.start, self.limit, self.after = start, limit, after
        self.begun_at = time.monotonic()
        self.count = 0
        """Rows that count."""
        self.is_in_place = in_place is not None
        """Whether the rows stand in the columns, so that a read of the columns finds them."""
        specs = (*schema.columns, *(unlinked.schema.columns if unlinked else ()))
        self.words = Words()
        """Of the columns of text."""
        self._are_text = [spec.is_text for spec in specs]
        self._has_text = any(self._are_text)
        if in_place is not None:
            specs = specs[len(in_place) :]
        fields = [(str(i), spec.stored.dtype, spec.shape) for i, spec in enumerate(specs)]
        self._records = np.zeros(limit, np.dtype(fields))
        self._size = self._records.itemsize
        self._values = [*(in_place or ()), *(self._records[str(i)] for i in range(len(specs)))]
        self._by_name = dict(zip(schema.names, self._values, strict=False))
        self._fields = {name: str(i) for i, name in enumerate(schema.names)}
        kept = self._values[len(schema.columns) :]
        self._unlinked = dict(zip(unlinked.schema.names, kept, strict=True)) if unlinked else {}
        self.file: StepFile | None = None
        self._end: End = (0, 0, 0)
        """Of its file, as `StepFile.write` returns it."""

    # -- the file ----------------------------------------------------------------------------

    def begin(self, disk: Disk, folder: str, spent: StepFile | None = None) -> None:
        """Write frame 0 to the file of an earlier group, or to a new one in a new folder of `folder`."""
        self._bytes = self._records.view(np.uint8).data
        earlier = encode_data(self.earlier, folder) if self.earlier else b""
        heading = Heading(self.schema, None, b"", self.after, self.unlinked, len(earlier))
        self.file = spent or StepFile(disk, os.path.join(folder, heading.salt))
        self._end = self.file.begin(heading, earlier)

    # -- rows --------------------------------------------------------------------------------

    def has_room(self, count: int) -> bool:
        """Tell whether the rows of a call of `count` rows go into this group."""
        return self.count + count <= self.limit and self.words.nbytes <= _FULL_NBYTES

    def refuse_large(self, arrays: Sequence[Any], where: str) -> None:
        """Raise InputError if the rows of a call have more text than a commit holds."""
        if self._has_text:
            self.words.refuse_large([v for t, v in zip(self._are_text, arrays, strict=True) if t], where)

    def append(self, arrays: Sequence[Any], count: int, is_single: bool = False) -> None:
        """Store the rows of one call: one array per column, and then one per column of `unlinked`, `(count, *shape)`,
        of their dtypes; `is_single`: without the first axis. Cost: one copy in memory, one write."""
        at = self.count
        stop = at + count
        where = at if is_single else slice(at, stop)
        file = self.file
        if self._has_text:
            arrays = [self.words.encode(v) if t else v for t, v in zip(self._are_text, arrays, strict=True)]
        for values, given in zip(self._values, arrays, strict=True):
            values[where] = given
        if file is not None:
            self._end = file.write(self._end, self._bytes[at * self._size : stop * self._size], self.words)
        self.count = stop

    def columns(self) -> list[Array]:
        """Return the rows as they are stored, one C-contiguous array per column of the ring: a view where they lie so,
        else a copy."""
        values = self._values[: len(self.schema.columns)]
        return [np.ascontiguousarray(v[: self.count]) for v in values]

    def kept(self) -> tuple[Values, Values | None]:
        """Return the data of the commit and the unlinked values of its newest call, as `split_unlinked` does; None for
        these without unlinked columns."""
        if self.unlinked is None:
            return {}, None
        lanes = self._by_name[self.unlinked.lanes][: self.count]
        unlinked = {n: self._shown(n, values[: self.count]) for n, values in self._unlinked.items()}
        return split_unlinked(lanes, unlinked, self.earlier)

    def _shown(self, name: str, values: Array) -> Array:
        """Return values of a unlinked column, with strings in place of their codes."""
        assert self.unlinked is not None
        return self.words.decode(values) if name in self.unlinked.schema.texts else values

    def unlinked_at(self, positions: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of these positions are of rows of the group, bool `(n,)`, and a copy of the unlinked values of
        these."""
        at = positions - self.start
        ours = (at >= 0) & (at < self.count)
        at = at[ours]
        return ours, {n: self._shown(n, values.take(at, 0)) for n, values in self._unlinked.items()}

    def newest_unlinked(self) -> dict[str, Array]:
        """Return a copy of the unlinked values of the newest call."""
        newest_values = self.kept()[1]
        return dict(newest_values or {})

    def earlier_at(self, positions: Array) -> tuple[Array | slice, dict[str, Array]]:
        """Return for which of these positions, of rows before the group, unlinked values are known, bool `(n,)`, and
        these values."""
        if not self.earlier:
            return np.zeros(len(positions), np.bool_), {}
        known, at = found_in(self.earlier["rows"], positions - self.start)
        return known, {name: self.earlier[name][at] for name in self._unlinked}

    def rows_of(self, names: Sequence[str], numbers: Array) -> list[Array]:
        """Return rows of columns by number."""
        rows = self._records.take(numbers, mode="clip")
        taken = [rows[self._fields[name]] for name in names]
        if not self.schema.texts:
            return taken
        texts, columns = self.schema.texts, zip(names, taken, strict=True)
        return [self.words.decode(v) if name in texts else v for name, v in columns]


def rows_left(steps: StoredSteps) -> tuple[list[Array], Values, Values | None]:
    """Return the columns of a group that its writer left open, and of these what `OpenGroup.kept` returns."""
    heading, arrays = steps.heading, steps.arrays()
    assert heading is not None
    names, count = heading.schema.names, len(heading.schema.columns)
    if heading.unlinked is None:
        return arrays, {}, None
    unlinked = dict(zip(heading.unlinked.schema.names, arrays[count:], strict=True))
    return arrays[:count], *split_unlinked(arrays[names.index(heading.unlinked.lanes)], unlinked, steps.earlier)
