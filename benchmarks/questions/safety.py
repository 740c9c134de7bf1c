"""What does safety cost? The same ring with one protection taken out, torn clips without it, and copies.

write_episode    syncs of each commit | the default | no background syncs | no checksums | a bare copy into RAM
sample           two looks | one

Only here: no option of the library takes a protection out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import xxhash

from benchmarks.harness.data import fill, noise, pixels, states
from benchmarks.harness.place import Place
from benchmarks.harness.processes import process
from benchmarks.harness.race import Ring, Tally, between_processes, between_threads, one_look
from benchmarks.harness.table import Table
from benchmarks.harness.timing import seconds, turns
from ringmap import ReplayBuffer
from ringmap.errors import LappedError

Array = np.ndarray[Any, np.dtype[Any]]
Way = tuple[Callable[[], object], Callable[[], AbstractContextManager[Any]]]
"""A call, and what is taken out of the library around it."""

POWER, DEFAULT = 'ringmap, durability="power": a sync for each episode', "ringmap, the default"
NO_SYNCS, NO_CHECKSUMS = "ringmap, without background syncs", "ringmap, without checksums"
COPY = "np.copyto into arrays in RAM"
TWO, ONE = "ringmap, two looks", "ringmap, one look: torn clips"


# -- one protection taken out --------------------------------------------------------------------


def safety(place: Place) -> Iterator[Table]:
    """Time writes of pixels and of small episodes, and draws."""
    frames, small = noise(place.size(200, 4), place.size(16, 2)), place.size(4, 2)
    large = f"pixels: episodes of {frames.shape[1]} steps of 12 KiB"
    yield _writes(place, large, place.size(150, 4), partial(pixels, frames), 1)
    little = f"states: episodes of {small} steps of 64 bytes"
    yield _writes(place, little, place.size(10_000, 20), partial(states, small), 20)
    yield _draws(place, frames)


def _writes(
    place: Place, title: str, episodes: int, source: Callable[[], Iterator[dict[str, Array]]], burst: int
) -> Table:
    table, folder = Table(f"write_episode, round a full ring on the disk; {title}"), place.new_folder()
    steps, ways = len(next(source())["reward"]) * episodes, dict[str, Way]()
    options: dict[str, dict[str, Any]] = {POWER: {"durability": "power"}, DEFAULT: {}, NO_SYNCS: {"sync_every_s": 1e9}}
    for number, (name, option) in enumerate({**options, NO_CHECKSUMS: {}}.items()):
        buffer = place.closing(ReplayBuffer(steps, path=folder / str(number), history_len=1, **option))
        without = _no_checksums if name == NO_CHECKSUMS else nullcontext
        with without():
            fill(buffer, source(), episodes)
        episode = source()
        ways[name] = (lambda b=buffer, e=episode: b.write_episode(next(e))), without
    ways[COPY] = _copies(source(), episodes), nullcontext
    times = _in_turn(table, ways, place.size(400, 2), burst)
    expected, last = source(), dict[str, Array]()
    for _ in range(len(times[DEFAULT]) + burst):
        last = next(expected)
    with ReplayBuffer.open(folder / "1") as reader:  # another process sees what was written last
        found = reader.load_episode(reader.num_episodes - 1)
        assert all(np.array_equal(found[name], last[name]) for name in last), "other rows"
        reader.close()
    for name in (POWER, DEFAULT, NO_SYNCS, NO_CHECKSUMS):
        table.ratio(name, COPY)
    return table


def _draws(place: Place, frames: Array) -> Table:
    table = Table("sample(256), clips of 4 frames of 64x64x3, a ring of files in the page cache")
    episodes, path = place.size(100, 4), place.new_folder(ram=True) / "ring"
    fill(ReplayBuffer(frames.shape[1] * episodes, 4, path=path), pixels(frames), episodes).close()
    buf = place.closing(ReplayBuffer.open(path, seed=0))
    batch, draw = buf.sample(256), partial(buf.sample, 256)
    assert (batch["reward"][:, 1:] == batch["reward"][:, :-1] + 1).all(), "no clips"
    _in_turn(table, {TWO: (draw, nullcontext), ONE: (draw, one_look)}, place.size(200, 2), 5)
    table.ratio(TWO, ONE)
    return table


def _in_turn(table: Table, ways: dict[str, Way], rounds: int, burst: int) -> dict[str, Any]:
    """Time each call; what is taken out is taken out and put back between them."""

    def timed(call: Callable[[], object], without: Callable[[], AbstractContextManager[Any]]) -> list[float]:
        with without():
            return [seconds(call) for _ in range(burst)]

    taken = turns({name: partial(timed, *way) for name, way in ways.items()}, rounds + 1)
    return table.add_all({n: np.concatenate(times[1:]) for n, times in taken.items()})  # the first one warms up


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    def nothing(*_: Any, **__: Any) -> int:
        return 0

    def no_bytes(*_: Any, **__: Any) -> bytes:
        return bytes(8)

    with mock.patch.multiple(xxhash, xxh3_64_intdigest=nothing, xxh3_64_digest=no_bytes):
        yield


def _copies(source: Iterator[dict[str, Array]], episodes: int) -> Callable[[], None]:
    rows = {name: np.stack([values] * episodes) for name, values in next(source).items()}
    places = cycle(range(episodes))

    def copy() -> None:
        at, episode = next(places), next(source)
        for name, values in episode.items():
            np.copyto(rows[name][at], values)

    return copy


# -- torn clips ----------------------------------------------------------------------------------

RINGS = {
    "one record publishes and retires": Ring(),
    "episodes longer than the spare rows": Ring(spare=1),
}


def torn(place: Place) -> Iterator[Table]:
    """Race a flat-out writer against readers, with the second look and without: processes, then threads of one."""
    rings = dict(list(RINGS.items())[: place.size(len(RINGS), 1)])
    clips = {True: place.size(1_000_000, 200) // len(rings), False: place.size(200_000, 200) // len(rings)}
    for way, race in (
        ("1 writer process, 2 reader processes", between_processes),
        ("1 writer thread, 2 reader threads of one process", between_threads),
    ):
        table = Table(f"{way}: clips of {Ring().history} steps of {Ring().row_nbytes // 1024} KiB")
        total = {True: Tally(), False: Tally()}
        for kind, ring in rings.items():
            for looks in (True, False):
                start = perf_counter()
                with place.folder(ram=True) as folder:
                    tally = race(str(folder / "buffer"), ring, clips[looks], look_twice=looks)
                total[looks] += tally
                table.fact(
                    f"{kind}, {'two looks' if looks else 'ONE LOOK (control)'}",
                    f"{tally.torn:,} torn of {tally.clips:,} clips; {tally.redraws:,} redrawn, "
                    f"{tally.laps:,} batches given up, {tally.episodes:,} episodes written, "
                    f"{perf_counter() - start:.0f} s",
                )
        table.bar("torn", total[True].torn, at_most=0)
        table.bar("torn without the second look", total[False].torn, at_least=None if place.tiny else 1)
        yield table


# -- copies --------------------------------------------------------------------------------------

FRAME = 64 * 64 * 3


def snapshot(place: Place) -> Iterator[Table]:
    """Copy a full ring that nobody writes, and `cp` of the same files for comparison; then a ring that is written
    without a pause. On the disk, and in RAM."""
    steps, length = place.size(40_000, 200), place.size(200, 20)
    for ram in (False, True):
        home = "a file system in RAM" if ram else "the disk"
        with place.folder(ram) as folder:
            Writer(folder / "buf", steps, length).close()
            yield _alone(folder, steps, home, place.size(5, 1))
        with place.folder(ram) as folder:
            yield _beside_a_writer(place, folder, steps, length, home)


def _alone(folder: Path, steps: int, home: str, rounds: int) -> Table:
    nbytes = steps * FRAME
    table = Table(f"copying a full ring of {steps:,} steps of 64x64x3 pixels, {nbytes / 1e6:,.0f} MB, on {home}; warm")
    reader = ReplayBuffer.open(folder / "buf")
    ways: dict[str, Callable[[], object]] = {
        "snapshot(), which syncs": lambda: reader.snapshot(folder / "copy"),
        "cp -r --sparse=always, then a sync of each file": lambda: _cp(folder, sync=True),
        "cp -r --sparse=always, not synced": lambda: _cp(folder, sync=False),
    }

    def copied(copy: Callable[[], object]) -> float:
        os.sync()
        taken = seconds(copy)
        with ReplayBuffer.open(folder / "copy") as made:
            assert made.num_episodes == reader.num_episodes
            for i in (0, -1):
                one, other = made.load_episode(i), reader.load_episode(i)
                assert all(np.array_equal(one[name], other[name]) for name in one)
        made.close()
        shutil.rmtree(folder / "copy")
        return taken

    table.add_all(turns({name: partial(copied, copy) for name, copy in ways.items()}, rounds))
    reader.close()
    for name in ways:
        table.fact(f"rate, {name}", f"{nbytes / table.median(name) / 1e6:,.0f} MB/s")
    ours, *others = ways
    for other in others:
        table.faster(ours, other)
    return table


def _cp(folder: Path, sync: bool) -> None:
    subprocess.run(["cp", "-r", "--sparse=always", folder / "buf", folder / "copy"], check=True)
    for path in (folder / "copy").rglob("*"):
        if sync:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


class Writer:
    """Writes a ring full, and then without a pause, from a thread of its own, between `start` and `stop`."""

    def __init__(self, path: Path, steps: int = 0, length: int = 0) -> None:
        if steps:
            fill(ReplayBuffer(steps, path=path, seed=0), pixels(noise(length)), steps // length * 2).close()
        self.buffer, self._stop, self._ended = ReplayBuffer.open(path, mode="r+"), threading.Event(), list[float]()
        self._episodes = pixels(noise(length or int(self.buffer.lengths[0])))
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        while not self._stop.is_set():
            self.buffer.write_episode(next(self._episodes))
            self._ended.append(perf_counter())

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> Array:
        """Return when each episode was stored."""
        self._stop.set()
        self._thread.join()
        return np.array(self._ended)

    def close(self) -> None:
        """Close the ring."""
        self.buffer.close()


Span = tuple[float, float, list[float]]


def _beside_a_writer(place: Place, folder: Path, steps: int, length: int, home: str) -> Table:
    table = Table(f"the same ring on {home}, while episodes of {length} steps are written without a pause")
    lapped, span = list[str](), 0.05 if place.tiny else 4

    def kept(buffer: ReplayBuffer) -> None:
        try:
            buffer.snapshot(folder / "copy")
        except LappedError as error:  # in RAM nothing holds the writer back, and it may write faster than anyone copies
            lapped.append(str(error))
        else:
            shutil.rmtree(folder / "copy")

    def thrown() -> None:
        _cp(folder, sync=True)
        shutil.rmtree(folder / "copy")

    with process(Writer, folder / "buf", steps, length, method=place.method) as writer:
        writer("start")
        reader = ReplayBuffer.open(folder / "buf")
        spans = {
            "nothing else": _during(lambda: None, span),
            "snapshot() in another process": _during(lambda: kept(reader), span),
            "cp -r --sparse=always": _during(thrown, span),
        }
        reader.close()
        _report(table, writer("stop"), spans)
    table.fact("of the snapshots, given up because the writer had lapped them ten times", len(lapped))

    own = Writer(folder / "buf")
    own.start()
    spans = {
        "nothing else, a thread": _during(lambda: None, span),
        "snapshot() on the writer's own handle, by a second thread": _during(lambda: kept(own.buffer), span),
    }
    _report(table, own.stop(), spans)
    own.close()
    return table


def _during(work: Callable[[], None], span: float) -> Span:
    """Do `work` again and again; return when that was, and how long each took."""
    os.sync()
    began, took = perf_counter(), list[float]()
    while not took or perf_counter() - began < span:
        took.append(seconds(work))
        if took[-1] < 1e-3:
            threading.Event().wait(0.01)
    return began, perf_counter(), took


def _report(table: Table, ended: Array, spans: dict[str, Span]) -> None:
    rates = {}
    for name, (began, stopped, took) in spans.items():
        within = ended[(ended >= began) & (ended <= stopped)]
        rates[name] = max(1, len(within)) / (stopped - began)
        pauses = np.diff(within) if len(within) > 1 else np.array([stopped - began])
        words = f"{rates[name]:,.0f} episodes/s, longest pause {pauses.max() * 1e3:,.0f} ms"
        if np.median(took) > 1e-3:
            words += f", {len(took)} copies of {np.median(took):.2f} s"
        table.fact(f"writing beside {name}", words)
    alone, *others = rates
    for name in others:
        table.bar(f"writing beside {name} / alone", rates[name] / rates[alone])
