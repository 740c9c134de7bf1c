"""Writing episodes of 12 KiB rows: into a new buffer, and round a full one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn, seconds
from ringmap import ReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]

ROW = (64, 64, 3)


def run(place: Place) -> list[Table]:
    """Time both."""
    return [_first_fill(place), _steady(place)]


class Ours:
    """`write_episode`, one pixel column."""

    def __init__(self, path: Path, rows: int, sources: Iterator[Array]) -> None:
        self.buffer = ReplayBuffer(max_steps=rows, path=path)
        self._sources = sources

    def __call__(self) -> None:
        self.buffer.write_episode({"pixels": next(self._sources)})

    def row(self, slot: int) -> Array:
        return self.buffer.get_row_data(slot)["pixels"]


class Store:
    """The same rows copied into an array round and round: what `write_episode` can't beat.

    Args:
        rows: the array; a fresh np.memmap is sparse, one in RAM is touched beforehand.
        checksum: also hash each episode, as ours does.
    """

    def __init__(self, rows: Array, sources: Iterator[Array], checksum: bool) -> None:
        self._rows, self._sources, self._checksum = rows, sources, checksum
        self._slot = 0

    def __call__(self) -> None:
        episode = next(self._sources)
        if self._slot + len(episode) > len(self._rows):
            self._slot = 0
        np.copyto(self._rows[self._slot : self._slot + len(episode)], episode)
        if self._checksum:
            xxhash.xxh3_64_intdigest(episode.reshape(-1).data)
        self._slot += len(episode)

    def row(self, slot: int) -> Array:
        return self._rows[slot]


def _first_fill(place: Place) -> Table:
    # Little enough for the page cache: beyond it both wait for the disk, and the ratio is 1.
    steps, episodes = place.size(200, 4), place.size(100, 8)
    rows = steps * episodes
    table = Table(
        f"first fill, on disk: episodes of {steps} steps of 12 KiB into a new file of {episodes} of them, whole files "
        "in turn"
    )
    names = "write_episode", "store into a sparse np.memmap"
    times: dict[str, list[float]] = {name: [] for name in names}
    whole: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(place.size(15, 1)):
        with place.folder() as folder:
            one, other = _sources(steps, place)
            ours = Ours(folder / "buffer", rows, one)
            memmap = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.uint8, (rows, *ROW))
            theirs = Store(memmap, other, checksum=False)
            for name, write in zip(names, (ours, theirs), strict=True):
                os.sync()  # what waits for the disk would slow down whoever comes next
                taken = [seconds(write) for _ in range(episodes)]
                times[name] += taken
                whole[name].append(sum(taken))
            _assert_equal(ours, theirs, rows, steps * place.size(16, 1))
            ours.buffer.close()
            del memmap, theirs
    table.add_all(times)
    for name, taken in whole.items():
        table.add(f"whole file, {name}", taken)
    for name in names:
        rate = rows * int(np.prod(ROW)) / table.times[f"whole file, {name}"]["median"]
        table.fact(f"GB/s, {name}", f"{rate / 1e9:.2f}")
    table.bar(
        "sparse store / write_episode, whole file, median",
        float(np.median(whole[names[1]]) / np.median(whole[names[0]])),
        at_least=1.2,
    )
    return table


def _steady(place: Place) -> Table:
    steps, episodes = place.size(200, 4), place.size(200, 8)
    rows = steps * episodes
    table = Table(f"steady state, on disk: episodes of {steps} steps of 12 KiB round a full ring of {episodes}")
    with place.folder() as folder:
        one, other = _sources(steps, place)
        ours = Ours(folder / "buffer", rows, one)
        theirs = Store(np.zeros((rows, *ROW), np.uint8), other, checksum=True)
        for _ in range(2 * episodes):
            ours()
            theirs()
        _assert_equal(ours, theirs, rows, steps * place.size(16, 1))
        names = "write_episode", "memcpy into RAM and xxh3"
        table.add_all(in_turn(dict(zip(names, (ours, theirs), strict=True)), place.size(2_000, 8)))
        ours.buffer.close()
    table.ratio(*names, at_most=1.4)
    table.notes.append("write_episode also checks, commits and leaves the rows for the disk to take")
    return table


def _sources(steps: int, place: Place) -> tuple[Iterator[Array], Iterator[Array]]:
    """Return episodes for each of the two: the same ones, at other times.

    More than the last cache holds, and half of them apart: one would else warm up the source
    that the other reads next.
    """
    shape = (place.size(32, 2), steps, *ROW)
    made = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return cycle(made), islice(cycle(made), len(made) // 2, None)


def _assert_equal(ours: Ours, theirs: Store, rows: int, apart: int) -> None:
    """Make sure that the same episodes are stored, `apart` rows from each other."""
    assert ours.buffer.num_steps_stored == rows
    for i in (0, rows // 2, rows - apart - 1):
        assert np.array_equal(ours.row(i + apart), theirs.row(i))
