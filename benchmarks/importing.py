"""`import ringmap`: how long, and what comes in with it."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.place import Place
from benchmarks.table import Table

HEAVY = ["gymnasium", "h5py", "numpy", "torch", "zarr"]

PROBE = """
import sys, time
start = time.perf_counter()
import {name}
print(time.perf_counter() - start, *{{m.split(".")[0] for m in sys.modules}})
"""


def run(place: Place) -> list[Table]:
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
    return [table]


def _probe(name: str) -> list[str]:
    command = [sys.executable, "-c", PROBE.format(name=name)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
