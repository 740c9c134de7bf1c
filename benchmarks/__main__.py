"""`python -m benchmarks`: run them, print the tables, keep them as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from time import perf_counter

from benchmarks.place import Place

NAMES = [
    "importing", "commit", "opening", "growth", "write", "sampling", "loading", "where", "workers", "cold", "codecs",
    "pickling", "torn", "snapshot", "world", "transitions", "updates", "parts", "rollout", "recording", "formats", "dumping", "windows",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="name", help=", ".join(NAMES))
    parser.add_argument("--tiny", action="store_true", help="seconds in all; figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--plots", type=Path, help="folder of the pictures, if another than --out's"
    )
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    for name in asked.names:
        if name not in NAMES:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(NAMES)}")
    plots = asked.plots or asked.out
    for folder in (asked.out, plots):
        folder.mkdir(parents=True, exist_ok=True)
    place = Place(asked.tiny, plots, asked.scratch)
    for name in asked.names:
        start = perf_counter()
        machine = place.machine()
        tables = import_module(f"benchmarks.{name}").run(place)
        for table in tables:
            table.judged = not asked.tiny
            print(f"\n{name}: {table}", flush=True)
        kept = {"machine": machine, "tables": [asdict(t) for t in tables]}
        (asked.out / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{name}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
