"""How rows get into a batch: where a new array begins, in which threads rows are copied, and what is asked of the disk
before.

    np.empty   |header 16|values ....|         begins at 16, 32 or 48 as often as at 0
    empty      |.... pad ....|values .......|  begins at a multiple of 64: JAX takes it over without a copy

    slots (B, H) -> [B/n | B/n | B/n] -> take into the same `out`, each part in another thread

    slots -> bytes -> pages -> runs, in the file's order -> one hint each

A touched page that is not in memory is read alone, or with megabytes of neighbours that are not needed, while
the disk could serve 30 reads at once. So a large column turns the system's own readahead off, and names
each batch's pages beforehand, which costs half a millisecond per batch.

Invariants: an array of `LEAST_NBYTES` or more begins at a multiple of `ALIGNMENT`; every array is C-contiguous and
writable; a hint changes no byte, and may be left out.
Not here: which rows, and whether they stayed live during the copy (clips/gather.py); shared memory of workers
(datasets/worker_slots.py) and page-locked memory, which begin at whole pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ringmap.storage.columns.base import Column
from ringmap.storage.disk.process import begin
from ringmap.storage.disk.system import System
from ringmap.storage.ring.arrays import distinct

__all__ = [
    "ALIGNMENT",
    "LEAST_NBYTES",
    "SPLIT_NBYTES",
    "Readahead",
    "aligned",
    "empty",
    "pair",
    "runs",
    "take",
    "together",
]

Array = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT = 64
"""Bytes: XLA, the compiler behind JAX, takes the memory of others only at multiples of 64 (tried with jax 0.10)."""

LEAST_NBYTES = 1 << 16
"""Bytes below which an array begins where NumPy puts it: finding an array's address takes as long as the copy of 64
KiB. Decision 157."""

SPLIT_NBYTES = 1 << 21
"""Bytes below which a second thread does not pay off: they are copied in 0.2 ms, starting work in it takes 0.05 ms."""

_PAGE = 4096
_QUIET_BATCHES = 16


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array whose values are not set. About 1 us more than `np.empty` from `LEAST_NBYTES` on.

    Example:
        >>> empty((64, 84, 84), np.dtype("u1")).ctypes.data % ALIGNMENT
        0
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST_NBYTES:
        return np.empty(shape, dtype)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    # The memory's address in a third of the time of `raw.ctypes.data`.
    return np.ndarray(shape, dtype, raw, -addressof(c_char.from_buffer(raw)) % ALIGNMENT)  # type: ignore[arg-type]


def pair(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return two arrays in one block, whose values are not set."""
    stride = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    raw = empty((2 * stride,), np.dtype(np.uint8))
    return np.ndarray(shape, dtype, raw), np.ndarray(shape, dtype, raw, stride)


def aligned(values: Array) -> Array:
    """Return the array itself if it begins where `empty` would let it, else a copy.

    Example:
        >>> few = np.zeros(9)
        >>> aligned(few) is few, aligned(np.zeros(9001)[1:]).ctypes.data % ALIGNMENT
        (True, 0)
    """
    if values.nbytes < LEAST_NBYTES or values.dtype.hasobject:
        return values
    if values.flags.c_contiguous and values.ctypes.data % ALIGNMENT == 0:
        return values
    made = empty(values.shape, values.dtype)
    np.copyto(made, values)
    return made


def take(column: Column, slots: Array, out: Array | None, threads: int, head: int) -> Array:
    """Return the rows of a column at `slots` `(B, H)`, copied by up to `threads` threads. `head`: as for
    `Column.take`."""
    spec = column.spec
    parts = min(threads, len(slots), slots.size * spec.row_nbytes // (SPLIT_NBYTES // 2))
    if parts < 2:
        return column.take(slots, out, head)
    if out is None:
        out = empty((*slots.shape, *spec.shape), spec.dtype)
    bounds = [len(slots) * part // parts for part in range(parts + 1)]
    pieces = [slice(a, b) for a, b in pairwise(bounds)]
    together([partial(column.take, slots[piece], out[piece], head) for piece in pieces])
    return out


def together(work: Sequence[Callable[[], object]]) -> None:
    """Do the first on this thread, and the others at the same time, where helpers are free; all have ended when this
    returns or raises."""
    others = [begin(one, len(work) - 1) for one in work[1:]]
    try:
        work[0]()
        for other in others:
            other.end()
    finally:
        for other in others:
            other.drop()  # none writes into the caller's arrays any more, even if one failed


def runs(slots: Array, row_nbytes: int, offset: int) -> list[tuple[int, int]]:
    """Return the byte ranges, whole pages in ascending order, that hold the rows at `slots`. O(rows log rows).

    Example:
        >>> runs(np.array([[0, 1, 2], [90, 91, 92]]), row_nbytes=1000, offset=4096)
        [(4096, 4096), (90112, 8192)]
    """
    begin = distinct(slots) * row_nbytes + offset
    first = begin // _PAGE
    stop = (begin + (row_nbytes - 1)) // _PAGE + 1
    breaks = np.flatnonzero(first[1:] > stop[:-1]) + 1
    firsts = first[np.concatenate(([0], breaks))] * _PAGE
    stops = stop[np.concatenate((breaks - 1, [len(stop) - 1]))] * _PAGE
    return list(zip(firsts.tolist(), (stops - firsts).tolist(), strict=True))


class Readahead:
    """Decides whether hints pay off: after a period in which nothing was read from the disk, not until something is.

    `system` tells how much this thread has read.
    """

    __slots__ = ("_quiet", "_seen", "_system")

    def __init__(self, system: System) -> None:
        self._system = system
        self._quiet = 0
        self._seen = 0

    @property
    def is_cold(self) -> bool:
        """Whether to give hints."""
        return self._quiet < _QUIET_BATCHES

    def begin(self) -> None:
        """Record that a gather begins."""
        self._seen = self._system.disk_reads()

    def end(self) -> None:
        """Record that a gather has ended."""
        self._quiet = 0 if self._system.disk_reads() > self._seen else self._quiet + 1
