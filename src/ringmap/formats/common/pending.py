"""Read a dataset together with the episodes that its writer, killed or running, has only logged so far.

    source of the format   rows 0 ... N             | one `ColumnSource`, without a visible
    records of the log     rows N ...               | boundary between the two

Invariants: a reader changes nothing; each episode whose write had returned when the log was opened is read, once.
Not here: the bytes of a log (log.py), when it is moved into the dataset (writer.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash

from ringmap.clips.facts import Facts
from ringmap.datasets.base import num_rows
from ringmap.errors import CorruptError, ReplacedError
from ringmap.formats.common.directory import (
    damage_named,
    offsets_of,
    steps_of,
)
from ringmap.formats.common.episode_cache import EpisodeCache
from ringmap.formats.common.log import FILE, FILM, SUFFIX, Encoded, Log, Place, Record
from ringmap.formats.common.swap import restore
from ringmap.formats.common.untrusted import check_row
from ringmap.formats.media.images import decode_into
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.records.blobs import decode_data

if TYPE_CHECKING:
    from ringmap.datasets.stored import ColumnSource

__all__ = ["Again", "Pending", "base_of", "log_path", "open_logged", "pending_at", "with_pending"]

Array = np.ndarray[Any, np.dtype[Any]]

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

    Args:
        log: open.
        lengths: of the dataset's episodes.
        path: of the dataset, for messages.

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
    """An iterable that calls a function for each iteration.

    Args:
        make: returns an iterator.
    """

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
    """Return the source of a dataset, with the episodes of its log.

    Args:
        path: of the dataset.
        source_of: opens the dataset's own source.
    """
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
    """Return the dataset of somebody else's format, with the episodes of its log.

    Args:
        format: a `Format`.
        path: of the dataset.
        options: for `open_reader`.
    """
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
    """The columns of a dataset and of its log, for `StoredDataset`.

    Args:
        source: of the dataset.
        log: open.
        places: the records that the dataset lacks.
    """

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
    """Return a schema whose columns of text are as wide as those of a record, too.

    Raises:
        CorruptError: the record has other columns.
    """
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
