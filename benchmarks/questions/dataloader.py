"""How fast is a DataLoader? Whole passes, where the time of a batch goes, what a worker costs, and other libraries'
own loaders."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.data import Stored, fill, noise, pixels, states
from benchmarks.harness.place import Place
from benchmarks.harness.processes import private_memory
from benchmarks.harness.table import Table
from benchmarks.harness.timing import passes, seconds, stamps, turns
from benchmarks.peers import buffers, files
from benchmarks.peers.base import Spec, full
from benchmarks.peers.loaders import exits
from ringmap import ReplayBuffer
from ringmap.buffers import lookup

__all__ = ["exits", "loading", "where", "workers"]

BATCH, HISTORY = 256, 4
LEAST = {0: 15, 2: 12}
"""Number of workers -> how many times as fast as the original in the same loader."""
LIVING = 0, 2, 8
"""Numbers of workers that live on from pass to pass."""


def loading(place: Place) -> Iterator[Table]:
    """Time passes without workers and with two, beside others; whole passes with workers that live on.

    The rate is that after the first batch: what it takes to start is in `workers`.
    """
    group = place.size(8, 1)  # batches timed together: those of workers arrive in bunches
    stored = Stored.of_pixels(place.size(400, 8, 100), 100)
    tables = {
        workers: Table(
            f"a pass of DataLoader(buffer, batch_size={BATCH}, shuffle=True, num_workers={workers}): "
            f"clips of {HISTORY} steps of 64x64x3 pixels and 3 small columns, {stored.num_steps:,} steps stored; "
            "seconds per batch"
        )
        for workers in LEAST
    }
    folder = place.new_folder()
    buffer: Any = place.closing(stored.ring(folder / "buffer", HISTORY))
    spec = Spec.of(stored, folder, BATCH, HISTORY)
    peers = full([buffers.StableWorldmodel, buffers.TorchRLSlices, files.Hdf5], spec, stored, tables[0])

    def ours(workers: int) -> Iterable[Any]:
        return DataLoader(buffer, batch_size=BATCH, shuffle=True, num_workers=workers)

    calls = {"ringmap": ours, **{peer.name: peer.batches for peer in peers if peer.batches}}
    clips = {peer.name: peer.clips for peer in peers}
    for workers, table in tables.items():
        for name, batches in calls.items():
            batch = next(iter(batches(workers)))
            stored.assert_holds(batch if isinstance(batch, dict) else clips[name](batch), BATCH, HISTORY)
        table.add_all(passes(calls, workers, place.size(5, 1, 2), group))
        for name in list(calls)[1:]:
            table.faster("ringmap", name, LEAST[workers] if name.startswith("stable-worldmodel") else None)
        table.notes.append(
            f"times of {group} batches, divided; nothing looks at the batches; TorchRL has no DataLoader: its own "
            + ("iteration" if not workers else f"iteration with prefetch={workers} threads")
        )
        yield table
    yield _living(place, buffer)


def _living(place: Place, buffer: Any) -> Table:
    """Time whole passes, from the call of `iter` on, and their first batches; the pass that starts the workers is not
    counted."""
    table = Table(
        f"the same loader with persistent_workers=True, whole passes of {len(buffer) // BATCH + 1} batches; seconds "
        "per batch"
    )

    def loader(workers: int, data: Any = buffer, **options: Any) -> Any:
        return DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0, **options)

    loaders = {f"{n or 'no'} workers": loader(n) for n in LIVING}
    single, bare = "one worker, one batch after the other", "the first batch, 2 workers, of a dataset without rows"
    loaders |= {single: loader(1, prefetch_factor=1), bare: loader(2, range(len(buffer)), collate_fn=len)}
    taken = turns({n: (lambda one=one: stamps(one)) for n, one in loaders.items()}, place.size(10, 1) + 1)
    del loaders  # and their workers
    names = [f"{n or 'no'} workers" for n in LIVING]
    for name in names:
        table.add(name, [(at[-1] - at[0]) / (len(at) - 1) for at in taken[name][1:]])
    table.add(single, np.concatenate([np.diff(at)[1:-1] for at in taken[single][1:]]))
    for name, row in {**{f"the first batch, {n}": n for n in names}, bare: bare}.items():
        table.add(name, [at[1] - at[0] for at in taken[row][1:]])
    table.faster(names[1], names[0], at_least=0.9)
    table.faster(names[2], names[1], at_least=1)
    table.ratio(f"the first batch, {names[1]}", single, at_most=1.2)
    table.ratio(f"the first batch, {names[1]}", bare)
    table.notes += [
        "one batch after the other: prefetch_factor=1, so that nothing is under way when a batch is asked for",
        "a dataset without rows: each batch is its length, so this is what DataLoader itself takes to begin a pass: "
        "it shuffles all numbers into a list, and waits for an answer of each worker",
    ]
    return table


# -- where the time goes -------------------------------------------------------------------------


def where(place: Place) -> Iterator[Table]:
    """Time a batch of pixels by every way, one after the other: what the DataLoader and the way from a worker add."""
    stored = Stored.of_pixels(place.size(400, 20), 100)
    buffer: Any = place.closing(stored.ring(place.new_folder() / "buffer", HISTORY))
    stored.assert_holds(buffer.sample(BATCH), BATCH, HISTORY)

    def sampled(threads: int | None) -> Any:
        buffer.threads = threads
        found = [seconds(lambda: buffer.sample(BATCH)) for _ in range(count)]
        buffer.threads = None
        return found

    def loaded(workers: int) -> Any:
        options: dict[str, Any] = {"prefetch_factor": 1, "multiprocessing_context": "fork"} if workers else {}
        return np.diff(stamps(islice(DataLoader(buffer, BATCH, shuffle=True, num_workers=workers, **options), count)))

    def without_slots() -> Any:
        with mock.patch.object(lookup, "_room", return_value=None):
            return loaded(1)

    count = place.size(60, 5)
    ways = {
        "sample(), one thread": lambda: sampled(1),
        "sample()": lambda: sampled(None),
        "DataLoader, no workers": lambda: loaded(0),
        "DataLoader, one worker": lambda: loaded(1),
        "the same by PyTorch's own transport": without_slots,
    }
    table = Table(f"a batch of {BATCH} clips of {HISTORY} steps of 64x64x3 pixels and 3 small columns, by every way")
    found = turns(ways, place.size(5, 1))
    table.add_all({way: np.concatenate([times[2:] for times in taken]) for way, taken in found.items()})
    table.notes.append("one worker: no batch is asked for before the last has come; two would overlap")
    yield table


# -- what a worker costs -------------------------------------------------------------------------

FIRST = 64
"""Clips of the first batch."""
SHAPE = HISTORY, 64, 64, 3


def _sizes(place: Place, folder: Path) -> dict[str, tuple[ReplayBuffer, int]]:
    """Return buffers small and large, of few and of many episodes, with their number of episodes."""
    few, many, most = place.size(25, 10), place.size(2_500, 20), place.size(1_000_000, 800)
    found, frames = {}, pixels(noise(100))
    for number, steps, source in ((few, 100, frames), (many, 100, frames), (most, 4, states(4))):
        buffer = ReplayBuffer(number * steps, HISTORY, path=folder / str(number), seed=0)
        place.closing(fill(buffer, source, number))
        buffer.flush()  # else pages that wait for the disk would count as the worker's own
        nbytes = sum(column.nbytes for column in buffer.load_episode(0).values()) * number
        found[f"{nbytes / 1e9:.2g} GB, {number:,} episodes"] = buffer, number
    return found


def workers(place: Place) -> Iterator[Table]:
    """Time a spawned worker to its first batch, and tell its memory, beside one whose dataset reads nothing."""
    table = Table(
        f"next(iter(DataLoader(buffer, batch_size={FIRST}, shuffle=True, num_workers=1))), the worker spawned"
    )
    folder = place.new_folder()
    sizes = _sizes(place, folder)
    nothing = TensorDataset(torch.zeros(1, dtype=torch.uint8).expand(100 * FIRST, *SHAPE))
    empty = "a worker that reads nothing"
    datasets: dict[str, Any] = {empty: nothing, **{name: buffer for name, (buffer, _) in sizes.items()}}

    def first(dataset: Any) -> tuple[float, dict[str, float]]:
        start = perf_counter()
        loader: Any = DataLoader(dataset, FIRST, shuffle=True, num_workers=1, multiprocessing_context=place.method)
        batches = iter(loader)
        next(batches)
        taken = perf_counter() - start
        for _ in range(place.size(20, 4)):  # then all the slots that a pass uses are there
            next(batches)
        [worker] = multiprocessing.active_children()
        return taken, private_memory(worker.pid or 0, folder)

    taken = turns({n: (lambda one=one: first(one)) for n, one in datasets.items()}, place.size(9, 1))
    table.add_all({name: [seconds for seconds, _ in found] for name, found in taken.items()})
    small, large, _ = sizes
    table.ratio(large, small, at_most=1.15)
    dumps = {f"pickle.dumps, {n}": partial(pickle.dumps, buffer) for n, (buffer, _) in sizes.items()}
    table.time(dumps, place.size(1_000, 5))
    for name, call in dumps.items():
        table.fact(f"bytes, {name}", len(call()))
    memory = {name: [found for _, found in both] for name, both in taken.items()}
    if not memory[large][0]:
        table.notes.append("this system does not tell the memory of a process")
        yield table
        return
    middle = {n: {k: float(np.median([m[k] for m in found])) for k in found[0]} for n, found in memory.items()}
    for name, kinds in middle.items():
        told = ", ".join(f"{value:.1f} MB {kind}" for kind, value in kinds.items())
        table.fact(f"private memory, {name}", told)
    for name, (_, number) in sizes.items():
        more = sum(middle[name][kind] - middle[empty][kind] for kind in ("of its own", "in shared memory"))
        table.bar(f"private memory above that of {empty}, {name}, MB", more, at_most=30 + 24e-6 * number)
    table.notes.append(
        "of the rows: the page cache, which the system takes back when it needs it; in shared memory: batches on "
        "their way"
    )
    yield table
