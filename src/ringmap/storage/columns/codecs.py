"""Codecs: how the rows of a chunk become the bytes of its file, and come back.

    rows (n, *shape) -> bytes, little-endian -> compressed -> checksummed -> file
                        "bytes"                 "blosc" ..    "crc32c"

They are Zarr's own, by their names in `zarr.json`. Chains of the common ones run on numcodecs
directly (`Direct`); any other runs through zarr-python (`ThroughZarr`), ten times slower. A test
holds that both say the same. A chain with a short name does not import zarr-python at all.

Releases of zarr-python differ: of it we use `create_array`, `MemoryStore`, `zarr.registry` and the
classes of `zarr.abc.codec`, and we read what it writes into `zarr.json`.

Invariants: nothing is unpacked that becomes more than a chunk takes (bounds.py): a file may be forged.
A chain that can't give back every bit is refused before a column is made with it.
Not here: which rows a chunk has, and where its file is (zarr.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ringmap.errors import CorruptError, InputError
from ringmap.storage.columns.bounds import EXACT, KNOWN, inflate, refuse_bomb
from ringmap.storage.schema import ColumnSpec

__all__ = [
    "NAMED", "Codec", "Undecodable", "array_metadata", "as_chain", "codec_of", "most_encoded", "normalised",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]
Chain = list[dict[str, Any]]
"""Codecs as `zarr.json` names them: the array's, the one that makes bytes, those of bytes."""

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC = {"name": "crc32c"}
NAMED: dict[str, list[dict[str, Any]]] = {
    "zstd": [
        {
            "name": "blosc",
            "configuration": {"cname": "zstd", "clevel": 3, "shuffle": "shuffle", "blocksize": 0},
        },
        _CRC,
    ],
    "lz4": [
        {
            "name": "blosc",
            "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0},
        },
        _CRC,
    ],
    "none": [_CRC],
}
"""Short names for chains: small, fast, and no compression. Each ends in a checksum: a damaged file is never decoded.

Blosc's `typesize` is that of the column."""

_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_CRC_NBYTES = 4

ENCODED_SPARE = 4096
"""Bytes by which a chunk that can't be compressed may grow."""


class Undecodable(CorruptError):
    """The bytes of a chunk are not what was written."""


class Codec(Protocol):
    """A chain, for chunks of one shape. Thread-safe."""

    def encode(self, rows: Array) -> bytes:
        """Return the bytes of a whole chunk, `(steps, row bytes)` uint8, C-contiguous."""
        ...

    def decode(self, data: bytes, out: Array) -> None:
        """Fill `out`, a whole chunk as above, or raise Undecodable."""
        ...


def array_metadata(spec: ColumnSpec, rows: int, steps: int, chain: Sequence[Any]) -> dict[str, Any]:
    """Return the `zarr.json` of a column: Zarr format 3, one file per chunk, all of them in one folder."""
    zero: Any = {"b": False, "c": [0.0, 0.0], "f": 0.0}.get(spec.dtype.kind, 0)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, *spec.shape],
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [steps, *spec.shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": zero,
        "codecs": list(chain),
        "attributes": {},
    }


def normalised(given: Any, spec: ColumnSpec, steps: int, where: str) -> Chain:
    """Return a chain as `zarr.json` is to name it, every default spelled out.

    Args:
        given: a short name, or codecs of Zarr 3: objects of `zarr.codecs`, or what `zarr.json` has for them.
        spec: the column.
        steps: of a chunk.
        where: what to call it in an error.

    Raises:
        InputError: a codec that there is not, or options that it has not; a chain that does not suit the
            dtype, or does not give back every bit.
    """
    wanted = as_chain(given, where)
    try:
        if isinstance(given, str):  # proven by the tests, for every dtype
            return [_for_column(codec, spec) for codec in wanted]
        store, _ = _zarr_array(array_metadata(spec, steps, steps, wanted))
        written = json.loads(store["zarr.json"].to_bytes())
        chain: Chain = [_for_column(codec, spec) for codec in written["codecs"]]
        _prove_lossless(codec_of(chain, spec, steps), spec, steps)
        _prove_lossless(ThroughZarr(chain, spec, steps), spec, steps)
    except InputError as error:
        raise InputError(f"{where}: column {spec.name!r}: {error}") from None
    except Exception as error:  # whatever a codec of somebody else's raises
        raise InputError(
            f"{where}: column {spec.name!r} {spec.shape} {spec.dtype}: codecs {wanted} can't be used: {error}"
        ) from error
    return chain


def codec_of(chain: Chain, spec: ColumnSpec, steps: int) -> Codec:
    """Return what encodes and decodes chunks of `steps` rows."""
    first, rest = chain[0], chain[1:]
    if first in (_LITTLE, {"name": "bytes"}) and all(codec["name"] in _DIRECT for codec in rest):
        try:
            return Direct(rest, spec, steps)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Undecodable(
                f"column {spec.name!r}: codecs {chain} do not make sense: {error!r}"
            ) from None
    return ThroughZarr(chain, spec, steps)


def as_chain(given: Any, where: str) -> Chain:
    """Return codecs as dictionaries, the one that makes bytes among them.

    Raises:
        InputError: a name that there is not, or what is no codec.
    """
    if isinstance(given, str):
        if given not in NAMED:
            raise InputError(
                f"{where}: unknown codecs {given!r}; known: {sorted(NAMED)}, or a list of Zarr codecs"
            )
        return [_LITTLE, *NAMED[given]]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise InputError(
            f"{where}: codecs must be one of {sorted(NAMED)} or a list of Zarr codecs, got {given!r}"
        )
    chain: Chain = []
    kinds: list[int] = []
    for codec in given:
        described = codec.to_dict() if hasattr(codec, "to_dict") else codec
        if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
            raise InputError(
                f"{where}: a codec is an object of zarr.codecs, or {{'name': ..., 'configuration': ...}}, "
                f"got {codec!r}"
            )
        try:
            kinds.append(_kind(described["name"]))
        except LookupError:
            raise InputError(
                f"{where}: unknown codec {described['name']!r}: zarr {_zarr_version()} has none of that name"
            ) from None
        chain.append(_plain(described))
    if _TO_BYTES not in kinds:
        chain.insert(kinds.count(_OF_ARRAYS), _LITTLE)
    return chain


_OF_ARRAYS, _TO_BYTES, _OF_BYTES = range(3)


def _kind(name: str) -> int:
    """Return which part of a chain a codec belongs to.

    Raises:
        LookupError: zarr-python has none of that name.
    """
    from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec
    from zarr.registry import get_codec_class

    try:
        kind = get_codec_class(name)
    except (KeyError, ValueError) as error:
        raise LookupError(name) from error
    if issubclass(kind, ArrayArrayCodec):
        return _OF_ARRAYS
    return _TO_BYTES if issubclass(kind, ArrayBytesCodec) else _OF_BYTES


def _for_column(codec: Mapping[str, Any], spec: ColumnSpec) -> dict[str, Any]:
    """Return a codec with what follows from the column's dtype, alike for every release of zarr-python."""
    plain = _plain(codec)
    if plain["name"] == "bytes" and spec.dtype.itemsize == 1:
        return {"name": "bytes"}
    options = plain.get("configuration", {})
    if plain["name"] == "blosc":
        options.setdefault("typesize", spec.dtype.itemsize)
    if plain["name"] == "sharding_indexed":
        options["codecs"] = [_for_column(inner, spec) for inner in options["codecs"]]
    return plain


def _plain(described: Any) -> dict[str, Any]:
    """Return a codec's description as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(described)))
    return plain


def _zarr_version() -> str:
    import zarr

    return zarr.__version__


def _prove_lossless(codec: Codec, spec: ColumnSpec, steps: int) -> None:
    """Raise InputError unless every bit comes back: of noise, of extremes, of a ramp, of zeros.

    Noise has every bit pattern: NaNs with a payload, numbers beyond 2**53. A lossy codec changes it, and
    would wear down rows that share a chunk with new ones at every rewrite.
    """
    nbytes = spec.row_nbytes
    rng = np.random.default_rng(0)
    ramp = np.arange(steps * nbytes // spec.dtype.itemsize).astype(spec.dtype)
    noise = rng.integers(0, 256, (steps, nbytes), np.uint8)
    if spec.dtype.kind == "b":
        noise &= 1
    ends = np.resize(np.array([0, 255], np.uint8), (steps, nbytes)) & noise
    for rows in (noise, ends, ramp.view(np.uint8).reshape(steps, nbytes), np.zeros_like(noise)):
        out = np.full_like(rows, 1)
        codec.decode(codec.encode(rows), out)
        if not np.array_equal(out, rows):
            raise InputError(
                "codecs that lose bits can't be used: rows that share a chunk with new ones are encoded again "
                "and again; round or scale the values before they are stored, or use another codec"
            )


# -- chains that numcodecs runs by itself ----------------------------------------------------------


class Direct:
    """A chain of the common codecs, without zarr-python's machinery between them."""

    def __init__(self, chain: Sequence[Mapping[str, Any]], spec: ColumnSpec, steps: int) -> None:
        self._nbytes = steps * spec.row_nbytes
        self._most = most_encoded(self._nbytes)
        self._stages = [_DIRECT[codec["name"]](codec.get("configuration", {})) for codec in chain]

    def encode(self, rows: Array) -> bytes:
        """Return the bytes of a whole chunk."""
        data: Any = rows.reshape(-1)
        for stage in self._stages:
            data = stage.encode(data)
        return data if isinstance(data, bytes) else bytes(data)

    def decode(self, data: bytes, out: Array) -> None:
        """Fill `out`, or raise Undecodable."""
        flat = out.reshape(-1)
        try:
            for stage in self._stages[:0:-1]:
                data = stage.decode(data, None, self._most)
            if self._stages:
                data = self._stages[0].decode(data, flat, self._nbytes)
        except Undecodable:
            raise
        except Exception as error:  # of every kind, by codec
            raise Undecodable(f"can't be decoded: {error}") from None
        if data is not None:
            if len(data) != self._nbytes:
                raise Undecodable(f"holds {len(data)} bytes, expected {self._nbytes}")
            flat[:] = np.frombuffer(data, np.uint8)


class _Blosc:
    """Compression by Blosc."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from numcodecs import blosc

        # As zarr-python does. Else the main thread takes a lock that it shares with its forked children,
        # and a child that is killed in mid-chunk keeps it for ever.
        blosc.use_threads = False
        self._blosc = blosc
        self._options = (
            options["cname"].encode(), options["clevel"], _SHUFFLES[options["shuffle"]],
            options["blocksize"], options["typesize"],
        )  # fmt: skip

    def encode(self, data: Any) -> Any:
        """Return `data` compressed."""
        return self._blosc.compress(data, *self._options)

    def decode(self, data: bytes, out: Array | None, most: int) -> bytes | None:
        """Return `data` as it was, or None when it was put into `out`, which it fills."""
        if out is None:
            refuse_bomb("blosc", {}, data[:16], most)
            whole: bytes = self._blosc.decompress(data)
            return whole
        nbytes = int.from_bytes(data[4:8], "little")
        if nbytes != len(out):
            raise Undecodable(f"holds {nbytes} bytes, expected {len(out)}")
        self._blosc.decompress(data, out)
        return None


class _Zstd:
    """Compression by Zstandard."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from numcodecs.zstd import Zstd

        self._codec = Zstd(level=options["level"], checksum=options["checksum"])

    def encode(self, data: Any) -> Any:
        """Return `data` compressed."""
        return self._codec.encode(data)

    def decode(self, data: bytes, out: Array | None, most: int) -> bytes | None:
        """Return `data` as it was."""
        refuse_bomb("zstd", {}, data[:32], most)
        whole: bytes = self._codec.decode(data)
        return whole


class _Gzip:
    """Compression by zlib."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from numcodecs.gzip import GZip

        self._codec = GZip(level=options["level"])

    def encode(self, data: Any) -> Any:
        """Return `data` compressed."""
        return bytes(self._codec.encode(data))

    def decode(self, data: bytes, out: Array | None, most: int) -> bytes | None:
        """Return `data` as it was."""
        return inflate("gzip", {}, data, most)


class _Crc32c:
    """A checksum behind the bytes."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import google_crc32c

        self._value = google_crc32c.value

    def encode(self, data: Any) -> Any:
        """Return `data` and its checksum."""
        whole = bytes(data)
        return whole + self._value(whole).to_bytes(_CRC_NBYTES, "little")

    def decode(self, data: bytes, out: Array | None, most: int) -> bytes | None:
        """Return `data` without its checksum."""
        body = data[:-_CRC_NBYTES]
        if self._value(body).to_bytes(_CRC_NBYTES, "little") != data[-_CRC_NBYTES:]:
            raise Undecodable("does not match its checksum")
        return body


_DIRECT: dict[str, Any] = {"blosc": _Blosc, "zstd": _Zstd, "gzip": _Gzip, "crc32c": _Crc32c}


# -- any other -------------------------------------------------------------------------------------


class ThroughZarr:
    """Any chain, by zarr-python: a chunk passes through an array of one chunk in memory, one per thread.

    When it is decoded, what compressed it last is undone ahead, within bounds, as far as we know that codec.
    """

    def __init__(self, chain: Chain, spec: ColumnSpec, steps: int) -> None:
        known = len(chain)
        while known > 1 and _plain_name(chain[known - 1]) in KNOWN | EXACT:
            known -= 1
        self._encoded = array_metadata(spec, steps, steps, chain)
        self._left = array_metadata(spec, steps, steps, chain[:known])
        self._bounded = chain[known:]
        self._most = most_encoded(steps * spec.row_nbytes)
        self._key = ".".join(["c", "0", *("0" for _ in spec.shape)])
        self._spec = spec
        self._shape = (steps, *spec.shape)
        self._own = threading.local()

    def _array(self, which: str) -> tuple[dict[str, Any], Any]:
        """Return this thread's store, and the array over it, of the whole chain or of what is left of it."""
        if not hasattr(self._own, which):
            metadata = self._encoded if which == "encoded" else self._left
            setattr(self._own, which, _zarr_array(metadata))
        pair: tuple[dict[str, Any], Any] = getattr(self._own, which)
        return pair

    def encode(self, rows: Array) -> bytes:
        """Return the bytes of a whole chunk."""
        store, array = self._array("encoded")
        array[...] = rows.reshape(-1).view(self._spec.dtype).reshape(self._shape)
        data: bytes = store.pop(self._key).to_bytes()
        return data

    def decode(self, data: bytes, out: Array) -> None:
        """Fill `out`, or raise Undecodable."""
        store: dict[str, Any] = {}
        try:
            store, array = self._array("left")
            for codec in reversed(self._bounded):
                data = _undo(codec, data, self._most)
            # A buffer of zarr's, of the class that it wrote its metadata with: their module has moved.
            store[self._key] = type(store["zarr.json"]).from_bytes(data)
            values = np.asarray(array[...])
        except Exception as error:  # of every kind, by codec
            raise Undecodable(f"can't be decoded: {error}") from None
        finally:
            store.pop(self._key, None)
        out.reshape(-1)[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def most_encoded(nbytes: int) -> int:
    """Return the bytes that a chunk of `nbytes` may take at any stage of its chain."""
    return 2 * nbytes + ENCODED_SPARE


def _plain_name(codec: Mapping[str, Any]) -> str:
    return str(codec["name"]).removeprefix("numcodecs.")


def _undo(codec: Mapping[str, Any], data: bytes, most: int) -> bytes:
    """Return what a codec of bytes was given, if that is no more than `most` bytes."""
    from numcodecs import get_codec

    name, options = _plain_name(codec), dict(codec.get("configuration") or {})
    if codec["name"] in _DIRECT:
        whole = _DIRECT[name](options).decode(data, None, most)
    else:
        if name in KNOWN:
            refuse_bomb(name, options, data, most)
        whole = get_codec({"id": name, **options}).decode(data)
    return bytes(whole)


def _zarr_array(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a store in memory, and a Zarr array over it, which keeps chunks of zeros too: -0.0 equals 0.0."""
    import zarr
    from zarr.storage import MemoryStore

    kinds: tuple[Chain, Chain, Chain] = ([], [], [])
    for codec in metadata["codecs"]:
        kinds[_kind(codec["name"])].append(codec)
    store: dict[str, Any] = {}
    array = zarr.create_array(
        MemoryStore(store),
        shape=metadata["shape"],
        chunks=metadata["chunk_grid"]["configuration"]["chunk_shape"],
        dtype=metadata["data_type"],
        fill_value=np.zeros((), metadata["data_type"])[()],
        filters=kinds[_OF_ARRAYS],
        serializer=kinds[_TO_BYTES][0],
        compressors=kinds[_OF_BYTES],
        chunk_key_encoding=metadata["chunk_key_encoding"],
        config={"write_empty_chunks": True},
    )
    return store, array
