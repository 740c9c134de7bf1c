"""Address space in which files are mapped side by side, so that one array reaches over all of them.

    room    |file 0 ......|    |file 1 ...|       |file 2 ......|    |
            at = 0             at = 1 * stride    at = 2 * stride

Invariants: only what `put` mapped changes; the rest reads as zeros; all maps live as long as the room, or an array over
it. Not here: which files, and where in the room each begins (columns/rows.py).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np

from ringmap.storage.disk.system import System

__all__ = ["Room"]

Array = np.ndarray[Any, np.dtype[Any]]


_broken: list[mmap.mmap] = []
"""Rooms in which a map failed: the kernel may have unmapped the place before, and given it to another thread, whose
memory would go with the room. So they are never given back; they take no memory."""


class Room:
    """Address space for files.

    Args:
        system: maps them.
        space: from `System.room`.
    """

    def __init__(self, system: System, space: mmap.mmap) -> None:
        self._system, self._space = system, space
        self.bytes: Array = np.frombuffer(space, np.uint8)
        """All of it, read-only."""
        self._address = int(self.bytes.ctypes.data)

    @classmethod
    def of(cls, system: System, nbytes: int) -> Room | None:
        """Return a room of so many bytes; None where the system has none to give, and for no bytes."""
        space = system.room(nbytes)
        return None if space is None else cls(system, space)

    def put(self, fd: int, at: int, offset: int, nbytes: int, random: bool) -> bool:
        """Map a byte range of a file from byte `at` on; return False if the system refuses.

        Args:
            fd: of the file, which may be closed afterwards.
            at: a multiple of the page size.
            offset: where the range begins in the file, a multiple of the page size.
            nbytes: its size.
            random: whether touching it causes no readahead.
        """
        if at < 0 or nbytes > len(self.bytes) - at:
            raise ValueError(f"bytes [{at}, {at + nbytes}) lie outside a room of {len(self.bytes)}")
        if not self._system.map_at(fd, self._address + at, offset, nbytes):
            _broken.append(self._space)
            return False
        if random and hasattr(mmap, "MADV_RANDOM"):
            with contextlib.suppress(OSError):
                self._space.madvise(mmap.MADV_RANDOM, at, nbytes)
        return True
