"""`python -m benchmarks`: run them, print the tables, keep them as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from time import perf_counter

from benchmarks.harness.place import Place

NAMES = [
    "importing",
    "commit",
    "opening",
    "growth",
    "write",
    "sampling",
    "loading",
    "where",
    "workers",
    "cold",
    "codecs",
    "pickling",
    "torn",
    "safety",
    "snapshot",
    "world",
    "calls",
    "transitions",
    "updates",
    "parts",
    "rollout",
    "recording",
    "formats",
    "dumping",
    "windows",
    "fleet",
    "viewer",
    "exits",
    "ray",
    "gpu",
]

HEADLINES = ["transitions", "sampling", "cold", "loading", "commit", "opening"]
"""What README's table is made of."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(NAMES))
    parser.add_argument("--tiny", action="store_true", help="seconds in all; figures mean nothing")
    parser.add_argument("--quick", action="store_true", help="a ratio for each headline of README, in three minutes")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="then write the documentation's pages and README's table",
    )
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--plots", type=Path, help="folder of the pictures, if another than --out's")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    if asked.publish and (asked.tiny or asked.quick):
        parser.error("--publish: of a full run only; leave --tiny and --quick out")
    for name in asked.names:
        if name not in NAMES:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(NAMES)}")
    asked.names = asked.names or (HEADLINES if asked.quick else NAMES)
    asked.out = asked.out or Path("benchmarks/results" + "-quick" * asked.quick)
    plots = asked.plots or asked.out
    for folder in (asked.out, plots):
        folder.mkdir(parents=True, exist_ok=True)
    place = Place(asked.tiny, plots, asked.scratch, asked.quick)
    for name in asked.names:
        start = perf_counter()
        machine = place.machine()
        tables = import_module(f"benchmarks.questions.{name}").run(place)
        for table in tables:
            table.judged = not (asked.tiny or asked.quick)
            print(f"\n{name}: {table}", flush=True)
        machine["load_after"] = os.getloadavg()[0]
        kept = {"machine": machine, "tables": [asdict(t) for t in tables]}
        (asked.out / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{name}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if asked.quick and set(asked.names) >= set(HEADLINES):
        from benchmarks.harness.summary import summary_of

        print(f"\n{summary_of(asked.out)}\n\nLoad average {machine['load']:.1f}; smaller sizes than README's.")
    if asked.publish:
        publish(asked.out)


def publish(results: Path) -> None:
    """Write what was measured into the documentation's pages; into README, if all of its table was."""
    from benchmarks.harness.page import put_tables
    from benchmarks.harness.summary import put_in, summary_of

    root = Path(__file__).parents[1]
    readme = root / "README.md"
    for page in (root / "docs/performance").glob("*.md"):
        page.write_text(put_tables(results, page.read_text()))
    if all((results / f"{name}.json").exists() for name in HEADLINES):
        readme.write_text(put_in(readme.read_text(), summary_of(results)))


if __name__ == "__main__":
    main()
