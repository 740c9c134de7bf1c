"""The results of a run, put into the pages of docs/performance.

python -m benchmarks.harness.page benchmarks/results docs/performance/*.md

A page marks where tables go, and which: by the name of a benchmark, and by how the titles of its tables begin, a
regular expression in each line (none: all tables of it). What stands before the end of the place is replaced:

    <!-- benchmark: sampling
    one thread: .*pixels
    -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness.table import Table

__all__ = ["main", "put_tables"]

_PLACE = re.compile(
    r"(?P<head><!-- benchmark: (?P<name>\w+)\n(?P<titles>(?:(?!-->)[^\n]*\n)*)-->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def put_tables(results: Path, page: str) -> str:
    """Return a page with the tables of a folder that `python -m benchmarks --out` filled.

    A place keeps what it has if its benchmark has no result, or lacks one of its tables: a library was not installed.
    """

    def put(place: re.Match[str]) -> str:
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
        day = date.fromtimestamp(kept.stat().st_mtime)
        told = [_machine(found["machine"], day), *(table.markdown() for table in chosen)]
        return place["head"] + "\n" + "\n\n".join(told) + "\n\n" + place["end"]

    return _PLACE.sub(put, page)


def _machine(told: dict[str, Any], day: date) -> str:
    load = f"{told['load']:.1f}" + (f" to {told['load_after']:.1f}" if "load_after" in told else "")
    return (
        f"*{day:%d %B %Y}. {told['processor']}, {told['cores']} cores; {told['system']}; {told['file_system']}; "
        f"Python {told['python']}, NumPy {told['numpy']}; load average {load}.*"
    )


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.page", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("pages", type=Path, nargs="+")
    asked = parser.parse_args()
    if not list(asked.results.glob("*.json")):
        raise SystemExit(f"{asked.results}: no results there; run python -m benchmarks --out {asked.results}")
    for page in asked.pages:
        page.write_text(put_tables(asked.results, page.read_text()))


if __name__ == "__main__":
    main()
