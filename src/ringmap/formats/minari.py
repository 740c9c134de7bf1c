"""The Minari format: local datasets of the Farama Foundation's Minari, read and written through its package.

    observation  next_observation  action  reward  terminated  truncated      one row per step
    info/<key>   next_info/<key>

An episode of T steps has T + 1 observations: `next_observation` is `observation` one step later, and holds the last.
Spaces of several parts become columns: observation/position, ...
The package trusts what it reads, so a dataset is looked at before:

    metadata.json without spaces -> minari makes the environment that the file names: any callable, any arguments
    main_data.hdf5               -> links and storage elsewhere are followed, shapes are believed

Invariants: nothing that is refused was handed to minari, nor to a decoder of images; episodes are logged as they are
read back; no column is dropped: one that Minari has no place for is an info.
Not here: the log (common/writer.py), downloads (`minari download`).
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts, check_reward_at
from ringmap.errors import CorruptError, InputError
from ringmap.formats.builtin import Minari
from ringmap.formats.common import disk
from ringmap.formats.common.log import Record
from ringmap.formats.common.refusals import Refused
from ringmap.formats.common.safe_hdf5 import (
    check_link,
    datasets,
    loaded,
    refused_attribute,
    refused_names,
    refused_rows,
    storable,
)
from ringmap.formats.common.source import EpisodeSource, damage_named, offsets_of
from ringmap.formats.common.transitions import (
    Steps,
    below,
    is_loose_flag,
    next_of,
    observations_of,
    refused_flag,
)
from ringmap.formats.common.untrusted import (
    LARGEST_ROW,
    kind_at,
    read_json,
    refuse_links,
)
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.media.images import picture_of
from ringmap.storage.columns.schema import ColumnSpec, Schema

__all__ = ["MinariSource", "MinariWriter"]


Array = np.ndarray[Any, np.dtype[Any]]

COUNTS = ("total_steps", "id")
"""Attributes of an episode that are Minari's own."""

_WITNESSES = ("metadata.json", "main_data.hdf5")


class MinariSource(EpisodeSource):
    """The columns of a Minari dataset, as `StoredDataset` reads them.

    Args:
        path: the folder that holds `data`.

    Raises:
        NotFoundError: there is no such folder.
        CorruptError: it is damaged, or an episode differs from the first in its columns.

    Cost: opening reads the metadata of all episodes; a read loads whole episodes, which are kept.
    """

    reward_at = "same"
    """A row is a step: an observation, its action, and the reward of that."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with damage_named(self.path):
            cache = self._handle()
            dataset = cache.file
            self.fps = Facts.stated(dataset.storage.metadata, PREFIX).fps
            found = dataset.storage.get_episode_metadata(dataset.episode_indices.tolist())
            self._metadata = [_flat(one) for one in found]
            self.lengths = np.array([int(m["total_steps"]) for m in self._metadata], np.int32)
            self.offsets = offsets_of(self.lengths)
            specs = []
            if len(self.lengths):
                for name, rows in cache.episode(0, ["reward"]).items():
                    text = rows.dtype.kind == "U"  # of any width: a later episode's may be wider
                    specs.append(ColumnSpec(name, rows.shape[1:], np.dtype("U") if text else rows.dtype))
        self.schema = Schema(tuple(specs))
        names = [n for m in self._metadata for n in m if n not in COUNTS]
        self.episode_columns = list(dict.fromkeys(names))

    def _witnesses(self) -> Sequence[str]:
        return [os.path.join(self.path, "data", name) for name in _WITNESSES]

    def _open_file(self) -> Any:
        from minari import MinariDataset

        folder = os.path.join(self.path, "data")
        refuse_harm(folder)
        return MinariDataset(folder)

    def _load(self, file: Any, number: int, columns: Sequence[str]) -> dict[str, Array]:
        folder, name = os.path.join(self.path, "data"), int(file.episode_indices[number])
        refuse_episode(folder, name)
        found = _columns_of(file[number])
        others = [n for n in found if hasattr(self, "schema") and n not in self.schema.names]
        if others:
            warnings.warn(
                f"{self.path}: left out: episode {number} has {others}, which the first one lacks", stacklevel=2
            )
        for at, _, names in os.walk(os.path.join(folder, str(name))):  # of Minari's Arrow storage
            for one in names:
                self._refuse_newer(os.path.join(at, one))
        return found

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        names = self.episode_columns
        data = self._metadata[episode]
        return {n: loaded(data[n]) for n in names if n in data and data[n] is not None}


def _columns_of(episode: Any) -> dict[str, Array]:
    steps = len(episode.rewards)
    columns: dict[str, Array] = {}
    _add(columns, "observation", episode.observations, steps)
    _add(columns, "action", episode.actions, steps)
    columns["reward"] = np.asarray(episode.rewards)
    columns["terminated"] = np.asarray(episode.terminations, bool)
    columns["truncated"] = np.asarray(episode.truncations, bool)
    _add(columns, "info", episode.infos or {}, steps)
    return columns


def _add(columns: dict[str, Array], name: str, value: Any, steps: int) -> None:
    """Add the leaves of a nested value; one of T + 1 rows as two columns, now and next."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _add(columns, f"{name}/{key}", inner, steps)
    elif isinstance(value, tuple):
        for number, inner in enumerate(value):
            _add(columns, f"{name}/{number}", inner, steps)
    else:
        rows = np.asarray(value)
        if rows.dtype.kind == "O":
            rows = loaded(rows)
        if len(rows) == steps + 1:
            columns[name], columns[f"next_{name}"] = rows[:-1], rows[1:]
        elif len(rows) == steps:
            columns[name] = rows
        else:
            raise CorruptError(f"{name} has {len(rows)} rows for {steps} steps")


def _flat(metadata: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the attributes of an episode, which Minari nests by the slashes in their names."""
    found: dict[str, Any] = {}
    for name, value in metadata.items():
        nested = isinstance(value, Mapping)
        found |= _flat(value, f"{prefix}{name}/") if nested else {prefix + name: value}
    return found


_HDF5 = "main_data.hdf5"

_COUNTED = 1000
"""Steps that a byte may stand for, packed."""


def refuse_harm(folder: str) -> None:
    """Look at a dataset's `data` folder as a whole.

    Raises:
        CorruptError: opening it would run code, or lead out of it.
    """
    refuse_links(folder)
    path = os.path.join(folder, "metadata.json")
    found = read_json(path)
    stored = sum(os.stat(os.path.join(at, name)).st_size for at, _, names in os.walk(folder) for name in names)
    for name in ("total_episodes", "total_steps"):
        count = found.get(name, 0) if isinstance(found, dict) else -1
        if type(count) is not int or not 0 <= count <= _COUNTED * stored:
            raise CorruptError(
                f"{path}: {name!r} is {count!r}, expected at most {_COUNTED} for each of {stored:,} bytes"
            )
    for name in ("observation_space", "action_space"):
        space = found.get(name) if isinstance(found, dict) else None
        if not isinstance(space, str | dict):
            raise CorruptError(
                f"{path}: has no {name!r}: minari would make the environment that the file names to find out, "
                "which runs code of its choice; add the spaces (Minari's documentation, Dataset Standards)"
            )
        try:
            _check_space(json.loads(space) if isinstance(space, str) else space, path)
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptError(f"{path}: {name!r} makes no sense: {error}") from None
    if kind_at(os.path.join(folder, _HDF5)) == "":
        with _opened(folder) as file:
            for name in file:
                check_link(file, name)


def refuse_episode(folder: str, number: int) -> None:
    """Look at all that is stored of an episode, before it is read.

    Raises:
        CorruptError: it lies elsewhere, is larger than the file can hold, or has images that are none.
    """
    if kind_at(os.path.join(folder, _HDF5)):
        return
    with _opened(folder) as file:
        name = f"episode_{number}"
        if name in file:
            check_link(file, name)
            for _, dataset in datasets(file[name]):
                _check_dataset(dataset)


def _opened(folder: str) -> Any:
    import h5py

    return h5py.File(os.path.join(folder, _HDF5), "r")


def _check_dataset(found: Any) -> None:
    import h5py

    path = f"{found.file.filename}: {found.name}"
    if (
        h5py.check_string_dtype(found.dtype) is None and h5py.check_vlen_dtype(found.dtype) is not None
    ):  # images, each as the bytes of a file
        for image in found[()]:
            picture_of(image.tobytes(), path)


def _check_space(space: Any, path: str, depth: int = 0) -> None:
    """Raise unless the parts of a space are of a size that an array is made for."""
    if not isinstance(space, dict) or depth > 32:
        raise ValueError("is no space")
    shape = space.get("shape", ())
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) * 8 > LARGEST_ROW:
        raise ValueError(f"shape {shape!r}")
    inner = space.get("subspaces", ())
    for one in inner.values() if isinstance(inner, dict) else inner:
        _check_space(one, path, depth + 1)


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
