"""`ringmap episodes`: episodes as rows for people: which are shown, in which order.

Invariants: a row is of the episode as it was stored; nothing that the user gives is evaluated.
Not here: what is known of episodes (datasets/episode_table.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

from ringmap.buffers.opening import FLEET, kind_of
from ringmap.cli.arguments import AsJson, Place, episodes_at
from ringmap.cli.console import plain, show, show_json, show_table, value_text
from ringmap.clips.marks import MARK_NAMES
from ringmap.clips.where import Condition, Values
from ringmap.datasets.base import as_dataset
from ringmap.datasets.episode_table import ENDED, OUTCOMES, OWN, EpisodeTable, in_order
from ringmap.datasets.marks import Marks
from ringmap.errors import InputError

__all__ = ["Row", "matching", "name_marks", "rows_at", "rows_of", "sorted_by"]


MinLength = Annotated[int, typer.Option("--min-length", metavar="N", help="Only those of at least N steps.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="CONDITION",
        help="Only these, as in `return > 20 and seed < 5`: names of the table and of their data. Given again, all "
        "have to be met.",
    ),
]
Last = Annotated[int | None, typer.Option("--last", metavar="N", min=0, help="Only the newest N of these.")]
Sort = Annotated[
    str,
    typer.Option("--sort", "-s", metavar="NAME", help="Order by this value; by default the oldest is first."),
]
Reverse = Annotated[bool, typer.Option("--reverse", "-r", help="In the other order.")]


def episodes(
    path: Place,
    min_length: MinLength = 0,
    where: Where = None,
    last: Last = None,
    sort: Sort = "episode",
    reverse: Reverse = False,
    as_json: AsJson = False,
) -> None:
    """List episodes: length, return, ending and data of each.

    Episode 0 is the oldest one stored; of a directory of rings, that of the first ring, and a column names the ring.
    The return is the sum of the column `reward` (or `rewards`, `next.reward`, `next/reward`), if there is one.
    """
    marked = name_marks(where or (), sort)
    rows = [row for row in rows_at(path, "episodes", marked) if row["length"] >= min_length]
    rows = matching(rows, where or ())
    if last is not None:
        rows = rows[max(0, len(rows) - last) :]
    rows = sorted_by(rows, sort, reverse)
    if as_json:
        show_json(rows)
        return
    if not rows:
        show("no episodes")
        return
    own = [name for name in rows[0] if name != "data"]
    data = list(dict.fromkeys(name for row in rows for name in row["data"]))
    cells = [
        [value_text(row.get(name)) for name in own] + [value_text(row["data"].get(name)) for name in data]
        for row in rows
    ]
    show_table([*own, *data], cells, right="episode length return")


Row = dict[str, Any]

_OWN = (*OWN, "ring")


def rows_at(path: str, where: str, marked: bool = False) -> list[Row]:
    """Return a row for each episode at a path; of a directory of rings ring by ring, with the name of each."""
    dataset = episodes_at(path, where)
    if kind_of(path, where) != FLEET:
        return rows_of(dataset, marked)
    with dataset as rings:
        found = [(r.name, row) for r in rings.engine.rings for row in rows_of(episodes_at(r.folder, where), marked)]
    return [{**row, "episode": n, "ring": name} for n, (name, row) in enumerate(found)]


def rows_of(dataset: Any, marked: bool = False) -> list[Row]:
    """Return a row for each episode that is stored now, oldest first: number, length, return, ending, then its data.

    One that is evicted while it is read is left out.

    Cost: reads three columns of small values, and the data of every episode.
    """
    pinned = as_dataset(dataset, "episodes: the dataset").pinned()
    lengths, every = np.asarray(pinned.lengths, np.int64), dict[int, dict[str, Any]]()
    table = EpisodeTable(np.arange(len(lengths)), lengths)
    if marked:
        of = Marks(pinned)
        table.ids, table.marks = of.names(), of.all()
    marks = {name: table.values(name) for name in MARK_NAMES} if marked else {}
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
    return row.get(name) if name in _OWN else row["data"].get(name)


def _names(rows: Sequence[Row]) -> list[str]:
    own = [name for name in _OWN if name not in ("ring", *MARK_NAMES) or name in rows[0]]
    return [*own, *dict.fromkeys(name for row in rows for name in row["data"])]


def name_marks(conditions: Sequence[str], others: str = "") -> bool:
    """Return whether conditions, or another name, are about marks. Raises InputError, as `matching`."""
    return not {*Condition.all_of(conditions, "episodes: --where").names, others}.isdisjoint(MARK_NAMES)


def matching(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """Return the rows that meet every condition, such as `seed=7` or `return >= 100 and task contains lift`."""
    condition = Condition.all_of(conditions, "episodes: --where")
    if not rows:
        return []
    met = condition.select(_names(rows), lambda name: Values.of([value_of(r, name) for r in rows]), len(rows))
    return [row for row, meets in zip(rows, met.tolist(), strict=True) if meets]


def sorted_by(rows: Sequence[Row], name: str, reverse: bool) -> list[Row]:
    """Return the rows by a value, numbers before text; those without it come last."""
    values = [value_of(row, name) for row in rows]
    if rows and name not in _OWN and all(value is None for value in values):
        raise InputError(f"episodes: --sort names {name!r}, which no episode here has; there are {_names(rows)}")
    return [rows[i] for i in in_order(np.arange(len(rows)), Values.of(values), reverse).tolist()]
