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

from benchmarks.harness.data import fill
from benchmarks.harness.place import Place
from benchmarks.harness.plots import rates
from benchmarks.harness.stored import Stored
from benchmarks.harness.table import Table
from benchmarks.peers import files, rivals
from benchmarks.peers.rivals import Field, open_rivals
from ringmap import ReplayBuffer

__all__ = ["passes", "run"]

Array = np.ndarray[Any, np.dtype[Any]]
Batches = Callable[[int], Iterable[Any]]

BATCH, HISTORY = 256, 4
WORKERS = {0: 15, 2: 12}
"""Number of workers -> how many times as fast as the original in the same loader."""
LIVING = 0, 2, 8
"""Numbers of workers that live on from pass to pass."""


def run(place: Place) -> list[Table]:
    """Time passes without workers and with two, beside others; whole passes with workers that live on; draw the
    plot."""
    group = place.size(8, 1)  # batches timed together: those of workers arrive in bunches
    stored = Stored.of_pixels(place.size(400, 8, 100), 100)
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
        makers = [rivals.original, rivals.torchrl_in_files, files.hdf5]
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
            table.add_all(passes(calls, workers, place.size(5, 1, 2), group))
            panels[f"{workers} workers"] = {name: BATCH / row["median"] for name, row in table.times.items()}
            for name in list(calls)[1:]:
                judged = name.startswith("stable-worldmodel")
                table.faster("ringmap", name, at_least if judged else None)
            table.notes.append(
                f"times of {group} batches, divided; nothing looks at the batches; TorchRL has no DataLoader: its own "
                + ("iteration" if not workers else f"iteration with prefetch={workers} threads")
            )
        living = _living(place, buffer)
        buffer.close()
    rates(
        place.out / "loading.png",
        tables[2],
        panels,
        f"clips/s, DataLoader(batch_size={BATCH}, shuffle=True, num_workers=...)",
    )
    return [*tables.values(), living]


def _living(place: Place, buffer: Any) -> Table:
    """Time whole passes, from the call of `iter` on, and their first batches; the pass that starts the workers is not
    counted."""
    table = Table(
        f"the same loader with persistent_workers=True, whole passes of {len(buffer) // BATCH + 1} batches; seconds "
        "per batch"
    )
    loaders = {n: DataLoader(buffer, BATCH, shuffle=True, num_workers=n, persistent_workers=n > 0) for n in LIVING}
    alone = DataLoader(buffer, BATCH, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=1)
    empty: DataLoader[Any] = DataLoader(
        Empty(len(buffer)),
        BATCH,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        collate_fn=len,
    )
    whole: dict[int, list[float]] = {workers: [] for workers in LIVING}
    first: dict[int, list[float]] = {workers: [] for workers in LIVING}
    singly: list[float] = []
    nothing: list[float] = []
    for turn in tqdm(range(place.size(10, 1) + 1), desc="workers that live on", delay=2, leave=False):
        for workers, loader in loaders.items():
            stamps = _stamps(loader)
            if turn:
                whole[workers].append((stamps[-1] - stamps[0]) / (len(stamps) - 1))
                first[workers].append(stamps[1] - stamps[0])
        stamps, bare = _stamps(alone), _stamps(empty)
        if turn:
            singly.extend(np.diff(stamps)[1:-1])
            nothing.append(bare[1] - bare[0])
    names = {workers: f"{workers or 'no'} workers" for workers in LIVING}
    table.add_all({names[workers]: times for workers, times in whole.items()})
    table.add("one worker, one batch after the other", singly)
    table.add_all({f"the first batch, {names[workers]}": first[workers] for workers in LIVING})
    table.add("the first batch, 2 workers, of a dataset without rows", nothing)
    table.faster(names[2], names[0], at_least=0.9)
    table.faster(names[8], names[2], at_least=1)
    table.ratio(f"the first batch, {names[2]}", "one worker, one batch after the other", at_most=1.2)
    table.ratio(f"the first batch, {names[2]}", "the first batch, 2 workers, of a dataset without rows")
    table.notes.append(
        "one batch after the other: prefetch_factor=1, so that nothing is under way when a batch is asked for"
    )
    table.notes.append(
        "a dataset without rows: each batch is its length, so this is what DataLoader itself takes to begin a pass: "
        "it shuffles all numbers into a list, and waits for an answer of each worker"
    )
    del loaders, loader, alone, empty  # and their workers
    return table


class Empty:
    """A dataset of `num` clips without rows: what is left of a pass is the loader's own."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitems__(self, numbers: list[int]) -> list[int]:
        return numbers


def _stamps(loader: Iterable[Any]) -> list[float]:
    """Return when a pass began, and when each batch had come."""
    stamps = [perf_counter()]
    for batch in loader:
        stamps.append(perf_counter())
        del batch
    return stamps


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
