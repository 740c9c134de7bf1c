"""Episodes as rows of a table: its columns, and which rows are shown, in which order.

    number  length  return  ended        and the data of each episode
    0       31      12.5    terminated

Invariants: an episode is in the table as it was at one moment; nothing that the user gives is evaluated.
Not here: the grammar of a filter (clips/where.py), how it is printed (episodes.py) or drawn (plot.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.buffers.opening import FLEET, kind_of
from ringmap.cli.console import plain
from ringmap.cli.resolve import episodes_at
from ringmap.clips.facts import REWARDS, TERMINATED, TRUNCATED, name_among
from ringmap.clips.where import Values, select
from ringmap.errors import InputError
from ringmap.storage.read.read_live import retry

__all__ = ["Row", "kept", "rows_at", "rows_of", "sorted_by"]

Row = dict[str, Any]

OWN = ("episode", "ring", "length", "return", "ended")


def rows_at(path: str, where: str) -> list[Row]:
    """Return a row for each episode at a path; of a directory of rings ring by ring, each as of a moment, with its
    name.

    Raises:
        InputError, NotFoundError, UnknownFormatError, CorruptError: as `episodes_at`.
    """
    dataset = episodes_at(path, where)
    if kind_of(path, where) != FLEET:
        return rows_of(dataset)
    rows: list[Row] = []
    with dataset as rings:
        for ring in rings.engine.each():
            for row in rows_of(episodes_at(ring.folder, where)):
                rows.append(
                    {
                        "episode": len(rows),
                        "ring": ring.name,
                        **{k: v for k, v in row.items() if k != "episode"},
                    }
                )
    return rows


def rows_of(dataset: Any) -> list[Row]:
    """Return a row for each episode, oldest first: number, length, return, ending, then its data.

    Args:
        dataset: a buffer's reader, or a dataset.

    Raises:
        LappedError: the writer overtook this reader for 5 s without progress.

    Cost: reads three columns of small values, and the data of every episode.
    """
    names = dataset.column_names
    columns = {
        "return": name_among(REWARDS, names),
        "terminated": name_among(TERMINATED, names),
        "truncated": name_among(TRUNCATED, names),
    }
    rows: list[Row] = []

    def attempt() -> int:
        before, lengths = _moment(dataset), np.asarray(dataset.lengths, np.int64)
        taken = {key: _taken(dataset, name) for key, name in columns.items()}
        data = dataset.get_episode_data(None) if len(lengths) else {}
        whole = all(len(values) == lengths.sum() for values in taken.values() if values is not None)
        same = all(len(values) == len(lengths) for values in data.values())
        if not (whole and same and before == _moment(dataset)):
            return 1
        rows.extend(_rows(lengths, taken, data))
        return 0

    advice = "look at a snapshot: ringmap snapshot DIR DEST"
    retry(attempt, lambda: None, "episodes", advice)  # reading a column refreshes
    return rows


def _moment(dataset: Any) -> tuple[int, int]:
    """Return an identity of a buffer's state: where it begins and ends. A dataset has one state."""
    window = getattr(dataset, "clip_window", None)
    if window is None:
        return 0, 0
    now = window(1)
    with now.lock:
        return now.low, now.head


def _taken(dataset: Any, name: str | None) -> Any:
    """Return a column as a number for each step; None if it is not of such."""
    if name is None or not len(dataset.lengths) or dataset.get_dim(name) != 1:
        return None
    values = np.asarray(dataset.get_col_data(name))
    return values.reshape(-1) if values.dtype.kind in "biuf" else None


def _rows(lengths: Any, taken: dict[str, Any], data: dict[str, list[Any]]) -> list[Row]:
    ends = np.cumsum(lengths)
    starts = ends - lengths
    rewards, found = taken["return"], []
    for i in range(len(lengths)):
        row: Row = {"episode": i, "length": int(lengths[i])}
        if rewards is not None:
            # The row of a reset has no reward: NaN.
            row["return"] = float(np.nansum(rewards[starts[i] : ends[i]], dtype=np.float64))
        if taken["terminated"] is not None or taken["truncated"] is not None:
            row["ended"] = _ending(taken, int(ends[i]) - 1) if lengths[i] else None
        found_data = {name: values[i] for name, values in data.items() if values[i] is not None}
        row["data"] = {name: _single(plain(value)) for name, value in found_data.items()}
        found.append(row)
    return found


def _single(value: Any) -> Any:
    """Return the value of a list of one: for people and filters it is a number."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _ending(taken: dict[str, Any], last: int) -> str | None:
    for name in ("terminated", "truncated"):
        if taken[name] is not None and taken[name][last]:
            return name
    return None


def value_of(row: Row, name: str) -> Any:
    """Return a value of an episode: its own, or of its data; None where it has none."""
    return row.get(name) if name in OWN else row["data"].get(name)


def kept(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """Return the rows that meet every condition, such as `seed=7` or `return >= 100 and task contains lift`.

    Raises:
        InputError: a condition can't be read, or names what no episode has.
    """
    if not rows:
        return []
    own = [name for name in OWN if name != "ring" or name in rows[0]]
    names = [*own, *dict.fromkeys(name for row in rows for name in row["data"])]
    columns = {name: _values([value_of(row, name) for row in rows]) for name in names}
    met = np.ones(len(rows), np.bool_)
    for text in conditions:
        met &= select(text, columns, len(rows), "episodes: --where")
    return [row for row, meets in zip(rows, met.tolist(), strict=True) if meets]


def _values(given: Sequence[Any]) -> Values:
    """Return a value of each row as conditions compare it: numbers and flags as numbers, all else as text."""
    numbers = [float(v) if isinstance(v, bool | int | float) else np.nan for v in given]
    texts = [None if v is None or isinstance(v, bool | int | float) else str(v) for v in given]
    return Values(np.array(numbers, np.float64), np.array(texts, object))


def _must_be_known(rows: Sequence[Row], name: str, option: str) -> None:
    if not rows or any(value_of(row, name) is not None for row in rows) or name in OWN:
        return
    known = dict.fromkeys(name for row in rows for name in row["data"])
    raise InputError(f"episodes: {option} names {name!r}, which no episode here has; there are {[*OWN, *known]}")


def sorted_by(rows: Sequence[Row], name: str, reverse: bool) -> list[Row]:
    """Return the rows by a value, numbers before text; those without it come last.

    Raises:
        InputError: no episode has it.
    """
    _must_be_known(rows, name, "--sort")
    have = [row for row in rows if value_of(row, name) is not None]
    lack = [row for row in rows if value_of(row, name) is None]
    return sorted(have, key=lambda row: _order(value_of(row, name)), reverse=reverse) + lack


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, bool | int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)
