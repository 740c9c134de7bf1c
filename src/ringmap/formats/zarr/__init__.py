"""The Zarr format: the layout of robot-learning code, which diffusion-policy-style loaders read (Zarr format 2).

    data/pixels            uint8 (N, H, W, C)       numbers and bools: as they are, chunked by steps, compressed
    data/stamp             int64, complex pairs     attribute ringmap = {"dtype": "<M8[ns]", ...}
    data/task              int32 (N,)               text: codes of the episode's words
    data/raw               uint8 (N, width)         bytes, as NumPy has them
    data/obs%2Fx           attribute ringmap = {"name": "obs/x"}
    data/obs/camera        column "obs/camera": others write groups
    meta/episode_ends      int64 (E,)               the last thing that a group of episodes changes
    meta/ringmap_data*     episode data, if there is any: bytes, ends
    meta/ringmap_words*    words of each episode, if there is text: bytes, ends

Chunks are decompressed once, and kept while they are in use.
Invariants: rows beyond the last end count for nothing, and an end is there only when its rows are; adding twice
what is not counted yet is adding once.
Not here: files and codecs (store.py), the log (common/writer.py).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.errors import CorruptError, InputError, ReplacedError, UnknownFormatError, UnsupportedError
from ringmap.formats.builtin import Zarr
from ringmap.formats.common.log import Record, groups_of, log_path
from ringmap.formats.common.names import file_name
from ringmap.formats.common.source import (
    DirectorySource,
    EpisodeCache,
    damage_named,
    fits,
    mark_of,
    refuse_other_table,
    steps_of,
    tell_left_out,
)
from ringmap.formats.common.untrusted import check_name, check_row, kind_at, read_json
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.media.images import in_threads
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import ColumnSpec, Schema, stored_spec
from ringmap.storage.columns.text import Words, decoded, unpack
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.blobs import decode_data

__all__ = ["ZarrSource", "ZarrWriter"]


Array = np.ndarray[Any, np.dtype[Any]]

DATA_BYTES, DATA_ENDS, NAMES = "ringmap_data", "ringmap_data_ends", "ringmap_names"
WORDS_BYTES, WORDS_ENDS = "ringmap_words", "ringmap_words_ends"
MARK = "ringmap_table"
"""The attribute of `meta` with the mark of the episodes that data and words were written for."""

CHUNK_NBYTES = 1 << 20
MAX_CHUNK_ROWS = 16384

_GROUP_NBYTES = 64 << 20

_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and the array that holds it."""

    spec: ColumnSpec
    array: Any
    name: str

    @property
    def _is_of_text(self) -> bool:
        """Whether the array is of text or bytes, as other programs write it: ours is of their bytes."""
        return self.array is not None and np.dtype(self.array.dtype).kind in "SU"

    def stored(self, rows: Array) -> Array:
        """Return rows as the array holds them."""
        if self._is_of_text:
            return rows
        dtype, shape = _stored(self.spec)
        flat = np.ascontiguousarray(rows).reshape(-1)
        return flat.view(dtype).reshape(len(rows), *shape)

    def loaded(self, rows: Array) -> Array:
        """Return what the array holds as rows, text as codes."""
        if self._is_of_text:
            return np.ascontiguousarray(rows, self.spec.dtype)
        dtype, _shape = _stored(self.spec)
        native = np.ascontiguousarray(rows, dtype)
        return native.reshape(-1).view(self.spec.stored.dtype).reshape(len(rows), *self.spec.shape)


def _stored(spec: ColumnSpec) -> tuple[np.dtype[Any], tuple[int, ...]]:
    dtype = spec.stored.dtype
    kind = dtype.kind
    if kind in "SU":
        return np.dtype(np.uint8), (spec.row_nbytes,)
    if kind in "mM":
        return np.dtype("<i8"), spec.shape
    return dtype, spec.shape


def open_group(path: str, mode: str = "r") -> Any:
    """Open a dataset's group.

    Raises:
        CorruptError: it is none.
    """
    import zarr

    from ringmap.formats.zarr.store import InsideStore

    try:
        store = InsideStore(path, read_only=mode == "r")
        return zarr.open_group(store, mode=mode, use_consolidated=False)  # type: ignore[arg-type]
    except CorruptError:
        raise
    except Exception as error:
        raise CorruptError(f"{path}: zarr can't open it: {error}") from error


def episode_ends(group: Any, path: str) -> Array:
    """Return the rows at which episodes end.

    Raises:
        CorruptError: they are not there, or do not ascend.
    """
    try:
        ends = np.asarray(group["meta/episode_ends"][:], np.int64)
    except Exception as error:
        raise CorruptError(f"{path}: meta/episode_ends can't be read: {error}") from error
    if ends.ndim != 1 or (np.diff(ends, prepend=0) < 0).any():
        raise CorruptError(f"{path}: meta/episode_ends do not ascend")
    return ends


@dataclass(frozen=True, slots=True)
class Contents:
    """What a dataset holds beside its table of episodes."""

    columns: list[Column]
    unsupported: dict[str, str]
    others: list[str]


def find_columns(group: Any, path: str, ends: Array) -> Contents:
    """Return the columns of a dataset; those of other programs by the names of their arrays, with the groups that they
    are in.

    Without an episode (`ends`) there may be files of half of them, from a writer that was killed.

    Raises:
        CorruptError: a column has fewer rows than the episodes need, or does not describe itself.
    """
    contents, rows = Contents([], {}, []), int(ends[-1]) if len(ends) else 0
    given = group["data"].attrs.get("ringmap")
    if given is not None:
        for name, file, dtype, shape in given:
            spec = stored_spec(name, shape, dtype)
            check_name(path, file)
            check_row(path, name, spec.row_nbytes)
            array = group["data"][file] if spec.row_nbytes else None
            contents.columns.append(Column(spec, array, file))
    elif len(ends):
        for place in _arrays(path):
            _add_foreign(contents, group, path, place, rows)
    for column in contents.columns:
        if column.array is not None and column.array.shape[0] < rows:
            raise CorruptError(
                f"{path}: column {column.spec.name!r} has {column.array.shape[0]} rows, but the episodes need {rows}"
            )
    return contents


def _add_foreign(contents: Contents, group: Any, path: str, place: str, rows: int) -> None:
    """Add an array of another program's, by its path in the dataset."""
    top, _, name = place.partition("/")
    if top != "data":
        if place != "meta/episode_ends":
            contents.others.append(place)
        return
    try:
        array = group[place]
        dtype = np.dtype(array.dtype)
    except UnsupportedError as error:
        contents.unsupported[name] = f"not read: {error}"
        return
    if not array.shape or ("/" in name and array.shape[0] < rows):
        contents.others.append(place)
    elif dtype.kind not in "biufcSU":
        contents.unsupported[name] = f"of dtype {dtype}, which no column is"
    else:
        check_row(path, name, math.prod(array.shape[1:]) * dtype.itemsize)
        spec = ColumnSpec(name, array.shape[1:], dtype.newbyteorder("="))
        contents.columns.append(Column(spec, array, name))


def _arrays(path: str, place: str = "") -> Iterator[str]:
    """Yield the paths of all arrays below a group, in order: zarr-python's own listing fails as a whole where one is
    not read."""
    folder = os.path.join(path, *place.split("/"))
    if place.count("/") > _DEEPEST:
        raise CorruptError(f"{folder}: is nested too deep")
    for name in sorted(os.listdir(folder)):
        kind = kind_at(os.path.join(folder, name))
        if kind not in ("", "a folder"):
            raise NotAFileError(os.path.join(folder, name), kind)
        if not kind:
            continue
        inner = f"{place}/{name}" if place else name
        if _is_array(os.path.join(folder, name)):
            yield inner
        else:
            yield from _arrays(path, inner)


def _is_array(folder: str) -> bool:
    if kind_at(os.path.join(folder, ".zarray")) == "":
        return True
    described = os.path.join(folder, "zarr.json")
    found = read_json(described) if kind_at(described) == "" else None
    return isinstance(found, dict) and "shape" in found


def has_its_table(group: Any, ends: Array) -> bool:
    """Tell whether data and words of episodes were written for these episodes."""
    return fits(group["meta"].attrs.get(MARK), *_table_of(ends))


def _table_of(ends: Array) -> tuple[Array, Array]:
    """Return lengths and offsets."""
    lengths = np.diff(ends, prepend=0)
    return lengths, ends - lengths


def _add(group: Any, columns: list[Column], ends: Array, records: list[Record]) -> Array:
    rows = int(ends[-1]) if len(ends) else 0
    rows_of = [dict[str, Any](record.columns) for record in records]
    texts = [column.spec.name for column in columns if column.spec.is_text]
    words = [Words() for _ in records]
    for own, mine in zip(words, rows_of, strict=True):
        mine.update({name: own.encode(mine[name]) for name in texts})
    for column in columns:
        if column.array is not None:
            block = np.concatenate([column.stored(mine[column.spec.name]) for mine in rows_of])
            _put(column.array, rows, block)
    if texts:
        _add_parts(group, WORDS_BYTES, WORDS_ENDS, len(ends), [own.pack() for own in words])
    if any(record.packed for record in records) or DATA_ENDS in group["meta"]:
        _add_data(group, len(ends), records)
    fresh = rows + np.cumsum([record.length for record in records], dtype=np.int64)
    group["meta"].attrs[MARK] = mark_of(*_table_of(np.concatenate([ends, fresh]))).tolist()
    _put(group["meta/episode_ends"], len(ends), fresh)
    group.store.publish()  # lengths, that of `episode_ends` last: the rows are there
    return np.concatenate([ends, fresh])


def _put(array: Any, start: int, rows: Array) -> None:
    """Write rows from `start` on; the array ends with them once the store is published.

    What lies there up to `start` is written again as it is, in whole files.
    """
    if array.shape[0] != start + len(rows):
        array.resize((start + len(rows), *array.shape[1:]))
    if rows.size:
        array[start:] = rows


def _create_columns(group: Any, first: Record, chunk_nbytes: int, level: int | None) -> list[Column]:
    data = group["data"]
    table, columns = [], []
    for spec in first.schema.columns:
        name = file_name(spec.name)
        dtype, shape = _stored(spec)
        array = None
        if spec.row_nbytes:
            rows = max(1, min(chunk_nbytes // spec.row_nbytes, MAX_CHUNK_ROWS))
            array = _create(data, name, shape, dtype, rows, level)
        table.append([spec.name, name, spec.dtype.str, list(spec.shape)])
        columns.append(Column(spec, array, name))
    data.attrs["ringmap"] = table
    group["meta"].attrs.update(Facts.stated(first.notes).encode(PREFIX))
    return columns


def _create(
    group: Any,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    rows: int,
    level: int | None,
) -> Any:
    import numcodecs

    compressor = None
    if level is not None:
        compressor = numcodecs.Blosc("zstd", level, numcodecs.Blosc.SHUFFLE)
    return group.create_array(
        name,
        shape=(0, *shape),
        chunks=(rows, *shape),
        dtype=dtype,
        compressors=compressor,
        fill_value=0,
        overwrite=True,
    )


def _add_data(group: Any, episodes: int, records: list[Record]) -> None:
    """Add the episode data of episodes from number `episodes` on."""
    meta = group["meta"]
    names = json.loads(meta.attrs.get(NAMES, "[]"))
    fresh = [str(n) for record in records for n in record.data if n not in names]
    if fresh:
        meta.attrs[NAMES] = json.dumps(list(dict.fromkeys(names + fresh)))
    _add_parts(group, DATA_BYTES, DATA_ENDS, episodes, [record.packed for record in records])


def _add_parts(group: Any, name: str, name_of_ends: str, episodes: int, parts: list[bytes]) -> None:
    """Add bytes of episodes from number `episodes` on."""
    meta = group["meta"]
    if name_of_ends not in meta:
        _create(meta, name, (), np.dtype(np.uint8), 1 << 20, 1)
        _create(meta, name_of_ends, (), np.dtype("<i8"), 4096, None)  # last: it says that both are there
    there = np.asarray(meta[name_of_ends][:])[:episodes]
    size = int(there[-1]) if len(there) else 0
    sizes = [0] * (episodes - len(there)) + [len(part) for part in parts]
    _put(meta[name], size, np.frombuffer(b"".join(parts), np.uint8))
    _put(meta[name_of_ends], len(there), size + np.cumsum(sizes, dtype=np.int64))


def part_of(group: Any, name: str, name_of_ends: str, episode: int) -> bytes:
    """Return the bytes of an episode; none where there are none."""
    meta = group["meta"]
    if name_of_ends not in meta:
        return b""
    ends = meta[name_of_ends]
    if episode >= ends.shape[0]:
        return b""
    first, stop = (int(ends[episode - 1]) if episode else 0), int(ends[episode])
    return np.asarray(meta[name][first:stop]).tobytes()


_LOOKS = 3

CACHE_NBYTES = 64 << 20
"""Decompressed chunks that a dataset keeps in a process: a shuffled pass over less than this decompresses
each chunk once."""


class ZarrSource(DirectorySource):
    """The columns of a Zarr group, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        UnknownFormatError: it holds something else.
        CorruptError: it is damaged.
    """

    _ends: Array | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if not Zarr.detect(self.path):
            raise UnknownFormatError(f"{self.path}: has no meta/episode_ends")
        with damage_named(self.path):
            handle = self._handle()
            ends = self._ends = handle.ends
            self.offsets = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
            self.lengths = (ends - self.offsets).astype(np.int32)
            meta = handle.group["meta"]
            Facts.stated(meta.attrs, PREFIX).give(self)
            self.episode_columns = [str(n) for n in json.loads(meta.attrs.get(NAMES, "[]"))]
        self.schema = Schema(tuple(c.spec for c in handle.columns.values()))
        self.unsupported = handle.contents.unsupported
        tell_left_out(self.path, handle.contents.others)

    def _witnesses(self) -> Sequence[str]:
        return [os.path.join(self.path, name) for name in (".zgroup", "zarr.json")]

    def _open(self) -> Any:
        found = _Handle(open_group(self.path), self.path, self._refuse_newer)
        if self._ends is not None and not np.array_equal(found.ends[: len(self._ends)], self._ends):
            raise ReplacedError(f"{self.path}: holds other episodes than when it was loaded; load it again")
        if self._ends is not None:
            found.ends = self._ends
        return found

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        rows = steps_of(starts, length, stride)
        found = {}
        for name in columns:
            column = handle.columns[name]
            shape = (*rows.shape, *column.spec.shape)
            if column.array is None or not rows.size:
                found[name] = np.empty(shape, column.spec.dtype)
                continue
            values = handle.rows(column, rows.ravel())
            if column.spec.is_text:
                self._refuse_other_table(handle)
                values = handle.texts(values, rows.ravel())
            found[name] = values.reshape(shape)
        return found

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        self._refuse_other_table(handle)
        return decode_data(part_of(handle.group, DATA_BYTES, DATA_ENDS, episode))

    def _refuse_other_table(self, handle: _Handle) -> None:
        """Raise unless data and words are of these episodes. A writer that adds to them at this moment writes the mark
        first, and has a log."""
        for _ in range(_LOOKS if not handle.is_proved else 0):
            group = open_group(self.path)
            if has_its_table(group, episode_ends(group, self.path)) or os.path.exists(log_path(self.path)):
                handle.is_proved = True
                return
        if not handle.is_proved:
            raise refuse_other_table(self.path)


class _Handle:
    """An open group, and chunks of it."""

    def __init__(self, group: Any, path: str, refuse_newer: Callable[[str], None]) -> None:
        self.group = group
        self._path, self._refuse_newer = path, refuse_newer
        self.ends = episode_ends(group, path)  # first: a writer at work changes them last
        self.contents = find_columns(group, path, self.ends)
        self.columns = {c.spec.name: c for c in self.contents.columns}
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._nbytes = 0
        self._words = EpisodeCache(self._words_of)
        self.is_proved = False

    def texts(self, codes: Array, rows: Array) -> Array:
        """Return the strings of rows of a column of text, given their codes."""
        episodes, of = np.unique(self.ends.searchsorted(rows, side="right"), return_inverse=True)
        tables = [self._words.episode(number, ["words"])["words"].tolist() for number in episodes.tolist()]
        found, bad = decoded(codes, of.reshape(-1), tables)
        if bad.any():
            raise CorruptError(
                f"{self._path}: text of row {int(rows[bad][0])} has a code beyond the words of its episode"
            )
        return found

    def _words_of(self, episode: int, _: Sequence[str]) -> dict[str, Array]:
        try:
            words = unpack(part_of(self.group, WORDS_BYTES, WORDS_ENDS, episode))
        except ValueError as error:
            raise CorruptError(f"{self._path}: words of episode {episode}: {error}") from None
        return {"words": np.array(words, np.str_)}

    def rows(self, column: Column, rows: Array) -> Array:
        """Return rows of a column: a fresh array."""
        step = column.array.chunks[0]
        homes = rows // step
        numbers = np.unique(homes)
        if len(numbers) * step * column.spec.row_nbytes > CACHE_NBYTES:  # a whole column, say
            return self._piecewise(column, rows, homes, numbers)
        chunks = dict(
            zip(numbers.tolist(), in_threads(lambda n: self._chunk(column, n), numbers.tolist(), 1), strict=True)
        )
        return _gather(column, rows, homes, step, chunks)

    def _piecewise(self, column: Column, rows: Array, homes: Array, numbers: Array) -> Array:
        step = column.array.chunks[0]
        out = empty((len(rows), *column.spec.shape), column.spec.stored.dtype)
        for number in numbers.tolist():
            there = np.flatnonzero(homes == number)
            out[there] = self._load(column, number)[rows[there] - number * step]
        return out

    def _chunk(self, column: Column, number: int) -> Array:
        key = column.name, number
        with self._lock:
            found = self._chunks.get(key)
            if found is not None:
                self._chunks.move_to_end(key)
                return found
        found = self._load(column, number)
        with self._lock:
            if key not in self._chunks:
                self._chunks[key] = found
                self._nbytes += found.nbytes
            while self._nbytes > CACHE_NBYTES:
                self._nbytes -= self._chunks.popitem(last=False)[1].nbytes
        return found

    def _load(self, column: Column, number: int) -> Array:
        step = column.array.chunks[0]
        rows = np.asarray(column.array[number * step : (number + 1) * step])
        if (number + 1) * step <= self.ends[-1]:  # a writer that appends fills the last one up
            for file in self._files(column.array, number):
                self._refuse_newer(file)
        return column.loaded(rows)

    def _files(self, array: Any, number: int) -> Iterator[str]:
        """Yield the paths of the chunks that hold a run of rows."""
        others = (range(-(-n // c)) for n, c in zip(array.shape[1:], array.chunks[1:], strict=True))
        for rest in itertools.product(*others):
            key = f"{array.path}/{array.metadata.encode_chunk_key((number, *rest))}"
            yield os.path.join(self._path, *key.split("/"))


def _gather(column: Column, rows: Array, homes: Array, step: int, chunks: dict[int, Array]) -> Array:
    out = empty((len(rows), *column.spec.shape), column.spec.stored.dtype)
    cuts = np.flatnonzero(np.concatenate([[True], homes[1:] != homes[:-1], [True]])).tolist()
    for first, stop in itertools.pairwise(cuts):
        number = int(homes[first])
        np.take(chunks[number], rows[first:stop] - number * step, axis=0, out=out[first:stop])
    return out


class ZarrWriter(EpisodeWriter):
    """Writes episodes to a Zarr group. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`.

    Args:
        level: of compression (Blosc, zstd), 1 to 9; None for none.
        chunk_nbytes: about how large a chunk of a column is before compression.

    Raises:
        InputError: an option is wrong.

    Example:
        >>> import os, tempfile, zarr
        >>> path = os.path.join(tempfile.mkdtemp(), "demo.zarr")
        >>> with ZarrWriter(path) as writer:
        ...     writer.write_episodes([{"reward": [0.0, 1.0]}, {"reward": [2.0]}])
        >>> zarr.open_group(path, mode="r")["meta/episode_ends"][:].tolist()
        [2, 3]
    """

    format = Zarr
    files = r"(data|meta)/.*|zarr\.json|\.z.*"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        level: int | None = 1,
        chunk_nbytes: int = CHUNK_NBYTES,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if chunk_nbytes <= 0:
            raise InputError(f"ZarrWriter: chunk_nbytes must be positive, got {chunk_nbytes}")
        if level is not None and not 1 <= level <= 9:
            raise InputError(f"ZarrWriter: level must be 1 to 9 or None, got {level}")
        self._chunk_nbytes, self._level = chunk_nbytes, level

    def resume(self, dataset: Any) -> None:
        """Raise if another program has changed which episodes there are."""
        group = None if dataset is None else open_group(self.path)
        if group is not None and not has_its_table(group, episode_ends(group, self.path)):
            raise refuse_other_table(self.path)

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write a new dataset."""
        import zarr

        group = zarr.open_group(path, mode="w", zarr_format=2)
        group.create_group("data")
        _create(group.create_group("meta"), "episode_ends", (), np.dtype("<i8"), 4096, None)
        self.extend(episodes, path)

    def extend(self, episodes: Iterable[Record], path: str) -> None:
        """Add episodes: rows, episode data, and last the ends."""
        group = open_group(path, "r+")
        ends = episode_ends(group, path)
        columns = find_columns(group, path, ends).columns if len(ends) else []
        for records in groups_of(episodes, _GROUP_NBYTES):
            columns = columns or _create_columns(group, records[0], self._chunk_nbytes, self._level)
            ends = _add(group, columns, ends, records)
