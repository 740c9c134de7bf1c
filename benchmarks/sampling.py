"""Drawing a batch, rows in the page cache: against other libraries, bare memory and bare NumPy.

The original has its turn after TorchRL, whose threads spin for a while when they are done: it is slow
enough not to notice.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rivals
from benchmarks.data import fill
from benchmarks.place import Place
from benchmarks.plots import rates
from benchmarks.rivals import Field, Rival, open_rivals
from benchmarks.stored import Stored
from benchmarks.table import Table
from benchmarks.timing import in_turn
from ringmap import ReplayBuffer
from ringmap.storage.disk.system import cores

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, HISTORY = 256, 4
PIXELS, STATES = "64x64x3 pixels, clips of 4 steps", "state vectors, single steps"
OURS, ONE_THREAD = "ringmap", "ringmap, one thread"
MEMCPY = "memcpy of as many pixels, contiguous"
MEMCPY_BY_ALL = "the same, split over the cores"
"""About what the memory can do at most."""


def run(place: Place) -> list[Table]:
    """Time pixels and state vectors; draw the plot."""
    pixels, pixel_rivals = _pixels(place)
    states, state_rivals = _states(place)
    panels = {}
    for title, table, ours, found in (
        (PIXELS, pixels, [OURS, ONE_THREAD], pixel_rivals), (STATES, states, [OURS], state_rivals),
    ):  # fmt: skip
        names = [*ours, *(rival.name for rival in found)]
        panels[title] = {name: BATCH / table.times[name]["median"] for name in names}
    rates(place.out / "sampling.png", states, panels, f"clips/s, sample() of {BATCH}")
    return [pixels, states]


def _pixels(place: Place) -> tuple[Table, list[Rival]]:
    stored = Stored.of_pixels(place.size(500, 20), place.size(200, 100))
    table = Table(
        f"sample({BATCH}) of clips of {HISTORY} steps of 64x64x3 pixels and 3 small columns, "
        f"{stored.num_steps:,} steps stored"
    )
    rng = np.random.default_rng(0)
    with place.folder() as folder:
        buffer = ReplayBuffer(stored.num_steps, HISTORY, path=folder / "buffer", seed=0)
        fill(buffer, iter(stored), stored.num_episodes)
        columns = _columns(folder / "buffer")
        frames = columns["pixels"]

        def one_thread() -> dict[str, Array]:
            buffer.threads = 1
            batch = buffer.sample(BATCH)
            buffer.threads = None
            return batch

        def fancy_index() -> dict[str, Array]:
            episodes = rng.integers(stored.num_episodes, size=BATCH)
            steps = rng.integers(stored.length - HISTORY + 1, size=BATCH)
            slots = (episodes * stored.length + steps)[:, None] + np.arange(HISTORY)
            return {name: column[slots] for name, column in columns.items()}

        def memcpy() -> Array:
            start = int(rng.integers(len(frames) - BATCH * HISTORY))
            return frames[start : start + BATCH * HISTORY].copy()

        count = BATCH * HISTORY
        ends = [count * part // cores() for part in range(cores() + 1)]

        def memcpy_by_all() -> Array:
            start = int(rng.integers(len(frames) - count))
            copy = np.empty_like(frames[:count])
            copying = [
                pool.submit(np.copyto, copy[i:j], frames[start + i : start + j])
                for i, j in pairwise(ends)
            ]
            for part in copying:
                part.result()
            return copy

        bare = "np.memmap, one fancy index per column"
        for batch in (buffer.sample(BATCH), one_thread(), fancy_index()):
            stored.assert_holds(batch, BATCH, HISTORY)
        makers = [
            rivals.torchrl_in_files, rivals.original, rivals.sheeprl_sequences,
            rivals.sheeprl_episodes, rivals.cpprb_in_files,
        ]  # fmt: skip
        found = open_rivals(makers, Field(stored, folder, BATCH, HISTORY), table)
        calls = {
            OURS: lambda: buffer.sample(BATCH), ONE_THREAD: one_thread, bare: fancy_index, MEMCPY: memcpy,
            MEMCPY_BY_ALL: memcpy_by_all,
            **{rival.name: rival.sample for rival in found if rival.sample is not None},
        }  # fmt: skip
        with ThreadPoolExecutor() as pool:
            table.add_all(in_turn(calls, place.size(40, 2), burst=place.size(10, 2)))
        buffer.close()
    _tell_rates(table)
    peers = [rival.name for rival in found if rival.in_files]
    best = min(peers, key=lambda name: table.times[name]["median"], default="")
    for rival in found:
        is_original = rival.name.startswith("stable-worldmodel")
        table.faster(OURS, rival.name, 10 if is_original else 1.5 if rival.name == best else None)
    table.faster(OURS, MEMCPY_BY_ALL)
    table.faster(ONE_THREAD, bare)
    table.faster(ONE_THREAD, MEMCPY, at_least=0.65)
    table.notes.append(
        "sheeprl's sequences and cpprb's steps do not keep to an episode; cpprb draws 4 steps for each clip"
    )
    return table, found


def _states(place: Place) -> tuple[Table, list[Rival]]:
    stored = Stored.of_states(place.size(100_000, 100), place.size(10, 5))
    table = Table(
        f"sample({BATCH}) of state vectors, 4 small columns, history 1, {stored.num_steps:,} steps stored"
    )
    rng = np.random.default_rng(0)
    with place.folder() as folder:
        buffer = ReplayBuffer(stored.num_steps, path=folder / "buffer", seed=0)
        fill(buffer, iter(stored), stored.num_episodes)
        columns = _columns(folder / "buffer")

        def takes() -> dict[str, Array]:
            slots = rng.integers(stored.num_steps, size=BATCH)
            return {n: column.take(slots, axis=0, mode="clip") for n, column in columns.items()}

        def fancy_index() -> dict[str, Array]:
            slots = rng.integers(stored.num_steps, size=BATCH)
            return {name: column[slots] for name, column in columns.items()}

        bare, with_next = "draw and takes", "ringmap, history 2 (the next step too)"
        for batch in (buffer.sample(BATCH), takes()):
            stored.assert_holds(batch, BATCH, 1)
        stored.assert_holds(buffer.sample(BATCH, 2), BATCH, 2)
        makers = [
            rivals.torchrl_in_files, rivals.original, rivals.sheeprl_sequences, rivals.cpprb_in_ram,
            rivals.stable_baselines3,
        ]  # fmt: skip
        found = open_rivals(makers, Field(stored, folder, BATCH, 1), table)
        calls = {
            OURS: lambda: buffer.sample(BATCH), with_next: lambda: buffer.sample(BATCH, 2),
            bare: takes, "draw and fancy indexing": fancy_index,
            **{rival.name: rival.sample for rival in found if rival.sample is not None},
        }  # fmt: skip
        table.add_all(in_turn(calls, place.size(200, 2), burst=place.size(20, 2)))
        buffer.close()
    table.ratio(OURS, bare, at_most=2)
    for rival in found:
        judged = rival.name.startswith(("cpprb", "Stable-Baselines3"))
        table.faster(OURS, rival.name, at_least=1 if judged else None)
        if rival.lacks:
            table.faster(with_next, rival.name)
    table.notes.append(
        "Stable-Baselines3 returns obs twice, now and next, as tensors, and no discount"
    )
    return table, found


def _tell_rates(table: Table) -> None:
    for name, row in table.times.items():
        table.fact(f"clips/s, {name}", f"{BATCH / row['median']:,.0f}")


def _columns(folder: Path) -> dict[str, Array]:
    """Return the column files as NumPy alone opens them."""
    files = sorted((folder / "columns").glob("*.npy"))
    return {file.stem.partition("-")[2]: np.asarray(np.load(file, mmap_mode="r")) for file in files}
