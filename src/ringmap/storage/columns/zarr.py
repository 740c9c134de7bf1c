"""A column as a standard Zarr array: rows compressed in chunks of steps, one file per chunk.

    007-pixels.zarr/
      zarr.json     shape, dtype, codecs; in its attributes, the buffer and column of the array
      c.0.0.0.0     rows 0 to 7, compressed       |slot 0 .. 7|8 .. 15|16 .. 23| ...
      c.1.0.0.0     rows 8 to 15, compressed
      next.tmp      a chunk that a kill left unfinished: the next write replaces it

    rows (n, *shape) -> bytes, little-endian -> compressed -> checksummed -> file
                        "bytes"                 "blosc"       "crc32c"

The chains are Zarr's, on numcodecs and google-crc32c, without zarr-python, which takes ten times as long; a test
verifies that it reads and writes the same bytes. A chunk has the size that its shape and dtype say, and memory for no
more is allocated: its file may be forged.

A chunk is replaced whole: written beside the old one, then renamed over it. So a reader sees one or the
other, never a part. Rows of the chunk outside a write are copied into the new chunk.

Invariants: `zarr.json` never changes; a chunk file is whole at any moment; one that may hold rows
covered by a sync is replaced only by a file that is synced, and its folder with it. The other chunks
are those that this writer wrote since the last sync, or that the write covers completely.
Not here: which rows are live.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np

from ringmap.errors import ClosedError
from ringmap.storage.columns.base import Column, Live, Undecodable
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.checksums import json_checksum
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.process import Forkable, Renew
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.ring.arrays import distinct

__all__ = ["NAMED", "ChunkCache", "Codec", "ZarrColumn", "chain_of", "chunk_steps", "most_encoded", "read_zarr_label"]

Array = np.ndarray[Any, np.dtype[Any]]

_CACHED_NBYTES = 32 << 20
_OFTEN = 4
"""How many times larger than the cache a column may be for a random chunk to be found in it often enough."""
_SHRUNK = 4
"""How many times smaller than its rows a file must be to be cached. Others would push out each other: the system has
them anyway."""
_METADATA, _BESIDE = "zarr.json", "next.tmp"
_METADATA_LIMIT = 1 << 20

Chunk = Array | bytes
"""The rows of a chunk, or the bytes of its file."""
_ENTRY_NBYTES = 256
"""Of the objects around a file's bytes, which outweigh those of an empty picture."""

Chain = list[dict[str, Any]]
"""Codecs as `zarr.json` names them: array to bytes, then bytes to bytes."""

NAMED: dict[str, tuple[str, int] | None] = {"zstd": ("zstd", 3), "lz4": ("lz4", 5), "none": None}
"""The chains of a column: small, fast, not compressed; Blosc's compressor and level, with shuffled bytes.

Each ends in a checksum: a damaged file is never decoded."""

_CRC_NBYTES = 4
_WITH_ITS_CRC = 0x48674BC7
"""The checksum of any bytes with their own checksum behind them, as every CRC has such a number."""

log = logging.getLogger("ringmap")


def chunk_steps(spec: ColumnSpec) -> int:
    """Return the number of steps per chunk that suits a column: few, as a clip decodes whole chunks.

    More of small rows, for files of 16 KiB; fewer of huge rows, for 1 MiB, or one row.

    Example:
        >>> [chunk_steps(ColumnSpec("x", shape, np.dtype("u1"))) for shape in [(4,), (64, 64, 3), (640, 480, 3)]]
        [4096, 8, 1]
    """
    nbytes = max(1, spec.row_nbytes)
    return max(1, min(8, (1 << 20) // nbytes)) if nbytes > 2 << 10 else (16 << 10) // nbytes


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
    """A chain, by its name, for chunks of `steps` rows of a column. Thread-safe."""

    def __init__(self, name: str, spec: ColumnSpec, steps: int) -> None:
        self._nbytes = steps * spec.row_nbytes
        self._blosc: Any = None
        if packing := NAMED[name]:
            from numcodecs import blosc

            # Without threads, as zarr-python has it: else the main thread takes a lock that it shares with its forked
            # children, and a child that is killed during a chunk keeps it forever.
            blosc.use_threads = False
            self._blosc = blosc
            self._options = (packing[0].encode(), packing[1], blosc.SHUFFLE, 0, spec.dtype.itemsize)

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


class ZarrColumn(Column, Forkable):
    """Rows of one column in one folder. See `Column` for the arguments and the obligations.

    The `codecs` and `chunk_steps` of the label say how rows are stored.
    """

    def __init__(self, disk: Disk, path: str, spec: ColumnSpec, rows: int, label: dict[str, Any]) -> None:
        super().__init__(disk, path, spec, rows, label)
        self._row = spec.row_nbytes
        self._steps = int(label["chunk_steps"])
        self._metadata = _metadata(spec, rows, label)
        self._prefix, self._beside = os.path.join(path, "c."), os.path.join(path, _BESIDE)
        self._suffix = ".0" * len(spec.shape)
        self._limit = most_encoded(self._steps * self._row)
        self._cache = ChunkCache(_CACHED_NBYTES)
        self._dirty: set[int] = set()
        self._unsure: set[int] = set()
        self._lock = threading.Lock()
        self._last: tuple[int, Array] | None = None
        self._closed = False

    @cached_property
    def _codec(self) -> Codec:
        return Codec(self.label["codecs"], self.spec, self._steps)

    def reset_after_fork(self, renewed: Renew) -> None:
        """Replace the lock, which another thread may have held at the fork."""
        super().reset_after_fork(renewed)
        self._lock = threading.Lock()

    # -- the folder as a whole -----------------------------------------------------------------

    @classmethod
    def suits(cls, spec: ColumnSpec) -> bool:
        """Tell whether Zarr has a stable dtype for these rows: not for strings or dates; and empty rows need no
        file."""
        return spec.dtype.kind in "biufc" and spec.row_nbytes > 0

    @property
    def nbytes(self) -> int:
        """The exact size of the part that never changes: `zarr.json`."""
        return len(self._metadata)

    @property
    def nbytes_when_full(self) -> int:
        """The total size of the files if nothing can be compressed."""
        return -(-self.rows // self._steps) * (self._steps * self._row + 32)

    def create(self) -> None:
        """Make the folder, with no chunk in it, and sync it."""
        self.disk.make_folder(self.path)
        self.repair()

    def repair(self) -> None:
        """Write `zarr.json` again. Chunks do not change."""
        self.disk.replace_file(os.path.join(self.path, _METADATA), self._metadata)

    def faults(self) -> list[str]:
        """Return the faults of the folder as a whole, in words; chunks are not read."""
        if not self.exists():
            kind = self.disk.kind(self.path) or "a file"
            return [f"column folder is {kind}" + ("" if kind == "missing" else ", expected a folder")]
        try:
            data = self.disk.read_file(os.path.join(self.path, _METADATA), _METADATA_LIMIT)
        except FileNotFoundError:
            return [f"{_METADATA} is missing"]
        except NotAFileError as error:
            return [f"{_METADATA} is {error.kind}, expected a regular file"]
        if data == self._metadata:
            return []
        found = read_zarr_label(data)
        if found is not None and found != self.label:
            return [f"{_METADATA} is not that of this column: swapped or foreign folder"]
        return [f"{_METADATA} is not that of {self.rows} rows of {self.spec}: damaged"]

    def exists(self) -> bool:
        """Tell whether the path is a folder (not a link to one)."""
        return self.disk.is_folder(self.path)

    def strays(self) -> list[str]:
        """Return the names in the folder that are not part of a column."""
        count = -(-self.rows // self._steps)
        pattern = re.compile(r"c\.(0|[1-9][0-9]{0,17})" + re.escape(self._suffix))
        chunks = {name: pattern.fullmatch(name) for name in self.disk.names(self.path)}
        known = {name for name, chunk in chunks.items() if chunk is not None and int(chunk[1]) < count}
        known |= {_METADATA, f"{_METADATA}.tmp", _BESIDE}
        kinds = {name: self.disk.kind(os.path.join(self.path, name)) for name in chunks}
        # What is missing was renamed since, by a running writer; a link may lead anywhere.
        return [name for name, kind in kinds.items() if kind != "missing" and (kind or name not in known)]

    # -- writing -------------------------------------------------------------------------------

    def _split(self, slot: int, count: int) -> list[tuple[int, int, int]]:
        """Return the chunks that hold rows (no wrap), each with the slots `[begin, end)` of those in it."""
        steps, stop = self._steps, slot + count
        chunks = range(slot // steps, -(-stop // steps)) if count else ()
        return [(chunk, max(slot, chunk * steps), min(stop, (chunk + 1) * steps)) for chunk in chunks]

    def rewrite(self, slot: int, count: int) -> None:
        """Write every chunk of these rows again, unchanged; the next `sync` makes that durable."""
        for chunk, _, _ in self._split(slot, count):
            data = self._read(chunk)
            if data is not None:
                self._unsure.add(chunk)
                self._put(chunk, data, synced=True)

    def touched(self, slot: int, count: int) -> None:
        """Let the next `sync` cover these rows: their writer is gone, and so is its record of unsynced chunks."""
        self._unsure.update(chunk for chunk, _, _ in self._split(slot, count))

    def write(self, slot: int, values: Array, live: Live | None = None) -> None:
        """Write rows from `slot` on, chunk by chunk.

        Raises:
            CorruptError: a chunk that must be changed can't be read, and holds live rows.
        """
        raw = values.reshape(len(values), -1).view(np.uint8) if len(values) else values
        last, self._last = self._last, None
        for chunk, begin, end in self._split(slot, len(values)):
            first, piece = chunk * self._steps, raw[begin - slot : end - slot]
            covers = begin == first and end == min(first + self._steps, self.rows)
            if len(piece) == self._steps:
                whole = piece
            else:
                whole = last[1] if last is not None and last[0] == chunk else self._stored(chunk, begin, end, live)
                whole[begin - first : end - first] = piece
            self._replace(chunk, whole, covers)
            if end % self._steps:  # the next write goes on in it
                self._last = chunk, whole

    def _stored(self, chunk: int, begin: int, end: int, live: Live | None) -> Array:
        """Return a chunk whose rows `[begin, end)` will change: the stored rows, zeros where nothing is stored."""
        first, stop = chunk * self._steps, min((chunk + 1) * self._steps, self.rows)
        whole = np.zeros((self._steps, self._row), np.uint8)
        if begin == first and end == stop:  # the ring ends inside the chunk: all of it is replaced
            return whole
        try:
            self._decode(chunk, whole)
            return whole
        except Undecodable as error:
            fault = str(error)
        if live is not None and (live(first, begin - first) or live(end, stop - end)):
            # If it were rewritten, it would return zeros in their place.
            raise Undecodable(
                f"{self._file(chunk)}: {fault}, and it holds rows of stored episodes beside those to be written; "
                "nothing was stored; run ringmap.check and ringmap.repair on the buffer"
            )
        if self.disk.exists(self._file(chunk)):  # a power cut tore it: its episodes were dropped
            log.warning("%s: %s; written anew", self._file(chunk), fault)
        whole[...] = 0
        return whole

    def _replace(self, chunk: int, whole: Array, covers: bool) -> None:
        """Replace the stored chunk."""
        data = self._codec.encode(whole)
        # Held, since otherwise a sync could begin in between, and count rows that are replaced unsynced.
        with thread.searching, self._lock:
            synced = chunk not in self._dirty and not covers and self.disk.exists(self._file(chunk))
            if not synced:
                self._dirty.add(chunk)
                self._put(chunk, data, synced=False)
        if synced:
            self._put(chunk, data, synced=True)
            self.disk.sync_folder(self.path)

    def _put(self, chunk: int, data: bytes, synced: bool) -> None:
        self.disk.put(self._file(chunk), self._beside, data, synced=synced)

    def copy_from(self, source: Column, slot: int, count: int) -> tuple[int, int]:
        """Copy every chunk that holds these rows, unchanged."""
        assert isinstance(source, ZarrColumn)
        if not count:
            return slot, slot
        chunks = [chunk for chunk, _, _ in self._split(slot, count)]
        for chunk in chunks:
            data = source._read(chunk)
            if data is not None:  # else its rows were lost, and dropped; or their checksums tell
                self._dirty.add(chunk)
                self._put(chunk, data, synced=False)
        return chunks[0] * self._steps, min((chunks[-1] + 1) * self._steps, self.rows)

    def sync(self) -> None:
        """Return once every written row is durable on the disk."""
        with thread.searching, self._lock:
            self._unsure |= self._dirty
            self._dirty = set()
            chunks = sorted(self._unsure)
        for chunk in chunks:
            try:
                file = self.disk.open(self._file(chunk), write=True)
            except FileNotFoundError:
                continue  # recorded before a write that failed
            with closing(file):
                file.sync()
        if chunks:
            self.disk.sync_folder(self.path)
        with thread.searching, self._lock:  # only now: after an interrupt the next sync starts over
            self._unsure.difference_update(chunks)

    # -- reading -------------------------------------------------------------------------------

    def want(self, slots: Array) -> None:
        """Ask for the chunks that hold the rows at `slots`."""
        if not self.is_large:
            return
        for chunk in distinct(slots // self._steps).tolist():
            try:
                file = self.disk.open(self._file(chunk))
            except FileNotFoundError:
                continue
            file.will_need(0, self._limit)

    def take(self, slots: Array, out: Array | None = None, head: int = 0) -> Array:
        """Return a copy of the rows at `slots`. Each chunk is decoded once, with the GIL released."""
        self._check_open()
        if out is None:
            out = empty((*slots.shape, *self.spec.shape), self.spec.dtype)
        flat = slots.reshape(-1)
        if not len(flat):
            return out
        if not out.flags.c_contiguous:
            out[...] = self.take(slots, None, head)
            return out
        target = out.reshape(-1).view(np.uint8).reshape(len(flat), self._row)
        chunks = flat // self._steps
        # Runs of rows that are contiguous in a chunk and in `out`; then chunk by chunk.
        breaks = np.flatnonzero((np.diff(flat) != 1) | (np.diff(chunks) != 0)) + 1
        starts = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((starts, [len(flat)])))
        first = flat[starts]
        owner = chunks[starts]
        lowest = _positions(first, head, self.rows)
        highest = _positions(first + counts - 1, head, self.rows)
        highest = np.where(highest < lowest, head - 1, highest)  # a run that goes past the head
        order = np.argsort(owner, kind="stable")
        keeps = self._keeps(len(starts))
        rows: Array | None = None
        own: Array | None = None
        current, below = -1, -1  # whose rows these are, and the positions for which they are valid
        for at, n, slot, chunk, position in zip(
            starts[order].tolist(),
            counts[order].tolist(),
            first[order].tolist(),
            owner[order].tolist(),
            highest[order].tolist(),
            strict=True,
        ):
            if rows is None or chunk != current or position >= below:
                cached = self._cache.get(chunk, position) if head else None
                if isinstance(cached, np.ndarray):
                    rows, below = cached, position + 1
                elif n == self._steps:
                    self._load(chunk, target[at : at + n], head, keeps, cached)  # into the batch
                    rows = None
                    continue
                else:
                    if own is None or (head and keeps):  # else one place serves them all
                        own = np.empty((self._steps, self._row), np.uint8)
                    rows, below = own, head if cached is None else position + 1
                    self._load(chunk, rows, head, keeps, cached)
                    if head and keeps:
                        self._cache.put(chunk, rows, head)
                current = chunk
            within = slot - chunk * self._steps
            target[at : at + n] = rows[within : within + n]
        return out

    def _keeps(self, count: int) -> bool:
        """Return whether to cache the rows of so many chunks of one call, rather than the bytes of their files: those
        of a large random batch of a large column would push out each other before any is asked for again."""
        limit = self._cache.limit
        called = count * self._steps * self._row
        return called <= limit // 4 or self.rows * self._row <= _OFTEN * limit

    def _load(self, chunk: int, out: Array, head: int, keeps: bool, data: bytes | None) -> None:
        """Fill `out` with the rows of a chunk, from `data` if it was cached, or raise CorruptError."""
        try:
            if data is not None:
                self._codec.decode(data, out)
                return
            data = self._decode(chunk, out)
            if head and not keeps and len(data) * _SHRUNK <= out.nbytes:
                self._cache.put(chunk, data, head)
        except Undecodable as error:
            self._check_open()  # the folder may be missing, or another buffer's, since it was closed
            raise Undecodable(
                f"{self._file(chunk)}: {error}; run ringmap.check and ringmap.repair on the buffer"
            ) from None

    def _decode(self, chunk: int, out: Array) -> bytes:
        """Fill `out` with the rows of a chunk and return the bytes of its file, or raise Undecodable without a path."""
        try:
            data = self._read(chunk)
        except NotAFileError as error:
            raise Undecodable(f"is {error.kind}, expected a file") from None
        if data is None:
            raise Undecodable("is missing")
        self._codec.decode(data, out)
        return data

    def _read(self, chunk: int) -> bytes | None:
        """Return the bytes of a chunk's file, or None if it does not exist."""
        try:
            return self.disk.read_file(self._file(chunk), self._limit)
        except FileNotFoundError:
            return None

    def _file(self, chunk: int) -> str:
        return f"{self._prefix}{chunk}{self._suffix}"

    def pieces(self, slot: int, count: int) -> Iterator[bytes | str]:
        """Yield the bytes of rows, chunk by chunk; for one that can't be decoded, the reason."""
        whole = np.empty((self._steps, self._row), np.uint8)
        for chunk, begin, end in self._split(slot, count):
            name, first = os.path.basename(self._file(chunk)), chunk * self._steps
            try:
                self._decode(chunk, whole)
            except OSError as error:
                yield f"{name} can't be read: {error.strerror or error}"
            except Undecodable as error:
                yield f"{name} {error}"
            else:
                yield whole[begin - first : end - first].tobytes()

    def forget(self) -> None:
        """Drop all decoded chunks."""
        self._cache.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path}: the buffer was closed meanwhile; open it again")

    def close(self) -> None:
        """Release memory: no file stays open between calls."""
        self._closed = True
        self._cache.clear()
        self._last = None


class ChunkCache:
    """The most recently used chunks, decoded or as in their files. O(1), amortized.

    A chunk is kept with the head at which it was read. A live row never changes, so it is valid for all positions below
    that head, and for no others: those were written later. No message has to tell a reader that a chunk was replaced.

    Thread-safe, without a lock that a fork or a handler could meet: each step is one call of a dictionary. Calls at the
    same time, or an interrupt, leave at most the count of bytes wrong, which `_shrink` corrects.

    Args:
        limit: maximum size in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.clear()

    def get(self, chunk: int, position: int) -> Chunk | None:
        """Return a chunk if it is valid for `position`, the highest one requested from it; it is not written to."""
        try:
            content, head = self._chunks[chunk]
            if position < head:
                self._chunks.move_to_end(chunk)
                return content
        except KeyError:  # there is none, or another thread dropped it meanwhile
            pass
        return None

    def put(self, chunk: int, content: Chunk, head: int) -> None:
        """Store a chunk; `head` is from before it was read."""
        if _size(content) > self.limit:
            return
        before = self._chunks.pop(chunk, None)
        if before is not None:
            self._nbytes -= _size(before[0])
            if before[1] > head:  # another thread read it later
                content, head = before
        self._chunks[chunk] = content, head
        self._nbytes += _size(content)
        if self._nbytes > self.limit:
            self._shrink()

    def _shrink(self) -> None:
        """Drop the oldest chunks, an eighth of all bytes at least."""
        nbytes = sum(_size(content) for content, _ in list(self._chunks.values()))
        try:
            while nbytes > self.limit - self.limit // 8:
                _, (oldest, _) = self._chunks.popitem(last=False)
                nbytes -= _size(oldest)
        except KeyError:  # other threads dropped the rest
            nbytes = 0
        self._nbytes = nbytes

    def clear(self) -> None:
        """Drop all chunks."""
        self._chunks: OrderedDict[int, tuple[Chunk, int]] = OrderedDict()
        self._nbytes = 0


def _size(content: Chunk) -> int:
    return _ENTRY_NBYTES + len(content) if isinstance(content, bytes) else content.nbytes


def _positions(slots: Array, head: int, rows: int) -> Array:
    """Return the positions below `head` that these slots hold."""
    positions: Array = head - 1 - (head - 1 - slots) % rows
    return positions


def _metadata(spec: ColumnSpec, rows: int, label: dict[str, Any]) -> bytes:
    """Return `zarr.json`: Zarr format 3, one file per chunk, all in one folder.

    The attributes contain the label and a checksum of everything else.
    """
    zero: Any = {"b": False, "c": [0.0, 0.0], "f": 0.0}.get(spec.dtype.kind, 0)
    chunk = [int(label["chunk_steps"]), *spec.shape]
    body = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, *spec.shape],
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": zero,
        "codecs": chain_of(label["codecs"], spec),
        "attributes": {"ringmap": label},
    }
    body["attributes"] = {"ringmap": label, "ringmap_checksum": json_checksum(body)}
    return json.dumps(body, indent=1, ensure_ascii=True).encode() + b"\n"


def read_zarr_label(data: bytes) -> dict[str, Any] | None:
    """Return the column that a `zarr.json` describes, or None. It may be truncated, changed, or not a column at all."""
    try:
        body = json.loads(data)
        check = body["attributes"].pop("ringmap_checksum")
        label = body["attributes"]["ringmap"]
        whole = check == json_checksum(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return label if whole and isinstance(label, dict) else None
