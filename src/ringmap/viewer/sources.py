"""What is read from a place: its episodes, each named by a number that it keeps.

    Source      ids, lengths, columns, steps, data         the same for all
      ring      a live reader of `ReplayBuffer`; an episode's id is the position of its first step
      dataset   a reader of its format; an episode's id is its number

Invariants: what `read` returns belongs to the episode that was asked for, or GoneError is raised; files are read by system calls, so that
one that is cut raises an error and does not end the process.
Not here: thinning, pictures (drawing.py), the index (index.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ringmap.buffers.replay import ReplayBuffer
from ringmap.datasets.marks import Marks
from ringmap.errors import ClipIndexError
from ringmap.formats.catalog.load import load_arrays
from ringmap.storage.columns.schema import ColumnSpec, Schema, as_columns
from ringmap.storage.inspect.describe import Facts, facts_of
from ringmap.storage.read.reader import Reader
from ringmap.viewer.limits import GoneError

__all__ = ["DatasetSource", "RingSource", "Source"]

Array = np.ndarray[Any, np.dtype[Any]]

_TRIES = 10


class Source:
    """The episodes of one place. Safe to call from several threads."""

    is_live = False

    def spans(self) -> tuple[Array, Array]:
        """Return the ids of the episodes, rising, and their lengths, at one moment."""
        raise NotImplementedError

    def number_of(self, name: int) -> int:
        """Return the number that an episode has now.

        Raises:
            GoneError: it was evicted, or never was there.
        """
        raise NotImplementedError

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The columns: names, dtypes, shapes of a step."""
        raise NotImplementedError

    def read(self, name: int, start: int, end: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return steps `[start, end)` of an episode."""
        raise NotImplementedError

    def data(self, name: int) -> dict[str, Any]:
        """Return the values that are constant within an episode."""
        raise NotImplementedError

    def verify(self, name: int) -> bool:
        """Compare an episode with its checksum, and raise what is wrong with it; tell whether it has one."""
        return False

    def marks(self, path: str | None) -> AbstractContextManager[Marks]:
        """Give the marks of its episodes, for the body alone.

        Raises:
            InputError: it has no place for them.
        """
        raise NotImplementedError

    def rows(self, first: int, count: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return `count` rows from row `first` of the episodes, end to end, for the index."""
        raise NotImplementedError

    def refresh(self) -> bool:
        """Look for what is new; tell whether there is something."""
        return False

    def moment(self) -> tuple[int, int, int]:
        """Return tail, head and commits as they are known: equal ones are of the same episodes. A read may refresh, too."""
        return 0, 0, 0

    def close(self) -> None:
        """Close files."""


class RingSource(Source):
    """A ring.

    Args:
        buffer: it, or the path of its directory, which is then opened as a live reader, and closed by `close`.
    """

    is_live = True

    def __init__(self, buffer: ReplayBuffer | str) -> None:
        self._owned = isinstance(buffer, str)
        self.buffer = (
            ReplayBuffer.open(buffer, reads="pread") if isinstance(buffer, str) else buffer
        )
        self.lock = threading.RLock()
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

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The columns, none before the first episode."""
        schema = self.buffer.schema
        return () if schema is None else schema.columns

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

    def refresh(self) -> bool:
        """Look for what is new."""
        with self.lock:
            return self.buffer.refresh()

    def moment(self) -> tuple[int, int, int]:
        """Return tail, head and commits as they are known."""
        handle = self.buffer.engine.source
        with handle.memory:
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


class DatasetSource(Source):
    """A dataset.

    Args:
        dataset: it, or its path.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = load_arrays(dataset) if isinstance(dataset, str) else dataset
        self._lengths = np.asarray(self.dataset.lengths, np.int64)
        self._columns: tuple[ColumnSpec, ...] | None = None
        self._lock = threading.Lock()  # not every reader of a format is safe to share
        self._marks: Marks | None = None

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
                schema = Schema.of(
                    as_columns(dict(self.dataset.load_episode(int(filled[0]))), "view")
                )
            self._columns = schema.columns
        return self._columns

    def read(self, name: int, start: int, end: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return steps of an episode."""
        with self._lock:
            found = self.dataset.load_steps(self.number_of(name), start, end, list(columns))
        return {column: np.asarray(values) for column, values in found.items()}

    def data(self, name: int) -> dict[str, Any]:
        """Return the data of an episode."""
        with self._lock:
            found: dict[str, Any] = self.dataset.episode_data(self.number_of(name))
        return found

    @contextlib.contextmanager
    def marks(self, path: str | None) -> Iterator[Marks]:
        """Give the marks of the dataset's episodes. It remembers the checksums that it read."""
        with self._lock:
            if self._marks is None:
                self._marks = Marks(self.dataset, path)
            yield self._marks

    def rows(self, first: int, count: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return rows, episode by episode."""
        ends = np.cumsum(self._lengths)
        parts: dict[str, list[Array]] = {name: [] for name in columns}
        at, stop = first, first + count
        while at < stop:
            episode = int(np.searchsorted(ends, at, side="right"))
            start = at - int(ends[episode] - self._lengths[episode])
            until = min(stop - at + start, int(self._lengths[episode]))
            for name, values in self.read(episode, start, until, columns).items():
                parts[name].append(values)
            at += until - start
        return {name: np.concatenate(values) for name, values in parts.items() if values}

    def close(self) -> None:
        """Close files."""
        self.dataset.close()
