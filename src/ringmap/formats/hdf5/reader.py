"""The reading side of an HDF5 file: rows of its columns, from any process.

Invariants: what is pickled is a path and the episode table, never a handle or data; a process
that opens the path again and finds other episodes there refuses, instead of mixing two files.
Not here: tensors, clips (`ringmap.datasets.stored`), the columns themselves (columns.py).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from ringmap.datasets.base import num_rows
from ringmap.errors import (
    CorruptError,
    LockedError,
    NotFoundError,
    ReplacedError,
    UnknownColumnError,
    UnknownFormatError,
)
from ringmap.formats.common.directory import damage_named
from ringmap.formats.common.untrusted import kind_at, refuse_sparse
from ringmap.formats.hdf5.columns import (
    EPISODE_LENGTHS,
    EPISODE_OFFSETS,
    Column,
    find_columns,
)
from ringmap.formats.hdf5.journal import mend
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.blobs import decode_data

__all__ = [
    "NAMES_ATTRIBUTE",
    "HDF5Source",
    "episode_attribute",
    "open_for_reading",
    "read_episode_data",
    "read_table",
]

Array = np.ndarray[Any, np.dtype[Any]]

NAMES_ATTRIBUTE = "ringmap_episode_columns"
"""Attribute of `ep_len`: JSON list of the names of all episode data, first seen first."""


_inherited: list[Any] = []
"""Handles that a forked child got from its parent, and must neither use nor close."""


class HDF5Source:
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

    _file: Any
    _table: Any
    _columns: dict[str, Column]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._forget()
        self._lengths: Array | None = None
        with self._alone():
            self._open()
            with damage_named(self.path):
                self.episode_columns: list[str] = _names(self._table)
        self.schema = Schema(tuple(column.spec for column in self._columns.values()))

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int32."""
        assert self._lengths is not None
        return self._lengths

    @property
    def offsets(self) -> Array:
        """Row of each episode's first step, int64."""
        return self._offsets

    def windows(
        self, columns: Sequence[str], starts: Array, length: int, stride: int = 1
    ) -> dict[str, Array]:
        """Read rows `s, s + stride, ... < s + length` of these columns for each s of `starts`.

        Shapes: column -> (len(starts), ceil(length / stride), ...), images in stored order.

        Raises:
            CorruptError: HDF5 can't read them.
            ReplacedError: the path holds another file by now.
        """
        with self._alone():
            opened, found = self._open(), {}
            for name in columns:
                if name not in opened:
                    raise UnknownColumnError(
                        f"{self.path}: no column {name!r}; there are {list(opened)}"
                    )
                with damage_named(f"{self.path}: column {name!r}"):
                    found[name] = opened[name].windows(starts, length, stride)
            return found

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} when it has none."""
        with self._alone():
            self._open()
            with damage_named(f"{self.path}: data of episode {episode}"):
                return read_episode_data(self._table, episode)

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        with self._alone():
            if self._file is not None:
                self._file.close()
            self._drop()

    def _alone(self) -> threading.RLock:
        if self._pid != os.getpid():  # a forked child: another thread may have held the lock
            self._forget()
        return self._lock

    def _open(self) -> dict[str, Column]:
        if self._file is not None:
            return self._columns
        file = open_for_reading(self.path)
        try:
            with damage_named(self.path):
                lengths, offsets = read_table(file)
                columns = find_columns(file)
            if self._lengths is None:
                rows = num_rows(lengths, offsets)
                for column in columns.values():
                    if len(column) < rows:
                        raise CorruptError(
                            f"{self.path}: column {column.spec.name!r} has {len(column)} rows, but "
                            f"the episodes need {rows}; its writer was killed, or it is no column"
                        )
                self._lengths, self._offsets = lengths, offsets
                self._inode = os.stat(self.path).st_ino
            else:
                self._compare(lengths, offsets, columns)
        except BaseException:
            file.close()
            raise
        self._file, self._columns = file, columns
        self._table = file[EPISODE_LENGTHS]
        return columns

    def _compare(self, lengths: Array, offsets: Array, columns: dict[str, Column]) -> None:
        count = len(self.lengths)
        known = {spec.name: spec for spec in self.schema.columns}
        same = (
            self._inode == os.stat(self.path).st_ino
            and np.array_equal(lengths[:count], self.lengths)
            and np.array_equal(offsets[:count], self._offsets)
            and known == {name: column.spec for name, column in columns.items()}
        )
        if not same:
            raise ReplacedError(
                f"{self.path}: holds other episodes than when this dataset was loaded; load it again"
            )

    def _forget(self) -> None:
        # Closing what a fork copied would free the lock that the parent relies on: it stays open.
        if getattr(self, "_file", None) is not None:
            _inherited.append((self._file, self._columns, self._table))
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._drop()

    def _drop(self) -> None:
        self._file = self._table = None
        self._columns = {}

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_lock", "_file", "_pid", "_columns", "_table")
        return {name: value for name, value in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


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
        values = root.get(name) if isinstance(root.get(name, getlink=True), h5py.HardLink) else None
        if not isinstance(values, h5py.Dataset) or values.is_virtual or values.external:
            raise UnknownFormatError(
                f"{path}: has no dataset {name!r}; expected one dataset per column over all steps, "
                f"with {EPISODE_LENGTHS!r} and {EPISODE_OFFSETS!r} beside them"
            )
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise CorruptError(
                f"{path}: {name!r} is {values.dtype} {values.shape}, expected integers (E,)"
            )
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
