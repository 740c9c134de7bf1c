"""The writing side of a robomimic file.

Not here: the log (common/writer.py), steps out of rows (common/transitions.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts, check_reward_at
from ringmap.errors import InputError
from ringmap.formats.common.hdf5_trial import (
    refused_attribute,
    refused_names,
    refused_rows,
    storable,
)
from ringmap.formats.common.log import Record
from ringmap.formats.common.refusals import Refused
from ringmap.formats.common.transitions import (
    OUTCOMES,
    Steps,
    is_loose_flag,
    next_of,
    observations_of,
    refused_flag,
)
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.robomimic import LENGTH, SPLITS, THEIRS, Robomimic

__all__ = ["RobomimicWriter"]

Array = np.ndarray[Any, np.dtype[Any]]

_TAKEN = {*THEIRS.values(), "obs", "next_obs"}


class RobomimicWriter(EpisodeWriter):
    """Writes episodes to a file of robomimic. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. An episode's data
    are attributes of its demo; its data `mask`, a text or several, names the splits that it is in.

    Args:
        observation: the column that is the observation, with its parts (obs/camera, ...), or a list of columns; None:
            "obs" or "observation". One without parts has the key "flat".
        action: the column of actions, an array.
        reward_at: where rewards and flags stand: "next", with the observation that came with them, or "same", with the
            action; None: as the source of the episodes says, "next" if nothing is said. Ignored where there are next
            observations.
        final_row: whether the last row is an observation alone, as environments are recorded here; None: if rewards
            stand at the "next" row. Ignored where there are next observations. False writes all rows as steps, without
            next observations.
        env_args: of the environment, as robomimic's tools want them.

    Raises:
        InputError: an option is wrong.

    Cost: the file is written at the end of the block, out of a log that takes as much room.
    """

    format = Robomimic

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "error",
        observation: str | list[str] | None = None,
        action: str = "action",
        reward_at: str | None = None,
        final_row: bool | None = None,
        env_args: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        self._observation, self._action = observation, action
        self._rewards = check_reward_at("RobomimicWriter", reward_at)
        self._final_row = final_row
        self._env_args = json.dumps(dict(env_args or {}))

    # -- episodes ----------------------------------------------------------------------------

    def refuses(self, name: str, rows: Array) -> str | None:
        """Return why a column can't be held."""
        return refused_flag(name, rows) or refused_rows(rows)

    def refuses_data(self, name: str, value: Any) -> str | None:
        """Return why a datum of an episode can't be held."""
        return (
            "robomimic has the number of steps there; rename it"
            if name == LENGTH
            else _refused_splits(value)
            if name == SPLITS
            else refused_attribute(name, value)
        )

    def looks_at(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Return whether a column is of text, which may be such that HDF5 does not hold it, or a flag by its name
        alone."""
        return dtype.kind == "U" or is_loose_flag(name, dtype)

    def layout(
        self, columns: dict[str, Array], data: dict[str, Any], refused: Refused, where: str
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the steps of an episode, as they are read back."""
        observations = self._observations(columns, where)
        if self._action not in columns:
            raise InputError(f"{where}: no column {self._action!r} of actions; there are {list(columns)}")
        steps = Steps(columns, list(observations), self.reward_at(self._rewards), self._final_row, where)
        stored, taken = {}, {self._action}
        for old, new in observations.items():
            stored[new] = steps.now(old)
            after = steps.after(old)
            if after is not None:
                stored[next_of(new)] = after
                taken.add(next_of(old))
            taken.add(old)
        stored["action"] = steps.now(self._action)
        for name in OUTCOMES:
            if name in columns:
                stored[name] = steps.outcome(name)
                taken.add(name)
        if "done" not in stored:
            ends = [stored[name] for name in ("terminated", "truncated") if name in stored]
            stored["done"] = np.logical_or.reduce(ends) if ends else np.arange(steps.length) == steps.length - 1
        stored["done"] = stored["done"].astype(np.int64)
        for name in [name for name in columns if name not in taken]:
            if name in stored or name in _TAKEN:
                why = (
                    "it would stand where robomimic has something else; rename it, or choose it as an observation: "
                    f"observation=[{name!r}, ...]"
                )
                refused.add(name, f"column {name!r}: {why}")
            stored[name] = steps.now(name)
        source = {**{new: old for old, new in observations.items()}, "action": self._action}
        held = [(source.get(n, n), THEIRS.get(n, n), v.dtype) for n, v in stored.items()]
        for name, why in refused_names(held).items():
            refused.add(name, f"column {name!r}: {why}")
        if SPLITS in data:  # as it is read
            data[SPLITS] = np.array(sorted(map(str, np.atleast_1d(data[SPLITS]).tolist())))
        return stored, data

    def _observations(self, columns: Mapping[str, Array], where: str) -> dict[str, str]:
        """Return column -> its name in the file."""
        found = observations_of(self._observation, ("obs", "observation"), "obs", columns, where)
        return {old: "obs/flat" if new == "obs" else new for old, new in found.items()}

    # -- the file ----------------------------------------------------------------------------

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write the dataset."""
        import h5py

        splits: dict[str, list[str]] = {}
        total = 0
        with h5py.File(path, "x") as file:
            data = file.create_group("data")
            for number, record in enumerate(episodes):
                demo = data.create_group(f"demo_{number}")
                demo.attrs[LENGTH] = record.length
                for name, value in record.data.items():
                    if name == SPLITS:
                        for split in np.atleast_1d(value).tolist():
                            splits.setdefault(split, []).append(f"demo_{number}")
                    else:
                        demo.attrs[name] = storable(value)
                for name, rows in record.columns.items():
                    demo.create_dataset(THEIRS.get(name, name), data=storable(rows))
                total += record.length
            data.attrs["total"] = total
            data.attrs.update(Facts(fps=self.facts.fps).encode(PREFIX))
            data.attrs["env_args"] = self._env_args
            for split, names in splits.items():
                file.create_dataset(f"{SPLITS}/{split}", data=np.array(names, "S"))


def _refused_splits(value: Any) -> str | None:
    """Return why a demo can't be in these splits, None if it can."""
    names = np.atleast_1d(np.asarray(value))
    if names.size and names.dtype.kind != "U":
        return "it names the splits that a demo is in"
    paths = [(name, f"{SPLITS}/{name}", np.dtype("S1")) for name in names.tolist()]
    slashed = [name for name in names.tolist() if "/" in name]
    why = refused_names(paths)
    return f"{slashed[0]!r} has a slash, and a split is one name" if slashed else next(iter(why.values()), None)
