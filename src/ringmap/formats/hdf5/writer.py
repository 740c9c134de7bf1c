"""The writing side of an HDF5 file: episodes appended one by one, each of them safe at once.

    write_episode -> check all -> rows, table, episode data -> HDF5 flush -> commit
                                                               (session.py, pages.py)

Invariants: a call that raises changes nothing, and the next one works; a `with` block that
overwrites and ends with an exception leaves the old file.
Not here: what an episode must look like (formats/episode.py), bytes of a column (columns.py).
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.datasets.base import num_rows
from ringmap.errors import EnvironmentFault, InputError, RingmapError, UnsupportedError
from ringmap.formats.common.directory import damage_named
from ringmap.formats.common.table_mark import fits, mark_of, refuse_other_table
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.episode import CheckedEpisode
from ringmap.formats.hdf5.columns import (
    EPISODE_LENGTHS,
    EPISODE_OFFSETS,
    Column,
    create_column,
    find_columns,
)
from ringmap.formats.hdf5.reader import (
    NAMES_ATTRIBUTE,
    TABLE_ATTRIBUTE,
    episode_attribute,
    read_table,
)
from ringmap.formats.hdf5.session import Session
from ringmap.storage.columns.schema import Schema

__all__ = ["HDF5Writer"]

_PART_NBYTES = 60_000
"""HDF5 holds an attribute of up to 64 kB in any version of its files."""


Array = np.ndarray[Any, np.dtype[Any]]


class HDF5Writer(EpisodeWriter):
    """Writes episodes to an HDF5 file. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`.

    Args:
        compression: as h5py takes it ("gzip", "lzf", a filter's number); None for none.
        compression_opts: as h5py takes it.
        shuffle: reorder bytes before compressing; None for when there is compression.
        chunk_nbytes: about how large a chunk of a column is.

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

    _columns: dict[str, Column]
    _lengths: Column
    _offsets: Column
    _rows: int
    _schema: Schema | None
    _names: dict[str, None]
    _mark: Array

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        compression: str | int | None = None,
        compression_opts: Any = None,
        shuffle: bool | None = None,
        chunk_nbytes: int = 1 << 20,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if chunk_nbytes <= 0:
            raise InputError(f"HDF5Writer: chunk_nbytes must be positive, got {chunk_nbytes}")
        self._chunk_nbytes = chunk_nbytes
        self._filters: dict[str, Any] = {}
        if compression is not None:
            self._filters = {"compression": compression, "shuffle": shuffle is not False}
            if compression_opts is not None:
                self._filters["compression_opts"] = compression_opts
        self._session: Session | None = None

    def _begin(self) -> None:
        self._session = Session(self.path, self.mode, self._take_stock)

    def _end(self, failed: bool) -> None:
        session, self._session = self._session, None
        assert session is not None
        try:
            if not failed or not session.replaces:
                session.finish()
        finally:
            session.close()

    def _store(self, episode: CheckedEpisode, packed: bytes, where: str) -> None:
        """Append an episode. O(its bytes), plus at most one chunk per column that is written twice."""
        session, schema = self._session, self._schema
        assert session is not None
        try:
            if session.file is None:
                session.reopen()
            self._write(session.file, episode, packed)
            session.commit()
        except BaseException as error:
            session.abandon()
            self._schema = schema
            if isinstance(error, RingmapError) or not isinstance(error, OSError):
                raise
            raise EnvironmentFault(error.errno, f"{where}: {error}; nothing was written", self.path) from error

    def _write(self, file: Any, episode: CheckedEpisode, packed: bytes) -> None:
        if self._schema is None:
            for spec in episode.schema.columns:
                self._columns[spec.name] = create_column(file, spec, self._chunk_nbytes, self._filters)
            self._schema = episode.schema
        for name, rows in episode.columns.items():
            self._columns[name].write(self._rows, rows)
        number, attrs = len(self._lengths), self._lengths.dataset.attrs
        if not number:
            attrs.update(self._facts.encode(PREFIX))
        row = np.array([episode.length], np.int32), np.array([self._rows], np.int64)
        self._lengths.write(number, row[0])
        self._offsets.write(number, row[1])
        self._mark = mark_of(*row, self._mark)
        for part in range(-(-len(packed) // _PART_NBYTES)):
            piece = packed[part * _PART_NBYTES : (part + 1) * _PART_NBYTES]
            attrs.create(episode_attribute(number, part), np.frombuffer(piece, np.uint8))
        fresh = [str(name) for name in episode.data if name not in self._names]
        if fresh:
            self._names = {**self._names, **dict.fromkeys(fresh)}
            attrs[NAMES_ATTRIBUTE] = json.dumps(list(self._names))
        if self._names:
            attrs.modify(TABLE_ATTRIBUTE, self._mark)
        self._rows += episode.length

    def _take_stock(self, file: Any) -> None:
        """Note what a freshly opened file holds."""
        with damage_named(f"HDF5Writer: {self.path}"):
            lengths, offsets = read_table(file)
            self._rows = num_rows(lengths, offsets)
            found = find_columns(file, self._rows)
            self._columns = found.columns
            self._lengths = Column(EPISODE_LENGTHS, file[EPISODE_LENGTHS])
            self._offsets = Column(EPISODE_OFFSETS, file[EPISODE_OFFSETS])
            given = self._lengths.dataset.attrs.get(NAMES_ATTRIBUTE)
            self._names = dict.fromkeys(json.loads(given) if given else ())
            self._mark = mark_of(lengths, offsets)
        if not fits(self._lengths.dataset.attrs.get(TABLE_ATTRIBUTE), lengths, offsets):
            raise refuse_other_table(self.path)
        for name, what in found.unsupported.items():
            raise UnsupportedError(
                f"HDF5Writer: {self.path}: column {name!r} is {what}; nothing can be appended to it: copy the others "
                "(convert) into a new file"
            )
        specs = tuple(column.spec for column in self._columns.values())
        self._schema = Schema(specs) if specs else None
        if len(lengths):
            self._agree(Facts.stated(self._lengths.dataset.attrs, PREFIX))
        for column in (*self._columns.values(), self._lengths, self._offsets):
            if column.dataset.maxshape[0] is not None:
                raise InputError(
                    f"HDF5Writer: {self.path}: column {column.spec.name!r} was made with a fixed "
                    "size; it can't be appended to, only copied"
                )
