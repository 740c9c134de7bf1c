"""The log of a folder that is being written: each episode whole, before the format's own files say so.

    FOLDER/.ringmap.log    magic, size of head, size of body, checksum | head (JSON) | columns, data    (per episode)

An episode is written once its record is whole: the one write that counts, whatever the format. The
format takes records over into its own files in large groups (`absorb`), and then the log is emptied.
Whoever opens a folder whose writer was killed takes over what is left in it.
Invariants: records have consecutive episode numbers, so that one that was taken over before a kill is
known again; what follows a record that is not whole counts for nothing.
Not here: what becomes of a record (the formats).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from ringmap.formats.common import disk
from ringmap.formats.common.inside import open_fd
from ringmap.storage.blobs import decode_data
from ringmap.storage.schema import ColumnSpec, Schema, stored_spec

__all__ = ["FILE", "Encoded", "Log", "Record"]

Array = np.ndarray[Any, np.dtype[Any]]

FILE = ".ringmap.log"

_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"RINGMAPL"

_HEAD_NBYTES = 64 << 20
_PIECE = 1 << 20

_ALIGN = 16
"""Arrow refuses arrays that do not start at a multiple of their items' size."""


class Encoded:
    """The steps of a column as one encoded value each (JPEG, PNG).

    Args:
        values: one per step.
    """

    __slots__ = ("values",)

    def __init__(self, values: list[bytes]) -> None:
        self.values = values


class Record:
    """One episode, as the log holds it.

    Attributes:
        number: of the episode.
        row: of its first step.
        length: steps.
        schema: of all columns.
        columns: column -> array (length, ...), or `Encoded`; columns that were stored elsewhere lack.
        packed: encoded episode data.
        notes: what the format noted.
    """

    __slots__ = ("columns", "length", "notes", "number", "packed", "row", "schema")

    def __init__(
        self,
        number: int,
        row: int,
        length: int,
        schema: Schema,
        columns: Mapping[str, Array | Encoded],
        packed: bytes,
        notes: dict[str, Any],
    ) -> None:
        self.number, self.row, self.length = number, row, length
        self.schema, self.columns, self.packed, self.notes = schema, columns, packed, notes

    @property
    def data(self) -> dict[str, Any]:
        """The values constant within the episode."""
        return decode_data(self.packed)


class Log:
    """The records in a folder. One process writes; whoever holds the folder's lock may empty it.

    Args:
        folder: the dataset's.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, FILE)
        self._fd = -1
        self.size = 0

    def open(self) -> None:
        """Open for appending, behind the last whole record."""
        self._fd = open_fd(self.path, os.O_RDWR | os.O_CREAT)
        self.size = 0
        for _ in self._each(self._fd):
            pass
        if os.fstat(self._fd).st_size > self.size:
            disk.truncate(self._fd, self.size)

    def append(self, record: Record) -> None:
        """Add a record: once this returns, the episode is written.

        Raises:
            OSError: it was not added whole; `cut` what there is of it.
        """
        columns, parts, at = [], list[Any](), 0
        for spec in record.schema.columns:
            value = record.columns.get(spec.name)
            if value is None:
                how, pieces = "elsewhere", list[Any]()
            elif isinstance(value, Encoded):
                how = "encoded"
                ends = np.cumsum([len(v) for v in value.values], dtype="<i8")
                pieces = [ends.data, *value.values]
            else:
                how, pieces = "rows", [_bytes_of(value)]
            columns.append([spec.name, spec.dtype.str, list(spec.shape), how])
            size = sum(memoryview(piece).nbytes for piece in pieces)
            parts += [*pieces, bytes(-size % _ALIGN)]
            at += size + -size % _ALIGN
        parts.append(record.packed)
        at += len(record.packed)
        head = json.dumps(
            {
                "number": record.number,
                "row": record.row,
                "length": record.length,
                "columns": columns,
                "data": len(record.packed),
                "notes": record.notes,
            }
        ).encode()
        head += b" " * (-len(head) % _ALIGN)
        digest = xxhash.xxh3_64(head)
        for part in parts:
            digest.update(part)
        first = _HEAD.pack(_MAGIC, len(head), at, digest.intdigest())
        disk.append(self._fd, [first, head, *parts], self.size)
        self.size += len(first) + len(head) + at

    def records(self) -> Iterator[Record]:
        """Yield the whole records, in order, each read when its turn comes."""
        if self._fd >= 0:
            yield from self._each(self._fd)
            return
        try:
            fd = open_fd(self.path)
        except FileNotFoundError:
            return
        try:
            yield from self._each(fd)
        finally:
            os.close(fd)

    def cut(self, size: int) -> None:
        """Forget all records but those in the first `size` bytes."""
        disk.truncate(self._fd, size)
        self.size = size

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        disk.remove(self.path)

    def close(self) -> None:
        """Give the file back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _each(self, fd: int) -> Iterator[Record]:
        at, end = 0, os.fstat(fd).st_size
        while at + _HEAD.size <= end:
            first = bytearray(_HEAD.size)
            disk.read_into(fd, memoryview(first), at)
            magic, head_size, body_size, checksum = _HEAD.unpack(first)
            if magic != _MAGIC or at + _HEAD.size + head_size + body_size > end:
                return
            if head_size > _HEAD_NBYTES or not _holds(fd, at, head_size + body_size, checksum):
                return
            both = bytearray(head_size + body_size)
            disk.read_into(fd, memoryview(both), at + _HEAD.size)
            at += _HEAD.size + len(both)
            self.size = at
            yield _parse(both, head_size)


def _holds(fd: int, at: int, size: int, checksum: int) -> bool:
    """Tell whether a record is whole; no room is made for one that is not, whatever size it claims."""
    digest, room, done = xxhash.xxh3_64(), memoryview(bytearray(min(size, _PIECE))), 0
    while done < size:
        part = room[: min(_PIECE, size - done)]
        disk.read_into(fd, part, at + _HEAD.size + done)
        digest.update(part)
        done += len(part)
    return digest.intdigest() == checksum


def _parse(both: bytearray, head_size: int) -> Record:
    head = json.loads(bytes(both[:head_size]))
    body = memoryview(both)[head_size:]
    length, at = head["length"], 0
    specs: list[ColumnSpec] = []
    columns: dict[str, Array | Encoded] = {}
    for name, dtype, shape, how in head["columns"]:
        spec = stored_spec(name, shape, dtype)
        specs.append(spec)
        if how == "encoded":
            ends = np.frombuffer(body[at : at + 8 * length], "<i8").tolist()
            at += 8 * length
            starts = [0, *ends[:-1]]
            values = [bytes(body[at + s : at + e]) for s, e in zip(starts, ends, strict=True)]
            columns[name] = Encoded(values)
            at += ends[-1] + -(8 * length + ends[-1]) % _ALIGN
        elif how == "rows":
            size = length * spec.row_nbytes
            flat = np.frombuffer(body[at : at + size], np.uint8)
            columns[name] = flat.view(spec.dtype).reshape(length, *spec.shape) if size else (
                np.empty((length, *spec.shape), spec.dtype)
            )  # fmt: skip
            at += size + -size % _ALIGN
    packed = bytes(body[at : at + head["data"]])
    return Record(
        head["number"], head["row"], length, Schema(tuple(specs)), columns, packed, head["notes"]
    )


def _bytes_of(rows: Array) -> Any:
    """Return an array's bytes without copying them; dates and text have no buffer of their own."""
    return rows.reshape(-1).view(np.uint8).data if rows.size and rows.itemsize else b""
