"""Drawing a batch, rows in the page cache: one thread beside one thread, all cores beside all cores.

Where a library has no threads, the benchmark starts one for each core, and each thread draws its own batches. ringmap
divides one batch among its threads. stable-worldmodel runs after TorchRL, whose threads use a core for a while after
each call: its own calls are so long that this does not show.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import fill
from benchmarks.harness.place import Place
from benchmarks.harness.plots import rates
from benchmarks.harness.stored import Stored
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn, seconds
from benchmarks.harness.turns import spawned
from benchmarks.peers import rivals
from benchmarks.peers.rivals import Field, open_rivals
from ringmap import ReplayBuffer
from ringmap.storage.disk.system import cores

Array = np.ndarray[Any, np.dtype[Any]]
Calls = Mapping[str, Callable[[], object]]

BATCH, HISTORY = 256, 4
OURS = "ringmap"
MEMCPY = "memcpy of as many pixels, contiguous: a bound"
FANCY = "NumPy, one fancy index per column"
OWN_THREADS = ("ringmap", "TorchRL", "memcpy")
"""What divides a batch among threads itself; of the others, each thread draws batches."""


def run(place: Place) -> list[Table]:
    """Time pixels and state vectors; draw the plot."""
    pixels, states = _pixels(place), _states(place)
    panels = {
        f"{what}, {threads}": {name: BATCH / row["median"] for name, row in table.times.items()}
        for what, tables in (("pixels", pixels), ("state vectors", states))
        for threads, table in zip(("one thread", "all cores"), tables, strict=True)
    }
    rates(place.out / "sampling.png", states[-1], panels, f"clips/s, sample() of {BATCH}")
    return [*pixels, *states]


def _pixels(place: Place) -> list[Table]:
    stored = Stored.of_pixels(place.size(500, 20, 100), place.size(200, 100))
    what = (
        f"sample({BATCH}) of clips of {HISTORY} steps of 64x64x3 pixels and 3 small columns, "
        f"{stored.num_steps:,} steps stored"
    )
    rng = np.random.default_rng(0)
    with place.folder() as folder, ThreadPoolExecutor(cores()) as pool:
        buffer = ReplayBuffer(stored.num_steps, HISTORY, path=folder / "buffer", seed=0)
        fill(buffer, iter(stored), stored.num_episodes)
        columns = _columns(folder / "buffer")
        frames, count = columns["pixels"], BATCH * HISTORY

        def fancy_index() -> dict[str, Array]:
            episodes = rng.integers(stored.num_episodes, size=BATCH)
            steps = rng.integers(stored.length - HISTORY + 1, size=BATCH)
            slots = (episodes * stored.length + steps)[:, None] + np.arange(HISTORY)
            return {name: column[slots] for name, column in columns.items()}

        def memcpy(parts: int) -> Array:
            start, copy = int(rng.integers(len(frames) - count)), np.empty_like(frames[:count])
            ends = [count * part // parts for part in range(parts + 1)]
            copying = [pool.submit(np.copyto, copy[i:j], frames[start + i : start + j]) for i, j in pairwise(ends[:-1])]
            np.copyto(copy[ends[-2] :], frames[start + ends[-2] : start + count])
            for part in copying:
                part.result()
            return copy

        tables = [Table(f"one thread: {what}"), Table(f"all {cores()} cores: {what}")]
        for batch in (buffer.sample(BATCH), fancy_index()):
            stored.assert_holds(batch, BATCH, HISTORY)
        makers = [
            rivals.torchrl_in_files,
            rivals.original,
            rivals.sheeprl_sequences,
            rivals.sheeprl_episodes,
            rivals.cpprb_in_files,
            rivals.dreamer,
        ]
        found = open_rivals(makers, Field(stored, folder, BATCH, HISTORY), tables[0])
        calls: dict[str, Callable[[], object]] = {
            OURS: lambda: buffer.sample(BATCH),
            FANCY: fancy_index,
            **{rival.name: rival.sample for rival in found if rival.sample is not None},
        }
        bounds = {MEMCPY: (lambda: memcpy(1), lambda: memcpy(cores()))}
        _time(tables, calls, bounds, buffer, pool, place.size(40, 2, 12), place.size(10, 2))
        reverb = None if place.tiny or place.quick else _reverb(tables[1], calls[OURS], stored)
        buffer.close()
    one, every = tables
    one.rank(OURS, {MEMCPY: 0.65, FANCY: 0.9})
    every.rank(OURS)
    if reverb is not None:
        name, times, beside = reverb
        every.add(name, times)
        ratio = float(np.median(times) / np.median(beside))
        every.bar(f"{OURS}: times as fast as {name}, median of turns beside it", ratio)
    for table in tables:
        table.notes.append(
            "sheeprl's sequences, cpprb's steps and DreamerV3's sequences do not keep to an episode; cpprb draws 4 "
            "steps for each clip"
        )
    every.notes.append(_THREADS)
    return tables


def _reverb(table: Table, ours: Callable[[], object], stored: Stored) -> tuple[str, list[float], list[float]] | None:
    """Return the times of Reverb, and of ours in turns beside it, if there is a Python that has it."""
    python = os.environ.get("RINGMAP_BENCH_REVERB")
    script = Path(__file__).parents[1] / "peers/reverb_server.py"
    if python is None:
        table.fact("skipped, Reverb", f"needs a Python of its own: {script.name} says how")
        return None
    times: list[float] = []
    beside: list[float] = []
    with spawned(python, script, stored.num_episodes, stored.length) as party:
        (name,) = party.settings
        for _ in range(5):
            beside += [seconds(ours) for _ in range(100)]
            times += party.turn(name, 2.0)["seconds"]
    return name, times, beside


_THREADS = (
    "all cores: ours, TorchRL and memcpy divide each batch; of the others each thread draws batches of its own, "
    "and the time is that of the call divided by their number"
)


def _states(place: Place) -> list[Table]:
    stored = Stored.of_states(place.size(100_000, 100, 10_000), place.size(10, 5))
    what = f"sample({BATCH}) of state vectors, 4 small columns, history 1, {stored.num_steps:,} steps stored"
    rng = np.random.default_rng(0)
    with place.folder() as folder, ThreadPoolExecutor(cores()) as pool:
        buffer = ReplayBuffer(stored.num_steps, path=folder / "buffer", seed=0)
        fill(buffer, iter(stored), stored.num_episodes)
        columns = _columns(folder / "buffer")

        def takes() -> dict[str, Array]:
            slots = rng.integers(stored.num_steps, size=BATCH)
            return {n: column.take(slots, axis=0, mode="clip") for n, column in columns.items()}

        def fancy_index() -> dict[str, Array]:
            slots = rng.integers(stored.num_steps, size=BATCH)
            return {name: column[slots] for name, column in columns.items()}

        bare, with_next = "NumPy, draw and takes", "ringmap, history 2 (the next step too)"
        tables = [Table(f"one thread: {what}"), Table(f"all {cores()} cores: {what}")]
        for batch in (buffer.sample(BATCH), takes(), fancy_index()):
            stored.assert_holds(batch, BATCH, 1)
        stored.assert_holds(buffer.sample(BATCH, 2), BATCH, 2)
        makers = [
            rivals.torchrl_in_files,
            rivals.original,
            rivals.sheeprl_sequences,
            rivals.cpprb_in_ram,
            rivals.stable_baselines3,
        ]
        found = open_rivals(makers, Field(stored, folder, BATCH, 1), tables[0])
        calls: dict[str, Callable[[], object]] = {
            OURS: lambda: buffer.sample(BATCH),
            with_next: lambda: buffer.sample(BATCH, 2),
            bare: takes,
            FANCY: fancy_index,
            **{rival.name: rival.sample for rival in found if rival.sample is not None},
        }
        _time(tables, calls, {}, buffer, pool, place.size(100, 2, 25), place.size(10, 2))
        buffer.close()
    one, every = tables
    one.rank(OURS, {bare: 0.5, "cpprb": 1, "Stable-Baselines3": 1})
    every.rank(OURS)
    for rival in found:
        if rival.lacks:
            one.faster(with_next, rival.name)
            one.notes.append(f"{rival.name} returns obs twice, now and next, as tensors, and no discount")
    every.notes.append(
        _THREADS + "; a small batch is never divided, and the draws wait for each other's interpreter lock"
    )
    return tables


def _time(
    tables: list[Table],
    calls: Calls,
    bounds: Mapping[str, tuple[Callable[[], object], Callable[[], object]]],
    buffer: ReplayBuffer,
    pool: ThreadPoolExecutor,
    rounds: int,
    burst: int,
) -> None:
    """Fill both tables: one thread, then all cores; in each, all parties in turn."""
    one, every = tables
    slower: list[str] = []
    many = {name: call if name.startswith(OWN_THREADS) else _by_each(call, pool) for name, call in calls.items()}
    for table, threads, parties in (
        (one, 1, {**calls, **{name: both[0] for name, both in bounds.items()}}),
        (every, cores(), {**many, **{name: both[1] for name, both in bounds.items()}}),
    ):
        buffer.threads = None if threads > 1 else 1
        _torch_threads(threads)
        for name, times in in_turn(parties, rounds, burst).items():
            shared = threads > 1 and not name.startswith(OWN_THREADS)
            table.add(name, times / threads if shared else times)
    for name, row in one.times.items():
        if row["median"] < every.times[name]["median"]:
            every.times[name] = row
            slower.append(name)
    if slower:
        every.notes.append("more threads are slower, so this is one thread again: " + ", ".join(slower))


def _by_each(call: Callable[[], object], pool: ThreadPoolExecutor) -> Callable[[], object]:
    """Return a call that has every core draw a batch."""

    def by_each() -> None:
        drawing = [pool.submit(call) for _ in range(cores())]
        for drawn in drawing:
            drawn.result()

    return by_each


def _torch_threads(count: int) -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(count)


def _columns(folder: Path) -> dict[str, Array]:
    """Return the column files as NumPy alone opens them."""
    files = sorted((folder / "columns").glob("*.npy"))
    return {file.stem.partition("-")[2]: np.asarray(np.load(file, mmap_mode="r")) for file in files}
