"""Arrays that begin at a multiple of 64 bytes, so that JAX takes them over without a copy.

    np.empty     |header 16|values ....|              begins at 16, 32 or 48 as often as at 0
    empty        |.... pad ....|values .......|       begins at a multiple of 64

XLA, the compiler behind JAX, takes the memory of another library only at multiples of 64, and copies anything else
(tried with jax
0.10: `jax.dlpack.from_dlpack` and `jax.device_put`).

Invariants: an array of `LEAST_NBYTES` or more begins at a multiple of `ALIGNMENT`; every array is C-contiguous and
writable. Not here: shared memory of workers (datasets/worker_slots.py), and page-locked memory: both begin at whole
pages.
"""

from __future__ import annotations

import math
from ctypes import addressof, c_char
from typing import Any

import numpy as np

__all__ = ["ALIGNMENT", "LEAST_NBYTES", "aligned", "empty", "pair"]

Array = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT = 64
"""Bytes: what XLA asks for, and a line of the processor's cache."""

LEAST_NBYTES = 1 << 16
"""Bytes below which an array begins where NumPy puts it. Finding an array's address costs 1 us when measured alone and
5 us within a call, as much as the copy of 64 KiB; the call that hands an array to JAX costs 50 us, with such a copy or
without. Decision 157."""


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
    return np.ndarray(shape, dtype, raw, _begin(raw))


def pair(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return two arrays in one block, whose values are not set."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST_NBYTES:
        first, second = np.empty((2, *shape), dtype)
        return first, second
    stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
    raw = np.empty(2 * stride + ALIGNMENT, np.uint8)
    at = _begin(raw)
    return np.ndarray(shape, dtype, raw, at), np.ndarray(shape, dtype, raw, at + stride)


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


def _begin(raw: Array) -> int:
    """Return the first offset at which the array's memory is aligned. In a third of the time of `raw.ctypes.data`."""
    return -addressof(c_char.from_buffer(raw)) % ALIGNMENT  # type: ignore[arg-type]
