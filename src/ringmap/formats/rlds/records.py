"""Files of records, one an episode: TFRecord and ArrayRecord.

    TFRecord      length (8 bytes), its checksum (4), the record, its checksum (4)      CRC32C, masked
    ArrayRecord   read by the package `array_record` (extra `rlds`), which checks what it reads

Invariants: reads only; whole records, in order; one of TFRecord after its checksum was compared.
Source: TensorFlow, TFRecord and tf.train.Example, "TFRecords format details"; google/array_record, README.
Not here: what a record holds (example.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

import google_crc32c

from ringmap.errors import CorruptError
from ringmap.extras import require
from ringmap.formats.common.untrusted import open_binary

__all__ = ["READERS"]

_HEAD, _FOOT = 12, 4


def _tf_records(path: str) -> Iterator[bytes]:
    """Yield the records of a TFRecord file."""
    with open_binary(path) as file:
        end = os.fstat(file.fileno()).st_size
        while (at := file.tell()) < end:
            head = file.read(_HEAD)
            if len(head) < _HEAD:
                raise CorruptError(f"{path}: is cut in the head of a record at byte {at:,}")
            size, stored = struct.unpack("<QI", head)
            if _masked(head[:8]) != stored:
                raise CorruptError(f"{path}: the length of the record at byte {at:,} has another checksum")
            if at + _HEAD + size + _FOOT > end:
                raise CorruptError(
                    f"{path}: a record of {size:,} bytes at byte {at:,} ends beyond the file, which has {end:,}"
                )
            data = file.read(size)
            if _masked(data) != int.from_bytes(file.read(_FOOT), "little"):
                raise CorruptError(f"{path}: the record at byte {at:,} has another checksum")
            yield data


def _array_records(path: str) -> Iterator[bytes]:
    """Yield the records of an ArrayRecord file.

    Raises:
        MissingExtraError: the package is not installed.
        RuntimeError: it is damaged.
    """
    require("rlds", f"{path}: an ArrayRecord file")
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path, "readahead_buffer_size:0,max_parallelism:0")
    if not reader.ok():
        reader.close()  # raises what is wrong
        raise CorruptError(f"{path}: is no ArrayRecord file")
    for _ in range(reader.num_records()):
        yield reader.read()
    reader.close()


READERS: dict[str, Callable[[str], Iterator[bytes]]] = {"tfrecord": _tf_records, "array_record": _array_records}
"""The name of a kind of files in `dataset_info.json` -> what reads them."""


def _masked(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
