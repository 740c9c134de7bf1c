"""Arrays in .npz files, written as they come and read without being loaded.

    FILE.npz    a zip archive, stored: arr_0.npy          (as `np.savez` makes it)

Invariants: a file is replaced in one step; what is read from a stored archive is a map of the file.
Not here: which columns there are (tabular.py).
"""

from __future__ import annotations

import os
import zipfile
from types import TracebackType
from typing import Any, Self

import numpy as np

from ringmap.formats.common import disk
from ringmap.storage.schema import ColumnSpec

__all__ = ["KEY", "NpzWriter", "open_npz", "save_npz"]

Array = np.ndarray[Any, np.dtype[Any]]

KEY = "arr_0"


class NpzWriter:
    """Writes the rows of one array to a .npz file; `with` it, and the file is in its place at the end.

    Args:
        path: of the file.
        spec: shape and dtype of a row.
        rows: how many there will be: the header of the array says so ahead of them.
    """

    def __init__(self, path: str, spec: ColumnSpec, rows: int) -> None:
        self.path = path
        self._beside = path + ".new"
        self._archive = zipfile.ZipFile(self._beside, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._member = self._archive.open(f"{KEY}.npy", "w", force_zip64=True)
        header = {
            "descr": np.lib.format.dtype_to_descr(spec.dtype),
            "fortran_order": False,
            "shape": (rows, *spec.shape),
        }
        np.lib.format.write_array_header_2_0(self._member, header)
        self._left = rows

    def write(self, rows: Array) -> None:
        """Add rows."""
        self._left -= len(rows)
        if rows.size and rows.itemsize:
            self._member.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._member.close()
        self._archive.close()
        if kind is not None:
            disk.remove(self._beside)
            return
        assert self._left == 0, f"{self.path}: {self._left} rows too few"
        disk.replace(self._beside, self.path)


def save_npz(path: str, array: Array) -> None:
    """Write an array to a .npz file, in one step."""
    spec = ColumnSpec(path, array.shape[1:], array.dtype)
    with NpzWriter(path, spec, len(array)) as writer:
        writer.write(array)


def open_npz(path: str) -> Array:
    """Return the array in a .npz file: a read-only map where the archive is not compressed.

    Raises:
        KeyError: it has no `arr_0`.
        ValueError, OSError, zipfile.BadZipFile: it is damaged, or holds objects.
    """
    with open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
        info = archive.getinfo(f"{KEY}.npy")
        with archive.open(info) as member:
            start = (
                raw.tell()
            )  # zipfile has just read the member's own header: here its data begins
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0  # fmt: skip
            shape, fortran, dtype = read(member)
            inside = member.tell()
        if dtype.hasobject:
            raise ValueError(f"{path}: holds Python objects, which are not loaded")
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw.seek(start)
        plain = info.compress_type == zipfile.ZIP_STORED and not fortran and size > 0
        if plain and raw.read(6) == b"\x93NUMPY" and start + inside + size <= os.fstat(raw.fileno()).st_size:  # fmt: skip
            return np.memmap(path, dtype, "r", start + inside, shape)
    with np.load(path, allow_pickle=False) as loaded:
        array: Array = loaded[KEY]
    return array
