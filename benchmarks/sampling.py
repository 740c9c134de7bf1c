"""Drawing a batch, rows in the page cache, one thread: against bare memory and bare NumPy.

A rival from another package is one more entry of `calls`, over the same episodes, its batch
asserted equal first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import fill, noise, pixels, states
from benchmarks.place import Place
from benchmarks.table import Table
from benchmarks.timing import in_turn
from ringmap import ReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]

BATCH = 256


def run(place: Place) -> list[Table]:
    """Time pixels and state vectors."""
    return [_pixels(place), _states(place)]


def _pixels(place: Place) -> Table:
    steps, episodes, history = place.size(200, 100), place.size(500, 20), 4
    table = Table(
        f"sample({BATCH}) of clips of {history} steps of 64x64x3 pixels and 3 small columns, "
        f"{steps * episodes:,} steps stored"
    )
    rng = np.random.default_rng(0)
    with place.folder() as folder:
        buffer = ReplayBuffer(steps * episodes, history, path=folder / "buffer", seed=0)
        fill(buffer, pixels(noise(steps)), episodes)
        columns = _columns(folder / "buffer")
        frames = columns["pixels"]

        def fancy_index() -> dict[str, Array]:
            starts = _clip_starts(rng, steps, episodes, history, BATCH)
            slots = starts[:, None] + np.arange(history)
            return {name: column[slots] for name, column in columns.items()}

        def memcpy() -> Array:
            start = int(rng.integers(len(frames) - BATCH * history))
            return frames[start : start + BATCH * history].copy()

        _assert_equal(buffer, columns, steps, history)
        names = (
            "sample",
            "np.memmap, one fancy index per column",
            "memcpy of as many pixels, contiguous",
        )
        calls = (lambda: buffer.sample(BATCH)), fancy_index, memcpy
        table.add_all(in_turn(dict(zip(names, calls, strict=True)), place.size(1_000, 5)))
        buffer.close()
    for name in names:
        table.fact(f"clips/s, {name}", f"{BATCH / table.times[name]['median']:,.0f}")
    table.ratio(names[0], names[1])
    table.bar(
        "memcpy / sample, median",
        _median(table, names[2]) / _median(table, names[0]),
        at_least=0.65,
    )
    return table


def _states(place: Place) -> Table:
    steps, episodes = place.size(10, 5), place.size(100_000, 100)
    table = Table(
        f"sample({BATCH}) of state vectors, 4 small columns, history 1, {steps * episodes:,} steps stored"
    )
    rng = np.random.default_rng(0)
    with place.folder() as folder:
        buffer = ReplayBuffer(steps * episodes, path=folder / "buffer", seed=0)
        fill(buffer, states(steps), episodes)
        columns = _columns(folder / "buffer")

        def takes() -> dict[str, Array]:
            slots = rng.integers(steps * episodes, size=BATCH)
            return {n: column.take(slots, axis=0, mode="clip") for n, column in columns.items()}

        def fancy_index() -> dict[str, Array]:
            slots = rng.integers(steps * episodes, size=BATCH)
            return {name: column[slots] for name, column in columns.items()}

        _assert_equal(buffer, columns, steps, 1)
        names = "sample", "draw and takes", "draw and fancy indexing"
        calls = (lambda: buffer.sample(BATCH)), takes, fancy_index
        table.add_all(in_turn(dict(zip(names, calls, strict=True)), place.size(10_000, 20)))
        buffer.close()
    table.ratio(names[0], names[1], at_most=2)
    table.ratio(names[0], names[2])
    return table


def _columns(folder: Path) -> dict[str, Array]:
    """Return the column files as NumPy alone opens them."""
    files = sorted((folder / "columns").glob("*.npy"))
    return {file.stem.partition("-")[2]: np.asarray(np.load(file, mmap_mode="r")) for file in files}


def _clip_starts(
    rng: np.random.Generator, steps: int, episodes: int, history: int, size: int
) -> Array:
    """Return the rows at which uniformly drawn clips start, for episodes of one length laid end to end."""
    clips = steps - history + 1
    episode, start = np.divmod(rng.integers(episodes * clips, size=size), clips)
    return episode * steps + start


def _assert_equal(
    buffer: ReplayBuffer, columns: dict[str, Array], steps: int, history: int
) -> None:
    """Make sure that a batch of ours is, byte for byte, what NumPy reads at those rows."""
    clips = steps - history + 1
    ids = np.random.default_rng(1).integers(len(buffer), size=BATCH)
    slots = (ids // clips * steps + ids % clips)[:, None] + np.arange(history)
    drawn, buffer.sampler = buffer.sampler, lambda *_: ids
    batch = buffer.sample(BATCH)
    buffer.sampler = drawn
    assert batch.keys() == columns.keys()
    for name, values in batch.items():
        assert np.array_equal(values, columns[name][slots].reshape(values.shape)), name


def _median(table: Table, name: str) -> float:
    return table.times[name]["median"]
