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
Not here: writing (writer.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.errors import CorruptError, UnsupportedError
from ringmap.formats.common.directory import (
    DirectorySource,
    damage_named,
    offsets_of,
    stamp_of,
    tell_left_out,
)
from ringmap.formats.common.episode_cache import EpisodeCache
from ringmap.formats.common.hdf5_trial import loaded
from ringmap.formats.common.safe_hdf5 import datasets, group_of, has_own, is_text, member_of, root_fits
from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.common.untrusted import LARGEST_ROW, kind_at
from ringmap.formats.registry import register_format
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.disk.system import NotAFileError

__all__ = ["LENGTH", "SPLITS", "THEIRS", "Robomimic", "RobomimicSource"]

Array = np.ndarray[Any, np.dtype[Any]]

THEIRS = {"action": "actions", "reward": "rewards", "done": "dones"}
"""Column -> dataset of a demo, where the names differ."""

_OURS = {theirs: name for name, theirs in THEIRS.items()}

SPLITS = "mask"
"""The name in an episode's data of the splits that it is in."""

LENGTH = "num_samples"
"""The attribute of a demo with the number of its steps."""

_TEXT = 1000
"""Bytes that a byte of the file may become as text of one width."""


@register_format
class Robomimic(StoredFormat):
    """Files of robomimic. Lossless."""

    name = "robomimic"
    lossless = True
    source = "ringmap.formats.robomimic:RobomimicSource"
    writer = "ringmap.formats.robomimic.writer:RobomimicWriter"
    appends = False

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the group `data` with its attribute `total`, or with demos; there is no table of episodes beside
        it."""
        return root_fits(path, _has_demos)


def _has_demos(root: Any) -> bool:
    import h5py

    if "ep_len" in root or not has_own(root, "data"):
        return False
    data = root["data"]
    return isinstance(data, h5py.Group) and ("total" in data.attrs or any(name.startswith("demo_") for name in data))


class RobomimicSource(DirectorySource):
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
            file = self._handle()[0]
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

    def _open(self) -> Any:
        import h5py

        if os.path.exists(self.path) and not os.path.isfile(self.path):  # a pipe would never end
            raise NotAFileError(self.path, kind_at(os.path.realpath(self.path)))
        file = h5py.File(self.path, "r")

        def load(number: int, columns: Sequence[str]) -> dict[str, Array]:
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

        return file, EpisodeCache(load)

    def _witnesses(self) -> Sequence[str]:
        return (self.path,)

    def _kept(self, handle: Any) -> Any:
        return stamp_of(os.fstat(handle[0].id.get_vfd_handle()))

    def _release(self, handle: Any) -> None:
        handle[0].close()

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        cache: EpisodeCache = handle[1]
        return cache.windows(columns, self.offsets, starts, length, stride, self.schema)

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        name = self._demos[episode]
        demo = handle[0]["data"][name]
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
    width = max(map(len, texts.ravel().tolist()), default=0)
    nbytes, stored = 4 * width * texts.size, os.stat(column.file.filename).st_size
    if nbytes > max(LARGEST_ROW, _TEXT * stored):
        raise CorruptError(
            f"{column.file.filename}: {column.name}: texts would take {nbytes:,} bytes, and the file has {stored:,}"
        )
    found: Array = texts.astype(str)
    return found
