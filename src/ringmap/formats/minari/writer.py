"""The writing side of a Minari dataset, by Minari's own storage.

    obs, action, reward, ...   T + 1 rows  ->  observation, next_observation, action, reward, ...   T rows
    observation, next_observation, ...     ->  the same                                              (as Minari is read)

Invariants: episodes are logged as they are read back, so that dataset and log are of the same columns; no column is
dropped: one that Minari has no place for is an info.
Not here: the log (common/writer.py), Minari's files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts, check_reward_at
from ringmap.errors import InputError
from ringmap.formats.common import disk
from ringmap.formats.common.hdf5_trial import (
    refused_attribute,
    refused_names,
    refused_rows,
    storable,
)
from ringmap.formats.common.log import Record
from ringmap.formats.common.refusals import Refused
from ringmap.formats.common.transitions import (
    Steps,
    below,
    is_loose_flag,
    next_of,
    observations_of,
    refused_flag,
)
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.minari import COUNTS, Minari

__all__ = ["MinariWriter"]

Array = np.ndarray[Any, np.dtype[Any]]

_FLAGS = ("terminated", "truncated")


class MinariWriter(EpisodeWriter):
    """Writes episodes to a Minari dataset. Use it in a `with` block.

    An episode is either T rows with `next_observation`, or T + 1 rows, as environments are recorded here: the last row
    has the last observation, and no action. `path`, `mode` and `progress`, what entering raises, and what a kill
    leaves: see `EpisodeWriter`.

    Args:
        observation: the column that is the observation, with its parts (obs/camera, ...), or a list of columns, which
            become a `Dict`; None: "observation" or "obs".
        action: the column that is the action, with its parts.
        reward_at: where rewards and flags stand: "next", with the observation that came with them, or "same", with the
            action; None: as the source of the episodes says, "next" if nothing is said. Ignored where there are next
            observations.
        final_row: whether the last row is an observation alone; None: if rewards stand at the "next" row. Minari needs
            the last observation, so without it, and without next observations, an episode is refused.
        observation_space: Gymnasium's space; None: a `Box` without bounds, or a `Dict` or `Tuple` of such.
        action_space: the same of actions.

    Raises:
        InputError: an option is wrong, or the folder's name is no Minari id.

    Cost: the files are written at the end of the block, out of a log that takes as much room.
    """

    format = Minari
    files = r"data/.*"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "error",
        observation: str | list[str] | None = None,
        action: str = "action",
        reward_at: str | None = None,
        final_row: bool | None = None,
        observation_space: Any = None,
        action_space: Any = None,
        progress: bool = False,
    ) -> None:
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.serialization import serialize_space

        super().__init__(path, mode, progress)
        self._id = _id_of(self.path)
        try:
            parse_dataset_id(self._id)
        except (ValueError, TypeError):
            raise InputError(
                f"MinariWriter: {self.path}: the folder names the dataset, and {self._id!r} is no id of Minari; name "
                "it as in minari:kitchen/mixed-v0"
            ) from None
        self._observation, self._action = observation, action
        self._rewards = check_reward_at("MinariWriter", reward_at)
        self._final_row = final_row
        given = {"observation_space": observation_space, "action_space": action_space}
        self._spaces = {name: serialize_space(s) for name, s in given.items() if s is not None}

    # -- episodes ----------------------------------------------------------------------------

    def refuses(self, name: str, rows: Array) -> str | None:
        """Return why a column can't be held."""
        return refused_flag(name, rows) or refused_rows(rows)

    def refuses_data(self, name: str, value: Any) -> str | None:
        """Return why a datum of an episode can't be held."""
        if name == "seed":
            return None  # `layout` says
        return "Minari has a number of its own there; rename it" if name in COUNTS else refused_attribute(name, value)

    def looks_at(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Return whether a column is of text, which may be such that HDF5 does not hold it, or a flag by its name
        alone."""
        return dtype.kind == "U" or is_loose_flag(name, dtype)

    def layout(
        self, columns: dict[str, Array], data: dict[str, Any], refused: Refused, where: str
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the steps of an episode, as they are read back."""
        found = self._parts(columns, where)
        for old in found.values():
            rows = columns[old]
            if rows.dtype.kind not in "biufU" or (rows.dtype.kind == "U" and rows.ndim > 1):
                kind = f"{rows.dtype} {rows.shape[1:]}"
                refused.add(old, f"column {old!r} ({kind}): Minari has no space for it")
        observations = [old for new, old in found.items() if new.split("/")[0] == "observation"]
        steps = Steps(columns, observations, self.reward_at(self._rewards), self._final_row, where)
        if not (steps.follows or steps.cut):
            raise InputError(
                f"{where}: each of the {steps.length} rows is a step (reward_at='same'), and Minari needs the "
                "observation that followed "
                f"the last: add a column {next_of(observations[0])!r}, or pass final_row=True if the last row is an "
                "observation alone"
            )
        stored: dict[str, Array] = {}
        taken = {*found.values(), *(next_of(old) for old in observations if steps.follows)}
        for new, old in found.items():
            stored[new] = steps.now(old)
            after = steps.after(old) if old in observations else None
            if after is not None:
                stored[next_of(new)] = after
        for name in ("reward", *_FLAGS):
            if name in columns:
                stored[name] = steps.outcome(name)
                taken.add(name)
        if "reward" not in stored:
            raise InputError(f"{where}: no column 'reward', which Minari needs; there are {list(columns)}")
        for name in _FLAGS:
            stored.setdefault(name, np.zeros(steps.length, bool))
        if "terminated" not in columns and "truncated" not in columns:
            stored["truncated"][-1] = True
        source = {**found, **{name: name for name in ("reward", *_FLAGS)}}
        for name in [name for name in columns if name not in taken]:
            is_next = name.startswith("next_info/") and name[len("next_") :] in columns
            new = name if is_next or name.startswith("info/") else f"info/{name}"
            made = {new: steps.now(name)}
            if steps.cut:
                made[next_of(new)] = columns[name][1:]
            if stored.keys() & made.keys():
                refused.add(name, f"column {name!r}: it would be {new!r}, and so would another one; rename it")
            stored |= made
            source[new] = name
        follow = ("next_observation", "next_info/")
        held = [(source.get(n, n), n, v.dtype) for n, v in stored.items() if not n.startswith(follow)]
        for name, why in refused_names(held).items():
            refused.add(name, f"column {name!r}: {why}")
        seed = np.asarray(data.get("seed", 0))
        if seed.ndim or seed.dtype.kind not in "iu":
            refused.add(
                "seed",
                f"episode data 'seed': Minari's is an integer of up to 64 bits, and this is {data['seed']!r}; rename "
                "it",
            )
        return stored, data

    def _parts(self, columns: Mapping[str, Array], where: str) -> dict[str, str]:
        """Return the columns of observations and actions: name in the dataset -> name in the episode."""
        observed = observations_of(self._observation, ("observation", "obs"), "observation", columns, where)
        found = {new: old for old, new in observed.items()}
        found |= {"action" + old[len(self._action) :]: old for old in below(self._action, columns, where)}
        return found

    # -- the dataset -------------------------------------------------------------------------

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write the dataset."""
        import minari
        from gymnasium.spaces import Dict
        from minari.data_collector import EpisodeBuffer
        from minari.dataset.minari_storage import MinariStorage
        from minari.serialization import deserialize_space

        disk.make_folder(path)
        records = iter(episodes)
        first = next(records, None)
        spaces: dict[str, Any] = {"observation_space": Dict({}), "action_space": Dict({})}
        if first is not None:
            widths = _widths(episodes)
            for name in spaces:
                given = self._spaces.get(name)
                spaces[name] = (
                    deserialize_space(given) if given else _space_of(name.split("_")[0], first.columns, widths)
                )
        storage = MinariStorage.new(os.path.join(path, "data"), **spaces, jpeg_encoding=False)
        named = {"dataset_id": self._id, "minari_version": minari.__version__}
        storage.update_metadata(named | Facts(fps=self.facts.fps).encode(PREFIX))
        every = records if first is None else chain([first], records)
        storage.update_episodes([])  # so that a dataset without episodes is a file of HDF5, too
        for number, record in enumerate(every):
            data = dict(record.data)
            seed = data.pop("seed", None)
            seed = None if seed is None else int(seed)
            parts = {name: _nested(name, record.columns) for name in ("observation", "action", "info")}
            storage.update_episodes(
                [
                    EpisodeBuffer(
                        id=number,
                        seed=seed,
                        observations=parts["observation"],
                        actions=parts["action"],
                        infos=parts["info"],
                        rewards=record.columns["reward"],
                        terminations=record.columns["terminated"],
                        truncations=record.columns["truncated"],
                    )
                ]
            )
            if data:
                kept = {name: storable(value) for name, value in data.items()}
                storage.update_episode_metadata([kept], [number])


def _id_of(path: str) -> str:
    """Return the id of a dataset: its place below Minari's folder, or the name of its folder."""
    root = os.path.expanduser(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets")
    below = os.path.relpath(path, os.path.realpath(root))
    return os.path.basename(path) if below.startswith(os.pardir) else below


def _nested(name: str, columns: Mapping[str, Any]) -> Any:
    """Return the value of a column with its parts: dicts, tuples, and the row after the last where there is one."""
    if name in columns:
        rows = columns[name]
        last = columns.get(next_of(name))
        rows = rows if last is None else np.concatenate([rows, last[-1:]])
        return rows.tolist() if rows.dtype.kind == "U" and rows.ndim == 1 else storable(rows)
    keys = dict.fromkeys(n[len(name) + 1 :].split("/")[0] for n in below(name, columns))
    if not keys:
        return {}
    parts = {key: _nested(f"{name}/{key}", columns) for key in keys}
    numbered = name != "info" and all(key == str(i) for i, key in enumerate(keys))
    return tuple(parts.values()) if numbered else parts


def _space_of(name: str, columns: Mapping[str, Any], widths: Mapping[str, tuple[int, str]]) -> Any:
    from gymnasium import spaces

    if name not in columns:
        keys = dict.fromkeys(n[len(name) + 1 :].split("/")[0] for n in below(name, columns))
        parts = {key: _space_of(f"{name}/{key}", columns, widths) for key in keys}
        numbered = all(key == str(i) for i, key in enumerate(keys))
        return spaces.Tuple(list(parts.values())) if numbered else spaces.Dict(parts)
    rows = columns[name]
    if rows.dtype.kind == "U":
        width, characters = widths[name]
        return spaces.Text(max_length=max(width, 1), min_length=0, charset=characters or " ")
    if rows.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, rows.shape[1:], rows.dtype)
    bounds = (0, 1) if rows.dtype.kind == "b" else (np.iinfo(rows.dtype).min, np.iinfo(rows.dtype).max)
    return spaces.Box(*bounds, rows.shape[1:], rows.dtype)


def _widths(episodes: Iterable[Record]) -> dict[str, tuple[int, str]]:
    """Return the length of the longest text of each column, and the characters that occur."""
    found: dict[str, tuple[int, str]] = {}
    for record in episodes:
        rows = {n: v for n, v in record.columns.items() if isinstance(v, np.ndarray)}
        texts = [n for n, v in rows.items() if v.dtype.kind == "U" and v.ndim == 1]
        if not texts:
            break
        for name in texts:
            width, characters = found.get(name, (0, ""))
            every = [*rows[name].tolist(), *rows.get(next_of(name), rows[name])[-1:].tolist()]
            found[name] = (
                max(width, *map(len, every)),
                "".join(sorted({*characters, *"".join(every)})),
            )
    return found
