"""What is read from a place: its episodes, each named by a number that it keeps.

    Source          ids, lengths, columns, steps, data         the same for all
      ring          a live reader of `ReplayBuffer`; an episode's id is the position of its first step
      transitions   a live reader of `TransitionReplayBuffer`: it has rows, but no episodes
      dataset       a reader of its format; an episode's id is its number

Invariants: what `read` returns belongs to the episode that was asked for, or GoneError is raised; files are read by
system calls, so that one that is cut raises an error and does not end the process.
Not here: thinning, pictures (drawing.py), the index (open_dataset.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ringmap.buffers.opening import DATASET, EPISODES, TRANSITIONS
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.transitions.buffer import TransitionReplayBuffer
from ringmap.datasets.base import as_dataset
from ringmap.datasets.marks import Marks
from ringmap.errors import ClipIndexError, InputError, ReplacedError
from ringmap.formats.catalog.load import load_arrays
from ringmap.storage.columns.schema import ColumnSpec, Schema, as_columns
from ringmap.storage.disk.calls import thread
from ringmap.storage.inspect.describe import Facts, facts_of
from ringmap.storage.read.reader import Reader
from ringmap.viewer.drawing import GoneError

__all__ = ["DatasetSource", "RingSource", "Source", "TransitionSource"]

Array = np.ndarray[Any, np.dtype[Any]]

_TRIES, _NEWEST = 10, 20

_REST_S = 1.0
"""From the last read of a dataset until its files are closed."""


class Source:
    """The episodes of one place. Safe to call from several threads. This one has none."""

    kind = DATASET
    is_live = False
    what = "this place"
    """What has no episodes, in an error's words."""

    def spans(self) -> tuple[Array, Array]:
        """Return the ids of the episodes, rising, and their lengths, at one moment."""
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def number_of(self, name: int) -> int:
        """Return the number that an episode has now."""
        raise GoneError(f"{self.what} has no episodes")

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The columns: names, dtypes, shapes of a step."""
        return ()

    def read(self, name: int, start: int, end: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return steps `[start, end)` of an episode."""
        raise GoneError(f"{self.what} has no episodes")

    def data(self, name: int) -> dict[str, Any]:
        """Return the values that are constant within an episode."""
        raise GoneError(f"{self.what} has no episodes")

    def verify(self, name: int) -> bool:
        """Compare an episode with its checksum, and raise what is wrong with it; tell whether it has one."""
        return False

    def marks(self, path: str | None) -> AbstractContextManager[Marks]:
        """Give the marks of its episodes, for the body alone."""
        raise InputError(f"{self.what} has no episodes to mark")

    def rows(self, first: int, count: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return `count` rows from row `first` of the episodes, end to end: whole episodes, for the index."""
        return {}

    def newest(self, column: str, count: int) -> Array:
        """Return up to `count` rows of a column, from the first steps of the newest episodes: at most 20 of these."""
        ids, lengths = self.spans()
        parts, left = [], count
        for row in range(len(ids) - 1, max(-1, len(ids) - 1 - _NEWEST), -1):
            size = min(left, int(lengths[row]))
            if size > 0:
                parts.append(self.read(int(ids[row]), 0, size, [column])[column])
                left -= size
        return np.concatenate(parts[::-1]) if parts else np.empty(0)

    def refresh(self) -> bool:
        """Look for what is new; tell whether there is something."""
        return False

    def ring(self) -> dict[str, Any]:
        """Return how full a ring is, and where it stands; {} of what is no ring."""
        return {}

    def facts(self) -> Facts | None:
        """Return what a ring's directory says; None of a dataset, and of a ring in RAM."""
        return None

    def moment(self) -> tuple[int, int, int]:
        """Return tail, head and commits as they are known: equal ones are of the same episodes. A read may refresh,
        too."""
        return 0, 0, 0

    def close(self) -> None:
        """Close files."""


class _LiveSource(Source):
    """A ring of either kind."""

    is_live = True
    buffer: ReplayBuffer | TransitionReplayBuffer

    def __init__(self, buffer: ReplayBuffer | TransitionReplayBuffer, owned: bool) -> None:
        self.buffer, self._owned = buffer, owned
        self._lock = threading.RLock()

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The columns, none before the first episode."""
        schema = self.buffer.schema
        return () if schema is None else schema.columns

    def refresh(self) -> bool:
        """Look for what is new."""
        with self._lock:
            return self.buffer.refresh()

    def moment(self) -> tuple[int, int, int]:
        """Return tail, head and commits as they are known."""
        handle = self.buffer.engine.source
        with thread.searching, handle.lock:
            return int(handle.tail), int(handle.head), int(handle.seq)

    def facts(self) -> Facts | None:
        """Return what its directory says; None of a ring in RAM."""
        path, source = self.buffer.path, self.buffer.engine.source
        if path is None:
            return None
        return facts_of(path, source if isinstance(source, Reader) else None)

    def close(self) -> None:
        """Close the reader, unless it was given."""
        if self._owned:
            self.buffer.close()


class RingSource(_LiveSource):
    """A ring of episodes.

    Args:
        buffer: it, or the path of its directory, which is then opened as a live reader, and closed by `close`.
    """

    kind = EPISODES
    buffer: ReplayBuffer

    def __init__(self, buffer: ReplayBuffer | str) -> None:
        if owned := isinstance(buffer, str):
            buffer = ReplayBuffer.open(buffer, reads="pread")
        super().__init__(buffer, owned)
        self._marks: Marks | None = None

    def spans(self) -> tuple[Array, Array]:
        """Return positions and lengths, of one moment."""
        return self.buffer.episode_spans()

    def number_of(self, name: int) -> int:
        """Return the number that an episode has now."""
        try:
            return self.buffer.episode_number(name)
        except ClipIndexError:
            raise GoneError("this episode was evicted") from None

    def read(self, name: int, start: int, end: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return steps of an episode, which is looked for again if its number changed meanwhile."""
        for _ in range(_TRIES):
            number = self.number_of(name)
            try:
                found = self.buffer.load_steps(number, start, end, columns)
            except ClipIndexError:
                if self.number_of(name) == number:
                    _, lengths = self.spans()
                    if not (number < len(lengths) and end <= lengths[number]):
                        raise
                    self.refresh()
                continue
            if self.number_of(name) == number:
                return found
        raise GoneError("the writer overtook this reader time after time")

    def data(self, name: int) -> dict[str, Any]:
        """Return the data of an episode."""
        for _ in range(_TRIES):
            number = self.number_of(name)
            try:
                found = self.buffer.episode_data(number)
            except ClipIndexError:
                self.refresh()
                continue
            if self.number_of(name) == number:
                return found
        raise GoneError("the writer overtook this reader time after time")

    def verify(self, name: int) -> bool:
        """Compare the rows with their checksum."""
        try:
            self.buffer.load_episode(self.number_of(name))
        except ClipIndexError:
            raise GoneError("this episode was evicted") from None
        return True

    @contextlib.contextmanager
    def marks(self, path: str | None) -> Iterator[Marks]:
        """Give the marks of the ring's episodes."""
        if self._marks is None:
            self._marks = Marks(self.buffer, path)
        yield self._marks

    def rows(self, first: int, count: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return rows as they are numbered now."""
        found: dict[str, Array] = self.buffer.get_row_data(np.arange(first, first + count), columns)
        return found

    def ring(self) -> dict[str, Any]:
        """Return where the ring stands."""
        tail, head, commits = self.moment()
        return {
            "tail": tail,
            "head": head,
            "commits": commits,
            "max_steps": self.buffer.max_steps,
            "redraws": self.buffer.num_redraws,
        }


class TransitionSource(_LiveSource):
    """A ring of transitions. What was committed together is no episode: there are none.

    Args:
        buffer: it, or the path of its directory, as for `RingSource`.
    """

    kind = TRANSITIONS
    what = "a ring of transitions"
    buffer: TransitionReplayBuffer

    def __init__(self, buffer: TransitionReplayBuffer | str) -> None:
        if owned := isinstance(buffer, str):
            buffer = TransitionReplayBuffer.open(buffer, device=None, reads="pread")
        super().__init__(buffer, owned)

    def newest(self, column: str, count: int) -> Array:
        """Return the newest rows of a column, as they are stored: of stacks the frames."""
        rows = self.buffer.engine.episodes
        count = min(count, len(self.buffer))
        return rows.rows(np.arange(-count, 0), [column], "view")[column]

    def ring(self) -> dict[str, Any]:
        """Return where the ring stands: the rows that count as transitions."""
        source = self.buffer.engine.source
        window = self.buffer.clip_window()
        with thread.searching, source.lock:
            tail, head, commits = int(window.low), int(source.head), int(source.seq)
            count = int(window.count)
        return {
            "episodes": None,
            "steps": count,
            "tail": tail,
            "head": head,
            "commits": commits,
            "max_steps": self.buffer.capacity,
            "redraws": self.buffer.num_redraws,
        }


class DatasetSource(Source):
    """A dataset.

    Its files are closed when nothing was read for a while: an open HDF5 file keeps writers out.

    Args:
        dataset: it, or its path.
    """

    def __init__(self, dataset: Any) -> None:
        self._path = dataset if isinstance(dataset, str) else None
        self._stamp = None if self._path is None else _stamp_of(self._path)
        self.dataset = load_arrays(dataset) if isinstance(dataset, str) else dataset
        self._used_s = 0.0
        self._resting: threading.Timer | None = None
        self._lengths = np.asarray(self.dataset.lengths, np.int64)
        self._columns: tuple[ColumnSpec, ...] | None = None
        self._lock = threading.RLock()  # not every reader of a format is safe to share
        self._marks: Marks | None = None
        with self._reading():  # it is open
            pass

    def spans(self) -> tuple[Array, Array]:
        """Return numbers and lengths."""
        return np.arange(len(self._lengths)), self._lengths

    def number_of(self, name: int) -> int:
        """Return the id: the number never changes."""
        if not 0 <= name < len(self._lengths):
            raise GoneError(f"there is no episode {name}; there are {len(self._lengths)}")
        return name

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The columns; those of a third party's reader, as the first episode has them."""
        if self._columns is None:
            schema = getattr(self.dataset, "schema", None)
            if not isinstance(schema, Schema):
                filled = np.flatnonzero(self._lengths)
                if not len(filled):
                    return ()
                schema = Schema.of(as_columns(dict(self.dataset.load_episode(int(filled[0]))), "view"))
            self._columns = schema.columns
        return self._columns

    def read(self, name: int, start: int, end: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return steps of an episode."""
        with self._reading():
            found = self.dataset.load_steps(self.number_of(name), start, end, list(columns))
        return {column: np.asarray(values) for column, values in found.items()}

    def data(self, name: int) -> dict[str, Any]:
        """Return the data of an episode."""
        with self._reading():
            found: dict[str, Any] = self.dataset.episode_data(self.number_of(name))
        return found

    @contextlib.contextmanager
    def marks(self, path: str | None) -> Iterator[Marks]:
        """Give the marks of the dataset's episodes. It remembers the checksums that it read."""
        with self._reading():
            if self._marks is None:
                self._marks = Marks(self.dataset, path)
            yield self._marks

    def refresh(self) -> bool:
        """Look whether the dataset was changed."""
        if self._path is not None and _stamp_of(self._path) != self._stamp:
            raise ReplacedError(f"{self._path}: was written since it was opened")
        return False

    def rows(self, first: int, count: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return rows of episodes."""
        ends = np.cumsum(self._lengths)
        start, stop = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, first + count) + 1
        with self._reading():
            return as_dataset(self.dataset, "view: the dataset").stored_rows(int(start), int(stop), columns)

    def close(self) -> None:
        """Close files."""
        with self._lock:
            resting, self._resting = self._resting, None
            if resting is not None:
                resting.cancel()
            self.dataset.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Read alone, and close the files of a dataset of our own some time after: the next read opens them."""
        with self._lock:
            yield
            self._used_s = time.monotonic()
            if self._resting is None and self._path is not None:
                self._rest_in(_REST_S)

    def _rest_in(self, seconds: float) -> None:
        self._resting = threading.Timer(seconds, self._rest)
        self._resting.daemon = True
        self._resting.start()

    def _rest(self) -> None:
        with self._lock:
            if self._resting is not threading.current_thread():  # it was closed meanwhile
                return
            left = self._used_s + _REST_S - time.monotonic()
            if left > 0:
                self._rest_in(left)
                return
            self._resting = None
            self.dataset.close()


def _stamp_of(path: str) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
