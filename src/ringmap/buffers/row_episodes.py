"""Rows that a buffer stores, cut into episodes where they end: what `StoredDataset` reads.

    rows          r0 r1 r2 | r3 | r4 ..        | a flag says so, or the next row does not begin with what a row led to
    columns       those of the rows: obs, action, reward, next_obs, ...; an action's reward is in its row

Rows of several environments that were added in turn do not go on from each other: where rows have next observations,
each is an episode of its own then, never one of rows that do not belong together.

Invariants: each row that counts is in one episode, once, in the order in which they came; an episode whose rows were
evicted since is an error, never other rows.
Not here: the ring (steps.py), transitions (transitions/episodes.py).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ringmap.buffers.steps import StepRing
from ringmap.errors import InputError, LappedError, ReplacedError, UnknownColumnError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.paths import local_path

__all__ = ["RowEpisodes", "RowSource"]

Array = np.ndarray[Any, np.dtype[Any]]

_FLAGS = ("terminated", "truncated", "done", "dones")
_NEXT = ("next_", "next/")


class RowEpisodes(ABC):
    """The rows of a buffer as episodes, as they are when it is made.

    `given`: the buffer, or its directory, which `open_at` opens; `name`: what a buffer in RAM is.
    """

    schema: Schema
    lengths: Array

    def __init__(self, given: Any, open_at: Callable[[str], Any], name: str) -> None:
        is_path = isinstance(given, str | os.PathLike)
        self._path = local_path(given) if is_path else ""
        self._open, self._open_at, self._uuid = None if is_path else given, open_at, b""
        self.episode_columns = list[str]()
        self.path = str(self._buffer.path or f"{name} in RAM")
        self._buffer.engine.commit_pending("episode_dataset")
        self._buffer.engine.refresh()

    @property
    def _buffer(self) -> Any:
        """The buffer; a directory is opened again after `close`."""
        if self._open is None:
            opened = self._open_at(self._path)
            uuid = opened.engine.owned.manifest.uuid
            if self._uuid not in (b"", uuid):
                opened.close()
                raise ReplacedError(f"{self._path}: holds another buffer than when it was opened; open it again")
            self._open, self._uuid = opened, uuid
        return self._open

    @cached_property
    def offsets(self) -> Array:
        """Row of each episode's first step, int64."""
        found: Array = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return found

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows `s, s + stride, ... < s + length` of these columns for each s of `starts`, `(starts, rows, ...)`.

        Raises:
            ReplacedError: rows were evicted since, or the path now holds something else.
        """
        known = self.schema.names
        for name in columns:
            if name not in known:
                raise UnknownColumnError(f"{self.path}: no column {name!r}; there are {known}")
        rows = np.asarray(starts, np.int64)[:, None] + np.arange(0, length, stride)
        try:
            found = self._take(columns, rows.reshape(-1))
        except LappedError:
            raise self._evicted() from None
        return {name: values.reshape(*rows.shape, *values.shape[1:]) for name, values in found.items()}

    @abstractmethod
    def _take(self, columns: Sequence[str], rows: Array) -> dict[str, Array]:
        """Return columns of these rows, `(rows, ...)`."""

    def _evicted(self) -> ReplacedError:
        return ReplacedError(
            f"{self.path}: the buffer's writer evicted rows since its episodes were looked up; look them up again"
        )

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} if it has none."""
        return {}

    def close(self) -> None:
        """Close the directory, if it was opened here; the next read opens it again."""
        if self._path and self._open is not None:
            self._open.close()
            self._open = None


class RowSource(RowEpisodes):
    """The rows of a ring, or of its directory, if a column tells where an episode ends.

    Cost: reads the flags of all rows, and their observations if they have next ones.
    """

    reward_at = "same"

    def __init__(self, ring: StepRing | str | os.PathLike[str]) -> None:
        super().__init__(ring, StepRing.open, "a ring of rows")
        self.schema = self._buffer.schema or Schema(())
        self._positions = self._buffer.ids()
        ends = self._ends()
        self.lengths = np.diff(np.concatenate([[0], np.flatnonzero(ends) + 1])).astype(np.int32)

    def _ends(self) -> Array:
        """Tell after which rows an episode ends."""
        names, at = set(self.schema.names), self._positions
        ends = np.zeros(len(at), np.bool_)
        if not len(at):
            return ends
        later = [f"next/{flag}" for flag in _FLAGS if f"next/{flag}" in names]
        flags = later or [flag for flag in _FLAGS if flag in names]
        pairs = [
            (name, name.removeprefix(prefix))
            for prefix in _NEXT
            for name in self.schema.names
            if name.startswith(prefix)
            and name.removeprefix(prefix) in names
            and name.removeprefix(prefix) not in (*_FLAGS, "reward")
        ]
        if not flags and not pairs:
            raise InputError(
                f"{self.path}: no column of its rows, {self.schema.names}, tells where an episode ends (terminated, "
                "truncated, done, or "
                "next observations); read them as rows: for batch in OfflineToOnlineReplayBuffer.open(path, "
                "offline).rows()"
            )
        for flag in flags:
            ends |= self._buffer.column(flag, at).reshape(len(at), -1).any(1)
        for name, first in pairs:
            led_to, begun = self._buffer.column(name, at[:-1]), self._buffer.column(first, at[1:])
            if led_to.dtype == begun.dtype and led_to.shape == begun.shape:
                same = [a.tobytes() == b.tobytes() for a, b in zip(led_to, begun, strict=True)]
                ends[:-1] |= ~np.array(same, np.bool_)
        ends[:-1] |= np.diff(at) != 1
        ends[-1] = True
        return ends

    def _take(self, columns: Sequence[str], rows: Array) -> dict[str, Array]:
        return {name: self._buffer.column(name, self._positions[rows]) for name in columns}
