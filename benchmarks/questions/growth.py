"""What sampling costs as a buffer grows to 1,000,000 episodes, all sizes in turn; and after a write.

The steps stored are the same at every size, cut into fewer and longer, or more and shorter,
episodes. 4,000,000 steps of pixels are 49 GB: there, one clip in `EVERY` is real and drawn,
the same ones at every size, scattered evenly; the other rows were committed like any, but left
out of the file. It is on a file system in RAM: a disk would read ahead over the holes, and
push out of the page cache what is to be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.data import fill, noise, pixels, states
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import ReplayBuffer
from ringmap.storage.disk.files import Disk, File

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, HISTORY = 256, 4
ROW, HEADER = 64 * 64 * 3, 4096


def run(place: Place) -> list[Table]:
    """Time state vectors, pixels, and state vectors after a write; draw the plot."""
    sizes = [1_000, 10_000, 100_000, 1_000_000] if not place.tiny else [50, 200]
    vectors, vectors_after = _states(sizes, place)
    frames, frames_after = _pixels(sizes, place)
    _plot(vectors, frames, sizes, place)
    return [vectors, frames, vectors_after, frames_after]


# -- state vectors -------------------------------------------------------------------------------


def _states(sizes: list[int], place: Place) -> tuple[Table, Table]:
    rows = HISTORY * sizes[-1]
    table = Table(
        f"sample({BATCH}) of state vectors (4 small columns) as episodes get more and shorter, {rows:,} steps stored"
    )
    with place.folder() as folder:
        buffers = {}
        for n in sizes:
            buffers[n] = ReplayBuffer(rows, path=folder / str(n), seed=0)
            fill(buffers[n], states(rows // n), n)
            _assert_whole(buffers[n])
        for history in (1, HISTORY):
            calls = {_row(n, history): partial(buffer.sample, BATCH, history) for n, buffer in buffers.items()}
            table.add_all(in_turn(calls, place.size(200, 2), burst=place.size(50, 2)))
            few, many = _row(sizes[0], history), _row(sizes[-1], history)
            table.bar(
                f"history {history}: us more at {sizes[-1]:,} episodes than at {sizes[0]:,}",
                (table.times[many]["median"] - table.times[few]["median"]) * 1e6,
                at_most=100,
            )
        after = Table(
            f"sample({BATCH}) of state vectors, {sizes[-1]:,} episodes: alone, and each after a write_episode (not "
            "timed)"
        )
        largest, episodes = buffers[sizes[-1]], states(HISTORY)
        for history in (1, HISTORY):
            _after_writes(after, largest, f"history {history}", history, place, lambda: next(episodes))
        for buffer in buffers.values():
            buffer.close()
    return table, after


def _after_writes(
    table: Table,
    buffer: ReplayBuffer,
    what: str,
    history: int,
    place: Place,
    episode: Callable[[], dict[str, Array]],
) -> None:
    """Sample from the writer and from a reader, alone and after a write, in turn."""
    reader = type(buffer).open(buffer.path, history_len=history, sampler=buffer.sampler, seed=0)

    def write() -> None:
        buffer.write_episode(episode())

    for role, who in (("writer", buffer), ("reader", reader)):
        names = [f"{role}, {what}, {when}" for when in ("alone", "after a write")]
        call = partial(who.sample, BATCH, history)
        times: dict[str, list[Array]] = {name: [] for name in names}
        for _ in range(place.size(200, 2)):
            for name, before in zip(names, (None, write), strict=True):
                times[name].append(in_turn({"": call}, 1, 25, before)[""])
        for name, values in times.items():
            table.add(name, np.concatenate(values))
        table.ratio(names[1], names[0], at_most=1.3)
    reader.refresh()
    newest = [who.get_row_data(who.num_steps_stored - 1) for who in (buffer, reader)]
    assert all(np.array_equal(newest[0][name], newest[1][name]) for name in newest[0])
    reader.close()


def _assert_whole(buffer: ReplayBuffer) -> None:
    """Make sure that a batch holds what the episodes that it was drawn from hold."""
    batch = buffer.sample(8)
    numbers, steps = batch["obs"][:, 0, 0].astype(int), batch["reward"][:, 0].astype(int)
    for values, number, step in zip(batch["obs"][:, 0], numbers, steps, strict=True):
        assert np.array_equal(values, buffer.load_episode(number)["obs"][step])


# -- pixels --------------------------------------------------------------------------------------


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


def _pixels(sizes: list[int], place: Place) -> tuple[Table, Table]:
    rows, every = HISTORY * sizes[-1], place.size(80, 4)
    DISK.every = every
    table = Table(
        f"sample({BATCH}) of clips of {HISTORY} steps of 64x64x3 pixels as episodes get more and shorter, "
        f"{rows:,} steps stored, {rows // every:,} of them real and drawn"
    )
    with place.folder(ram=True) as folder:
        buffers = []
        for n in sizes:
            frames = noise(rows // n, 2)
            buffer = ReplayBuffer(
                rows,
                HISTORY,
                path=folder / str(n),
                seed=0,
                sampler=Scattered(rows // n, rows, every),
                disk=DISK,
            )
            episodes = pixels(frames)
            fill(buffer, episodes, n)
            _assert_same(buffer, frames)
            buffers.append(buffer)
        calls = {_row(n, HISTORY): partial(buffer.sample, BATCH) for n, buffer in zip(sizes, buffers, strict=True)}
        table.add_all(in_turn(calls, place.size(300, 2), burst=place.size(4, 2)))
        table.ratio(_row(sizes[-1], HISTORY), _row(sizes[0], HISTORY), at_most=1.15)
        after = Table(
            f"sample({BATCH}) of pixels, {sizes[-1]:,} episodes: alone, and each after a write_episode (not timed)"
        )

        def next_episode() -> dict[str, Array]:
            buffer.sampler.evicted += 1
            return next(episodes)

        _after_writes(after, buffer, f"history {HISTORY}", HISTORY, place, next_episode)
        for buffer in buffers:
            buffer.close()
    return table, after


class Scattered:
    """A sampler uniform over the clips that are kept."""

    def __init__(self, steps: int, rows: int, every: int) -> None:
        self.evicted = 0
        self._steps, self._group, self._count = (
            steps,
            HISTORY * every,
            rows // (HISTORY * every) - 1,
        )
        self._rng = np.random.default_rng(0)

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return the ids."""
        first = -(-self.evicted * self._steps // self._group)
        positions = self._rng.integers(first, first + self._count, batch_size) * self._group
        episodes, starts = np.divmod(positions, self._steps)
        return (episodes - self.evicted) * (self._steps - HISTORY + 1) + starts


def _assert_same(buffer: ReplayBuffer, frames: Array) -> None:
    """Make sure that a batch holds the frames that were written."""
    batch = buffer.sample(8)
    numbers, starts = batch["action"][:, 0, 0].astype(int), batch["reward"][:, 0].astype(int)
    for clip, number, start in zip(batch["pixels"], numbers, starts, strict=True):
        assert np.array_equal(clip, frames[number % len(frames), start : start + HISTORY])


# -- both ----------------------------------------------------------------------------------------


def _row(episodes: int, history: int) -> str:
    return f"{episodes:,} episodes, history {history}"


def _plot(table: Table, frames: Table, sizes: list[int], place: Place) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        table.notes.append("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(5.2, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    for axes, of, histories, unit, scale in (
        (upper, table, (1, HISTORY), "us", 1e6),
        (lower, frames, (HISTORY,), "ms", 1e3),
    ):
        for history in histories:
            rows = [of.times[_row(n, history)] for n in sizes]
            median, p90 = ([row[q] * scale for row in rows] for q in ("median", "p90"))
            (line,) = axes.plot(sizes, median, "o-", label=f"history {history}, median")
            axes.plot(sizes, p90, ":", color=line.get_color(), label="p90")
        axes.set(xscale="log", xlabel="episodes stored", ylabel=f"{unit} per batch", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    upper.set_title(f"state vectors, batch {BATCH}", fontsize="medium")
    lower.set_title(f"64x64x3 pixels, batch {BATCH}", fontsize="medium")
    figure.savefig(place.out / "growth.png", dpi=140)
