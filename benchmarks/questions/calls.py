"""What does a small call cost, beside the system calls and NumPy calls that it can't do without? And an import?"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import xxhash

from benchmarks.harness.data import fill
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import turns
from ringmap import ReplayBuffer, TransitionReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]
Calls = dict[str, Callable[[], object]]

STEPS = 22
"""Of an episode: as many as a random policy has in CartPole."""
RAM, DIRECTORY = "in RAM", "in a directory"


def calls(place: Place) -> Iterator[Table]:
    """Time a commit, an added transition, and draws: alone, and after each write."""
    folder = place.new_folder()
    yield _commits(place, folder)
    yield _adds(place, folder)
    yield _draws(place, folder)
    yield _after_writes(place, folder)


def _bare(place: Place, path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    place.stack.callback(os.close, file)
    return file


def _commits(place: Place, folder: Path) -> Table:
    table, rng = Table(f"write_episode of {STEPS} steps in 5 columns"), np.random.default_rng(0)
    episode = {
        "observation": rng.normal(size=(STEPS, 4)).astype(np.float32),
        "action": rng.integers(0, 2, STEPS),
        "reward": np.ones(STEPS, np.float32),
        "terminated": np.arange(STEPS) == STEPS - 1,
        "truncated": np.zeros(STEPS, np.bool_),
    }
    file, pack = _bare(place, folder / "bare"), struct.Struct("<15Q").pack

    def bare() -> None:
        sums = [xxhash.xxh3_64_intdigest(values) for values in episode.values()]  # type: ignore[arg-type]
        for at, values in enumerate(episode.values()):
            os.pwrite(file, values, at << 20)
        for at in range(3):  # data, record, state
            packed = pack(*sums, *range(10))
            os.pwrite(file, packed + xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little"), 5 + at << 20)

    floor = "its 8 writes and 8 checksums, bare"
    buffers = {RAM: ReplayBuffer(200_000), DIRECTORY: ReplayBuffer(200_000, path=folder / "commits", sync_every_s=0)}
    timed: Calls = {floor: bare}
    timed |= {n: lambda buf=buf: buf.write_episode(episode) for n, buf in buffers.items()}
    table.time(timed, place.size(200, 2), 10)
    table.ratio(DIRECTORY, floor)
    for buf in buffers.values():
        buf.close()
    return table


def _adds(place: Place, folder: Path) -> Table:
    table, count = Table("TransitionReplayBuffer.add of one step, observations of 8"), 200_000
    rows = [row.copy() for row in np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)]
    file = _bare(place, folder / "bare-rows")

    def from_row(add: Callable[[int], object]) -> Callable[[], object]:
        number = 0

        def one() -> None:
            nonlocal number
            number += 1
            add(number)

        return one

    def bare(at: int) -> None:
        packed = rows[at % 999].tobytes() + rows[at % 999 + 1].tobytes() + struct.pack("<qf??", 1, 0.5, False, False)
        os.pwrite(file, packed + xxhash.xxh3_64_digest(packed), at * 96)

    def to(buf: TransitionReplayBuffer) -> Callable[[int], object]:
        return lambda at: buf.add(rows[at % 999], 1, 0.5, rows[at % 999 + 1], False)

    timed: Calls = {"its write and checksum, bare": from_row(bare)}
    for name, path in ((RAM, None), (DIRECTORY, folder / "adds")):
        timed[name] = from_row(to(place.closing(TransitionReplayBuffer(count, (8,), device=None, path=path))))
    table.time(timed, place.size(200, 2), 50)
    table.limit(RAM, "us", at_most=12)
    table.limit(DIRECTORY, "us", at_most=20)
    return table


def _filled(place: Place, path: Path, steps: int) -> ReplayBuffer:
    """Return a buffer of state vectors that is almost full."""
    rng = np.random.default_rng(0)

    def episodes() -> Iterator[dict[str, Array]]:
        while True:
            yield {
                "observation": rng.normal(size=(500, 17)).astype(np.float32),
                "action": rng.normal(size=(500, 6)).astype(np.float32),
                "reward": np.ones(500, np.float32),
                "terminated": np.zeros(500, np.bool_),
            }

    buffer = place.closing(ReplayBuffer(steps, path=path, seed=0, sync_every_s=0))
    return fill(buffer, episodes(), steps // 500 - 1)


def _draws(place: Place, folder: Path) -> Table:
    steps, rng = place.size(100_000, 5_000), np.random.default_rng(0)
    table = Table(f"sample of {steps:,} state vectors of 17, clips of 1 step")
    buf = _filled(place, folder / "draws", steps)
    reader = place.closing(ReplayBuffer.open(folder / "draws", seed=0))
    whole = {name: np.zeros((steps, *v.shape[2:]), v.dtype) for name, v in buf.sample(1).items()}

    def bare(size: int) -> dict[str, Array]:
        at = rng.integers(0, steps, size)
        return {name: values.take(at, 0) for name, values in whole.items()}

    for size in (32, 256):
        floor, own, other = f"draw and takes, bare, {size}", f"writer, {size}", f"reader, {size}"
        draws = {floor: bare, own: buf.sample, other: reader.sample}
        table.time({n: lambda draw=draw, k=size: draw(k) for n, draw in draws.items()}, place.size(200, 2), 10)
        table.ratio(own, floor, at_most=1.4 if size == 256 else None)
        table.ratio(other, own)
    table.limit("writer, 32", "us", at_most=15)
    return table


def _after_writes(place: Place, folder: Path) -> Table:
    table = Table("sample(32) of state vectors after each write_episode, by the writer and by a reader")
    buf, other = _filled(place, folder / "after", place.size(100_000, 5_000)), _filled(place, folder / "other", 5_000)
    reader = place.closing(ReplayBuffer.open(folder / "after", seed=0))
    episode = {name: values[:50] for name, values in buf.load_episode(0).items()}
    for who, drawn in (("writer", buf), ("reader", reader)):
        for when, written in (("alone", None), ("after a write of another buffer", other), ("after a write", buf)):
            before = None if written is None else lambda written=written: written.write_episode(episode)
            table.time({f"{who}, {when}": lambda drawn=drawn: drawn.sample(32)}, place.size(500, 5), before=before)
        table.ratio(f"{who}, after a write", f"{who}, alone", at_most=1.3)
        table.ratio(f"{who}, after a write", f"{who}, after a write of another buffer")
    table.notes.append(
        "a write of another buffer changes nothing for this one: what it costs is that code and data have left the "
        "processor's caches"
    )
    return table


# -- imports -------------------------------------------------------------------------------------

HEAVY = ["gymnasium", "h5py", "numpy", "torch", "zarr"]

PROBE = """
import sys, time
start = time.perf_counter()
import {name}
print(time.perf_counter() - start, *{{m.split(".")[0] for m in sys.modules}})
"""
BARE = """
import typer

app = typer.Typer()
app.command("one")(lambda: None)
app.command("other")(lambda: None)
app()
"""
"""The smallest program with Typer that has commands."""


def importing(place: Place) -> Iterator[Table]:
    """Time `import ringmap` and `ringmap --help`, in fresh interpreters in turn; tell what comes in with them."""
    table, rounds = Table("import, in a fresh interpreter"), place.size(51, 2)

    def probed(name: str) -> list[str]:
        command = [sys.executable, "-c", PROBE.format(name=name)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    found = turns({name: lambda name=name: probed(name) for name in ("ringmap", "numpy")}, rounds)
    table.add_all({f"import {name}": [float(told[0]) for told in many] for name, many in found.items()})
    came = {module for told in found["ringmap"] for module in told[1:]}
    table.bar("import ringmap, p99 s", table.times["import ringmap"]["p99"], at_most=0.1)
    table.bar(f"of {', '.join(HEAVY)}: come in", len(came & set(HEAVY)), at_most=0)
    yield table

    table = Table("--help, from the start of a process to its end")
    ours, bare = "ringmap", "a bare typer.Typer of two commands"

    def helped(*words: str) -> float:
        start = perf_counter()
        subprocess.run([sys.executable, *words, "--help"], check=True, capture_output=True)
        return perf_counter() - start

    table.add_all(turns({ours: lambda: helped("-m", "ringmap"), bare: lambda: helped("-c", BARE)}, rounds))
    more = table.median(ours) - table.median(bare)
    table.bar("ringmap --help, more than the bare one, median s", more, at_most=0.2)
    table.notes.append("Typer draws the bare one's help with Rich, as it does by default; ours is plain text")
    yield table
