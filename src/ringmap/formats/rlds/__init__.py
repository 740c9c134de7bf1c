"""The RLDS format: data sets of episodes that TensorFlow Datasets wrote (Open X-Embodiment), read without TensorFlow.

    features.json                             names, shapes, dtypes, encodings
    dataset_info.json                         name, splits, how many records each file has
    NAME-SPLIT.tfrecord-00000-of-00002        one record an episode, in all splits
    NAME-SPLIT.array_record-00000-of-00002    ... or these; they need the extra `rlds`

It is read in order, since nothing in it says how many steps an episode has: `convert` copies it.
Columns: the features of a step under their own names; `is_terminal` is the column `terminated`, and `truncated` is true
at the last step if that is not terminal. A reward stands in the row of its action. Other features are episode data,
with `split`.
Source: google-research/rlds, README, "Dataset Format"; TensorFlow Datasets, `tfds.features`.
Not here: files of records (records.py), their wire format (example.py), values (features.py), writing, which needs
TFDS.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ringmap.datasets.stored_episodes import EpisodeStream
from ringmap.errors import CorruptError, UnknownFormatError, UnsupportedError
from ringmap.formats.base import Format
from ringmap.formats.common.directory import damage_named
from ringmap.formats.common.untrusted import check_name, kind_at, read_json, refuse_elsewhere
from ringmap.formats.registry import register_format
from ringmap.formats.rlds.example import features_of, values_of
from ringmap.formats.rlds.features import Leaf, decode, leaves_of
from ringmap.formats.rlds.records import READERS
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.paths import local_path

__all__ = ["Rlds", "RldsEpisodes"]

Array = np.ndarray[Any, np.dtype[Any]]

_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"

log = logging.getLogger("ringmap")


@register_format
class Rlds(Format):
    """RLDS data sets. Read only, in order."""

    name = "rlds"
    supports_episode_data = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `dataset_info.json`, and `features.json` with steps."""
        folder = os.fspath(path)
        if kind_at(os.path.join(folder, "dataset_info.json")):
            return False
        try:
            found = read_json(os.path.join(folder, "features.json"))
            return "sequence" in found["featuresDict"]["features"]["steps"]
        except (OSError, CorruptError, LookupError, TypeError):
            return False

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """Refuse: no episode is found by its number.

        Raises:
            UnsupportedError: always; it says what to do.
        """
        raise UnsupportedError(
            f"{os.fspath(path)}: an RLDS data set is read in order, and not by index; convert it: "
            f"ringmap.data.convert({os.fspath(path)!r}, 'copy.h5')"
        )

    @classmethod
    def open_stream(cls, path: str | os.PathLike[str]) -> RldsEpisodes:
        """Return the episodes, which are read in order."""
        return RldsEpisodes(path)


class RldsEpisodes(EpisodeStream):
    """The episodes of an RLDS data set, in order.

    Args:
        path: the folder that holds `features.json`.

    Raises:
        UnknownFormatError: it is no RLDS data set, or its files are of another kind.
        CorruptError: it is damaged; from iterating, too.
        MissingExtraError: from iterating: its files are ArrayRecord, and the package is not installed.

    Cost: opening reads the two descriptions; the columns are those of the first episode, which is read for them.
    """

    reward_at = "same"
    """A row is a step: an observation, its action, and the reward of that."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        if not Rlds.detect(self.path):
            raise UnknownFormatError(
                f"{self.path}: is no RLDS data set: it has no dataset_info.json, or no features.json with steps"
            )
        with damage_named(self.path):
            self._columns, self._data = self._features()
            counters = [leaf for leaf in self._columns.values() if leaf.per_step > 0]
            if not counters:
                raise CorruptError(f"{self.path}: no feature tells how many steps an episode has")
            self._counter = min(counters, key=lambda leaf: (leaf.kind != "number", leaf.per_step))
            self._files = list(self._named())
        self._schema: Schema | None = None
        self.num_episodes = sum(count for _, _, count in self._files)
        self.episode_column_names = [*(leaf.name for leaf in self._data), "split"]

    @property
    def schema(self) -> Schema:
        """The columns of the first episode; none without episodes."""
        if self._schema is None:
            self._schema = next((Schema.of(columns) for columns, _ in self), Schema(()))
        return self._schema

    def __iter__(self) -> Iterator[tuple[dict[str, Array], dict[str, Any]]]:
        """Yield the columns and the data of each episode."""
        for split, file, told in self._files:
            count = 0
            with damage_named(file):
                for data in self._reader(file):
                    yield self._episode(data, split, f"{file}: record {count}")
                    count += 1
                if count != told:
                    raise CorruptError(f"{file}: has {count} records, expected {told}, as dataset_info.json says")

    def _episode(self, data: bytes, split: str, where: str) -> tuple[dict[str, Array], dict[str, Any]]:
        with damage_named(where):
            places = features_of(data)
            if self._counter.key not in places:
                raise CorruptError(f"{where} has no feature {self._counter.key!r}")
            steps = len(values_of(data, places[self._counter.key])) // self._counter.per_step
        columns = dict(_decoded(data, places, self._columns, steps, where))
        if "terminated" in columns and "truncated" not in columns:
            columns["truncated"] = np.arange(steps) == steps - 1
            columns["truncated"] &= ~columns["terminated"].astype(bool)
        known = {leaf.name: leaf for leaf in self._data if leaf.key in places}  # each is optional
        rows = _decoded(data, places, known, 1, where)
        constant = {n: row[0] if row.ndim > 1 else row[0].item() for n, row in rows}
        return columns, {**constant, "split": split}

    def _features(self) -> tuple[dict[str, Leaf], list[Leaf]]:
        """Return the columns, and the leaves that are episode data."""
        file = os.path.join(self.path, "features.json")
        refuse_elsewhere(self.path, file)
        columns, data = {}, []
        for in_steps, leaf in leaves_of(read_json(file)):
            if not leaf.reads:
                log.warning("%s: feature %r is left out: a %s is not read", self.path, leaf.name, leaf.kind)
            elif not in_steps:
                data.append(leaf)
            else:
                columns[leaf.name.removeprefix("steps/")] = leaf
        if "terminated" in columns or "truncated" in columns:
            return columns, data
        return {"terminated" if n == "is_terminal" else n: leaf for n, leaf in columns.items()}, data

    def _named(self) -> Iterator[tuple[str, str, int]]:
        """Yield split, path and number of records of each file, in order."""
        place = os.path.join(self.path, "dataset_info.json")
        info = read_json(place)
        kind = info.get("fileFormat", "tfrecord")
        if kind not in READERS:
            raise UnknownFormatError(f"{self.path}: its files are {kind!r}, expected one of {list(READERS)}")
        self._reader = READERS[kind]
        for split in info["splits"]:
            if split.get("filepathTemplate", _TEMPLATE) != _TEMPLATE:
                raise UnknownFormatError(
                    f"{self.path}: its files are named {split['filepathTemplate']!r}, expected {_TEMPLATE!r}"
                )
            counts = split["shardLengths"]
            for number, count in enumerate(counts):
                name = f"{info['name']}-{split['name']}.{kind}-{number:05d}-of-{len(counts):05d}"
                file = os.path.join(self.path, check_name(place, name))
                refuse_elsewhere(self.path, file)
                yield str(split["name"]), file, int(count)


def _decoded(
    data: bytes, places: Mapping[str, tuple[int, int]], leaves: Mapping[str, Leaf], steps: int, where: str
) -> Iterator[tuple[str, Array]]:
    for name, leaf in leaves.items():
        of = f"{where}: {leaf.name!r}"
        with damage_named(of):
            yield name, decode(leaf, values_of(data, places.get(leaf.key, (0, 0))), steps, of)
