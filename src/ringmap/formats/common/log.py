"""The log of a dataset that is being written: whole, encoded episodes, until the dataset has them.

    magic, size of head, size of body, checksum | head (JSON)                     what the log extends
    magic, size of head, size of body, checksum | head (JSON) | columns, data     per episode

A folder has its log inside, as `ep_len.log`, so that moving, removing and copying the dataset include the log; a file
has it beside it, as `NAME.ringmap-log`. Neither is hidden: `cp DIR/* NEW/` leaves hidden files behind, and written
episodes with them. An episode is written once its record is complete.
Invariants: records have consecutive episode numbers, so that a record whose episode the dataset already has is known;
bytes after an incomplete record do not count; a log that a reader has open is replaced, never truncated.
A reader changes nothing, and reads each episode once whose write had returned when the log was opened:

    source of the format   rows 0 ... N             | one `ColumnSource`, without a visible
    records of the log     rows N ...               | boundary between the two

Not here: when records are moved into the dataset (writer.py).
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash

from ringmap.clips.facts import Facts
from ringmap.datasets.base import num_rows
from ringmap.errors import CorruptError, NewerVersionError, ReplacedError, UnreleasedVersionError
from ringmap.formats.common import disk
from ringmap.formats.common.source import (
    EpisodeCache,
    damage_named,
    offsets_of,
    steps_of,
)
from ringmap.formats.common.swap import restore
from ringmap.formats.common.untrusted import check_row, open_fd
from ringmap.formats.episode import EPISODE_DATA_KEY
from ringmap.formats.media.images import decode_into
from ringmap.storage.columns.schema import TEXT, ColumnSpec, Schema, stored_spec
from ringmap.storage.records.blobs import decode_data

if TYPE_CHECKING:
    from ringmap.datasets.stored import ColumnSource

__all__ = [
    "FILE",
    "FILM",
    "Again",
    "Encoded",
    "Log",
    "Pending",
    "Record",
    "base_of",
    "groups_of",
    "log_path",
    "open_logged",
    "pending_at",
    "with_pending",
]


Array = np.ndarray[Any, np.dtype[Any]]

FILE = "ep_len.log"
"""In a folder. Readers of stable-worldmodel's folders pass over whatever is called ep_len."""

SUFFIX = ".ringmap-log"
"""What is added to the path of a file for that of its log."""

VERSION = 1

_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"RINGMAPL"
_FIRST_MAGIC = b"RINGMAPS"

_HEAD_NBYTES = 64 << 20
_PIECE = 1 << 20
_MOST = 1 << 31

_ALIGN = 16
"""Arrow refuses arrays that do not start at a multiple of their items' size."""

FILM = "mp4"
"""The encoding of a column that has one video per episode."""

TEXT_ROWS = "text"
"""How a column of text of any length is stored: as wide as the episode's longest."""


class Encoded:
    """The steps of a column, encoded: the bytes of an image each ("png", "jpeg"), or of one video of all ("mp4")."""

    __slots__ = ("how", "values")

    def __init__(self, values: list[bytes], how: str) -> None:
        self.values, self.how = values, how

    @property
    def nbytes(self) -> int:
        """The total size in bytes."""
        return sum(map(len, self.values))


class Record(Mapping[str, Any]):
    """One episode in the form in which the log holds it: column -> array (length, ...) or `Encoded`, and
    `_episode_data` -> its data, if it has any.

    Attributes:
        number: of the episode.
        row: of its first step.
        length: steps.
        schema: of all columns.
        columns: the columns alone.
        packed: encoded episode data.
        notes: the format's notes, and `reward_at`.
    """

    __slots__ = ("columns", "length", "notes", "number", "packed", "row", "schema")

    def __init__(
        self,
        number: int,
        row: int,
        length: int,
        schema: Schema,
        columns: Mapping[str, Array | Encoded],
        packed: bytes,
        notes: dict[str, Any],
    ) -> None:
        self.number, self.row, self.length = number, row, length
        self.schema, self.columns, self.packed, self.notes = schema, columns, packed, notes

    @property
    def data(self) -> dict[str, Any]:
        """The values constant within the episode."""
        return decode_data(self.packed)

    def __getitem__(self, name: str) -> Any:
        return self.data if name == EPISODE_DATA_KEY and self.packed else self.columns[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.columns
        if self.packed:
            yield EPISODE_DATA_KEY

    def __len__(self) -> int:
        return len(self.columns) + bool(self.packed)


def groups_of(records: Iterable[Record], nbytes: int) -> Iterator[list[Record]]:
    """Yield records in lists of about so many bytes. A caller who drops a list at once never holds two."""
    group, size = list[Record](), 0
    for record in records:
        group.append(record)
        size += sum(value.nbytes for value in record.columns.values())
        if size >= nbytes:
            del record
            yield group
            group, size = [], 0
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record in its log, and the number of its episode."""

    at: int
    nbytes: int
    number: int
    row: int
    length: int


class Log:
    """The records in a file. One process writes; any number of processes read the records that were complete when they
    opened it."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        self.path = path
        self.places: list[Place] = []
        self.size = 0
        self.base: dict[str, Any] | None = None
        """Facts about the dataset from the first writer of this log, which its first record has; None for a log that is
        empty."""

    def open(self, write: bool = False) -> None:
        """Find the complete records; for writing, truncate the file after them.

        Raises:
            FileNotFoundError: there is no log.
            NewerVersionError: a newer release made it.
            UnreleasedVersionError: a version made it that was never released.
            NotAFileError: the path is something else, such as a link.
        """
        self._fd = open_fd(self.path, os.O_RDWR if write else os.O_RDONLY)
        self.size, self.places, self.base = 0, [], None
        end = os.fstat(self._fd).st_size
        while self.size + _HEAD.size <= end:
            first = self._read(self.size, _HEAD.size)
            magic, head_size, body_size, checksum = _HEAD.unpack(first)
            nbytes = _HEAD.size + head_size + body_size
            if magic == _MAGIC and not self.size:
                raise UnreleasedVersionError(
                    f"{self.path}: was made by an unreleased version of ringmap: convert the dataset with that one, or "
                    "record again"
                )
            known = magic == (_MAGIC if self.size else _FIRST_MAGIC)
            if not known or head_size > _HEAD_NBYTES or self.size + nbytes > end:
                break
            if not self._holds(self.size + _HEAD.size, head_size + body_size, checksum):
                break
            with damage_named(self.path):
                head = json.loads(self._read(self.size + _HEAD.size, head_size))
                if magic == _FIRST_MAGIC:
                    self.base = self._checked(head)
                else:
                    self.places.append(Place(self.size, nbytes, *_numbers(head)))
            self.size += nbytes
        if write and end > self.size:
            disk.truncate(self._fd, self.size)

    def start(self, base: Mapping[str, Any]) -> None:
        """Begin an empty log, which replaces the existing one."""
        self.close()
        head = _padded(json.dumps({"version": VERSION, **base}).encode())
        digest = xxhash.xxh3_64_intdigest(head)
        disk.replace_file(self.path, _HEAD.pack(_FIRST_MAGIC, len(head), 0, digest) + head)
        self.open(write=True)

    def append(self, record: Record) -> None:
        """Add a record: once this returns, the episode is written.

        Raises:
            OSError: it was not added completely; `cut` the incomplete record.
        """
        columns, parts, at = [], list[Any](), 0
        for spec in record.schema.columns:
            value = record.columns[spec.name]
            if isinstance(value, Encoded):
                ends = np.cumsum([len(v) for v in value.values], dtype="<i8")
                how, pieces = value.how, list[Any]([ends.data, *value.values])
            else:
                how, pieces = TEXT_ROWS if spec.is_text else "rows", [_bytes_of(value)]
            dtype = value.dtype if isinstance(value, np.ndarray) else spec.dtype
            columns.append([spec.name, dtype.str, list(spec.shape), how])
            size = sum(memoryview(piece).nbytes for piece in pieces)
            parts += [*pieces, bytes(-size % _ALIGN)]
            at += size + -size % _ALIGN
        parts.append(record.packed)
        at += len(record.packed)
        head = _padded(
            json.dumps(
                {
                    "number": record.number,
                    "row": record.row,
                    "length": record.length,
                    "columns": columns,
                    "data": len(record.packed),
                    "notes": record.notes,
                }
            ).encode()
        )
        digest = xxhash.xxh3_64(head)
        for part in parts:
            digest.update(part)
        first = _HEAD.pack(_MAGIC, len(head), at, digest.intdigest())
        disk.append(self._fd, [first, head, *parts], self.size)
        nbytes = len(first) + len(head) + at
        self.places.append(Place(self.size, nbytes, record.number, record.row, record.length))
        self.size += nbytes

    def cut(self, count: int) -> None:
        """Drop all records but the first `count`: those of a failed call, which readers ignore."""
        kept = self.places[:count]
        self.size = self.places[count].at if len(self.places) > count else self.size
        self.places = kept
        disk.truncate(self._fd, self.size)

    def read(self, place: Place) -> Record:
        """Return a record."""
        first = self._read(place.at, _HEAD.size)
        _, head_size, _, _ = _HEAD.unpack(first)
        return _parse(self._read(place.at + _HEAD.size, place.nbytes - _HEAD.size), head_size)

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        disk.remove(self.path)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def identity(self) -> tuple[int, int]:
        """Return an identity that differs from that of the file that replaces this one."""
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino

    def _checked(self, head: dict[str, Any]) -> dict[str, Any]:
        if head.get("version") != VERSION:
            raise NewerVersionError(
                f"{self.path}: version {head.get('version')} of the log, expected {VERSION}; a newer release of "
                "ringmap was killed while it wrote here: open the dataset with that one"
            )
        return head

    def _read(self, at: int, size: int) -> bytearray:
        found = bytearray(size)
        disk.read_into(self._fd, memoryview(found), at)
        return found

    def _holds(self, at: int, size: int, checksum: int) -> bool:
        """Return whether a record is complete; an incomplete one allocates no memory, whatever size it claims."""
        digest, room, done = xxhash.xxh3_64(), memoryview(bytearray(min(size, _PIECE))), 0
        while done < size:
            part = room[: min(_PIECE, size - done)]
            disk.read_into(self._fd, part, at + done)
            digest.update(part)
            done += len(part)
        return digest.intdigest() == checksum


def _parse(both: bytearray, head_size: int) -> Record:
    head = json.loads(both[:head_size])
    body = memoryview(both)[head_size:]
    length, at = head["length"], 0
    specs: list[ColumnSpec] = []
    columns: dict[str, Array | Encoded] = {}
    for name, dtype, shape, how in head["columns"]:
        spec = stored_spec(name, shape, dtype)
        specs.append(ColumnSpec(name, spec.shape, TEXT) if how == TEXT_ROWS else spec)
        if how in ("rows", TEXT_ROWS):
            size = length * spec.row_nbytes
            flat = np.frombuffer(body[at : at + size], np.uint8)
            columns[name] = (
                flat.view(spec.dtype).reshape(length, *spec.shape)
                if size
                else (np.empty((length, *spec.shape), spec.dtype))
            )
            at += size + -size % _ALIGN
        else:
            count = 1 if how == FILM else length
            ends = np.frombuffer(body[at : at + 8 * count], "<i8").tolist()
            at += 8 * count
            values = [bytes(body[at + s : at + e]) for s, e in zip([0, *ends[:-1]], ends, strict=True)]
            earlier = head["notes"].get("images", "png") if how == "encoded" else how
            columns[name] = Encoded(values, earlier)
            at += ends[-1] + -(8 * count + ends[-1]) % _ALIGN
    packed = bytes(body[at : at + head["data"]])
    return Record(head["number"], head["row"], length, Schema(tuple(specs)), columns, packed, head["notes"])


def _numbers(head: dict[str, Any]) -> tuple[int, int, int]:
    found = head["number"], head["row"], head["length"]
    if not all(type(n) is int and 0 <= n < _MOST for n in found):
        raise ValueError(f"a record of episode, row and length {found}")
    return found


def _padded(head: bytes) -> bytes:
    return head + b" " * (-len(head) % _ALIGN)


def _bytes_of(rows: Array) -> Any:
    """Return an array's bytes without copying them; dates and text have no buffer of their own."""
    return rows.reshape(-1).view(np.uint8).data if rows.size and rows.itemsize else b""


_OPTIONS = ("num_steps", "frameskip", "transform", "layout", "output", "keys_to_load")
"""Those of a reader that hold for the episodes of a log, too."""


def log_path(path: str) -> str:
    """Return the path of a dataset's log: inside a folder, beside a file."""
    path = os.path.realpath(path)
    return os.path.join(path, FILE) if os.path.isdir(path) else path + SUFFIX


def base_of(lengths: Array) -> dict[str, Any]:
    """Return the facts that a log stores about the dataset that it extends."""
    digest = xxhash.xxh3_64_hexdigest(np.asarray(lengths, "<i8").tobytes())
    return {"episodes": len(lengths), "lengths": digest}


class Pending:
    """The records of a log that a dataset lacks. It can be iterated more than once.

    Raises:
        CorruptError: the log extends another dataset, or this one has changed in the meantime.
    """

    def __init__(self, log: Log, lengths: Array, path: str) -> None:
        self._log = log
        count, places = len(lengths), log.places
        first = places[0].number if places else count
        if log.base is not None:
            first = int(log.base["episodes"])
        logged = [place.length for place in places]
        fits = (
            count >= first
            and [place.number for place in places] == list(range(first, first + len(places)))
            and (log.base is None or log.base["lengths"] == base_of(lengths[:first])["lengths"])
            and logged[: count - first] == lengths[first : first + len(places)].tolist()
        )
        if not fits:
            raise CorruptError(
                f"{log.path}: holds {len(places)} episodes that follow episode {first} of {path} as it was, but that "
                f"was changed meanwhile, and has {count}; delete this file to give them up, or put the old dataset back"
            )
        self.places = places[count - first :]

    def __iter__(self) -> Iterator[Record]:
        for place in self.places:
            yield self._log.read(place)

    def __len__(self) -> int:
        return len(self.places)


class Again:
    """An iterable that calls a function for each iteration."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def pending_at(path: str) -> Log | None:
    """Return the log of a dataset, open, if it has one that holds episodes."""
    log = Log(log_path(path))
    try:
        log.open()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if log.places:
        return log
    log.close()
    return None


def with_pending(path: str, source_of: Callable[[str], ColumnSource]) -> ColumnSource:
    """Return the source of a dataset, with the episodes of its log."""
    restore(os.path.realpath(path))
    log = pending_at(path)  # first the log: the dataset then has the records that are moved in the meantime
    source = source_of(path)
    if log is None:
        return source
    with damage_named(log.path):
        pending = Pending(log, source.lengths, path)
        if pending.places:
            return _Joined(source, log, pending.places)
    log.close()
    return source


def open_logged(format: Any, path: str, options: dict[str, Any]) -> Any:
    """Return the dataset of somebody else's format, with the episodes of its log."""
    from ringmap.datasets.joined import ConcatDataset
    from ringmap.datasets.stored import StoredDataset

    path = os.path.realpath(path)
    restore(path)
    log = pending_at(path)
    dataset = format.open_reader(path, **options)
    if log is None:
        return dataset
    pending = Pending(log, np.asarray(dataset.lengths), path)
    if not pending.places:
        log.close()
        return dataset
    known = {name: options[name] for name in _OPTIONS if name in options}
    logged = StoredDataset(_Joined(_Nothing(path), log, pending.places), **known)
    return ConcatDataset([dataset, logged]) if len(dataset.lengths) else logged


class _Nothing:
    """A source without columns or episodes."""

    schema = Schema(())
    reward_at = fps = None
    lengths = np.empty(0, np.int32)
    offsets = np.empty(0, np.int64)
    episode_columns: ClassVar[list[str]] = []

    def __init__(self, path: str) -> None:
        self.path = path

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        return {}

    def episode_data(self, episode: int) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class _Joined:
    """The columns of a dataset and of its log, for `StoredDataset`."""

    _log: Log | None = None

    def __init__(self, source: ColumnSource, log: Log, places: list[Place]) -> None:
        self.path, self.source = source.path, source
        self.unsupported = getattr(source, "unsupported", {})
        self._places = places
        self._log_path, self._identity = log.path, log.identity()
        self._rows = num_rows(source.lengths, source.offsets)
        lengths = np.array([place.length for place in places], np.int32)
        self._offsets = offsets_of(lengths)
        self.lengths = np.concatenate([source.lengths, lengths])
        self.offsets = np.concatenate([source.offsets, self._rows + self._offsets])
        self._use(log)
        schema = source.schema
        stored, logged = Facts.of(source), Facts.stated(log.read(places[0]).notes)
        (stored if self._rows else stored.over(logged)).give(self)
        names = dict.fromkeys(source.episode_columns)
        for place in places:
            record = log.read(place)
            schema = _with_texts(schema, record.schema, log.path)
            names.update(dict.fromkeys(str(name) for name in record.data))
        self.schema = schema
        self.episode_columns = list(names)

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """As `ColumnSource.windows`."""
        starts = np.asarray(starts, np.int64)
        if self._rows and (not len(starts) or starts.max() + length <= self._rows):
            return self.source.windows(columns, starts, length, stride)
        with damage_named(f"{self.path}: its log"):
            if not self._rows or starts.min() >= self._rows:
                return self._logged(columns, starts - self._rows, length, stride)
            rows = steps_of(starts, length, stride)
            flat = rows.ravel()
            ours = flat >= self._rows
            logged = self._logged(columns, flat[ours] - self._rows, 1, 1)
        stored = self.source.windows(columns, flat[~ours], 1, 1)
        found = {}
        for name in columns:
            dtype = np.promote_types(stored[name].dtype, logged[name].dtype)
            out = np.empty((len(flat), *logged[name].shape[2:]), dtype)
            out[ours], out[~ours] = logged[name][:, 0], stored[name][:, 0]
            found[name] = out.reshape(*rows.shape, *out.shape[1:])
        return found

    def episode_data(self, episode: int) -> dict[str, Any]:
        """As `ColumnSource.episode_data`."""
        count = len(self.source.lengths)
        if episode < count:
            return self.source.episode_data(episode)
        with damage_named(f"{self.path}: its log"):
            packed = self._opened().read(self._places[episode - count]).packed
            return decode_data(packed) if packed else {}

    def close(self) -> None:
        """As `ColumnSource.close`. A log that has been moved into the dataset in the meantime can't be opened again."""
        self.source.close()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _logged(self, columns: Sequence[str], starts: Array, length: int, stride: int) -> dict[str, Array]:
        self._opened()
        return self._cache.windows(columns, self._offsets, starts, length, stride, self.schema)

    def _use(self, log: Log) -> None:
        self._log = log
        self._pid, self._lock = os.getpid(), threading.Lock()

        def load(number: int, _: Sequence[str]) -> dict[str, Array]:
            return decoded(log.read(self._places[number]))

        self._cache = EpisodeCache(load)

    def _opened(self) -> Log:
        if self._log is not None:
            if self._pid != os.getpid():  # a thread that does not exist here may have held a lock
                self._use(self._log)
            return self._log
        with self._lock:
            log = Log(self._log_path)
            try:
                log.open()
            except FileNotFoundError:
                log = Log("")
            if not log.places or log.identity() != self._identity:
                log.close()
                raise ReplacedError(f"{self.path}: its writer has gone on since this dataset was loaded; load it again")
            self._use(log)
            return log

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_log", "_cache", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._log, self._lock = None, threading.Lock()


def _with_texts(schema: Schema, other: Schema, path: str) -> Schema:
    """Return a schema whose columns of text are as wide as those of a record, too."""
    if not schema.columns:
        return other
    its = {spec.name: spec for spec in other.columns}
    if {n: s.shape for n, s in its.items()} != {s.name: s.shape for s in schema.columns}:
        raise CorruptError(f"{path}: is of columns {other.columns}, expected {schema.columns}")
    return Schema(tuple(_wider(spec, its[spec.name]) for spec in schema.columns))


def _wider(ours: ColumnSpec, its: ColumnSpec) -> ColumnSpec:
    text = ours.dtype.kind in "SU" and ours.dtype.kind == its.dtype.kind
    if not text or ours.is_text or (its.dtype.itemsize <= ours.dtype.itemsize and not its.is_text):
        return ours
    return ColumnSpec(ours.name, ours.shape, its.dtype)


def decoded(record: Record) -> dict[str, Array]:
    """Return the columns of a record, images and videos as pixels."""
    return {spec.name: _pixels(record.columns[spec.name], spec, record.length) for spec in record.schema.columns}


def _pixels(value: Array | Encoded, spec: ColumnSpec, length: int) -> Array:
    if not isinstance(value, Encoded):
        return value
    check_row("the log", spec.name, spec.row_nbytes)
    if (len(value.values[0]) < length) if value.how == FILM else len(value.values) != length:
        raise CorruptError(f"column {spec.name!r} in the log holds fewer than {length} pictures")
    out = np.empty((length, *spec.shape), spec.dtype)
    if value.how == FILM:
        from ringmap.formats.media.videos import Decoder

        decoder = Decoder(f"column {spec.name!r} in the log", value.values[0])
        try:
            decoder.read(list(range(length)), out)
        finally:
            decoder.close()
    else:
        decode_into(out, value.values, spec)
    return out
