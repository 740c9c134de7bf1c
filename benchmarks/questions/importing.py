"""`import ringmap` and `ringmap --help`: how long, and what comes in with them."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table

HEAVY = ["gymnasium", "h5py", "numpy", "torch", "zarr"]

PROBE = """
import sys, time
start = time.perf_counter()
import {name}
print(time.perf_counter() - start, *{{m.split(".")[0] for m in sys.modules}})
"""


BARE = """
import typer

app = typer.Typer()


@app.command()
def one(path: str) -> None:
    "Do one thing."


@app.command()
def other(path: str) -> None:
    "Do another."


app()
"""
"""The smallest program with Typer that has commands."""


def run(place: Place) -> list[Table]:
    """Time both."""
    return [_imports(place), _helps(place)]


def _imports(place: Place) -> Table:
    """Import it, and NumPy for comparison, in fresh interpreters in turn."""
    table = Table("import, in a fresh interpreter")
    names = "ringmap", "numpy"
    taken: dict[str, list[float]] = {name: [] for name in names}
    came: set[str] = set()
    for _ in range(place.size(51, 2)):
        for name in names:
            seconds, *modules = _probe(name)
            taken[name].append(float(seconds))
            if name == "ringmap":
                came |= set(modules)
    for name, seconds in taken.items():
        table.add(f"import {name}", seconds)
    table.bar("import ringmap, p99 s", table.times["import ringmap"]["p99"], at_most=0.1)
    table.bar(f"of {', '.join(HEAVY)}: come in", len(came & set(HEAVY)), at_most=0)
    return table


def _helps(place: Place) -> Table:
    """Show the help of the command line, and of a bare program, in fresh interpreters in turn."""
    table = Table("--help, from the start of a process to its end")
    names = {"ringmap": ["-m", "ringmap"], "a bare typer.Typer of two commands": ["-c", BARE]}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(place.size(51, 2)):
        for name, words in names.items():
            start = perf_counter()
            subprocess.run([sys.executable, *words, "--help"], check=True, capture_output=True)
            taken[name].append(perf_counter() - start)
    table.add_all(taken)
    ours, bare = (table.times[name]["median"] for name in names)
    table.bar("ringmap --help, more than the bare one, median s", ours - bare, at_most=0.2)
    table.notes.append("Typer draws the bare one's help with Rich, as it does by default; ours is plain text")
    return table


def _probe(name: str) -> list[str]:
    command = [sys.executable, "-c", PROBE.format(name=name)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
