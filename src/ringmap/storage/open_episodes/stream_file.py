"""Reads back the file of an episode that is still being recorded.

    open/<id>/steps.bin   [frame 0: columns][frame 1: step 0][frame 2: step 1] ...
    frame                 size (4 bytes), xxh3 of the payload seeded with its number (8), payload

Invariants: no byte is used before its checksum holds, and no size is used that exceeds the file's own
size; the first truncated or damaged frame ends the episode.
Not here: writing, and what is done with the steps (open_episode.py).
"""

from __future__ import annotations

import json
import struct
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ringmap.storage.columns.schema import Schema, stored_spec
from ringmap.storage.disk.files import Disk

__all__ = ["FRAME", "Stream", "read_stream"]

Array = np.ndarray[Any, np.dtype[Any]]

FRAME = struct.Struct("<IQ")
"""The header of a payload: its size, and its checksum."""

_HEAD_LIMIT = 1 << 24


@dataclass(frozen=True, slots=True)
class Stream:
    """The content of an open episode's file: the steps before the first truncated or damaged frame.

    `nbytes`: bytes of the whole frames; `fault`: the fault in the bytes after them, in words. A
    truncated frame is not a fault: a kill causes it.
    """

    schema: Schema | None
    steps: list[bytes]
    nbytes: int
    fault: str = ""

    def arrays(self) -> list[Array]:
        """Return the steps as one array per column."""
        assert self.schema is not None
        rows = np.frombuffer(b"".join(self.steps), np.uint8).reshape(len(self.steps), -1)
        arrays, begin = [], 0
        for spec in self.schema.columns:
            raw = np.ascontiguousarray(rows[:, begin : begin + spec.row_nbytes])
            shape = (len(rows), *spec.shape)
            arrays.append(
                raw.view(spec.dtype).reshape(shape) if raw.size else np.empty(shape, spec.dtype)
            )
            begin += spec.row_nbytes
        return arrays


def read_stream(disk: Disk, path: str, max_steps: int) -> Stream:
    """Return the content of an open episode's file. No byte is used before its checksum and its size are verified.

    Cost: reads the file, but at most `max_steps` steps of it.
    """
    with closing(disk.open(path)) as file:
        size = file.size()
        head = file.read(FRAME.size, 0)
        if len(head) < FRAME.size:
            return Stream(None, [], 0)
        nbytes, check = FRAME.unpack(head)
        described = file.read(min(nbytes, _HEAD_LIMIT), FRAME.size)
        if xxhash.xxh3_64_intdigest(described, seed=0) != check:
            cut = FRAME.size + nbytes > size and not _holds_json(described)
            return Stream(
                None, [], 0, "" if cut else "frame 0, which names the columns, is damaged"
            )
        try:
            schema = _schema_of(described)
        except (ValueError, TypeError, RecursionError) as error:
            return Stream(
                None, [], 0, f"frame 0, which names the columns, does not make sense: {error}"
            )
        at, row = FRAME.size + nbytes, sum(spec.row_nbytes for spec in schema.columns)
        data = memoryview(file.read(min(size - at, (max_steps + 1) * (FRAME.size + row)), at))
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
    return Stream(schema, steps, at + where, fault)


def _holds_json(data: bytes) -> bool:
    """Tell whether the description of the columns is complete: then its size is the fault."""
    try:
        json.JSONDecoder().raw_decode(data.decode("latin1"))
    except (ValueError, RecursionError):
        return False
    return True


def _schema_of(described: bytes) -> Schema:
    columns = json.loads(described)
    schema = Schema(tuple(stored_spec(name, shape, dtype) for name, shape, dtype in columns))
    if not schema.columns or len({*schema.names}) < len(schema.columns):
        raise ValueError(f"columns {schema.names}")
    return schema
