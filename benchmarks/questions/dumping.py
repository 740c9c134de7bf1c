"""A buffer larger than memory becomes a dataset of each format: how much memory that takes.

python -m benchmarks.questions.dumping BUFFER DEST FORMAT LIMIT     what `run` starts, page cache limited too
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.limit import drop_cache, limit_memory, peak_memory
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from ringmap import ReplayBuffer
from ringmap.data import list_formats, load_dataset

__all__ = ["run"]

LENGTH, SIDE = 500, 96
FORMATS = ("hdf5", "zarr", "lance", "folder", "video")


def run(place: Place) -> list[Table]:
    """Fill a ring on disk, and dump it in a process of its own for each format."""
    nbytes, limit = place.size(4 << 30, 1 << 24), place.size(1 << 30, 3 << 29)
    with place.folder() as folder:
        buffer = folder / "buffer"
        steps = _fill(buffer, nbytes)
        table = Table(
            f"{steps * SIDE * SIDE * 3 / 2**30:.2f} GiB of pixels {SIDE}x{SIDE}x3, dumped by a process that may have "
            f"{limit / 2**30:.1f} GiB",
            heads=["format", "came back", "s", "peak resident MiB, maps included"],
        )
        for name in FORMATS[: place.size(len(FORMATS), 2)]:
            if name not in list_formats():
                continue
            dest = folder / f"made-{name}"
            drop_cache(buffer)  # what is cached already would be charged to us, not to the child
            told = _child(buffer, dest, name, limit)
            assert int(load_dataset(dest, format=name).lengths.sum()) == steps, name
            peak = f"{told['peak'] >> 20:,}" + ("" if told["limited"] else ", no limit could be set")
            table.row(name, "whole", f"{told['seconds']:.0f}", peak)
            shutil.rmtree(dest, ignore_errors=True)
            dest.unlink(missing_ok=True)
    return [table]


def _fill(path: Path, nbytes: int) -> int:
    """Fill a buffer on disk with so many bytes; return its steps."""
    row, col = np.mgrid[:SIDE, :SIDE]
    picture = np.stack([row, col, row + col], -1).astype(np.uint8)
    frames = picture[None] + np.arange(LENGTH, dtype=np.uint8)[:, None, None, None]
    episodes = max(1, nbytes // frames.nbytes)
    with ReplayBuffer(episodes * LENGTH, path=path) as buf:
        for number in range(episodes):
            buf.write_episode({"pixels": frames, "episode": np.full(LENGTH, number)})
    return episodes * LENGTH


def _child(buffer: Path, dest: Path, name: str, limit: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.questions.dumping", str(buffer), str(dest), name, str(limit)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _dump(buffer: str, dest: str, name: str, limit: str) -> None:
    limited = limit_memory(int(limit))
    start = perf_counter()
    ReplayBuffer.open(buffer, mode="r").dump(dest, name)
    took = perf_counter() - start
    print(json.dumps({"limited": limited, "seconds": took, "peak": peak_memory()}))


if __name__ == "__main__":
    _dump(*sys.argv[1:])
