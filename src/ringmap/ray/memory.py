"""Arrays whose memory is used again once nobody refers to them.

Fresh memory of a large batch costs a page fault for each of its pages, about as much as the copy into it.

Invariants: two living arrays never share memory; an array that is kept stays as it is.
Not here: what is copied into them (buffer.py).
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Memory"]

Array = np.ndarray[Any, np.dtype[Any]]


class Memory:
    """Makes arrays, like `numpy.empty`. `keep`: how many blocks of each size wait for their next use.

    Example:
        >>> memory = Memory()
        >>> batch = memory.empty((256, 4), np.dtype(np.float32))
        >>> at = batch.ctypes.data
        >>> del batch
        >>> memory.empty((256, 4), np.dtype(np.float32)).ctypes.data == at
        True
    """

    def __init__(self, keep: int = 8) -> None:
        self._keep = keep
        self._free: dict[int, list[Array]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an array, not filled. Views of it keep its memory in use, too."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes or dtype.hasobject:
            return np.empty(shape, dtype)
        free = self._free[nbytes]
        try:
            block = free.pop()
        except IndexError:
            block = np.empty(nbytes, np.uint8)
        # NumPy's arrays keep what they are made from, and this can be told of its end.
        handle = (ctypes.c_ubyte * nbytes).from_buffer(block.data)
        weakref.finalize(handle, _put_back, free, block, self._keep).atexit = False
        made: Array = np.frombuffer(memoryview(handle), dtype)
        return made.reshape(shape)


def _put_back(free: list[Array], block: Array, keep: int) -> None:
    if len(free) < keep:
        free.append(block)
