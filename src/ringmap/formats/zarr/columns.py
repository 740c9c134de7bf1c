"""How columns lie in a Zarr group, and how episodes become rows of it.

    data/pixels            uint8 (N, H, W, C)       numbers and bools: as they are
    data/stamp             int64, complex pairs     attribute ringmap = {"dtype": "<M8[ns]", ...}
    data/task              int32 (N,)               text: codes of the episode's words
    data/raw               uint8 (N, width)         bytes, as NumPy has them
    data/obs%2Fx           attribute ringmap = {"name": "obs/x"}
    data/obs/camera        column "obs/camera": others write groups
    meta/episode_ends      int64 (E,)               the last thing that a group of episodes changes
    meta/ringmap_data*     episode data, if there is any: bytes, ends
    meta/ringmap_words*    words of each episode, if there is text: bytes, ends

Invariants: rows beyond the last end count for nothing, and an end is there only when its rows are; adding twice
what is not counted yet is adding once.
Not here: reading (reader.py).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.errors import CorruptError, UnsupportedError
from ringmap.formats.common.log import Record, groups_of
from ringmap.formats.common.names import file_name
from ringmap.formats.common.table_mark import fits, mark_of
from ringmap.formats.common.untrusted import check_name, check_row, kind_at, read_json
from ringmap.storage.columns.schema import ColumnSpec, stored_spec
from ringmap.storage.columns.text import Words
from ringmap.storage.disk.system import NotAFileError

__all__ = [
    "CHUNK_NBYTES",
    "DATA_BYTES",
    "DATA_ENDS",
    "NAMES",
    "WORDS_BYTES",
    "WORDS_ENDS",
    "Column",
    "Found",
    "create",
    "episode_ends",
    "extend",
    "find_columns",
    "has_its_table",
    "open_group",
    "part_of",
]

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
    """A column, and the array that holds it.

    Args:
        spec: what the user sees.
        array: the array; None of a column of size 0.
        name: of the array.
    """

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
class Found:
    """What a dataset holds beside its table of episodes.

    Args:
        columns: in order.
        unsupported: name -> what it is, of columns that are sound and not read.
        others: the paths of arrays that are no column: single values, those with too few rows, those outside of `data`.
    """

    columns: list[Column]
    unsupported: dict[str, str]
    others: list[str]


def find_columns(group: Any, path: str, ends: Array) -> Found:
    """Return the columns of a dataset; those of other programs by the names of their arrays, with the groups that they
    are in.

    Without an episode (`ends`) there may be files of half of them, from a writer that was killed.

    Raises:
        CorruptError: a column has fewer rows than the episodes need, or does not describe itself.
    """
    found, rows = Found([], {}, []), int(ends[-1]) if len(ends) else 0
    given = group["data"].attrs.get("ringmap")
    if given is not None:
        for name, file, dtype, shape in given:
            spec = stored_spec(name, shape, dtype)
            check_name(path, file)
            check_row(path, name, spec.row_nbytes)
            array = group["data"][file] if spec.row_nbytes else None
            found.columns.append(Column(spec, array, file))
    elif len(ends):
        for place in _arrays(path):
            _add_foreign(found, group, path, place, rows)
    for column in found.columns:
        if column.array is not None and column.array.shape[0] < rows:
            raise CorruptError(
                f"{path}: column {column.spec.name!r} has {column.array.shape[0]} rows, but the episodes need {rows}"
            )
    return found


def _add_foreign(found: Found, group: Any, path: str, place: str, rows: int) -> None:
    """Add an array of another program's, by its path in the dataset."""
    top, _, name = place.partition("/")
    if top != "data":
        if place != "meta/episode_ends":
            found.others.append(place)
        return
    try:
        array = group[place]
        dtype = np.dtype(array.dtype)
    except UnsupportedError as error:
        found.unsupported[name] = f"not read: {error}"
        return
    if not array.shape or ("/" in name and array.shape[0] < rows):
        found.others.append(place)
    elif dtype.kind not in "biufcSU":
        found.unsupported[name] = f"of dtype {dtype}, which no column is"
    else:
        check_row(path, name, math.prod(array.shape[1:]) * dtype.itemsize)
        spec = ColumnSpec(name, array.shape[1:], dtype.newbyteorder("="))
        found.columns.append(Column(spec, array, name))


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


def create(path: str) -> None:
    """Make an empty dataset."""
    import zarr

    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.create_group("data")
    _create(group.create_group("meta"), "episode_ends", (), np.dtype("<i8"), 4096, None)


def has_its_table(group: Any, ends: Array) -> bool:
    """Tell whether data and words of episodes were written for these episodes."""
    return fits(group["meta"].attrs.get(MARK), *_table_of(ends))


def _table_of(ends: Array) -> tuple[Array, Array]:
    """Return lengths and offsets."""
    lengths = np.diff(ends, prepend=0)
    return lengths, ends - lengths


def extend(path: str, episodes: Iterable[Record], chunk_nbytes: int, level: int | None) -> None:
    """Add episodes: rows, episode data, and last the ends; chunks and level of compression are those of new columns."""
    group = open_group(path, "r+")
    ends = episode_ends(group, path)
    columns = find_columns(group, path, ends).columns if len(ends) else []
    for records in groups_of(episodes, _GROUP_NBYTES):
        columns = columns or _create_columns(group, records[0], chunk_nbytes, level)
        ends = _add(group, columns, ends, records)


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
