"""What a DataLoader's spawned worker costs: time to its first batch, and memory of its own.

Against a worker whose dataset hands out batches of as many bytes, and reads nothing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.harness.data import fill, noise, pixels, states
from benchmarks.harness.empty import Nothing
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from ringmap import ReplayBuffer

BATCH, HISTORY, STEPS = 64, 4, 100
EMPTY = "a worker that reads nothing"
COUNTED = "of its own", "in shared memory"


def run(place: Place) -> list[Table]:
    """Compare buffers small and large, of few and of many episodes, and a worker without one."""
    few, many, most = place.size(25, 10), place.size(2_500, 20), place.size(1_000_000, 800)
    table = Table(
        f"next(iter(DataLoader(buffer, batch_size={BATCH}, shuffle=True, num_workers=1))), the worker spawned"
    )
    frames = pixels(noise(STEPS))
    datasets: dict[str, Any] = {EMPTY: Nothing(100 * BATCH, (HISTORY, 64, 64, 3))}
    episodes = {EMPTY: 0}
    with place.folder() as folder:
        for number, steps, source in (
            (few, STEPS, frames),
            (many, STEPS, frames),
            (most, 4, states(4)),
        ):
            buffer = ReplayBuffer(number * steps, HISTORY, path=folder / str(number), seed=0)
            fill(buffer, source, number)
            buffer.flush()  # else pages that wait for the disk would count as the worker's own
            nbytes = sum(column.nbytes for column in buffer.load_episode(0).values()) * number
            name = f"{nbytes / 1e9:.2g} GB, {number:,} episodes"
            datasets[name], episodes[name] = buffer, number
        started: dict[str, list[float]] = {name: [] for name in datasets}
        memory: dict[str, list[dict[str, float]]] = {name: [] for name in datasets}
        for _ in range(place.size(9, 1)):
            for name, dataset in datasets.items():
                took, found = _first_batch(dataset, str(folder), place)
                started[name].append(took)
                memory[name].append(found)
        for name in episodes:
            if episodes[name]:
                datasets[name].close()
    table.add_all(started)
    _, small, large, _ = datasets
    table.ratio(large, small, at_most=1.15)
    if not memory[large][0]:
        table.notes.append("this system does not tell the memory of a process")
        return [table]
    middle = {
        name: {kind: float(np.median([m[kind] for m in found])) for kind in found[0]} for name, found in memory.items()
    }
    for name, kinds in middle.items():
        told = ", ".join(f"{value:.1f} MB {kind}" for kind, value in kinds.items())
        table.fact(f"private memory, {name}", told)
    for name, number in episodes.items():
        if number:
            table.bar(
                f"private memory above that of {EMPTY}, {name}, MB",
                sum(middle[name][kind] - middle[EMPTY][kind] for kind in COUNTED),
                at_most=30 + 24e-6 * number,
            )
    table.notes.append(
        "of the rows: the page cache, which the system takes back when it needs it; in shared memory: batches on "
        "their way"
    )
    return [table]


def _first_batch(dataset: Any, folder: str, place: Place) -> tuple[float, dict[str, float]]:
    """Return the seconds to the first batch, and the worker's memory so many batches later."""
    start = perf_counter()
    loader: Iterable[Any] = DataLoader(
        dataset, BATCH, shuffle=True, num_workers=1, multiprocessing_context=place.method
    )
    batches = iter(loader)
    next(batches)
    taken = perf_counter() - start
    for _ in range(place.size(20, 4)):  # then all the slots that a pass uses are there
        next(batches)
    [worker] = multiprocessing.active_children()
    return taken, _private(Path("/proc", str(worker.pid), "smaps"), folder)


def _private(smaps: Path, folder: str) -> dict[str, float]:
    """Return the megabytes that only this process has mapped, by what they are; empty if not told."""
    kinds = dict.fromkeys((*COUNTED, "of the rows"), 0.0)
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return {}
    kind = ""
    for line in lines:
        first, *rest = line.split()
        if not first.endswith(":"):  # a mapping: addresses, rights, offset, device, inode, path
            path = " ".join(rest[4:])
            shared = path.startswith(("/dev/shm", "/dev/zero", "/memfd"))
            kind = "in shared memory" if shared else "of its own"
            kind = "of the rows" if path.startswith(folder + "/") and path.endswith(".npy") else kind
        elif first in ("Private_Clean:", "Private_Dirty:"):
            kinds[kind] += int(rest[0]) * 1024 / 1e6
    return kinds
