"""Updates: values written back into stored steps, beside bare positioned writes of the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import Column, ReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, DIM = 256, 512


def run(place: Place) -> list[Table]:
    """Time updates of rows in random places, and of rows side by side; then reads."""
    with place.folder() as folder:
        rows = place.size(20_000, 2_000)
        schema = {
            "obs": ((8,), "<f4"),
            "plain": ((DIM,), "<f4"),
            "latent": Column((DIM,), "<f4", mutable=True),
        }
        buf = ReplayBuffer(rows, schema=schema, path=folder / "ours", sync_every_s=0, seed=0)
        for _ in range(2):
            buf.write_episode({"obs": np.zeros((rows // 2, 8)), "plain": np.zeros((rows // 2, DIM))})
        tables = [_updates(place, folder, buf, rows), _reads(place, buf)]
        buf.close()
    return tables


def _updates(place: Place, folder: Path, buf: ReplayBuffer, rows: int) -> Table:
    values = np.random.default_rng(0).normal(size=(BATCH, DIM)).astype(np.float32)
    rng, ids = np.random.default_rng(1), np.arange(BATCH)
    fd = os.open(folder / "bare", os.O_RDWR | os.O_CREAT)

    def bare() -> None:
        raw, size, write = values.view(np.uint8).reshape(-1).data, DIM * 4, os.pwrite
        for at, offset in zip(range(0, len(raw), size), (ids * size).tolist(), strict=True):
            write(fd, raw[at : at + size], offset)

    def ours() -> None:
        assert buf.update(ids, {"latent": values}) == BATCH

    def choose(draw: Callable[[], Array]) -> Callable[[], None]:
        def before() -> None:
            ids[:] = draw()

        return before

    shuffled = rng.permutation(rows)
    for at in range(0, rows - BATCH + 1, BATCH):  # a first update also looks for the row's copies
        ids[:] = shuffled[at : at + BATCH]
        for _ in range(3):
            bare()
            ours()
    rounds = place.size(400, 5)
    table = Table(f"update of {BATCH} rows of {DIM} float32, {rows:,} rows, each updated before")
    random = choose(lambda: rng.permutation(rows)[:BATCH])
    runs = choose(lambda: int(rng.integers(rows - BATCH)) + np.arange(BATCH))
    for name, before in (("in random places", random), ("side by side", runs)):
        times = in_turn({f"bare, {name}": bare, f"ringmap, {name}": ours}, rounds, before=before)
        table.add_all(times)
        bar = 1.5 if name == "in random places" else None
        table.ratio(f"ringmap, {name}", f"bare, {name}", at_most=bar)
    os.close(fd)
    latent = buf.get_row_data(ids)["latent"]
    assert (latent == values).all()
    table.notes.append("bare writes may tear a row at a kill, and know nothing of evictions")
    return table


def _reads(place: Place, buf: ReplayBuffer) -> Table:
    calls = {
        f"sample({BATCH}), a plain column of {DIM} float32": lambda: buf.sample(BATCH, columns=["plain"]),
        "the same, mutable and updated": lambda: buf.sample(BATCH, columns=["latent"]),
    }
    table = Table(f"read {BATCH} rows")
    table.add_all(in_turn(calls, place.size(400, 5)))
    plain, changed = calls
    table.ratio(changed, plain)
    return table
