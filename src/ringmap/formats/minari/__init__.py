"""The Minari format: local datasets of the Farama Foundation's Minari, read and written through its package.

    observation  next_observation  action  reward  terminated  truncated      one row per step
    info/<key>   next_info/<key>

An episode of T steps has T + 1 observations: `next_observation` is `observation` one step later, and
holds the last. Spaces of several parts become columns: observation/position, ...
Not here: what is looked at before (untrusted.py), writing (writer.py), downloads (`minari download`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.errors import CorruptError
from ringmap.formats.common.directory import DirectorySource, damage_named, offsets_of
from ringmap.formats.common.episode_cache import EpisodeCache
from ringmap.formats.common.hdf5_trial import loaded
from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.minari.untrusted import refuse_episode, refuse_harm
from ringmap.formats.registry import register_format
from ringmap.storage.columns.schema import ColumnSpec, Schema

__all__ = ["COUNTS", "Minari", "MinariSource"]

Array = np.ndarray[Any, np.dtype[Any]]

COUNTS = ("total_steps", "id")
"""Attributes of an episode that are Minari's own."""

_WITNESSES = ("metadata.json", "main_data.hdf5")


@register_format
class Minari(StoredFormat):
    """Minari datasets. Lossless."""

    name = "minari"
    lossless = True
    source = "ringmap.formats.minari:MinariSource"
    writer = "ringmap.formats.minari.writer:MinariWriter"
    appends = False

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `data/metadata.json` and what lies beside it."""
        folder = os.path.join(os.fspath(path), "data")
        return os.path.isfile(os.path.join(folder, "metadata.json")) and any(
            name == "main_data.hdf5" or name.isdigit() for name in os.listdir(folder)
        )


class MinariSource(DirectorySource):
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
            dataset, cache = self._handle()
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

    def _open(self) -> Any:
        from minari import MinariDataset

        folder = os.path.join(self.path, "data")
        refuse_harm(folder)
        dataset = MinariDataset(folder)

        def load(number: int, _: Sequence[str]) -> dict[str, Array]:
            name = int(dataset.episode_indices[number])
            refuse_episode(folder, name)
            found = _columns_of(dataset[number])
            others = [n for n in found if hasattr(self, "schema") and n not in self.schema.names]
            if others:
                warnings.warn(
                    f"{self.path}: left out: episode {number} has {others}, which the first one lacks",
                    stacklevel=2,
                )
            for at, _, names in os.walk(os.path.join(folder, str(name))):  # of Minari's Arrow storage
                for file in names:
                    self._refuse_newer(os.path.join(at, file))
            return found

        return dataset, EpisodeCache(load)

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        cache: EpisodeCache = handle[1]
        return cache.windows(columns, self.offsets, starts, length, stride, self.schema)

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
