"""The file of priorities: one float32 for each row of the ring, and a log of later changes.

    priorities.bin   [header 0, unsure][header 1][leaves 0][leaves 1][log 0: frame, frame, ...][log 1]

Generation g has header, leaves and log g % 2. An update is one frame at the end of the newest log, so always one
`pwrite`.
When that log is full, the next generation begins: its log continues the other one, and a helper writes its leaves and
then its header, beside later updates. Once these are durable, the log before is not needed any more.

    frame   check, generation, kind, count, then   POINTS: positions int64, priorities float32
                                                   RANGE:  first and last position + 1, one priority
                                                   TURN:   the end of the log that this one continues

The helper reads leaves that later updates change. That is no harm: all of these are in the log of its generation, which
is applied to them, and each frame says what a priority is, not how it changes.

Leaf `position % rows` belongs to the newest position below `upto` in this slot: later positions
have no priority yet, whatever an earlier lap left there.

Invariants: a header counts with its checksum, which covers the buffer's UUID and the leaves;
a frame counts with its checksum, its generation and its place, after all frames before it, those of the log that its
own continues included; after a power cut each priority is as of the last `sync` or later, and belongs to its own row.

A failed sync leaves pages that count as clean and are not on the disk, and no later sync tells. So the byte `unsure` is
1 from before a sync until it has succeeded, and from a failed one until all is in a new generation. Who opens the file
for writing and finds it first writes all of its bytes again.
Not here: the use of a priority (clips/samplers), which positions are live.
"""

from __future__ import annotations

import logging
import struct
import threading
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from ringmap.storage.disk.files import File, closed
from ringmap.storage.disk.paths import PRIORITIES, UNFINISHED
from ringmap.storage.disk.threads import Begun, begin
from ringmap.storage.records.table import Record
from ringmap.storage.sidecars.base import Copied, Home, Kept, Mend, Sidecar

__all__ = ["Leaves", "PriorityFile"]

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")

_MAGIC = b"RINGMAPP"
_HEADER = struct.Struct("<8sQQqdQ")
_SLOT = 4096
_UNSURE = _HEADER.size + 8
"""The place of the byte `unsure`: behind header 0."""
_FRAME = struct.Struct("<QQII")
_RANGE = struct.Struct("<qqd")
_TURN = struct.Struct("<Q")
_HEAD = 16
"""Bytes of a frame up to the end of its generation; zeros there end the log."""
_POINTS, _RANGES, _TURNS = 1, 2, 3
_FULL = 1 << 62
"""As the end of a log: no frame fits."""
_PIECE = 1 << 16
"""Leaves that the helper writes at once."""
_RENEWED = 1 << 20
"""Bytes that are written over themselves at once."""
_LOG_LEAST = 1 << 18
_MOST = 1 << 48
_NONE = -1
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

    names = (PRIORITIES,)
    temporary = (PRIORITIES + UNFINISHED,)

    def __init__(self, file: File, uuid: bytes, rows: int) -> None:
        self.path = file.path
        self._file = file
        self._uuid = uuid
        self._rows = rows
        self._place = 0, 0
        """The generation of the newest log, and the end of that log."""
        self._based = 0
        """The newest generation whose leaves and header are durable: that of the log, or the one before."""
        self._helper: Begun[None] | None = None
        self._wanted = _NONE
        """The generation whose leaves a helper may write."""
        self._writing = threading.RLock()
        self._is_ragged = False
        self.is_unsure = False
        """Whether a sync failed, and not all was written again since."""
        self._syncing = threading.RLock()

    @staticmethod
    def nbytes(rows: int) -> int:
        """Return the size of the file; it is sparse, and takes up about two thirds of this."""
        return _logs(rows)[2]

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
        opened = cls(home.disk.open(path, write), home.uuid, home.rows)
        if write:  # a kill may have left what no sync covers yet: nothing may rest on it before
            try:
                opened._renew_bytes()
                opened._sync()
            except BaseException:
                opened.close()
                raise
        return opened

    @classmethod
    def _loaded(cls, home: Home) -> tuple[Leaves | None, list[str]]:
        """Return the content of the file, and its faults, in words."""
        faults = home.disk.size_faults(home.path(cls.names[0]), "priorities file", cls.nbytes(home.rows))
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
            leaves = cls._loaded(source)[0] if cls.exists(source) else None
        if leaves is not None:
            cls.create(target, leaves.back_to(state.tail, state.head))

    def load(self) -> tuple[Leaves | None, list[str]]:
        """Return the content of the file, and its faults; None if nothing in it is valid.

        Beside a writer it is that of one moment. Cost: reads 4 bytes per row, and the log.
        """
        for _ in range(_TRIES):
            heads = self._heads()
            leaves, faults = self._load(heads)
            if not faults and heads == self._heads():
                break  # else a writer may have turned, or may be writing just now what was read
        return leaves, faults

    def _heads(self) -> list[bytes]:
        """Return what begins both headers and both logs."""
        headers = [self._file.read(_HEADER.size + 8, slot * _SLOT) for slot in (0, 1)]
        return headers + [self._file.read(16, at) for at in _logs(self._rows)[:2]]

    def _load(self, heads: list[bytes]) -> tuple[Leaves | None, list[str]]:
        self._is_ragged = False
        headers, faults = self._headers(heads[:2])
        logs = [head[8:] for head in heads[2:]]
        numbers = [generation for generation, *_ in headers]
        numbers += [n for n in (int.from_bytes(head, "little") for head in logs) if n < _MOST]
        newest = max(numbers, default=0)  # a header may be damaged: its number must not be used again
        found: Leaves | None = None
        for generation, upto, highest, leaves_sum in headers:
            data = self._file.read(self._rows * 4, self._area(generation))
            if len(data) == self._rows * 4 and xxhash.xxh3_64_intdigest(data) == leaves_sum:
                found = Leaves(np.frombuffer(data, np.float32).copy(), upto, highest)
                break
            faults.append(f"the leaves of generation {generation} are damaged")
        if found is None:
            self._place, self._based = (newest, _FULL), newest
            return None, faults or ["neither header is valid: damaged, or of another buffer"]
        end, wrong = self._replay(found, generation, None)
        self._place, self._based = (generation, end), generation
        if not wrong and logs[(generation + 1) % 2] == (generation + 1).to_bytes(8, "little"):
            end, wrong = self._replay(found, generation + 1, end)
            self._place = generation + 1, end
        faults += wrong
        if (
            faults or self._is_ragged
        ):  # what is written next is neither over these leaves nor with a number that was used
            self._based = newest + (newest - generation) % 2
            self._place = self._based, _FULL
        return found, faults

    def _headers(self, heads: list[bytes]) -> tuple[list[tuple[int, int, float, int]], list[str]]:
        """Return the valid headers, newest first, and the faults of the others."""
        found, faults = [], []
        for slot, data in enumerate(heads):
            packed = data[:-8]
            if len(packed) == _HEADER.size and self._check(packed) == data[-8:]:
                magic, generation, rows, upto, highest, leaves_sum = _HEADER.unpack(packed)
                if magic == _MAGIC and rows == self._rows and generation % 2 == slot:
                    found.append((generation, upto, highest, leaves_sum))
                    continue
            if data.strip(b"\0"):
                faults.append(f"header {slot} is damaged")
        return sorted(found, reverse=True), faults

    def _replay(self, leaves: Leaves, current: int, before: int | None) -> tuple[int, list[str]]:
        """Apply the frames of the log of a generation; return its end, and what is wrong with it.

        Args:
            leaves: changed by the frames.
            current: the generation.
            before: the end of the log that this one continues; None: it continues none, or leaves that have it.
        """
        start, size = self._log(current)
        log = self._file.read(size, start)
        at, number = 0, 0
        while at + _FRAME.size <= len(log):
            check, generation, kind, count = _FRAME.unpack_from(log, at)
            if generation != current:
                break
            size = _FRAME.size + _SIZES.get(kind, count * 12)
            body = log[at + 8 : at + size]
            if len(body) != size - 8 or xxhash.xxh3_64_intdigest(body, seed=self._seed(current, at)) != check:
                self._is_ragged = True
                return at, [f"frame {number} of log {current % 2} is damaged: the updates from there on are lost"]
            if kind == _TURNS:
                if before not in (None, *_TURN.unpack_from(log, at + _FRAME.size)):
                    self._is_ragged = True
                    return at, [f"log {(current + 1) % 2} has lost its end: the updates from there on are lost"]
            elif kind == _RANGES:
                leaves.put_range(*_RANGE.unpack_from(log, at + _FRAME.size))
            else:
                positions = np.frombuffer(log, np.int64, count, at + _FRAME.size)
                priorities = np.frombuffer(log, np.float32, count, at + _FRAME.size + count * 8)
                slots = positions % self._rows
                leaves.values[slots] = priorities
                leaves.highest = max(leaves.highest, float(leaves.values[slots].max(initial=0)))
            at, number = at + _aligned(size), number + 1
        behind = np.frombuffer(log, np.uint64, (len(log) - at) // 8, at)
        self._is_ragged |= bool((behind == current).any())  # a cut took a frame before
        return at, []

    def append_range(self, start: int, stop: int, priority: float) -> bool:
        """Store one priority for all positions `[start, stop)`; False if the log is full."""
        return self._append(_RANGES, 0, _RANGE.pack(start, stop, priority))

    def append_points(self, positions: Array, priorities: Array) -> bool:
        """Store priorities, float32, of positions, int64; False if the log is full."""
        return self._append(_POINTS, len(positions), positions.tobytes() + priorities.tobytes())

    def _append(self, kind: int, count: int, payload: bytes) -> bool:
        generation, end = self._place
        after = self._put_frame(generation, end, kind, count, payload)
        if after is None:
            return False
        self._place = generation, after
        return True

    def _put_frame(self, generation: int, at: int, kind: int, count: int, payload: bytes) -> int | None:
        """Write a frame into a log; return the end of the log then, None if the frame does not fit."""
        start, size = self._log(generation)
        body = _FRAME.pack(0, generation, kind, count)[8:] + payload
        if at + 8 + len(body) > size:
            return None
        check = xxhash.xxh3_64_intdigest(body, seed=self._seed(generation, at))
        end = at + _aligned(8 + len(body))
        # Data of an earlier generation must not be taken for a frame: its positions are small numbers too.
        closed = body.ljust(end - at - 8 + min(_HEAD, size - end), b"\0")
        self._file.write(check.to_bytes(8, "little") + closed, start + at)
        return end

    def turn(self, leaves: Leaves) -> None:
        """Begin the next log, once a frame did not fit. A helper writes `leaves` meanwhile; or they are written now, if
        it failed before, or found no time.

        Cost: one write, if the helper of the last turn has ended.
        """
        self._wait()
        generation, end = self._place
        if end == _FULL or self._based != generation or self.is_unsure:
            self.checkpoint(leaves)
            return
        number = generation + 1
        self._place = generation, _FULL  # the next log may have begun: nothing follows in this one
        after = self._put_frame(number, 0, _TURNS, 0, _TURN.pack(end))
        assert after is not None
        self._place, self._wanted = (number, after), number
        work = partial(self._help, number, leaves, leaves.upto, leaves.highest)
        self._helper = begin(work)

    def _help(self, generation: int, leaves: Leaves, upto: int, highest: float) -> None:
        """Write leaves, in a helper, unless a checkpoint came first: a turn that was interrupted knows of no helper."""
        with self._writing:
            if self._wanted == generation:
                try:
                    self._write_leaves(generation, leaves, upto, highest)
                except (OSError, MemoryError) as error:
                    log.warning("%s: the priorities are written again: %r", self.path, error)

    def _wait(self) -> None:
        """Return once no helper writes; what none has begun is left to a checkpoint."""
        if self._helper is not None:
            self._helper.drop()
            self._helper = None  # not before: an interrupted wait must not leave one that writes

    def checkpoint(self, leaves: Leaves) -> None:
        """Write all leaves, durably, and begin a new log. O(rows): 4 bytes each, and a sync."""
        self._wait()
        with self._writing:
            self._wanted = _NONE
            generation, based = self._place[0], self._based
            number = max(generation, based) + 1
            number += (number - based + 1) % 2  # not over the leaves that count
            self._place = generation, _FULL  # if this fails, no frame fits until it succeeds
            self._write_leaves(number, leaves, leaves.upto, leaves.highest, is_all=True)
            self._place, self._is_ragged = (number, 0), False

    def _write_leaves(self, generation: int, leaves: Leaves, upto: int, highest: float, is_all: bool = False) -> None:
        """Write the leaves and the header of a generation, durably. `is_all`: whether its log is empty."""
        area, hashed = self._area(generation), xxhash.xxh3_64()
        for at in range(0, self._rows, _PIECE):
            data = leaves.values[at : at + _PIECE].tobytes()
            hashed.update(data)
            self._file.write(data, area + at * 4)
        packed = _HEADER.pack(_MAGIC, generation, self._rows, upto, highest, hashed.intdigest())
        self._file.write(packed + self._check(packed), generation % 2 * _SLOT)
        self._sync(is_all)
        self._based = generation

    def sync(self) -> None:
        """Return once what was written since the last sync is durable on the disk. After a failed one that is not all;
        see `keep`."""
        self._sync()

    def keep(self, leaves: Leaves) -> None:
        """Return once all stored data are durable on the disk; `leaves` are these, and written again if a sync failed
        before."""
        if self.is_unsure:
            self.checkpoint(leaves)
        else:
            self._sync()

    def _sync(self, is_all: bool = False) -> None:
        """Sync the file. `is_all`: whether nothing else in it counts than what was written since the last sync."""
        with self._syncing:
            before, self.is_unsure = self.is_unsure, True
            self._file.write(b"\1", _UNSURE)
            self._file.sync()
            if is_all or not before:
                self._file.write(b"\0", _UNSURE)
                self.is_unsure = False

    def _renew_bytes(self) -> None:
        """Write what the file holds over itself, if a sync may have failed: so that the next one makes it durable."""
        if self._file.read(1, _UNSURE) == b"\0":
            return
        at, stop = self._file.next_data(0), self.nbytes(self._rows)
        while at < stop:
            data = self._file.read(_RENEWED, at)
            self._file.write(data, at)
            at = self._file.next_data(at + len(data))

    def close(self) -> None:
        """Release the file; what a helper has begun is ended first."""
        self._wait()
        with self._writing:
            self._wanted, self._file = _NONE, closed(self._file)

    def _area(self, generation: int) -> int:
        return 2 * _SLOT + generation % 2 * _paged(self._rows * 4)

    def _check(self, packed: bytes) -> bytes:
        return xxhash.xxh3_64_intdigest(self._uuid + packed).to_bytes(8, "little")

    def _log(self, generation: int) -> tuple[int, int]:
        """Return the start of a generation's log, and its size."""
        logs = _logs(self._rows)
        return logs[generation % 2], logs[1] - logs[0]

    def _seed(self, generation: int, at: int) -> int:
        return xxhash.xxh3_64_intdigest(self._uuid + struct.pack("<QQ", generation, at))


_SIZES = {_RANGES: _RANGE.size, _TURNS: _TURN.size}
"""Bytes of a frame behind its head, where its kind says it."""


def _logs(rows: int) -> tuple[int, int, int]:
    """Return the starts of both logs, and the end of the file."""
    first, size = 2 * _SLOT + 2 * _paged(rows * 4), _paged(max(_LOG_LEAST, rows * 4))
    return first, first + size, first + 2 * size


def _paged(nbytes: int) -> int:
    return -(-nbytes // _SLOT) * _SLOT


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
