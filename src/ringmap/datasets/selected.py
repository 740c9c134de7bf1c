"""Some episodes of a dataset, numbered from 0: as a dataset, and as the source of one.

    episodes   [5, 2]
    lengths    [9, 4]     row 10 here -> episode 1, step 1 -> step 1 of episode 2 there

Invariants: nothing but numbers is kept beside the whole; a row of an episode that was left out is never read.
Not here: which episodes are wanted (choose.py), views of buffers (buffers/view.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.datasets.base import Dataset, stored_steps
from ringmap.storage.columns.schema import Schema
from ringmap.storage.read.handle import Handle

if TYPE_CHECKING:
    from ringmap.datasets.stored import ColumnSource

__all__ = ["SelectedDataset", "SelectedSource"]

Array = np.ndarray[Any, np.dtype[Any]]


class SelectedDataset(Dataset):
    """Some episodes of any dataset.

    Args:
        dataset: the whole; a dataset of ours, or an object with the same methods.
        episodes: their numbers there.
    """

    def __init__(self, dataset: Any, episodes: Array) -> None:
        lengths = np.asarray(dataset.lengths, np.int32)[episodes]
        offsets = np.cumsum(lengths, dtype=np.int64) - lengths
        super().__init__(lengths, offsets, dataset.frameskip, dataset.num_steps)
        self.dataset, self._episodes = dataset, episodes
        self._source_episodes = episodes
        if isinstance(dataset, Dataset):
            self._cut, self.fps, self.reward_at = dataset._cut, dataset.fps, dataset.reward_at
            self._source_episodes, self._arcs = dataset.source_episodes[episodes], dataset.arcs()

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return list(self.dataset.column_names)

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        found: dict[str, Any] = self.dataset._load_slice(self._there(ep), start, end)
        return found

    def _load_steps(self, episodes: Array, steps: Array, names: Sequence[str]) -> list[Any]:
        found: list[Any] = self.dataset._load_steps(self._episodes[episodes], steps, names)
        return found

    def origins(self) -> tuple[Array, Array]:
        """Return those of the whole dataset."""
        if not isinstance(self.dataset, Dataset):
            return super().origins()
        lineages, ordinals = self.dataset.origins()
        return lineages[self._episodes], ordinals[self._episodes]

    def are_stored(self, episodes: Array, steps: Array) -> Array | None:
        """Tell which steps are still stored in the whole dataset."""
        return stored_steps(self.dataset, self._episodes[episodes], steps)

    def _rows_at(
        self, names: Sequence[str], episodes: Array, steps: Array, run: range | None
    ) -> dict[str, Array]:
        return self._steps_of(self.dataset, names, self._episodes[episodes], steps, run)

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        return self.dataset._shown(columns) if isinstance(self.dataset, Dataset) else columns

    def _rows_are_fixed(self) -> bool:
        return isinstance(self.dataset, Dataset) and self.dataset._rows_are_fixed()

    def _stored_steps(
        self, episode: int, start: int, end: int, names: Sequence[str] | None = None
    ) -> dict[str, Array]:
        if not isinstance(self.dataset, Dataset):
            return super()._stored_steps(episode, start, end, names)
        return self.dataset._stored_steps(self._there(episode), start, end, names)

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the values that are constant within an episode, first seen first."""
        return list(self.dataset.episode_column_names)

    def get_episode_data(
        self, idx: int | Sequence[int] | Array | None = None
    ) -> dict[str, list[Any]]:
        """Return the values that are constant within an episode, as the whole dataset does.

        Raises:
            ClipIndexError: there is no such episode.
        """
        numbers = self._episodes[self._episode_numbers(idx)]
        found: dict[str, list[Any]] = self.dataset.get_episode_data(numbers)
        return found

    def close(self) -> None:
        """Close the files of the whole dataset."""
        self.dataset.close()

    def _there(self, episode: int) -> int:
        return int(self._episodes[self._episode_number(episode)])


class SelectedSource:
    """Some episodes of a `ColumnSource`, as one.

    Args:
        source: the whole.
        lengths, offsets: of its episodes.
        episodes: their numbers there.
    """

    def __init__(
        self, source: ColumnSource, lengths: Array, offsets: Array, episodes: Array
    ) -> None:
        self._source, self._episodes = source, episodes
        self.path = source.path
        self.lengths: Array = lengths[episodes]
        self.offsets: Array = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.lengths.flags.writeable = self.offsets.flags.writeable = False
        self._filled = np.flatnonzero(self.lengths)
        self._moved: Array = (offsets[episodes] - self.offsets)[self._filled]

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

    def windows(
        self, columns: Sequence[str], starts: Array, length: int, stride: int = 1
    ) -> dict[str, Array]:
        """Read rows, as `ColumnSource.windows` does; a window may run over episodes."""
        starts = np.asarray(starts, np.int64)
        if not length or not len(starts):  # of no rows
            return self._source.windows(columns, np.zeros_like(starts), length, stride)
        if self._are_inside(starts, length):
            return self._source.windows(columns, self.rows_of(starts), length, stride)
        rows = self.rows_of(starts[:, None] + np.arange(0, length, stride))
        unique, back = np.unique(rows, return_inverse=True)
        cuts = [0, *(np.flatnonzero(np.diff(unique) != 1) + 1).tolist(), len(unique)]
        parts = [
            self._source.windows(columns, unique[a : a + 1], b - a)
            for a, b in itertools.pairwise(cuts)
        ]
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
