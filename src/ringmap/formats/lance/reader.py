"""The reading side of a Lance dataset: rows of all columns in one `take` per batch.

    starts, length, stride -> rows -> each once, sorted -> take -> decode each image once -> in order

Not here: the columns themselves (columns.py), tensors and clips (`ringmap.datasets.stored`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.errors import ReplacedError, UnknownFormatError
from ringmap.formats.common.arrow import from_arrow, refuse_missing
from ringmap.formats.common.directory import DirectorySource, damage_named, steps_of
from ringmap.formats.lance import Lance
from ringmap.formats.lance.columns import (
    EPISODE,
    METADATA,
    all_data,
    committed,
    episodes_path,
    facts_of,
    opened,
    sized_fields,
    table_of,
)
from ringmap.formats.media.images import decode_into
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import ColumnSpec, Schema

__all__ = ["LanceSource"]

Array = np.ndarray[Any, np.dtype[Any]]

_SCAN = 512
"""From this many rows in a row on, scanning them beats taking them one by one."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """The versions of the rows and of the episode data that were newest, and the rows' files.

    A version that comes later leaves the files of this one; their names are never used again.
    """

    rows: Any
    data: Any
    files: list[Any]


class LanceSource(DirectorySource):
    """The columns of a Lance dataset, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        UnknownFormatError: it is not a Lance dataset.
        CorruptError: it is damaged, or of another layout.

    Processes and threads: Lance reads in threads of its own. Pickled, it opens the dataset again by itself; forked,
        it raises RoleError, since those threads do not come along.
    """

    _files: list[Any] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if not Lance.detect(self.path):
            raise UnknownFormatError(f"{self.path}: is not a Lance dataset")
        with damage_named(self.path):
            handle = self._handle()
            dataset, self._files = handle.rows, handle.files
            self.unsupported: dict[str, str] = {}
            fields = sized_fields(dataset, self.path, self.unsupported)
            self._fields = {f.spec.name: f for f in fields}
            self.lengths, self.offsets, self._numbers = table_of(dataset, self.path)
            facts_of(dataset.schema).give(self)
        self.schema = Schema(tuple(f.spec for f in self._fields.values()))
        self._data: dict[int, dict[str, Any]] | None = None
        with damage_named(episodes_path(self.path)):
            self.episode_columns = _data_names(handle.data)

    def _open(self) -> _Opened:
        rows, beside = opened(self.path), episodes_path(self.path)
        # Rows that are deleted stay in their files: which ones is in a file of its own.
        files = [(*(file.path for file in part.data_files()), part.deletion_file()) for part in rows.get_fragments()]
        if self._files is not None and files[: len(self._files)] != self._files:
            raise ReplacedError(f"{self.path}: has other rows than when it was loaded; load it again")
        return _Opened(rows, opened(beside) if committed(beside) else None, files)

    def _windows(
        self, handle: _Opened, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        rows = steps_of(starts, length, stride)
        fields = [self._fields[name] for name in columns]
        names = [field.name for field in fields if field.how != "none"]
        found: dict[str, Array] = {}
        order = None
        table = None
        if names and rows.size:
            if len(starts) == 1 and stride == 1 and rows.size >= _SCAN:
                first = int(rows[0, 0])
                table = handle.rows.to_table(columns=names, offset=first, limit=rows.size)
            else:
                unique, order = np.unique(rows.ravel(), return_inverse=True)
                if len(unique) == rows.size and np.array_equal(unique, rows.ravel()):
                    order = None
                table = handle.rows.take(unique.tolist(), columns=names)
        for field in fields:
            shape = (*rows.shape, *field.spec.shape)
            if table is None or field.how == "none":
                found[field.spec.name] = np.empty(shape, _dtype(field.spec))
                continue
            column = table.column(field.name)
            if field.how in ("png", "jpeg"):
                out = empty((len(column), *field.spec.shape), field.spec.dtype)
                refuse_missing(column, field.spec, self.path)
                files = [memoryview(v.as_buffer()) for v in column]
                decode_into(out, files, field.spec)
                found[field.spec.name] = (out if order is None else out[order]).reshape(shape)
            else:
                taken = from_arrow(column, field.spec, self.path)
                found[field.spec.name] = (taken.copy() if order is None else taken[order]).reshape(shape)
        return found

    def _episode_data(self, handle: _Opened, episode: int) -> dict[str, Any]:
        if self._data is None:
            self._data = all_data(handle.data) if self.episode_columns else {}
        return dict(self._data.get(int(self._numbers[episode]), {}))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_data": None}


def _data_names(data: Any) -> list[str]:
    if data is None:
        return []
    schema = data.schema
    given = (schema.metadata or {}).get(METADATA)
    if given is not None:
        return [str(name) for name in json.loads(given)]
    return [name for name in schema.names if name != EPISODE]


def _dtype(spec: ColumnSpec) -> Any:
    return spec.dtype if spec.dtype.itemsize else np.dtype("<U1")
