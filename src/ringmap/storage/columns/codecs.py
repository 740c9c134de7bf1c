"""Codecs: encode the rows of a chunk to the bytes of its file, and decode them.

    rows (n, *shape) -> bytes, little-endian -> compressed -> checksummed -> file
                        "bytes"                 "blosc"       "crc32c"

Three chains of Zarr (`NAMED`), on numcodecs and google-crc32c, without zarr-python, which takes ten times as long. A
test verifies that it reads and writes the same bytes.

Invariants: a chunk has the size that its shape and dtype say; memory for no more is allocated, whatever its file says:
it may be forged.
Not here: which rows a chunk has, and where its file is (zarr.py).
"""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np

from ringmap.errors import CorruptError
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["NAMED", "Codec", "Undecodable", "chain_of", "most_encoded"]

Array = np.ndarray[Any, np.dtype[Any]]
Chain = list[dict[str, Any]]
"""Codecs as `zarr.json` names them: array to bytes, then bytes to bytes."""

NAMED: dict[str, tuple[str, int] | None] = {"zstd": ("zstd", 3), "lz4": ("lz4", 5), "none": None}
"""The chains of a column: small, fast, not compressed; Blosc's compressor and level, with shuffled bytes.

Each ends in a checksum: a damaged file is never decoded."""

_CRC_NBYTES = 4
_WITH_ITS_CRC = 0x48674BC7
"""The checksum of any bytes with their own checksum behind them, as every CRC has such a number."""
_SHUFFLE = 1


class Undecodable(CorruptError):
    """The bytes of a chunk differ from what was written."""


def chain_of(name: str, spec: ColumnSpec) -> Chain:
    """Return a chain as `zarr.json` names it, with every default written out.

    Example:
        >>> [codec["name"] for codec in chain_of("lz4", ColumnSpec("x", (3,), np.dtype("f4")))]
        ['bytes', 'blosc', 'crc32c']
    """
    chain: Chain = [{"name": "bytes"}]
    if spec.dtype.itemsize > 1:
        chain[0]["configuration"] = {"endian": "little"}
    if packing := NAMED[name]:
        options = {"cname": packing[0], "clevel": packing[1], "shuffle": "shuffle", "blocksize": 0}
        options["typesize"] = spec.dtype.itemsize
        chain.append({"name": "blosc", "configuration": options})
    return [*chain, {"name": "crc32c"}]


def most_encoded(nbytes: int) -> int:
    """Return the maximum size of `nbytes` of a chunk at any stage of its chain."""
    return 2 * nbytes + 4096


class Codec:
    """A chain, for chunks of one shape. Thread-safe.

    Args:
        name: of the chain.
        spec: the column.
        steps: rows per chunk.
    """

    def __init__(self, name: str, spec: ColumnSpec, steps: int) -> None:
        self._nbytes = steps * spec.row_nbytes
        self._blosc: Any = None
        if packing := NAMED[name]:
            from numcodecs import blosc

            # Without threads, as zarr-python has it: else the main thread takes a lock that it shares with its forked
            # children, and a child that is killed during a chunk keeps it forever.
            blosc.use_threads = False
            self._blosc = blosc
            self._options = (packing[0].encode(), packing[1], _SHUFFLE, 0, spec.dtype.itemsize)

    def encode(self, rows: Array) -> bytes:
        """Return the bytes of a whole chunk, `(steps, row bytes)` uint8, C-contiguous."""
        data = rows.tobytes() if self._blosc is None else bytes(self._blosc.compress(rows.reshape(-1), *self._options))
        return data + int(google_crc32c.value(data)).to_bytes(_CRC_NBYTES, "little")

    def decode(self, data: bytes, out: Array) -> None:
        """Fill `out`, a whole chunk as above, or raise Undecodable."""
        if google_crc32c.value(data) != _WITH_ITS_CRC:
            raise Undecodable("does not match its checksum")
        body, flat = memoryview(data)[:-_CRC_NBYTES], out.reshape(-1)
        packed = self._blosc is not None
        # Blosc decompresses as much as its header says; a checksum is no proof against forgers.
        nbytes = int.from_bytes(body[4:8], "little") if packed else len(body)
        if nbytes != self._nbytes:
            raise Undecodable(f"holds {nbytes} bytes, expected {self._nbytes}")
        if not packed:
            flat[:] = np.frombuffer(body, np.uint8)
            return
        try:
            self._blosc.decompress(body, flat)
        except Exception as error:  # any exception class, depending on the fault
            raise Undecodable(f"can't be decoded: {error}") from None
