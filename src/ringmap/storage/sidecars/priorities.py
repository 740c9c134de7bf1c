"""Priorities of a buffer, in memory and in their file: a float32 for each row of the ring, and a log of changes.

    priorities.bin   [header 0, unsure][header 1][leaves 0][leaves 1][log 0: frame, frame, ...][log 1]

Generation g has header, leaves and log g % 2. An update is one frame at the end of the newest log, so always one
`pwrite`.
When that log is full, the next generation begins: its log continues the other one, and a helper writes its leaves and
then its header, beside later updates. Once these are durable, the log before is not needed any more.

    frame   generation, kind, count, then   POINTS: positions int64, priorities float32
                                            RANGE:  first and last position + 1, one priority
                                            TURN:   the end of the log that this one continues

The helper reads leaves that later updates change. That is no harm: all of these are in the log of its generation, which
is applied to them, and each frame says what a priority is, not how it changes.

Leaf `position % rows` belongs to the newest position below `upto` in this slot: later positions
have no priority yet, whatever an earlier lap left there.

Invariants: a header counts with its checksum, which covers the buffer's UUID and the leaves;
a frame counts after all frames before it, those of the log that its own continues included; after a power cut each
priority is as of the last `sync` or later, and belongs to its own row.

A failed sync leaves pages that count as clean and are not on the disk, and no later sync tells. So the byte `unsure` is
1 from before a sync until it has succeeded, and from a failed one until all is in a new generation. Who opens the file
for writing and finds it first writes all of its bytes again.
A reader and a forked child write nothing.
Not here: the use of a priority (clips/samplers), which positions are live.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from ringmap.storage.disk.files import File, closed
from ringmap.storage.disk.frames import END, HEADER, FrameReader, FrameWriter
from ringmap.storage.disk.paths import PRIORITIES, UNFINISHED
from ringmap.storage.disk.process import Begun, begin
from ringmap.storage.disk.system import clear_errors
from ringmap.storage.disk.two_slots import SLOT_NBYTES, TwoSlots
from ringmap.storage.records.table import Record
from ringmap.storage.sidecars.base import Copied, Home, Kept, Mend, Sidecar

__all__ = ["Leaves", "PriorityFile", "StoredPriorities"]

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")

_PAGE = 4096
_UNSURE = 64
"""The place of the byte `unsure`: behind header 0."""
_FRAME = struct.Struct("<QII")
_RANGE = struct.Struct("<qqd")
_TURN = struct.Struct("<Q")
_POINTS, _RANGES, _TURNS = 1, 2, 3
_GENERATION = slice(HEADER.size, HEADER.size + 8)
"""Where the generation stands in a frame."""
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


class _Header(NamedTuple):
    """What a generation has, besides its leaves and its log; `leaves_sum`: the checksum of the leaves."""

    generation: int
    upto: int
    highest: float
    leaves_sum: int


class _Headers(TwoSlots[_Header]):
    magic = b"RINGMAPP"
    form = struct.Struct("<8sQqdQ")
    decode = _Header


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
        self._salt = uuid + rows.to_bytes(8, "little")
        self._headers = _Headers(file, self._salt)
        self._rows = rows
        self._logs, self._log_nbytes = _logs(rows)[:2], _log_nbytes(rows)
        self._newest: tuple[int, FrameWriter | None] = 0, None
        """The generation of the newest log, and what writes it; None: no frame fits."""
        self._based = 0
        """The newest generation whose leaves and header are durable: that of the log, or the one before."""
        self._helper: Begun[None] | None = None
        self._wanted = _NONE
        """The generation whose leaves a helper may write."""
        self._writing = threading.Lock()
        self._is_ragged = False
        self.is_unsure = False
        """Whether a sync failed, and not all was written again since."""
        self._syncing = threading.Lock()

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

    def _heads(self) -> tuple[bytes, list[bytes]]:
        """Return both headers, and what begins both logs."""
        return self._headers.data(), [self._file.read(_GENERATION.stop, at) for at in self._logs]

    def _load(self, heads: tuple[bytes, list[bytes]]) -> tuple[Leaves | None, list[str]]:
        self._is_ragged = False
        slots = self._headers.slots_in(heads[0])
        faults = [
            f"header {slot} is damaged"
            for slot, header in enumerate(slots)
            if header is None and heads[0][slot * SLOT_NBYTES :][: _Headers.form.size].strip(b"\0")
        ]
        headers = sorted(filter(None, slots), reverse=True)
        logs = [int.from_bytes(head[_GENERATION], "little") for head in heads[1]]
        # A header may be damaged: its number must not be used again.
        newest = max([0, *(one.generation for one in headers), *(n for n in logs if n < _MOST)])
        for header in headers:
            data = self._file.read(self._rows * 4, self._area(header.generation))
            if len(data) == self._rows * 4 and xxhash.xxh3_64_intdigest(data) == header.leaves_sum:
                break
            faults.append(f"the leaves of generation {header.generation} are damaged")
        else:
            self._newest, self._based = (newest, None), newest
            return None, faults or ["neither header is valid: damaged, or of another buffer"]
        leaves = Leaves(np.frombuffer(data, np.float32).copy(), header.upto, header.highest)
        generation = self._based = header.generation
        log, wrong = self._replay(leaves, generation, None)
        self._newest = generation, log
        if not wrong and logs[(generation + 1) % 2] == generation + 1:
            log, wrong = self._replay(leaves, generation + 1, log.end[0])
            self._newest = generation + 1, log
        faults += wrong
        if faults or self._is_ragged:
            # What is written next is neither over these leaves nor with a number that was used.
            self._based = newest + (newest - generation) % 2
            self._newest = self._based, None
        return leaves, faults

    def _replay(self, leaves: Leaves, current: int, before: int | None) -> tuple[FrameWriter, list[str]]:
        """Apply the frames of the log of a generation; return what goes on there, and what is wrong with it.

        Args:
            leaves: changed by the frames.
            current: the generation.
            before: the end of the log that this one continues; None: it continues none, or leaves that have it.
        """
        start = self._logs[current % 2]
        stop, faults = start + self._log_nbytes, list[str]()
        frames = FrameReader(self._file, self._seed(current), start, stop=stop, chunk=self._log_nbytes)
        end = start, 0
        while not faults and (payload := frames.next(self._log_nbytes)) is not None:
            _, kind, count = _FRAME.unpack_from(payload)
            if kind == _TURNS:
                if before not in (None, *_TURN.unpack_from(payload, _FRAME.size)):
                    faults = [f"log {(current + 1) % 2} has lost its end: the updates from there on are lost"]
                    continue
            elif kind == _RANGES:
                leaves.put_range(*_RANGE.unpack_from(payload, _FRAME.size))
            else:
                positions = np.frombuffer(payload, np.int64, count, _FRAME.size)
                slots = positions % self._rows
                leaves.values[slots] = np.frombuffer(payload, np.float32, count, _FRAME.size + positions.nbytes)
                leaves.highest = max(leaves.highest, float(leaves.values[slots].max(initial=0)))
            end = frames.at, frames.number
        behind, number = self._file.read(stop - frames.at, frames.at), current.to_bytes(8, "little")
        if not faults and frames.ending != END and behind[_GENERATION] == number:  # else it is of an earlier generation
            faults = [f"frame {frames.number} of log {current % 2} is damaged: the updates from there on are lost"]
        self._is_ragged |= bool(faults) or number in behind  # a cut took a frame before
        return self._log_from(current, *end), faults

    def _log_from(self, generation: int, at: int, number: int = 0) -> FrameWriter:
        """Return what writes the log of a generation, from a frame on. Behind each frame are zeros: data of an earlier
        generation must not be taken for a frame, and its positions are small numbers too."""
        return FrameWriter(self._file, self._seed(generation), at, number, zeros=_GENERATION.stop)

    def append_range(self, start: int, stop: int, priority: float) -> bool:
        """Store one priority for all positions `[start, stop)`; False if the log is full."""
        return self._append(_RANGES, 0, _RANGE.pack(start, stop, priority))

    def append_points(self, positions: Array, priorities: Array) -> bool:
        """Store priorities, float32, of positions, int64; False if the log is full."""
        return self._append(_POINTS, len(positions), positions.tobytes() + priorities.tobytes())

    def _append(self, kind: int, count: int, payload: bytes) -> bool:
        generation, log = self._newest
        needed = HEADER.size + _FRAME.size + len(payload) + _GENERATION.stop
        if log is None or log.end[0] + needed > self._logs[generation % 2] + self._log_nbytes:
            return False
        log.write(_FRAME.pack(generation, kind, count) + payload)
        return True

    def turn(self, leaves: Leaves) -> None:
        """Begin the next log, once a frame did not fit. A helper writes `leaves` meanwhile; or they are written now, if
        it failed before, or found no time.

        Cost: one write, if the helper of the last turn has ended.
        """
        self._wait()
        generation, log = self._newest
        if log is None or self._based != generation or self.is_unsure:
            self.checkpoint(leaves)
            return
        number = generation + 1
        self._newest = generation, None  # the next log may have begun: nothing follows in this one
        following = self._log_from(number, self._logs[number % 2])
        following.write(_FRAME.pack(number, _TURNS, 0) + _TURN.pack(log.end[0]))
        self._newest, self._wanted = (number, following), number
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
            generation, based = self._newest[0], self._based
            number = max(generation, based) + 1
            number += (number - based + 1) % 2  # not over the leaves that count
            self._newest = generation, None  # if this fails, no frame fits until it succeeds
            self._write_leaves(number, leaves, leaves.upto, leaves.highest, is_all=True)
            self._newest, self._is_ragged = (number, self._log_from(number, self._logs[number % 2])), False

    def _write_leaves(self, generation: int, leaves: Leaves, upto: int, highest: float, is_all: bool = False) -> None:
        """Write the leaves and the header of a generation, durably. `is_all`: whether its log is empty."""
        area, hashed = self._area(generation), xxhash.xxh3_64()
        for at in range(0, self._rows, _PIECE):
            data = leaves.values[at : at + _PIECE].tobytes()
            hashed.update(data)
            self._file.write(data, area + at * 4)
        self._headers.write(_Header(generation, upto, highest, hashed.intdigest()))
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
            self._wanted, self._newest, self._file = _NONE, (self._newest[0], None), closed(self._file.path)
            self._headers.close()

    def _area(self, generation: int) -> int:
        return 2 * SLOT_NBYTES + generation % 2 * _paged(self._rows * 4)

    def _seed(self, generation: int) -> int:
        """Return the seed of a log: a frame of another one has no valid checksum."""
        return xxhash.xxh3_64_intdigest(self._salt + generation.to_bytes(8, "little")) >> 1


def _log_nbytes(rows: int) -> int:
    return _paged(max(_LOG_LEAST, rows * 4))


def _logs(rows: int) -> tuple[int, int, int]:
    """Return the starts of both logs, and the end of the file."""
    first, size = 2 * SLOT_NBYTES + 2 * _paged(rows * 4), _log_nbytes(rows)
    return first, first + size, first + 2 * size


def _paged(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class Opened(Protocol):
    """An open buffer, as far as its priorities need it. `head`: one past its newest position."""

    @property
    def home(self) -> Home: ...
    @property
    def head(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...


class StoredPriorities:
    """Priorities of the rows of one buffer.

    Args:
        source: the buffer.
        kept: priorities that the caller has from before.
        in_fork: whether these are a parent process's, and newer than the stored ones.

    Attributes:
        leaves: the priorities; only `change` changes them.

    Raises:
        EnvironmentFault: the disk fails.
    """

    def __init__(self, source: Opened, kept: Leaves | None, in_fork: bool = False) -> None:
        self._source = source
        self._path = source.home.path(PriorityFile.names[0])
        self._pid = os.getpid()
        self.file: PriorityFile | None = None
        rows, volatile = source.home.rows, source.home.disk.volatile
        if kept is not None and len(kept.values) != rows:
            kept = None
        if kept is not None and volatile:
            kept.upto = min(kept.upto, source.head)
        if not volatile:
            with clear_errors("PrioritizedSampler", self._path, then="mend the disk, then draw again"):
                stored = self._open()
            kept = kept if in_fork and kept is not None else stored
        self.leaves = kept or Leaves(np.ones(rows, np.float32))

    @property
    def writes(self) -> bool:
        """Whether changes go to the file."""
        source = self._source
        return source.writable and self._pid == os.getpid() and source.is_open

    def _open(self) -> Leaves | None:
        """Open or make the file, and return its content."""
        home, writes = self._source.home, self.writes
        found: Leaves | None = None
        opened, faults = None, list[str]()
        if PriorityFile.exists(home):
            opened = PriorityFile.open(home, writes)
            found, faults = opened.load() if opened else (None, ["has the size of no such file"])
        for fault in faults:
            log.warning("%s: %s; run ringmap.check on the buffer", self._path, fault)
        if writes and opened is not None and found is not None:
            if faults:
                opened.checkpoint(found)
            self.file = opened
            return found
        if opened is not None:
            opened.close()
        if writes:
            found = Leaves(np.ones(home.rows, np.float32))
            PriorityFile.create(home, found)
            self.file = PriorityFile.open(home, write=True)
            assert self.file is not None
            self.file.load()
        elif found is not None:  # a power cut may have removed the rows beyond
            found.upto = min(found.upto, self._source.head)
        return found

    def change(self, append: Callable[[PriorityFile], bool], change: Callable[[Leaves], None]) -> None:
        """Change priorities, in the file first: by a frame of its log.

        Raises:
            EnvironmentFault: the disk is full or fails. Nothing was changed.
        """
        file, leaves = self.file, self.leaves
        if file is not None and self.writes:
            self._source.home.disk.check_held("PrioritizedSampler")
            then = (
                "no priority was changed here, and in the file at most these: free space or mend the disk, then call "
                "it again"
            )
            with clear_errors("PrioritizedSampler", self._path, then=then):
                if not append(file):
                    file.turn(leaves)
                    if not append(file):  # a frame is longer than a log
                        changed = replace(leaves, values=leaves.values.copy())
                        change(changed)
                        file.checkpoint(changed)
        change(leaves)

    def rewrite(self) -> None:
        """Write all of `leaves`, which the caller changed, to the file. O(rows)."""
        if self.file is not None and self.writes:
            self.file.checkpoint(self.leaves)

    def sync(self) -> None:
        """Force the priorities to the disk.

        Raises:
            EnvironmentFault: the disk fails. The next call first writes them all again.
        """
        if self.file is None or not self.writes:
            return
        then = "the newest priorities may not be on the disk: mend it, then call it again"
        with clear_errors("PrioritizedSampler.flush", self._path, then=then):
            self.file.keep(self.leaves)

    def close(self) -> None:
        """Release the file; a parent process's file is not touched."""
        if self.file is not None and self._pid == os.getpid():
            self.file.close()
