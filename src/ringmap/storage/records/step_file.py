"""The file of rows that are not committed yet: one file of frames, with two lives.

    open/<id>/steps.bin   [what the rows are][earlier values, of a group][rows of call 0][rows of call 1] ... [end]

An open episode waits until it is finished. A group names the record that it follows (`after`), and a writer commits it
before anything else; its file is emptied for the next group. What the rows are is the JSON of frame 0, with a salt; its
checksum seeds all further frames. Where there are columns of text, a frame has the size of its rows, the rows, and the
words that none before it had.

A write ends with 12 bytes that the next one goes over. So a run that ends in another way, in a file that ends with
these bytes, is damaged; in another file, a kill has cut its last write.

Invariants: a frame has whole rows and their words, and counts whole or not at all; no size in a file is believed before
it is compared with the file's own.
Not here: when rows are committed (commit/), how words are packed (columns/text.py).
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from ringmap.storage.columns.schema import ColumnSpec, Schema, stored_spec
from ringmap.storage.columns.text import Words, unpack
from ringmap.storage.disk.checksums import DAMAGED, FINISH, FINISHED, HEADER, FrameReader, framed
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.paths import STEPS
from ringmap.storage.disk.system import Data
from ringmap.storage.records.blobs import LARGEST_BLOB, decode_data
from ringmap.storage.records.table import MOST, PartOf
from ringmap.storage.ring.links import NONE

__all__ = ["EARLIER_LIMIT", "End", "Heading", "OpenRows", "StepFile", "StoredSteps", "Unlinked", "read_steps"]

Array = np.ndarray[Any, np.dtype[Any]]

_HEADING_LIMIT, _CHUNK_NBYTES = 1 << 24, 1 << 20
EARLIER_LIMIT = 1 << 29
"""Bytes of values of earlier rows in a group, encoded: so much memory a forged file may take."""

_SIZED = 4
"""Bytes of the size of a frame's rows, where there is text."""

End = tuple[int, int, int]
"""What counts of the file: bytes, frames, words."""


@dataclass(frozen=True, slots=True)
class Unlinked:
    """Further columns of a group, of which most rows need no value once the rows after them are known; `lanes` names
    the column that tells which do."""

    schema: Schema
    lanes: str


@dataclass(frozen=True, slots=True)
class Heading:
    """What the rows of a file are: its frame 0.

    `part`: the part of a chain that an open episode is, and `data` of its episode, encoded, as far as they were known.
    Of a group: `after`, the record that it follows, as `group.follows` names it; `unlinked` columns after the ring's
    own; `earlier`, the size of their values of rows before the group, in frame 1.
    """

    schema: Schema
    part: PartOf | None = None
    data: bytes = b""
    after: Sequence[int] | None = None
    unlinked: Unlinked | None = None
    earlier: int = 0
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def specs(self) -> tuple[ColumnSpec, ...]:
        """The columns of a row in the file."""
        return (*self.schema.columns, *(self.unlinked.schema.columns if self.unlinked else ()))

    @property
    def row_nbytes(self) -> int:
        """The size of a row in the file."""
        return sum(spec.row_nbytes for spec in self.specs)

    @property
    def has_text(self) -> bool:
        """Whether there are columns of text."""
        return any(spec.is_text for spec in self.specs)

    def encode(self) -> bytes:
        """Return it as JSON."""
        said = {
            "columns": _described(self.schema),
            "salt": self.salt,
            "part": self.part and self.part[:5],
            "data": base64.b64encode(self.data).decode(),
            "after": self.after,
            "unlinked": self.unlinked and [_described(self.unlinked.schema), self.unlinked.lanes],
            "earlier": self.earlier,
        }
        return json.dumps({key: value for key, value in said.items() if value}).encode()

    @classmethod
    def decode(cls, text: bytes) -> Heading:
        """Return the heading of a file, or raise ValueError."""
        try:
            return cls._decode(json.loads(text))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"frame 0, which names the columns, does not make sense: {error}") from None

    @classmethod
    def _decode(cls, said: Any) -> Heading:
        schema, part, after, unlinked = _schema_of(said["columns"]), said.get("part"), said.get("after"), None
        (earlier,) = _counts([said.get("earlier", 0)], EARLIER_LIMIT + 1)
        if part is not None:
            chain, step, previous, number, lane = part
            _counts([chain - NONE, step, previous - NONE, number, lane], MOST, MOST, MOST, 1 << 32, 1 << 32)
            part = PartOf(chain, step, previous, number, lane)
        if after is not None:
            _counts(after, *[1 << 64] * 4)
        data = base64.b64decode(said.get("data", ""), validate=True)
        decode_data(data)  # raises if it can't be shown
        if "unlinked" in said:
            columns, name = said["unlinked"]
            unlinked = Unlinked(_schema_of(columns), name)
            lanes = next((c for c in schema.columns if c.name == name), None)
            if lanes is None or lanes.shape or lanes.dtype.kind != "i":
                raise ValueError(f"{name!r} is no column of integers")
        elif earlier:
            raise ValueError("has values of earlier rows, of no column")
        return cls(schema, part, data, after, unlinked, earlier, str(said.get("salt")))


def _counts(numbers: Any, *limits: int) -> list[int]:
    """Return integers from 0 to their limits; raise ValueError for others."""
    if not all(type(n) is int and 0 <= n < most for n, most in zip(numbers, limits, strict=True)):
        raise ValueError(f"numbers {numbers!r}")
    return list(numbers)


def _described(schema: Schema) -> list[list[Any]]:
    return [[s.name, list(s.shape), s.dtype.str] for s in schema.columns]


def _schema_of(columns: Any) -> Schema:
    schema = Schema(tuple(stored_spec(name, shape, dtype) for name, shape, dtype in columns))
    if not schema.columns or len({*schema.names}) < len(schema.columns):
        raise ValueError(f"columns {schema.names}")
    return schema


def seed_of(heading: bytes) -> int:
    """Return the seed of the frames behind frame 0."""
    return xxhash.xxh3_64_intdigest(heading) >> 1


# -- writing -------------------------------------------------------------------------------------


class StepFile:
    """The file, for writing, in a folder of its own in `open/`, which this makes."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.folder = folder
        self._disk, self._seed, self._has_text, self._is_named = disk, 0, False, False
        disk.make_folder(folder)
        self.file = disk.create(os.path.join(folder, STEPS))

    def begin(self, heading: Heading, earlier: bytes = b"") -> End:
        """Write what the rows are, in place of all that the file holds, and the encoded values of rows before a group;
        return where the rows begin."""
        first = heading.encode()
        if self.file.size():
            self.file.empty()
        self._seed, self._has_text = seed_of(first), heading.has_text
        begin = framed(first, 0) + (framed(earlier, 1, self._seed) if earlier else b"")
        self.file.write(begin + FINISH, 0)
        return len(begin), 2 if earlier else 1, 0

    def write(self, end: End, rows: Data, words: Words) -> End:
        """Write the rows of a call behind an end, with the words that no call before had; return the new end. What a
        call that failed, or was interrupted, has written behind the end does not count."""
        at, number, known = end
        if self._has_text:
            rows = b"".join((len(rows).to_bytes(_SIZED, "little"), rows, words.pack(known)))
        check = xxhash.xxh3_64_intdigest(rows, self._seed + number)
        self.file.write(b"".join((HEADER.pack(len(rows), check), rows, FINISH)), at)
        return at + HEADER.size + len(rows), number + 1, len(words)

    def sync(self) -> None:
        """Return once the rows, and the file's name, are durable on the disk."""
        self.file.sync()
        if not self._is_named:
            self._disk.sync_folder(self.folder)
            self._disk.sync_folder(os.path.dirname(self.folder))
            self._is_named = True

    def remove(self) -> None:
        """Remove the file."""
        self.close()
        self._disk.discard(self.folder)

    def close(self) -> None:
        """Release the descriptor."""
        self.file.close()


# -- reading back --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredSteps:
    """What a file holds: the rows before the first frame that is cut or damaged.

    `heading`: None if it is not whole; `rows`: `count` of them; `earlier`: values of rows before a group; `words`: of
    columns of text; `nbytes`: of the whole frames; `fault`: what is wrong with the bytes after these, in words (a cut
    frame is not wrong: a kill leaves it).
    """

    heading: Heading | None = None
    rows: bytes = b""
    count: int = 0
    nbytes: int = 0
    fault: str = ""
    earlier: dict[str, Any] = field(default_factory=dict)
    words: Words = field(default_factory=Words)

    @property
    def after(self) -> Sequence[int] | None:
        """The record that a group follows; None for an episode."""
        return None if self.heading is None else self.heading.after

    def arrays(self) -> list[Array]:
        """Return the rows as one array per column, unlinked ones last."""
        assert self.heading is not None
        columns = zip(self.heading.specs, self._stored(), strict=True)
        return [self.words.decode(values) if spec.is_text else values for spec, values in columns]

    def _stored(self) -> list[Array]:
        """Return the values of each column as they are stored."""
        assert self.heading is not None
        rows, arrays, begin = np.frombuffer(self.rows, np.uint8).reshape(self.count, -1), list[Array](), 0
        for spec in self.heading.specs:
            raw = np.ascontiguousarray(rows[:, begin : begin + spec.row_nbytes])
            shape, dtype = (len(rows), *spec.shape), spec.stored.dtype
            arrays.append(raw.view(dtype).reshape(shape) if raw.size else np.empty(shape, dtype))
            begin += spec.row_nbytes
        return arrays


def read_steps(disk: Disk, folder: str, most: int) -> StoredSteps:
    """Return what the file in a folder of `open/` holds; nothing if it has none, or a link; at most `most` rows."""
    path = os.path.join(folder, STEPS)
    if not disk.is_folder(folder) or not disk.is_file(path):
        return StoredSteps()
    with closing(disk.open(path)) as file:
        reader, header = FrameReader(file, chunk=_CHUNK_NBYTES), file.read(HEADER.size, 0)
        try:
            heading = _next_heading(reader)
        except ValueError as error:
            return StoredSteps(fault=str(error))
        if heading is None:
            damaged = _is_damaged(file, reader)
            return StoredSteps(fault="frame 0, which names the columns, is damaged" if damaged else "")
        found = _rows_in(file, reader, heading, most)
        try:
            if heading.has_text and found.count:
                found.arrays()
        except ValueError as error:  # of a stranger
            return StoredSteps(heading, fault=f"text does not make sense: {error}")
        if file.read(HEADER.size, 0) != header:  # a writer has begun the next group meanwhile
            return StoredSteps(heading)
    return found


def _next_heading(reader: FrameReader) -> Heading | None:
    """Read frame 0, and take its seed for the frames behind it; None if it is not whole."""
    first = reader.next(_HEADING_LIMIT)
    if first is None:
        return None
    reader.seed = seed_of(first)
    return Heading.decode(first)


def _is_damaged(file: File, reader: FrameReader) -> bool:
    """Tell whether a run ends neither as it was written, nor as a kill leaves it."""
    if reader.ending in (FINISHED, DAMAGED):
        return reader.ending == DAMAGED
    return file.read(HEADER.size, max(0, reader.stop - HEADER.size)) == FINISH


def _rows_in(file: File, reader: FrameReader, heading: Heading, most: int) -> StoredSteps:
    """Return the rows behind frame 0."""
    row, is_group, earlier, payload = heading.row_nbytes, heading.after is not None, dict[str, Any](), None
    if not row and is_group:
        return StoredSteps(heading, nbytes=reader.at, fault=f"frame {reader.number} has rows of 0 bytes")
    if heading.unlinked is not None and heading.earlier and (payload := reader.next(heading.earlier)) is not None:
        try:
            values = Schema((ColumnSpec("rows", (), np.dtype("<i4")), *heading.unlinked.schema.columns))
            earlier = values.fit(decode_data(payload), "safe", "it")
        except ValueError as error:
            return StoredSteps(heading, nbytes=reader.at, fault=f"frame 1 does not make sense: {error}")
    rows, count, words, end, has_text = list[bytes](), 0, list[str](), reader.at, heading.has_text
    room = _SIZED + LARGEST_BLOB if has_text else 0
    while (payload := reader.next(((most - count) * row if is_group else row) + room)) is not None:
        piece, packed = _split(payload, has_text)
        more = len(piece) // row if row else 1
        if count + more > most or len(piece) != more * row:
            break
        try:
            words += unpack(packed)
        except ValueError:
            break
        rows.append(piece)
        count += more
        end = reader.at
    fault = ""
    if payload is not None or _is_damaged(file, reader):
        frame = f"frame {reader.number - (payload is not None)} is damaged"
        fault = f"holds more than max_steps={most} steps" if count == most else frame
    return StoredSteps(heading, b"".join(rows), count, end, fault, earlier, Words(words))


def _split(payload: bytes, has_text: bool) -> tuple[bytes, bytes]:
    """Return the rows of a frame, and its packed words."""
    if not has_text:
        return payload, b""
    stop = _SIZED + int.from_bytes(payload[:_SIZED], "little")
    return payload[_SIZED:stop], payload[stop:]


class OpenRows:
    """Counts the rows of a group, while its writer appends them, from the file at a path. A frame is read once."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._header = b""
        self._place = (0, 0, 0)
        """Seed, byte and number of the next frame."""
        self._row, self._has_text = 0, False
        self.after: Sequence[int] | None = None
        """The record that the group follows, as in `Heading`; None: the file is of an episode, or not begun."""
        self.count = 0
        """Rows in whole frames."""

    def catch_up(self) -> None:
        """Count what was appended since the last call; OSError if the file is gone, ValueError if it makes no sense."""
        with closing(self._disk.open(self._path)) as file:
            header = file.read(HEADER.size, 0)
            if header != self._header:  # another group: the checksum of frame 0 covers its salt
                self._header, self.after, self.count = b"", None, 0
                reader = FrameReader(file)
                heading = _next_heading(reader)
                if heading is None:
                    return
                before = HEADER.size + heading.earlier if heading.earlier else 0
                self._place = reader.seed, reader.at + before, 2 if before else 1
                self._row, self._has_text = heading.row_nbytes, heading.has_text
                self._header, self.after = header, heading.after
            if self.after is None or not self._row:
                return
            reader = FrameReader(file, *self._place, chunk=HEADER.size + self._row)
            while (payload := reader.next(reader.stop)) is not None:
                rows, _ = _split(payload, self._has_text)
                if len(rows) % self._row:
                    break
                self.count += len(rows) // self._row
                self._place = reader.seed, reader.at, reader.number
