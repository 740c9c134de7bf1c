"""Collectors that write, and many rings read as one: beside a queue into one writer, one ring of the same rows, a
`ConcatDataset`.

What these numbers do not show: rings on several disks, and writers at work, which take cores.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import noise
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from benchmarks.harness.writers import STATE, STEPS, queueing, writing
from ringmap import ReplayBuffer
from ringmap.data import ConcatDataset, ShardedReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, HISTORY = 256, 4
ONE, CONCAT = "one ring", "ConcatDataset over the rings"


def run(place: Place) -> list[Table]:
    """Time collectors, looks at idle rings, and batches of pixels and of state vectors from many rings."""
    with place.folder() as folder:
        return [
            _inserts(place, folder / "inserts"),
            _looks(place, folder / "looks"),
            _batches(place, folder / "pixels", "pixels", place.size((16,), (4,)), place.size(16_000, 640)),
            _batches(
                place,
                folder / "vectors",
                "vectors",
                place.size((1, 4, 16, 64), (1, 4)),
                place.size(64_000, 640),
            ),
        ]


def _episodes(kind: str, count: int, length: int) -> Iterator[dict[str, Array]]:
    frames, steps = noise(length), np.arange(length, dtype=np.float32)
    for number in range(count):
        action = np.stack([np.full(length, number, np.float32), steps], 1)
        if kind == "pixels":
            yield {"pixels": frames[number % len(frames)], "action": action}
        else:
            yield {"obs": np.repeat(steps[:, None], 17, 1), "action": action, "reward": steps}


def _fill(folder: Path, kind: str, rings: int, steps: int) -> None:
    """Write the same episodes to so many rings, in turn."""
    length = max(10, min(100, steps // rings))
    count = steps // length
    buffers = [ReplayBuffer(-(-count // rings) * length, path=folder / f"{number:03}") for number in range(rings)]
    for number, episode in enumerate(_episodes(kind, count, length)):
        buffers[number % rings].write_episode(episode)
    for buffer in buffers:
        buffer.close()


def _prove(batch: Mapping[str, Any]) -> None:
    """Raise unless each clip is consecutive steps of one episode."""
    numbers, steps = batch["action"][..., 0], batch["action"][..., 1]
    assert (numbers == numbers[:, :1]).all(), "steps of several episodes"
    assert (steps == steps[:, :1] + np.arange(HISTORY)).all(), "steps that do not follow"
    assert len(np.unique(numbers)) > 1, "every clip is of one episode"
    if "reward" in batch:
        assert (batch["reward"] == steps).all(), "columns of different steps"


def _drawing(concat: ConcatDataset) -> Callable[[], object]:
    rng, size = np.random.default_rng(0), len(concat)
    return lambda: concat.__getitems__(rng.integers(0, size, BATCH).tolist())


def _inserts(place: Place, folder: Path) -> Table:
    """Time collectors that do nothing but write: each to a ring of its own, or through a queue to one writer."""
    count, episodes = place.size(8, 2), place.size(300, 2)
    table = Table(f"{count} collectors: {episodes} episodes of {STEPS} states of {STATE} floats each")
    queue = multiprocessing.get_context("spawn").Queue(64)
    one = ReplayBuffer(50 * STEPS, path=folder / "queue")
    with contextlib.ExitStack() as stack:
        rings = [stack.enter_context(writing(str(folder / "rings" / str(n)))) for n in range(count)]
        senders = [stack.enter_context(queueing(queue)) for _ in range(count)]

        def told(pipes: list[Any]) -> int:
            return sum(pipe.recv() for pipe in pipes)

        def by_rings() -> None:
            for pipe in rings:
                pipe.send(episodes)
            assert told(rings) == count * episodes * STEPS

        def by_queue() -> None:
            for pipe in senders:
                pipe.send(episodes)
            for _ in range(count * episodes):
                one.write_episode(queue.get())
            assert told(senders) == count * episodes * STEPS

        names = "a ring for each collector", "a queue into one writer"
        times = in_turn(dict(zip(names, (by_rings, by_queue), strict=True)), place.size(10, 1))
    table.add_all(times)
    for name, taken in times.items():
        table.fact(f"{name}: steps/s", round(count * episodes * STEPS / float(np.median(taken))))
    table.faster(*names)
    with ShardedReplayBuffer(folder / "rings", history_len=2) as buf:
        for batch in (buf.sample(64), one.sample(64, history_len=2)):
            assert (batch["step"][:, 0] + 1 == batch["step"][:, 1]).all()
    one.close()
    table.notes.append(
        "the queue is that of multiprocessing, with room for 64 episodes; the writer is the process that reads it"
    )
    return table


def _looks(place: Place, folder: Path) -> Table:
    table = Table("A look at idle rings, before a draw")
    calls = {}
    for rings in place.size((1, 16, 64), (1, 4)):
        _fill(folder / f"{rings}", "vectors", rings, place.size(6400, 640))
        buffer = ShardedReplayBuffer(folder / f"{rings}", history_len=HISTORY, seed=0)
        calls[f"{rings} rings"] = buffer.engine.look
    table.add_all(in_turn(calls, place.size(200, 2), burst=place.size(20, 2)))
    return table


def _batches(place: Place, folder: Path, kind: str, rings: tuple[int, ...], steps: int) -> Table:
    row = "64x64x3 pixels" if kind == "pixels" else "17 floats, and 2 small columns"
    table = Table(f"sample({BATCH}) of {HISTORY} rows of {row}, {steps:,} steps in all")
    _fill(folder / "one", kind, 1, steps)
    one = ReplayBuffer.open(folder / "one" / "000", history_len=HISTORY, seed=0)
    calls = {ONE: lambda: one.sample(BATCH)}
    _prove(one.sample(BATCH))
    for count in rings:
        _fill(folder / f"{count}", kind, count, steps)
        many = ShardedReplayBuffer(folder / f"{count}", history_len=HISTORY, seed=0)
        _prove(many.sample(BATCH))
        calls[f"{count} rings"] = lambda many=many: many.sample(BATCH)
        if count == rings[-1]:
            parts = sorted((folder / f"{count}").iterdir())
            concat = ConcatDataset([ReplayBuffer.open(p, history_len=HISTORY) for p in parts])
            calls[CONCAT] = _drawing(concat)
    table.add_all(in_turn(calls, place.size(100, 2), burst=place.size(5, 2)))
    most = f"{rings[-1]} rings"
    if kind == "pixels":
        table.ratio(most, ONE, at_most=1 / 0.85)
    table.faster(most, CONCAT)
    return table
