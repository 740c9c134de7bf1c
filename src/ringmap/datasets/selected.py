"""What a stored dataset reads, and some episodes of it, numbered from 0.

    episodes   [5, 2]
    lengths    [9, 4]     row 10 here -> episode 1, step 1 -> step 1 of episode 2 there

Invariants: nothing but numbers is kept beside the whole; a row of an episode that was left out is never read.
Not here: which episodes are wanted (choose.py), views of buffers (buffers/view.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ringmap.storage.columns.schema import Schema
from ringmap.storage.read.handle import Handle

__all__ = ["ColumnSource", "SelectedSource"]

Array = np.ndarray[Any, np.dtype[Any]]


class ColumnSource(Protocol):
    """Columns of rows at a path: the seam between a format and `StoredDataset`.

    Obligations: `windows` returns fresh, writable arrays in native byte order, and may be called
    from any thread; the object pickles without data or handles and opens again by itself in
    whatever process it wakes up in (fork and spawn), where it refuses a path that now holds
    something else. It may have `reward_at`, "next" or "same": where rewards stand; `fps`, the steps per second;
    `first_steps`, how many steps of each episode were evicted; and
    `unsupported`, name -> what it is ("of dtype ..., which is not read"): columns that are there, sound, and not in
    `schema`.
    """

    path: str

    @property
    def schema(self) -> Schema:
        """Columns in order: names, per-step shapes, dtypes."""
        ...

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int32."""
        ...

    @property
    def offsets(self) -> Array:
        """Row of each episode's first step, int64."""
        ...

    @property
    def episode_columns(self) -> list[str]:
        """Names of the values that are constant within an episode, first seen first."""
        ...

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows `s, s + stride, ... < s + length` of these columns for each s of `starts`.

        Shapes: column -> (len(starts), ceil(length / stride), ...), images in stored order.
        """
        ...

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} when it has none."""
        ...

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        ...


class SelectedSource:
    """Some episodes of a `ColumnSource`, as one.

    Args:
        source: the whole.
        lengths, offsets: of its episodes.
        episodes: their numbers there.
    """

    def __init__(self, source: ColumnSource, lengths: Array, offsets: Array, episodes: Array) -> None:
        self._source, self._episodes = source, episodes
        self.path = source.path
        self.lengths: Array = lengths[episodes]
        self.offsets: Array = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.lengths.flags.writeable = self.offsets.flags.writeable = False
        self._filled = np.flatnonzero(self.lengths)
        self._moved: Array = (offsets[episodes] - self.offsets)[self._filled]

    @property
    def first_steps(self) -> Array | None:
        """Those of these episodes, if the whole knows them without their data."""
        known: Array | None = getattr(self._source, "first_steps", None)
        return None if known is None else known[self._episodes]

    @property
    def schema(self) -> Schema:
        """Those of the whole."""
        return self._source.schema

    @property
    def episode_columns(self) -> list[str]:
        """Those of the whole."""
        return self._source.episode_columns

    def rows_of(self, rows: Array) -> Array:
        """Return where rows stand in the whole."""
        at = self.offsets[self._filled].searchsorted(rows, side="right") - 1
        found: Array = rows + self._moved.take(at)
        return found

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows, as `ColumnSource.windows` does; a window may run over episodes."""
        starts = np.asarray(starts, np.int64)
        if not length or not len(starts):  # of no rows
            return self._source.windows(columns, np.zeros_like(starts), length, stride)
        if self._are_inside(starts, length):
            return self._source.windows(columns, self.rows_of(starts), length, stride)
        rows = self.rows_of(starts[:, None] + np.arange(0, length, stride))
        unique, back = np.unique(rows, return_inverse=True)
        cuts = [0, *(np.flatnonzero(np.diff(unique) != 1) + 1).tolist(), len(unique)]
        parts = [self._source.windows(columns, unique[a : a + 1], b - a) for a, b in itertools.pairwise(cuts)]
        whole = {name: np.concatenate([part[name][0] for part in parts]) for name in columns}
        return {name: values.take(back.reshape(rows.shape), 0) for name, values in whole.items()}

    def _are_inside(self, starts: Array, length: int) -> bool:
        """Tell whether each window lies in one episode."""
        begins = self.offsets[self._filled]
        at = begins.searchsorted(starts, side="right")
        return bool((at == begins.searchsorted(starts + (length - 1), side="right")).all())

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return the values that are constant within one episode."""
        return self._source.episode_data(int(self._episodes[episode]))

    def ring(self) -> tuple[Handle, Array] | None:
        """Return the ring that the episodes are in, and their positions; None if they are in none."""
        ask = getattr(self._source, "ring", None)
        found = None if ask is None else ask()
        return None if found is None else (found[0], found[1][self._episodes])

    def close(self) -> None:
        """Close the files of the whole."""
        self._source.close()
