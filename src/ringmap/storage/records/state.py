"""The state file: the newest committed state, for readers, in two slots written in turn.

    state.bin   [slot 0: generation 6][slot 1: generation 7]     4096 bytes each

A reader peeks: both slots must be valid. A state that is two behind would hide an eviction.

Invariants: generations differ by 1; only the holder of the writer's lock writes.
Not here: the slots (disk/checksums.py), the meaning of the state for recovery (recovery.py).
"""

from __future__ import annotations

import struct
from contextlib import closing
from typing import Any, NamedTuple

from ringmap.errors import CorruptError
from ringmap.storage.disk.checksums import SLOT_NBYTES, TwoSlots
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import Room
from ringmap.storage.records.table import MOST
from ringmap.storage.ring.ring import ORIGIN, Position

__all__ = ["NO_BOOT", "SLOT", "State", "StateFile"]

SLOT = struct.Struct("<8sQQQqqQQ16s")
"""A state in its slot, without its checksum."""
NO_BOOT = bytes(16)
"""The boot id of a state that is not trusted for any boot."""


class State(NamedTuple):
    """A committed state.

    `seq, first, tail, head` as in the newest record; `synced`: every record up to this one is durable, with its rows;
    `era`: number of openings and recoveries by a writer; `boot`: the boot during which the page cache can be trusted.
    """

    generation: int = 0
    seq: int = 0
    first: int = 1
    tail: Position = ORIGIN
    head: Position = ORIGIN
    synced: int = 0
    era: int = 0
    boot: bytes = NO_BOOT


class StateFile(TwoSlots[State]):
    """The file of states. The salt is the buffer's UUID."""

    magic = b"RINGMAPS"
    form = SLOT
    nbytes = 2 * SLOT_NBYTES

    @staticmethod
    def decode(*fields: Any) -> State | None:
        """Return the state with these fields, None for one that no writer shows: a forged one may have a checksum."""
        state = State(*fields)
        fits = max(state.generation, state.seq, state.synced, state.era, state.head) < MOST
        return state if fits and 1 <= state.first <= state.seq + 1 and 0 <= state.tail <= state.head else None

    @classmethod
    def create(cls, disk: Disk, path: str, salt: bytes) -> None:
        """Make the file with two valid slots of the empty state, and sync it."""
        with closing(disk.create(path, cls.nbytes)) as file:
            made = cls(file, salt)
            made.write_both(State())
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
            data[at : at + 8] == StateFile.magic and SLOT.unpack_from(data, at)[2] > 0
            for at in (0, SLOT_NBYTES)
            if len(data) >= at + SLOT.size
        )

    def is_copied(self, disk: Disk) -> bool:
        """Tell whether the file at the path is another one than that which is mapped here, or held, by their content:
        two reads."""
        before = self._held()
        return disk.read_file(self.path, self.nbytes) != before == self._held()

    def is_replaced(self, disk: Disk) -> bool:
        """Tell whether another file is at the path than this one, or none. Two system calls."""
        return not disk.is_at(self._file, self.path)

    def _held(self) -> bytes:
        return self.data() if self._words is None else self._words.tobytes()

    def map_into(self, room: Room, at: int) -> bool:
        """Map the file into a room, from its byte `at` on, to see the generations of many at once; False where those of
        one can't be seen so either."""
        return self._words is not None and self._file.map_into(room, at, 0, self.nbytes)

    def write_both(self, state: State) -> State:
        """Write a state into both slots, so that a torn one is whole again; return the newer one."""
        newer = state._replace(generation=state.generation + 1)
        self.write(state)
        self.write(newer)
        return newer
