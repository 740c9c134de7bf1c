"""The file of priorities: one float32 for each row of the ring, and a log of later changes.

    priorities.bin   [header 0][header 1][leaves 0][leaves 1][log: frame, frame, ...]

An update is one frame at the end of the log, so always one `pwrite`. When the log is
full, all leaves are written to the area that is not valid, and then the header that makes
it valid: generation g has header and area g % 2, and an empty log. That is synced, since the log of
the previous generation is overwritten next.

    frame   check, generation, kind, count, then   POINTS: positions int64, priorities float32
                                                   RANGE:  first and last position + 1, one priority

Leaf `position % rows` belongs to the newest position below `upto` in this slot: later positions
have no priority yet, whatever an earlier lap left there.

Invariants: a header counts with its checksum, which covers the buffer's UUID and the leaves;
a frame counts with its checksum, its generation and its place, after all frames before it; after a
power cut each priority is as of the last `sync` or later, and belongs to its own row.
Not here: the use of a priority (clips/samplers), which positions are live.
"""

from __future__ import annotations

import struct
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from ringmap.storage.disk.files import File, closed
from ringmap.storage.records.table import Record
from ringmap.storage.sidecars.base import Copied, Home, Kept, Mend, Sidecar

__all__ = ["Leaves", "PriorityFile"]

Array = np.ndarray[Any, np.dtype[Any]]

_MAGIC = b"RINGMAPP"
_HEADER = struct.Struct("<8sQQqdQ")
_SLOT = 4096
_FRAME = struct.Struct("<QQII")
_RANGE = struct.Struct("<qqd")
_HEAD = 16
"""Bytes of a frame up to the end of its generation; zeros there end the log."""
_POINTS, _RANGES = 1, 2
_LOG_LEAST = 1 << 18
_MOST = 1 << 48
_TRIES = 10


@dataclass(slots=True)
class Leaves:
    """Priorities by slot.

    `values`: float32 `(rows,)`; `upto`: the position below which they count; `highest`: of all
    priorities so far.
    """

    values: Array
    upto: int = 0
    highest: float = 1.0

    def put_range(self, start: int, stop: int, priority: float) -> None:
        """Set positions `[start, stop)` to one priority; `upto` is the first position without one."""
        rows = len(self.values)
        if stop - start >= rows:
            self.values[:] = priority
        elif stop > start:
            first, last = start % rows, (stop - 1) % rows + 1
            if first < last:
                self.values[first:last] = priority
            else:
                self.values[first:], self.values[:last] = priority, priority
        self.upto = max(self.upto, stop)

    def back_to(self, tail: int, head: int) -> Leaves:
        """Return a copy that is valid for positions `[tail, head)`.

        Where positions from `head` on already have priorities, in slots of these, the highest priority replaces them.
        """
        values = self.values.copy()
        kept = Leaves(values, min(self.upto, head), self.highest)
        for position in range(tail, min(head, self.upto - len(values))):
            values[position % len(values)] = self.highest
        return kept


class PriorityFile(Sidecar):
    """The open file.

    Args:
        file: its handle.
        uuid: the buffer's.
        rows: of the ring.
    """

    names = ("priorities.bin",)
    temporary = ("priorities.bin.tmp",)

    def __init__(self, file: File, uuid: bytes, rows: int) -> None:
        self.path = file.path
        self._file = file
        self._uuid = uuid
        self._rows = rows
        self._generation = 0
        self._end = 0  # of the log
        self._is_ragged = False
        self._log, self._stop = _places(rows)

    @staticmethod
    def nbytes(rows: int) -> int:
        """Return the size of the file; it is sparse, and takes up about two thirds of this."""
        return _places(rows)[1]

    @classmethod
    def create(cls, home: Home, leaves: Leaves) -> None:
        """Make the file, whole or not at all, and sync its name."""
        disk, path, beside = home.disk, home.path(cls.names[0]), home.path(cls.temporary[0])
        disk.discard(beside)
        with closing(disk.create(beside, cls.nbytes(home.rows))) as file:
            cls(file, home.uuid, home.rows).checkpoint(leaves)
        disk.rename(beside, path)
        disk.sync_folder(home.folder)

    @classmethod
    def open(cls, home: Home, write: bool) -> PriorityFile | None:
        """Open an existing file, None if its size is wrong; `load` reads its content."""
        path = home.path(cls.names[0])
        if home.disk.size(path) != cls.nbytes(home.rows):
            return None
        return cls(home.disk.open(path, write), home.uuid, home.rows)

    @classmethod
    def _loaded(cls, home: Home) -> tuple[Leaves | None, list[str]]:
        """Return the content of the file, and its faults, in words."""
        faults = home.disk.size_faults(
            home.path(cls.names[0]), "priorities file", cls.nbytes(home.rows)
        )
        opened = None if faults else cls.open(home, write=False)
        if opened is None:
            return None, faults
        try:
            return opened.load()
        finally:
            opened.close()

    @classmethod
    def recover(cls, home: Home, head: int) -> list[str]:
        """Drop, durably, the priorities of rows from `head` on.

        Also drops those that the log has beyond its end, where it would grow into them. Does nothing if the file
        is missing or empty.
        """
        is_there = home.disk.is_file(home.path(cls.names[0]))
        opened = cls.open(home, write=True) if is_there else None
        if opened is None:
            return []
        try:
            leaves, faults = opened.load()
            if leaves is not None and (faults or opened._is_ragged or leaves.upto > head):
                leaves.upto = min(leaves.upto, head)
                opened.checkpoint(leaves)
            return faults if leaves is not None else []
        finally:
            opened.close()

    @classmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return the faults of the file, in words."""
        return cls._loaded(home)[1]

    @classmethod
    def mend(cls, home: Home, newest: Record | None) -> Mend | None:
        """Write the valid content as a new generation, if there is any."""
        if cls._loaded(home)[0] is None:
            return None
        return "write it again with what is whole in it", partial(cls._renew, home)

    @classmethod
    def _renew(cls, home: Home) -> None:
        opened = cls.open(home, write=True)
        assert opened is not None
        try:
            leaves = opened.load()[0]
            assert leaves is not None
            for _ in range(2):  # both headers, so that no damaged one is left
                opened.checkpoint(leaves)
        finally:
            opened.close()

    @classmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write the priorities of the copy's rows. `kept`: gives the `Leaves` of a buffer in RAM."""
        leaves: Leaves | None = kept and kept(state)
        if not source.disk.volatile:
            leaves = None
            for _ in range(_TRIES if cls.exists(source) else 0):
                leaves, faults = cls._loaded(source)
                if not faults:  # else its writer may be writing it just now
                    break
        if leaves is not None:
            cls.create(target, leaves.back_to(state.tail, state.head))

    def load(self) -> tuple[Leaves | None, list[str]]:
        """Return the content of the file, and its faults; None if nothing in it is valid.

        Cost: reads 4 bytes per row, and the log.
        """
        headers, faults = self._headers()
        newest = max((generation for generation, *_ in headers), default=0)
        logged = int.from_bytes(self._file.read(8, self._log + 8), "little")
        if newest < logged < _MOST:  # its header is damaged: the number must not be reused
            newest = logged
        found: Leaves | None = None
        for generation, upto, highest, leaves_sum in headers:
            data = self._file.read(self._rows * 4, self._area(generation))
            if len(data) == self._rows * 4 and xxhash.xxh3_64_intdigest(data) == leaves_sum:
                found = Leaves(np.frombuffer(data, np.float32).copy(), upto, highest)
                break
            faults.append(f"the leaves of generation {generation} are damaged")
        self._generation = newest
        if found is None:
            return None, faults or ["neither header is valid: damaged, or of another buffer"]
        self._generation = generation  # of the log, which a newer generation may not have begun
        faults += self._replay(found)
        self._generation = (
            newest + (newest - generation) % 2
        )  # the next generation is not written over these leaves
        return found, faults

    def _headers(self) -> tuple[list[tuple[int, int, float, int]], list[str]]:
        """Return the valid headers, newest first, and the faults of the others."""
        found, faults = [], []
        for slot in (0, 1):
            data = self._file.read(_HEADER.size + 8, slot * _SLOT)
            packed = data[:-8]
            if len(packed) == _HEADER.size and self._check(packed) == data[-8:]:
                magic, generation, rows, upto, highest, leaves_sum = _HEADER.unpack(packed)
                if magic == _MAGIC and rows == self._rows and generation % 2 == slot:
                    found.append((generation, upto, highest, leaves_sum))
                    continue
            if data.strip(b"\0"):
                faults.append(f"header {slot} is damaged")
        return sorted(found, reverse=True), faults

    def _replay(self, leaves: Leaves) -> list[str]:
        """Apply the frames of the log; report a damaged one."""
        log = self._file.read(self._stop - self._log, self._log)
        at, number = 0, 0
        while at + _FRAME.size <= len(log):
            check, generation, kind, count = _FRAME.unpack_from(log, at)
            if generation != self._generation:
                break
            size = _FRAME.size + (_RANGE.size if kind == _RANGES else count * 12)
            body = log[at + 8 : at + size]
            if (
                len(body) != size - 8
                or xxhash.xxh3_64_intdigest(body, seed=self._seed(at)) != check
            ):
                self._end, self._is_ragged = at, True
                return [f"frame {number} of the log is damaged: the updates from there on are lost"]
            if kind == _RANGES:
                start, stop, priority = _RANGE.unpack_from(log, at + _FRAME.size)
                leaves.put_range(start, stop, priority)
            else:
                positions = np.frombuffer(log, np.int64, count, at + _FRAME.size)
                priorities = np.frombuffer(log, np.float32, count, at + _FRAME.size + count * 8)
                slots = positions % self._rows
                leaves.values[slots] = priorities
                leaves.highest = max(leaves.highest, float(leaves.values[slots].max(initial=0)))
            at, number = at + _aligned(size), number + 1
        self._end = at
        behind = np.frombuffer(log, np.uint64, (len(log) - at) // 8, at)
        self._is_ragged = bool((behind == self._generation).any())  # a cut took a frame before
        return []

    def append_range(self, start: int, stop: int, priority: float) -> bool:
        """Store one priority for all positions `[start, stop)`; False if the log is full."""
        return self._append(_RANGES, 0, _RANGE.pack(start, stop, priority))

    def append_points(self, positions: Array, priorities: Array) -> bool:
        """Store priorities, float32, of positions, int64; False if the log is full."""
        return self._append(_POINTS, len(positions), positions.tobytes() + priorities.tobytes())

    def _append(self, kind: int, count: int, payload: bytes) -> bool:
        body = _FRAME.pack(0, self._generation, kind, count)[8:] + payload
        if self._end + 8 + len(body) > self._stop - self._log:
            return False
        check = xxhash.xxh3_64_intdigest(body, seed=self._seed(self._end))
        end = self._end + _aligned(8 + len(body))
        # Data of an earlier generation must not be taken for a frame: its positions are small numbers too.
        closed = body.ljust(end - self._end - 8 + min(_HEAD, self._stop - self._log - end), b"\0")
        self._file.write(check.to_bytes(8, "little") + closed, self._log + self._end)
        self._end = end
        return True

    def checkpoint(self, leaves: Leaves) -> None:
        """Write all leaves, durably, and begin a new log. O(rows): 4 bytes each, and a sync."""
        generation = self._generation + 1
        data = leaves.values.tobytes()
        self._file.write(data, self._area(generation))
        self._end = self._stop - self._log  # if this fails, no frame fits until it succeeds
        packed = _HEADER.pack(
            _MAGIC, generation, self._rows, leaves.upto, leaves.highest, xxhash.xxh3_64_intdigest(data)
        )  # fmt: skip
        self._file.write(packed + self._check(packed), generation % 2 * _SLOT)
        self._file.sync()
        self._generation, self._end, self._is_ragged = generation, 0, False

    def sync(self) -> None:
        """Return once all stored data are durable on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Release the file."""
        self._file = closed(self._file)

    def _area(self, generation: int) -> int:
        return 2 * _SLOT + generation % 2 * _paged(self._rows * 4)

    def _check(self, packed: bytes) -> bytes:
        return xxhash.xxh3_64_intdigest(self._uuid + packed).to_bytes(8, "little")

    def _seed(self, at: int) -> int:
        return xxhash.xxh3_64_intdigest(self._uuid + struct.pack("<QQ", self._generation, at))


def _places(rows: int) -> tuple[int, int]:
    """Return the start of the log, and the end of the file."""
    log = 2 * _SLOT + 2 * _paged(rows * 4)
    return log, log + _paged(max(_LOG_LEAST, rows * 4))


def _paged(nbytes: int) -> int:
    return -(-nbytes // _SLOT) * _SLOT


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
