"""A few numbers in shared memory, between the process that owns a loader and its workers.

    owner   tell(...)  --> | gen. | 6 numbers |  --> told()      worker, batch by batch

Forked workers inherit the block; spawned ones get their own with the pickled buffer. A pickle that is not on
its way to a child process carries no block, since no process would write to it.

Invariants: only the process that made the block writes; a reader sees the told numbers whole or not at all.
Not here: what the numbers mean (sampled.py).
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from typing import Any

import numpy as np

__all__ = ["LoaderState"]

Array = np.ndarray[Any, np.dtype[Any]]

NUMBERS = 6
"""Told numbers, where nothing else is said."""
_WAIT_S = 10.0
"""Timeout for an owner in the middle of a write: longer than it ever waits for a core, unless it was killed."""


class LoaderState:
    """A small block of shared memory with one writer.

    Args:
        arena: the block of the process that spawned this one; None makes a new block.
        numbers: how many numbers can be told.
    """

    def __init__(self, arena: Any = None, numbers: int = NUMBERS) -> None:
        self._pid = os.getpid() if arena is None else -1
        self._arena, self._numbers = arena, numbers
        self._size = numbers + 1
        block = mmap.mmap(-1, 8 * self._size) if arena is None else arena.buffer
        self._blocks: list[Array] = [np.frombuffer(block, np.int64, self._size)]
        self._telling = threading.RLock()

    @property
    def is_mine(self) -> bool:
        """Whether this process is the owner, which tells."""
        return self._pid == os.getpid()

    def tell(self, *numbers: int) -> None:
        """Replace the first of the told numbers by new ones."""
        with self._telling:
            for block in self._blocks:
                generation = int(block[0]) | 1  # odd: a write is under way, or was interrupted
                block[0] = generation
                block[1 : 1 + len(numbers)] = numbers
                block[0] = generation + 1

    @property
    def generation(self) -> int:
        """What changes when other numbers are told."""
        return int(self._blocks[0][0])

    def told(self) -> tuple[int, ...]:
        """Return the generation (0: nothing told, or the owner is dead), and the numbers told last."""
        block, until = self._blocks[0], 0.0
        while True:
            seen = block[: self._numbers + 1].copy()
            if seen[0] % 2 == 0 and seen[0] == block[0]:
                return tuple(seen.tolist())
            now = time.monotonic()
            until = until or now + _WAIT_S
            if now > until:
                return (0,) * (self._numbers + 1)
            time.sleep(0)

    def __reduce__(self) -> Any:
        from multiprocessing import heap
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is None:
            return _nobody, ()
        if self._arena is None:
            self._arena = heap.Arena(8 * self._size)
            block = np.frombuffer(self._arena.buffer, np.int64, self._size)
            with self._telling:
                block[:] = self._blocks[0]
                self._blocks.append(block)
        if sys.platform == "win32":
            return LoaderState, (self._arena, self._numbers)
        # By hand: the running pickler copied its table of reducers before `heap` was imported.
        return _spawned, (*heap.reduce_arena(self._arena), self._numbers)


def _spawned(make: Any, arena: Any, numbers: int) -> LoaderState:
    return LoaderState(make(*arena), numbers)


def _nobody() -> None:
    return None
