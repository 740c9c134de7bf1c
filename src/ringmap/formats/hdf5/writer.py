"""The writing side of an HDF5 file: a group of episodes is added in place, by one commit of its pages.

    log -> rows, table, episode data -> HDF5 -> pages -> journal -> the file        (pages.py)

Not here: the log (common/writer.py), bytes of a column (columns.py), episode data as attributes (data.py).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from typing import Any, Self

import h5py
import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.datasets.base import num_rows
from ringmap.errors import InputError, UnknownFormatError
from ringmap.formats.common.log import Record, groups_of
from ringmap.formats.common.table_mark import mark_of, refuse_other_table
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.hdf5 import HDF5
from ringmap.formats.hdf5.columns import (
    EPISODE_LENGTHS,
    EPISODE_OFFSETS,
    Column,
    create_columns,
    find_columns,
    strange_in,
)
from ringmap.formats.hdf5.data import add_episode_data, mark_table
from ringmap.formats.hdf5.pages import journaled
from ringmap.formats.hdf5.reader import BIRTH, HDF5File, read_table

__all__ = ["HDF5Writer"]

Array = np.ndarray[Any, np.dtype[Any]]

_TABLE_CHUNK = 1024

_PIECE_NBYTES = 8 << 20


class HDF5Writer(EpisodeWriter):
    """Writes episodes to an HDF5 file. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. Readers may have
    the file open: they wait while a group of episodes goes over. A program that holds it open with HDF5's own lock
    keeps episodes in the log.

    Args:
        compression: as h5py takes it ("gzip", "lzf", a filter's number); None for none.
        compression_opts: as h5py takes it.
        shuffle: reorder bytes before compressing; None for when there is compression.
        chunk_nbytes: about how large a chunk of a column is.
        nested: whether a new file has column "obs/camera" as dataset `camera` of group `obs`, as other programs write
            it; else all columns lie side by side, which stable-worldmodel reads.

    Raises:
        InputError: an option is wrong.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "demo.h5")
        >>> with HDF5Writer(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        >>> from ringmap.data import load_dataset
        >>> load_dataset(path).get_episode_data()
        {'seed': [7]}
    """

    format = HDF5

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        compression: str | int | None = None,
        compression_opts: Any = None,
        shuffle: bool | None = None,
        chunk_nbytes: int = 1 << 20,
        nested: bool = False,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if chunk_nbytes <= 0:
            raise InputError(f"HDF5Writer: chunk_nbytes must be positive, got {chunk_nbytes}")
        self._chunk_nbytes, self._nested = chunk_nbytes, nested
        self._filters: dict[str, Any] = {}
        self._plain: dict[str, Column] = {}
        if compression is not None:
            self._filters = {"compression": compression, "shuffle": shuffle is not False}
            if compression_opts is not None:
                self._filters["compression_opts"] = compression_opts
            try:  # before an episode is logged that could not leave the log
                with h5py.File("trial", "w", driver="core", backing_store=False) as file:
                    file.create_dataset("x", (1,), np.uint8, chunks=(1,), **self._filters)
            except (ValueError, TypeError) as error:
                raise InputError(f"HDF5Writer: {self.path}: options {self._filters}: {error}") from error

    def __enter__(self) -> Self:
        if os.path.isdir(self.path):
            raise InputError(f"HDF5Writer: {self.path} is a directory; give the path of a file in it")
        there = os.path.isfile(self.path) and os.path.getsize(self.path)
        if there and self.mode == "overwrite" and not h5py.is_hdf5(self.path):  # a suffix alone says nothing
            raise UnknownFormatError(
                f"HDF5Writer: {self.path} is not an HDF5 file; choose another path, or delete it yourself"
            )
        return super().__enter__()

    def refuses(self, name: str, rows: Array) -> str | None:
        """Return why a column of text, which another program made, can't hold these."""
        column = self._plain.get(name)
        strange = strange_in(rows) if column is not None and rows.dtype.kind == "U" else np.zeros(1, bool)
        return f"it has {rows[strange][0]!r}: NUL and lone surrogates are no UTF-8" if strange.any() else None

    def resume(self, dataset: Any) -> None:
        """Look at columns that another program made."""
        self._plain = {}
        if dataset is None:
            return
        file: HDF5File = dataset.source.opened
        if not file.fits:
            raise refuse_other_table(self.path)
        for name, column in (*file.columns.items(), ("ep_len", file.table), ("ep_offset", file.file[EPISODE_OFFSETS])):
            if getattr(column, "dataset", column).maxshape[0] is not None:
                raise InputError(
                    f"HDF5Writer: {self.path}: column {name!r} was made with a fixed size; it can't be appended to, "
                    "only copied"
                )
        self._plain = {n: c for n, c in file.columns.items() if c.is_text and not c.escapes}

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write a new file. Superblock 2: a killed writer leaves no mark that others would refuse to open."""
        with h5py.File(path, "x", libver=("v108", "v108"), track_order=True, rdcc_nbytes=0) as file:
            for name, dtype in ((EPISODE_LENGTHS, np.int32), (EPISODE_OFFSETS, np.int64)):
                file.create_dataset(name, shape=(0,), maxshape=(None,), chunks=(_TABLE_CHUNK,), dtype=dtype)
            file[EPISODE_LENGTHS].attrs[BIRTH] = uuid.uuid4().hex
            self._add(file, episodes)

    def extend(self, episodes: Iterable[Record], path: str) -> None:
        """Add episodes in place: all of them, or none, at any moment."""
        with journaled(path) as file:
            self._add(file, episodes)

    def _add(self, file: Any, episodes: Iterable[Record]) -> None:
        """Cost: O(bytes), plus the table of episodes, plus at most a chunk per column that is written twice."""
        lengths, offsets = read_table(file)
        first = rows = num_rows(lengths, offsets)
        columns, table = find_columns(file, rows).columns, file[EPISODE_LENGTHS]
        fresh: list[int] = []
        for group in groups_of(episodes, _PIECE_NBYTES):
            if not columns:
                schema = group[0].schema
                columns = create_columns(file, schema, self._chunk_nbytes, self._filters, self._nested)
            if not len(lengths) and not fresh:
                table.attrs.update(Facts.stated(group[0].notes).encode(PREFIX))
            parts: list[Any] = []
            for name, column in columns.items():
                parts = [record.columns[name] for record in group]
                column.write(rows, parts[0] if len(parts) == 1 else np.concatenate(parts))
            add_episode_data(table, len(lengths) + len(fresh), [record.data for record in group])
            fresh += [record.length for record in group]
            rows += sum(record.length for record in group)
            del group, parts  # before the next are read
        if not fresh:
            return
        more = np.array(fresh, np.int32)
        starts = first + np.cumsum(more, dtype=np.int64) - more
        Column(EPISODE_LENGTHS, table).write(len(lengths), more)
        Column(EPISODE_OFFSETS, file[EPISODE_OFFSETS]).write(len(lengths), starts)
        mark_table(table, mark_of(more, starts, mark_of(lengths, offsets)))
