"""The header of a `.npy` file, padded to a page, so that rows begin on a page and `np.load` still reads the file.

    magic, version 1.0 | size | {'descr': '<f4', 'fortran_order': False, 'shape': (200, 2)}      \\n |rows

Not here: the data after it (table.py, columns/memmap.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["HEADER_NBYTES", "npy_header"]

HEADER_NBYTES = 4096


def npy_header(descr: Any, shape: tuple[int, ...]) -> bytes:
    """Return the header of an array in C order. `descr`: its dtype, as `np.dtype.descr` or `str` gives it."""
    described = {"descr": descr, "fortran_order": False, "shape": shape}
    start = np.lib.format.magic(1, 0)
    room = HEADER_NBYTES - len(start) - 2
    text = repr(described).encode("latin1")
    return start + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"
