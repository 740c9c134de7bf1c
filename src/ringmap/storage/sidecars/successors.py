"""The next observations of the newest rows: the observations after the last stored ones, which are not rows yet.

    successors.0.bin   [of the rows up to head 640]        written in turn, before the commit
    successors.1.bin   [of the rows up to head 648]        whose head and rows it names

A buffer that stores each observation once finds the next one in the following row. The newest rows
have none; their next observations are here until they are rows themselves, or are stored with the next commit.

Invariants: the file that the newest record needs is never the one being written; a file counts for
the head and the checksum of rows that it names, with its own checksum, which covers the buffer's UUID.
The head alone is not enough: after a power cut other rows may end there.
Not here: the meaning of the arrays (buffers/transitions/).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import xxhash

from ringmap.errors import CorruptError
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.paths import SUCCESSORS
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.blobs import decode_data, encode_data
from ringmap.storage.records.table import Record
from ringmap.storage.sidecars.base import Copied, Home, Kept, Mend, Sidecar

__all__ = ["Successors"]

Array = np.ndarray[Any, np.dtype[Any]]

_MAGIC = b"RINGMAPN"
_HEAD = struct.Struct("<8sqQQQ")
_LIMIT = 1 << 30


class Successors(Sidecar):
    """The two files, written by one handle."""

    names = SUCCESSORS

    def __init__(self, home: Home) -> None:
        self._disk = home.disk
        self._paths = [home.path(name) for name in self.names]
        self._uuid = home.uuid
        self._next = 0
        self._files: list[File | None] = [None, None]
        self._named = True

    def find(self, head: int, rows_sum: int) -> dict[str, Array] | None:
        """Return the next observations of the rows up to `head`, or None if neither file has them. Plain reads.

        Args:
            head: the end of the rows.
            rows_sum: the checksum in their record.
        """
        for slot, path in enumerate(self._paths):
            found = _read(self._disk, path, self._uuid)
            if found is not None and found[:2] == (head, rows_sum):
                self._next = 1 - slot
                try:
                    arrays = decode_data(found[2])
                except ValueError as error:
                    raise CorruptError(f"{path}: {error}; run ringmap.check on the buffer") from None
                return {n: np.asarray(v) for n, v in arrays.items()} or None
        return None

    def write(self, head: int, rows_sum: int, arrays: Mapping[str, Array]) -> None:
        """Write the next observations of the rows up to `head`, before the commit that ends there, over the older
        file."""
        slot = self._next
        payload = encode_data(arrays, "successors")
        packed = _HEAD.pack(_MAGIC, head, rows_sum, len(payload), xxhash.xxh3_64_intdigest(payload))
        check = xxhash.xxh3_64_intdigest(self._uuid + packed).to_bytes(8, "little")
        file = self._files[slot]
        if file is None:
            path = self._paths[slot]
            exists = self._disk.exists(path)
            file = self._disk.open(path, write=True) if exists else self._disk.create(path)
            self._files[slot] = file
            self._named &= exists
        file.write(packed + check + payload, 0)

    def sync(self) -> None:
        """Return once the last write is durable on the disk, with its name."""
        file = self._files[self._next]
        if file is not None:
            file.sync()
        if not self._named:
            self._disk.sync_folder(os.path.dirname(self._paths[0]))
            self._named = True

    def sync_both(self) -> None:
        """Return once both files are durable on the disk, whichever process wrote them."""
        for slot, path in enumerate(self._paths):
            if self._files[slot] is None and self._disk.exists(path):
                self._files[slot] = self._disk.open(path, write=True)
                self._named = False
        for _ in range(2):
            self.sync()
            self.turn()

    def turn(self) -> None:
        """Switch to the other file: the commit was stored."""
        self._next = 1 - self._next

    def close(self) -> None:
        """Release the files."""
        self._files = [None, None]

    @classmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return, in words, that neither file belongs to the newest rows, if that is so."""
        if newest is None:
            return []
        made = cls(home)
        found = [_read(home.disk, path, home.uuid) for path in made._paths]
        if any(one and one[:2] == (newest.head, newest.rows_sum) for one in found):
            return []
        return [f"what follows the rows up to position {newest.head} is damaged or missing"]

    @classmethod
    def mend(cls, home: Home, newest: Record | None) -> Mend | None:
        """Write that the next observations of the newest rows are unknown."""
        if newest is None:
            return None
        what = "write it again: the newest transitions are never drawn"
        return what, partial(cls._announce, home, newest, {}, 2)

    @classmethod
    def _announce(cls, home: Home, newest: Record, arrays: Mapping[str, Array], times: int) -> None:
        """Write, durably, the next observations of the newest rows."""
        with closing(cls(home)) as made:
            for _ in range(times):
                made.write(newest.head, newest.rows_sum, arrays)
                made.sync()
                made.turn()

    @classmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write the next observations of the copy's newest rows. `kept`: returns them where the files have moved on."""
        newest = state.newest
        if newest is None:
            return
        found = cls(source).find(newest.head, newest.rows_sum)
        if found is None and kept is not None:
            found = kept(state)
        if found is not None:
            cls._announce(target, newest, found, 1)


def _read(disk: Disk, path: str, uuid: bytes) -> tuple[int, int, bytes] | None:
    """Return the head and the checksum of rows that a file names, and its payload, if it is whole."""
    try:
        data = disk.read_file(path, _HEAD.size + 8)
        packed = data[: _HEAD.size]
        check = xxhash.xxh3_64_intdigest(uuid + packed).to_bytes(8, "little")
        if len(packed) < _HEAD.size or data[_HEAD.size :] != check:
            return None
        magic, head, rows_sum, size, payload_sum = _HEAD.unpack(packed)
        if size > _LIMIT:  # nothing is read for a size that no observation has
            return None
        payload = disk.read_file(path, len(data) + size)[len(data) :]
    except (OSError, NotAFileError):
        return None
    if magic != _MAGIC or len(payload) != size or xxhash.xxh3_64_intdigest(payload) != payload_sum:
        return None
    return head, rows_sum, payload
