"""Blobs: the data that a commit stores beside its rows, in append-only segments.

    data/000000000003.bin   [blob of commit 41][blob of commit 42] ...

A blob holds the checksum of each column's rows, the words of its columns of text, the place of the buffer's small
state, the state itself where it has changed, and the episode's own data. The first blob of a segment has the state in
any case. So the state that counts is in the segment of the newest record, which is never deleted.
A segment is deleted whole once its last record's retirement is durable: first in, first
out, no compaction. A number is never reused.

Invariants: a record names segment, offset, size and checksum of its blob, and a blob those of the small state in the
same segment; blobs lie in commit order; no byte is used unless the checksum holds.
Not here: when a segment may go (files.py).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ringmap.errors import ClosedError, EnvironmentFault, InputError
from ringmap.storage.columns.schema import portable
from ringmap.storage.columns.values import as_array
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.records.table import Record

__all__ = [
    "HEAD",
    "LARGEST_BLOB",
    "LARGEST_STATE",
    "LAST_OFFSET",
    "LAST_SEGMENT",
    "SEGMENT_NBYTES",
    "Segments",
    "StatePlace",
    "check_small_state",
    "decode_blob",
    "decode_data",
    "encode_blob",
    "encode_data",
    "is_shown",
    "names_origin",
    "segment_name",
    "segment_number",
]

Array = np.ndarray[Any, np.dtype[Any]]

SEGMENT_NBYTES = 4 << 20
"""At this size a segment is closed and the next one begun."""

LARGEST_BLOB = 1 << 30
"""A larger one is refused: its size may be forged, and is allocated."""

LAST_OFFSET = 1 << 30
"""Maximum offset of a blob: segments are closed long before."""

LAST_SEGMENT = 1 << 31
"""Maximum number of a segment that commits lead to: a larger one was forged, and no number follows from it."""

LARGEST_STATE = 16 << 20
"""A larger small state is refused: each flush stores it in the manifest, too, which is at most as large."""

StatePlace = tuple[int, int, int]
"""Where a segment has a small state: its first byte there, its size, and its XXH3."""

HEAD = struct.Struct("<IIIIIQ")
"""The head of a blob: the number of checksums, the sizes of words and data, the place of the small state."""

log = logging.getLogger("ringmap")


# -- one blob ------------------------------------------------------------------------------------


def encode_blob(sums: Sequence[int], place: StatePlace, data: bytes, state: bytes = b"", words: bytes = b"") -> bytes:
    """Pack a commit's column checksums, words (packed) and episode data, the place of the small state, and that itself
    if this blob has it."""
    head = HEAD.pack(len(sums), len(words), len(data), *place)
    return head + struct.pack(f"<{len(sums)}Q", *sums) + words + state + data


def decode_blob(blob: bytes) -> tuple[list[int], StatePlace, bytes, bytes]:
    """Return `(sums, place of the small state, data, words)` of a blob whose checksum holds.

    Raises:
        ValueError: its parts do not add up. A forged blob may have a valid checksum.
    """
    if len(blob) < HEAD.size:
        raise ValueError(f"blob parts do not add up: it has {len(blob)} bytes")
    count, words, data, *place = HEAD.unpack_from(blob)
    at, state = HEAD.size + 8 * count, place[1]
    if len(blob) - at - words - data not in (0, state):
        raise ValueError(f"blob parts do not add up: {at} + {words} + {state} or 0 + {data} bytes, of {len(blob)}")
    sums = list(struct.unpack_from(f"<{count}Q", blob, HEAD.size))
    return sums, (place[0], state, place[2]), blob[len(blob) - data :], blob[at : at + words]


def check_small_state(state: Any) -> dict[str, Any]:
    """Return a small state, given as it is or as JSON; raise ValueError unless its known sections are valid."""
    try:
        state = json.loads(state) if isinstance(state, bytes) else state
        finished, sampling = state.get("finished", []), state.get("sampling")
        good = type(finished) is list and all(type(name) is str for name in finished)
        good &= isinstance(state.get("notes", {}), dict)
        if sampling is not None:
            step, sampler = sampling["step"], sampling.get("sampler")
            good &= type(step) is int and 0 <= step < 1 << 63 and (sampler is None or isinstance(sampler, dict))
            np.random.default_rng(0).bit_generator.state = sampling["rng"]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"its sections are not valid: {error!r}") from None
    if not good:
        raise ValueError("its sections are not valid: finished (ids of open episodes), notes (by name), sampling")
    return dict(state)


def encode_data(values: Mapping[str, Any], where: str) -> bytes:
    """Pack episode data: name -> str, bytes, a number, None or array.

    Raises:
        InputError: a name that is not a string, or a value of another type.
    """
    if not values:
        return b""
    heads: list[tuple[Any, ...]] = []
    parts: list[bytes] = []
    for name, value in values.items():
        if not isinstance(name, str):
            raise InputError(f"{where}: episode data names are strings, got {name!r}")
        kind, head, payload = _encode_value(name, value, where)
        heads.append((name, kind, head, len(payload)))
        parts.append(payload)
    plain = all(head[1] == "array" for head in heads)  # often the same in every call, where lanes are stored
    text = _array_heads(tuple(heads)) if plain else _json(heads)
    return len(text).to_bytes(4, "little") + text + b"".join(parts)


def is_shown(name: str) -> bool:
    """Tell whether users see the episode data of this name. The others go with an episode where it is copied."""
    return not name.startswith("_")


def names_origin(data: bytes) -> bool:
    """Tell whether encoded episode data have `_origin`: what the episode was first stored as. O(names)."""
    return _ORIGIN in data[4 : 4 + int.from_bytes(data[:4], "little")]


def decode_data(data: bytes) -> dict[str, Any]:
    """Decode the output of `encode_data`: values of the same types, arrays as new copies; ValueError if it is none."""
    if not data:
        return {}
    try:
        return _decode_data(data)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ValueError(f"episode data do not make sense: {error!r}") from None


def _decode_data(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:4], "little")
    at = 4 + size
    values: dict[str, Any] = {}
    for name, kind, head, nbytes in json.loads(data[4:at]):
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name")
        values[name] = _decode_value(kind, head, data[at : at + nbytes])
        at += nbytes
    return values


def _encode_value(name: str, value: Any, where: str) -> tuple[str, Any, bytes]:
    if value is None or isinstance(value, int) or type(value) in (str, float):  # each float has its own digits
        return "json", value, b""
    if type(value) is bytes:
        return "bytes", None, value
    if type(value) is complex:
        return "complex", (value.real, value.imag), b""
    array = as_array(value, f"{where}: episode data {name!r}", "item")
    if array.dtype.kind not in "biufcSUMm" or array.dtype.char in "gG":
        raise InputError(
            f"{where}: episode data {name!r} is of type {type(value).__name__} (dtype {array.dtype}); "
            "expected str, bytes, a number, None or an array of such"
        )
    dtype = portable(array.dtype)
    kind = "scalar" if isinstance(value, np.generic) else "array"
    contiguous = np.ascontiguousarray(array, dtype)
    return kind, (dtype.str, array.shape), contiguous.tobytes()


_ORIGIN = b'["_origin", '
"""Of encoded episode data with this name, and of no others: in a string, a quotation mark has a backslash before it."""


def _json(heads: Any) -> bytes:
    return json.dumps(heads, ensure_ascii=True).encode()


_array_heads = functools.lru_cache(64)(_json)


def _decode_value(kind: str, head: Any, payload: bytes) -> Any:
    if kind == "json":
        return head
    if kind == "bytes":
        return payload
    if kind == "complex":
        return complex(*head)
    dtype, shape = head
    array = np.frombuffer(payload, np.dtype(dtype)).reshape(shape).copy()
    return array[()] if kind == "scalar" else array


# -- the segments --------------------------------------------------------------------------------


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:012d}.bin"


def segment_number(name: str) -> int | None:
    """Return the number in a segment's file name, or None for another file."""
    stem, dot, suffix = name.partition(".")
    return int(stem) if dot and suffix == "bin" and len(stem) >= 12 and stem.isascii() and stem.isdigit() else None


class Segments:
    """The segments of a buffer, in `data/`; each is closed at `nbytes`, and the next one begun."""

    def __init__(self, disk: Disk, folder: str, nbytes: int = SEGMENT_NBYTES) -> None:
        self.folder = folder
        self.number = 0
        self.new_name = False
        self._disk = disk
        self._limit = nbytes
        self._next = 1
        self._size = 0
        self._last_seq: dict[int, int] = {}
        self._open: dict[int, File] = {}
        self._reading: tuple[int, File] | None = None
        self._closed = False

    def path(self, number: int) -> str:
        """Return the path of a segment."""
        return os.path.join(self.folder, segment_name(number))

    def adopt(self, last_seq: Mapping[int, int], beyond: int) -> None:
        """Start from a recovered state, given the newest record of each segment: others are deleted, the next append
        opens a new one, of a number above `beyond`."""
        self._let_go()
        on_disk = sorted(n for name in self._disk.names(self.folder) if (n := segment_number(name)) is not None)
        self._last_seq = {number: last_seq.get(number, 0) for number in on_disk}
        self._next = max(n for n in (0, beyond, *last_seq, *on_disk) if n <= LAST_SEGMENT) + 1
        for number in on_disk:
            if number not in last_seq:
                self._delete(number)

    @property
    def next_offset(self) -> int:
        """Where in its segment the next blob begins: 0 if it is the first one there."""
        return self._size if self.number and self._size < self._limit else 0

    def append(self, blob: bytes, seq: int) -> tuple[int, int]:
        """Write a blob after the last one and return `(segment, offset)`. O(1)."""
        if not self.next_offset:
            number = self._next
            self._next += 1  # first: a number whose file may exist is never tried again
            self._open[number] = self._disk.create(self.path(number))
            self.number, self._size, self.new_name = number, 0, True
        offset = self._size
        self._open[self.number].write(blob, offset)
        self._size = offset + len(blob)
        self._last_seq[self.number] = seq
        return self.number, offset

    def blob_of(self, record: Record) -> bytes | None:
        """Return the blob that a record names, or None if its segment was deleted or its checksum does not hold."""
        offset, size = record.blob_offset, record.blob_size
        try:
            file = self._open_to_read(record.blob_segment)
            blob = file.read(size, offset) if 0 <= size <= file.size() - offset else b""
        except FileNotFoundError:
            self._check_open()
            return None
        except MemoryError as error:  # unknown whether it is whole: no episode is dropped for it
            what = f"{self.path(record.blob_segment)}: a blob of {size:,} bytes does not fit in memory"
            raise EnvironmentFault(errno.ENOMEM, what) from error
        return blob if len(blob) == size and xxhash.xxh3_64_intdigest(blob) == record.blob_sum else None

    def forget(self) -> None:
        """Read from the files that have these names now: a number may name another file once the timeline broke."""
        self._reading = None

    def _open_to_read(self, number: int) -> File:
        """Return the file of a segment. It stays open for the next episode, which usually shares it.

        Takes no lock: each call holds the file that it reads, whatever another thread opens next.
        """
        self._check_open()
        reading = self._reading
        if reading is None or reading[0] != number:
            reading = self._reading = (number, self._disk.open(self.path(number)))
            if self._closed:  # meanwhile
                self._reading = None
        return reading[1]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.folder}: the buffer was closed meanwhile; open it again")

    def unsynced(self) -> dict[int, File]:
        """Return the files written since their last known sync."""
        return dict(self._open)

    def forget_synced(self, synced: Mapping[int, File]) -> None:
        """Release the files of full segments that were synced."""
        for number, file in synced.items():
            if number != self.number and self._open.get(number) is file:
                del self._open[number]

    def rewrite(self, number: int, offset: int, size: int) -> None:
        """Write the same bytes again, so that the next sync makes them durable."""
        with contextlib.closing(self._disk.open(self.path(number), write=True)) as file:
            file.write(file.read(size, offset), offset)

    def sync_all(self, numbers: Iterable[int]) -> None:
        """Sync these segments, open or not, and the folder with their names."""
        for number in numbers:
            if self._disk.exists(self.path(number)):
                with contextlib.closing(self._disk.open(self.path(number), write=True)) as file:
                    file.sync()
        self._disk.sync_folder(self.folder)

    def delete_before(self, first: int, newest: int) -> None:
        """Delete every segment whose last record comes before record `first`, whose retirement of them is durable.

        The segment of record `newest` and the one of the next append stay.
        """
        for number, last in list(self._last_seq.items()):
            if last >= first:
                return  # segments are in commit order
            if last != newest and number != self.number:
                self._delete(number)  # an open file stays so: a sync may be using it

    def _delete(self, number: int) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self.path(number))
        except OSError as error:  # not a reason to fail a commit that already stands
            log.warning("%s: can't be removed (%s), tried again later", self.path(number), error)
        else:
            del self._last_seq[number]

    def close(self) -> None:
        """Release all descriptors; a running read keeps its own until it is done."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        self._open, self.number, self._size, self._reading = {}, 0, 0, None
