"""The reading side of Parquet files that our writer made.

Not here: Arrow tables (table.py), tensors and clips (`ringmap.datasets.stored`).
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.errors import CorruptError, NewerVersionError, ReplacedError, UnknownFormatError
from ringmap.formats.common.directory import (
    DirectorySource,
    damage_named,
    offsets_of,
    stamp_of,
)
from ringmap.formats.common.episode_cache import EpisodeCache
from ringmap.formats.common.untrusted import check_row, refuse_elsewhere, refuse_vast
from ringmap.formats.parquet import Parquet
from ringmap.formats.parquet.table import column_name, rows_of
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.records.blobs import decode_data

__all__ = ["FOOTER", "ParquetSource", "files_of"]

Array = np.ndarray[Any, np.dtype[Any]]

FOOTER = "ringmap"
"""The key of our facts in a footer: columns, lengths and data of episodes, as JSON."""

_STEPS_PER_BYTE = 100
"""Rows that a byte of Parquet may hold; the number of each takes a few bits."""

_NAME = re.compile(r"data-(\d{5,})\.parquet")


def files_of(path: str) -> list[str]:
    """Return the paths of the files of rows, in order."""
    found = [(int(m[1]), name) for name in os.listdir(path) if (m := _NAME.fullmatch(name))]
    return [os.path.join(path, name) for _, name in sorted(found)]


class ParquetSource(DirectorySource):
    """The columns of a folder of Parquet files, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        UnknownFormatError: it holds something else.
        CorruptError: it is damaged.

    Cost: opening reads each footer; a read loads row groups of about 32 MB, which are kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if not Parquet.detect(self.path):
            raise UnknownFormatError(f"{self.path}: is no folder of Parquet files that we wrote")
        self._groups: list[tuple[str, int]] = []
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._packed: list[str] = []
        self.schema = Schema(())
        lengths: list[int] = []
        rows: list[int] = []
        self._stated: set[Facts] = set()
        with damage_named(self.path):
            for file in files_of(self.path):
                self._add(file, lengths, rows)
            self.lengths = np.array(lengths, np.int32)
            (self._stated.pop() if len(self._stated) == 1 else Facts()).give(self)
            names = (name for one in range(len(lengths)) for name in self.episode_data(one))
            self.episode_columns = list(dict.fromkeys(names))
        self.offsets = offsets_of(self.lengths)
        self._offsets = offsets_of(np.array(rows, np.int64))

    def _add(self, file: str, lengths: list[int], rows: list[int]) -> None:
        import pyarrow.parquet as pq

        refuse_elsewhere(self.path, file)
        self._stamps[file] = stamp_of(os.stat(file))
        footer = pq.read_metadata(file)
        refuse_vast(f"{file}: rows", footer.num_rows, os.stat(file).st_size, _STEPS_PER_BYTE)
        facts = json.loads((footer.metadata or {}).get(FOOTER.encode(), b"null"))
        if not isinstance(facts, dict):
            raise CorruptError(f"{file}: has no facts of ours in its footer")
        if facts["version"] != 1:
            raise NewerVersionError(f"{file}: is of version {facts['version']}, expected 1")
        specs = [ColumnSpec(str(n), tuple(map(int, s)), np.dtype(str(d))) for n, d, s in facts["columns"]]
        for spec in specs:
            check_row(file, spec.name, spec.row_nbytes)
            if spec.dtype.hasobject or min(spec.shape, default=0) < 0:
                raise CorruptError(f"{file}: column {spec}: no such columns are written")
        if self.schema.columns and tuple(specs) != self.schema.columns:
            raise CorruptError(f"{file}: is of columns {specs}, expected {self.schema.columns}")
        self.schema = Schema(tuple(specs))
        self._stated.add(Facts.stated(facts))
        here = [int(length) for length in facts["lengths"]]
        if min(here, default=0) < 0 or sum(here) != footer.num_rows or len(facts["data"]) != len(here):
            raise CorruptError(f"{file}: has {footer.num_rows} rows, expected {sum(here)}")
        lengths += here
        self._packed += [str(one) for one in facts["data"]]
        for group in range(footer.num_row_groups):
            self._groups.append((file, group))
            rows.append(footer.row_group(group).num_rows)

    def _open(self) -> Any:
        return EpisodeCache(self._load)

    def _load(self, number: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return columns of a row group, which is the unit that is read and kept."""
        import pyarrow.parquet as pq

        file, group = self._groups[number]
        with pq.ParquetFile(file) as opened:
            table = opened.read_row_group(group, columns=[column_name(name) for name in columns])
        if stamp_of(os.stat(file)) != self._stamps[file]:
            raise ReplacedError(f"{file}: was written since this dataset was loaded; load it again")
        return {
            s.name: rows_of(table.column(column_name(s.name)), s, file)
            for s in self.schema.columns
            if s.name in columns
        }

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        cache: EpisodeCache = handle
        return cache.windows(columns, self._offsets, starts, length, stride, self.schema)

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        packed = self._packed[episode]
        return decode_data(base64.b64decode(packed)) if packed else {}
