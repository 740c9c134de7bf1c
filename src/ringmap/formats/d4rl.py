"""The D4RL format: a file of that collection, one run of rows.

    observations (T, ...)  actions  rewards  terminals  [timeouts]  [next_observations]  [infos/...]  [metadata/...]
    an episode ends where terminals or timeouts says so, or at the time limit, and at the end of the file

Rows come out in memory, under the names that Minari's datasets have here: observation, next_observation, action,
reward, terminated, truncated.
Invariants: a next observation is of the same episode.
Not here: downloads, the environments; where episodes end (`ringmap.datasets.arrays`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.datasets.arrays import NAMES, ArraySource, cut_into_episodes
from ringmap.datasets.base import Transform
from ringmap.datasets.stored import StoredDataset
from ringmap.errors import CorruptError, NotFoundError, UnsupportedError
from ringmap.formats.builtin import D4RL
from ringmap.formats.common.safe_hdf5 import datasets

__all__ = ["D4RLDataset"]

Array = np.ndarray[Any, np.dtype[Any]]


class D4RLDataset(StoredDataset):
    """Episodes of a D4RL file, held in memory.

    Without `next_observations` in the file, the next observation is the following row's. The last row of an
    episode has none: it is left out, but kept if the episode terminated there, for then nobody looks beyond it
    (its `next_observation` is its own observation).

    Args:
        path: the HDF5 file.
        num_steps: observations in a clip.
        frameskip: stride between the observations of a clip.
        transform: maps a dict of columns to the one to return.
        max_episode_steps: the time limit of the environment, which cuts episodes too. A file of before there were
            timeouts needs it.
        output: "numpy" or "torch".
        keys_to_load: the columns to read, `infos/...` among them; None: observation, next_observation, action, reward,
            terminated, truncated, and a warning names what else there is.
        options: of any dataset: `layout`, `keys_to_cache`, `keys_to_merge`.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file does not say where episodes end, and `max_episode_steps` is not given.
        CorruptError: it lacks a column, or columns differ in length.

    Cost: opening reads the columns.

    Source: Fu et al., "D4RL: Datasets for Deep Data-Driven Reinforcement Learning", 2020.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_steps: int = 1,
        frameskip: int = 1,
        transform: Transform | None = None,
        *,
        max_episode_steps: int | None = None,
        output: str = "numpy",
        keys_to_load: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        import h5py

        path = os.fspath(path)
        if not os.path.isfile(path):
            raise NotFoundError(f"No D4RL file at {path}")
        wanted = set(keys_to_load or ())
        try:
            with h5py.File(path, "r") as file:
                raw, others = _read(file, wanted)
        except OSError as error:
            raise CorruptError(f"{path}: not an HDF5 file that can be read: {error}") from None
        if others and keys_to_load is None:
            shown = ", ".join(map(repr, others[:10])) + (", ..." if len(others) > 10 else "")
            warnings.warn(
                f"{path}: left out: {shown}; keys_to_load= reads what has a row for each step",
                stacklevel=2,
            )
        for name in wanted & set(raw):
            if raw[name].shape[:1] != raw.get("observations", raw[name]).shape[:1]:
                raise UnsupportedError(
                    f"{path}: {name!r} is {raw[name].dtype} {raw[name].shape}, which has no row for each step; leave "
                    "it out of keys_to_load="
                )
        missing = [name for name in D4RL.columns if name not in raw]
        lengths = {name: len(values) if values.ndim else -1 for name, values in raw.items()}
        if missing or len(set(lengths.values())) != 1:
            raise CorruptError(
                f"{path}: expected columns {list(D4RL.columns)} of one length, got {lengths}"
                + (f", without {missing}" if missing else "")
            )
        columns, sizes = _episodes_of(raw, path, max_episode_steps)
        super().__init__(
            ArraySource(path, columns, sizes),
            num_steps=num_steps,
            frameskip=frameskip,
            transform=transform,
            output=output,
            keys_to_load=keys_to_load,
            **options,
        )


def _read(file: Any, wanted: set[str]) -> tuple[dict[str, Array], list[str]]:
    """Return the arrays that are read, and the paths of the others."""
    usual = (*D4RL.columns, "timeouts", "next_observations")
    raw: dict[str, Array] = {}
    others: list[str] = []
    for name, dataset in datasets(file):
        if name in usual or name in wanted:
            raw[name] = np.asarray(dataset[()])
        else:
            others.append(name)
    return raw, others


def _episodes_of(raw: dict[str, Array], path: str, max_episode_steps: int | None) -> tuple[dict[str, Array], Array]:
    """Return the columns of the rows that are kept, and the length of each episode."""
    count = len(raw["observations"])
    terminated = raw.pop("terminals").astype(bool).reshape(count)
    timeouts = raw.pop("timeouts", None)
    timeouts = None if timeouts is None else timeouts.astype(bool).reshape(count)
    sizes, truncated = cut_into_episodes(path, terminated, timeouts, max_episode_steps)
    ends = np.zeros(count, bool)
    ends[np.cumsum(sizes) - 1] = True
    stay = np.ones(count, bool)
    if "next_observations" not in raw:
        following = raw["observations"][np.minimum(np.arange(count) + 1, count - 1)]
        following[ends] = raw["observations"][ends]
        stay = ~ends | terminated
        # The step before the one left out is now its episode's last, and was cut short.
        before = np.flatnonzero(ends & ~terminated) - 1
        before = before[before >= 0]
        truncated[before[~ends[before]]] = True
        raw["next_observations"] = following
    episode = np.cumsum(ends) - ends
    sizes = np.bincount(episode[stay], minlength=len(sizes))
    first = ("observations", "next_observations", "actions")
    columns = {
        **{NAMES[name]: raw.pop(name) for name in first},
        "reward": raw.pop("rewards").reshape(count),
        "terminated": terminated,
        "truncated": truncated,
        **raw,
    }
    return {name: values[stay] for name, values in columns.items()}, sizes[sizes > 0]
