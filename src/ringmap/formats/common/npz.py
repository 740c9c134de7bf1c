"""Arrays in .npz files, written row by row and read through a map.

    FILE.npz    a zip archive, stored: arr_0.npy          (as `np.savez` makes it)

Invariants: a file is replaced atomically; an array read from a stored archive is a map of the file; no
memory is allocated for a shape that the archive does not hold.
Not here: which columns there are (each format).
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from ringmap.errors import CorruptError, UnsupportedError
from ringmap.formats.common import disk
from ringmap.formats.common.untrusted import INFLATED, open_binary, refuse_vast
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["NpzWriter", "npz_in", "open_members", "open_npz", "save_npz", "shapes_in"]

Array = np.ndarray[Any, np.dtype[Any]]

KEY = "arr_0"


class NpzWriter:
    """Writes the rows of one array to a .npz file; the file is in its place at the end of a `with` block.

    Args:
        path: of the file.
        spec: shape and dtype of a row.
        rows: their number: the header of the array, which precedes them, states it.
    """

    def __init__(self, path: str, spec: ColumnSpec, rows: int) -> None:
        self.path = path
        self._beside = path + ".new"
        disk.remove(self._beside)  # a link there would be followed
        self._archive = zipfile.ZipFile(self._beside, "x", zipfile.ZIP_STORED, allowZip64=True)
        self._member = self._archive.open(f"{KEY}.npy", "w", force_zip64=True)
        header = {
            "descr": np.lib.format.dtype_to_descr(spec.dtype),
            "fortran_order": False,
            "shape": (rows, *spec.shape),
        }
        np.lib.format.write_array_header_2_0(self._member, header)
        self._left, self._dtype = rows, spec.dtype

    def write(self, rows: Array) -> None:
        """Add rows; text may be less wide than the array."""
        self._left -= len(rows)
        if rows.dtype.kind == "U":
            rows = rows.astype(self._dtype, copy=False)
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
        try:
            try:
                self._member.close()
            finally:
                self._archive.close()
        except BaseException:
            disk.remove(self._beside)
            raise
        if kind is not None:
            disk.remove(self._beside)
            return
        assert self._left == 0, f"{self.path}: {self._left} rows too few"
        disk.replace(self._beside, self.path)


def save_npz(path: str, array: Array) -> None:
    """Write an array to a .npz file, atomically."""
    spec = ColumnSpec(path, array.shape[1:], array.dtype)
    with NpzWriter(path, spec, len(array)) as writer:
        writer.write(array)


def open_npz(path: str) -> Array:
    """Return the array in a .npz file: a read-only map if the archive is not compressed.

    Raises:
        KeyError: it has no `arr_0`.
        CorruptError, ValueError, OSError, zipfile.BadZipFile: it is damaged, holds objects, or declares more
            than it holds.
    """
    with open_binary(path) as raw:
        return npz_in(path, raw)


def npz_in(path: str, raw: BinaryIO) -> Array:
    """Return what `open_npz` does, of an open file."""
    with zipfile.ZipFile(raw) as archive:
        return _array_of(path, raw, archive, KEY, mapped=True)


def open_members(path: str, names: Sequence[str]) -> list[Array]:
    """Return arrays of a .npz file by their names, in memory; errors as for `open_npz`."""
    with open_binary(path) as raw, zipfile.ZipFile(raw) as archive:
        return [_array_of(path, raw, archive, name, mapped=False) for name in names]


def shapes_in(path: str) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return name -> shape and dtype of the arrays in a .npz file, from their headers; errors as for `open_npz`."""
    found = {}
    with open_binary(path) as raw, zipfile.ZipFile(raw) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".npy"):
                with archive.open(info) as member:
                    shape, _, dtype = _header(member)
                found[info.filename.removesuffix(".npy")] = shape, dtype
    return found


def _header(member: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(member)
    return found


def _array_of(path: str, raw: BinaryIO, archive: zipfile.ZipFile, name: str, mapped: bool) -> Array:
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{path}: {info.filename} is packed by another method than deflate")
    with archive.open(info) as member:
        start = raw.tell()  # zipfile has just read the member's own header: here its data begins
        shape, fortran, dtype = _header(member)
        inside = member.tell()
        if dtype.hasobject:
            raise UnsupportedError(f"{path}: holds Python objects, which are not loaded")
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or inside + size > info.file_size:  # ahead of any memory for it
            raise CorruptError(
                f"{path}: {info.filename} declares an array {shape} of {dtype}, {size:,} bytes, but has "
                f"{max(0, info.file_size - inside):,}"
            )
        refuse_vast(f"{path}: {info.filename}", info.file_size, info.compress_size, INFLATED)
        raw.seek(start)
        stored = info.compress_type == zipfile.ZIP_STORED and raw.read(6) == b"\x93NUMPY"
        whole = start + inside + size <= os.fstat(raw.fileno()).st_size
        if mapped and stored and whole and not fortran and size:
            return np.memmap(raw, dtype, "r", start + inside, shape)
    with archive.open(info) as member:
        array: Array = np.lib.format.read_array(member, allow_pickle=False)
    return array
