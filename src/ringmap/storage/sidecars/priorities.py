"""Priorities of a buffer, in memory and in their file: a word for each row of the ring, and a log of changes.

    priorities.bin   [word of the highest][words][log: frame, frame, ...]
    word             priority float32, lap of its position, check
    frame            number of the log, highest priority, count, then
                     positions int64, priorities float32; or, of count 0, a range of positions and one priority

A change is one frame, so one `pwrite`. When the log is full, all words are written, and the next log begins over it. A
kill in between is no harm: the frames give the words what they have already.

Nothing is synced but by `sync`, after `write`: all words, and a new log. After a power cut no frame from before is
there, and each word is as of then or later: writes of words begin and end at multiples of 64 bytes, so none is torn.

Invariants: a word and a frame count with their checks, which cover the buffer's UUID, a word's the position.
A reader and a forked child write nothing.
Not here: the use of a priority (clips/samplers), which positions are live.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from ringmap.storage.disk.checksums import END, HEADER, FrameReader, framed
from ringmap.storage.disk.files import File, closed
from ringmap.storage.disk.paths import LOCK, PRIORITIES, UNFINISHED
from ringmap.storage.disk.system import clear_errors
from ringmap.storage.records.table import Record
from ringmap.storage.ring.arrays import highest, lowest
from ringmap.storage.ring.ring import Position, Ring
from ringmap.storage.sidecars.base import Copied, Home, Kept, Repair, Sidecar

__all__ = ["Leaves", "Points", "PriorityFile", "Range", "StoredPriorities"]

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")

_PAGE = 4096
_LOG_LEAST = 1 << 16
_WORDS = 64
"""Where the words of rows begin."""
_PIECE = 1 << 12
"""Words that are written at once: a multiple of 8."""
_FRAME = struct.Struct("<QdI")
_RANGE = struct.Struct("<qqd")
_NUMBER = slice(HEADER.size, HEADER.size + 8)
"""Where the number of its log stands in a frame."""
_FIRST_NBYTES = HEADER.size + _FRAME.size + _RANGE.size
"""Of the first frame of a log."""
_MOST = 1 << 48
_WAITS_S = 0.0, 0.0, 0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.016, 0.016
"""Before each try to read, if there is a writer."""
_LAPS = 1 << 16
_ODD, _MIX, _CHECK = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(0xFFFF << 48)
_USED = np.uint64(1 << 48)
"""Set in the check of each word, so that none is 0."""


@dataclass(slots=True)
class Leaves:
    """Priorities by slot: `values[position % rows]` is that of the newest position below `upto` in this slot.

    `values`: float32 `(rows,)`; `upto`: later positions have none yet; `highest`: of all priorities so far.
    """

    values: Array
    upto: int = 0
    highest: float = 1.0

    def back_to(self, tail: int, head: int) -> Leaves:
        """Return a copy that is valid for positions `[tail, head)`.

        Where positions from `head` on already have priorities, in slots of these, the highest priority replaces them.
        """
        values = self.values.copy()
        for position in range(tail, min(head, self.upto - len(values))):
            values[position % len(values)] = self.highest
        return Leaves(values, min(self.upto, head), self.highest)


class Points(NamedTuple):
    """A change: priorities, float32 `(B,)`, of positions, int64 `(B,)`, in these slots; of one that is named twice the
    last counts."""

    positions: Array
    priorities: Array
    slots: Array

    def encode(self) -> tuple[int, bytes]:
        """Return count and data of a frame."""
        return len(self.positions), self.positions.tobytes() + self.priorities.tobytes()

    def apply(self, leaves: Leaves) -> None:
        """Set these priorities."""
        if len(self.slots):
            leaves.values[self.slots] = self.priorities
            stored = leaves.values.take(self.slots)
            leaves.highest = max(leaves.highest, float(stored[stored.argmax()]))


class Range(NamedTuple):
    """A change: one priority for positions `[start, stop)`; `stop` is the first position without one."""

    start: int
    stop: int
    priority: float

    def encode(self) -> tuple[int, bytes]:
        """Return count and data of a frame."""
        return 0, _RANGE.pack(*self)

    def apply(self, leaves: Leaves) -> None:
        """Set this priority."""
        rows = len(leaves.values)
        start = max(self.start, self.stop - rows)
        if start < self.stop:
            for slot, count in Ring(rows, 0).pieces(Position(start), self.stop - start):
                leaves.values[slot : slot + count] = self.priority
        leaves.upto = max(leaves.upto, self.stop)


class PriorityFile(Sidecar):
    """The open file, of a ring of so many rows."""

    names = (PRIORITIES,)
    temporary = (PRIORITIES + UNFINISHED,)

    def __init__(self, file: File, uuid: bytes, rows: int) -> None:
        self._file, self._rows = file, rows
        self._tag = uuid + rows.to_bytes(8, "little")
        self._salt = np.uint64(xxhash.xxh3_64_intdigest(self._tag))
        self._begin, self._log_nbytes = _log_of(rows)
        self._number = 0
        """Of the log."""
        self._log_seed = 0
        self._end: tuple[int, int] | None = None
        """Bytes and frames of the log that count; None: all is written before the next change."""
        self._is_ahead = False
        """Whether what was loaded has priorities of rows that were lost."""

    @staticmethod
    def nbytes(rows: int) -> int:
        """Return the size of the file, which is sparse."""
        return sum(_log_of(rows))

    @classmethod
    def create(cls, home: Home, leaves: Leaves) -> None:
        """Make the file, whole or not at all, and sync its name."""
        disk, path, beside = home.disk, home.path(cls.names[0]), home.path(cls.temporary[0])
        disk.discard(beside)
        with closing(cls(disk.create(beside, cls.nbytes(home.rows)), home.uuid, home.rows)) as made:
            made.sync(leaves)
        disk.rename(beside, path)
        disk.sync_folder(home.folder)

    @classmethod
    def open(cls, home: Home, head: int, write: bool) -> tuple[PriorityFile | None, Leaves | None, list[str]]:
        """Return the open file and the priorities of positions below `head`, both None if nothing is valid; and the
        faults of the file, in words."""
        path = home.path(cls.names[0])
        if faults := home.disk.size_faults(path, "priorities file", cls.nbytes(home.rows)):
            return None, None, faults
        opened = cls(home.disk.open(path, write), home.uuid, home.rows)
        leaves, faults = opened.load(head)
        if leaves is None:
            opened.close()
        return (None if leaves is None else opened), leaves, faults

    @classmethod
    def _loaded(cls, home: Home, head: int) -> tuple[Leaves | None, list[str]]:
        opened, leaves, faults = cls.open(home, head, write=False)
        if opened is not None:
            opened.close()
        return leaves, faults

    @classmethod
    def recover(cls, home: Home, head: int) -> list[str]:
        """Drop, durably, the priorities of rows from `head` on. Does nothing if nothing in the file is valid."""
        if not home.disk.is_file(home.path(cls.names[0])):
            return []
        opened, leaves, faults = cls.open(home, head, write=True)
        if opened is None or leaves is None:
            return []
        with closing(opened):
            if faults or opened._is_ahead:
                opened.sync(leaves)
        return faults

    @classmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return the faults of the file, in words."""
        return cls._loaded(home, 0 if newest is None else newest.head)[1]

    @classmethod
    def repair(cls, home: Home, newest: Record | None) -> Repair | None:
        """Write the valid content again, if there is any."""
        head = 0 if newest is None else newest.head
        if cls._loaded(home, head)[0] is None:
            return None

        def write_again() -> None:
            cls.recover(home, head)

        return "write it again with what is whole in it", write_again

    @classmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write the priorities of the copy's rows. `kept`: gives the `Leaves` of a buffer in RAM."""
        leaves: Leaves | None = kept and kept(state)
        if not source.disk.volatile:
            leaves = cls._loaded(source, state.head)[0] if cls.exists(source) else None
        if leaves is not None:
            cls.create(target, leaves.back_to(state.tail, state.head))

    # -- reading -----------------------------------------------------------------------------

    def load(self, head: int) -> tuple[Leaves | None, list[str]]:
        """Return the priorities of positions below `head`, and the faults of the file; None if nothing is valid. Beside
        a writer they are those of one moment. One without has the highest. Cost: reads 8 bytes for each row, and the
        log.
        """
        lock = os.path.join(os.path.dirname(self._file.path), LOCK)
        for wait_s in _WAITS_S:
            if wait_s and self._file.disk.system.is_locked(lock):
                time.sleep(wait_s)
            begin = self._read_begin()
            leaves, faults = self._load(head, begin)
            if not faults and begin == self._read_begin():
                break  # else a writer has begun another log, or is in the middle of a write, and perhaps not scheduled
        return leaves, faults

    def _read_begin(self) -> bytes:
        return self._file.read(_NUMBER.stop, self._begin)

    def _load(self, head: int, begin: bytes) -> tuple[Leaves | None, list[str]]:
        leaves = Leaves(np.full(self._rows, np.nan, np.float32))
        self._is_ahead = False
        is_valid, faults = self._load_words(leaves, head)  # before the log, which is to be newer
        word = np.frombuffer(self._file.read(8, 0), "<u8")
        priority = float(word.astype("<u4").view("<f4")[0])
        if word == self._word_of_highest(priority):
            leaves.highest = priority
        elif word:
            faults.append("the word of the highest priority is damaged")
        number = int.from_bytes(begin[_NUMBER], "little")
        if self._frames(number, _PAGE).next(self._log_nbytes) is not None:
            self._replay(leaves, number, head, faults)
        elif not is_valid:
            return None, ["nothing in it is valid: damaged, or of another buffer"]
        elif any(begin):
            faults.append("frame 0 of the log is damaged: its updates are lost")
        unknown = np.isnan(leaves.values)
        known = np.roll(~unknown, -head)  # by position
        leaves.upto = head - int(known[::-1].argmax()) if known.any() else 0
        leaves.values[unknown] = leaves.highest
        return leaves, faults

    def _load_words(self, leaves: Leaves, head: int) -> tuple[bool, list[str]]:
        """Take the priorities that words have; return whether any word is valid, and the faults."""
        is_valid, damaged = False, 0
        for start in range(0, self._rows, _PIECE):
            slots, laps = _slots(self._rows, start, head)
            words = np.frombuffer(self._file.read(len(slots) * 8, _WORDS + start * 8), "<u8")
            bits = words.astype("<u4")
            good = words == self._words(bits, slots, laps)
            if not good.all():
                # Of the positions with its lap the closest one has the word.
                ahead = ((words >> 32).astype(np.int64) - laps + _LAPS // 2) % _LAPS - _LAPS // 2
                other = (words == self._words(bits, slots, laps + ahead)) & (words != 0)
                damaged += int(np.count_nonzero(~other & (words != 0)))
                self._is_ahead |= bool((other & (ahead > 0)).any())
                is_valid |= bool(other.any())
            good &= words != 0
            is_valid |= bool(good.any())
            leaves.values[start : start + len(words)][good] = bits.view("<f4")[good]
        return is_valid, [f"{damaged} words are damaged: these priorities are lost"] if damaged else []

    def _words(self, bits: Array, slots: Array, laps: Array) -> Array:
        """Return the words of priorities, given as integers of the same bits; 0 where the lap is negative."""
        words = bits.astype(np.uint64) | (laps & (_LAPS - 1)).astype(np.uint64) << 32
        mixed = (slots + laps * self._rows).view(np.uint64) * _ODD
        mixed += words
        mixed += self._salt
        mixed ^= mixed >> 29
        mixed *= _MIX
        mixed &= _CHECK
        mixed |= _USED
        words |= mixed
        if laps[-1] < 0:
            words[laps < 0] = 0
        return words

    def _word_of_highest(self, priority: float) -> Array:
        """Return the word of the highest priority, that of a slot behind all others."""
        return self._words(np.array([priority], "<f4").view("<u4"), np.array([self._rows]), np.array([0]))

    def _frames(self, number: int, chunk: int) -> FrameReader:
        stop = self._begin + self._log_nbytes
        return FrameReader(self._file, self._seed(number), self._begin, stop=stop, chunk=chunk)

    def _replay(self, leaves: Leaves, number: int, head: int, faults: list[str]) -> None:
        """Apply the frames of the log, of this number, to leaves of positions below `head`; note what is wrong with
        it."""
        frames, low = self._frames(number, self._log_nbytes), head - self._rows
        while (payload := frames.next(self._log_nbytes)) is not None:
            _, leaves.highest, count = _FRAME.unpack_from(payload)
            if count:
                positions = np.frombuffer(payload, np.int64, count, _FRAME.size)
                priorities = np.frombuffer(payload, np.float32, count, _FRAME.size + positions.nbytes)
                top = highest(positions)
                if top >= head or lowest(positions) < low:
                    self._is_ahead |= top >= head
                    last = np.unique(positions[::-1], return_index=True)[1]
                    leaves.highest = max(leaves.highest, float(priorities[::-1][last].max()))
                    kept = (positions >= low) & (positions < head)
                    positions, priorities = positions[kept], priorities[kept]
                Points(positions, priorities, positions % self._rows).apply(leaves)
            else:
                start, stop, priority = _RANGE.unpack_from(payload, _FRAME.size)
                Range(max(start, low), min(stop, head), priority).apply(leaves)
                self._is_ahead |= stop > head
        behind = self._file.read(_NUMBER.stop, frames.at)
        if frames.ending != END and behind[_NUMBER] == number.to_bytes(8, "little"):  # else it is of an earlier log
            faults.append(f"frame {frames.number} of the log is damaged: the updates from there on are lost")

    # -- writing -----------------------------------------------------------------------------

    def append(self, leaves: Leaves, change: Points | Range) -> None:
        """Store a change of `leaves`, which follows. If the disk fails, at most some of it is in the file.

        Cost: one write; O(rows) if the log is full, or it is the first one.
        """
        count, data = change.encode()
        nbytes = HEADER.size + _FRAME.size + len(data) + _NUMBER.stop
        if nbytes > self._log_nbytes - _FIRST_NBYTES:
            leaves = replace(leaves, values=leaves.values.copy())
            change.apply(leaves)
            self.write(leaves)
            return
        if self._end is None or self._end[0] + nbytes > self._begin + self._log_nbytes:
            self.write(leaves)
        self._write_frame(leaves, count, data)

    def write(self, leaves: Leaves) -> None:
        """Write all priorities, and begin a log. O(rows): 8 bytes each."""
        self._end = None  # if this fails, the next change begins here again
        self._file.write(self._word_of_highest(leaves.highest).tobytes().ljust(_WORDS, b"\0"), 0)
        for start in range(0, self._rows, _PIECE):
            self._write_words(leaves, start)
        before = int.from_bytes(self._read_begin()[_NUMBER], "little")
        self._number = 1 + (before if before < _MOST else 0)  # a damaged one must not be given again
        self._log_seed = self._seed(self._number)
        self._write_frame(leaves, *Range(0, 0, 0.0).encode())

    def _write_frame(self, leaves: Leaves, count: int, data: bytes) -> None:
        at, number = self._end or (self._begin, 0)
        frame = framed(_FRAME.pack(self._number, leaves.highest, count) + data, number, self._log_seed)
        # Zeros behind it: data of an earlier log must not be taken for a frame.
        self._file.write(frame + bytes(_NUMBER.stop), at)
        self._end = at + len(frame), number + 1

    def _write_words(self, leaves: Leaves, start: int) -> None:
        """Write a piece of the words, from slot `start` on."""
        slots, laps = _slots(self._rows, start, leaves.upto)
        stop = start + len(slots)
        if leaves.upto > start or self._file.next_data(_WORDS + start * 8) < _WORDS + stop * 8:
            data = self._words(leaves.values[start:stop].view("<u4"), slots, laps).astype("<u8").tobytes()
            self._file.write(data.ljust(-(-len(data) // 64) * 64, b"\0"), _WORDS + start * 8)

    def sync(self, leaves: Leaves) -> None:
        """Return once all priorities are durable on the disk. O(rows), if any changed since the last time. After an
        error the next call writes all again: a later sync alone would report success wrongly."""
        if self._end is None or self._end[1] > 1:
            self.write(leaves)
        try:
            self._file.sync()
        except OSError:
            self._end = None
            raise

    def close(self) -> None:
        """Release the file."""
        self._end, self._file = None, closed(self._file.path)

    def _seed(self, number: int) -> int:
        """Return the seed of a log: a frame of another one has no valid checksum."""
        return xxhash.xxh3_64_intdigest(self._tag + number.to_bytes(8, "little")) >> 1


def _log_of(rows: int) -> tuple[int, int]:
    """Return the byte at which the log begins, and its size."""
    return _paged(_WORDS + rows * 8), _paged(max(_LOG_LEAST, rows * 8))


def _paged(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _slots(rows: int, start: int, head: int) -> tuple[Array, Array]:
    """Return the slots of a piece, and the lap of the newest position below `head` in each, -1 for none."""
    lap, slot = divmod(head - 1, rows)
    slots = np.arange(start, min(start + _PIECE, rows))
    return slots, np.where(slots <= slot, lap, lap - 1)


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
    """Priorities of the rows of one buffer: `leaves`, which only `change` changes. `kept`: priorities that the caller
    has from before; `in_fork`: whether these are a parent process's, and newer than the stored ones."""

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
            with clear_errors("PrioritizedSampler", self._path, then="fix the disk, then draw again"):
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
        opened, found = None, None
        if PriorityFile.exists(home):
            opened, found, faults = PriorityFile.open(home, self._source.head, writes)
            for fault in faults:
                log.warning("%s: %s; run ringmap.check on the buffer", self._path, fault)
        if writes and opened is None:
            PriorityFile.create(home, Leaves(np.ones(home.rows, np.float32)))
            opened, found, _ = PriorityFile.open(home, 0, write=True)
        if writes:
            self.file = opened
        elif opened is not None:
            opened.close()
        return found

    def change(self, change: Points | Range) -> None:
        """Change priorities, in the file first. If the disk fails, nothing was changed."""
        if self.file is not None and self.writes:
            self._source.home.disk.check_held("PrioritizedSampler")
            then = (
                "no priority was changed here, and in the file at most these: free space or fix the disk, then call "
                "it again"
            )
            with clear_errors("PrioritizedSampler", self._path, then=then):
                self.file.append(self.leaves, change)
        change.apply(self.leaves)

    def rewrite(self) -> None:
        """Write all of `leaves`, which the caller changed, to the file. O(rows)."""
        if self.file is not None and self.writes:
            self.file.write(self.leaves)

    def sync(self) -> None:
        """Force the priorities to the disk; see `PriorityFile.sync`."""
        if self.file is not None and self.writes:
            then = "the newest priorities may not be on the disk: fix it, then call again"
            with clear_errors("PrioritizedSampler.flush", self._path, then=then):
                self.file.sync(self.leaves)

    def close(self) -> None:
        """Release the file; a parent process's file is not touched."""
        if self.file is not None and self._pid == os.getpid():
            self.file.close()
