"""The reading side of an HDF5 file: rows of its columns, from any process.

Invariants: a process that opens the path again and finds another file there, or the same one with other episodes,
refuses. A file that was appended to meanwhile has its old `BIRTH`.
Not here: pickling and forks (common/directory.py), tensors, clips (`ringmap.datasets.stored`), the columns themselves
(columns.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.datasets.base import num_rows
from ringmap.errors import (
    CorruptError,
    LockedError,
    NotFoundError,
    ReplacedError,
    UnknownFormatError,
)
from ringmap.formats.common.directory import (
    DirectorySource,
    damage_named,
    stamp_of,
    tell_left_out,
)
from ringmap.formats.common.hdf5_tree import has_own
from ringmap.formats.common.table_mark import fits, refuse_other_table
from ringmap.formats.common.untrusted import kind_at, refuse_sparse
from ringmap.formats.hdf5.columns import (
    EPISODE_LENGTHS,
    EPISODE_OFFSETS,
    find_columns,
)
from ringmap.formats.hdf5.journal import mend
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.blobs import decode_data

__all__ = [
    "BIRTH",
    "NAMES_ATTRIBUTE",
    "TABLE_ATTRIBUTE",
    "HDF5Source",
    "episode_attribute",
    "open_for_reading",
    "read_episode_data",
    "read_table",
]

Array = np.ndarray[Any, np.dtype[Any]]

BIRTH = "ringmap_birth"
"""Attribute of `ep_len`: a random text that a file gets when our writer makes it, and keeps while it is appended to."""

TABLE_ATTRIBUTE = "ringmap_table"
"""Attribute of `ep_len`: the mark of the table that the data of episodes were written for."""

NAMES_ATTRIBUTE = "ringmap_episode_columns"
"""Attribute of `ep_len`: JSON list of the names of all episode data, first seen first."""


class HDF5Source(DirectorySource):
    """The columns of an HDF5 file, as `StoredDataset` reads them.

    Args:
        path: the file.

    Raises:
        NotFoundError: there is no such file.
        LockedError: a writer has it open.
        UnknownFormatError: it is not an HDF5 file, or one of another layout.
        CorruptError: it is damaged, or refers to other files.

    Processes and threads: HDF5 runs one call at a time; pickled or forked, it opens the file again
    by itself.
    """

    _holds = True
    _stamp: tuple[int, ...] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        file = self._handle()
        self._birth = file.table.attrs.get(BIRTH)
        self.lengths, self.offsets = file.lengths, file.offsets
        with damage_named(self.path):
            self.episode_columns = _names(file.table)
            Facts.stated(file.table.attrs, PREFIX).give(self)
        self.schema = Schema(tuple(column.spec for column in file.columns.values()))
        self.unsupported = file.found.unsupported
        self._stamp = file.stamp()
        tell_left_out(self.path, file.found.others)

    def _open(self) -> _File:
        found = _File(self.path)
        if self._stamp not in (None, found.stamp()) and not self._continues(found):
            found.file.close()
            raise ReplacedError(f"{self.path}: was written over since this dataset was loaded; load it again")
        return found

    def _kept(self, handle: _File) -> Any:
        return handle.stamp()

    def _continues(self, found: _File) -> bool:
        """Return whether a file that was opened again is what it was, and a writer of ours has added episodes."""
        count = len(self.lengths)
        known = {spec.name: spec for spec in self.schema.columns}
        return (
            self._birth is not None
            and found.table.attrs.get(BIRTH) == self._birth
            and np.array_equal(found.lengths[:count], self.lengths)
            and np.array_equal(found.offsets[:count], self.offsets)
            and known == {name: column.spec for name, column in found.columns.items()}
        )

    def _release(self, handle: _File) -> None:
        handle.file.close()

    def _windows(
        self, handle: _File, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        found = {}
        with self._alone():
            opened = self._handle().columns  # another thread may have closed `handle`
            for name in columns:
                with damage_named(f"{self.path}: column {name!r}"):
                    found[name] = opened[name].windows(starts, length, stride)
        return found

    def _episode_data(self, handle: _File, episode: int) -> dict[str, Any]:
        with self._alone():
            opened = self._handle()
            if not opened.fits:
                raise refuse_other_table(self.path)
            return read_episode_data(opened.table, episode)


class _File:
    """An open file, its columns and its table of episodes."""

    def __init__(self, path: str) -> None:
        self.file = open_for_reading(path)
        try:
            with damage_named(path):
                self.lengths, self.offsets = read_table(self.file)
                self.found = find_columns(self.file, num_rows(self.lengths, self.offsets))
        except BaseException:
            self.file.close()
            raise
        self.columns = self.found.columns
        self.table = self.file[EPISODE_LENGTHS]
        self.fits = fits(self.table.attrs.get(TABLE_ATTRIBUTE), self.lengths, self.offsets)
        self._fd = self.file.id.get_vfd_handle()

    def stamp(self) -> tuple[int, ...]:
        """Return what changes when the file is written."""
        return stamp_of(os.fstat(self._fd))


def open_for_reading(path: str) -> Any:
    """Open an HDF5 file for reading, after finishing a commit that was cut short.

    Raises:
        NotFoundError, LockedError, UnknownFormatError, CorruptError: as `HDF5Source`.
    """
    if not os.path.exists(path):
        raise NotFoundError(f"{path}: no such file")
    if not os.path.isfile(path):
        raise NotAFileError(path, kind_at(os.path.realpath(path)))
    mend(path)
    try:
        return h5py.File(path, "r")
    except BlockingIOError as error:
        raise LockedError(
            f"{path}: being written; it can be read once its writer has closed it, or was killed"
        ) from error
    except OSError as error:
        if not h5py.is_hdf5(path):
            raise UnknownFormatError(f"{path}: is not an HDF5 file") from error
        hint = ""
        if "h5clear" in str(error) or "already open for write" in str(error):
            hint = "; another program's writer left it open: try `h5clear -s` on a copy"
        raise CorruptError(f"{path}: HDF5 can't open it: {error}{hint}") from error


def read_table(root: Any) -> tuple[Array, Array]:
    """Return `(lengths int32, offsets int64)` of the episodes in an open file.

    Raises:
        UnknownFormatError: the file has no episode table.
        CorruptError: the table makes no sense.
    """
    path = root.file.filename
    found = []
    for name in (EPISODE_LENGTHS, EPISODE_OFFSETS):
        values = root.get(name) if has_own(root, name) else None
        if not isinstance(values, h5py.Dataset) or values.is_virtual or values.external:
            raise UnknownFormatError(
                f"{path}: has no dataset {name!r}; expected one dataset per column over all steps, "
                f"with {EPISODE_LENGTHS!r} and {EPISODE_OFFSETS!r} beside them"
            )
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise CorruptError(f"{path}: {name!r} is {values.dtype} {values.shape}, expected integers (E,)")
        refuse_sparse(path, name, values)
        found.append(values[()].astype(np.int64))
    lengths, offsets = found
    ends = lengths.max(initial=0), offsets.max(initial=0)
    if (
        len(lengths) != len(offsets)
        or min(lengths.min(initial=0), offsets.min(initial=0)) < 0
        or ends[0] >= 1 << 31
        or ends[1] > 1 << 62  # their sum stays a number
    ):
        raise CorruptError(
            f"{path}: {EPISODE_LENGTHS!r} and {EPISODE_OFFSETS!r} do not describe episodes "
            f"({len(lengths)} and {len(offsets)} entries)"
        )
    return lengths.astype(np.int32), offsets


def episode_attribute(episode: int, part: int) -> str:
    """Return the name of the attribute of `ep_len` that holds a part of an episode's data."""
    return f"ringmap_episode_{episode:09d}.{part}"


def read_episode_data(table: Any, episode: int) -> dict[str, Any]:
    """Return an episode's data from the dataset `ep_len`; {} when it has none."""
    parts: list[bytes] = []
    while (found := table.attrs.get(episode_attribute(episode, len(parts)))) is not None:
        parts.append(np.asarray(found, np.uint8).tobytes())
    return decode_data(b"".join(parts))


def _names(table: Any) -> list[str]:
    given = table.attrs.get(NAMES_ATTRIBUTE)
    return [str(name) for name in json.loads(given)] if isinstance(given, str) else []
