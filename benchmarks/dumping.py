"""A buffer larger than memory becomes a dataset of each format: how much memory that takes.

    python -m benchmarks.dumping --gb 4 --limit-gb 1

Each dump runs in a process of its own, in a group that may not have more memory, page cache included.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.limit import drop_cache, limit_memory
from ringmap import ReplayBuffer
from ringmap.data import list_formats, load_dataset

__all__ = ["main"]

LENGTH, SIDE = 500, 96


def fill(path: Path, nbytes: int) -> int:
    """Fill a buffer on disk with so many bytes; return its steps."""
    row, col = np.mgrid[:SIDE, :SIDE]
    picture = np.stack([row, col, row + col], -1).astype(np.uint8)
    frames = picture[None] + np.arange(LENGTH, dtype=np.uint8)[:, None, None, None]
    episodes = max(1, nbytes // frames.nbytes)
    with ReplayBuffer(episodes * LENGTH, path=path) as buf:
        for number in range(episodes):
            buf.write_episode({"pixels": frames, "episode": np.full(LENGTH, number)})
        buf.close()
    return episodes * LENGTH


def dump_limited(buffer: Path, dest: Path, name: str, limit: int) -> tuple[int, float, int]:
    """Dump in a child under the limit; return its exit status, seconds, and peak of private memory."""
    drop_cache(buffer)  # what is cached already would be charged to us, not to the child
    begin = perf_counter()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if not limit_memory(limit):
                print("  (no limit could be set)", flush=True)
            ReplayBuffer.open(buffer, mode="r").dump(dest, name)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    return status, perf_counter() - begin, usage.ru_maxrss * 1024


def main(argv: list[str] | None = None) -> None:
    """Print a line per format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--limit-gb", type=float, default=1)
    parser.add_argument("--only", nargs="*", default=["hdf5", "zarr", "lance", "folder", "video"])
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        steps = fill(folder / "buffer", int(given.gb * 2**30))
        print(f"{steps * SIDE * SIDE * 3 / 2**30:.2f} GiB, limit {given.limit_gb} GiB")
        print(
            "| format | dumped | s | peak resident MiB, maps included |\n| --- | --- | --- | --- |"
        )
        for name in given.only:
            if name not in list_formats():
                continue
            dest = folder / f"made-{name}"
            status, took, peak = dump_limited(folder / "buffer", dest, name, int(given.limit_gb * 2**30))  # fmt: skip
            whole = status == 0 and int(load_dataset(dest, format=name).lengths.sum()) == steps
            print(f"| {name} | {'whole' if whole else f'FAILED ({status})'} | {took:.0f} | {peak >> 20} |", flush=True)  # fmt: skip
            shutil.rmtree(dest, ignore_errors=True) if dest.is_dir() else dest.unlink(
                missing_ok=True
            )


if __name__ == "__main__":
    main()
