"""A buffer of 3 GB pickled, and opened by two spawned processes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.data import fill, noise, pixels, states
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from benchmarks.harness.worker import SHAPE, work
from ringmap import ReplayBuffer

STEPS, WORKERS = 100, 2


def run(place: Place) -> list[Table]:
    """Compare buffers small and large, of few and of many episodes, and a process that opens nothing."""
    few, many, most = place.size(25, 2), place.size(2_500, 20), place.size(1_000_000, 200)
    frames = pixels(noise(STEPS))
    with place.folder() as folder:
        buffers: dict[str, ReplayBuffer] = {}
        for number, steps, episodes in (
            (few, STEPS, frames),
            (many, STEPS, frames),
            (most, 4, states(4)),
        ):
            history = SHAPE[1] if steps == STEPS else 1
            buffer = ReplayBuffer(number * steps, history, path=folder / str(number), seed=0)
            fill(buffer, episodes, number)
            buffer.flush()  # else pages that wait for the disk would count as some process's own
            nbytes = sum(column.nbytes for column in buffer.load_episode(0).values()) * number
            buffers[f"{nbytes / 1e9:.2g} GB, {number:,} episodes"] = buffer
        payloads = {name: pickle.dumps(buffer) for name, buffer in buffers.items()}
        for name, buffer in buffers.items():
            _assert_equal(buffer, pickle.loads(payloads[name]))
        tables = [
            _pickled(buffers, payloads, place),
            _spawned(payloads, dict(zip(buffers, (few, many, most), strict=True)), place),
        ]
        for buffer in buffers.values():
            buffer.close()
    return tables


def _pickled(buffers: dict[str, ReplayBuffer], payloads: dict[str, bytes], place: Place) -> Table:
    table = Table("pickling a buffer with a path")
    calls: dict[str, Callable[[], object]] = {}
    for name, buffer in buffers.items():
        calls[f"pickle.dumps, {name}"] = lambda buffer=buffer: pickle.dumps(buffer)
        table.fact(f"bytes, {name}", len(payloads[name]))
    table.add_all(in_turn(calls, place.size(1_000, 5)))
    return table


def _spawned(payloads: dict[str, bytes], episodes: dict[str, int], place: Place) -> Table:
    table = Table(f"{WORKERS} processes spawned at once, until each has its first batch of {SHAPE[0]} clips")
    nothing = "NumPy and an array of that size, no buffer"
    started: dict[str, list[float]] = {}
    memory: dict[str, list[dict[str, int]]] = {}
    for _ in range(place.size(15, 1)):
        for name, payload in {nothing: None, **payloads}.items():
            took, found = _first_batches(payload, place.method)
            started.setdefault(name, []).append(took)
            memory.setdefault(name, []).extend(found)
    table.add_all(started)
    small, large, _ = payloads
    table.ratio(large, small, at_most=1.15)
    if not memory[large][0]:
        table.notes.append("this system does not tell the memory of a process")
        return table
    own = {name: _median_mb(found, "Anonymous") for name, found in memory.items()}
    for name, megabytes in own.items():
        mapped = _median_mb(memory[name], "Private_Clean")
        table.fact(
            f"memory of its own, {name}",
            f"{megabytes:.1f} MB (and {mapped:.1f} MB of files that it alone maps)",
        )
    for name, number in episodes.items():
        table.bar(
            f"memory of its own above that without a buffer, {name}, MB",
            own[name] - own[nothing],
            at_most=30 + 24e-6 * number,
        )
    table.notes.append("files mapped are the page cache: the system takes those pages back when it needs them")
    return table


def _first_batches(payload: bytes | None, method: str) -> tuple[float, list[dict[str, int]]]:
    """Return the seconds to the first batch of the slowest process, and the memory of each."""
    context: Any = multiprocessing.get_context(method)
    start = perf_counter()
    running = []
    for _ in range(WORKERS):
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, payload), daemon=True)
        process.start()
        there.close()
        running.append((here, process))
    for here, _ in running:
        assert here.recv() == SHAPE[0]
    taken = perf_counter() - start
    memory = []
    for here, process in running:
        here.send("now")
        memory.append(here.recv())
        process.join()
    return taken, memory


def _median_mb(found: list[dict[str, int]], kind: str) -> float:
    return float(np.median([memory[kind] for memory in found])) / 1e6


def _assert_equal(buffer: ReplayBuffer, copy: ReplayBuffer) -> None:
    assert copy.mode == "r"
    assert np.array_equal(copy.lengths, buffer.lengths)
    one, other = copy.load_episode(-1), buffer.load_episode(-1)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    copy.close()
