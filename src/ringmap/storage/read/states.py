"""The states of several rings, seen in one sweep: their state files are mapped side by side.

    ring 0 |generation .....|generation .....| ring 1 |generation .....|generation .....| ...      two slots each
            ^                ^                         ^                ^
            `glance`: the generations of all, as bytes

Invariants: as of `TwoSlots.generations`: while the bytes stay the same, no ring has shown a later state; rows that are
loaded before a glance are loaded before the generations.
Not here: what a state says, and whether the directories are still at their paths (reader.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.storage.disk.system import Room
from ringmap.storage.disk.two_slots import GENERATION, SLOT_NBYTES
from ringmap.storage.read.handle import Handle
from ringmap.storage.records.state import StateFile

__all__ = ["States"]

Array = np.ndarray[Any, np.dtype[Any]]


class States:
    """The states of some rings.

    Args:
        rings: the rings.
    """

    def __init__(self, rings: Sequence[Handle]) -> None:
        size = StateFile.nbytes
        room = Room.of(rings[0].disk.system, len(rings) * size) if rings else None
        self._words: Array | None = None
        if room is not None and all(ring.map_state(room, n * size) for n, ring in enumerate(rings)):
            self._words = room.bytes.view(np.uint64)[GENERATION :: SLOT_NBYTES // 8]

    def glance(self) -> bytes | None:
        """Return what changes with each state that a ring shows, without a system call; None if each ring must be
        asked."""
        words = self._words
        return None if words is None else words.tobytes()
