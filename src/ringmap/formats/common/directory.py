"""Read a folder or a file: pickling, forks, and when to refuse.

    loaded: identity = which folder is at the path, and the stamps of its witnesses     in every pickle
    opened: kept = the stamps of the files that the handle keeps open                   of a process
    read: identity and kept are what they were? -> rows -> and still are? else ReplacedError, whatever the read gave or
    raised

A witness is a file that every program writes which makes a dataset, and that no writer of ours changes when it appends.
Invariants: a pickle holds a path and the episode table, never a handle or data; a dataset whose files are overwritten
while it is open gives what it opened, or refuses: two datasets are never mixed.
Not here: tensors, clips (`ringmap.datasets.stored`); how rows are found (each format).
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from ringmap.errors import (
    CorruptError,
    NotFoundError,
    ReplacedError,
    RingmapError,
    UnknownColumnError,
)
from ringmap.formats.media.videos import Decoders
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.paths import local_path

__all__ = [
    "DecodingSource",
    "DirectorySource",
    "damage_named",
    "offsets_of",
    "stamp_of",
    "steps_of",
    "tell_left_out",
]

Array = np.ndarray[Any, np.dtype[Any]]

_RAISED = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    MemoryError,
    ArithmeticError,
    AttributeError,
    EOFError,
    SyntaxError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""The exceptions of libraries about damaged bytes."""

_inherited: list[Any] = []
"""Handles that a forked child inherited from its parent, and must neither use nor close."""


class DirectorySource:
    """The columns of a folder or file, for `StoredDataset`.

    A subclass supplies `_open` and `_windows`, may supply `_release` and `_episode_data`, and sets `schema`, `lengths`,
    `offsets` and `episode_columns` from its first handle. What it reads by path later is either a witness, or passes
    `_refuse_newer`.

    Args:
        path: the folder or file.

    Raises:
        NotFoundError: there is none.
        CorruptError: it is damaged.
    """

    schema: Schema
    lengths: Array
    offsets: Array
    episode_columns: list[str]
    reward_at: str | None = None
    """Where rewards stand, "next" or "same", if the format or the dataset says so."""
    fps: Fraction | None = None
    """Steps per second, if the dataset says so."""
    _found: Any = None

    _holds: ClassVar[bool] = False
    """Whether a handle keeps open all that is read through it: what is at the path then matters at an opening alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        if not os.path.exists(self.path):
            raise NotFoundError(f"{self.path}: no such file or folder")
        self._loaded_ns = time.time_ns()
        self._watched = tuple(filter(os.path.exists, self._witnesses()))
        self._identity = self._identify()
        self._forget()

    def _witnesses(self) -> Sequence[str]:
        """Return the paths of the witnesses; those that are not there count for nothing. Asked once."""
        return ()

    def _kept(self, handle: Any) -> Any:
        """Return the stamps of the files that a handle keeps open."""
        return None

    def _open(self) -> Any:
        """Return a handle for this process, which `_windows` reads through."""
        raise NotImplementedError

    def _release(self, handle: Any) -> None:
        """Close a handle of this process."""

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        """As `windows`, for columns that exist."""
        raise NotImplementedError

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        """As `episode_data`."""
        return {}

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows `s, s + stride, ... < s + length` of these columns for each s of `starts`.

        Shapes: column -> (len(starts), ceil(length / stride), ...), images in stored order.

        Raises:
            CorruptError: they can't be read.
            ReplacedError: the path now holds something else.
        """
        known = self.schema.names
        for name in columns:
            if name not in known:
                raise UnknownColumnError(f"{self.path}: no column {name!r}; there are {known}")
        with damage_named(self.path):
            return self._unmixed(lambda handle: self._windows(handle, columns, starts, length, stride))

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} when it has none.

        Raises:
            CorruptError, ReplacedError: as for `windows`.
        """
        with damage_named(f"{self.path}: data of episode {episode}"):
            return self._unmixed(lambda handle: self._episode_data(handle, episode))

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        with self._alone():
            if self._found is not None:
                self._release(self._found)
            self._found = None

    def _alone(self) -> threading.RLock:
        if self._pid != os.getpid():  # a forked child: another thread may have held the lock
            self._forget()
        return self._lock

    def _handle(self) -> Any:
        found = self._found
        if found is not None and self._pid == os.getpid():
            return found
        with self._alone():
            if self._found is None:
                self._refuse_others()
                found = self._open()
                self._kept_then = self._kept(found)
                self._found = found
            return self._found

    def _unmixed(self, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return what is read through the handle; raise ReplacedError if it may be of other data, or failed since there
        are other data."""
        handle = self._handle()
        self._check()  # ahead, too: a map of a file that is shorter by now ends the process
        try:
            found = read(handle)
        except Exception:
            self._check()
            raise
        self._check()
        return found

    def _check(self) -> None:
        """Raise ReplacedError if the open files, or those at the path, are not what was opened."""
        with self._alone():
            if self._found is not None and self._kept(self._found) != self._kept_then:
                raise ReplacedError(f"{self.path}: was written over, or removed, while it was open; load it again")
        if not self._holds:
            self._refuse_others()

    def _refuse_others(self) -> None:
        """Raise ReplacedError if another dataset is at the path."""
        try:
            now = self._identify()
        except (FileNotFoundError, NotADirectoryError):
            raise ReplacedError(f"{self.path}: is not there any more") from None
        if now != self._identity:
            raise ReplacedError(f"{self.path}: holds another dataset than when it was loaded; load it again")

    def _identify(self) -> Any:
        found = os.stat(self.path)
        return found.st_dev, found.st_ino, *(stamp_of(os.stat(path)) for path in self._watched)

    def _refuse_newer(self, path: str) -> None:
        """Raise ReplacedError if a file was written since the dataset was loaded. It is called after the file was read.

        For files that no writer of ours changes once they count, of which there are too many to look at when a dataset
        is loaded.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ctime_ns > self._loaded_ns:
                raise ReplacedError(f"{self.path}: {path} was written since this dataset was loaded; load it again")

    def _forget(self) -> None:
        if getattr(self, "_found", None) is not None:
            _inherited.append(self._found)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._found = None

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_lock", "_pid", "_found", "_kept_then")
        return {name: value for name, value in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


class DecodingSource(DirectorySource):
    """A source that keeps decoders open: a process's own, and none in a pickled copy."""

    def _forget(self) -> None:
        super()._forget()
        self._decoders = Decoders()

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        super().close()
        self._decoders.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_decoders"}


@contextlib.contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Turn a library's exception about damaged bytes into CorruptError."""
    try:
        yield
    except RingmapError:
        raise
    except _RAISED as error:
        raise CorruptError(f"{what} can't be read: {type(error).__name__}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the exception of a Rust library that panicked
            raise
        raise CorruptError(f"{what} can't be read: {error}") from error


def tell_left_out(path: str, left_out: Sequence[str]) -> None:
    """Warn of what a dataset of another program holds that is no column, nor data of an episode."""
    if left_out:
        shown = ", ".join(map(repr, left_out[:10])) + (", ..." if len(left_out) > 10 else "")
        warnings.warn(f"{path}: left out, as it does not have a row for each step: {shown}", stacklevel=2)


def stamp_of(found: os.stat_result) -> tuple[int, ...]:
    """Return what of a file's facts changes when it is replaced or written."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def steps_of(starts: Array, length: int, stride: int) -> Array:
    """Return the rows of windows, (len(starts), steps)."""
    return np.asarray(starts, np.int64)[:, None] + np.arange(0, length, stride)


def offsets_of(lengths: Array) -> Array:
    """Return the row of each episode's first step."""
    return np.cumsum(lengths, dtype=np.int64) - lengths
