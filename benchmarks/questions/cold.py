"""A ring eight times as large as memory may be: random clips, at the disk's own speed or not.

Every rival at a setting from its documentation or from a few tries, in a process of its own
with as much memory as ours; ours has a turn beside each.

python -m benchmarks.questions.cold FOLDER STEPS LENGTH SECONDS LIMIT PARTY     what `run` starts, with a limit
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from benchmarks.harness.limit import drop_cache, limit_memory, peak_memory
from benchmarks.harness.place import Place
from benchmarks.harness.plots import rates, shares
from benchmarks.harness.stored import Stored
from benchmarks.harness.table import Table
from benchmarks.harness.turns import DiedError, Party, Way, here, serve, spawned
from benchmarks.peers import engineer, files, rivals
from benchmarks.peers.rivals import Field, Rival
from ringmap import ReplayBuffer
from ringmap.clips.cut import Cut

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, HISTORY, THREADS = 256, 4, 32
CUT = Cut.clip(HISTORY)
FRAME = 64 * 64 * 3
CLIP = HISTORY * FRAME
MODEL_S = 0.02
ROUNDS = 3
BUNCH = 8
"""Batches timed together where workers or threads read ahead: they arrive in bunches."""

OURS = "ringmap, batches()"
DISK = f"O_DIRECT, {THREADS} threads: the disk's own parallel random reads"
HINTED = "NumPy, an hour's work: WILLNEED a batch ahead"
THREADED = f"NumPy, an hour's work: {THREADS} threads"
FANCY = "NumPy, one fancy index"
_IN_LIMIT = (rivals.torchrl_in_files, rivals.sheeprl_sequences)
"""They can't open what another process filled."""
_BEFORE = (
    files.hdf5,
    files.lance_rows,
    files.tensorstore_zarr,
    files.array_record_grain,
    files.hugging_face,
    files.webdataset_tar,
    files.litdata_stream,
)
MAKERS = {maker.__name__: maker for maker in (*_IN_LIMIT, *_BEFORE)}
QUICK = ["hdf5"]


def run(place: Place) -> list[Table]:
    """Time reading beside each rival, and waiting."""
    steps, length = place.size(400_000, 400, 200_000), place.size(200, 20)
    limit = steps * FRAME // 8
    seconds = place.size(4, 0, 2)
    table = Table(
        f"cold: clips of {HISTORY} steps of 64x64x3 pixels, batches of {BATCH}, {steps * FRAME / 1e9:.1f} GB on disk, "
        f"memory limited to {limit / 1e6:.0f} MB for each party",
        heads=["fastest first", "MB/s", "bytes read for a useful one", "setting"],
    )
    with place.folder() as folder:
        field = steps, length, seconds, 0 if place.tiny else limit
        found = _in_turn(place, folder, *field, table)
        run_part = _here if place.tiny else _in_a_process
        told = None if place.quick else run_part(folder, *field, "loops")
    ranked = sorted(found.items(), key=lambda one: float(np.median(one[1]["seconds"])))
    for name, one in ranked:
        table.add(name, one["seconds"])
        rate = BATCH * CLIP / table.times[name]["median"] / 1e6
        read = one["read"] / (one["calls"] * BATCH * CLIP)
        table.row(name, f"{rate:,.0f}", f"{read:.1f}", one["setting"])
    for name, one in ranked:
        if not name.startswith("ringmap"):
            bar = {DISK: 0.8, FANCY: 50}.get(name)
            table.bar(f"{OURS}: times as fast as {name}, median", 1 / _ratio(one), at_least=bar)
    table.notes += [
        "ours has a turn beside each rival: the ratio is that of the medians of these turns; bytes that were already "
        "in memory are not read",
        "MB/s of pixels that a batch has; a stream reads in the file's order and can't draw any clip: its clips do not "
        "overlap",
    ]
    rates_of = {n: BATCH * CLIP / row["median"] / 1e6 for n, row in table.times.items()}
    rates(place.out / "cold-rates.png", table, {table.title: rates_of}, "MB/s")
    return [table, *(_loops(place, told) if told else [])]


def _ratio(one: dict[str, Any]) -> float:
    """Return how many times as fast it is as ours was in the turns beside it."""
    return float(np.median(one["beside"]) / np.median(one["seconds"]))


def _in_turn(
    place: Place, folder: Path, steps: int, length: int, seconds: float, limit: int, table: Table
) -> dict[str, dict[str, Any]]:
    """Return what was found of each way: ours, then each rival beside ours, whose files are then removed."""
    found: dict[str, dict[str, Any]] = {}
    makers = {name: MAKERS[name] for name in QUICK} if place.quick else MAKERS

    @contextlib.contextmanager
    def party(name: str) -> Iterator[Party]:
        field = folder, steps, length, seconds, limit
        if place.tiny:
            with _opened(*field[:3], limit, name) as (ways, notes):
                yield here(ways, folder, notes)
        else:
            if name == "ours" or (name in makers and makers[name] in _BEFORE):
                _in_a_process(*field[:4], 0, f"fill {name}")
            with spawned(sys.executable, "-m", "benchmarks.questions.cold", *field, name) as there:
                yield there

    with party("ours") as ours:
        for name in ("numpy", *makers):
            try:
                with party(name) as theirs:
                    beside = _beside(place, ours, theirs, name == "numpy", seconds, found, table)
            except DiedError as error:
                table.fact(f"left out, {error}", "its processes need more memory than there may be")
                beside = []
            for one in found.values():
                one.setdefault("beside", beside)
            shutil.rmtree(folder / "theirs", ignore_errors=True)
    return found


def _beside(
    place: Place,
    ours: Party,
    theirs: Party,
    is_first: bool,
    seconds: float,
    found: dict[str, dict[str, Any]],
    table: Table,
) -> list[float]:
    """Add what turns of both take, and return those of ours."""
    for what, why in theirs.notes.items():
        table.fact(what, why)
    both = [(ours, way) for way in (ours.settings if is_first and not place.quick else [OURS])]
    both += [(theirs, way) for way in theirs.settings]
    beside: list[float] = []
    for _ in range(place.size(ROUNDS, 1, 2) if theirs.settings else 0):
        for who, way in both:
            empty = {"seconds": [], "read": 0, "calls": 0, "setting": who.settings[way]}
            one, turn = found.setdefault(way, empty), who.turn(way, seconds)
            for key in ("seconds", "read", "calls"):
                one[key] += turn[key]
            if way == OURS:
                beside += turn["seconds"]
    return beside


# -- what runs in a process with a limit ---------------------------------------------------------


@contextlib.contextmanager
def _opened(
    folder: Path, steps: int, length: int, limit: int, name: str
) -> Iterator[tuple[dict[str, Way], dict[str, str]]]:
    """Give the ways of a party, each proved by a batch, and what is missing."""
    notes = {}
    # Before anything is written: what a process has mapped from before stays in memory whatever is asked.
    if limit and not limit_memory(limit):
        notes["not limited"] = "memory could not be limited (it takes root): most of it was warm"
    stored = Stored.of_pixels(steps // length, length)
    (folder / "theirs").mkdir(exist_ok=True)
    field = Field(stored, folder / "theirs", BATCH, HISTORY, THREADS)
    with contextlib.ExitStack() as stack:
        if name == "ours":
            yield _ours(folder, stored, stack), notes
        elif name == "numpy":
            yield _numpy(folder, stored), notes
        else:
            try:
                rival = MAKERS[name](field)
            except ImportError as error:
                yield {}, {**notes, **dict([rivals.missing(MAKERS[name], error)])}
                return
            yield {rival.name: _way(rival, field)}, notes


def _ours(folder: Path, stored: Stored, stack: contextlib.ExitStack) -> dict[str, Way]:
    _write_ours(folder, stored)
    buffer: Any = stack.enter_context(ReplayBuffer.open(folder / "ours", seed=0))
    plain = stack.enter_context(ReplayBuffer.open(folder / "ours", seed=0, reads="pread"))
    batches = stack.enter_context(buffer.batches(BATCH))
    loaded = stack.enter_context(contextlib.closing(_loaded(buffer)))
    stored.assert_holds(next(batches), BATCH, HISTORY)
    stored.assert_holds(plain.sample(BATCH), BATCH, HISTORY)
    return {
        OURS: Way(lambda: next(batches), "nothing to set: one batch ahead", BUNCH),
        "ringmap, sample()": Way(lambda: buffer.sample(BATCH), "nothing ahead"),
        'ringmap, sample(), reads="pread"': Way(lambda: plain.sample(BATCH), "no maps"),
        "ringmap, DataLoader": Way(lambda: next(loaded), "2 workers", BUNCH),
    }


def _write_ours(folder: Path, stored: Stored) -> None:
    if not (folder / "ours").exists():
        with ReplayBuffer(stored.num_steps, HISTORY, path=folder / "ours", seed=0) as buffer:
            for episode in stored:
                buffer.write_episode(episode)


def _numpy(folder: Path, stored: Stored) -> dict[str, Way]:
    (pixels,) = (folder / "ours" / "columns").glob("*-pixels.npy")
    paths = [path for path in pixels.parent.glob("*.npy") if path != pixels]
    small = {path.stem.partition("-")[2]: np.load(path) for path in paths}
    rng = np.random.default_rng(1)

    def draw() -> Array:
        episodes = rng.integers(stored.num_episodes, size=BATCH) * stored.length
        starts = episodes + rng.integers(stored.length - HISTORY + 1, size=BATCH)
        rows: Array = starts[:, None] + np.arange(HISTORY)
        return rows

    ways = {
        HINTED: (engineer.hinted, "MADV_RANDOM, posix_fadvise for each clip, one thread"),
        THREADED: (engineer.threaded, "MADV_RANDOM"),
        FANCY: (engineer.fancy, "none: what most code does"),
    }
    found = {}
    for name, (reading, setting) in ways.items():
        batches = reading(pixels, small, draw)
        stored.assert_holds(next(batches), BATCH, HISTORY)
        found[name] = Way(lambda batches=batches: next(batches), setting)  # type: ignore[misc]
    found[DISK] = Way(_direct(pixels, stored.num_steps), "nothing else done: no copy, no clip")
    return found


def _way(rival: Rival, field: Field) -> Way:
    """Return the way of a rival, its first batch proved."""
    tiny = field.stored.num_steps < 10_000
    if rival.batches is None:
        assert rival.sample is not None
        sample: Callable[[], Any] = rival.sample
        group = 1
    else:
        sample, group = _endless(rival.batches, 0 if tiny else rival.workers), BUNCH
    batch = rival.clips(sample())
    size = len(batch["reward"].reshape(-1)) // HISTORY
    field.stored.assert_holds(batch, size, HISTORY, rival.whole, rival.lacks)
    assert tiny or size == BATCH
    return Way(sample, rival.setting, 1 if tiny else group)


def _here(folder: Path, steps: int, length: int, seconds: float, limit: int, part: str) -> dict[str, Any]:
    """Do the one part that is no party's: fill, or the loops."""
    if part == "loops":
        return _in_loops(folder, steps, length, seconds, limit)
    name, stored = part.removeprefix("fill "), Stored.of_pixels(steps // length, length)
    if name == "ours":
        _write_ours(folder, stored)
    else:
        (folder / "theirs").mkdir(exist_ok=True)
        with contextlib.suppress(ImportError):
            MAKERS[name](Field(stored, folder / "theirs", BATCH, HISTORY, THREADS))
    drop_cache(folder)
    return {}


def _in_a_process(folder: Path, *arguments: object) -> dict[str, Any]:
    """Run a part in a process of its own, whose memory can be limited."""
    command = [sys.executable, "-m", "benchmarks.questions.cold", str(folder), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- loops ---------------------------------------------------------------------------------------


def _loops(place: Place, found: dict[str, Any]) -> list[Table]:
    """Return the tables of what a loop waits for."""
    waiting = Table(f"the same ring, in a loop whose model takes {MODEL_S * 1e3:.0f} ms")
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
    return [waiting, *stages]


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
    for _, episode in zip(range(part // length), Stored.of_pixels(steps // length, length), strict=False):
        packed.write_episode(episode)
    packed.flush()
    stages |= {f"{way}, Zarr": parts for way, parts in _stages(packed, folder, seconds).items()}
    packed.close()
    return {"waiting": waiting, "stages": stages, "peak": peak_memory()}


def _loaded(buffer: ReplayBuffer) -> Generator[object]:
    from torch.utils.data import DataLoader

    while True:
        yield from DataLoader(buffer, BATCH, shuffle=True, num_workers=2)


def _stages(buffer: ReplayBuffer, folder: Path, seconds: float) -> dict[str, dict[str, list[float]]]:
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
            clips = reader.draw(BATCH, CUT, rng)
            assert clips is not None
            positions, drawn = clips.positions, perf_counter()
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


def _endless(passes: Callable[[int], Iterable[Any]], workers: int) -> Callable[[], Any]:
    def all_of_them() -> Iterator[Any]:
        while True:
            yield from passes(workers)

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


if __name__ == "__main__":
    where, party = Path(sys.argv[1]), sys.argv[6]
    steps, length, seconds, limit = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    if party == "loops" or party.startswith("fill "):
        print(json.dumps(_here(where, steps, length, seconds, limit, party)))
    else:
        with _opened(where, steps, length, limit, party) as (ways, notes):
            serve(ways, where, notes)
