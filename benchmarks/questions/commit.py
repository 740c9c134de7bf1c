"""A commit with 1,000,000 episodes stored, against one with 1,000."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.data import fill, states
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import ReplayBuffer

STEPS = 4


def run(place: Place) -> list[Table]:
    """Write into a small and a large full ring in turn, on disk and in RAM."""
    sizes = place.size(1_000, 50), place.size(1_000_000, 2_000, 200_000)
    # More than a turn of the spare rows of the large ring (62,500), so that its table sync is in.
    rounds = place.size(2_000, 10, 500)
    tables = []
    for home in ("disk",) if place.quick else ("disk", "RAM"):
        table = Table(
            f"write_episode of {STEPS} steps of 64 bytes in 4 columns, {home}; the ring is full, each call evicts"
        )
        with place.folder() as folder:
            buffers = {n: _full(folder / str(n) if home == "disk" else None, n) for n in sizes}
            _assert_equal(*buffers.values())
            writes = {
                f"{n:,} episodes stored": partial(_write_next, buffer, states(STEPS)) for n, buffer in buffers.items()
            }
            times = in_turn(writes, rounds, burst=50)
            for n, buffer in buffers.items():
                assert buffer.num_episodes == n
                buffer.close()
        few, many = times
        table.add_all(times)
        table.fact(
            "longest call with most stored (a sync of the table)",
            f"{times[many].max() * 1e3:.1f} ms",
        )
        table.ratio(many, few, at_most=1.3)
        table.bar(f"{many}, median us", float(np.median(times[many])) * 1e6, at_most=60)
        tables.append(table)
    return tables


def _full(path: Path | None, episodes: int) -> ReplayBuffer:
    buffer = ReplayBuffer(max_steps=episodes * STEPS, path=path, seed=0)
    fill(buffer, states(STEPS), episodes)
    return buffer


def _write_next(buffer, episodes) -> None:
    buffer.write_episode(next(episodes))


def _assert_equal(few: ReplayBuffer, many: ReplayBuffer) -> None:
    """Make sure that the same is stored: the large ring begins as the small one does."""
    for i in (0, few.num_episodes - 1):
        one, other = few.load_episode(i), many.load_episode(i)
        assert all(np.array_equal(one[name], other[name]) for name in one)
