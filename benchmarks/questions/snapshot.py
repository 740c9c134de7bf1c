"""A snapshot against `cp` of the same files, and what either costs a writer that goes on meanwhile.

python -m benchmarks.questions.snapshot FOLDER STEPS LENGTH     what `run` starts: a writer that writes without a pause
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.harness.data import noise, pixels
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from ringmap import ReplayBuffer
from ringmap.errors import LappedError

FRAME = 64 * 64 * 3


def run(place: Place) -> list[Table]:
    """Copy a full ring that nobody writes, then one that is written without a pause; on the disk, and in RAM."""
    steps, length = place.size(40_000, 200), place.size(200, 20)
    tables = []
    for ram in (False, True):
        home = "a file system in RAM" if ram else "the disk"
        with place.folder(ram) as folder:
            _full(folder / "buf", steps, length)
            tables.append(_alone(folder, steps, home, place.size(5, 1)))
        with place.folder(ram) as folder:
            tables.append(_beside_a_writer(folder, steps, length, home, 0.05 if place.tiny else 4))
    return tables


def _alone(folder: Path, steps: int, home: str, rounds: int) -> Table:
    table = Table(
        f"copying a full ring of {steps:,} steps of 64x64x3 pixels, {steps * FRAME / 1e6:,.0f} MB, on {home}; warm"
    )
    reader = ReplayBuffer.open(folder / "buf")
    ways: dict[str, Callable[[], object]] = {
        "snapshot(), which syncs": lambda: reader.snapshot(folder / "copy"),
        "cp -r --sparse=always, then a sync of each file": lambda: _cp(folder, sync=True),
        "cp -r --sparse=always, not synced": lambda: _cp(folder, sync=False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, copy in ways.items():
            os.sync()
            start = perf_counter()
            copy()
            times[name].append(perf_counter() - start)
            _assert_equal(folder / "copy", reader)
            shutil.rmtree(folder / "copy")
    reader.close()
    table.add_all({name: np.array(values) for name, values in times.items()})
    for name, values in times.items():
        table.fact(f"rate, {name}", f"{steps * FRAME / np.median(values) / 1e6:,.0f} MB/s")
    ours, synced, bare = times
    table.faster(ours, synced)
    table.faster(ours, bare)
    return table


def _cp(folder: Path, sync: bool) -> None:
    subprocess.run(["cp", "-r", "--sparse=always", folder / "buf", folder / "copy"], check=True)
    for path in (folder / "copy").rglob("*"):
        if sync:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def _assert_equal(copy: Path, reader: ReplayBuffer) -> None:
    with ReplayBuffer.open(copy) as copied:
        assert copied.num_episodes == reader.num_episodes
        for i in (0, -1):
            one, other = copied.load_episode(i), reader.load_episode(i)
            assert all(np.array_equal(one[name], other[name]) for name in one)
    copied.close()


def _full(path: Path, steps: int, length: int) -> ReplayBuffer:
    buffer, episodes = ReplayBuffer(steps, path=path, seed=0), pixels(noise(length))
    for _ in range(steps // length * 2):
        buffer.write_episode(next(episodes))
    buffer.close()
    return ReplayBuffer.open(path, mode="r+")


# -- beside a writer --------------------------------------------------------------------------------


def _beside_a_writer(folder: Path, steps: int, length: int, home: str, seconds: float) -> Table:
    table = Table(f"the same ring on {home}, while episodes of {length} steps are written without a pause")
    lapped: list[str] = []
    with _writer(folder, steps, length) as ended:
        reader = ReplayBuffer.open(folder / "buf")
        spans = {
            "nothing else": _during(lambda: None, seconds),
            "snapshot() in another process": _during(lambda: _kept(reader, folder, lapped), seconds),
            "cp -r --sparse=always": _during(lambda: _thrown(folder), seconds),
        }
        reader.close()
    _report(table, np.array(ended), spans)
    table.fact("of the snapshots, given up because the writer had lapped them ten times", len(lapped))

    buffer, times = ReplayBuffer.open(folder / "buf", mode="r+"), list[float]()
    stop, episodes = threading.Event(), pixels(noise(length))

    def write() -> None:
        while not stop.is_set():
            buffer.write_episode(next(episodes))
            times.append(perf_counter())

    writing = threading.Thread(target=write)
    writing.start()
    spans = {
        "nothing else, a thread": _during(lambda: None, seconds),
        "snapshot() on the writer's own handle, by a second thread": _during(
            lambda: _kept(buffer, folder, lapped), seconds
        ),
    }
    stop.set()
    writing.join()
    buffer.close()
    _report(table, np.array(times), spans)
    return table


Span = tuple[float, float, list[float]]


def _during(work: Callable[[], None], seconds: float) -> Span:
    """Do `work` again and again; return when that was, and how long each took."""
    os.sync()
    began, took = perf_counter(), list[float]()
    while not took or perf_counter() - began < seconds:
        start = perf_counter()
        work()
        took.append(perf_counter() - start)
        if took[-1] < 1e-3:
            threading.Event().wait(0.01)
    return began, perf_counter(), took


def _kept(buffer: ReplayBuffer, folder: Path, lapped: list[str]) -> None:
    try:
        buffer.snapshot(folder / "copy")
    except LappedError as error:  # in RAM nothing holds the writer back, and it may write faster than anyone copies
        lapped.append(str(error))
    else:
        shutil.rmtree(folder / "copy")


def _thrown(folder: Path) -> None:
    _cp(folder, sync=True)
    shutil.rmtree(folder / "copy")


def _report(table: Table, ended: np.ndarray, spans: dict[str, Span]) -> None:
    rates = {}
    for name, (began, stopped, took) in spans.items():
        within = ended[(ended >= began) & (ended <= stopped)]
        rates[name] = len(within) / (stopped - began)
        pauses = np.diff(within) if len(within) > 1 else np.array([stopped - began])
        words = f"{rates[name]:,.0f} episodes/s, longest pause {pauses.max() * 1e3:,.0f} ms"
        if np.median(took) > 1e-3:
            words += f", {len(took)} copies of {np.median(took):.2f} s"
        table.fact(f"writing beside {name}", words)
    alone, *others = rates
    for name in others:
        table.bar(f"writing beside {name} / alone", rates[name] / rates[alone])


@contextlib.contextmanager
def _writer(folder: Path, steps: int, length: int) -> Iterator[list[float]]:
    """Have another process write; the list given holds when each episode was stored, once it has ended."""
    ended = list[float]()
    command = [sys.executable, "-m", "benchmarks.questions.snapshot", str(folder), str(steps), str(length)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "full\n"
        yield ended
    finally:
        out, _ = writer.communicate()  # its input ends, and so does it
    ended += [float(second) for second in out.split()]


def _write(folder: Path, steps: int, length: int) -> None:
    buffer = _full(folder / "buf", steps, length)
    stop, ended, episodes = threading.Event(), list[float](), pixels(noise(length))
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set())).start()
    print("full", flush=True)
    while not stop.is_set():
        buffer.write_episode(next(episodes))
        ended.append(perf_counter())
    buffer.close()
    print(" ".join(f"{second:.6f}" for second in ended))


if __name__ == "__main__":
    _write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
