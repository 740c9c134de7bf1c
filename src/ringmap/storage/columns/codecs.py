"""Codecs: encode the rows of a chunk to the bytes of its file, and decode them.

    rows (n, *shape) -> bytes, little-endian -> compressed -> checksummed -> file
                        "bytes"                 "blosc"       "crc32c"

A new column has one of three chains (`NAMED`), which run on numcodecs and google-crc32c, without zarr-python
(`Direct`). Earlier releases accepted any codecs of Zarr: a column with others is read and written by zarr-python
(`ThroughZarr`), ten times slower. A test verifies that both return the same bytes.

Releases of zarr-python differ: we use only `zarr.create` and `MemoryStore` of it.

Invariants: nothing is decompressed to more than the size of a chunk (decompression_limit.py): a file may be forged.
Not here: which rows a chunk has, and where its file is (zarr.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import google_crc32c
import numpy as np

from ringmap.errors import CorruptError, InputError
from ringmap.storage.columns.decompression_limit import EXACT, KNOWN, refuse_bomb
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["NAMED", "Codec", "Undecodable", "chain_of", "check_codecs", "codec_of", "most_encoded"]

Array = np.ndarray[Any, np.dtype[Any]]
Chain = list[dict[str, Any]]
"""Codecs as `zarr.json` names them: array to array, array to bytes, bytes to bytes."""

NAMED: dict[str, tuple[str, int] | None] = {"zstd": ("zstd", 3), "lz4": ("lz4", 5), "none": None}
"""The chains of a column: small, fast, not compressed; Blosc's compressor and level, with shuffled bytes.

Each ends in a checksum: a damaged file is never decoded."""

_CRC_NBYTES = 4
_WITH_ITS_CRC = 0x48674BC7
"""The checksum of any bytes with their own checksum behind them, as every CRC has such a number."""
_SHUFFLE = 1


class Undecodable(CorruptError):
    """The bytes of a chunk differ from what was written."""


class Codec(Protocol):
    """A chain, for chunks of one shape. Thread-safe."""

    def encode(self, rows: Array) -> bytes:
        """Return the bytes of a whole chunk, `(steps, row bytes)` uint8, C-contiguous."""
        ...

    def decode(self, data: bytes, out: Array) -> None:
        """Fill `out`, a whole chunk as above, or raise Undecodable."""
        ...


def check_codecs(given: Any, where: str) -> None:
    """Raise InputError if the value is not the name of a chain."""
    if not isinstance(given, str) or given not in NAMED:
        raise InputError(
            f"{where}: unknown codecs {given!r}; expected one of {sorted(NAMED)} (a buffer that was made with "
            "other codecs opens without naming them)"
        )


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


def codec_of(chain: Chain, spec: ColumnSpec, steps: int) -> Codec:
    """Return the chain that encodes and decodes chunks of `steps` rows."""
    for name, packing in NAMED.items():
        if chain == chain_of(name, spec):
            return Direct(packing, spec, steps)
    return ThroughZarr(chain, spec, steps)


def most_encoded(nbytes: int) -> int:
    """Return the maximum size of `nbytes` of a chunk at any stage of its chain."""
    return 2 * nbytes + 4096


class Direct:
    """A named chain, on numcodecs.

    Args:
        packing: Blosc's compressor and level, or None.
        spec: the column.
        steps: rows per chunk.
    """

    def __init__(self, packing: tuple[str, int] | None, spec: ColumnSpec, steps: int) -> None:
        self._nbytes = steps * spec.row_nbytes
        self._blosc: Any = None
        if packing is not None:
            self._blosc = _blosc()
            self._options = (packing[0].encode(), packing[1], _SHUFFLE, 0, spec.dtype.itemsize)

    def encode(self, rows: Array) -> bytes:
        """Return the bytes of a whole chunk."""
        data = rows.tobytes() if self._blosc is None else bytes(self._blosc.compress(rows.reshape(-1), *self._options))
        return data + _crc(data)

    def decode(self, data: bytes, out: Array) -> None:
        """Fill `out`, or raise Undecodable."""
        body, flat = _without_crc(data), out.reshape(-1)
        packed = self._blosc is not None
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


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(_CRC_NBYTES, "little")


def _without_crc(data: bytes) -> memoryview:
    """Return what stands before a checksum, without a copy, or raise Undecodable."""
    if google_crc32c.value(data) != _WITH_ITS_CRC:
        raise Undecodable("does not match its checksum")
    return memoryview(data)[:-_CRC_NBYTES]


def _blosc() -> Any:
    """Return numcodecs' Blosc without threads, as zarr-python configures it.

    Otherwise the main thread takes a lock that it shares with its forked children, and a child that is killed
    during a chunk keeps it forever.
    """
    from numcodecs import blosc

    blosc.use_threads = False
    return blosc


class ThroughZarr:
    """Any chain, by zarr-python: a chunk passes through an array of one chunk in memory, one per thread.

    For decoding, the last compression is undone first, within bounds, if we know that codec.
    """

    def __init__(self, chain: Chain, spec: ColumnSpec, steps: int) -> None:
        known = len(chain)
        while known > 1 and _plain_name(chain[known - 1]) in KNOWN | EXACT:
            known -= 1
        self._chain, self._left, self._bounded = chain, chain[:known], chain[known:]
        self._most = most_encoded(steps * spec.row_nbytes)
        self._spec = spec
        self._shape = (steps, *spec.shape)
        self._key = ".".join(["c", *("0" for _ in self._shape)])
        self._own = threading.local()

    def encode(self, rows: Array) -> bytes:
        """Return the bytes of a whole chunk."""
        store, array = self._array(self._chain)
        array[...] = rows.reshape(-1).view(self._spec.dtype).reshape(self._shape)
        data: bytes = store.pop(self._key).to_bytes()
        return data

    def decode(self, data: bytes, out: Array) -> None:
        """Fill `out`, or raise Undecodable."""
        store, array = self._array(self._left)
        try:
            for codec in reversed(self._bounded):
                data = _undo(codec, data, self._most)
            # A buffer class of zarr's, taken from its metadata object: its module has moved between releases.
            store[self._key] = type(store["zarr.json"]).from_bytes(data)
            values = np.asarray(array[...])
        except Exception as error:  # any exception class, depending on the codec
            raise Undecodable(f"can't be decoded: {error}") from None
        finally:
            store.pop(self._key, None)
        out.reshape(-1)[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def _array(self, chain: Chain) -> tuple[dict[str, Any], Any]:
        """Return this thread's store in memory, and the array over it with this chain.

        It also stores chunks of zeros: -0.0 equals 0.0.

        Raises:
            Undecodable: zarr-python has no such codecs.
        """
        made, kind = self._own.__dict__, str(len(chain))
        if kind not in made:
            import zarr
            from zarr.storage import MemoryStore

            _blosc()
            store: dict[str, Any] = {}
            try:
                array = zarr.create(
                    store=MemoryStore(store),
                    shape=self._shape,
                    chunks=self._shape,
                    dtype=self._spec.dtype,
                    fill_value=np.zeros((), self._spec.dtype)[()],
                    codecs=chain,
                    zarr_format=3,
                    chunk_key_encoding=("default", "."),
                    config={"write_empty_chunks": True},
                )
            except Exception as error:  # any exception class, depending on the codec
                raise Undecodable(
                    f"is stored by codecs {chain}, which zarr {zarr.__version__} can't use: {error}"
                ) from None
            made[kind] = store, array
        pair: tuple[dict[str, Any], Any] = made[kind]
        return pair


def _plain_name(codec: Mapping[str, Any]) -> str:
    return str(codec["name"]).removeprefix("numcodecs.")


def _undo(codec: Mapping[str, Any], data: bytes, most: int) -> bytes:
    """Return the input of a bytes codec, if that is at most `most` bytes."""
    from numcodecs import get_codec

    name, options = _plain_name(codec), dict(codec.get("configuration") or {})
    if codec["name"] == "crc32c":  # numcodecs has it in some installations
        return bytes(_without_crc(data))
    if name in KNOWN:
        refuse_bomb(name, options, data, most)
    if name == codec["name"]:  # Zarr's own, with other options, and not needed here
        options = {}
    return bytes(get_codec({"id": name, **options}).decode(data))
