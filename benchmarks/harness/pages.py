"""The results of a run, put into the pages of docs/performance, their plots, and README's table.

A page marks where tables go, and which: by the name of a suite, and by how the titles of its tables begin, a
regular expression in each line (none: all tables of it). What stands before the end of the place is replaced:

    <!-- benchmark: sampling
    one thread: .*pixels
    -->
    ...
    <!-- end -->

The place `machine` says what the runs had in common.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness.plots import draw_plots
from benchmarks.harness.table import Table

__all__ = ["HEADLINES", "publish", "put_in", "put_tables", "summary_of"]

_PLACE = re.compile(
    r"(?P<head><!-- benchmark: (?P<name>\w+)\n(?P<titles>(?:(?!-->)[^\n]*\n)*)-->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def publish(results: Path, root: Path) -> None:
    """Write what was measured into the pages below a root; into README, if all of its table was; draw the plots."""
    pages = [*(root / "docs/performance").glob("*.md")]
    for page in pages:
        page.write_text(put_tables(results, page.read_text()))
    draw_plots("\n".join(page.read_text() for page in pages), root / "docs/assets")
    if all((results / f"{name}.json").exists() for name in HEADLINES):
        readme = root / "README.md"
        readme.write_text(put_in(readme.read_text(), summary_of(results)))


def put_tables(results: Path, page: str) -> str:
    """Return a page with the tables of a folder that `python -m benchmarks --out` filled.

    A place keeps what it has if its suite has no result, or lacks one of its tables: a library was not installed.
    """

    def put(place: re.Match[str]) -> str:
        if place["name"] == "machine":
            told = [_machine(results)]
            return place["head"] + "\n" + told[0] + "\n\n" + place["end"] if told[0] else place[0]
        kept = results / f"{place['name']}.json"
        if not kept.exists():
            return place[0]
        found = json.loads(kept.read_text())
        tables = [Table(**table) for table in found["tables"]]
        chosen = []
        for title in place["titles"].splitlines() or [""]:
            those = [table for table in tables if re.match(title, table.title)]
            if not those:
                print(f"{kept}: no table begins with {title!r}: left as it is", file=sys.stderr)
                return place[0]
            chosen += those
        day, machine = date.fromtimestamp(kept.stat().st_mtime), found["machine"]
        load = f"{machine['load']:.1f}" + (f" to {machine['load_after']:.1f}" if "load_after" in machine else "")
        told = [f"*{day:%d %B %Y}, load {load}*", *(table.markdown() for table in chosen)]
        return place["head"] + "\n" + "\n\n".join(told) + "\n\n" + place["end"]

    return _PLACE.sub(put, page)


def _machine(results: Path) -> str:
    """Return on what the newest result was measured, or ""."""
    kept = max(results.glob("*.json"), key=lambda path: path.stat().st_mtime, default=None)
    if kept is None:
        return ""
    told = json.loads(kept.read_text())["machine"]
    return (
        f"*{told['processor']}, {told['cores']} cores; {told['system']}; {told['file_system']}; "
        f"Python {told['python']}, NumPy {told['numpy']}.*"
    )


# -- README --------------------------------------------------------------------------------------

_HEAD = "| what | ringmap | times as long as ringmap takes, in the same run |\n| --- | --- | --- |"
_ROWS = 256
_BATCH_MB = _ROWS * 4 * 64 * 64 * 3 / 1e6
_UNITS = {
    "us": lambda seconds: f"{seconds * 1e6:.0f} us",
    "clips/s": lambda seconds: f"{round(_ROWS / seconds, -3):,.0f} clips/s",
    "MB/s": lambda seconds: f"{_BATCH_MB / seconds:,.0f} MB/s",
}


@dataclass(frozen=True)
class Row:
    """A row of README's table: how the title of a table begins, how our row in it does, and what to say."""

    suite: str
    title: str
    what: str
    unit: str
    ours: str = "ringmap"


ROWS = (
    Row(
        "transitions",
        "prioritized",
        "prioritised draw of 256 and update of the priorities",
        "us",
        "ringmap, in RAM: sample",
    ),
    Row("transitions", "add a step of 1 lane", "`add` of a transition", "us", "ringmap, in RAM"),
    Row("transitions", r"sample\(32\)", "`sample(32)` of transitions", "us", "ringmap, in RAM"),
    Row("sampling", "one thread:.*state vectors", "`sample(256)` of state vectors, one thread", "us"),
    Row("sampling", "one thread:.*pixels", "`sample(256)` of clips of 4 frames of 64x64x3, one thread", "clips/s"),
    Row("sampling", "all .*pixels", "`sample(256)` of these clips, all cores", "clips/s"),
    Row(
        "cold",
        "cold",
        "clips from a disk, ring 8 times as large as memory, `batches(256)`",
        "MB/s",
        "ringmap, batches()",
    ),
    Row("loading", ".*, num_workers=0", "`DataLoader`, batches of 256 clips, 0 workers", "clips/s"),
    Row("loading", ".*, num_workers=2", "`DataLoader`, batches of 256 clips, 2 workers", "clips/s"),
)
HEADLINES = [*dict.fromkeys(row.suite for row in ROWS), "commit", "opening"]
"""The suites that README's table is made of."""

_NAMES = """cpprb|Hugging Face datasets|Lance|litdata|Reverb|rlox|sheeprl|stable-worldmodel|Stable-Baselines3
tensorstore|TorchRL|webdataset|DreamerV3's replay""".replace("\n", "|").split("|")
_CALLED = {
    "NumPy, an hour's work: WILLNEED": "20 lines of NumPy with WILLNEED",
    "NumPy, an hour's work: ": "20 lines of NumPy with 32 threads",
    "NumPy, one fancy index": "NumPy's fancy index",
    "NumPy, draw and takes": "NumPy's take",
    "O_DIRECT": "the disk's own parallel reads",
    "a Dataset over h5py": "h5py",
    "array_record": "array_record and grain",
    **{name: name for name in _NAMES},
    "litdata": "litdata (a stream)",
    "webdataset": "webdataset (a stream)",
}
"""How a row begins -> its name in the table; a library with two rows is there with its faster one."""
_NEXT = 3
"""How many slower ones a row names: the pages have all."""


def summary_of(results: Path) -> str:
    """Return README's table, each row that we lose before those that we win."""
    rows = []
    for row in ROWS:
        table = _table(results, row.suite, row.title)
        beside = _beside(table, row.ours)
        told = " · ".join(f"{called} {_times(value)}" for called, value in beside.items())
        rows.append((min(beside.values(), default=1e9), [row.what, _UNITS[row.unit](_of(table, row.ours)), told]))
    grid = [cells for _, cells in sorted(rows, key=lambda one: one[0])]
    commits, openings = _table(results, "commit", ".*disk"), _table(results, "opening", "opening")
    (few, short), (many, long) = ((name, _UNITS["us"](row["median"])) for name, row in commits.times.items())
    grid.append([f"one commit, an eviction included, {many}", long, f"{few}: {short}"])
    checked = f"to write, after a reboot, everything checked: {_of(openings, 'writer after a reboot'):.2f} s"
    grid.append([openings.title.partition(" of ")[0], f"{_of(openings, 'reader'):.2f} s", checked])
    return "\n".join([_HEAD, *("| " + " | ".join(cells) + " |" for cells in grid)])


def put_in(readme: str, table: str) -> str:
    """Return a README with this table in the place of the one that it has."""
    found: str = re.sub(r"\| what \| ringmap \|.*\n(\|.*\n)+", lambda _: table + "\n", readme)
    return found


def _table(results: Path, suite: str, title: str) -> Table:
    tables: list[dict[str, Any]] = json.loads((results / f"{suite}.json").read_text())["tables"]
    return Table(**next(table for table in tables if re.match(title, table["title"])))


def _of(table: Table, start: str) -> float:
    return next(row["median"] for name, row in table.times.items() if name.startswith(start))


def _beside(table: Table, ours: str) -> dict[str, float]:
    """Return how many times as long others take, the fastest first: all that we lose to, and the next three."""
    times = {n: row["median"] / _of(table, ours) for n, row in table.times.items() if not n.startswith("ringmap")}
    for ratio in table.ratios:  # of calls in turn, where there are such
        if ratio.get("other") in times and ratio["ours"].startswith(ours):
            times[ratio["other"]] = ratio["value"]
    found: dict[str, float] = {}
    for name, value in sorted(times.items(), key=lambda one: one[1]):
        called = next((called for start, called in _CALLED.items() if name.startswith(start)), None)
        if called is not None:
            found.setdefault(called, value)
    lost = sum(value < 1 for value in found.values())
    return dict(list(found.items())[: lost + _NEXT])


def _times(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"
