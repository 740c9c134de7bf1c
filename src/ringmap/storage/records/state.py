"""The state file: the newest committed state, for readers, in two slots written in turn.

    state.bin   [slot 0: generation 6][slot 1: generation 7]     4096 bytes each

A slot that is being written fails its checksum; the other one is whole. A look
counts only if both are valid. If one is torn, the writer may finish it and write the other while that one is read: the
state read would be two behind, and would hide an eviction.

Invariants: generation g is in slot g % 2; generations differ by 1; only the holder of
the writer's lock writes.
Not here: the meaning of the state for recovery (recovery.py).
"""

from __future__ import annotations

import struct
import time
from contextlib import closing
from dataclasses import dataclass, replace

import xxhash

from ringmap.errors import CorruptError
from ringmap.storage.disk.files import Disk, File, closed
from ringmap.storage.disk.room import Room
from ringmap.storage.records.table import MOST
from ringmap.storage.ring.integers import ORIGIN, Position

__all__ = ["GENERATION", "NO_BOOT", "SLOT", "SLOT_NBYTES", "State", "StateFile"]

SLOT_NBYTES = 4096
"""Size of a slot."""
SLOT = struct.Struct("<8sQQQqqQQ16s")
"""A state in its slot, without its checksum."""
_MAGIC = b"RINGMAPS"
NO_BOOT = bytes(16)
"""The boot id of a state that is not trusted for any boot."""

GENERATION = 1
"""The place of the generation in a slot, in words of 8 bytes."""

_LOOKS = 2000


@dataclass(slots=True, unsafe_hash=True)
class State:
    """A committed state. Immutable by agreement: a frozen dataclass takes four times as long to make.

    `seq, first, tail, head` as in the newest record; `mark`: every episode up to this record is
    durable, with its rows; `era`: number of openings and recoveries by a writer; `boot`: the
    boot during which the page cache can be trusted.
    """

    generation: int = 0
    seq: int = 0
    first: int = 1
    tail: Position = ORIGIN
    head: Position = ORIGIN
    mark: int = 0
    era: int = 0
    boot: bytes = NO_BOOT

    @property
    def is_possible(self) -> bool:
        """Whether a writer could have shown this: a forged state may have a valid checksum."""
        return (
            max(self.generation, self.seq, self.mark, self.era, self.head) < MOST
            and 1 <= self.first <= self.seq + 1
            and 0 <= self.tail <= self.head
        )


class StateFile:
    """The file of states.

    Args:
        file: the open file.
        salt: the buffer's uuid, so that a foreign file has no valid slot.
        mapped: whether `glance` may read a map.
    """

    def __init__(self, file: File, salt: bytes, mapped: bool = False) -> None:
        self.path = file.path
        self._file = file
        self._salt = salt
        self._words: memoryview | None = None
        if mapped:
            self._words = file.map().data.cast("Q")

    nbytes = 2 * SLOT_NBYTES

    @classmethod
    def create(cls, disk: Disk, path: str, salt: bytes) -> None:
        """Make the file with two valid slots of the empty state, and sync it."""
        with closing(disk.create(path, cls.nbytes)) as file:
            made = cls(file, salt)
            made.write(State(generation=0))
            made.write(State(generation=1))
            file.sync()

    @classmethod
    def open(cls, disk: Disk, path: str, salt: bytes, write: bool, mapped: bool = False) -> StateFile:
        """Open the file after comparing its size with the expected one."""
        for fault in cls.faults(disk, path):
            raise CorruptError(f"{path}: {fault}; run ringmap.check on the buffer")
        return cls(disk.open(path, write), salt, mapped and disk.system.loads_are_ordered)

    @classmethod
    def faults(cls, disk: Disk, path: str) -> list[str]:
        """Return the faults of the file as a whole, in words."""
        return disk.size_faults(path, "state file", cls.nbytes)

    @staticmethod
    def witnesses_commits(data: bytes) -> bool:
        """Tell whether the bytes of a state file, of any buffer, name a record."""
        return any(
            data[at : at + 8] == _MAGIC and SLOT.unpack_from(data, at)[2] > 0
            for at in (0, SLOT_NBYTES)
            if len(data) >= at + SLOT.size
        )

    def data(self) -> bytes:
        """Return the bytes of both slots."""
        return self._file.read(2 * SLOT_NBYTES, 0)

    def slots(self) -> tuple[State | None, State | None]:
        """Return both slots, None for one that is not valid."""
        data = self.data()
        return self._parse(data, 0), self._parse(data, 1)

    def newest(self) -> State | None:
        """Return the newest valid slot, or None. For a caller that knows that no process writes."""
        return self.newest_in(self.data())

    def newest_in(self, data: bytes) -> State | None:
        """Return the newest valid slot in the bytes of both, or None."""
        found = [s for s in (self._parse(data, 0), self._parse(data, 1)) if s is not None]
        return max(found, key=lambda s: s.generation, default=None)

    def look(self) -> State | None:
        """Return the newest state while a writer may be writing, or None if a slot stays torn."""
        return self.examine()[0]

    def examine(self) -> tuple[State | None, bytes]:
        """Return what `look` does, and the bytes that it saw.

        While these are in the file, no later state was shown: generations only rise, and each state goes over the older
        slot. Only the
        valid slots do not tell: a writer that is two states further may be in the middle of the third.
        """
        for attempt in range(_LOOKS):
            data = self.data()
            one, other = self._parse(data, 0), self._parse(data, 1)
            if one is not None and other is not None:
                return (one if one.generation > other.generation else other), data
            if attempt > 100:  # a writer killed during a write, or one that is not scheduled
                time.sleep(0.0005)
        return None, data

    def is_copied(self, disk: Disk) -> bool:
        """Tell whether the file at the path is another one than that which is mapped here, or held, by their content:
        two reads."""
        before = self._held()
        return disk.read_file(self.path, self.nbytes) != before == self._held()

    def _held(self) -> bytes:
        return self.data() if self._words is None else self._words.tobytes()

    def glance(self) -> tuple[int, int] | None:
        """Return the generations in both slots, without a system call; None if the file is not mapped.

        While they stay the same, no later state was shown: each write changes one of them. Rows that are loaded before
        this call are loaded before the generations, as this processor keeps the order of loads.
        """
        words = self._words
        return None if words is None else (words[GENERATION], words[SLOT_NBYTES // 8 + GENERATION])

    def map_into(self, room: Room, at: int) -> bool:
        """Map the file into a room, from its byte `at` on, for a glance at many; False where a glance at one is not
        allowed either."""
        return self._words is not None and self._file.map_into(room, at, 0, self.nbytes)

    def write(self, state: State) -> None:
        """Write a state into the slot of its generation. O(1)."""
        packed = SLOT.pack(
            _MAGIC,
            state.generation,
            state.seq,
            state.first,
            state.tail,
            state.head,
            state.mark,
            state.era,
            state.boot,
        )
        check = xxhash.xxh3_64_intdigest(self._salt + packed).to_bytes(8, "little")
        self._file.write(packed + check, (state.generation % 2) * SLOT_NBYTES)

    def write_both(self, state: State) -> State:
        """Write a state into both slots, so that a torn one is whole again; return the newer one."""
        newer = replace(state, generation=state.generation + 1)
        self.write(state)
        self.write(newer)
        return newer

    def sync(self) -> None:
        """Return once the written states are durable on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Release the descriptor and the map; a running look keeps them until it is done."""
        self._file, self._words = closed(self._file), None

    def _parse(self, data: bytes, slot: int) -> State | None:
        packed = data[slot * SLOT_NBYTES : slot * SLOT_NBYTES + SLOT.size]
        check = data[slot * SLOT_NBYTES + SLOT.size : slot * SLOT_NBYTES + SLOT.size + 8]
        if int.from_bytes(check, "little") != xxhash.xxh3_64_intdigest(self._salt + packed):
            return None
        if len(check) != 8:
            return None
        magic, *fields = SLOT.unpack(packed)
        state = State(*fields)
        ours = magic == _MAGIC and state.generation % 2 == slot
        return state if ours and state.is_possible else None
