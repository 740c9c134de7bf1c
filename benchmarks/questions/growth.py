"""What does growth cost? Batches, commits and openings with few and with 1,000,000 episodes stored; and imports.

The steps stored are the same at every size, cut into fewer and longer, or more and shorter, episodes.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import xxhash

from benchmarks.harness.data import fill, states
from benchmarks.harness.place import Place
from benchmarks.harness.processes import drop_cache
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn, turns
from ringmap import ReplayBuffer
from ringmap.storage.disk.files import Disk

Array = np.ndarray[Any, np.dtype[Any]]
Episodes = Iterator[dict[str, Array]]

BATCH, HISTORY, STEPS = 256, 4, 4


# -- batches -------------------------------------------------------------------------------------


def growth(place: Place) -> Iterator[Table]:
    """Time state vectors, all sizes in turn; and after a write."""
    sizes = [1_000, 10_000, 100_000, 1_000_000] if not place.tiny else [50, 200]
    rows, folder = HISTORY * sizes[-1], place.new_folder()
    table = Table(
        f"sample({BATCH}) of state vectors (4 small columns) as episodes get more and shorter, {rows:,} steps stored"
    )
    buffers = {n: place.closing(ReplayBuffer(rows, path=folder / str(n), seed=0)) for n in sizes}
    for n, buffer in buffers.items():
        batch = fill(buffer, states(rows // n), n).sample(8)
        numbers, steps = batch["obs"][:, 0, 0].astype(int), batch["reward"][:, 0].astype(int)
        for values, number, step in zip(batch["obs"][:, 0], numbers, steps, strict=True):
            assert np.array_equal(values, buffer.load_episode(number)["obs"][step])
    for history in (1, HISTORY):
        calls = {f"{n:,} episodes, history {history}": partial(b.sample, BATCH, history) for n, b in buffers.items()}
        table.time(calls, place.size(200, 2), place.size(50, 2))
        few, *_, many = map(table.median, calls)
        what = f"history {history}: us more at {sizes[-1]:,} episodes than at {sizes[0]:,}"
        table.bar(what, (many - few) * 1e6, at_most=100)
    yield table
    table = Table(
        f"sample({BATCH}) of state vectors, {sizes[-1]:,} episodes: alone, and each after a write_episode (not timed)"
    )
    largest, episodes = buffers[sizes[-1]], states(HISTORY)
    other = fill(ReplayBuffer(1_000), episodes, 1)
    for history in (1, HISTORY):
        reader = place.closing(ReplayBuffer.open(folder / str(sizes[-1]), history_len=history, seed=0))
        for role, who in (("writer", largest), ("reader", reader)):
            calls = {}
            for when, written in (
                ("alone", None),
                ("after a write of another buffer", other),
                ("after a write", largest),
            ):
                before = None if written is None else partial(_write_next, written, episodes)
                draw = {"": partial(who.sample, BATCH, history)}
                calls[f"{role}, history {history}, {when}"] = partial(in_turn, draw, 1, 25, before)
            for name, found in turns(calls, place.size(200, 2)).items():
                table.add(name, np.concatenate([one[""] for one in found]))
            alone, elsewhere, after = calls
            table.ratio(after, alone, at_most=1.3)
            table.ratio(after, elsewhere)
        reader.refresh()
        one, two = (who.get_row_data(who.num_steps_stored - 1) for who in (largest, reader))
        assert all(np.array_equal(one[name], two[name]) for name in one)
    table.notes.append(
        "a write of another buffer changes nothing for this one: what it costs is that code and data have left the "
        "processor's caches"
    )
    yield table


def _write_next(buffer: ReplayBuffer, episodes: Episodes) -> None:
    buffer.write_episode(next(episodes))


# -- commits -------------------------------------------------------------------------------------


def commit(place: Place) -> Iterator[Table]:
    """Write into a small and a large full ring in turn, on disk and in RAM."""
    sizes = place.size(1_000, 50), place.size(1_000_000, 2_000, 200_000)
    for home in ("disk",) if place.quick else ("disk", "RAM"):
        table = Table(
            f"write_episode of {STEPS} steps of 64 bytes in 4 columns, {home}; the ring is full, each call evicts"
        )
        with place.folder() as folder:
            buffers = {n: ReplayBuffer(n * STEPS, path=folder / str(n) if home == "disk" else None) for n in sizes}
            for n, buffer in buffers.items():
                fill(buffer, states(STEPS), n)
            first = [buffer.load_episode(0) for buffer in buffers.values()]
            assert all(np.array_equal(*(one[name] for one in first)) for name in first[0])
            writes = {
                f"{n:,} episodes stored": partial(_write_next, buffer, states(STEPS)) for n, buffer in buffers.items()
            }
            # More than a turn of the spare rows of the large ring (62,500), so that its table sync is in.
            times = table.time(writes, place.size(2_000, 10, 500), 50)
            for n, buffer in buffers.items():
                assert buffer.num_episodes == n
                buffer.close()
        few, many = times
        longest = f"{times[many].max() * 1e3:.1f} ms"
        table.fact("longest call with most stored (a sync of the table)", longest)
        table.ratio(many, few, at_most=1.3)
        table.limit(many, "us", at_most=60)
        yield table
    if not place.quick:
        yield _bare_commit(place, place.new_folder())


def _bare_commit(place: Place, folder: Path) -> Table:
    """Time a commit beside the system calls that it can't do without."""
    steps, rng = 22, np.random.default_rng(0)
    table = Table(f"write_episode of {steps} steps in 5 columns")
    episode = {
        "observation": rng.normal(size=(steps, 4)).astype(np.float32),
        "action": rng.integers(0, 2, steps),
        "reward": np.ones(steps, np.float32),
        "terminated": np.arange(steps) == steps - 1,
        "truncated": np.zeros(steps, np.bool_),
    }
    file, pack = os.open(folder / "bare", os.O_RDWR | os.O_CREAT), struct.Struct("<15Q").pack

    def bare() -> None:
        sums = [xxhash.xxh3_64_intdigest(values) for values in episode.values()]  # type: ignore[arg-type]
        for at, values in enumerate(episode.values()):
            os.pwrite(file, values, at << 20)
        for at in range(3):  # data, record, state
            packed = pack(*sums, *range(10))
            os.pwrite(file, packed + xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little"), 5 + at << 20)

    floor, ours = "its 8 writes and 8 checksums, bare", "in a directory"
    buffer = place.closing(ReplayBuffer(200_000, path=folder / "commits", sync_every_s=0))
    table.time({floor: bare, ours: lambda: buffer.write_episode(episode)}, place.size(200, 2), 10)
    table.ratio(ours, floor)
    os.close(file)
    return table


# -- openings ------------------------------------------------------------------------------------


class RebootingDisk(Disk):
    """A disk whose machine reboots when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reboot()

    def reboot(self) -> None:
        """Change the boot id."""
        self._boot = os.urandom(16)

    def boot_id(self) -> bytes | None:
        """Return the id of this boot."""
        return self._boot


REBOOTING = RebootingDisk()

_OPEN = """
import time
began = time.perf_counter()
import sys
from ringmap import ReplayBuffer
buffer = ReplayBuffer.open(sys.argv[1], sys.argv[2])
count = buffer.num_episodes
print(time.perf_counter() - began)
"""

_KILLED = """
import os, sys
from benchmarks.harness.data import fill, states
from ringmap import ReplayBuffer
buffer = ReplayBuffer.open(sys.argv[1], "r+", sync_every_s=0)
fill(buffer, states(int(sys.argv[3])), int(sys.argv[2]))
os.kill(os.getpid(), 9)
"""


def opening(place: Place) -> Iterator[Table]:
    """Open 1,000,000 episodes as reader and as writer, within one boot and after a reboot, and in a new process."""
    stored, behind = place.size(1_000_000, 2_000, 200_000), place.size(10_000, 100)
    table = Table(f"opening {stored:,} episodes of {STEPS} steps of 64 bytes in 4 columns, to the first length known")
    path, episodes = place.new_folder() / "buffer", states(STEPS)
    buffer = ReplayBuffer(max_steps=stored * STEPS, path=path, disk=REBOOTING, sync_every_s=0)
    fill(buffer, episodes, stored).close()

    def opened(mode: str, reboot: bool = False, cold: bool = False) -> float:
        if reboot:
            REBOOTING.reboot()
        if cold:
            drop_cache(path)
        start = perf_counter()
        buffer = ReplayBuffer.open(path, mode, disk=REBOOTING)
        assert buffer.num_episodes == stored
        taken = perf_counter() - start
        buffer.close()
        if mode == "r" and reboot:  # a reader writes nothing: the boot is still another one
            ReplayBuffer.open(path, "r+", disk=REBOOTING).close()
        return taken

    def killed() -> float:
        buffer = ReplayBuffer.open(path, "r+", sync_every_s=0, disk=REBOOTING)
        fill(buffer, episodes, behind)
        buffer.engine.owned.abandon()  # what a kill does: files and lock are gone, nothing is flushed
        return opened("r+", reboot=True)

    ways = {
        "reader": partial(opened, "r"),
        "writer": partial(opened, "r+"),
        "reader after a reboot": partial(opened, "r", True),
        "writer after a reboot": partial(opened, "r+", True),
        "writer after a reboot, nothing in the page cache": partial(opened, "r+", True, True),
    }
    table.add_all(turns(ways, place.size(11, 2, 5)))
    name = f"writer killed {behind:,} episodes after the last sync, after a reboot"
    table.add_all(turns({name: killed}, place.size(5, 1, 1)))
    for row in ways:
        table.limit(row, "s", at_most=0.5)
    table.notes.append("an opening after a reboot verifies the rows that no sync covers: the last row has such")
    yield table

    alone, path = Table(f"{table.title}, in a new process, the import of ringmap included"), path.with_name("other")
    fill(ReplayBuffer(max_steps=stored * STEPS, path=path, sync_every_s=0), states(STEPS), stored).close()

    def started(mode: str, kill: bool = False) -> float:
        if kill:
            subprocess.run([sys.executable, "-c", _KILLED, str(path), str(behind), str(STEPS)], check=False)
        told = subprocess.run([sys.executable, "-c", _OPEN, str(path), mode], check=True, capture_output=True)
        return float(told.stdout)

    calls = {"reader": (("r",), 0.3), "writer": (("r+",), 0.4)}
    calls[f"writer, after a kill {behind:,} episodes after the last sync"] = (("r+", True), 0.5)
    for name, (arguments, most) in calls.items():
        alone.add_all(turns({name: partial(started, *arguments)}, place.size(11, 2, 3)))
        alone.limit(name, "s", at_most=most)
    alone.notes.append("without the start of the interpreter; NumPy is imported with ringmap")
    yield alone


# -- imports -------------------------------------------------------------------------------------

HEAVY = ["gymnasium", "h5py", "numpy", "torch", "zarr"]

PROBE = """
import sys, time
start = time.perf_counter()
import {name}
print(time.perf_counter() - start, *{{m.split(".")[0] for m in sys.modules}})
"""


def importing(place: Place) -> Iterator[Table]:
    """Time `import ringmap`, beside NumPy, in fresh interpreters in turn; tell what comes in with it."""
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
