"""What a good engineer would write in an hour: random clips of one `.npy` file, larger than memory.

    starts of the next batch -> WILLNEED for each clip -> copy the batch before it        `hinted`
    starts -> 32 threads, each copies its share of a map that expects random access       `threaded`

It knows one column, no ring, no writer and no eviction; the small columns are arrays in memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["direct", "fancy", "hinted", "threaded"]

Array = np.ndarray[Any, np.dtype[Any]]
Draw = Callable[[], Array]
"""Returns the rows of a batch of clips, `(B, H)`."""


def fancy(path: Path, small: Mapping[str, Array], draw: Draw) -> Iterator[dict[str, Array]]:
    """Yield batches as most people write it: one fancy index, read-ahead as the system has it."""
    pixels = np.load(path, mmap_mode="r")
    while True:
        rows = draw()
        yield {"pixels": pixels[rows], **{name: values[rows] for name, values in small.items()}}


def hinted(path: Path, small: Mapping[str, Array], draw: Draw) -> Iterator[dict[str, Array]]:
    """Yield batches, the bytes of the next one asked for before one is copied."""
    pixels = np.load(path, mmap_mode="r")
    pixels._mmap.madvise(mmap.MADV_RANDOM)
    file, nbytes = os.open(path, os.O_RDONLY), pixels[0].nbytes

    def ask() -> Array:
        rows = draw()
        for at in np.sort(rows[:, 0]).tolist():
            begin, size = pixels.offset + at * nbytes, rows.shape[1] * nbytes
            os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)
        return rows

    coming = ask()
    while True:
        rows, coming = coming, ask()
        yield {"pixels": pixels[rows], **{name: values[rows] for name, values in small.items()}}


def threaded(path: Path, small: Mapping[str, Array], draw: Draw, threads: int = 32) -> Iterator[dict[str, Array]]:
    """Yield batches, each copied by many threads: NumPy lets go of the interpreter, so they fault side by side."""
    pixels, pool = np.load(path, mmap_mode="r"), ThreadPoolExecutor(threads)
    pixels._mmap.madvise(mmap.MADV_RANDOM)
    while True:
        rows = draw()
        out = np.empty((*rows.shape, *pixels.shape[1:]), pixels.dtype)
        bounds = [len(rows) * part // threads for part in range(threads + 1)]

        def copy(part: tuple[int, int], rows: Array = rows, out: Array = out) -> None:
            a, b = part
            np.take(pixels, rows[a:b], axis=0, out=out[a:b], mode="clip")

        list(pool.map(copy, pairwise(bounds)))
        yield {"pixels": out, **{name: values[rows] for name, values in small.items()}}


def direct(path: Path, nbytes: int, draw: Draw, threads: int = 32) -> Callable[[], object]:
    """Return the disk's own random reads: past the page cache, 32 clips at a time, nothing else done.

    `nbytes`: of a row.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # tmpfs
        fd = os.open(path, os.O_RDONLY)
    rows = draw()
    pool, spaces = ThreadPoolExecutor(threads), [mmap.mmap(-1, rows.shape[1] * nbytes + 4096) for _ in rows]

    def read(space: mmap.mmap, row: int) -> None:
        os.preadv(fd, [space], row * nbytes & ~4095)

    return lambda: list(pool.map(read, spaces, draw()[:, 0].tolist()))
