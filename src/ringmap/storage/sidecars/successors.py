"""The next observations of the newest rows: the observations after the last stored ones, which are not rows yet.

    successors.bin   [header 0: of the rows up to head 640][header 1: up to head 648][payload][payload]

A buffer that stores each observation once finds the next one in the following row. The newest rows
have none; their next observations are here until they are rows themselves, or are stored with the next commit.
Each is written ahead of its commit, payload first, over those that the newest record does not need.

Invariants: a payload counts for the head and the checksum of rows that its header names, with the checksum there. The
head alone is not enough: after a power cut other rows may end there.
Not here: the meaning of the arrays (buffers/transitions/).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ringmap.errors import CorruptError
from ringmap.storage.disk.checksums import SLOT_NBYTES, TwoSlots
from ringmap.storage.disk.files import File
from ringmap.storage.disk.paths import SUCCESSORS
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.blobs import decode_data, encode_data
from ringmap.storage.records.table import Record
from ringmap.storage.sidecars.base import Copied, Home, Kept, Repair, Sidecar

__all__ = ["Successors"]

Array = np.ndarray[Any, np.dtype[Any]]

_LIMIT = 1 << 30


class _Header(NamedTuple):
    """Whose next observations a payload holds, and where it is. `rows_sum`: the checksum in the record of the rows."""

    generation: int = 0
    head: int = 0
    rows_sum: int = 0
    offset: int = 2 * SLOT_NBYTES
    size: int = 0
    payload_sum: int = 0

    @property
    def end(self) -> int:
        """The first page behind the payload."""
        return -(-(self.offset + self.size) // SLOT_NBYTES) * SLOT_NBYTES


class _Headers(TwoSlots[_Header]):
    magic = b"RINGMAPN"
    form = struct.Struct("<8sQqQqqQ")
    decode = _Header


class Successors(Sidecar):
    """The file, written by one handle."""

    names = (SUCCESSORS,)

    def __init__(self, home: Home) -> None:
        self._home = home
        self._path = home.path(SUCCESSORS)
        self._file: File | None = None
        self._needed = self._written = _Header()
        """Those of the newest record, and of the last write."""
        self._named = True

    def find(self, head: int, rows_sum: int) -> dict[str, Array] | None:
        """Return the next observations of the rows up to `head`, whose record has this checksum, or None if the file
        has none."""
        found = self._read(head, rows_sum)
        if found is None:
            return None
        self._needed, payload = found
        try:
            arrays = decode_data(payload)
        except ValueError as error:
            raise CorruptError(f"{self._path}: {error}; run ringmap.check on the buffer") from None
        return {n: np.asarray(v) for n, v in arrays.items()} or None

    def _read(self, head: int, rows_sum: int) -> tuple[_Header, bytes] | None:
        """Return the header and the payload of the rows up to `head`, if they are whole."""
        try:
            with closing(self._home.disk.open(self._path)) as file:
                for header in _Headers(file, self._home.uuid).slots():
                    if header is None or (header.head, header.rows_sum) != (head, rows_sum):
                        continue
                    if not 0 <= header.size <= _LIMIT:  # nothing is read for a size that no observation has
                        continue
                    payload = file.read(header.size, header.offset)
                    if len(payload) == header.size and xxhash.xxh3_64_intdigest(payload) == header.payload_sum:
                        return header, payload
        except (OSError, NotAFileError):
            pass
        return None

    def write(self, head: int, rows_sum: int, arrays: Mapping[str, Array]) -> None:
        """Write the next observations of the rows up to `head`, before the commit that ends there, where those of the
        newest record are not."""
        payload, needed = encode_data(arrays, "successors"), self._needed
        file = self._opened()
        offset = 2 * SLOT_NBYTES
        if offset + len(payload) > needed.offset:
            offset = needed.end
        file.write(payload, offset)
        checksum = xxhash.xxh3_64_intdigest(payload)
        header = _Header(needed.generation + 1, head, rows_sum, offset, len(payload), checksum)
        _Headers(file, self._home.uuid).write(header)
        self._written = header

    def _opened(self) -> File:
        """Return the file for writing; make it if it is not there."""
        if self._file is None:
            disk, path = self._home.disk, self._path
            exists = disk.exists(path)
            self._file = disk.open(path, write=True) if exists else disk.create(path, 2 * SLOT_NBYTES)
            self._named &= exists
        return self._file

    def sync(self) -> None:
        """Return once the last write is durable on the disk, with its name."""
        if self._file is not None:
            self._file.sync()
        if not self._named:
            self._home.disk.sync_folder(os.path.dirname(self._path))
            self._named = True

    def sync_all(self) -> None:
        """Return once the file is durable on the disk, whichever process wrote it."""
        if self._file is None and self._home.disk.exists(self._path):
            self._file, self._named = self._home.disk.open(self._path, write=True), False
        self.sync()

    def turn(self) -> None:
        """Keep what was written: the commit was stored."""
        self._needed = self._written

    def close(self) -> None:
        """Release the file."""
        self._file = None

    @classmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return, in words, that nothing here belongs to the newest rows, if that is so."""
        if newest is None or cls(home)._read(newest.head, newest.rows_sum):
            return []
        return [f"what follows the rows up to position {newest.head} is damaged or missing"]

    @classmethod
    def repair(cls, home: Home, newest: Record | None) -> Repair | None:
        """Write that the next observations of the newest rows are unknown."""
        if newest is None:
            return None
        what = "write it again: the newest transitions are never drawn"
        return what, partial(cls._announce, home, newest, {})

    @classmethod
    def _announce(cls, home: Home, newest: Record, arrays: Mapping[str, Array]) -> None:
        """Write, durably, the next observations of the newest rows, with both headers."""
        with closing(cls(home)) as made:
            for _ in range(2):
                made.write(newest.head, newest.rows_sum, arrays)
                made.sync()
                made.turn()

    @classmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write the next observations of the copy's newest rows. `kept`: returns them where the file has moved on."""
        newest = state.newest
        if newest is None:
            return
        found = cls(source).find(newest.head, newest.rows_sum)
        if found is None and kept is not None:
            found = kept(state)
        if found is not None:
            cls._announce(target, newest, found)
