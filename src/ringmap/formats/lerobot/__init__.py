"""The LeRobot format: local datasets of version 3, read and written by their documented layout.

    meta/info.json                        features, paths, frames per second
    meta/episodes/chunk-*/file-*.parquet  one row per episode: length, which files, from when in a video
    meta/tasks.parquet                    task_index -> task
    data/chunk-*/file-*.parquet           one row per frame: many episodes in a file
    videos/<key>/chunk-*/file-*.mp4       many episodes in a file

pyarrow reads the tables, PyAV the videos (the extra `lerobot`); LeRobot's own package is not needed.
Source: LeRobot documentation, LeRobotDataset v3.0.
Rows of an episode are read in batches, straight into arrays: beside these a sixteenth of a column is held, or 64 KiB,
and a
page of the file.
Not here: writing (writer.py), frames (media/videos.py), older versions (LeRobot converts them), downloads.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import re
import string
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.errors import CorruptError, InputError, UnknownFormatError, UnsupportedError
from ringmap.formats.common.arrow import leaves
from ringmap.formats.common.log import FILM, Encoded
from ringmap.formats.common.source import DecodingSource, EpisodeSource, damage_named, offsets_of, steps_of
from ringmap.formats.common.untrusted import (
    LARGEST_PICTURE,
    check_row,
    kind_at,
    read_json,
    refuse_elsewhere,
    refuse_vast,
)
from ringmap.formats.media.images import Picture, decode_into, holds, picture_of
from ringmap.formats.media.videos import Decoder, copy_frames, decode_runs
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.disk.paths import local_path
from ringmap.storage.records.manifest import as_rate

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["BOXED", "STATS", "LeRobotSource", "StoredPictures"]


Array = np.ndarray[Any, np.dtype[Any]]

_STEPS_PER_BYTE = 100
"""Rows that a byte of Parquet may hold; the number of each takes a few bits."""

_COUNTERS = ("episode_index", "frame_index", "index")
"""Columns of the layout itself, which `meta/info.json` need not describe."""

_CHANNELS = (1, 3, 4)

_NUMBERS = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
"""The dtypes of features that are columns of numbers."""

BOXED = b"ringmap.boxed"
"""The key, in the schema of a file of rows, of the names of columns of shape (1,)."""

STATS = ("min", "max", "mean", "std", "count")

DEPTHS = ("mm", "codes")

_CODES = 1 << 12

_DEPTH = {"depth_min": 0.01, "depth_max": 10.0, "shift": 3.5, "use_log": True}
"""The parameters of codes of depth, in metres, and their defaults."""


@dataclass(frozen=True, slots=True)
class StoredPictures:
    """The pictures of an episode as they are stored.

    Attributes:
        encoded: a file for each, or a video of all.
        stats: their statistics, by `STATS`; empty where the set has none.
        info: what `info.json` says of how they are stored.
    """

    encoded: Encoded
    stats: dict[str, Any]
    info: dict[str, Any]


class LeRobotSource(DecodingSource, EpisodeSource):
    """The columns of a LeRobot dataset, as `StoredDataset` reads them.

    Args:
        path: the folder that holds `meta`.
        depth: "mm" gives videos of depth in millimetres, uint16; "codes" the numbers that are stored. Depth that is no
            code (of pictures, and of videos with more than 12 bits and no parameters) comes as it is stored, in either
            case.

    Raises:
        InputError: there is no such kind of depth.
        NotFoundError: there is no such folder.
        UnknownFormatError: it is of another version.
        UnsupportedError: its rows are stored with Lance.
        CorruptError: it is damaged.
    """

    reward_at = "same"
    """A row is a step: an observation, its action, and the reward of that."""

    _stats: list[dict[str, Any]] | None = None

    def __init__(self, path: str | os.PathLike[str], depth: str = "mm") -> None:
        if depth not in DEPTHS:
            raise InputError(f"{os.fspath(path)}: depth must be one of {DEPTHS}, got {depth!r}")
        self._depth = depth
        self._tables = _episode_files(local_path(path))
        super().__init__(path)
        with damage_named(self.path):
            info = os.path.join(self.path, "meta", "info.json")
            refuse_elsewhere(self.path, info)
            self._info = read_json(info)
            version = str(self._info.get("codebase_version"))
            if not version.startswith("v3."):
                raise UnknownFormatError(
                    f"{self.path}: is LeRobot {version}, expected v3; convert it with LeRobot's own script"
                )
            self.fps = _rate_in(self._info)
            self._refuse_lance()
            self._episodes = _episodes(self.path, self._tables, lambda name: not name.startswith("stats/"))
            self.lengths = np.array([e["length"] for e in self._episodes], np.int32)
            self._refuse_vast()
            self.offsets = offsets_of(self.lengths)
            self._tasks = _tasks(self.path)
            self._videos: dict[str, Array | None] = {}  # and what each code of depth stands for
            self.schema = self._columns()
            self._tell_left_out()
        self.episode_columns = ["tasks"] if any("tasks" in e for e in self._episodes) else []

    def _refuse_lance(self) -> None:
        """Raise if the rows are stored with Lance, as LeRobot can since 0.6 and the package lerobot-lancedb does."""
        tables = [n for n in os.listdir(self.path) if n.endswith(".lance")]
        said = self._info.get("storage_format") == "lance"
        if said or (tables and not os.path.isdir(os.path.join(self.path, "data"))):
            raise UnsupportedError(
                f"{self.path}: is a LeRobot dataset whose rows are stored with Lance "
                f"({', '.join(sorted(tables)) or 'storage_format'}), "
                "which is not read; write it with LeRobot's default storage, Parquet and mp4"
            )

    def _tell_left_out(self) -> None:
        """Warn of columns of the first file of rows that `meta/info.json` does not describe."""
        import pyarrow.parquet as pq

        first = next((e for e in self._episodes if e["length"]), None)
        if first is None:
            return
        names = pq.read_schema(self._rows_of(first)).names
        others = [name for name in names if name not in (*self._info["features"], *_COUNTERS)]
        if others:
            warnings.warn(
                f"{self.path}: left out, as meta/info.json does not describe them: {others}",
                stacklevel=2,
            )

    def _witnesses(self) -> Sequence[str]:
        return self._tables

    def _refuse_vast(self) -> None:
        """Raise if the episodes have more steps than the files of rows can hold."""
        steps = int(self.lengths.sum(dtype=np.int64))
        if (self.lengths < 0).any():
            raise CorruptError(f"{self.path}: an episode has {int(self.lengths.min())} steps")
        stored = 0
        for folder, _, names in os.walk(os.path.join(self.path, "data")):
            for name in names:
                path = os.path.join(folder, name)
                stored += 0 if kind_at(path) else os.stat(path).st_size
        refuse_vast(f"{self.path}: rows of all episodes", steps, stored, _STEPS_PER_BYTE)

    def _file(self, template: str, **names: Any) -> str:
        """Return the path that a template of `info.json` stands for; nothing outside of the folder is one."""
        given = self._info[template]
        if not isinstance(given, str) or len(given) > 1000:
            raise CorruptError(f"{self.path}: {template} in meta/info.json is {given!r}, expected a path")
        for _, field, spec, conversion in string.Formatter().parse(given):
            # Formats can read attributes of what they are given, and pad to any width.
            plain = field is None or (field in names and not conversion and re.fullmatch("0?[0-9]?d?", spec or ""))
            if not plain:
                raise CorruptError(
                    f"{self.path}: {template} in meta/info.json is {given!r}, expected fields as in "
                    "'data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet'"
                )
        made = os.path.join(self.path, given.format(**names))
        refuse_elsewhere(self.path, made)
        return made

    def _columns(self) -> Schema:
        specs, self.unsupported, boxed = [], dict[str, str](), self._boxed()
        for name, feature in self._info["features"].items():
            shape, dtype = tuple(feature["shape"]), feature["dtype"]
            if dtype in ("video", "image"):
                try:
                    height, width, channels = _image_shape(shape, feature.get("names"))
                    kind, codes = self._pictures(name, feature)
                except UnsupportedError as error:
                    self.unsupported[name] = f"of pictures that are not read ({error})"
                    continue
                specs.append(ColumnSpec(name, (height, width, channels), kind))
                if dtype == "video":
                    self._videos[name] = codes
            elif dtype == "string":
                specs.append(ColumnSpec(name, (), np.dtype("U")))
            elif dtype in _NUMBERS:
                shape = () if shape == (1,) and name not in boxed else shape
                specs.append(ColumnSpec(name, shape, np.dtype(dtype)))
            else:
                self.unsupported[name] = f"of LeRobot's dtype {dtype!r}, which no column is"
        self._in_rows = {spec.name for spec in specs} - self._videos.keys()
        features = self._info["features"]
        self._names_tasks = bool(self._tasks) and "task_index" in features and "task" not in features
        if self._names_tasks:
            width = max(map(len, self._tasks.values()), default=1)
            specs.append(ColumnSpec("task", (), np.dtype(f"<U{max(width, 1)}")))
        for spec in specs:
            check_row(self.path, spec.name, spec.row_nbytes)
            if min(spec.shape, default=0) < 0 or (
                self._info["features"].get(spec.name, {}).get("dtype") in ("video", "image")
                and math.prod(spec.shape) > 4 * LARGEST_PICTURE
            ):
                raise CorruptError(f"{self.path}: column {spec}: no such pictures are read")
        return Schema(tuple(specs))

    def _pictures(self, name: str, feature: Mapping[str, Any]) -> tuple[np.dtype[Any], Array | None]:
        """Return the dtype of pictures, by the header of the first one, and millimetres for each code where they are
        codes.

        `info.json` does not say the dtype. What can't be opened counts as uint8 here, and is refused when it is read.
        """
        first = next((e for e in self._episodes if e["length"]), None)
        try:
            if first is None:
                return np.dtype(np.uint8), None
            if feature["dtype"] == "image":
                return self._first_picture(name, first).dtype, None
            video = Decoder(self._video_of(name, first))
            try:
                kind, bits = video.picture.dtype, video.bits
            finally:
                video.close()
        except (CorruptError, OSError, ImportError, LookupError):
            return np.dtype(np.uint8), None
        return kind, depth_table(feature, bits) if self._depth == "mm" else None

    def _boxed(self) -> list[str]:
        """Return the columns of shape (1,), for which LeRobot has no other word than for numbers: our writer names them
        in the rows' files."""
        import pyarrow.parquet as pq

        first = next((e for e in self._episodes if e["length"]), None)
        with contextlib.suppress(CorruptError, OSError, LookupError, ValueError, TypeError):
            if first is not None:
                place = {key: first[f"data/{key}"] for key in ("chunk_index", "file_index")}
                path = self._file("data_path", **place)
                _refuse_rows(path)
                found = json.loads((pq.read_schema(path).metadata or {}).get(BOXED, b"[]"))
                return [name for name in found if isinstance(name, str)]
        return []

    def _first_picture(self, name: str, episode: Mapping[str, Any]) -> Picture:
        import pyarrow.parquet as pq

        path = self._rows_of(episode)
        _refuse_rows(path)
        # A buffer: else the column's bytes in the group are read at once.
        with pq.ParquetFile(path, buffer_size=1 << 16) as file:
            (row, *_) = next(file.iter_batches(1, columns=[name])).column(0).to_pylist()
        return picture_of(row["bytes"], f"{path}: {name}")

    def _rows_of(self, episode: Mapping[str, Any]) -> str:
        """Return the path of the file that an episode's rows are in."""
        return self._file(
            "data_path",
            chunk_index=episode["data/chunk_index"],
            file_index=episode["data/file_index"],
        )

    def _video_of(self, name: str, episode: Mapping[str, Any]) -> str:
        key = f"videos/{name}"
        return self._file(
            "video_path",
            video_key=name,
            chunk_index=episode[f"{key}/chunk_index"],
            file_index=episode[f"{key}/file_index"],
        )

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        specs = {spec.name: spec for spec in self.schema.columns}
        plain = [name for name in columns if name not in self._videos]
        found = super()._windows(handle, plain, starts, length, stride) if plain else {}
        rows = steps_of(starts, length, stride)
        for name in columns:
            if name in self._videos:
                found[name] = self._frames(specs[name], rows.ravel()).reshape(*rows.shape, *specs[name].shape)
        return {name: found[name] for name in columns}

    def _frames(self, spec: ColumnSpec, rows: Array) -> Array:
        unique, order = np.unique(rows, return_inverse=True)
        out = np.empty((len(unique), *spec.shape), spec.dtype)
        if not len(unique):
            return out
        fps = float(self._info["fps"])
        episodes = np.searchsorted(self.offsets, unique, side="right") - 1
        key = f"videos/{spec.name}"
        asked, back = np.unique(episodes, return_inverse=True)
        starts = [self._episodes[e][f"{key}/from_timestamp"] for e in asked.tolist()]
        first = np.array([round(start * fps) for start in starts], np.int64)
        frames = first[back] + unique - self.offsets[episodes]

        def path_of(episode: int) -> str:
            return self._video_of(spec.name, self._episodes[episode])

        decode_runs(self._decoders, out, episodes, frames, path_of)
        for path in {path_of(episode) for episode in np.unique(episodes).tolist()}:
            self._refuse_newer(path)
        codes = self._videos[spec.name]
        if codes is not None:
            if out.max(initial=0) >= len(codes):
                raise CorruptError(
                    f"{self.path}: column {spec.name!r} has a code of depth of {out.max()}, expected at most "
                    f"{len(codes) - 1}; "
                    'depth="codes" gives what is stored'
                )
            out = codes[out]
        return out[order]

    def pictures(self) -> dict[str, str]:
        """Return the columns of pictures that `stored` has -> the dtypes of their features."""
        features = self._info["features"]
        kinds = {spec.name: features[spec.name]["dtype"] for spec in self.schema.columns if spec.name in features}
        held = [spec.name for spec in self.schema.columns if holds("jpeg", spec)]
        return {name: kinds[name] for name in held if kinds.get(name) in ("video", "image")}

    def stored(self, episode: int, name: str) -> StoredPictures | None:
        """Return the pictures of an episode as they are stored; None of a part of a video that can't be copied alone.

        Raises:
            CorruptError, ReplacedError: as for `windows`.
        """
        with damage_named(self.path):
            self._check()
            row, feature = self._episodes[episode], self._info["features"][name]
            if name in self._videos:
                path = self._video_of(name, row)
                first = round(row[f"videos/{name}/from_timestamp"] * float(self._info["fps"]))
                video = copy_frames(self._decoders, path, first, row["length"])
                encoded = None if video is None else Encoded([video], FILM)
            else:
                path = self._rows_of(row)
                encoded = Encoded(self._picture_files(name, row, path), "png")
            self._refuse_newer(path)
            if encoded is None:
                return None
            if self._stats is None:
                self._stats = _episodes(self.path, self._tables, lambda n: n.startswith(("stats/", "episode_index")))
            found = {key: self._stats[episode].get(f"stats/{name}/{key}") for key in STATS}
            self._check()
            return StoredPictures(encoded, {} if None in found.values() else found, _info_of(feature))

    def _picture_files(self, name: str, row: Mapping[str, Any], path: str) -> list[bytes]:
        _refuse_rows(path)
        rows = EpisodeRows(path, row["episode_index"], row["length"])
        try:
            spec = next(spec for spec in self.schema.columns if spec.name == name)
            return [file for _, files in rows.files(spec) for file in files]
        finally:
            rows.close()

    def _load(self, file: Any, number: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return columns of an episode, none of them a video."""
        named = self._names_tasks and "task" in columns
        wanted = {*columns, "task_index"} if named else set(columns)
        row = self._episodes[number]
        path = self._rows_of(row)
        _refuse_rows(path)
        rows = EpisodeRows(path, row["episode_index"], row["length"])
        try:
            found = {
                spec.name: self._column(rows, spec)
                for spec in self.schema.columns
                if spec.name in self._in_rows & wanted
            }
        finally:
            rows.close()
        self._refuse_newer(path)
        if named:
            tasks = [self._tasks[int(i)] for i in found["task_index"]]
            found["task"] = np.array(tasks, str)
        return found

    def _column(self, rows: EpisodeRows, spec: ColumnSpec) -> Array:
        if self._info["features"][spec.name]["dtype"] == "image":
            images = np.empty((rows.length, *spec.shape), spec.dtype)
            for start, files in rows.files(spec):
                decode_into(images[start : start + len(files)], files, spec)
            return images
        return rows.texts(spec) if spec.dtype.kind == "U" else rows.column(spec)

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        tasks = self._episodes[episode].get("tasks")
        return {} if tasks is None else {"tasks": np.array([str(t) for t in tasks])}


def depth_table(feature: Mapping[str, Any], bits: int) -> Array | None:
    """Return the millimetres, uint16, that each code of a video of depth stands for; None where its numbers are no
    codes.

    Raises:
        CorruptError: the parameters make no sense.

    Source: LeRobot 0.6, `lerobot.datasets.depth_utils.dequantize_depth` and `lerobot.configs.video.is_depth_map`.
    """
    info = _info_of(feature)
    given = {name: info[f"video.{name}"] for name in _DEPTH if info.get(f"video.{name}") is not None}
    if not (info.get("is_depth_map") or info.get("video.is_depth_map")) or bits <= 8 or (bits > 12 and not given):
        return None
    told = {**_DEPTH, **given}
    least, most, shift = (float(told[name]) for name in ("depth_min", "depth_max", "shift"))
    low, high = least, most
    if told["use_log"]:
        if not 0 < least + shift < most + shift:
            raise CorruptError(f"a video of depth has {told}, expected 0 < depth_min + shift < depth_max + shift")
        low, high = math.log(least + shift), math.log(most + shift)
    metres = (np.arange(_CODES) * ((high - low) / (_CODES - 1))).astype(np.float32) + np.float32(low)
    metres = np.clip(np.exp(metres) - np.float32(shift) if told["use_log"] else metres, least, most)
    table: Array = np.rint(metres * np.float32(1000)).clip(0, 65535).astype(np.uint16)
    return table


def _info_of(feature: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of how a feature's pictures are stored, in the older place too."""
    old = feature.get("video_info")
    return {**(old if isinstance(old, dict) else {}), **(feature.get("info") or {})}


def _rate_in(info: Any) -> Fraction | None:
    try:
        return as_rate(info.get("fps"))
    except ValueError:
        return None


def _episode_files(path: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(path), "meta/episodes/*/*.parquet")))


def _episodes(path: str, files: list[str], wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the rows of `meta/episodes`, of these columns, in the order of the episodes."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for file in files:
        refuse_elsewhere(path, file)
        _refuse_rows(file)
        names = list(filter(wanted, pq.read_schema(file).names))
        rows += pq.read_table(file, columns=names).to_pylist()
    return sorted(rows, key=lambda row: row["episode_index"])


def _tasks(path: str) -> dict[int, str]:
    import pyarrow.parquet as pq

    file = os.path.join(path, "meta", "tasks.parquet")
    if kind_at(file) == "missing":
        return {}
    refuse_elsewhere(path, file)
    _refuse_rows(file)
    table = pq.read_table(file).to_pydict()
    texts = next((v for k, v in table.items() if k != "task_index"), None)
    if texts is None:
        return {}
    return {int(i): str(t) for i, t in zip(table["task_index"], texts, strict=True)}


def _refuse_rows(path: str) -> None:
    """Raise if a file declares more rows than its bytes can hold."""
    import pyarrow.parquet as pq

    rows = pq.read_metadata(path).num_rows
    refuse_vast(f"{path}: rows", rows, os.stat(path).st_size, _STEPS_PER_BYTE)


def _image_shape(shape: tuple[int, ...], names: Any) -> tuple[int, int, int]:
    """Return height, width, channels, whichever way round the file has them: by the names of its axes, else by their
    sizes."""
    if len(shape) == 2:
        return *shape, 1
    if len(shape) != 3:
        raise UnsupportedError(f"of shape {shape}, expected height, width and channels")
    axes = [str(name)[:1].lower() for name in names] if isinstance(names, list) else []
    if sorted(axes) == ["c", "h", "w"]:
        sizes = dict(zip(axes, shape, strict=True))
        if sizes["c"] in _CHANNELS:  # else the names are those of another order
            return sizes["h"], sizes["w"], sizes["c"]
    if shape[0] in _CHANNELS and shape[2] not in _CHANNELS:
        return shape[1], shape[2], shape[0]
    return shape


_INDEX = "episode_index"

_BUFFER_NBYTES = 1 << 16
"""Read at once: without a buffer a column's bytes in the whole row group are."""

_BATCH_NBYTES = 1 << 16


class EpisodeRows:
    """The rows of an episode in an open file.

    Raises:
        CorruptError: the file has another number of rows of it.
    """

    def __init__(self, path: str, episode: int, length: int) -> None:
        import pyarrow.parquet as pq

        self.length = length
        """Its steps."""
        self._path = path
        self._file = pq.ParquetFile(path, buffer_size=_BUFFER_NBYTES)
        self._runs = list(_runs(self._file, episode))
        rows = sum(stop - start for _, start, stop in self._runs)
        if rows != length:
            self.close()
            raise CorruptError(f"{path}: {rows} rows of episode {episode}, expected {length}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def names(self) -> list[str]:
        """The names of the columns in the file."""
        names: list[str] = self._file.schema_arrow.names
        return names

    def column(self, spec: ColumnSpec) -> Array:
        """Return the values of a column of numbers, `(T, ...)`.

        Raises:
            UnsupportedError: a value is missing, or lists are not of one length; the file has other numbers than it
                says.
        """
        out = np.empty((self.length, *spec.shape), spec.dtype)
        for start, run in self._parts(spec.name, spec.row_nbytes):
            rows = len(run)
            values = leaves(run, spec, self._path).to_numpy(zero_copy_only=False)
            part = out[start : start + rows].reshape(-1)
            if len(values) != len(part):
                raise UnsupportedError(
                    f"{self._path}: column {spec.name!r} has lists of another length than {spec.shape}; leave it out: "
                    "keys_to_load="
                )
            part[:] = values.astype(spec.dtype, copy=False)
            if values.dtype != spec.dtype and not np.array_equal(
                part.astype(values.dtype), values, equal_nan=values.dtype.kind == "f"
            ):
                raise UnsupportedError(
                    f"{self._path}: column {spec.name!r} is of {values.dtype}, and meta/info.json says {spec.dtype}, "
                    "which does not hold its values; leave it out: keys_to_load="
                )
        return out

    def texts(self, spec: ColumnSpec) -> Array:
        """Return a column of text, as wide as its longest."""
        runs = (leaves(run, spec, self._path).to_pylist() for _, run in self._parts(spec.name, 1))
        return np.array(list(chain.from_iterable(runs)), str)

    def files(self, spec: ColumnSpec) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the bytes of pictures, each with the step that its run begins at."""
        for start, part in self._parts(spec.name, spec.row_nbytes):
            yield start, part.field("bytes").to_pylist()

    def _parts(self, name: str, nbytes: int) -> Iterator[tuple[int, pa.Array]]:
        """Yield the values of a column in runs of steps, each with the step that it begins at."""
        at = 0
        most = max(1, self.length // 16, _BATCH_NBYTES // max(1, nbytes))
        for group, start, stop in self._runs:
            row = 0
            for batch in self._file.iter_batches(most, row_groups=[group], columns=[name]):
                first, last = max(start, row), min(stop, row + len(batch))
                if first < last:
                    yield at, batch.column(name).slice(first - row, last - first)
                    at += last - first
                row += len(batch)
                if row >= stop:
                    break


def _runs(file: pq.ParquetFile, episode: int) -> Iterator[tuple[int, int, int]]:
    """Yield row group, first row in it and the row after the last, of the runs of rows of an episode."""
    footer = file.metadata
    paths = (
        [footer.row_group(0).column(c).path_in_schema for c in range(footer.num_columns)]
        if footer.num_row_groups
        else []
    )
    for group in range(footer.num_row_groups):
        known = footer.row_group(group).column(paths.index(_INDEX)).statistics
        if known is not None and known.has_min_max and not known.min <= episode <= known.max:
            continue
        numbers = file.read_row_group(group, columns=[_INDEX]).column(_INDEX).to_numpy()
        there = np.flatnonzero(numbers == episode)
        for run in np.split(there, np.flatnonzero(np.diff(there) != 1) + 1):
            if len(run):
                yield group, int(run[0]), int(run[-1]) + 1
