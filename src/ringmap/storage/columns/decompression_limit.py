"""Limits decompression: the decompressed size is known before memory is allocated for it.

    a file of 5 KB  --"I become 100 GB"-->  refused, before a byte of it is decompressed

Blosc, Zstandard and LZ4 declare their size in a header, and their decoders allocate no more than that: it is read
and compared. Deflate, bzip2 and LZMA do not: they are decompressed up to the bound, and no byte further.
Invariants: no more than the bound is held at any time, except for a window of LZMA (`_LZMA_NBYTES`).
Not here: the decompression that is kept (codecs.py), how large a chunk may be (zarr.py, formats/zarr).
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

__all__ = ["EXACT", "KNOWN", "refuse_bomb"]

EXACT = frozenset({"adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3", "shuffle"})
"""Codecs that keep the number of bytes, except for a checksum."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LZMA_NBYTES = 256 << 20
_PIECE = 1 << 20


def refuse_bomb(name: str, options: Mapping[str, Any], data: Any, most: int) -> None:
    """Raise ValueError if bytes compressed by codec `name` become more than `most`.

    Cost: Blosc, Zstandard, LZ4: O(1). The others are decompressed once for this check.

    Example:
        >>> import zlib
        >>> refuse_bomb("zlib", {}, zlib.compress(bytes(100)), 100)
        >>> refuse_bomb("zlib", {}, zlib.compress(bytes(101)), 100)
        Traceback (most recent call last):
        ValueError: becomes more than 100 bytes
    """
    data = bytes(data)
    if name in _SIZES:
        size = _SIZES[name](data)
        if size > most:
            raise ValueError(f"becomes {size} bytes, expected at most {most}")
    else:
        _inflate(name, options, data, most)


def _inflate(name: str, options: Mapping[str, Any], data: bytes, most: int) -> bytes:
    """Decompress deflate, bzip2 or LZMA, or raise ValueError if the result is more than `most` bytes."""
    parts, size = [], 0
    try:
        with _reader(name, options, data) as file:
            while part := file.read(min(_PIECE, most + 1 - size)):
                parts.append(part)
                size += len(part)
                if size > most:
                    raise ValueError(f"becomes more than {most} bytes")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"can't be unpacked: {error}") from None
    return b"".join(parts)


def _reader(name: str, options: Mapping[str, Any], data: bytes) -> Any:
    raw = io.BytesIO(data)
    if name == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if name == "bz2":
        return bz2.BZ2File(raw)
    if name == "zlib":
        return _Stream(data, zlib.decompressobj())
    if options.get("format", lzma.FORMAT_XZ) == lzma.FORMAT_RAW:
        raise ValueError("LZMA without a header does not say how much memory it takes")
    return _Stream(data, lzma.LZMADecompressor(lzma.FORMAT_AUTO, _LZMA_NBYTES))


class _Stream:
    """The output of a decompressor, piece by piece."""

    def __init__(self, data: bytes, decompressor: Any) -> None:
        self._left, self._by = data, decompressor

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no file is open."""

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, none at the end."""
        if self._by.eof or size <= 0:
            return b""
        part: bytes = self._by.decompress(self._left, size)
        self._left = getattr(self._by, "unconsumed_tail", b"")
        if not part and not self._by.eof:
            raise EOFError("ends early")
        return part


def _size_at(begin: int, header_nbytes: int, data: bytes) -> int:
    if len(data) < header_nbytes:
        raise ValueError("is too short")
    return int.from_bytes(data[begin : begin + 4], "little")


def _zstd_size(data: bytes) -> int:
    """Return the content size from the header of the frame (RFC 8878, section 3.1.1.1)."""
    if data[:4] != _ZSTD_MAGIC or len(data) < 5:
        raise ValueError("is no frame of Zstandard")
    flags = data[4]
    alone = flags >> 5 & 1
    width = (1 if alone else 0, 2, 4, 8)[flags >> 6]
    at = 5 + (1 - alone) + (0, 1, 2, 4)[flags & 3]
    if not width or len(data) < at + width:
        raise ValueError("does not say how large it becomes")
    return int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)


_SIZES: dict[str, Callable[[bytes], int]] = {
    "blosc": partial(_size_at, 4, 16),
    "lz4": partial(_size_at, 0, 4),
    "zstd": _zstd_size,
}

KNOWN = frozenset({*_SIZES, "gzip", "zlib", "bz2", "lzma"})
"""Codecs of bytes whose output size is known, or can be found, before decoding."""
