"""The plain `DataLoader(buffer, batch_size=256, shuffle=True, num_workers=n)`: whole passes, in turn.

The rate is that after the first batch: what it takes to start is in workers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks import rivals
from benchmarks.data import fill
from benchmarks.place import Place
from benchmarks.plots import rates
from benchmarks.rivals import Field, open_rivals
from benchmarks.stored import Stored
from benchmarks.table import Table
from ringmap import ReplayBuffer

__all__ = ["passes", "run"]

Array = np.ndarray[Any, np.dtype[Any]]
Batches = Callable[[int], Iterable[Any]]

BATCH, HISTORY = 256, 4
WORKERS = {0: 15, 2: 12}
"""Number of workers -> how many times as fast as the original in the same loader."""


def run(place: Place) -> list[Table]:
    """Time passes without workers and with two; draw the plot."""
    group = place.size(8, 1)  # batches timed together: those of workers arrive in bunches
    stored = Stored.of_pixels(place.size(400, 8), 100)
    tables = {
        workers: Table(
            f"a pass of DataLoader(buffer, batch_size={BATCH}, shuffle=True, num_workers={workers}): "
            f"clips of {HISTORY} steps of 64x64x3 pixels and 3 small columns, {stored.num_steps:,} steps stored; "
            "seconds per batch"
        )
        for workers in WORKERS
    }
    panels = {}
    with place.folder() as folder:
        buffer: Any = ReplayBuffer(stored.num_steps, HISTORY, path=folder / "buffer", seed=0)
        fill(buffer, iter(stored), stored.num_episodes)
        makers = [rivals.original, rivals.torchrl_in_files, rivals.hdf5]
        found = open_rivals(makers, Field(stored, folder, BATCH, HISTORY), tables[0])

        def ours(workers: int) -> Iterable[Any]:
            return DataLoader(buffer, batch_size=BATCH, shuffle=True, num_workers=workers)

        calls: dict[str, Batches] = {"ringmap": ours}
        for rival in found:
            if rival.batches is not None:
                calls[rival.name] = rival.batches
        clips = {rival.name: rival.clips for rival in found}
        for workers, at_least in WORKERS.items():
            table = tables[workers]
            for name, batches in calls.items():
                first = next(iter(batches(workers)))
                first = first if isinstance(first, dict) else clips[name](first)
                stored.assert_holds(first, BATCH, HISTORY)
            table.add_all(passes(calls, workers, place.size(5, 1), group))
            panels[f"{workers} workers"] = {
                name: BATCH / row["median"] for name, row in table.times.items()
            }
            for name, rate in panels[f"{workers} workers"].items():
                table.fact(f"clips/s, {name}", f"{rate:,.0f}")
            for name in list(calls)[1:]:
                judged = name.startswith("stable-worldmodel")
                table.faster("ringmap", name, at_least if judged else None)
            table.notes.append(
                f"times of {group} batches, divided; nothing looks at the batches; TorchRL has no DataLoader: its own "
                + ("iteration" if not workers else f"iteration with prefetch={workers} threads")
            )
        buffer.close()
    rates(
        place.out / "loading.png", tables[2], panels,
        f"clips/s, DataLoader(batch_size={BATCH}, shuffle=True, num_workers=...)",
    )  # fmt: skip
    return list(tables.values())


def passes(calls: dict[str, Batches], workers: int, rounds: int, group: int) -> dict[str, Array]:
    """Return the seconds per batch of each, over all passes, without the first batches of each."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tqdm(range(rounds), desc=f"passes with {workers} workers", delay=2, leave=False):
        for name, batches in calls.items():
            stamps = []
            for batch in batches(workers):
                stamps.append(perf_counter())
                del batch
            # The second batch was begun while the first was awaited; and the last is smaller.
            taken[name].extend(np.diff(stamps[:-1][group if workers else 0 :: group]) / group)
    return {name: np.array(times) for name, times in taken.items()}
