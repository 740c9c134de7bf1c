"""What does growth cost? Batches, commits and openings with few and with 1,000,000 episodes stored.

The steps stored are the same at every size, cut into fewer and longer, or more and shorter,
episodes. 4,000,000 steps of pixels are 49 GB: there, one clip in `every` is real and drawn,
the same ones at every size, scattered evenly; the other rows were committed like any, but left
out of the file. It is on a file system in RAM: a disk would read ahead over the holes, and
push out of the page cache what is to be measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.data import fill, noise, pixels, states
from benchmarks.harness.place import Place
from benchmarks.harness.processes import drop_cache
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn, turns
from ringmap import ReplayBuffer
from ringmap.storage.disk.files import Disk, File

Array = np.ndarray[Any, np.dtype[Any]]
Episodes = Iterator[dict[str, Array]]

BATCH, HISTORY, STEPS = 256, 4, 4
ROW, HEADER = 64 * 64 * 3, 4096


# -- batches -------------------------------------------------------------------------------------


def growth(place: Place) -> Iterator[Table]:
    """Time state vectors and pixels, all sizes in turn; and both after a write."""
    sizes = [1_000, 10_000, 100_000, 1_000_000] if not place.tiny else [50, 200]
    yield from _states(sizes, place)
    yield from _pixels(sizes, place)


def _row(episodes: int, history: int) -> str:
    return f"{episodes:,} episodes, history {history}"


def _states(sizes: list[int], place: Place) -> Iterator[Table]:
    rows = HISTORY * sizes[-1]
    table = Table(
        f"sample({BATCH}) of state vectors (4 small columns) as episodes get more and shorter, {rows:,} steps stored"
    )
    with place.folder() as folder:
        buffers = {n: ReplayBuffer(rows, path=folder / str(n), seed=0) for n in sizes}
        for n, buffer in buffers.items():
            fill(buffer, states(rows // n), n)
            batch = buffer.sample(8)
            numbers, steps = batch["obs"][:, 0, 0].astype(int), batch["reward"][:, 0].astype(int)
            for values, number, step in zip(batch["obs"][:, 0], numbers, steps, strict=True):
                assert np.array_equal(values, buffer.load_episode(number)["obs"][step])
        for history in (1, HISTORY):
            calls = {_row(n, history): partial(buffer.sample, BATCH, history) for n, buffer in buffers.items()}
            table.time(calls, place.size(200, 2), place.size(50, 2))
            table.bar(
                f"history {history}: us more at {sizes[-1]:,} episodes than at {sizes[0]:,}",
                (table.median(_row(sizes[-1], history)) - table.median(_row(sizes[0], history))) * 1e6,
                at_most=100,
            )
        yield table
        after = Table(
            f"sample({BATCH}) of state vectors, {sizes[-1]:,} episodes: alone, and each after a write_episode (not "
            "timed)"
        )
        episodes = states(HISTORY)
        for history in (1, HISTORY):
            _after_writes(after, buffers[sizes[-1]], history, place, lambda: next(episodes))
        yield after
        for buffer in buffers.values():
            buffer.close()


def _after_writes(
    table: Table, buffer: ReplayBuffer, history: int, place: Place, episode: Callable[[], dict[str, Array]]
) -> None:
    """Sample from the writer and from a reader, alone and after a write, in turn."""
    reader = type(buffer).open(buffer.path, history_len=history, sampler=buffer.sampler, seed=0)
    for role, who in (("writer", buffer), ("reader", reader)):
        call = {"": partial(who.sample, BATCH, history)}
        ways = {"alone": None, "after a write": lambda: buffer.write_episode(episode())}
        names = [f"{role}, history {history}, {when}" for when in ways]
        calls = {n: partial(in_turn, call, 1, 25, before) for n, before in zip(names, ways.values(), strict=True)}
        for name, found in turns(calls, place.size(200, 2)).items():
            table.add(name, np.concatenate([one[""] for one in found]))
        table.ratio(names[1], names[0], at_most=1.3)
    reader.refresh()
    one, other = (who.get_row_data(who.num_steps_stored - 1) for who in (buffer, reader))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    reader.close()


class HoleyDisk(Disk):
    """A disk that keeps one clip of pixels in `every`, so that their file stays sparse."""

    every = 1

    def open(self, path: str, write: bool = False) -> File:
        """Open a file that exists."""
        file = super().open(path, write)
        if not path.endswith("-pixels.npy"):
            return file
        fd, file.fd = file.fd, -1  # the descriptor is the other one's from now on
        return HoleyFile(self, fd, path)


class HoleyFile(File):
    """The file of pixels."""

    __slots__ = ()

    def write(self, data: Any, offset: int) -> None:
        """Write the clips that are kept. Episodes are multiples of a clip long: none is cut."""
        view = memoryview(data).cast("B")
        group = HISTORY * self.disk.every * ROW  # type: ignore[attr-defined]
        for at in range(-(offset - HEADER) % group, len(view), group):
            super().write(view[at : at + HISTORY * ROW], offset + at)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Leave the holes."""


DISK = HoleyDisk()


class Scattered:
    """A sampler uniform over the clips that are kept."""

    def __init__(self, steps: int, rows: int, every: int) -> None:
        self.evicted, self._steps, self._group = 0, steps, HISTORY * every
        self._count, self._rng = rows // self._group - 1, np.random.default_rng(0)

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return the ids."""
        first = -(-self.evicted * self._steps // self._group)
        positions = self._rng.integers(first, first + self._count, batch_size) * self._group
        episodes, starts = np.divmod(positions, self._steps)
        return (episodes - self.evicted) * (self._steps - HISTORY + 1) + starts


def _pixels(sizes: list[int], place: Place) -> Iterator[Table]:
    rows, every = HISTORY * sizes[-1], place.size(80, 4)
    DISK.every = every
    table = Table(
        f"sample({BATCH}) of clips of {HISTORY} steps of 64x64x3 pixels as episodes get more and shorter, "
        f"{rows:,} steps stored, {rows // every:,} of them real and drawn"
    )
    folder, calls = place.new_folder(ram=True), {}
    for n in sizes:
        frames, sampler = noise(rows // n, 2), Scattered(rows // n, rows, every)
        buffer = ReplayBuffer(rows, HISTORY, path=folder / str(n), seed=0, sampler=sampler, disk=DISK)
        episodes = pixels(frames)
        place.closing(fill(buffer, episodes, n))
        batch = buffer.sample(8)
        numbers, starts = batch["action"][:, 0, 0].astype(int), batch["reward"][:, 0].astype(int)
        for clip, number, start in zip(batch["pixels"], numbers, starts, strict=True):
            assert np.array_equal(clip, frames[number % len(frames), start : start + HISTORY])
        calls[_row(n, HISTORY)] = partial(buffer.sample, BATCH)
    table.time(calls, place.size(300, 2), place.size(4, 2))
    table.ratio(_row(sizes[-1], HISTORY), _row(sizes[0], HISTORY), at_most=1.15)
    yield table
    after = Table(
        f"sample({BATCH}) of pixels, {sizes[-1]:,} episodes: alone, and each after a write_episode (not timed)"
    )

    def next_episode() -> dict[str, Array]:
        sampler.evicted += 1
        return next(episodes)

    _after_writes(after, buffer, HISTORY, place, next_episode)
    yield after


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
            sources = {n: states(STEPS) for n in sizes}
            writes = {
                f"{n:,} episodes stored": lambda buffer=buffer, source=sources[n]: buffer.write_episode(next(source))
                for n, buffer in buffers.items()
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
