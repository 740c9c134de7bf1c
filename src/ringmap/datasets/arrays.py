"""Arrays in memory as a dataset: one run of rows, cut into episodes where their ends say so.

    observations  o0 o1 o2 o3 o4 o5        terminals  0 0 1 0 0 0        timeouts  0 0 0 0 1 0
    episodes      [o0 o1 o2] [o3 o4] [o5]  the last one goes up to the end of the arrays

Invariants: an episode never runs over an end; where ends are not known, nothing is guessed.
Not here: files (formats/).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.datasets.stored import StoredDataset
from ringmap.errors import InputError
from ringmap.storage.columns.schema import ColumnSpec, Schema, as_columns

__all__ = ["NAMES", "ArraySource", "cut_into_episodes", "from_arrays"]

Array = np.ndarray[Any, np.dtype[Any]]

NAMES = {
    "observations": "observation",
    "next_observations": "next_observation",
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "timeouts": "truncated",
    "dones": "done",
}
"""Name of an array, as offline RL has them -> name of the column, as everywhere else here."""


class ArraySource:
    """Columns in memory, as `StoredDataset` reads them. A pickle of it holds the arrays.

    Args:
        path: where they come from, for messages.
        columns: name -> array of all steps.
        lengths: steps of each episode; they follow each other.
    """

    reward_at: str | None = "same"
    """A row is a step: an observation, its action, and the reward of that."""

    def __init__(self, path: str, columns: Mapping[str, Array], lengths: Array) -> None:
        self.path = path
        self._columns = {n: v.astype(v.dtype.newbyteorder("="), copy=False) for n, v in columns.items()}
        self.schema = Schema(tuple(ColumnSpec(n, v.shape[1:], v.dtype) for n, v in self._columns.items()))
        self.lengths = np.asarray(lengths, np.int32)
        self.offsets = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.episode_columns: list[str] = []

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows, as `ColumnSource.windows` does."""
        rows = np.asarray(starts, np.int64)[:, None] + np.arange(0, length, stride)
        return {name: self._columns[name][rows] for name in columns}

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return {}: arrays have no values of episodes."""
        return {}

    def close(self) -> None:
        """Do nothing: no file is open."""


def cut_into_episodes(
    where: str, terminated: Array, truncated: Array | None, max_episode_steps: int | None
) -> tuple[Array, Array]:
    """Return the lengths of the episodes, and which steps are cut short without a terminal state, bool `(N,)`.

    Args:
        where: what is read, for messages.
        terminated: whether the episode ended by itself, `(N,)`.
        truncated: whether it was cut short at a step; None: not known.
        max_episode_steps: the time limit, at which an episode is cut short in any case; None: only `truncated` says it.

    Raises:
        InputError: neither says where episodes were cut short.
    """
    count = len(terminated)
    if truncated is None and max_episode_steps is None:
        raise InputError(
            f"{where}: it is not known where its episodes end: there are terminals, but no timeouts, and an episode "
            "that ran into its "
            "time limit goes on into the next one; pass max_episode_steps=, the time limit of the environment (1000 in "
            "MuJoCo's)"
        )
    cut = np.zeros(count, bool) if truncated is None else truncated & ~terminated
    if max_episode_steps is not None:
        limit = positive(where, "max_episode_steps", max_episode_steps)
        steps = np.arange(count)
        ends = terminated | cut
        begins = np.concatenate([[True], ends[:-1]]) if count else ends
        since = steps - np.maximum.accumulate(np.where(begins, steps, 0))
        cut |= ((since + 1) % limit == 0) & ~terminated
    ends = terminated | cut
    if count:
        ends[-1] = True
    return np.diff(np.flatnonzero(ends), prepend=-1), cut


def from_arrays(
    arrays: Mapping[str, Any],
    *,
    max_episode_steps: int | None = None,
    output: str = "numpy",
    **options: Any,
) -> StoredDataset:
    """Return a dataset of arrays in memory, each with all steps of all episodes, one episode after the other.

    Args:
        arrays: name -> array (N, ...). `terminals` (or `terminated`) and `timeouts` (or `truncated`), or `dones` (or
            `done`), say where episodes end. Names of offline RL become those that columns have here: `observations,
            actions, rewards, terminals, timeouts, dones, next_observations` are read as `observation, action, reward,
            terminated, truncated, done, next_observation`; any other name stays. Values stay as they are; `truncated`
            is added where it is not given.
        max_episode_steps: the time limit of the environment, where there are no timeouts.
        output: "numpy" or "torch".
        options: of any dataset: `num_steps`, `frameskip`, `transform`, `layout`, `keys_to_load`.

    Raises:
        InputError: the arrays are not of one length, it is not known where their episodes end, or two have one name.

    Cost: the arrays are not copied; an item is.

    Example:
        >>> import numpy as np
        >>> from ringmap.data import ReplayBuffer, from_arrays
        >>> dataset = from_arrays({
        ...     "observations": np.arange(6.0), "actions": np.zeros(6), "rewards": np.ones(6),
        ...     "terminals": [0, 0, 1, 0, 0, 0], "timeouts": [0, 0, 0, 0, 1, 0],
        ... })
        >>> dataset.lengths.tolist(), dataset.load_episode(1)["observation"].tolist()
        ([3, 2, 1], [3.0, 4.0])
        >>> buf = ReplayBuffer(max_steps=100)
        >>> buf.extend_from(dataset)
        >>> buf.num_episodes
        3
    """
    where = "from_arrays"
    columns: dict[str, Array] = {}
    for name, values in as_columns(arrays, where).items():
        own = NAMES.get(name, name)
        if own in columns:
            raise InputError(f"{where}: two arrays are the column {own!r}; leave one out")
        columns[own] = values
    if not columns:
        raise InputError(f"{where}: no arrays; expected name -> array (N, ...)")
    terminated, truncated, done = (_flags(columns, n) for n in ("terminated", "truncated", "done"))
    if terminated is None and truncated is None and done is None:
        raise InputError(
            f"{where}: no array says where episodes end; give 'terminals' and 'timeouts', or 'dones'; there are "
            f"{list(arrays)}"
        )
    ended = np.zeros(len(next(iter(columns.values()))), bool) if terminated is None else terminated
    cut_short = truncated if done is None else done | (False if truncated is None else truncated)
    lengths, cut = cut_into_episodes(where, ended, cut_short, max_episode_steps)
    if terminated is not None:
        columns.setdefault("truncated", cut)
    return StoredDataset(ArraySource("arrays", columns, lengths), output=output, **options)


def _flags(columns: Mapping[str, Array], name: str) -> Array | None:
    """Return a column of flags as bool `(N,)`, None if there is none."""
    column = columns.get(name)
    if column is None:
        return None
    flags = column.reshape(len(column), math.prod(column.shape[1:]))
    if flags.shape[1] != 1 or not np.isin(flags, (0, 1)).all():
        raise InputError(
            f"from_arrays: column {name!r} is {column.dtype} {column.shape}, expected one flag a step, 0 or 1"
        )
    return flags[:, 0].astype(bool)
