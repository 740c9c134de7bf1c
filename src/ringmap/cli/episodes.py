"""`ringmap episodes`: a table of them."""

from __future__ import annotations

from typing import Annotated

import typer

from ringmap.cli.console import show, show_json, show_table, value_text
from ringmap.cli.options import AsJson, Place
from ringmap.cli.table import kept, name_marks, rows_at, sorted_by

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
    rows = kept(rows, where or ())
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
