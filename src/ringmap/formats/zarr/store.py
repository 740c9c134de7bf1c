"""A Zarr store for untrusted data: the files of one folder, and codecs that only unpack; chunks before lengths.

    zarr-python -> get("data/pixels/0.0.0") -> a regular file below the folder, no link on the way
                                            -> packed by codecs of the list; a header names no more than a chunk

Zarr's metadata names the codecs that read a chunk, and one of numcodecs unpickles, which runs whatever code
the file brings. Others make room by a number in the chunk. This store checks both before zarr-python sees the file.
When it writes, it holds metadata back until `publish`, so that after a kill lengths and tables name no
rows that are missing.
Invariants: an array whose metadata names a codec that is not listed, or vast chunks, is not opened; a file is
replaced in one step.
Not here: which arrays are columns (__init__.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from typing import Any

import numpy as np
from zarr.buffer import default_buffer_prototype
from zarr.storage import LocalStore

from ringmap.errors import CorruptError, UnsupportedError
from ringmap.formats.common import disk
from ringmap.formats.common.untrusted import (
    JSON_NBYTES,
    LARGEST_ROW,
    open_binary,
    read_json,
    refuse_elsewhere,
)
from ringmap.storage.columns.zarr import most_encoded
from ringmap.storage.disk.system import NotAFileError

__all__ = ["KNOWN", "InsideStore", "refuse_bomb"]

_METADATA = (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json")

_ROWS = frozenset(
    {
        "astype",
        "bitround",
        "bytes",
        "delta",
        "endian",
        "fixedscaleoffset",
        "packbits",
        "quantize",
        "transpose",
    }
)
"""Codecs of arrays that keep their size, more or less."""

EXACT = frozenset({"adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3", "shuffle"})
"""Codecs that keep the number of bytes, except for a checksum."""

_SIZED = {"blosc": (4, 16), "lz4": (0, 4)}
"""Codecs with the size of the result in a header: where it is, and the size of the header. Their decoders allocate no
more than that."""

KNOWN = frozenset({*_SIZED, "zstd", "gzip", "zlib", "bz2", "lzma"})
"""Codecs that compress."""

_SLACK = 4
"""By how much filters may widen rows: float64 stored for float16."""


class InsideStore(LocalStore):
    """The files below `root`. What is written counts once `publish` has returned."""

    def __init__(self, root: Any, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self._arrays: dict[str, tuple[list[str], int] | None] = {}
        self._sound: set[str] = set()
        self._held: dict[str, bytes] = {}

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return the bytes of a file, None where there is none.

        Raises:
            CorruptError: it lies elsewhere, or is made to do harm.
        """
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype, byte_range=byte_range)

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> Any:
        """Return parts of files, as `get` does."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    def get_sync(self, key: str, *, prototype: Any = None, byte_range: Any = None) -> Any:
        """Return what `get` does. Newer releases of zarr-python may read by this one alone."""
        data = self._held[key] if key in self._held else self._read(key)
        if data is None:
            return None
        whole = (prototype or default_buffer_prototype()).buffer.from_bytes(data)
        if byte_range is None:
            return whole
        start = getattr(byte_range, "start", getattr(byte_range, "offset", None))
        if start is None:
            return whole[max(0, len(data) - byte_range.suffix) :]
        return whole[start : getattr(byte_range, "end", len(data))]

    async def set(self, key: str, value: Any, *_: Any) -> None:
        """Write a chunk; hold metadata back."""
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Any) -> None:
        """As `set`."""
        self._check_writable()
        if key.rpartition("/")[2] in _METADATA:
            self._held[key] = value.to_bytes()
        else:
            self._write(key, value.to_bytes())

    async def set_if_not_exists(self, key: str, value: Any) -> None:
        """Write a file if there is none: zarr-python's own way writes another one first, which a kill leaves."""
        if await self.get(key) is None:
            await self.set(key, value)

    def publish(self) -> None:
        """Write the metadata that was held back, in the order in which it was first set."""
        for key in list(self._held):
            self._write(key, self._held[key])
            del self._held[key]

    def _write(self, key: str, data: bytes) -> None:
        path = os.path.join(str(self.root), *key.split("/"))
        disk.make_folder(os.path.dirname(path))
        disk.replace_file(path, data)

    def _read(self, key: str) -> bytes | None:
        path = os.path.join(str(self.root), *key.split("/"))
        folder, name = os.path.split(path)
        try:
            if folder not in self._sound:  # a file's own kind is seen when it is opened
                refuse_elsewhere(str(self.root), path)
                self._sound.add(folder)
            if name in _METADATA:
                return self._metadata(path, key.rpartition("/")[0])
            packed = self._array_of(key)
            with open_binary(path) as file:
                if packed is None:
                    return file.read()
                chain, nbytes = packed
                data = file.read(most_encoded(nbytes) + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except NotAFileError as error:
            if error.kind == "a folder":
                return None
            raise
        try:
            if len(data) > most_encoded(nbytes):
                raise ValueError(f"has {len(data):,} bytes")
            packed_by = next((codec for codec in reversed(chain) if codec in KNOWN), None)
            if packed_by is not None:  # one at most: `_packed_by` saw to it; a checksum after it does not matter
                refuse_bomb(packed_by, data, most_encoded(nbytes))
        except ValueError as error:
            raise CorruptError(f"{path}: {error}; a chunk has {nbytes:,} bytes") from None
        return data

    def _metadata(self, path: str, array: str) -> bytes:
        with open_binary(path) as file:
            data = file.read(JSON_NBYTES + 1)
        if len(data) > JSON_NBYTES:
            raise CorruptError(f"{path}: has more than {JSON_NBYTES:,} bytes, expected metadata")
        self._arrays[array] = _packed_by(path, read_json(path)) or self._arrays.get(array)
        return data

    def _array_of(self, key: str) -> tuple[list[str], int] | None:
        """Return how the chunks of the array are packed that a key belongs to."""
        parts = key.split("/")
        for stop in range(len(parts) - 1, 0, -1):
            found = self._arrays.get("/".join(parts[:stop]))
            if found is not None:
                return found
        return None


def refuse_bomb(name: str, data: bytes, most: int) -> None:
    """Raise ValueError if the header of compressed bytes, where a decoder makes room by it, says more than `most`."""
    if name == "zstd":
        size = _zstd_size(data)
    elif name in _SIZED:
        begin, header_nbytes = _SIZED[name]
        if len(data) < header_nbytes:
            raise ValueError("is too short")
        size = int.from_bytes(data[begin : begin + 4], "little")
    else:
        return
    if size > most:
        raise ValueError(f"becomes more than {most} bytes")


def _zstd_size(data: bytes) -> int:
    """Return the content size from the header of the frame (RFC 8878, section 3.1.1.1)."""
    if data[:4] != b"\x28\xb5\x2f\xfd" or len(data) < 5:
        raise ValueError("is no frame of Zstandard")
    flags = data[4]
    alone = flags >> 5 & 1
    width = (1 if alone else 0, 2, 4, 8)[flags >> 6]
    at = 5 + (1 - alone) + (0, 1, 2, 4)[flags & 3]
    if not width or len(data) < at + width:
        raise ValueError("does not say how large it becomes")
    return int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)


def _itemsize(path: str, kind: Any) -> int:
    """Return the bytes of a value of a data type of Zarr 3: a name, or one with a length."""
    if isinstance(kind, dict):
        return int(kind.get("configuration", {}).get("length_bytes", 8))
    try:
        return int(np.dtype(kind).itemsize)
    except TypeError:
        raise UnsupportedError(f"{path}: is of data type {kind!r}, which no column is") from None


def _packed_by(path: str, metadata: Any) -> tuple[list[str], int] | None:
    """Return the codecs of an array, and the bytes of a chunk; None for metadata of anything else."""
    if not isinstance(metadata, dict):
        raise CorruptError(f"{path}: is no metadata of Zarr")
    if "shape" not in metadata:
        return None
    try:
        if metadata.get("zarr_format") == 2:
            filters, last = metadata.get("filters") or [], metadata.get("compressor")
            given = [*filters, *([last] if last else [])]
            chain = [str(c["id"]) for c in given]
            chunk, itemsize = metadata["chunks"], np.dtype(metadata["dtype"]).itemsize
            if np.dtype(metadata["dtype"]).hasobject:
                raise UnsupportedError(f"{path}: holds Python objects, whose bytes may run code")
        else:
            chain = [str(c["name"]).removeprefix("numcodecs.") for c in metadata["codecs"]]
            chunk = metadata["chunk_grid"]["configuration"]["chunk_shape"]
            itemsize = _itemsize(path, metadata["data_type"])
        if not all(type(n) is int and n >= 0 for n in (*metadata["shape"], *chunk)):
            raise ValueError(f"shape {metadata['shape']}, chunks {chunk}")
        nbytes = math.prod(chunk) * max(1, itemsize) * _SLACK
    except UnsupportedError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{path}: does not describe a column: {error!r}") from None
    unknown = [name for name in chain if name not in KNOWN | EXACT | _ROWS]
    if unknown or sum(name in KNOWN for name in chain) > 1:
        raise UnsupportedError(
            f"{path}: is read by codecs {json.dumps(chain)}, expected one that compresses of "
            f"{sorted(KNOWN)}, and such as {sorted(EXACT | _ROWS)}: others may run code that the file brings, "
            "or take any amount of memory; store the array with one of these"
        )
    if nbytes > LARGEST_ROW * _SLACK:
        raise CorruptError(f"{path}: has chunks of {nbytes // _SLACK:,} bytes, expected at most {LARGEST_ROW:,}")
    return chain, nbytes
