"""Read a folder or a file: pickling, forks, and when to refuse.

    loaded: identity = which folder is at the path, and the stamps of its witnesses     in every pickle
    opened: kept = the stamps of the files that the handle keeps open                   of a process
    read: identity and kept are what they were? -> rows -> and still are? else ReplacedError, whatever the read gave or
    raised

A witness is a file that every program writes which makes a dataset, and that no writer of ours changes when it appends.
Invariants: a pickle holds a path and the episode table, never a handle or data; a dataset whose files are overwritten
while it is open gives what it opened, or refuses: two datasets are never mixed.
Formats without random access load whole episodes, of which at most `CACHE_NBYTES`, or one episode, are held.

Data of episodes that lie beside the table of episodes, in the order of its rows, know which these were:

    table   (first row, steps) of episode 0, 1, 2, ...  --mark_of-->  how many, and a sum of hashes
    data    of episode 0, 1, 2, ..., and the mark of the table as it was when they were written

Another program that removes an episode changes the table, and does not know of the data: the mark tells.
Not here: tensors, clips (`ringmap.datasets.stored`); how rows are found (each format).
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
import time
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from ringmap.errors import (
    CorruptError,
    InputError,
    NotFoundError,
    ReplacedError,
    RingmapError,
    UnknownColumnError,
    UnsupportedError,
)
from ringmap.formats.media.videos import Decoders
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.paths import local_path

__all__ = [
    "DecodingSource",
    "DirectorySource",
    "EpisodeCache",
    "EpisodeSource",
    "damage_named",
    "fits",
    "mark_of",
    "offsets_of",
    "refuse_other_table",
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
        """Return the data of one episode, name -> str, bytes, number, None or array, as they were written."""
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


CACHE_NBYTES = 256 << 20


class EpisodeCache:
    """Episodes by number; the least recently used one is dropped first."""

    def __init__(self, load: Callable[[int, Sequence[str]], dict[str, Array]], file: Any = None) -> None:
        self._load, self.file = load, file
        self._lock = threading.RLock()
        self._held: OrderedDict[int, dict[str, Array]] = OrderedDict()
        self._nbytes = 0

    def episode(self, number: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return columns of an episode, these at least, if it has them; the caller must not write to them."""
        with self._lock:
            found = self._held.setdefault(number, {})
            self._held.move_to_end(number)
            wanted = [name for name in columns if name not in found]
            if wanted:
                fresh = self._load(number, wanted)
                self._nbytes += sum(v.nbytes for n, v in fresh.items() if n not in found)
                found.update({n: v for n, v in fresh.items() if n not in found})
                while self._nbytes > CACHE_NBYTES and len(self._held) > 1:
                    _, old = self._held.popitem(last=False)
                    self._nbytes -= sum(rows.nbytes for rows in old.values())
            return found

    def windows(
        self, columns: Sequence[str], offsets: Array, starts: Array, length: int, stride: int, schema: Schema
    ) -> dict[str, Array]:
        """Read windows of columns, which may span episodes. Texts are as wide as the widest episode's that is read."""
        rows = steps_of(starts, length, stride)
        flat = rows.ravel()
        specs = {spec.name: spec for spec in schema.columns}
        found = {n: empty((len(flat), *specs[n].shape), specs[n].dtype) for n in columns}
        episodes = np.searchsorted(offsets, flat, side="right") - 1
        for number in np.unique(episodes).tolist():
            there = np.flatnonzero(episodes == number)
            episode = self.episode(number, columns)
            for name in columns:
                if name not in episode:
                    raise UnsupportedError(
                        f"column {name!r} is not in episode {number}; leave it out: keys_to_load=, or the episode: "
                        "where="
                    )
                if found[name].dtype.kind in "SU":  # a narrower array cuts texts
                    wide = np.promote_types(found[name].dtype, episode[name].dtype)
                    found[name] = found[name].astype(wide, copy=False)
                elif not np.can_cast(episode[name].dtype, found[name].dtype):
                    raise UnsupportedError(
                        f"column {name!r} is of {episode[name].dtype} in episode {number}, and of {found[name].dtype} "
                        "in others"
                    )
                steps = flat[there] - offsets[number]
                if there[-1] - there[0] == len(there) - 1:  # straight into its place: no copy between
                    out = found[name][there[0] : there[-1] + 1]
                    np.take(episode[name].astype(out.dtype, copy=False), steps, 0, out, "clip")
                else:
                    found[name][there] = episode[name][steps]
        return {name: v.reshape(*rows.shape, *v.shape[1:]) for name, v in found.items()}


class EpisodeSource(DirectorySource):
    """What a format reads: a source that loads whole episodes, and holds those in use, of at most 256 MiB, or one.

    A subclass calls `describe` at the end of its `__init__`, and supplies `_load`; it may supply `_episode_data`. Its
    attributes `fps`, a `Fraction`, and `reward_at`, "next" or "same", are None where they are not known.
    The dataset over it turns pictures, makes tensors, cuts clips, and takes all options of `load_dataset`. A read
    raises ReplacedError where the path holds another folder or file than when it was opened, or a file that was written
    since, and CorruptError for what a library raises, and for a column of another number of rows than its episode.

    Args:
        path: the folder or file; `self.path` is a string.

    Raises:
        NotFoundError: there is none.

    Processes and threads: it is pickled, for workers, so it keeps no open file. `_load` is called in any thread, one at
    a time.

    Example:
        >>> from ringmap.data import EpisodeSource, Format
        >>> class Stack(EpisodeSource):
        ...     def __init__(self, path):
        ...         super().__init__(path)
        ...         episodes = np.load(path, mmap_mode="r")  # (episodes, T, ...)
        ...         self.describe([episodes.shape[1]] * len(episodes), {"obs": episodes[0]})
        ...     def _load(self, file, number, columns):
        ...         return {"obs": np.load(self.path)[number]}
        >>> class Stacks(Format):
        ...     name, source = "stack", Stack
        >>> np.save("two.npy", np.zeros((2, 30, 7)))
        >>> Stacks.open_reader("two.npy", num_steps=4, output="numpy")[0]["obs"].shape
        (4, 7)
    """

    _units: Array | None = None
    """The first row of each unit that is loaded; None: of each episode."""

    def describe(self, lengths: Sequence[int], columns: Any, episode_columns: Sequence[str] = ()) -> None:
        """Say what there is.

        Args:
            lengths: steps of each episode.
            columns: column -> `(shape of a step, dtype)`, `str` for text of any length; or one whole episode, column ->
                array (T, ...); {} if there are no episodes. Columns of uint8 or uint16 of steps (H, W, C) with 1, 3 or
                4 channels are pictures.
            episode_columns: names of the data of episodes, those with `_` in front too.

        Raises:
            InputError: they are no lengths, or no columns.
        """
        given = np.asarray(lengths)
        if given.ndim != 1 or (len(given) and (given.dtype.kind not in "iu" or not _is_length(given).all())):
            raise InputError(
                f"{type(self).__name__}.describe: lengths must be a whole number for each episode, 0 to {_MOST_STEPS}, "
                f"got {lengths!r}"[:300]
            )
        self.lengths = given.astype(np.int32)
        self.offsets = offsets_of(self.lengths)
        self.schema = Schema.parse(columns, type(self).__name__) if columns else Schema(())
        self.episode_columns = list(episode_columns)

    def _witnesses(self) -> Sequence[str]:
        return () if os.path.isdir(self.path) else (self.path,)

    def _open_file(self) -> Any:
        """Return what is kept open in a process, None for nothing."""
        return None

    def _load(self, file: Any, number: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return at least these columns of an episode, as far as it has them: column -> (T, ...), pictures (T, H, W,
        C), never written to.

        Args:
            file: what `_open_file` returned: None, unless the class has its own.
            number: of the episode.
            columns: their names.
        """
        raise NotImplementedError

    def _open(self) -> Any:
        file = self._open_file()
        return EpisodeCache(functools.partial(self._checked, file), file)

    def _checked(self, file: Any, number: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return what `_load` does; raise CorruptError if a column has another number of rows than the episode."""
        found = self._load(file, number, columns)
        for name in columns if self._units is None else ():
            if name in found and len(found[name]) != self.lengths[number]:
                raise CorruptError(
                    f"{self.path}: column {name!r} has {len(found[name])} rows in episode {number}, expected "
                    f"{self.lengths[number]}"
                )
        return found

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        cache: EpisodeCache = handle
        units = self.offsets if self._units is None else self._units
        return cache.windows(columns, units, starts, length, stride, self.schema)


_MOST_STEPS = np.iinfo(np.int32).max


def _is_length(numbers: Array) -> Any:
    return (numbers >= 0) & (numbers <= _MOST_STEPS)


_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Of splitmix64."""


def mark_of(lengths: Array, offsets: Array, before: Array | None = None) -> Array:
    """Return the mark of a table, (2,) uint64: how many episodes, and the sum of their hashes.

    Example:
        >>> whole = mark_of(np.array([4, 4, 4]), np.array([0, 4, 8]))
        >>> first = mark_of(np.array([4]), np.array([0]))
        >>> mark_of(np.array([4, 4]), np.array([4, 8]), first).tolist() == whole.tolist()
        True
    """
    count = 0 if before is None else int(before[0])
    one, two, three = (np.uint64(n) for n in _MIX)
    hashes = np.arange(count + 1, count + 1 + len(lengths), dtype=np.uint64) * one
    for part in (offsets, lengths):
        hashes ^= np.asarray(part, np.int64).astype(np.uint64)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * two
        hashes = (hashes ^ (hashes >> np.uint64(27))) * three
    total = int(hashes.sum(dtype=np.uint64)) + (0 if before is None else int(before[1]))
    return np.array([count + len(lengths), total % (1 << 64)], np.uint64)


def fits(mark: Any, lengths: Array, offsets: Array) -> bool:
    """Tell whether a table begins with the episodes of a mark; None, of data without one, fits."""
    if mark is None:
        return True
    try:
        stated = [int(n) for n in mark]
    except (TypeError, ValueError):
        return False
    if len(stated) != 2 or not 0 <= stated[0] <= len(lengths):
        return False
    found = mark_of(lengths[: stated[0]], offsets[: stated[0]])
    return [int(n) for n in found] == stated


def refuse_other_table(path: str) -> CorruptError:
    """Return the error for data whose mark does not fit."""
    return CorruptError(
        f"{path}: the data of its episodes were written for other episodes than it has: another program removed or "
        "moved some, so it is "
        "not known which data are of which; the rows of numbers can be read: write these to a new dataset, and leave "
        "the data out"
    )
