"""The reading side of an HDF5 file: rows of its columns, from any process.

Invariants: a process that opens the path again and finds another file there, or the same one with other episodes,
refuses. A file that was appended to meanwhile has its old `BIRTH`.
Not here: pickling and forks (common/directory.py), tensors, clips (`ringmap.datasets.stored`), the columns themselves
(columns.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.datasets.base import num_rows
from ringmap.errors import (
    CorruptError,
    ReplacedError,
    UnknownFormatError,
)
from ringmap.formats.common import disk
from ringmap.formats.common.directory import (
    DirectorySource,
    damage_named,
    stamp_of,
    tell_left_out,
)
from ringmap.formats.common.safe_hdf5 import has_own, refuse_sparse
from ringmap.formats.common.table_mark import refuse_other_table
from ringmap.formats.hdf5.columns import (
    EPISODE_LENGTHS,
    EPISODE_OFFSETS,
    find_columns,
)
from ringmap.formats.hdf5.data import data_names, is_of_table, read_episode_data
from ringmap.formats.hdf5.journal import WAIT_S, unwritten
from ringmap.formats.hdf5.pages import JournaledFile
from ringmap.storage.columns.schema import Schema

__all__ = [
    "BIRTH",
    "HDF5File",
    "HDF5Source",
    "read_table",
]

Array = np.ndarray[Any, np.dtype[Any]]

BIRTH = "ringmap_birth"
"""Attribute of `ep_len`: a random text that a file gets when our writer makes it, and keeps while it is appended to."""

_open_files: weakref.WeakSet[HDF5File] = weakref.WeakSet()


class HDF5Source(DirectorySource):
    """The columns of an HDF5 file, as `StoredDataset` reads them.

    Args:
        path: the file.

    Raises:
        NotFoundError: there is no such file.
        LockedError: a writer keeps it locked.
        UnknownFormatError: it is not an HDF5 file, or one of another layout.
        CorruptError: it is damaged, or refers to other files.

    Processes and threads: HDF5 runs one call at a time; pickled or forked, it opens the file again
    by itself. A read waits while a writer adds a group of episodes, and then opens the file again.
    """

    _holds = True
    _stamp: tuple[int, ...] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        file = self._handle()
        self._birth = file.table.attrs.get(BIRTH)
        self.lengths, self.offsets = file.lengths, file.offsets
        with damage_named(self.path):
            self.episode_columns = data_names(file.table)
            Facts.stated(file.table.attrs, PREFIX).give(self)
        self.schema = Schema(tuple(column.spec for column in file.columns.values()))
        self.unsupported = file.found.unsupported
        self._stamp = file.stamp
        tell_left_out(self.path, file.found.others)

    @property
    def opened(self) -> HDF5File:
        """The open file."""
        found: HDF5File = self._handle()
        return found

    def _open(self) -> HDF5File:
        found = HDF5File(self.path)
        if self._stamp not in (None, found.stamp) and not self._continues(found):
            found.close()
            raise ReplacedError(f"{self.path}: was written over since this dataset was loaded; load it again")
        return found

    def _continues(self, found: HDF5File) -> bool:
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

    def _release(self, handle: HDF5File) -> None:
        handle.close()

    def _windows(
        self, handle: HDF5File, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        found = {}
        for name in columns:
            with damage_named(f"{self.path}: column {name!r}"):
                found[name] = handle.columns[name].windows(starts, length, stride)
        return found

    def _episode_data(self, handle: HDF5File, episode: int) -> dict[str, Any]:
        if not handle.fits:
            raise refuse_other_table(self.path)
        return read_episode_data(handle.table, episode)

    def _unmixed(self, read: Callable[[HDF5File], dict[str, Any]]) -> dict[str, Any]:
        """Return what is read of the file as it was when it was opened; its writers wait meanwhile."""
        with self._alone():
            while True:
                opened = self.opened
                disk.lock(opened.fd, self.path, shared=True, wait_s=WAIT_S)
                try:
                    if opened.is_unchanged():
                        try:
                            return read(opened)
                        finally:
                            if not opened.is_unchanged():  # by a program that locks nothing
                                raise ReplacedError(f"{self.path}: was written over while it was open; load it again")
                finally:
                    disk.unlock(opened.fd, close=False)
                self.close()


class HDF5File:
    """An open file, its columns and its table of episodes.

    Attributes:
        stamp: what changes when the file is written, as of the opening.
        fits: whether the data of episodes are of these episodes.
    """

    file: Any = None

    def __init__(self, path: str) -> None:
        with unwritten(path) as fd:
            self.fd = os.dup(fd)  # shares the lock, which `unwritten` gives back
            try:
                self.file = _opened(path, self.fd)
                self.stamp = stamp_of(os.fstat(self.fd))
                with damage_named(path):
                    self.lengths, self.offsets = read_table(self.file)
                    self.found = find_columns(self.file, num_rows(self.lengths, self.offsets), self.fd)
            except BaseException:
                self.close()
                raise
        self.columns = self.found.columns
        self.table = self.file[EPISODE_LENGTHS]
        self.fits = is_of_table(self.table, self.lengths, self.offsets)
        _open_files.add(self)

    def is_unchanged(self) -> bool:
        """Return whether nothing was written since the opening."""
        found = os.fstat(self.fd)
        return (found.st_size, found.st_mtime_ns) == self.stamp[2:]

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@atexit.register
def _close_open_files() -> None:
    """Close what a thread, or a fork's parent, keeps open: HDF5's own end would, by a driver that is Python, which is
    gone by then."""
    for one in list(_open_files):
        with contextlib.suppress(Exception):
            one.file.close()


def _opened(path: str, fd: int) -> Any:
    try:
        # By a driver of our own: HDF5 shares what it has in memory of a file among those who open it by its path in one
        # process, also what was there before a commit. And it locks nothing.
        return h5py.File(JournaledFile(fd, path), "r")
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
