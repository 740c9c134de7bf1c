"""Parts: clips of long episodes that are stored in parts, beside clips of whole episodes of the same length as a
part."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import ReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]

LANES = 32
WHOLE, PARTS = "whole episodes", "parts"


def run(place: Place) -> list[Table]:
    """Time draws from a ring of 32 lanes in parts of 1,000 steps: of state vectors, and of small pictures."""
    states = {"obs": (17,), "action": (6,), "reward": ()}
    pixels = {"pixels": (64, 64, 3), "action": (6,)}
    return [
        _draws(place, "state vectors", states, ((256, 1), (256, 4), (256, 16), (256, 64)), 4),
        _draws(place, "64x64x3 pixels", pixels, ((64, 4), (256, 4)), 1),
    ]


def _draws(
    place: Place, name: str, shapes: dict[str, tuple[int, ...]], batches: tuple[tuple[int, int], ...], count: int
) -> Table:
    length = place.size(1000 if count > 1 else 250, 80)
    steps = LANES * length * count
    with place.folder(ram=True) as folder:
        bufs = {kind: ReplayBuffer(steps, path=folder / kind, seed=0, spare_rows=length) for kind in (WHOLE, PARTS)}
        rng = np.random.default_rng(0)
        rows = {
            column: rng.integers(0, 256, (length, *shape), np.uint8)
            if column == "pixels"
            else rng.normal(size=(length, *shape)).astype(np.float32)
            for column, shape in shapes.items()
        }
        _fill(bufs[WHOLE], bufs[PARTS], rows, count)
        table = Table(f"clips of {name}, {LANES} lanes in parts of {length:,} steps, {steps:,} steps")
        for size, history in batches:
            calls = {f"{kind}, {size} clips of {history}": _draw(buf, size, history) for kind, buf in bufs.items()}
            table.add_all(in_turn(calls, place.size(300, 5)))
            whole, parts = calls
            table.ratio(parts, whole, at_most=1.05)
        table.notes.append("a number that lies across parts is looked up part by part")
        for buf in bufs.values():
            buf.close()
    return table


def _fill(whole: ReplayBuffer, parts: ReplayBuffer, rows: dict[str, Array], count: int) -> None:
    length = len(next(iter(rows.values())))
    lanes = [parts.begin_episode(commit_every=length, lane=lane) for lane in range(LANES)]
    for _ in range(count):
        for lane in lanes:
            whole.write_episode(rows)
            for at in range(length):
                lane.append({name: values[at] for name, values in rows.items()})
    for lane in lanes:
        lane.finish(truncated=True)


def _draw(buf: ReplayBuffer, size: int, history: int) -> Any:
    return lambda: buf.sample(size, history_len=history)
