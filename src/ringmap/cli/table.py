"""Episodes as rows for people: which are shown, in which order.

Invariants: a row is of the episode as it was stored; nothing that the user gives is evaluated.
Not here: what is known of episodes (datasets/episode_table.py), how it is printed (episodes.py) or drawn (plot.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.buffers.opening import FLEET, kind_of
from ringmap.cli.console import plain
from ringmap.cli.resolve import episodes_at
from ringmap.clips.where import Condition, Values
from ringmap.datasets.base import as_dataset
from ringmap.datasets.episode_table import ENDED, OUTCOMES, EpisodeTable
from ringmap.datasets.marks import Marks
from ringmap.errors import InputError

__all__ = ["Row", "kept", "name_marks", "rows_at", "rows_of", "sorted_by"]

Row = dict[str, Any]

MARKS = ("flags", "note")
OWN = ("episode", "ring", "length", "return", "ended", *MARKS)


def rows_at(path: str, where: str, marked: bool = False) -> list[Row]:
    """Return a row for each episode at a path; of a directory of rings ring by ring, with the name of each.

    Args:
        path: of a buffer, or of a dataset.
        where: the caller to name in an error.
        marked: as `rows_of`.

    Raises:
        InputError, NotFoundError, UnknownFormatError, CorruptError: as `episodes_at`.
    """
    dataset = episodes_at(path, where)
    if kind_of(path, where) != FLEET:
        return rows_of(dataset, marked)
    with dataset as rings:
        found = [(r.name, row) for r in rings.engine.rings for row in rows_of(episodes_at(r.folder, where), marked)]
    return [{**row, "episode": n, "ring": name} for n, (name, row) in enumerate(found)]


def rows_of(dataset: Any, marked: bool = False) -> list[Row]:
    """Return a row for each episode that is stored now, oldest first: number, length, return, ending, then its data.

    One that is evicted while it is read is left out.

    Args:
        dataset: a buffer's reader, or a dataset.
        marked: whether each has its flags and its note.

    Cost: reads three columns of small values, and the data of every episode.
    """
    pinned = as_dataset(dataset, "episodes: the dataset").pinned()
    lengths, every = np.asarray(pinned.lengths, np.int64), dict[int, dict[str, Any]]()
    table = EpisodeTable(np.arange(len(lengths)), lengths)
    if marked:
        of = Marks(pinned)
        table.ids, table.marks = of.names(), of.all()
    marks = {name: table.values(name) for name in MARKS} if marked else {}
    stored = table.read(pinned, [*OUTCOMES, "data"], every.__setitem__)
    rows: list[Row] = []
    for number in np.flatnonzero(stored).tolist():
        row: Row = {"episode": len(rows), "length": int(lengths[number])}
        if "return" in table.outcomes:
            row["return"] = float(table.returns[number])
        if "ended" in table.outcomes:
            row["ended"] = ENDED[table.ended[number]]
        row |= {name: values.get(number) for name, values in marks.items() if values is not None}
        row["data"] = {name: _single(plain(value)) for name, value in every[number].items()}
        rows.append(row)
    return rows


def _single(value: Any) -> Any:
    """Return the value of a list of one: for people and filters it is a number."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def value_of(row: Row, name: str) -> Any:
    """Return a value of an episode: its own, or of its data; None where it has none."""
    return row.get(name) if name in OWN else row["data"].get(name)


def _names(rows: Sequence[Row]) -> list[str]:
    own = [name for name in OWN if name not in ("ring", *MARKS) or name in rows[0]]
    return [*own, *dict.fromkeys(name for row in rows for name in row["data"])]


def name_marks(conditions: Sequence[str], others: str = "") -> bool:
    """Return whether conditions, or another name, are about marks. Raises InputError, as `kept`."""
    return not {*Condition.all_of(conditions, "episodes: --where").names, others}.isdisjoint(MARKS)


def kept(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """Return the rows that meet every condition, such as `seed=7` or `return >= 100 and task contains lift`.

    Raises:
        InputError: a condition can't be read, or names what no episode has.
    """
    condition = Condition.all_of(conditions, "episodes: --where")
    if not rows:
        return []
    met = condition.select(_names(rows), lambda name: Values.of([value_of(r, name) for r in rows]), len(rows))
    return [row for row, meets in zip(rows, met.tolist(), strict=True) if meets]


def sorted_by(rows: Sequence[Row], name: str, reverse: bool) -> list[Row]:
    """Return the rows by a value, numbers before text; those without it come last.

    Raises:
        InputError: no episode has it.
    """
    have = [row for row in rows if value_of(row, name) is not None]
    if rows and not have and name not in OWN:
        raise InputError(f"episodes: --sort names {name!r}, which no episode here has; there are {_names(rows)}")
    lack = [row for row in rows if value_of(row, name) is None]
    return sorted(have, key=lambda row: _order(value_of(row, name)), reverse=reverse) + lack


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, bool | int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)
