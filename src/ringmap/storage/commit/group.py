"""An open group: rows that count as soon as their call returns, and that one commit stores together.

    open/<id>/steps.bin   [frame 0: columns, and what the group follows][frame 1: call 0][frame 2: call 1] ... zeros
    in memory             the same rows, in order                        |start ... start + count|

A call appends one frame, with all its rows, so that it costs one write. The rows also stand in memory, where the owner
reads them; other processes see them once the group is committed. The commit is an ordinary one. The next group writes
over the file, which is removed when the buffer is closed.

A ring in RAM has no use for a second copy: there the rows stand in the columns themselves, at the slots that the commit
gives them. No live row is there, since a group is no longer than the spare rows; what counts is `count`, and the
commit.

Frame 0 names the record that the group follows, by its number and checksums. A recovery takes the frames of a group
only if
that record is the newest one: else the group was committed already, or the rows before it were lost.

The blocks of the file are allocated before the first frame, as are those of the rows. So a group that was begun can be
committed on a full disk.

Of text the rows have codes, and the group has the words: they become those of the commit. A call's new words are
written before its frame, to a file beside it.

Columns *apart* hold values that most rows don't need once the rows after them are known: the next observation of a
transition is the row of the lane's next step. A frame has them for all its rows; the commit keeps those that need them.

Invariants: the frames in the file are whole calls, in order; `count` is changed last, so an interrupted append changes
nothing; rows below `count` never change, and their memory is not used for another group.
Not here: when a group is committed (commit/store.py), how its file is read back (stream_file.py).
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import Words
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.names import STREAM
from ringmap.storage.records.stream_file import FRAME, Apart, seed_of
from ringmap.storage.records.table import DROPPED, Record
from ringmap.storage.records.word_file import WordFile
from ringmap.storage.ring.arrays import found_in
from ringmap.storage.ring.ring import Position

__all__ = ["OpenGroup", "follows", "kept_apart"]

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


def kept_apart(lanes: Array, apart: Values, earlier: Values) -> tuple[Values, Values]:
    """Return the values apart that a group's commit keeps as its data, and those of its newest call.

    Row i with n or -n in `lanes` needs none if row i + n has n: that row continues its lane. The newest call is that of
    as many rows as the last one says.

    Args:
        lanes: of the rows: n or -n.
        apart: of the rows, by column.
        earlier: of rows before the group, which `rows` numbers from its start: -1, -2, ...

    Returns:
        `rows`, their numbers in the group, and their values, {} for none; and the values of the rows of the newest
        call.
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
    following = {name: np.ascontiguousarray(values[newest:]) for name, values in apart.items()}
    if not earlier:
        kept = {"rows": left.astype(np.int32), **{n: v[left] for n, v in apart.items()}}
        return (kept if len(left) else {}), following
    kept = {"rows": np.concatenate([earlier["rows"], left.astype(np.int32)])}
    kept |= {n: np.concatenate([earlier[n], v[left]]) for n, v in apart.items()}
    return kept, following


class GroupFile:
    """The file of a group, and of those that follow it: its frames have another salt then.

    Args:
        folder: the file's own, in `open/`.
        file: the file.
        nbytes: its size: all of it has blocks.
    """

    def __init__(self, folder: str, file: File, nbytes: int) -> None:
        self.folder, self.file, self.nbytes = folder, file, nbytes
        self.words: WordFile | None = None
        self._is_named = False

    def sync(self, disk: Disk) -> None:
        """Return once the frames, and the names, are durable on the disk."""
        self.file.sync()
        if not self._is_named:
            disk.sync_folder(self.folder)
            disk.sync_folder(os.path.dirname(self.folder))
            self._is_named = True

    def remove(self, disk: Disk) -> None:
        """Remove the file: its rows are committed."""
        self.close()
        disk.remove_folder(self.folder)

    def close(self) -> None:
        """Release the descriptors."""
        self.file.close()
        if self.words is not None:
            self.words.file.close()


class OpenGroup:
    """The rows of one group.

    Args:
        schema: of the ring's columns.
        apart: further columns, and the column that tells which rows keep them.
        start: the position of the first row.
        limit: rows that fit.
        rows: of the ring.
        after: the record that the group follows, as `follows` names it.
        earlier: values apart of rows before the group, as for `kept_apart`.
        in_place: the rows of the columns at its slots, to write to; None: the group keeps its rows.
    """

    def __init__(
        self,
        schema: Schema,
        apart: Apart | None,
        start: Position,
        limit: int,
        rows: int,
        after: list[int],
        earlier: Values | None = None,
        in_place: Sequence[Array] | None = None,
    ) -> None:
        self.schema, self.apart, self.earlier = schema, apart, earlier or {}
        self.start, self.limit, self.after = start, limit, after
        self.begun_at = time.monotonic()
        self.count = 0
        """Rows that count."""
        self.is_in_place = in_place is not None
        """Whether the rows stand in the columns, so that a read of the columns finds them."""
        specs = (*schema.columns, *(apart.schema.columns if apart else ()))
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
        self._apart = dict(zip(apart.schema.names, kept, strict=True)) if apart else {}
        self._ring = rows
        self._first_slot = start % rows
        self.file: GroupFile | None = None
        self._seed = 0
        self._end = (0, 0)
        """Bytes and frames that count: set together, so that an interrupt can't come in between."""

    # -- the file ----------------------------------------------------------------------------

    def begin(self, disk: Disk, folder: str, spent: GroupFile | None = None) -> None:
        """Write frame 0 to a file with blocks for all rows: that of an earlier group, or a new one in a new folder of
        `folder`.

        Raises:
            OSError: the disk is full or fails.
        """
        salt = uuid.uuid4().hex
        self._bytes = self._records.view(np.uint8).data
        self._seed = seed_of(salt)
        described: dict[str, Any] = {
            "columns": _described(self.schema),
            "after": self.after,
            "salt": salt,
            "rows": self.limit,
        }
        if self.apart is not None:
            described["apart"] = _described(self.apart.schema)
            described["lanes"] = self.apart.lanes
        earlier = self._frame(encode_data(self.earlier, folder), 1) if self.earlier else b""
        if earlier:
            described["earlier"] = len(earlier) - FRAME.size
        payload = json.dumps(described).encode()
        head = FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload + earlier
        need = len(head) + self.limit * (FRAME.size + self._size)
        if spent is not None and need > spent.nbytes:
            spent.remove(disk)
            spent = None
        if spent is None:
            path = os.path.join(folder, salt)
            disk.make_folder(path)
            spent = GroupFile(path, disk.create(os.path.join(path, STREAM), need), need)
            self.file = spent
            spent.file.reserve(0, need)
        self.file = spent
        if self._has_text:
            words = None if spent.words is None else WordFile(spent.words.file, self._seed)
            spent.words = words or WordFile.create(disk, spent.folder, self._seed)
        self.file.file.write(head, 0)
        self._end = len(head), 2 if self.earlier else 1

    # -- rows --------------------------------------------------------------------------------

    def has_room(self, count: int) -> bool:
        """Tell whether the rows of a call of `count` rows go into this group."""
        return self.count + count <= self.limit and self.words.nbytes <= _FULL_NBYTES

    def refuse_large(self, arrays: Sequence[Any], where: str) -> None:
        """Raise InputError if the rows of a call have more text than a commit holds."""
        if self._has_text:
            self.words.refuse_large([v for t, v in zip(self._are_text, arrays, strict=True) if t], where)

    def append(self, arrays: Sequence[Any], count: int, is_single: bool = False, sync: bool = False) -> None:
        """Store the rows of one call.

        Args:
            arrays: one per column, and then one per column of `apart`, `(count, *shape)`, of their dtypes.
            count: at most `limit - self.count`.
            is_single: whether the arrays are values of one row, without the first axis.
            sync: whether words are synced; the rows are by `GroupFile.sync`.

        Raises:
            OSError: the disk is full or fails. The rows don't count.

        Cost: one copy in memory, one write.
        """
        at = self.count
        stop = at + count
        where = at if is_single else slice(at, stop)
        if self._has_text:
            arrays = [self.words.encode(v) if t else v for t, v in zip(self._are_text, arrays, strict=True)]
            if self.file is not None and self.file.words is not None:
                self.file.words.write(self.words, sync)
        for values, given in zip(self._values, arrays, strict=True):
            values[where] = given
        if self.file is not None:
            end, frames = self._end
            frame = self._frame(self._bytes[at * self._size : stop * self._size], frames)
            self.file.file.write(frame, end)
            self._end = end + len(frame), frames + 1
        self.count = stop

    def _frame(self, payload: bytes | memoryview, number: int) -> bytes:
        check = xxhash.xxh3_64_intdigest(payload, self._seed + number)
        return FRAME.pack(len(payload), check) + payload

    def columns(self) -> list[Array]:
        """Return the rows as they are stored, one C-contiguous array per column of the ring: a view where they lie so,
        else a copy."""
        values = self._values[: len(self.schema.columns)]
        return [np.ascontiguousarray(v[: self.count]) for v in values]

    def kept(self) -> tuple[Values, Values | None]:
        """Return the data of the commit and the values apart of its newest call, as `kept_apart` does; None without
        columns apart."""
        if self.apart is None:
            return {}, None
        lanes = self._by_name[self.apart.lanes][: self.count]
        apart = {n: self._shown(n, values[: self.count]) for n, values in self._apart.items()}
        return kept_apart(lanes, apart, self.earlier)

    def _shown(self, name: str, values: Array) -> Array:
        """Return values of a column apart, with strings in place of their codes."""
        assert self.apart is not None
        return self.words.decode(values) if name in self.apart.schema.texts else values

    def apart_at(self, positions: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of these positions are of rows of the group, bool `(n,)`, and a copy of the values apart of
        these."""
        at = positions - self.start
        ours = (at >= 0) & (at < self.count)
        at = at[ours]
        return ours, {n: self._shown(n, values.take(at, 0)) for n, values in self._apart.items()}

    def newest_apart(self) -> dict[str, Array]:
        """Return a copy of the values apart of the newest call."""
        following = self.kept()[1]
        return dict(following or {})

    def earlier_at(self, positions: Array) -> tuple[Array | slice, dict[str, Array]]:
        """Return for which of these positions, of rows before the group, values apart are known, bool `(n,)`, and these
        values."""
        if not self.earlier:
            return np.zeros(len(positions), np.bool_), {}
        known, at = found_in(self.earlier["rows"], positions - self.start)
        return known, {name: self.earlier[name][at] for name in self._apart}

    def rows_of(self, names: Sequence[str], numbers: Array) -> list[Array]:
        """Return rows of columns by number."""
        rows = self._records.take(numbers, mode="clip")
        found = [rows[self._fields[name]] for name in names]
        if not self.schema.texts:
            return found
        texts, columns = self.schema.texts, zip(names, found, strict=True)
        return [self.words.decode(v) if name in texts else v for name, v in columns]


def _described(schema: Schema) -> list[list[Any]]:
    return [[s.name, list(s.shape), s.dtype.str] for s in schema.columns]
