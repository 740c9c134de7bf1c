"""The robomimic format: demonstrations in one HDF5 file, read and written by its documented layout.

    data            attributes: total (steps of all demos), env_args (JSON)
    data/demo_0     attribute num_samples
      obs/<key>  next_obs/<key>   (T, ...)
      actions  rewards  dones  states ...
    mask/<split>    names of demos

Columns: obs/<key>, next_obs/<key>, action, reward, done, and all else that has a row for each sample, under its own
name. The splits of an episode are its data `mask`; other attributes of a demo, and arrays of another length
(`initial_state/...` of Isaac Lab has one row), are its data too.
Source: robomimic documentation, Dataset Structure.
Not here: the log (common/writer.py), steps out of rows (common/transitions.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts, check_reward_at
from ringmap.errors import CorruptError, InputError, UnsupportedError
from ringmap.formats.builtin import Robomimic
from ringmap.formats.common.log import Record
from ringmap.formats.common.refusals import Refused
from ringmap.formats.common.safe_hdf5 import (
    datasets,
    group_of,
    is_text,
    loaded,
    member_of,
    refused_attribute,
    refused_names,
    refused_rows,
    storable,
)
from ringmap.formats.common.source import (
    EpisodeSource,
    damage_named,
    offsets_of,
    stamp_of,
    tell_left_out,
)
from ringmap.formats.common.transitions import (
    OUTCOMES,
    Steps,
    is_loose_flag,
    next_of,
    observations_of,
    refused_flag,
)
from ringmap.formats.common.untrusted import kind_at
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.disk.system import NotAFileError

__all__ = ["RobomimicSource", "RobomimicWriter"]


Array = np.ndarray[Any, np.dtype[Any]]

THEIRS = {"action": "actions", "reward": "rewards", "done": "dones"}
"""Column -> dataset of a demo, where the names differ."""

_OURS = {theirs: name for name, theirs in THEIRS.items()}

SPLITS = "mask"
"""The name in an episode's data of the splits that it is in."""

LENGTH = "num_samples"
"""The attribute of a demo with the number of its steps."""


class RobomimicSource(EpisodeSource):
    """The columns of a file of robomimic, as `StoredDataset` reads them.

    Args:
        path: the file.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it is damaged, leads elsewhere, or a demo differs from the first in its columns.

    Cost: a read loads whole episodes, which are kept.
    """

    reward_at = "same"
    """A row is a step: an observation, its action, and the reward of that."""

    _holds = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with damage_named(self.path):
            file = self._handle().file
            data = group_of(file, "data")
            self.fps = Facts.stated(data.attrs, PREFIX).fps
            numbered = [(int(m[1]), name) for name in data if (m := re.fullmatch(r"demo_(\d+)", name))]
            self._demos = [name for _, name in sorted(numbered)]
            self.lengths = np.array([_length(group_of(data, name)) for name in self._demos], np.int32)
            self.offsets = offsets_of(self.lengths)
            self._splits: dict[str, list[str]] = {}
            if "mask" in file:
                for split, names in datasets(group_of(file, "mask")):
                    for name in names.asstr()[()].tolist():
                        self._splits.setdefault(str(name), []).append(split)
            self.unsupported: dict[str, str] = {}
            self.schema = Schema(tuple(self._columns_of(data)))
            self._others = self._data_of(data)
            known = dict.fromkeys([SPLITS] if self._splits else [])
            for name, others in zip(self._demos, self._others, strict=True):
                known.update(dict.fromkeys([*data[name].attrs, *others]))
            self.episode_columns = [name for name in known if name != LENGTH]
            others = [f"data/{name}" for name in data if name not in set(self._demos)]
            tell_left_out(self.path, [*others, *(n for n in file if n not in ("data", "mask"))])

    def _columns_of(self, data: Any) -> Iterator[ColumnSpec]:
        """Yield the columns: what has a row for each sample in the shortest demo and in the longest one.

        An array of another meaning may have as many rows as one demo has samples. What the layout names has to have
        them.
        """
        if not self._demos:
            return
        two = [int(self.lengths.argmin()), int(self.lengths.argmax())]
        inside = [dict(datasets(data[self._demos[number]])) for number in two]
        for theirs in {**inside[0], **inside[1]}:
            name = _OURS.get(theirs, theirs)
            there = [(n, found[theirs]) for n, found in zip(two, inside, strict=True) if theirs in found]
            first = there[0][1]
            for number, column in there:
                rows = column.shape[0] if column.shape else 1
                if rows != self.lengths[number] and (theirs in _OURS or theirs.startswith(("obs/", "next_obs/"))):
                    raise CorruptError(f"{self.path}: {column.name} has {rows} rows, expected {self.lengths[number]}")
            if any(column.shape[:1] != (self.lengths[n],) for n, column in there):
                continue
            if len(there) < 2:
                lacks = self._demos[two[theirs in inside[0]]]
                self.unsupported[name] = f"not in all demos: {lacks} lacks it"
            elif is_text(first.dtype):
                yield ColumnSpec(name, first.shape[1:], np.dtype("U"))  # a later one may be wider
            elif first.dtype.kind in "biufcS":
                yield ColumnSpec(name, first.shape[1:], first.dtype.newbyteorder("="))
            else:
                self.unsupported[name] = f"of HDF5 type {first.dtype}, which no column is"

    def _data_of(self, data: Any) -> list[list[str]]:
        """Return the paths of the datasets of each demo that are its data."""
        columns = {*self.schema.names, *self.unsupported}
        known: dict[frozenset[str], list[str]] = {}  # demos are alike: few are looked into
        found = []
        for name in self._demos:
            links = _links(data[name])
            if links not in known:
                paths = (path for path, _ in datasets(data[name]))
                known[links] = [path for path in paths if _OURS.get(path, path) not in columns]
            found.append(known[links])
        return found

    def _open_file(self) -> Any:
        import h5py

        if os.path.exists(self.path) and not os.path.isfile(self.path):  # a pipe would never end
            raise NotAFileError(self.path, kind_at(os.path.realpath(self.path)))
        return h5py.File(self.path, "r")

    def _load(self, file: Any, number: int, columns: Sequence[str]) -> dict[str, Array]:
        found = {}
        for name, column in datasets(file["data"][self._demos[number]]):
            own = _OURS.get(name, name)
            if own not in columns:
                continue
            if len(column) != self.lengths[number]:
                raise CorruptError(
                    f"{self.path}: {column.name} has {len(column)} rows, expected {self.lengths[number]}"
                )
            found[own] = _rows(column)
        return found

    def _kept(self, handle: Any) -> Any:
        return stamp_of(os.fstat(handle.file.id.get_vfd_handle()))

    def _release(self, handle: Any) -> None:
        handle.file.close()

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        name = self._demos[episode]
        demo = handle.file["data"][name]
        found = {n: loaded(v) for n, v in demo.attrs.items() if n != LENGTH}
        for path in self._others[episode]:
            if path in found:
                raise UnsupportedError(f"{self.path}: {name} has both an attribute and a dataset {path!r}")
            rows = np.asarray(_rows(demo[path]))
            found[path] = rows if rows.ndim else loaded(rows[()])
        splits = self._splits.get(name)
        return found if splits is None else {**found, SPLITS: np.array(splits)}


def _length(demo: Any) -> int:
    """Return the steps of a demo: its attribute, which its datasets have to match; without it the rows of its
    actions."""
    given = demo.attrs.get(LENGTH)
    count = int(len(member_of(demo, "actions")) if given is None else given)
    if not 0 < count < 1 << 31:
        raise CorruptError(f"{demo.file.filename}: {demo.name} has {count} samples")
    return count


def _links(group: Any) -> frozenset[str]:
    """Return the paths of all that is below a group. Opens nothing."""
    found: list[bytes] = []
    group.id.links.visit(found.append)
    return frozenset(name.decode(errors="surrogateescape") for name in found)


def _rows(column: Any) -> Array:
    if not is_text(column.dtype):
        if column.dtype.hasobject:
            raise UnsupportedError(f"{column.file.filename}: {column.name} is of {column.dtype}")
        rows: Array = column[()]
        return rows
    texts = np.asarray(column.asstr()[()])
    found: Array = texts.astype(str)
    return found


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
