"""A few numbers in shared memory, between the process that owns a loader and its workers.

    owner   tell(...)  --> | gen. | 6 numbers       |  --> told()      worker, batch by batch
            counted()  <-- | a number of each worker |  <-- count(n)

Forked workers inherit the block; spawned ones get their own with the pickled buffer. A pickle that is not on
its way to a child process carries no block, since no process would write to it.

A worker's place is the number of the fork, or of the pickle, that created it: the process that owns the loader counts
both. There are 65,000 places: after as many workers a place is used again, and its new worker goes on from the count in
it.

Invariants: only the process that made the block tells; a reader sees the told numbers whole or not at all; each worker
writes only its own place.
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
_PLACES = (1 << 16) - 8
"""Half a megabyte of addresses: pages that no worker counts in take no memory."""
_WAIT_S = 10.0
"""Timeout for an owner in the middle of a write: longer than it ever waits for a core, unless it was killed."""


class LoaderState:
    """A small block of shared memory with one writer.

    Args:
        given: the block of the process that spawned this one; None makes a new block.
        place: the place of this process in it.
        numbers: how many numbers can be told.
    """

    def __init__(self, given: Any = None, place: int = 0, numbers: int = NUMBERS) -> None:
        self._pid = os.getpid() if given is None else -1
        self._given, self._place, self._numbers = given, place, numbers
        self._counts = numbers + 2  # their offset
        self._size = self._counts + _PLACES
        block = mmap.mmap(-1, 8 * self._size) if given is None else given.buffer
        self._blocks: list[Array] = [np.frombuffer(block, np.int64, self._size)]
        self._counted_before: tuple[int, int] | None = None  # process, count
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

    def count(self, number: int) -> None:
        """Add to this worker's count, for the owner to read."""
        block, pid = self._blocks[0], os.getpid()
        at = self._counts + (self._place or _children.own) % _PLACES
        if self._counted_before is None or self._counted_before[0] != pid:
            self._counted_before = pid, int(block[at])  # of an earlier worker
        block[at] = self._counted_before[1] + number

    def counted(self) -> int:
        """Return the sum over all workers, past and present."""
        stop = min(self._size, self._counts + _children.made + 1)
        return sum(int(block[self._counts : stop].sum()) for block in self._blocks)

    def __reduce__(self) -> Any:
        from multiprocessing import heap
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is None:
            return _nobody, ()
        if self._given is None:
            self._given = heap.Arena(8 * self._size)
            block = np.frombuffer(self._given.buffer, np.int64, self._size)
            with self._telling:
                block[: self._counts] = self._blocks[0][: self._counts]
                self._blocks.append(block)
        place = _children.next()
        if sys.platform == "win32":
            return LoaderState, (self._given, place, self._numbers)
        # By hand: the running pickler copied its table of reducers before `heap` was imported.
        return _spawned, (*heap.reduce_arena(self._given), place, self._numbers)


def _spawned(make: Any, given: Any, place: int, numbers: int) -> LoaderState:
    return LoaderState(make(*given), place, numbers)


class _Children:
    """Numbers the child processes of this one.

    `own`: the number of this process, 0 for one that was not forked; `made`: the last number given.
    """

    def __init__(self) -> None:
        self.own = self.made = 0
        self._lock = threading.RLock()

    def next(self) -> int:
        """Return the next number."""
        with self._lock:
            self.made += 1
            return self.made

    def before_fork(self) -> None:
        """Give the child a number, and hold it until the fork is done: another thread may fork too."""
        self._lock.acquire()
        self.made += 1

    def after_in_parent(self) -> None:
        """Let other threads fork."""
        self._lock.release()

    def after_in_child(self) -> None:
        """Take the number."""
        self.own, self._lock = self.made, threading.RLock()


_children = _Children()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_children.before_fork,
        after_in_parent=_children.after_in_parent,
        after_in_child=_children.after_in_child,
    )


def _nobody() -> None:
    return None
