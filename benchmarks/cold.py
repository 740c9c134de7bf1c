"""A ring eight times as large as memory may be: random clips, at the disk's own speed or not.

python -m benchmarks.cold FOLDER STEPS LENGTH SECONDS LIMIT PART     what `run` starts: a process with a limit
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.limit import drop_cache, limit_memory, peak_memory
from benchmarks.place import Place
from benchmarks.plots import shares
from benchmarks.rivals import (
    Field,
    hdf5,
    lance_rows,
    open_rivals,
    sheeprl_sequences,
    torchrl_in_files,
    write_lance,
)
from benchmarks.stored import Stored
from benchmarks.table import Table
from ringmap import ReplayBuffer
from ringmap.clips.cut import Cut

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, HISTORY = 256, 4
CUT = Cut.clip(HISTORY)
FRAME = 64 * 64 * 3
CLIP = HISTORY * FRAME
MODEL_S = 0.02
ROUNDS = 3


def run(place: Place) -> list[Table]:
    """Time reading, and waiting, in a process of its own."""
    steps, length = place.size(400_000, 400), place.size(200, 20)
    limit = steps * FRAME // 8
    table = Table(
        f"cold: clips of {HISTORY} steps of 64x64x3 pixels, batches of {BATCH}, {steps * FRAME / 1e9:.1f} GB on disk, "
        f"memory limited to {limit / 1e6:.0f} MB"
    )
    waiting = Table(f"the same ring, in a loop whose model takes {MODEL_S * 1e3:.0f} ms")
    with place.folder() as folder:
        (folder / "theirs").mkdir()
        with contextlib.suppress(ImportError):
            write_lance(
                Field(Stored.of_pixels(steps // length, length), folder / "theirs", BATCH, HISTORY)
            )
        numbers = (steps, length, place.size(5, 0), 0 if place.tiny else limit)
        run_part = _here if place.tiny else _in_a_process
        found = run_part(folder, *numbers, "rivals")
        loops = run_part(folder, *numbers, "loops")
        # What Lance and the libraries of the others take together leaves no room for rows, or for workers.
        found["ways"] |= run_part(folder, *numbers, "lance")["ways"]
        found |= loops
    table.notes += found["notes"]
    for name, one in found["ways"].items():
        table.add(name, one["seconds"])
        rate = BATCH * CLIP / float(np.median(one["seconds"])) / 1e6
        one["rate"] = rate
        table.fact(
            name,
            f"{rate:,.0f} MB/s useful, {rate * 1e6 / CLIP:,.0f} clips/s, {one['read']:.1f} bytes read for a useful one",
        )
    rate_of = {name: one["rate"] for name, one in found["ways"].items()}
    ours = rate_of["batches()"]
    table.bar(
        "batches() / the disk's own parallel random reads", ours / rate_of[_DISK], at_least=0.8
    )
    table.bar(
        "sample() / the disk's own parallel random reads", rate_of["sample()"] / rate_of[_DISK]
    )
    table.bar("sample() / plain memmap gather", rate_of["sample()"] / rate_of[_PLAIN], at_least=50)
    for name, share in found["waiting"].items():
        waiting.fact(f"share of the time waiting, {name}", f"{share:.1%}")
    waiting.fact("peak memory, maps included", f"{found['peak'] / 1e6:,.0f} MB")
    stages, medians = [], dict[str, dict[str, float]]()
    for way, parts in found["stages"].items():
        stage = Table(f"where a batch's time goes: {way}")
        for part, times in parts.items():
            stage.add(part, times)
        medians[way] = {part: row["median"] * 1e3 for part, row in stage.times.items()}
        stages.append(stage)
    shares(place.out / "cold.png", stages[-1], medians)
    return [table, waiting, *stages]


_DISK = "O_DIRECT, 32 threads"
_PLAIN = "np.memmap, one fancy index"


def _here(
    folder: Path, steps: int, length: int, seconds: float, limit: int, part: str
) -> dict[str, Any]:
    return _PARTS[part](folder, steps, length, seconds, limit)


def _in_a_process(folder: Path, *arguments: object) -> dict[str, Any]:
    """Run a part in a process of its own, whose memory can be limited."""
    command = [sys.executable, "-m", "benchmarks.cold", str(folder), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _lance(folder: Path, steps: int, length: int, seconds: float, limit: int) -> dict[str, Any]:
    if limit:
        limit_memory(limit)
    field = Field(Stored.of_pixels(steps // length, length), folder / "theirs", BATCH, HISTORY)
    rivals = open_rivals((lance_rows,), field, Table(""))
    return {
        "ways": _timed({r.name: r.sample for r in rivals if r.sample is not None}, folder, seconds)
    }


def _beside_rivals(
    folder: Path, steps: int, length: int, seconds: float, limit: int
) -> dict[str, Any]:
    table = Table("")
    # Before anything is written: what a process has mapped from before stays in memory whatever is asked.
    if limit and not limit_memory(limit):
        table.notes.append("memory could not be limited (it takes root): most of it was warm")
    buffer = ReplayBuffer(steps, HISTORY, path=folder / "ours", seed=0)
    stored = Stored.of_pixels(steps // length, length)
    for episode in stored:
        buffer.write_episode(episode)
    field = Field(stored, folder / "theirs", BATCH, HISTORY)
    rivals = open_rivals((torchrl_in_files, sheeprl_sequences, hdf5), field, table)
    buffer.close()
    buffer = ReplayBuffer.open(folder / "ours", seed=0)
    (pixels,) = (folder / "ours" / "columns").glob("*-pixels.npy")
    plain_reads = ReplayBuffer.open(folder / "ours", seed=0, reads="pread")
    with buffer.batches(BATCH) as batches:
        ways: dict[str, Callable[[], object]] = {
            "sample()": lambda: buffer.sample(BATCH),
            "batches()": lambda: next(batches),
            'sample(), reads="pread"': lambda: plain_reads.sample(BATCH),
            _PLAIN: _plain(pixels, steps),
            _DISK: _direct(pixels, steps),
        }
        ways |= {r.name: r.sample for r in rivals if r.sample is not None}
        ways |= {
            r.name: _endless(r.batches)
            for r in rivals
            if r.batches is not None and r.sample is None
        }
        found = _timed(ways, folder, seconds)
    plain_reads.close()
    buffer.close()
    return {"ways": found, "notes": table.notes}


def _in_loops(folder: Path, steps: int, length: int, seconds: float, limit: int) -> dict[str, Any]:
    if limit:
        limit_memory(limit)
    buffer = ReplayBuffer.open(folder / "ours", seed=0)
    waiting = {
        "sample()": _waiting(lambda: buffer.sample(BATCH), folder, seconds),
    }
    with buffer.batches(BATCH) as batches:
        waiting["batches()"] = _waiting(lambda: next(batches), folder, seconds)
    with contextlib.closing(_loaded(buffer)) as loaded:
        next(loaded)  # the workers are there
        waiting["DataLoader, 2 workers"] = _waiting(lambda: next(loaded), folder, seconds)
    stages = _stages(buffer, folder, seconds)
    buffer.close()
    part = steps // 4 // length * length
    packed = ReplayBuffer(part, HISTORY, path=folder / "packed", seed=0, storage={"pixels": "zarr"})
    for _, episode in zip(
        range(part // length), Stored.of_pixels(steps // length, length), strict=False
    ):
        packed.write_episode(episode)
    packed.flush()
    stages |= {f"{way}, Zarr": parts for way, parts in _stages(packed, folder, seconds).items()}
    packed.close()
    return {"waiting": waiting, "stages": stages, "peak": peak_memory()}


def _loaded(buffer: ReplayBuffer) -> Generator[object]:
    while True:
        yield from DataLoader(buffer, BATCH, shuffle=True, num_workers=2)


def _stages(
    buffer: ReplayBuffer, folder: Path, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Return what each part of a batch takes: cold, asked for at once or 20 ms ahead, and warm."""
    reader, rows = buffer.engine.reader, buffer.engine.owned.rows
    assert rows is not None
    rng = np.random.default_rng(5)
    found: dict[str, dict[str, list[float]]] = {}
    for way, ahead in (
        ("sample(), cold", 0.0),
        ("batches(), cold", MODEL_S),
        ("sample(), warm", -1.0),
    ):
        parts = found[way] = {"draw": [], "ask the disk": [], "wait for it": [], "copy": []}
        drop_cache(folder)
        began = perf_counter()
        while not parts["draw"] or perf_counter() - began < seconds:
            rows.forget()
            start = perf_counter()
            positions = reader.draw(BATCH, CUT, rng)
            assert positions is not None
            drawn = perf_counter()
            if ahead >= 0:
                reader.want(positions, CUT)
            asked = perf_counter()
            sleep(max(ahead, 0.0))
            slept = perf_counter()
            reader.at(positions.copy(), CUT, asked=True)
            read = perf_counter()
            rows.forget()
            copying = perf_counter()
            reader.at(positions, CUT, asked=True)  # the same rows again, now in memory
            copied = perf_counter() - copying
            parts["draw"].append(drawn - start)
            parts["ask the disk"].append(asked - drawn)
            parts["wait for it"].append(max(0.0, read - slept - copied) if ahead >= 0 else 0.0)
            parts["copy"].append(copied)
    return found


def _timed(
    ways: dict[str, Callable[[], object]], folder: Path, seconds: float
) -> dict[str, dict[str, Any]]:
    """Return the seconds of each call, and the bytes that it read for a useful one: in turn, cold at each."""
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "read": 0.0} for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            drop_cache(folder)
            before, began = _read_bytes(), perf_counter()
            times = found[name]["seconds"]
            count = len(times)
            while perf_counter() - began < seconds or len(times) == count:
                start = perf_counter()
                call()
                times.append(perf_counter() - start)
            useful = (len(times) - count) * BATCH * CLIP
            found[name]["read"] += (_read_bytes() - before) / useful / ROUNDS
    return found


def _plain(path: Path, steps: int) -> Callable[[], object]:
    """Return what every memmap buffer does: one fancy index, read-ahead as the system has it."""
    frames, rng = np.load(path, mmap_mode="r"), np.random.default_rng(1)

    def gather() -> Array:
        starts = rng.integers(steps - HISTORY, size=BATCH)
        rows: Array = frames[starts[:, None] + np.arange(HISTORY)]
        return rows

    return gather


def _direct(path: Path, steps: int) -> Callable[[], object]:
    """Return the disk's own random reads: past the page cache, 32 at a time, nothing else done."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(path, flags)
    except OSError:  # tmpfs
        fd = os.open(path, os.O_RDONLY)
    pool, rng = ThreadPoolExecutor(32), np.random.default_rng(2)
    rooms = [mmap.mmap(-1, CLIP + 4096) for _ in range(BATCH)]

    def read(at: tuple[int, int]) -> None:
        os.preadv(fd, [rooms[at[0]]], at[1] * FRAME & ~4095)

    def gather() -> None:
        list(pool.map(read, enumerate(rng.integers(steps - HISTORY - 2, size=BATCH).tolist())))

    return gather


def _endless(passes: Callable[[int], Any]) -> Callable[[], object]:
    def all_of_them() -> Iterator[object]:
        while True:
            yield from passes(0)

    batches = all_of_them()
    return lambda: next(batches)


def _waiting(batch: Callable[[], object], folder: Path, seconds: float) -> float:
    """Return the share of a loop's time in which its model waits for the next batch."""
    drop_cache(folder)
    waited, began, first = 0.0, perf_counter(), True
    while first or perf_counter() - began < seconds:
        start = perf_counter()
        batch()
        waited += perf_counter() - start
        sleep(MODEL_S)
        first = False
    return waited / (perf_counter() - began)


def _read_bytes() -> int:
    """Return what this process has read from the disk itself."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    return int(next(line for line in text.splitlines() if line.startswith("read_bytes")).split()[1])


_PARTS = {"rivals": _beside_rivals, "lance": _lance, "loops": _in_loops}

if __name__ == "__main__":
    where, steps, length, seconds, limit, part = sys.argv[1:]
    print(json.dumps(_here(Path(where), int(steps), int(length), float(seconds), int(limit), part)))
