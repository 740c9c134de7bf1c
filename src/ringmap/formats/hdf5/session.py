"""An HDF5 file open for writing: found or made, locked, committed, and put in its place.

| mode      | no file there       | a dataset is there                                      |
| --------- | ------------------- | ------------------------------------------------------- |
| append    | a new file          | extended in place                                       |
| overwrite | a new file          | built beside it, put in its place at the end            |
| error     | a new file          | refused                                                 |

Invariants: a new file appears whole, as an empty dataset; while one is replaced, the old one
stays what it was until `finish`.
Not here: episodes (writer.py), the order of a commit (pages.py).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from ringmap.errors import CorruptError, ExistsError, InputError, LockedError, UnknownFormatError
from ringmap.formats.common import disk
from ringmap.formats.hdf5.columns import EPISODE_LENGTHS, EPISODE_OFFSETS
from ringmap.formats.hdf5.journal import SUFFIX, open_locked, recover
from ringmap.formats.hdf5.pages import JournaledFile
from ringmap.formats.hdf5.reader import BIRTH

__all__ = ["Session"]

_TABLE_CHUNK = 1024

_MARKED_SUPERBLOCK = 3
"""From this version on, HDF5 marks a file as open for writing, and refuses a marked one."""


class Session:
    """One file, from the moment that it is locked until it is closed.

    Args:
        path: the file.
        mode: as in the table above.
        on_open: called with the h5py file whenever there is a fresh handle.

    Raises:
        ExistsError, LockedError, UnknownFormatError, CorruptError, InputError: as `HDF5Writer`.
    """

    file: Any = None
    """The h5py file; None until `reopen`, after a fault or a commit that had to close it."""

    def __init__(self, path: str, mode: str, on_open: Callable[[Any], None]) -> None:
        self.path = path
        self.pid = os.getpid()
        self._on_open = on_open
        self._fd = -1
        self._io: JournaledFile | None = None
        self._building: str | None = None
        self._marked = False
        exists = self._look(mode)
        try:
            self._drop_leavings()
            if exists and mode != "overwrite":
                self._fd = open_locked(path)
                self.reopen()
            else:
                self._create(replace=exists)
        except BaseException:
            self.close()
            raise

    def reopen(self) -> None:
        """Open what was last committed, after finishing a commit that was cut short.

        Raises:
            CorruptError: HDF5 can't open it.
        """
        path = self._building or self.path
        recover(self._fd, path)
        io = JournaledFile(self._fd, path)
        try:
            file = h5py.File(io, "r+", rdcc_nbytes=0)
        except OSError as error:
            raise CorruptError(f"HDF5Writer: HDF5 can't open {path}: {error}") from error
        file.flush()
        io.seal()
        self._io, self.file = io, file
        self._marked = file.id.get_create_plist().get_version()[0] >= _MARKED_SUPERBLOCK
        self._on_open(file)

    def commit(self) -> None:
        """Make all that was written part of the file.

        Where the disk fails after the commit point, `file` is None, and `reopen` or the next opening goes on.

        Raises:
            OSError: before the commit point: nothing was changed; call `abandon`.
        """
        assert self._io is not None
        if self._marked:
            # Only closing takes the mark off such a file, which another program has made.
            self.file.close()
        else:
            self.file.flush()
        try:
            self._io.commit()
        except OSError:
            if not self._io.decided:
                raise
            self.abandon()
        if self._marked:
            self.abandon()

    def abandon(self) -> None:
        """Drop the handle and what was not committed."""
        file, io = self.file, self._io
        self.file = self._io = None
        if io is not None:
            io.kill()
        with contextlib.suppress(Exception):  # HDF5 may be in any state; nothing reaches the file
            file.close()

    def finish(self) -> None:
        """Close the file whole, and put it in its place; `close` still has to follow.

        Raises:
            LockedError: the file that is to be replaced is being written.
        """
        if self.file is None:
            self.reopen()
        assert self._io is not None
        self.file.close()
        self._io.commit()
        disk.sync(self._fd, self.path)
        disk.remove(self._io.path + SUFFIX)
        if self._building is not None:
            _check_unwritten(self.path)
            disk.replace(self._building, self.path)
            self._building = None
            disk.remove(self.path + SUFFIX)  # the old file's, which a kill may have left
            disk.sync(self._fd, self.path)

    @property
    def replaces(self) -> bool:
        """Whether the file is being built beside one that it will replace."""
        return self._building is not None

    def close(self) -> None:
        """Give everything back; what was not finished beside another file goes."""
        self.abandon()
        if self._building is not None:
            disk.remove(self._building)
            disk.remove(self._building + SUFFIX)
            self._building = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            disk.unlock(fd)

    # -- beginnings --------------------------------------------------------------------------

    def _look(self, mode: str) -> bool:
        """Return whether there is a dataset, or refuse something else at the path."""
        path = self.path
        if os.path.isdir(path):
            raise InputError(f"HDF5Writer: {path} is a directory; give the path of a file in it")
        if not os.path.exists(path):
            return False
        if mode == "error":
            raise ExistsError(
                f"HDF5Writer: {path} already exists; pass mode='overwrite' to replace it or mode='append' to extend it"
            )
        nothing_to_lose = mode == "overwrite" and not os.path.getsize(path)
        if not nothing_to_lose and not h5py.is_hdf5(path):
            raise UnknownFormatError(
                f"HDF5Writer: {path} is not an HDF5 file; choose another path, or delete it yourself"
            )
        return True

    def _create(self, replace: bool) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._fd = open_locked(self._beside, os.O_RDWR | os.O_CREAT)
        self._building = self._beside
        disk.truncate(self._fd, 0)
        self._io = JournaledFile(self._fd, self._beside)
        # Superblock 2: a killed writer leaves no mark that others would refuse to open.
        self.file = h5py.File(self._io, "w", libver=("v108", "v108"), track_order=True, rdcc_nbytes=0)
        for name, dtype in ((EPISODE_LENGTHS, np.int32), (EPISODE_OFFSETS, np.int64)):
            self.file.create_dataset(name, shape=(0,), maxshape=(None,), chunks=(_TABLE_CHUNK,), dtype=dtype)
        self.file[EPISODE_LENGTHS].attrs[BIRTH] = uuid.uuid4().hex
        self.commit()
        if not replace:
            try:
                disk.put_new(self._beside, self.path)
            except FileExistsError:
                raise ExistsError(f"HDF5Writer: {self.path} has just been made by another writer") from None
            self._building = None
            self._io.path = self.path
        self._on_open(self.file)

    @property
    def _beside(self) -> str:
        folder, name = os.path.split(self.path)
        return os.path.join(folder, f".{name}.new")

    def _drop_leavings(self) -> None:
        """Remove what a killed writer was building beside this path."""
        if os.path.exists(self._beside):
            disk.remove(self._beside + SUFFIX)
            fd = open_locked(self._beside)
            disk.remove(self._beside)
            disk.unlock(fd)


def _check_unwritten(path: str) -> None:
    """Raise LockedError while a writer appends to the file that is to be replaced."""
    try:
        fd = os.open(path, os.O_RDONLY | disk.BINARY)
    except FileNotFoundError:
        return
    try:
        disk.lock(fd, path, shared=True)
    except LockedError as error:
        raise LockedError(f"HDF5Writer: can't replace {path} while it is written to: {error}") from None
    finally:
        os.close(fd)
