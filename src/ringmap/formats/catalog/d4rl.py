"""A file of the D4RL collection as a dataset.

    observations (T, ...)  actions  rewards  terminals  timeouts  [next_observations]
    one run of rows; an episode ends where terminals or timeouts says so, and at the end of the file

Rows come out in memory, under the names that Minari's datasets have here: observation, next_observation, action,
reward, terminated, truncated.
Invariants: a next observation is of the same episode.
Not here: downloads, the environments.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.datasets.base import Dataset, Transform
from ringmap.errors import ClipIndexError, CorruptError, NotFoundError

__all__ = ["D4RLDataset"]

Array = np.ndarray[Any, np.dtype[Any]]

_NAMES = ("observations", "actions", "rewards", "terminals")


class D4RLDataset(Dataset):
    """Episodes of a D4RL file, as NumPy arrays held in memory.

    Without `next_observations` in the file, the next observation is the following row's. The last row of an
    episode has none: it is left out, but kept if the episode terminated there, for then nobody looks beyond it
    (its `next_observation` is its own observation).

    Args:
        path: the HDF5 file.
        num_steps: observations in a clip.
        frameskip: stride between the observations of a clip.
        transform: maps a dict of columns to the one to return.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it lacks a column, or columns differ in length.

    Cost: opening reads the file.

    Source: Fu et al., "D4RL: Datasets for Deep Data-Driven Reinforcement Learning", 2020.
    """

    reward_at = "same"

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_steps: int = 1,
        frameskip: int = 1,
        transform: Transform | None = None,
    ) -> None:
        import h5py

        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            raise NotFoundError(f"No D4RL file at {self.path}")
        try:
            with h5py.File(self.path, "r") as file:
                wanted = [n for n in (*_NAMES, "timeouts", "next_observations") if n in file]
                raw = {name: np.asarray(_column(file, name)[()]) for name in wanted}
        except OSError as error:
            raise CorruptError(f"{self.path}: not an HDF5 file that can be read: {error}") from None
        missing = [name for name in _NAMES if name not in raw]
        lengths = {name: len(values) if values.ndim else -1 for name, values in raw.items()}
        if missing or len(set(lengths.values())) != 1:
            raise CorruptError(
                f"{self.path}: expected columns {list(_NAMES)} of one length, got {lengths}"
                + (f", without {missing}" if missing else "")
            )
        self._columns, sizes = _episodes_of(raw)
        super().__init__(sizes, np.cumsum(sizes) - sizes, frameskip, num_steps, transform)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return list(self._columns)

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        length = int(self.lengths[self._episode_number(ep)])
        if not 0 <= start <= end <= length:
            raise ClipIndexError(
                f"{self.path}: steps [{start}, {end}) are out of range for episode {ep} of {length} steps"
            )
        first = int(self.offsets[ep])
        steps = {n: v[first + start : first + end].copy() for n, v in self._columns.items()}
        return steps if self.transform is None else self.transform(steps)

    def get_row_data(self, row_idx: int | Sequence[int] | Array) -> dict[str, Any]:
        """Return steps by row, all columns. O(rows), one gather per column.

        Raises:
            ClipIndexError: a row lies outside what is stored.
        """
        rows = self._row_numbers(row_idx)
        found = {name: values[rows] for name, values in self._columns.items()}
        return {name: v[0] for name, v in found.items()} if np.ndim(row_idx) == 0 else found


def _episodes_of(raw: dict[str, Array]) -> tuple[dict[str, Array], Array]:
    """Return the columns of the rows that are kept, and the length of each episode."""
    count = len(raw["observations"])
    terminated = raw["terminals"].astype(bool).reshape(count)
    truncated = raw.get("timeouts", np.zeros(count)).astype(bool).reshape(count) & ~terminated
    ends = terminated | truncated
    if count:
        ends[-1] = True
    kept = np.ones(count, bool)
    if "next_observations" in raw:
        following = raw["next_observations"]
    else:
        following = raw["observations"][np.minimum(np.arange(count) + 1, count - 1)]
        following[ends] = raw["observations"][ends]
        kept = ~ends | terminated
        # The step before the one left out is now its episode's last, and was cut short.
        before = np.flatnonzero(ends & ~terminated) - 1
        before = before[before >= 0]
        truncated[before[~ends[before]]] = True
    episode = np.cumsum(ends) - ends
    sizes = np.bincount(episode[kept], minlength=int(ends.sum()))
    columns = {
        "observation": raw["observations"], "next_observation": following, "action": raw["actions"],
        "reward": raw["rewards"].reshape(count), "terminated": terminated, "truncated": truncated,
    }  # fmt: skip
    return {name: values[kept] for name, values in columns.items()}, sizes[sizes > 0]


def _column(file: Any, name: str) -> Any:
    """Return a dataset of the file itself: what a link, or storage elsewhere, leads to is not read."""
    import h5py

    from ringmap.formats.common.untrusted import refuse_sparse

    found = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
    if not isinstance(found, h5py.Dataset):
        raise CorruptError(
            f"{file.filename}: {name!r} is no dataset of this file; links are not followed"
        )
    refuse_sparse(file.filename, name, found)
    return found
