"""Files of records, one an episode: TFRecord and ArrayRecord.

    TFRecord      length (8 bytes), its checksum (4), the record, its checksum (4)      CRC32C, masked
    ArrayRecord   read by the package `array_record` (extra `rlds`), which checks what it reads

Invariants: reads only; a record of TFRecord is handed out after its checksum was compared, whole records only.
Source: TensorFlow, TFRecord and tf.train.Example, "TFRecords format details"; google/array_record, README.
Not here: what a record holds (example.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import google_crc32c

from ringmap.errors import CorruptError, RoleError
from ringmap.extras import require
from ringmap.formats.common.untrusted import open_binary
from ringmap.formats.rlds.example import Readable

__all__ = ["READERS", "Record"]

_HEAD, _FOOT = 12, 4


@dataclass(frozen=True, slots=True)
class Record:
    """Where a record lies: its number in an ArrayRecord file, or its first byte in a TFRecord file; `size` in bytes."""

    file: str
    at: int
    size: int


class _Part:
    """A record that is read by and by, without its checksum."""

    def __init__(self, file: BinaryIO, record: Record) -> None:
        self._file, self._record = file, record

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(self._record.size)
        self._file.seek(self._record.at + start)
        return self._file.read(stop - start)


class TFRecord:
    """Reads TFRecord files."""

    @staticmethod
    def scan(path: str) -> Iterator[tuple[Record, Readable]]:
        """Yield the records of a file, and their bytes, which are read when asked for, without the checksum."""
        with open_binary(path) as file:
            end = os.fstat(file.fileno()).st_size
            at = 0
            while at < end:
                file.seek(at)
                head = file.read(_HEAD)
                if len(head) < _HEAD:
                    raise CorruptError(f"{path}: is cut in the head of a record at byte {at:,}")
                size, stored = struct.unpack("<QI", head)
                if _masked(head[:8]) != stored:
                    raise CorruptError(f"{path}: the length of the record at byte {at:,} has another checksum")
                record = Record(path, at + _HEAD, size)
                at += _HEAD + size + _FOOT
                if at > end:
                    raise CorruptError(
                        f"{path}: a record of {size:,} bytes at byte {record.at:,} ends beyond the file, which has "
                        f"{end:,}"
                    )
                yield record, _Part(file, record)

    @staticmethod
    def read(record: Record) -> bytes:
        """Return a record, whose checksum is right.

        Raises:
            CorruptError: it is not.
        """
        with open_binary(record.file) as file:
            file.seek(record.at)
            data, foot = file.read(record.size), file.read(_FOOT)
        if len(foot) < _FOOT or _masked(data) != int.from_bytes(foot, "little"):
            raise CorruptError(f"{record.file}: the record at byte {record.at:,} has another checksum")
        return data


class ArrayRecord:
    """Reads ArrayRecord files, through their package."""

    @staticmethod
    def scan(path: str) -> Iterator[tuple[Record, Readable]]:
        """Yield the records of a file, and their bytes."""
        reader = _opened(path)
        for number in range(reader.num_records()):
            data = reader.read()
            yield Record(path, number, len(data)), data
        reader.close()

    @staticmethod
    def read(record: Record) -> bytes:
        """Return a record.

        Raises:
            CorruptError: it can't be read, or has changed.
        """
        reader = _opened(record.file)
        data: bytes = reader.read([record.at])[0]
        reader.close()
        if len(data) != record.size:
            raise CorruptError(f"{record.file}: record {record.at} has {len(data):,} bytes, expected {record.size:,}")
        return data


READERS: dict[str, type[TFRecord] | type[ArrayRecord]] = {
    "tfrecord": TFRecord,
    "array_record": ArrayRecord,
}
"""The name of a kind of files in `dataset_info.json` -> what reads them."""


_used_by: int | None = None


def _opened(path: str) -> Any:
    """Return an open ArrayRecord file.

    Raises:
        MissingExtraError: the package is not installed.
        RoleError: this process was forked from one that had read such a file: of 20 such children several hung or
            crashed.
        RuntimeError: it is damaged.
    """
    require("rlds", f"{path}: an ArrayRecord file")
    from array_record.python.array_record_module import ArrayRecordReader

    global _used_by
    if _used_by not in (None, os.getpid()):
        raise RoleError(
            f"{path}: the package array_record was used before this process was forked, and reading here would hang or "
            "crash. Start workers with DataLoader(..., multiprocessing_context='spawn'), or 'forkserver'"
        )
    _used_by = os.getpid()
    reader = ArrayRecordReader(path, "readahead_buffer_size:0,max_parallelism:0")
    if not reader.ok():
        reader.close()  # raises what is wrong
        raise CorruptError(f"{path}: is no ArrayRecord file")
    return reader


def _masked(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
