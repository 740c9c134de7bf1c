"""Rows of a column, read from where HDF5 says that its chunks lie.

    rows -> chunk, row inside -> byte of the file -> preadv into the result

A read through HDF5 costs it about 100 µs of bookkeeping (selection, chunk index, type conversion)
whatever is read; for clips of a few rows that is nearly all of it. h5py tells the place of every
chunk, and rows of a chunk without filters lie there as they are in memory.
Invariants: what it returns equals what HDF5 reads (a test holds that); a column that is compressed,
converted, or cut across its rows is left to HDF5 (`Direct.of` returns None).
Not here: text, damaged files.
"""

from __future__ import annotations

import os
from typing import Any

import h5py
import numpy as np

from ringmap.errors import CorruptError
from ringmap.storage.columns.copying import empty

__all__ = ["Direct"]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_CHUNKS = 1 << 22


class Direct:
    """The chunks of a column in an open file. Any number of threads may read while it stays open.

    Args:
        fd: of the file; it stays its owner's.
        dtype: of a value, as it is stored and in memory.
        row: shape of a row.
        step: rows of a chunk.
        places: where each chunk begins, in bytes; -1 where none was written.
    """

    def __init__(self, fd: int, dtype: np.dtype[Any], row: tuple[int, ...], step: int, places: Array) -> None:
        self._dtype, self._row, self._step, self._places = dtype, row, step, places
        self._row_nbytes = int(np.prod(row, dtype=np.int64)) * dtype.itemsize
        self._fd = fd

    @classmethod
    def of(cls, dataset: Any, dtype: np.dtype[Any], fd: int) -> Direct | None:
        """Return direct access to a dataset in a file of this descriptor, or None where HDF5 has to read it."""
        plist, file = dataset.id.get_create_plist(), dataset.file
        if (
            not hasattr(os, "preadv")
            or dataset.chunks is None
            or plist.get_nfilters()
            or dataset.chunks[1:] != dataset.shape[1:]
            or file.userblock_size
            or not dataset.size
            or dataset.id.get_num_chunks() > _MOST_CHUNKS
            or not dataset.id.get_type().equal(h5py.h5t.py_create(dtype))
        ):
            return None
        step = dataset.chunks[0]
        places = np.full(-(-dataset.shape[0] // step), -1, np.int64)

        def note(chunk: Any) -> None:
            places[chunk.chunk_offset[0] // step] = chunk.byte_offset

        dataset.id.chunk_iter(note)
        return cls(fd, dtype, dataset.shape[1:], step, places)

    def windows(self, starts: Array, length: int, stride: int) -> Array | None:
        """Return windows of rows, or None where a chunk was never written (HDF5 knows its fill value)."""
        count = len(range(0, length, stride))
        out = empty((len(starts), count, *self._row), self._dtype)
        if not out.size:
            return out
        nbytes, step = self._row_nbytes, self._step
        flat = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        at = 0
        for start in starts.tolist():
            row, stop = start, start + length
            while row < stop:
                place = int(self._places[row // step])
                if place < 0:
                    return None
                inside = row % step
                run = min(step - inside, stop - row) if stride == 1 else 1
                self._read(flat[at : at + run * nbytes], place + inside * nbytes)
                at += run * nbytes
                row += run if stride == 1 else stride
        return out

    def _read(self, into: memoryview, place: int) -> None:
        done = os.preadv(self._fd, [into], place)
        while done < len(into):
            more = os.preadv(self._fd, [into[done:]], place + done)
            if not more:
                raise CorruptError(f"the file ends at byte {place + done}, inside of a chunk")
            done += more
