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
from benchmarks.questions import SUITES


def main() -> None:
    from benchmarks.harness.pages import HEADLINES, publish, summary_of

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(SUITES))
    parser.add_argument("--tiny", action="store_true", help="seconds in all; figures mean nothing")
    parser.add_argument("--quick", action="store_true", help="a ratio for each headline of README, in three minutes")
    parser.add_argument("--publish", action="store_true", help="then write the pages and README's table")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="folder of the buffers")
    asked = parser.parse_args()
    if asked.publish and (asked.tiny or asked.quick):
        parser.error("--publish: of a full run only; leave --tiny and --quick out")
    for name in asked.names:
        if name not in SUITES:
            parser.error(f"unknown benchmark {name!r}; known: {', '.join(SUITES)}")
    names = asked.names or (HEADLINES if asked.quick else list(SUITES))
    out = asked.out or Path("benchmarks/results" + "-quick" * asked.quick)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        start, place = perf_counter(), Place(asked.tiny, asked.scratch, asked.quick)
        machine, tables = place.machine(), []
        with place.stack:
            for table in getattr(import_module(f"benchmarks.questions.{SUITES[name]}"), name)(place):
                table.judged = not (asked.tiny or asked.quick)
                print(f"\n{name}: {table}", flush=True)
                tables.append(asdict(table))
        machine["load_after"] = os.getloadavg()[0]
        (out / f"{name}.json").write_text(json.dumps({"machine": machine, "tables": tables}, indent=1) + "\n")
        print(f"{name}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if asked.quick and set(names) >= set(HEADLINES):
        print(f"\n{summary_of(out)}\n\nLoad average {machine['load']:.1f}; smaller sizes than README's.")
    if asked.publish:
        publish(out, Path(__file__).parents[1])


if __name__ == "__main__":
    main()
