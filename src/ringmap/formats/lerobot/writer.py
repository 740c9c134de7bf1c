"""The writing side of a LeRobot dataset of version 3.

    a group of episodes  ->  videos/<key>/..., a file each    data/.../file-N.parquet
    all of them          ->  meta/episodes, tasks, stats, info

Invariants: episodes are logged as they are read back; a video is encoded once, when its episode is given. Of an
episode of another LeRobot set (`copier`), videos and pictures are copied as they are stored.
Source: LeRobot documentation, LeRobotDataset v3.0.
Not here: the log (common/writer.py), steps out of rows (common/transitions.py), reading (__init__.py).
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ringmap.clips.facts import Facts, check_fps, check_reward_at
from ringmap.errors import InputError
from ringmap.formats.builtin import LeRobot
from ringmap.formats.common import disk
from ringmap.formats.common.arrow import to_arrow
from ringmap.formats.common.log import FILM, Encoded, Record, groups_of
from ringmap.formats.common.refusals import Refused
from ringmap.formats.common.transitions import OUTCOMES, Steps, is_loose_flag, refused_flag
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.episode import CheckedEpisode
from ringmap.formats.lerobot import BOXED, STATS, LeRobotSource, StoredPictures
from ringmap.formats.media.images import encode, holds
from ringmap.formats.media.videos import Encoding, encode_video
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.records.manifest import rate_text

__all__ = ["LeRobotWriter", "copier"]

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 1000
_PIECE_NBYTES = 8 << 20
_USUAL_FPS = Fraction(30)
_PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_COUNTS = ("frame_index", "episode_index", "index", "task_index")
_OWN = ("timestamp", *_COUNTS, "task")
_TASKS = ("task", "tasks")
_PICTURES = "_lerobot_pictures"
"""The name in an episode's data of pictures that are copied as they are stored."""
_COPIED_WITH = {"mode", "progress", "task", "columns", "robot_type"}
"""The writer's options that say nothing about how pictures are encoded."""
_TOLERANCE_S = 1e-4
"""Seconds by which LeRobot's loader lets a timestamp differ from step / fps."""


class LeRobotWriter(EpisodeWriter):
    """Writes episodes to a LeRobot dataset of version 3. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. A column gets the
    name
    that LeRobot expects: obs/arm -> observation.arm, obs -> observation.state, pictures -> observation.images.NAME,
    reward -> next.reward, a/b -> a.b. The task of an episode is its column `task`, its data `task`, or the option;
    there is no place for other data. The columns `frame_index, episode_index, index, task_index` are counted anew, and
    a `timestamp` of step / fps with them, which a log message says; another timestamp needs another name
    (`columns={"timestamp": "measured_at"}`).

    Args:
        fps: frames per second, an integer; None: the rate of the source, 30 where that is not known.
        task: of episodes that name none.
        columns: column -> its name in the dataset, where that is to be another.
        videos: whether pictures of even sizes become H.264 videos, which are lossy; False: PNG in the rows.
        crf: quality of videos, 0 to 51: less is better, and larger.
        reward_at: where rewards and flags stand: "next", with the observation that came with them, or "same", with the
            action; None: as the source of the episodes says, "next" if nothing is said. Ignored where there are next
            observations, or a
            column `frame_index`: then each row is a frame.
        final_row: whether the last row of an episode is an observation alone, which is left out; None: if rewards stand
            at the "next" row.
        robot_type: as LeRobot stores it.

    Raises:
        InputError: an option is wrong, or the rate of the source is no integer.

    Cost: the files are written at the end of the block, out of a log that takes as much room.
    """

    format = LeRobot
    files = r"(meta|data|videos|images)/.*"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "error",
        fps: Any = None,
        task: str = "",
        columns: Mapping[str, str] | None = None,
        videos: bool = True,
        crf: int = 18,
        reward_at: str | None = None,
        final_row: bool | None = None,
        robot_type: str | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if not 0 <= crf <= 51:
            raise InputError(f"LeRobotWriter: crf must be 0 to 51, got {crf}")
        self._named = check_fps("LeRobotWriter", fps)
        self._fps = _frame_rate(self._named, "LeRobotWriter")
        self._task, self._videos, self._crf = task, videos, crf
        self._names, self._final_row, self._robot = dict(columns or {}), final_row, robot_type
        self._rewards = check_reward_at("LeRobotWriter", reward_at)
        self._tasks: dict[str, int] = {}
        self._copied: dict[str, StoredPictures] = {}  # of the last episode
        self._fresh: tuple[int, dict[str, int]] = 0, {}  # the tasks of the last episode, which count once it is written

    # -- episodes ----------------------------------------------------------------------------

    def expect_facts(self, facts: Facts, where: str) -> None:
        """Note what is known of the episodes, and take their rate, unless the option names one."""
        super().expect_facts(facts, where)
        self._fps = _frame_rate(self._named or facts.fps, where)

    def refuses(self, name: str, rows: Array) -> str | None:
        """Return why a column can't be held."""
        if name in _OWN and name not in self._names:
            return self._refuses_own(name, rows)
        if why := refused_flag(name, rows):
            return why
        kind, shape = rows.dtype.kind, rows.shape[1:]
        if kind not in "biufU" or (kind == "U" and shape) or len(shape) > 5 or 0 in shape:
            return "LeRobot has no feature for it"
        if not all(map(_is_utf8, (name, *(rows.tolist() if kind == "U" else ())))):
            return "LeRobot's files hold texts and names of UTF-8 alone"
        new = self._names.get(name) or _name_of(name, rows)
        if "/" in new or new in _OWN:
            return f"it would be {new!r}, which is no name of a feature; choose one: columns={{...}}"
        return None

    def _refuses_own(self, name: str, rows: Array) -> str | None:
        """Return why a column with a name that LeRobot fills itself is not what it fills in; None if it is."""
        other = f"choose another name, columns={{{name!r}: ...}}"
        if name == "task":
            good = rows.dtype.kind == "U" and rows.ndim == 1 and all(map(_is_utf8, rows.tolist()))
            return None if good else f"a task is one text a step, of UTF-8; {other}"
        if rows.size != len(rows) or rows.dtype.kind not in "biuf":
            return f"LeRobot has a number there; {other}"
        values = rows.reshape(len(rows))
        if name == "timestamp":
            apart = np.abs(values.astype(np.float64) - np.arange(len(values)) / float(self._fps))
            if (apart <= _TOLERANCE_S).all():
                return None
            step = int(np.argmax(~(apart <= _TOLERANCE_S)))
            return (
                f"it is {values[step]} at step {step}, and LeRobot's loader wants {step} / fps = "
                f"{step / float(self._fps):g}, within {_TOLERANCE_S} s; pass the right fps=, or {other}"
            )
        counts = values.dtype.kind in "iu" and (np.diff(values) == (name in ("frame_index", "index"))).all()
        return None if counts or name == "task_index" else f"LeRobot counts there, and this is no such count; {other}"

    def refuses_data(self, name: str, value: Any) -> str | None:
        """Return why a datum of an episode can't be held."""
        if name == _PICTURES:
            return None
        if name not in _TASKS:
            return "LeRobot has a place for the task alone"
        texts = [] if value is None else np.atleast_1d(np.asarray(value)).reshape(-1).tolist()
        good = all(isinstance(text, str) and _is_utf8(text) for text in texts)
        return None if good else "a task is text of UTF-8"

    def looks_at(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Return whether a column is of text, which may be no UTF-8, a flag, or one that LeRobot fills in itself."""
        own = name in _OWN and name not in self._names
        return own or dtype.kind == "U" or is_loose_flag(name, dtype)

    def layout(
        self, columns: dict[str, Array], data: dict[str, Any], refused: Refused, where: str
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the steps of an episode, as they are read back."""
        following = [n for n in columns if n.startswith("next_") and n[5:] in columns]
        own = [n for n in columns if n in _OWN and n not in self._names]
        placed = "same" if "frame_index" in own else self.reward_at(self._rewards)
        steps = Steps(columns, [n[5:] for n in following], placed, self._final_row, where)
        stored: dict[str, Array] = {}
        source: dict[str, str] = {}
        copied, self._copied = data.get(_PICTURES, {}), {}
        for name in columns:
            if name in following or name in own:
                continue
            new = self._names.get(name) or _name_of(name, columns[name])
            if new in source:
                refused.add(
                    name,
                    f"column {name!r}: it would be {new!r}, and so would {source[new]!r}; choose another name: "
                    f"columns={{...}}",
                )
            source[new] = name
            if name in copied:
                self._copied[new] = copied[name]
            rows = steps.outcome(name) if name in OUTCOMES else steps.now(name)
            stored[new] = rows
        count = steps.length
        tasks = columns["task"][:count] if "task" in own else [str(_task_of(data) or self._task)] * count
        for name in [n for n in _TASKS if n in data and "task" not in own]:
            if np.size(data[name]) != 1 or str(np.atleast_1d(data[name])[0]) != tasks[0]:
                what = f"episode data {name!r}: an episode has one task, or a column 'task'"
                refused.add(name, what)
        counted = [n for n in own if n != "task"]
        if counted:
            self.say_once(f"LeRobot counts anew: {counted}")
        if self._episodes > self._fresh[0]:
            self._tasks |= self._fresh[1]
        known = dict(self._tasks)  # the episode may yet be refused
        numbers = [known.setdefault(str(t), len(known)) for t in tasks]
        stored["timestamp"] = (np.arange(count) / self._fps).astype(np.float32)
        stored["frame_index"] = np.arange(count)
        stored["episode_index"] = np.full(count, self._episodes)
        stored["index"] = self._rows + np.arange(count)
        stored["task_index"] = np.array(numbers, np.int64)
        stored["task"] = np.array([str(t) for t in tasks])
        return stored, {"tasks": np.array(list(dict.fromkeys(map(str, tasks))))}

    def _is_video(self, spec: ColumnSpec) -> bool:
        return self._videos and holds("jpeg", spec) and not spec.shape[0] % 2 and not spec.shape[1] % 2

    def encode(self, episode: CheckedEpisode) -> dict[str, Array | Encoded]:
        """Return the columns, pictures encoded; their statistics are noted before that."""
        numbers = [spec for spec in episode.schema.columns if spec.dtype.kind != "U"]
        copied = self._copied
        episode.notes["stats"] = {
            s.name: copied[s.name].stats if s.name in copied else _stats(episode.columns[s.name], holds("jpeg", s))
            for s in numbers
        }
        episode.notes["info"] = {name: one.info for name, one in copied.items()}
        self._fresh = self._episodes, _tasks_in(episode.columns)
        columns: dict[str, Array | Encoded] = dict(episode.columns)
        for spec in episode.schema.columns:
            if spec.name in copied:
                columns[spec.name] = copied[spec.name].encoded
            elif self._is_video(spec):
                video = io.BytesIO()
                encode_video(video, episode.columns[spec.name], Encoding(crf=self._crf, fps=self._fps))
                columns[spec.name] = Encoded([video.getvalue()], FILM)
            elif holds("jpeg", spec):
                columns[spec.name] = Encoded(encode(episode.columns[spec.name], "png"), "png")
        return columns

    # -- the dataset -------------------------------------------------------------------------

    def resume(self, dataset: Any) -> None:
        """Begin to number the tasks."""
        self._tasks, self._fresh = {}, (0, {})

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write the dataset: a file of rows for each group of episodes, then what describes them."""
        import pyarrow as pa

        features: dict[str, Any] = {}
        tasks: dict[str, int] = {}
        rows: list[dict[str, Any]] = []
        for number, group in enumerate(groups_of(episodes, self.group_nbytes)):
            features = features or _features_of(group[0], self._fps)
            for record in group:
                tasks |= _tasks_in(record.columns)
                for name in _videos_in(features):  # what is not so of all videos is not said
                    said = features[name]["info"]
                    its = _video_info(record, name, features[name]["shape"], self._fps)
                    features[name]["info"] = {key: said[key] for key in said if said[key] == its.get(key)}
                rows.append(_row_of(record, features, number, self._fps))
                for name in _videos_in(features):
                    video: Any = record.columns[name]
                    _write(path, f"videos/{name}/{_file(record.number)}.mp4", video.values[0])
            tables = [_table(record, features) for record in group]
            _write_parquet(path, f"data/{_file(number)}.parquet", pa.concat_tables(tables))
        if rows:
            _write_parquet(path, "meta/tasks.parquet", _task_table(sorted(tasks, key=lambda task: tasks[task])))
            _write_parquet(path, f"meta/episodes/{_file(0)}.parquet", pa.Table.from_pylist(rows))
            _write(path, "meta/stats.json", json.dumps(_total_stats(rows), indent=4).encode())
        _write_info(path, features, self._fps, self._robot, rows, len(tasks))


def copier(
    parts: Sequence[Any], facts: Facts, options: Mapping[str, Any]
) -> Callable[[Any], Iterator[tuple[dict[str, Array], dict[str, Any]]]] | None:
    """Return what reads episodes with their pictures as they are stored; see `Format.copier`.

    None where a part is no LeRobot set or is changed as it is read, where a column is of videos in one and of pictures
    in another, and where an option asks for another encoding or rate, or for steps of several rows, whose last row is
    none.
    """
    if facts.reward_at != "same":
        return None
    kinds = []
    for part in parts:
        source = getattr(part, "source", None)
        if not isinstance(source, LeRobotSource) or part.transform is not None:
            return None
        known = {id(spec) for spec in source.schema.columns}  # a column that was joined has a spec of its own
        if not part.fps == source.fps == facts.fps or not all(id(spec) in known for spec in part.schema.columns):
            return None
        kinds.append({name: kind for name, kind in source.pictures().items() if name in part.column_names})
    same = all(kind == kinds[0] for kind in kinds)
    return _as_stored if same and set(options) <= _COPIED_WITH else None


def _as_stored(part: Any) -> Iterator[tuple[dict[str, Array], dict[str, Any]]]:
    """Yield the columns and data of each episode: its pictures are data, and zeros, which nobody reads, their
    columns."""
    source, specs = part.source, {spec.name: spec for spec in part.schema.columns}
    for number, episode in enumerate(part.source_episodes.tolist()):
        length = int(part.lengths[number])
        stored: dict[str, StoredPictures] = {}
        for name in source.pictures():
            found = source.stored(episode, name) if name in specs and length else None
            if found is not None and not found.stats:
                frames = part.steps_as_stored(number, 0, length, [name])[name]
                found = StoredPictures(found.encoded, _stats(frames, True), found.info)
            if found is not None:
                stored[name] = found
        columns = part.steps_as_stored(number, 0, length, [name for name in specs if name not in stored])
        columns |= {name: np.zeros((length, *specs[name].shape), specs[name].dtype) for name in stored}
        data = {name: values[0] for name, values in part.get_episode_data([number]).items() if values[0] is not None}
        yield {name: columns[name] for name in specs}, {**data, _PICTURES: stored}


def _frame_rate(fps: Fraction | None, where: str) -> int:
    """Return the rate of a set: the known one, which has to be an integer, or LeRobot's usual one."""
    rate = _USUAL_FPS if fps is None else fps
    if rate.denominator != 1:
        raise InputError(
            f"{where}: LeRobot's rate is an integer, and this one is {rate_text(rate)}; say which is to stand there: "
            f"fps={round(rate)}"
        )
    return int(rate)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _name_of(name: str, rows: Array) -> str:
    if name in OUTCOMES:
        return f"next.{name}"
    if holds("jpeg", ColumnSpec(name, rows.shape[1:], rows.dtype)):
        return name if name.startswith("observation.") else f"observation.images.{name.split('/')[-1]}"
    head, slash, rest = name.partition("/")
    if head in ("obs", "observation"):
        return "observation." + (rest.replace("/", ".") if slash else "state")
    return name.replace("/", ".")


def _task_of(data: Mapping[str, Any]) -> Any:
    found = data.get("task", data.get("tasks"))
    return None if found is None else np.atleast_1d(found)[0]


def _tasks_in(columns: Mapping[str, Any]) -> dict[str, int]:
    """Return the tasks of an episode's steps, with their numbers."""
    texts, numbers = columns["task"], columns["task_index"]
    return dict(zip(map(str, texts), map(int, numbers), strict=True))


def _file(number: int) -> str:
    return _PLACE.format(chunk_index=number // _CHUNK, file_index=number % _CHUNK)


def _videos_in(features: Mapping[str, Any]) -> list[str]:
    return [name for name, feature in features.items() if feature["dtype"] == "video"]


def _row_of(record: Record, features: Mapping[str, Any], file: int, fps: int) -> dict[str, Any]:
    """Return what `meta/episodes` has of an episode."""

    def place(prefix: str, number: int) -> dict[str, int]:
        return {f"{prefix}/chunk_index": number // _CHUNK, f"{prefix}/file_index": number % _CHUNK}

    row: dict[str, Any] = {
        "episode_index": record.number,
        "tasks": [str(t) for t in record.data["tasks"]],
        "length": record.length,
        **place("data", file),
        "dataset_from_index": record.row,
        "dataset_to_index": record.row + record.length,
        **place("meta/episodes", 0),
    }
    for name in _videos_in(features):
        row |= place(f"videos/{name}", record.number)
        row |= {f"videos/{name}/from_timestamp": 0.0, f"videos/{name}/to_timestamp": record.length / fps}
    for name, stats in record.notes["stats"].items():
        row |= {f"stats/{name}/{key}": value for key, value in stats.items()}
    return row


def _features_of(record: Record, fps: int) -> dict[str, Any]:
    """Return the features of `info.json`."""
    found: dict[str, Any] = {}
    for spec in record.schema.columns:
        rows = record.columns[spec.name]
        names: Any = None
        if spec.name == "task":
            continue
        if holds("jpeg", spec):
            kind = "video" if isinstance(rows, Encoded) and rows.how == FILM else "image"
            names = ["height", "width", "channels"]
        else:
            kind = "string" if spec.dtype.kind == "U" else spec.dtype.name
        found[spec.name] = {"dtype": kind, "shape": list(spec.shape) or [1], "names": names}
        if kind == "video":
            found[spec.name]["info"] = _video_info(record, spec.name, spec.shape, fps)
    return found


def _video_info(record: Record, name: str, shape: Sequence[int], fps: int) -> dict[str, Any]:
    """Return what `info.json` says of the video of an episode: what its source said, if it was copied."""
    copied: dict[str, Any] | None = record.notes["info"].get(name)
    if copied is not None:
        return copied
    height, width, channels = shape
    return {
        "video.height": height,
        "video.width": width,
        "video.channels": channels,
        "video.codec": "h264",
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "has_audio": False,
    }


def _table(record: Record, features: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    names = [name for name in features if name not in _videos_in(features)]
    arrays = [to_arrow(record.columns[name], _arrow_type(features[name])) for name in names]
    boxed = [spec.name for spec in record.schema.columns if spec.shape == (1,)]
    return pa.Table.from_arrays(arrays, names, metadata={BOXED: json.dumps(boxed)})


def _arrow_type(feature: Mapping[str, Any]) -> Any:
    """Return the type of a feature, as LeRobot has it: a number for shape (1,), and lists of fixed length for vectors
    alone."""
    import pyarrow as pa

    if feature["dtype"] == "image":
        return pa.struct({"bytes": pa.binary(), "path": pa.string()})
    kind = pa.string() if feature["dtype"] == "string" else pa.from_numpy_dtype(np.dtype(feature["dtype"]))
    shape = feature["shape"]
    for size in reversed(shape if shape != [1] else ()):
        kind = pa.list_(kind, size if len(shape) == 1 else -1)
    return kind


def _task_table(tasks: list[str]) -> Any:
    """Return the tasks as pandas stores a frame with texts as its index, which LeRobot reads."""
    import pyarrow as pa

    column = {
        "name": "task_index",
        "field_name": "task_index",
        "pandas_type": "int64",
        "numpy_type": "int64",
        "metadata": None,
    }
    index = {
        **column,
        "name": None,
        "field_name": "__index_level_0__",
        "pandas_type": "unicode",
        "numpy_type": "object",
    }
    pandas = {"index_columns": ["__index_level_0__"], "column_indexes": [], "columns": [column, index]}
    kind = pa.schema([("task_index", pa.int64()), ("__index_level_0__", pa.string())], {"pandas": json.dumps(pandas)})
    return pa.Table.from_arrays([pa.array(range(len(tasks)), pa.int64()), pa.array(tasks, pa.string())], schema=kind)


def _stats(rows: Array, image: bool) -> dict[str, Any]:
    """Return the statistics of a column in an episode: of each value, or of each channel of pictures, in 0 to 1.

    Cost: pictures are counted once, frame by frame; other columns are read twice, some megabytes at a time.
    """
    found = _picture_stats(rows) if image else _value_stats(rows)
    return {**{key: value.tolist() for key, value in found.items()}, "count": [len(rows)]}


def _picture_stats(frames: Array) -> dict[str, Array]:
    """Return the statistics of the channels of pictures, (T, H, W, C) uint8, each (C, 1, 1): exact, from how often each
    of 256 values occurs."""
    channels = frames.shape[-1]
    counts = np.zeros((channels, 256), np.int64)
    for frame in frames:
        for channel in range(channels):
            counts[channel] += np.bincount(frame[..., channel].reshape(-1), minlength=256)
    values = np.arange(256)
    made = []
    for each in counts:
        n, first, second = (int((each * values**power).sum()) for power in range(3))
        there = np.flatnonzero(each)
        made.append((there[0], there[-1], first / n, math.sqrt(n * second - first**2) / n))
    table = np.array(made, np.float64) / 255
    names = ("min", "max", "mean", "std")
    return {key: table[:, at, None, None] for at, key in enumerate(names)}


def _value_stats(rows: Array) -> dict[str, Array]:
    """Return the statistics of each value of a column."""
    step = max(1, _PIECE_NBYTES // max(1, rows[0].size * 8))
    with np.errstate(all="ignore"):  # of NaN and inf the statistics are such, too
        return _moments(rows, step)


def _moments(rows: Array, step: int) -> dict[str, Array]:
    pieces = [slice(at, at + step) for at in range(0, len(rows), step)]
    floats = (rows[piece].astype(np.float64) for piece in pieces)
    least, most, total = np.inf, -np.inf, 0.0
    for piece in floats:
        least, most = np.minimum(least, piece.min(0)), np.maximum(most, piece.max(0))
        total = total + piece.sum(0)
    mean = total / len(rows)
    spread = sum(((rows[piece].astype(np.float64) - mean) ** 2).sum(0) for piece in pieces)
    found = {"min": least, "max": most, "mean": mean, "std": np.sqrt(spread / len(rows))}
    return {key: np.atleast_1d(value) for key, value in found.items()}


@np.errstate(all="ignore")
def _total_stats(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the statistics of all episodes; of NaN and inf they are such, too."""
    names = dict.fromkeys(
        k[6 : -len("/count")] for r in rows for k in r if k.startswith("stats/") and k.endswith("/count")
    )
    total = {}
    for name in names:
        part = {key: np.array([r[f"stats/{name}/{key}"] for r in rows], np.float64) for key in STATS}
        mean, count = part["mean"], part["count"].reshape(-1, *[1] * (part["mean"].ndim - 1))
        weights = count / count.sum()
        middle = (mean * weights).sum(0)
        spread = ((part["std"] ** 2 + (mean - middle) ** 2) * weights).sum(0)
        total[name] = {
            "min": part["min"].min(0).tolist(),
            "max": part["max"].max(0).tolist(),
            "mean": middle.tolist(),
            "std": np.sqrt(spread).tolist(),
            "count": [int(count.sum())],
        }
    return total


def _write_info(
    path: str, features: Mapping[str, Any], fps: int, robot: str | None, rows: list[dict[str, Any]], tasks: int
) -> None:
    info = {
        "codebase_version": "v3.0",
        "robot_type": robot,
        "total_episodes": len(rows),
        "total_frames": sum(row["length"] for row in rows),
        "total_tasks": tasks,
        "chunks_size": _CHUNK,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{len(rows)}"},
        "data_path": f"data/{_PLACE}.parquet",
        "video_path": f"videos/{{video_key}}/{_PLACE}.mp4" if _videos_in(features) else None,
        "features": features,
    }
    _write(path, "meta/info.json", json.dumps(info, indent=4, ensure_ascii=False).encode())


def _write(path: str, name: str, data: bytes) -> None:
    target = os.path.join(path, name)
    disk.make_folder(os.path.dirname(target))
    disk.replace_file(target, data)


def _write_parquet(path: str, name: str, table: Any) -> None:
    import pyarrow.parquet as pq

    made = io.BytesIO()
    pq.write_table(table, made, compression="snappy")
    _write(path, name, made.getvalue())
