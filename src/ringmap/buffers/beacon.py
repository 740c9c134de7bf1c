"""What the process that owns a loader tells its workers: a few numbers in memory that they share.

    owner   tell(...) --> | turn | 6 numbers |  --> told()   worker, batch by batch

Forked workers inherit the block; spawned ones get one of their own with the pickled buffer. A pickle that is not on
its way to a child process carries none: nobody will tell it anything.

Invariants: only the process that made it tells; what is told is seen whole or not at all.
Not here: what the numbers mean (sampled.py).
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import numpy as np

__all__ = ["Beacon"]

Array = np.ndarray[Any, np.dtype[Any]]

_NUMBERS = 6


class Beacon:
    """A small block of shared memory with one writer.

    Args:
        given: the block of the process that this one was spawned by; None makes one.
    """

    def __init__(self, given: Any = None) -> None:
        self._pid = os.getpid() if given is None else -1
        self._given = given
        block = mmap.mmap(-1, mmap.PAGESIZE) if given is None else given.buffer
        self._blocks: list[Array] = [np.frombuffer(block, np.int64, _NUMBERS + 1)]

    @property
    def is_mine(self) -> bool:
        """Whether this process is the one that tells."""
        return self._pid == os.getpid()

    def tell(self, *numbers: int) -> None:
        """Replace what is told, by up to 6 numbers."""
        for block in self._blocks:
            block[0] += 1  # odd: being written
            block[1 : 1 + len(numbers)] = numbers
            block[0] += 1

    def told(self) -> tuple[int, ...]:
        """Return how often something was told (0: never), and the numbers told last."""
        block = self._blocks[0]
        while True:
            seen = block.copy()
            if seen[0] % 2 == 0 and seen[0] == block[0]:
                return tuple(seen.tolist())

    def __reduce__(self) -> Any:
        from multiprocessing import heap
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is None:
            return _nobody, ()
        if self._given is None:
            self._given = heap.Arena(mmap.PAGESIZE)
            block = np.frombuffer(self._given.buffer, np.int64, _NUMBERS + 1)
            block[:] = self._blocks[0]
            self._blocks.append(block)
        if sys.platform == "win32":
            return Beacon, (self._given,)
        # By hand: the pickler under way took its table of reducers before `heap` was imported.
        return _spawned, heap.reduce_arena(self._given)


def _spawned(make: Any, given: Any) -> Beacon:
    return Beacon(make(*given))


def _nobody() -> None:
    return None
