"""Reads back the file of an episode, or of a group of rows, that is not committed yet.

    open/<id>/steps.bin   [frame 0: columns][frame 1: step 0][frame 2: step 1] ...
    for a part            [frame 0: columns, chain and part number][frame 1: its step 0] ...
    for a group           [frame 0: columns, number of the record before][frame 1: rows of call 0] ... zeros
    frame                 size (4 bytes), xxh3 of the payload seeded with its number (8), payload

The seed of a group's frames also has its salt, so that no frame of an earlier group, or block of another file, passes
for one.

Invariants: no byte is used before its checksum holds, and no size is used that exceeds the file's own
size; the first truncated or damaged frame ends the episode.
Not here: writing, and what is done with the steps (open_episode.py).
"""

from __future__ import annotations

import base64
import json
import os
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from ringmap.storage.columns.schema import ColumnSpec, Schema, stored_spec
from ringmap.storage.columns.text import Words
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.blobs import decode_data
from ringmap.storage.records.names import WORDS
from ringmap.storage.records.table import MOST, PartOf
from ringmap.storage.records.word_file import FRAME, read_words
from ringmap.storage.ring.links import NONE

__all__ = ["EARLIER_LIMIT", "FRAME", "Apart", "OpenRows", "Stream", "read_stream", "seed_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_HEAD_LIMIT = 1 << 24
EARLIER_LIMIT = 1 << 29
"""Bytes of values of earlier rows in a group, encoded: so much memory a forged file may take."""

_BEGIN = 1 << 16
"""Of a file that holds something, this much is not all zeros."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Columns of a group that are not the ring's; `lanes` names the column that tells which rows keep their values."""

    schema: Schema
    lanes: str


@dataclass(frozen=True, slots=True)
class Stream:
    """The content of an open episode's file: the steps before the first truncated or damaged frame.

    `after`: the record that a group follows, as `group.follows` names it; None for an episode. `apart`: the columns
    after the ring's own; `earlier`: their values of rows before the group. `nbytes`: bytes of the whole frames;
    `fault`: the fault in the bytes after them, in words. A
    truncated frame is not a fault: a kill causes it. `part`: the part of a chain that it is; None for an episode or a
    group. `data`: of the chain's episode, encoded, as far as it was known when the part began.
    """

    schema: Schema | None
    steps: list[bytes]
    nbytes: int
    fault: str = ""
    after: list[int] | None = None
    apart: Apart | None = None
    earlier: dict[str, Any] = field(default_factory=dict)
    part: PartOf | None = None
    data: bytes = b""
    words: Words = field(default_factory=Words)
    """Of the columns of text."""
    seed: int = 0
    """Of a group: what is added to the numbers of its frames."""
    calls: list[tuple[int, int]] = field(default_factory=list)
    """Of a group: how many rows there are after each call, and where its frame ends."""

    def arrays(self) -> list[Array]:
        """Return the steps as one array per column, those of `apart` last."""
        assert self.schema is not None
        specs = _specs(self.schema, self.apart)
        columns = zip(specs, _columns_of(specs, self.steps), strict=True)
        return [self.words.decode(values) if spec.is_text else values for spec, values in columns]


@dataclass(frozen=True, slots=True)
class _Begun:
    """The content of frame 0. `part`, `data`: of a chain. Of a group: the bytes of `earlier` rows in frame 1, its seed,
    the most rows."""

    schema: Schema
    apart: Apart | None = None
    after: list[int] | None = None
    earlier: int = 0
    seed: int = 0
    rows: int = 0
    part: PartOf | None = None
    data: bytes = b""

    @property
    def specs(self) -> tuple[ColumnSpec, ...]:
        """The columns of a row in the file."""
        return _specs(self.schema, self.apart)


def _columns_of(specs: tuple[ColumnSpec, ...], steps: list[bytes]) -> list[Array]:
    """Return the values of each column as they are stored."""
    rows = np.frombuffer(b"".join(steps), np.uint8).reshape(len(steps), -1)
    arrays, begin = [], 0
    for spec in specs:
        raw = np.ascontiguousarray(rows[:, begin : begin + spec.row_nbytes])
        shape, dtype = (len(rows), *spec.shape), spec.stored.dtype
        arrays.append(raw.view(dtype).reshape(shape) if raw.size else np.empty(shape, dtype))
        begin += spec.row_nbytes
    return arrays


def read_stream(disk: Disk, path: str, max_steps: int) -> Stream:
    """Return the content of an open episode's file. No byte is used before its checksum and its size are verified.

    Cost: reads the file, but at most `max_steps` steps of it; and all words.
    """
    found = _read_frames(disk, path, max_steps)
    specs = () if found.schema is None else _specs(found.schema, found.apart)
    if not found.steps or not any(spec.is_text for spec in specs):
        return found
    words = Words(read_words(disk, os.path.dirname(path), found.seed))
    columns = zip(specs, _columns_of(specs, found.steps), strict=True)
    codes = [values.reshape(len(values), -1) for spec, values in columns if spec.is_text]
    whole = np.all([((c >= 0) & (c < len(words))).all(1) for c in codes], 0)
    if whole.all():
        return replace(found, words=words)
    count = int(np.argmin(whole))
    fault = f"the words of step {count}, in {WORDS}, are damaged or missing"
    if found.after is not None:  # a call counts whole
        if _read_frames(disk, path, 0).seed != found.seed:
            return replace(found, steps=[])  # a writer has begun the next group
        rows, nbytes = max(call for call in found.calls if call[0] <= count)
        return replace(found, steps=found.steps[:rows], nbytes=nbytes, fault=fault, words=words)
    row = FRAME.size + sum(spec.row_nbytes for spec in specs)
    nbytes = found.nbytes - row * (len(found.steps) - count)
    return replace(found, steps=found.steps[:count], nbytes=nbytes, fault=fault, words=words)


def _read_frames(disk: Disk, path: str, max_steps: int) -> Stream:
    """Return the content of the file, without the words of text."""
    with closing(disk.open(path)) as file:
        size = file.size()
        head = file.read(FRAME.size, 0)
        if len(head) < FRAME.size:
            return Stream(None, [], 0)
        if not any(head) and not any(file.read(_BEGIN, 0)):
            return Stream(None, [], 0)  # a kill came before frame 0
        nbytes, check = FRAME.unpack(head)
        described = file.read(min(nbytes, _HEAD_LIMIT), FRAME.size)
        if xxhash.xxh3_64_intdigest(described, seed=0) != check:
            cut = FRAME.size + nbytes > size and not _holds_json(described)
            return Stream(None, [], 0, "" if cut else "frame 0, which names the columns, is damaged")
        try:
            begun = _contents_of(described)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            return Stream(None, [], 0, f"frame 0, which names the columns, does not make sense: {error}")
        at, row = FRAME.size + nbytes, sum(spec.row_nbytes for spec in begun.specs)
        most = FRAME.size + begun.earlier + (max_steps + 1) * (FRAME.size + row)
        data = memoryview(file.read(min(size - at, most), at))
        again = described if begun.after is None else file.read(len(described), FRAME.size)
    if begun.after is not None:
        found = Stream(begun.schema, [], at, after=begun.after, apart=begun.apart, seed=begun.seed)
        if again != described:
            return found  # a writer has begun the next group
        full = at + begun.earlier + FRAME.size * bool(begun.earlier) + begun.rows * (FRAME.size + row)
        return _group_in(data, begun, found, row, max_steps, size < full)
    steps: list[bytes] = []
    fault, where = "", 0
    while where + FRAME.size <= len(data):
        nbytes, check = FRAME.unpack_from(data, where)
        payload = bytes(data[where + FRAME.size : where + FRAME.size + row])
        number = len(steps)
        if nbytes != row:
            fault = f"the frame of step {number} has {nbytes} bytes, expected {row}"
        elif number == max_steps:
            fault = f"holds more than max_steps={max_steps} steps"
        elif len(payload) == row and xxhash.xxh3_64_intdigest(payload, seed=number + 1) != check:
            fault = f"the frame of step {number} is damaged"
        if fault or len(payload) < row:
            break
        steps.append(payload)
        where += FRAME.size + row
    return Stream(begun.schema, steps, at + where, fault, part=begun.part, data=begun.data)


class OpenRows:
    """Counts the rows of a group, while its writer appends them, from the file. A frame is read once.

    Args:
        disk: through which it is read.
        path: of the file.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._begin = b""
        self._end, self._number, self._row, self._seed = 0, 1, 0, 0
        self.after: list[int] | None = None
        """The record that the group follows, as in `Stream`; None: the file is of an episode, or not begun."""
        self.count = 0
        """Rows in whole frames."""

    def follow(self) -> None:
        """Count what was appended since the last call.

        Raises:
            OSError: the file is gone.
            ValueError, TypeError, LookupError: what it holds makes no sense.
        """
        with closing(self._disk.open(self._path)) as file:
            head = file.read(FRAME.size, 0)
            if head != self._begin:  # another group: the checksum of frame 0 covers its salt
                self._begin, self.after, self.count = b"", None, 0
                if len(head) < FRAME.size:
                    return
                nbytes, check = FRAME.unpack(head)
                described = file.read(min(nbytes, _HEAD_LIMIT), FRAME.size)
                if xxhash.xxh3_64_intdigest(described, seed=0) != check:
                    return
                begun = _contents_of(described)
                self._end, self._number, self._seed = FRAME.size + nbytes, 1, begun.seed
                if begun.earlier:
                    self._end, self._number = self._end + FRAME.size + begun.earlier, 2
                self._row = sum(spec.row_nbytes for spec in begun.specs)
                self._begin, self.after = head, begun.after
            while self.after is not None and self._row:
                header = file.read(FRAME.size, self._end)
                nbytes = FRAME.unpack(header)[0] if len(header) == FRAME.size else 0
                if not nbytes or nbytes % self._row or self._end + nbytes > file.size():
                    return
                frame = memoryview(header + file.read(nbytes, self._end + FRAME.size))
                if _frame(frame, 0, self._number, self._seed) is None:
                    return
                self.count += nbytes // self._row
                self._end, self._number = self._end + len(frame), self._number + 1


def _group_in(data: memoryview, begun: _Begun, found: Stream, row: int, most: int, cut: bool) -> Stream:
    """Return the rows of a group, given the bytes after frame 0. `cut`: whether the file is shorter than it was."""
    begin, number = 0, 1
    if begun.apart is not None and begun.earlier:
        begin, number = FRAME.size + begun.earlier, 2
        payload = _frame(data, 0, 1, begun.seed)
        if payload is None or len(payload) != begun.earlier:
            is_followed = _frame(data, begin, 2, begun.seed) is not None
            return replace(found, fault="frame 1 is damaged" if is_followed else "")
        try:
            found = replace(found, earlier=_earlier_in(payload, begun.apart))
        except (ValueError, LookupError, AttributeError) as error:
            return replace(found, fault=f"frame 1 does not make sense: {error}")
    rows, ends, fault = _calls(data, begin, row, most, begun.seed, number, cut)
    calls = [(count, found.nbytes + end) for count, end in ends]
    return replace(found, steps=rows, nbytes=calls[-1][1], fault=fault, calls=calls)


def seed_of(salt: str) -> int:
    """Return what is added to the numbers of a group's frames, for their checksums."""
    return xxhash.xxh3_64_intdigest(salt.encode()) >> 1


def _frame(data: memoryview, at: int, number: int, seed: int) -> bytes | None:
    """Return the payload of a group's frame, None if it is not whole."""
    if at + FRAME.size > len(data):
        return None
    nbytes, check = FRAME.unpack_from(data, at)
    payload = bytes(data[at + FRAME.size : at + FRAME.size + nbytes])
    if not nbytes or len(payload) < nbytes:
        return None
    return payload if xxhash.xxh3_64_intdigest(payload, seed + number) == check else None


def _why_it_ends(data: memoryview, at: int, row: int, number: int, seed: int, cut: bool) -> str:
    """Return the fault in the bytes after the whole frames of a group, in words.

    The file has its full size from the start, and bytes of earlier groups. So a frame that is not whole is a fault only
    if another frame of this group follows, or if the file was cut in it: else a kill left it. O(bytes).
    """
    if cut and any(data[at:]):
        return f"the file is cut in frame {number}"
    starts = np.arange(at + FRAME.size + row, len(data) - FRAME.size, row)
    values = np.frombuffer(data, np.uint8)
    sizes = sum(values[starts + i].astype(np.int64) << 8 * i for i in range(4))
    for start in starts[(sizes > 0) & (sizes % row == 0)].tolist():
        if _frame(data, start, number + 1, seed) is not None:
            return f"frame {number} is damaged"
    return ""


def _calls(
    data: memoryview, at: int, row: int, most: int, seed: int, number: int, cut: bool
) -> tuple[list[bytes], list[tuple[int, int]], str]:
    """Return the rows of the whole frames of a group, how many there are after each and where it ends, and the fault of
    the bytes after them.
    """
    rows, ends = list[bytes](), [(0, at)]
    if not row:
        return rows, ends, f"frame {number} has rows of 0 bytes"
    while (payload := _frame(data, at, number, seed)) is not None:
        if len(payload) % row or len(rows) + len(payload) // row > most:
            return rows, ends, f"frame {number} has {len(payload)} bytes, with rows of {row}"
        rows += (payload[i : i + row] for i in range(0, len(payload), row))
        at, number = at + FRAME.size + len(payload), number + 1
        ends.append((len(rows), at))
    return rows, ends, _why_it_ends(data, at, row, number, seed, cut)


def _earlier_in(payload: bytes, apart: Apart) -> dict[str, Any]:
    """Return values apart of rows before the group; raise ValueError for other values."""
    found = decode_data(payload)
    rows = found["rows"]
    if rows.ndim != 1 or rows.dtype.kind != "i" or list(found) != ["rows", *apart.schema.names]:
        raise ValueError(f"it has {list(found)}")
    for spec in apart.schema.columns:
        values = found[spec.name]
        if not spec.has(values.dtype) or values.shape != (len(rows), *spec.shape):
            raise ValueError(f"{spec.name} has {values.dtype} {values.shape}")
    return found


def _holds_json(data: bytes) -> bool:
    """Tell whether the description of the columns is complete: then its size is the fault."""
    try:
        json.JSONDecoder().raw_decode(data.decode("latin1"))
    except (ValueError, RecursionError):
        return False
    return True


def _contents_of(described: bytes) -> _Begun:
    """Return the content of frame 0, or raise an error for content that makes no sense."""
    found = json.loads(described)
    if isinstance(found, list):
        return _Begun(_schema_of(found))
    if "part" in found:
        chain, step, number, lane = found["part"]
        limits = ((chain, MOST), (step, MOST), (number, 1 << 32), (lane, 1 << 32))
        if not all(type(n) is int and NONE <= n < most for n, most in limits):
            raise ValueError(f"is part {found['part']!r}")
        part = PartOf(chain, max(0, step), max(0, number), max(0, lane))
        data = base64.b64decode(found.get("data", ""), validate=True)
        decode_data(data)  # raises if it can't be shown
        return _Begun(_schema_of(found["columns"]), part=part, data=data)
    after, earlier, rows = found["after"], found.get("earlier", 0), found["rows"]
    counts = all(_is_count(n) for n in (*after, earlier, rows))
    if len(after) != 4 or not counts or earlier > EARLIER_LIMIT:
        raise ValueError(f"follows {after!r}, with {earlier!r} bytes and {rows!r} rows")
    schema, apart = _schema_of(found["columns"]), None
    if "apart" in found:
        apart = Apart(_schema_of(found["apart"]), found["lanes"])
        lanes = next((c for c in schema.columns if c.name == apart.lanes), None)
        if lanes is None or lanes.shape or lanes.dtype.kind != "i":
            raise ValueError(f"{apart.lanes!r} is no column of integers")
    return _Begun(schema, apart, after, earlier, seed_of(found["salt"]), rows)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _specs(schema: Schema, apart: Apart | None) -> tuple[ColumnSpec, ...]:
    return (*schema.columns, *(apart.schema.columns if apart else ()))


def _schema_of(columns: Any) -> Schema:
    schema = Schema(tuple(stored_spec(name, shape, dtype) for name, shape, dtype in columns))
    if not schema.columns or len({*schema.names}) < len(schema.columns):
        raise ValueError(f"columns {schema.names}")
    return schema
