"""Small calls: what one costs beside the system calls and NumPy calls that it can't do without."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import ReplayBuffer, TransitionReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], object]

STEPS = 22
"""Of an episode: as many as a random policy has in CartPole."""


def run(place: Place) -> list[Table]:
    """Time a commit, an added transition, and draws: alone, and after each write."""
    with place.folder() as folder:
        return [
            _commits(place, folder),
            _adds(place, folder),
            _draws(place, folder),
            _after_writes(place, folder),
        ]


def _episode(steps: int = STEPS) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "observation": rng.normal(size=(steps, 4)).astype(np.float32),
        "action": rng.integers(0, 2, steps),
        "reward": np.ones(steps, np.float32),
        "terminated": np.arange(steps) == steps - 1,
        "truncated": np.zeros(steps, np.bool_),
    }


def _commits(place: Place, folder: Path) -> Table:
    table, episode = Table(f"write_episode of {STEPS} steps in 5 columns"), _episode()
    file = os.open(folder / "bare", os.O_RDWR | os.O_CREAT)
    pack = struct.Struct("<15Q").pack

    def bare() -> None:
        sums = [xxhash.xxh3_64_intdigest(values) for values in episode.values()]  # type: ignore[arg-type]
        for place, values in enumerate(episode.values()):
            os.pwrite(file, values, place << 20)
        for place in range(3):  # data, record, state
            packed = pack(*sums, *range(10))
            checked = packed + xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little")
            os.pwrite(file, checked, 5 + place << 20)

    floor = "its 8 writes and 8 checksums, bare"
    buffers = {
        "in RAM": ReplayBuffer(200_000),
        "in a directory": ReplayBuffer(200_000, path=folder / "commits", sync_every_s=0),
    }
    calls: dict[str, Call] = {floor: bare}
    calls |= {name: lambda buf=buf: buf.write_episode(episode) for name, buf in buffers.items()}
    table.add_all(in_turn(calls, place.size(200, 2), burst=10))
    table.ratio("in a directory", floor)
    for buffer in buffers.values():
        buffer.close()
    os.close(file)
    return table


def _adds(place: Place, folder: Path) -> Table:
    table, count = Table("TransitionReplayBuffer.add of one step, observations of 8"), 200_000
    rows = [row.copy() for row in np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)]
    file = os.open(folder / "bare-rows", os.O_RDWR | os.O_CREAT)
    at = 0

    def bare() -> None:
        nonlocal at
        at += 1
        packed = rows[at % 999].tobytes() + rows[at % 999 + 1].tobytes() + struct.pack("<qf??", 1, 0.5, False, False)
        os.pwrite(file, packed + xxhash.xxh3_64_digest(packed), at * 96)

    def add(buf: TransitionReplayBuffer) -> Call:
        number = 0

        def one() -> None:
            nonlocal number
            number += 1
            buf.add(rows[number % 999], 1, 0.5, rows[number % 999 + 1], False)

        return one

    floor = "its write and checksum, bare"
    buffers = {
        "in RAM": TransitionReplayBuffer(count, (8,), device=None),
        "in a directory": TransitionReplayBuffer(count, (8,), device=None, path=folder / "adds"),
    }
    calls = {floor: bare, **{name: add(buf) for name, buf in buffers.items()}}
    table.add_all(in_turn(calls, place.size(200, 2), burst=50))
    table.bar("in RAM, median us", table.times["in RAM"]["median"] * 1e6, at_most=12)
    table.bar("in a directory, median us", table.times["in a directory"]["median"] * 1e6, at_most=20)
    for buffer in buffers.values():
        buffer.close()
    os.close(file)
    return table


def _filled(path: Path | None, steps: int) -> ReplayBuffer:
    """Return a buffer of state vectors that is almost full."""
    buf = ReplayBuffer(steps, path=path, seed=0, sync_every_s=0)
    rng = np.random.default_rng(0)
    for _ in range(steps // 500 - 1):
        buf.write_episode(
            {
                "observation": rng.normal(size=(500, 17)).astype(np.float32),
                "action": rng.normal(size=(500, 6)).astype(np.float32),
                "reward": np.ones(500, np.float32),
                "terminated": np.zeros(500, np.bool_),
            }
        )
    return buf


def _draws(place: Place, folder: Path) -> Table:
    steps = place.size(100_000, 5_000)
    table = Table(f"sample of {steps:,} state vectors of 17, clips of 1 step")
    buf = _filled(folder / "draws", steps)
    reader = ReplayBuffer.open(folder / "draws", seed=0)
    columns = buf.sample(1)
    whole = {name: np.zeros((steps, *v.shape[2:]), v.dtype) for name, v in columns.items()}
    rng = np.random.default_rng(0)

    def bare(size: int) -> Call:
        def draw() -> dict[str, Array]:
            at = rng.integers(0, steps, size)
            return {name: values.take(at, 0) for name, values in whole.items()}

        return draw

    for size in (32, 256):
        floor, own, other = f"draw and takes, bare, {size}", f"writer, {size}", f"reader, {size}"
        calls: dict[str, Call] = {
            floor: bare(size),
            own: lambda size=size: buf.sample(size),
            other: lambda size=size: reader.sample(size),
        }
        table.add_all(in_turn(calls, place.size(200, 2), burst=10))
        table.ratio(own, floor, at_most=1.4 if size == 256 else None)
        table.ratio(other, own)
    table.bar("writer, 32, median us", table.times["writer, 32"]["median"] * 1e6, at_most=15)
    reader.close()
    buf.close()
    return table


def _after_writes(place: Place, folder: Path) -> Table:
    table = Table("sample(32) of state vectors after each write_episode, by the writer and by a reader")
    steps = place.size(100_000, 5_000)
    buf, other = _filled(folder / "after", steps), _filled(folder / "other", 5_000)
    reader = ReplayBuffer.open(folder / "after", seed=0)
    episode = {name: values[:50] for name, values in buf.load_episode(0).items()}
    rounds = place.size(500, 5)
    for name, drawn in (("writer", buf), ("reader", reader)):
        calls: dict[str, Call] = {"": lambda drawn=drawn: drawn.sample(32)}
        for when, written in (("alone", None), ("after a write of another buffer", other), ("after a write", buf)):
            before = None if written is None else lambda written=written: written.write_episode(episode)
            table.add(f"{name}, {when}", in_turn(calls, rounds, before=before)[""])
        table.ratio(f"{name}, after a write", f"{name}, alone", at_most=1.3)
        table.ratio(f"{name}, after a write", f"{name}, after a write of another buffer")
    table.notes.append(
        "a write of another buffer changes nothing for this one: what it costs is that code and data have left the "
        "processor's caches"
    )
    for one in (reader, buf, other):
        one.close()
    return table
