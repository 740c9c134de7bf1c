"""The reading side of a Zarr group: chunks decompressed once, and kept while they are in use.

Not here: arrays (columns.py), tensors and clips (`ringmap.datasets.stored`).
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.errors import CorruptError, ReplacedError, UnknownFormatError
from ringmap.formats.common.directory import (
    DirectorySource,
    damage_named,
    steps_of,
    tell_left_out,
)
from ringmap.formats.common.episode_cache import EpisodeCache
from ringmap.formats.common.pending import log_path
from ringmap.formats.common.table_mark import refuse_other_table
from ringmap.formats.media.images import in_threads
from ringmap.formats.zarr import Zarr
from ringmap.formats.zarr.columns import (
    DATA_BYTES,
    DATA_ENDS,
    NAMES,
    WORDS_BYTES,
    WORDS_ENDS,
    Column,
    episode_ends,
    find_columns,
    has_its_table,
    open_group,
    part_of,
)
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import decoded, unpack
from ringmap.storage.records.blobs import decode_data

__all__ = ["CACHE_NBYTES", "ZarrSource"]

Array = np.ndarray[Any, np.dtype[Any]]

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
        self.unsupported = handle.found.unsupported
        tell_left_out(self.path, handle.found.others)

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
    """An open group, and chunks of it.

    Args:
        group: open.
        path: of its folder.
        refuse_newer: called with the path of a file after it was read.
    """

    def __init__(self, group: Any, path: str, refuse_newer: Callable[[str], None]) -> None:
        self.group = group
        self._path, self._refuse_newer = path, refuse_newer
        self.ends = episode_ends(group, path)  # first: a writer at work changes them last
        self.found = find_columns(group, path, self.ends)
        self.columns = {c.spec.name: c for c in self.found.columns}
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
