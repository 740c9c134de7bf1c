"""The RLDS format: data sets of episodes that TensorFlow Datasets wrote (Open X-Embodiment), read without TensorFlow.

    features.json                             names, shapes, dtypes, encodings
    dataset_info.json                         name, splits, how many records each file has
    NAME-SPLIT.tfrecord-00000-of-00002        one record an episode, in all splits
    NAME-SPLIT.array_record-00000-of-00002    ... or these; they need the extra `rlds`

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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, UnknownFormatError
from ringmap.formats.common.directory import DirectorySource, damage_named, offsets_of
from ringmap.formats.common.episode_cache import EpisodeCache
from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.common.untrusted import (
    check_name,
    check_row,
    kind_at,
    read_json,
    refuse_elsewhere,
    refuse_vast,
)
from ringmap.formats.registry import register_format
from ringmap.formats.rlds.example import Readable, features_of, values_of
from ringmap.formats.rlds.features import TEXT, Leaf, decode, leaves_of, sized
from ringmap.formats.rlds.records import READERS, Record
from ringmap.storage.columns.schema import ColumnSpec, Schema

__all__ = ["Rlds", "RldsSource"]

Array = np.ndarray[Any, np.dtype[Any]]

_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"

log = logging.getLogger("ringmap")


@register_format
class Rlds(StoredFormat):
    """RLDS data sets. Read only."""

    name = "rlds"
    source = "ringmap.formats.rlds:RldsSource"

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


class RldsSource(DirectorySource):
    """The columns of an RLDS data set, as `StoredDataset` reads them.

    Args:
        path: the folder that holds `features.json`.

    Raises:
        NotFoundError: there is no such folder.
        UnknownFormatError: it is no RLDS data set, or its files are of another kind.
        CorruptError: it is damaged.
        MissingExtraError: its files are ArrayRecord, and the package is not installed.

    Cost: opening counts the steps of each record: of TFRecord files it reads the names of features, texts, and one
    column of numbers, of ArrayRecord files all. A read loads whole episodes, which are kept, pictures only if they are
    asked for.
    """

    reward_at = "same"
    """A row is a step: an observation, its action, and the reward of that."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if not Rlds.detect(self.path):
            raise UnknownFormatError(
                f"{self.path}: is no RLDS data set: it has no dataset_info.json, or no features.json with steps"
            )
        with damage_named(self.path):
            self._columns, self._data = self._features()
            counters = [leaf for leaf in self._columns.values() if leaf.per_step > 0]
            if not counters:
                raise CorruptError(f"{self.path}: no feature tells how many steps an episode has")
            counter = min(counters, key=lambda leaf: (leaf.kind != "number", leaf.per_step))
            self._records: list[Record] = []
            self._splits: list[str] = []
            lengths: list[int] = []
            for split, file, told in self._files():
                with damage_named(file):
                    before = len(lengths)
                    for record, data in self._reader.scan(file):
                        places = features_of(data, record.size)
                        self._measure(data, places, file)
                        steps = len(values_of(data, places.get(counter.key, (0, 0)))) // counter.per_step
                        if not steps:
                            self._reader.read(record)  # what says so is looked at, by its checksum
                        if counter.key not in places:
                            raise CorruptError(f"record {len(lengths) - before} has no feature {counter.key!r}")
                        lengths.append(steps)
                        self._records.append(record)
                    count = len(lengths) - before
                    if count != told:
                        raise CorruptError(f"{file}: has {count} records, expected {told}, as dataset_info.json says")
                    self._splits += [split] * count
            self.lengths = np.array(lengths, np.int32)
            self._refuse_wide()
        self.offsets = offsets_of(self.lengths)
        specs = [leaf.spec(name) for name, leaf in self._columns.items()] if lengths else []
        if "terminated" in self._columns and lengths:
            specs.append(ColumnSpec("truncated", (), np.dtype(bool)))
        self.schema = Schema(tuple(specs))
        self.episode_columns = [*(leaf.name for leaf in self._data), "split"]

    def _witnesses(self) -> Sequence[str]:
        return [os.path.join(self.path, name) for name in ("dataset_info.json", "features.json")]

    def _features(self) -> tuple[dict[str, Leaf], list[Leaf]]:
        """Return the columns, and the leaves that are episode data."""
        file = os.path.join(self.path, "features.json")
        refuse_elsewhere(self.path, file)
        columns, data = {}, []
        for in_steps, leaf in leaves_of(read_json(file)):
            check_row(file, leaf.name, abs(leaf.spec("").row_nbytes))
            if not leaf.reads:
                log.warning("%s: feature %r is left out: a %s is not read", self.path, leaf.name, leaf.kind)
            elif not in_steps:
                data.append(leaf)
            else:
                columns[leaf.name.removeprefix("steps/")] = leaf
        if "terminated" in columns or "truncated" in columns:
            return columns, data
        return {"terminated" if n == "is_terminal" else n: leaf for n, leaf in columns.items()}, data

    def _files(self) -> Iterator[tuple[str, str, int]]:
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

    def _measure(self, data: Readable, places: Mapping[str, tuple[int, int]], where: str) -> None:
        """Give pictures of any size that of the first one, and texts the width of the longest."""
        for name, leaf in self._columns.items():
            if leaf.kind == "text" or -1 in leaf.shape:
                values = values_of(data, places.get(leaf.key, (0, 0)))
                self._columns[name] = sized(leaf, values, where)

    def _refuse_wide(self) -> None:
        """Raise if the texts of an episode, each as wide as the longest of all, take more than the records are
        worth."""
        stored = sum(record.size for record in self._records)
        for name, leaf in self._columns.items():
            if leaf.kind == "text":
                nbytes = int(self.lengths.max(initial=0)) * leaf.spec(name).row_nbytes
                refuse_vast(f"{self.path}: texts {name!r} of an episode", nbytes, stored, TEXT)

    def _open(self) -> Any:
        return tuple(EpisodeCache(partial(self._load, pictures)) for pictures in (False, True))

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for cache, pictures in zip(handle, (False, True), strict=True):
            names = [name for name in columns if self._is_picture(name) == pictures]
            if names:
                found |= cache.windows(names, self.offsets, starts, length, stride, self.schema)
        return {name: found[name] for name in columns}

    def _is_picture(self, name: str) -> bool:
        return name in self._columns and self._columns[name].kind == "picture"

    def _load(self, pictures: bool, episode: int, _: Sequence[str]) -> dict[str, Array]:
        steps = int(self.lengths[episode])
        leaves = {n: leaf for n, leaf in self._columns.items() if self._is_picture(n) == pictures}
        found = dict(self._decoded(episode, leaves, steps))
        if "terminated" in found:
            found["truncated"] = np.arange(steps) == steps - 1
            found["truncated"] &= ~found["terminated"].astype(bool)
        return found

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        found = self._decoded(episode, {leaf.name: leaf for leaf in self._data}, 1)
        data = {n: rows[0] if rows.ndim > 1 else rows[0].item() for n, rows in found}
        return {**data, "split": self._splits[episode]}

    def _decoded(self, episode: int, leaves: Mapping[str, Leaf], steps: int) -> Iterator[tuple[str, Array]]:
        record = self._records[episode]
        data = self._reader.read(record)
        self._refuse_newer(record.file)
        with damage_named(record.file):
            places = features_of(data, len(data))
        for name, leaf in leaves.items():
            if leaf.key not in places and leaf in self._data:  # it is optional
                continue
            where = f"{record.file}: {leaf.name!r} of episode {episode}"
            with damage_named(where):
                values = values_of(data, places.get(leaf.key, (0, 0)))
                if leaf.kind == "picture" and -1 in leaf.shape:
                    leaf = sized(leaf, values, where)
                rows = decode(leaf, values, steps, where)
            yield name, rows
