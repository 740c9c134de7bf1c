"""What does a format cost? What comes back, how large it is and how fast, against each library's own calls; and memory.

Reading: clips of 4, batches of 64, from a DataLoader with 0 and 2 workers. Writing: the rival writes the same rows
through the library with no schema, no log and no commits.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.harness.data import fill
from benchmarks.harness.place import Place
from benchmarks.harness.processes import drop_cache, peak_memory, process
from benchmarks.harness.table import Table
from benchmarks.harness.timing import seconds, turns
from benchmarks.peers.base import PEERS
from benchmarks.peers.formats import CASES, HISTORY, PerClip, survives_fork, write
from ringmap import ReplayBuffer
from ringmap.data import get_format, list_formats, load_dataset

__all__ = ["dumping", "formats"]

Array = np.ndarray[Any, np.dtype[Any]]

BATCH = 64


def formats(place: Place) -> Iterator[Table]:
    """Time each format beside its library, after a look at what comes back."""
    log = logging.getLogger("ringmap")
    level = log.level
    log.setLevel(logging.ERROR)  # that JPEG is lossy
    try:
        yield _rates(place, place.new_folder())
    finally:
        log.setLevel(level)


def _error(got: Array, stored: Array) -> tuple[float, float]:
    off = np.abs(got.astype(float) - stored)
    return float(off.mean()), float(off.max())


def _episodes(num: int, length: int, side: int) -> list[dict[str, Array]]:
    """Return rollouts of a ball over a textured ground: pictures that compress as a simulator's do."""
    rng = np.random.default_rng(0)
    ground = np.kron(rng.integers(60, 200, (side // 8 + 1, side // 8 + 1, 3)), np.ones((8, 8, 1)))
    ground = ground[:side, :side].astype(np.uint8)
    row, col = np.mgrid[:side, :side]
    episodes = []
    for number in range(num):
        way = np.cumsum(rng.normal(0, 2, (length, 2)), axis=0) + side / 2
        frames = np.repeat(ground[None], length, 0)
        for frame, (y, x) in zip(frames, way % side, strict=True):
            frame[(row - y) ** 2 + (col - x) ** 2 < (side / 10) ** 2] = (220, 40, number % 256)
        columns = {"pixels": frames, "action": way.astype(np.float32), "reward": rng.random(length)}
        episodes.append({**columns, "step": np.arange(length) + 2**53 + number * length})
    return episodes


def _rates(place: Place, folder: Path) -> Table:
    num, length, side = place.size(30, 3), place.size(100, 9), place.size(64, 16)
    workers = (0,) if place.tiny else (0, 2)
    episodes = _episodes(num, length, side)
    table = Table(
        f"{num} episodes of {length} steps, pixels {side}x{side}x3 and 3 small columns; clips of {HISTORY}, batches of "
        f"{BATCH}",
        heads=["format", "pixels off by, mean / most", "size of the raw bytes", "write MB/s", "x the library's"],
    )
    for number in workers:
        table.heads += [f"clips/s, {number} workers", "x the rival's"]
    for case, (name, _) in CASES.items():
        if name == "zarr" and find_spec("tensorstore") is None:
            table.notes.append(f"zarr is not measured: its rival, tensorstore, is not installed: {PEERS}")
        elif name in list_formats():
            table.row(case, *_measured(place, folder, case, episodes, workers))
    table.notes.append("all in the page cache: it does not show a real disk; the rival over Zarr is tensorstore")
    return table


def _measured(
    place: Place, folder: Path, case: str, episodes: list[dict[str, Array]], workers: tuple[int, ...]
) -> Iterator[str]:
    """Yield error, size and rates of one format, ours and the rival's in turn."""
    (name, options), rounds = CASES[case], place.size(3, 1)
    nbytes = sum(v.nbytes for e in episodes for v in e.values())
    path = folder / case.replace(" ", "-")

    def ours() -> None:
        with get_format(name).open_writer(path, **options) as writer:
            writer.write_episodes(episodes)

    def written(target: Path, call: Any) -> float:
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
        return seconds(call)

    raw = folder / f"{path.name}-raw"
    calls = {
        "ours": partial(written, path, ours),
        "theirs": partial(written, raw, partial(write, case, str(raw), episodes)),
    }
    mine, other = map(np.array, turns(calls, rounds).values())
    dataset = load_dataset(path, format=name, num_steps=HISTORY)
    rival = PerClip(case, str(path), dataset.lengths, dataset.offsets)
    assert len(rival) == len(dataset)
    for i in (0, len(rival) // 2, len(rival) - 1):  # equal first
        left, right = dataset[i], rival[i]
        assert all(np.array_equal(left[n], right[n]) for n in right)
    got = np.asarray(load_dataset(path, format=name, layout="HWC").load_episode(-1)["pixels"])
    mean, most = _error(got, episodes[-1]["pixels"])
    yield f"{mean:.2f} / {most:.0f}" if most else "equal"
    size = sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())
    yield f"{size / nbytes:.2f}"
    yield f"{nbytes / np.median(mine) / 1e6:,.0f}"
    yield f"{float(np.median(other / mine)):.2f}"
    for number in workers:
        rates: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(rounds):
            order = np.random.default_rng(turn).integers(0, len(rival), BATCH * place.size(18, 2)).tolist()
            for who, source in (("ours", dataset), ("theirs", rival)):
                forks = name != "lance" if who == "ours" else survives_fork(case)
                how = "spawn" if number and not forks else None
                rates[who].append(_rate(source, order, number, how))
        mine, other = map(np.array, rates.values())
        yield f"{float(np.median(mine)):,.0f}"
        yield f"{float(np.median(mine / other)):.1f}"


def _rate(source: Any, order: list[int], workers: int, how: str | None) -> float:
    """Return clips per second."""
    loader: Any = DataLoader(source, BATCH, sampler=order, num_workers=workers, multiprocessing_context=how)
    steps = iter(loader)
    for _ in range(2 if workers else 1):  # workers have started
        next(steps)
    begin = perf_counter()
    return sum(BATCH for _ in steps) / (perf_counter() - begin)


# -- a buffer larger than memory -----------------------------------------------------------------

LENGTH, SIDE = 500, 96
FORMATS = ("hdf5", "zarr", "lance", "folder", "video")


def dumping(place: Place) -> Iterator[Table]:
    """Dump a ring that is larger than memory to each format, in processes of their own: how much memory that takes."""
    nbytes, limit, folder = place.size(4 << 30, 1 << 24), place.size(1 << 30, 3 << 29), place.new_folder()
    row, col = np.mgrid[:SIDE, :SIDE]
    picture = np.stack([row, col, row + col], -1).astype(np.uint8)
    frames = picture[None] + np.arange(LENGTH, dtype=np.uint8)[:, None, None, None]
    episodes = max(1, nbytes // frames.nbytes)
    source = ({"pixels": frames, "episode": np.full(LENGTH, number)} for number in range(episodes))
    fill(ReplayBuffer(episodes * LENGTH, path=folder / "buffer"), source, episodes).close()
    steps = episodes * LENGTH
    table = Table(
        f"{steps * SIDE * SIDE * 3 / 2**30:.2f} GiB of pixels {SIDE}x{SIDE}x3, dumped by a process that may have "
        f"{limit / 2**30:.1f} GiB",
        heads=["format", "came back", "s", "peak resident MiB, maps included"],
    )
    for name in FORMATS[: place.size(len(FORMATS), 2)]:
        if name not in list_formats():
            continue
        dest = folder / f"made-{name}"
        drop_cache(folder / "buffer")  # what is cached already would be charged to us, not to the child
        with process(partial, _dump, folder / "buffer", dest, name, method=place.method, limit=limit) as child:
            took, peak = child("__call__")
            unlimited = "" if child("limited") else ", no limit could be set"
        assert int(load_dataset(dest, format=name).lengths.sum()) == steps, name
        table.row(name, "whole", f"{took:.0f}", f"{peak >> 20:,}{unlimited}")
        shutil.rmtree(dest, ignore_errors=True)
        dest.unlink(missing_ok=True)
    yield table


def _dump(buffer: Path, dest: Path, name: str) -> tuple[float, int]:
    start = perf_counter()
    ReplayBuffer.open(buffer, mode="r").dump(dest, name)
    return perf_counter() - start, peak_memory()
