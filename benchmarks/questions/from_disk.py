"""How fast is a batch from disk? A ring eight times as large as memory may be, and compressed columns.

Every rival at a setting from its documentation or from a few tries, in a process of its own
with as much memory as ours; ours has a turn beside each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from benchmarks.harness.data import Stored, columns_of, fill, pixels
from benchmarks.harness.place import Place
from benchmarks.harness.processes import DiedError, Remote, cold_turn, drop_cache, once, peak_memory, process
from benchmarks.harness.table import Table
from benchmarks.harness.timing import seconds
from benchmarks.peers import buffers, files, plain
from benchmarks.peers.base import Peer, Spec, made, prove
from ringmap import ReplayBuffer, Zarr

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, HISTORY, THREADS = 256, 4, 32
FRAME = 64 * 64 * 3
CLIP = HISTORY * FRAME
MODEL_S = 0.02
BUNCH = 8
"""Batches timed together where workers or threads read ahead: they arrive in bunches."""

OURS = "ringmap, batches()"
DISK = f"O_DIRECT, {THREADS} threads: the disk's own parallel random reads"
HINTED = "NumPy, an hour's work: WILLNEED a batch ahead"
THREADED = f"NumPy, an hour's work: {THREADS} threads"
FANCY = "NumPy, one fancy index"
IN_LIMIT: list[type[Peer]] = [buffers.TorchRLSlices, buffers.SheeprlSequences]
"""They can't open what another process filled."""
BEFORE: list[type[Peer]] = [files.Hdf5, files.Lance, files.Tensorstore, files.ArrayRecord, files.HuggingFace]
BEFORE += [files.WebDataset, files.LitData]

Way = tuple[Callable[[], object], str, int]
"""One way to get a batch, its setting, and how many batches are timed together."""


# -- beside others -------------------------------------------------------------------------------


def cold(place: Place) -> Iterator[Table]:
    """Time random clips beside each rival; then what a loop waits for."""
    steps, length = place.size(400_000, 400, 200_000), place.size(200, 20)
    limit = steps * FRAME // 8
    table = Table(
        f"cold: clips of {HISTORY} steps of 64x64x3 pixels, batches of {BATCH}, {steps * FRAME / 1e9:.1f} GB on disk, "
        f"memory limited to {limit / 1e6:.0f} MB for each party",
        heads=["fastest first", "MB/s", "bytes read for a useful one", "setting"],
    )
    field = place.new_folder(), steps, length
    found = _in_turn(place, *field, limit, table)
    ranked = sorted(found.items(), key=lambda one: float(np.median(one[1]["seconds"])))
    for name, one in ranked:
        table.add(name, one["seconds"])
        rate, read = BATCH * CLIP / table.median(name) / 1e6, one["read"] / (one["calls"] * BATCH * CLIP)
        table.row(name, f"{rate:,.0f}", f"{read:.1f}", one["setting"])
    for name, one in ranked:
        if not name.startswith("ringmap"):
            ratio = float(np.median(one["seconds"]) / np.median(one["beside"]))
            bar = {DISK: 0.8, FANCY: 50}.get(name)
            table.bar(f"{OURS}: times as fast as {name}, median", ratio, at_least=bar, ours=OURS, other=name)
    table.notes += [
        "ours has a turn beside each rival: the ratio is that of the medians of these turns; bytes that were already "
        "in memory are not read",
        "MB/s of pixels that a batch has; a stream reads in the file's order and can't draw any clip: its clips do not "
        "overlap",
    ]
    yield table
    if not place.quick:
        seconds = place.size(4, 0)
        yield once(_loops, field[0], seconds, method=place.method, limit=limit * (not place.tiny))


class Party:
    """Ways of one party, each proved by a batch, in the process that is limited."""

    def __init__(self, folder: Path, steps: int, length: int, kind: type[Peer] | str) -> None:
        self.folder, self.stack = folder, contextlib.ExitStack()
        self.table = Table("what is missing")
        stored = Stored.of_pixels(steps // length, length)
        if isinstance(kind, str):
            self.ways = self._ours(stored) if kind == "ours" else _numpy(folder, stored)
        else:
            spec = Spec.of(stored, folder / "theirs", BATCH, HISTORY, THREADS)
            self.ways = {p.name: _way(p, stored) for p in made([kind], spec, self.table)}

    @property
    def settings(self) -> dict[str, str]:
        """Way -> its setting."""
        return {name: setting for name, (_, setting, _) in self.ways.items()}

    @property
    def missing(self) -> dict[str, str]:
        """What is not installed."""
        return self.table.facts

    def turn(self, name: str, seconds: float) -> dict[str, Any]:
        """Draw batches for so long, cold."""
        call, _, group = self.ways[name]
        return cold_turn(call, group, self.folder, seconds)

    def _ours(self, stored: Stored) -> dict[str, Way]:
        buffer: Any = self.stack.enter_context(ReplayBuffer.open(self.folder / "ours", seed=0))
        plain = self.stack.enter_context(ReplayBuffer.open(self.folder / "ours", seed=0, reads="pread"))
        batches = self.stack.enter_context(buffer.batches(BATCH))
        loaded = self.stack.enter_context(contextlib.closing(_loaded(buffer)))
        for batch in (next(batches), plain.sample(BATCH)):
            stored.assert_holds(batch, BATCH, HISTORY)
        return {
            OURS: (lambda: next(batches), "nothing to set: one batch ahead", BUNCH),
            "ringmap, sample()": (lambda: buffer.sample(BATCH), "nothing ahead", 1),
            'ringmap, sample(), reads="pread"': (lambda: plain.sample(BATCH), "no maps", 1),
            "ringmap, DataLoader": (lambda: next(loaded), "2 workers", BUNCH),
        }

    def close(self) -> None:
        """Let go of all."""
        self.stack.close()


def _loaded(buffer: ReplayBuffer) -> Generator[object]:
    from torch.utils.data import DataLoader

    while True:
        yield from DataLoader(buffer, BATCH, shuffle=True, num_workers=2)


def _numpy(folder: Path, stored: Stored) -> dict[str, Way]:
    [path] = (folder / "ours" / "columns").glob("*-pixels.npy")
    small = {name: np.array(rows) for name, rows in columns_of(folder / "ours").items() if name != "pixels"}
    rng = np.random.default_rng(1)

    def draw() -> Array:
        rows: Array = stored.starts(BATCH, HISTORY, rng)[:, None] + np.arange(HISTORY)
        return rows

    ways: dict[str, Way] = {}
    for name, reading, setting in (
        (HINTED, plain.hinted, "MADV_RANDOM, posix_fadvise for each clip, one thread"),
        (THREADED, plain.threaded, "MADV_RANDOM"),
        (FANCY, plain.fancy, "none: what most code does"),
    ):
        batches = reading(path, small, draw)
        stored.assert_holds(next(batches), BATCH, HISTORY)
        ways[name] = (lambda batches=batches: next(batches)), setting, 1
    return {**ways, DISK: (plain.direct(path, FRAME, draw, THREADS), "nothing else done: no copy, no clip", 1)}


def _way(peer: Peer, stored: Stored) -> Way:
    """Return the way of a peer that is full and proved."""
    peer.fill(stored)
    prove(peer, stored)
    if peer.batches is None:
        return (lambda: peer.sample(BATCH)), peer.setting, 1
    passes: Callable[[int], Iterable[Any]] = peer.batches
    is_tiny = stored.num_steps < 10_000
    workers = 0 if is_tiny else peer.workers

    def all_of_them() -> Iterator[Any]:
        while True:
            yield from passes(workers)

    batches = all_of_them()
    return (lambda: next(batches)), peer.setting, 1 if is_tiny else BUNCH


def _filled(folder: Path, steps: int, length: int, kind: type[Peer] | str) -> None:
    """Write the files of ours, or of a peer: where memory is not limited, since some encoders take a gigabyte."""
    stored = Stored.of_pixels(steps // length, length)
    if isinstance(kind, str):
        stored.ring(folder / "ours", HISTORY).close()
    else:
        spec = Spec.of(stored, folder / "theirs", BATCH, HISTORY, THREADS)
        for peer in made([kind], spec, Table("")):
            peer.fill(stored)
    drop_cache(folder)


def _in_turn(
    place: Place, folder: Path, steps: int, length: int, limit: int, table: Table
) -> dict[str, dict[str, Any]]:
    """Return what was found of each way: ours, then each rival beside ours, whose files are then removed."""
    found: dict[str, dict[str, Any]] = {}
    kinds = [files.Hdf5] if place.quick else [*IN_LIMIT, *BEFORE]

    def party(kind: type[Peer] | str) -> contextlib.AbstractContextManager[Remote]:
        (folder / "theirs").mkdir(exist_ok=True)
        arguments = folder, steps, length, kind
        if kind == "ours" or kind in BEFORE:
            once(_filled, *arguments, method=place.method)
        return process(Party, *arguments, method=place.method, limit=limit * (not place.tiny))

    with party("ours") as ours:
        if not ours("limited"):
            table.fact("not limited", "memory could not be limited (it takes root): most of it was warm")
        for kind in ("numpy", *kinds):
            try:
                with party(kind) as theirs:
                    beside = _beside(place, ours, theirs, kind == "numpy", found, table)
            except DiedError:
                name = kind if isinstance(kind, str) else kind.called + kind.way
                table.fact(f"left out, {name}", "its processes need more memory than there may be")
                beside = []
            for one in found.values():
                one.setdefault("beside", beside)
            shutil.rmtree(folder / "theirs")
    return found


def _beside(
    place: Place, ours: Remote, theirs: Remote, is_first: bool, found: dict[str, dict[str, Any]], table: Table
) -> list[float]:
    """Add what turns of both take, and return those of ours."""
    for what, why in theirs("missing").items():
        table.fact(what, why)
    settings = theirs("settings")
    both = [(ours, way) for way in (ours("settings") if is_first and not place.quick else [OURS])]
    both += [(theirs, way) for way in settings]
    beside: list[float] = []
    for _ in range(place.size(3, 1, 2) if settings else 0):
        for who, way in both:
            empty = {"seconds": [], "read": 0, "calls": 0, "setting": {**ours("settings"), **settings}[way]}
            one, turn = found.setdefault(way, empty), who("turn", way, place.size(4.0, 0.0, 2.0))
            for key in ("seconds", "read", "calls"):
                one[key] += turn[key]
            if way == OURS:
                beside += turn["seconds"]
    return beside


# -- loops ---------------------------------------------------------------------------------------


def _loops(folder: Path, span: float) -> Table:
    """Return what a loop waits for, in a process that is limited."""
    buffer = ReplayBuffer.open(folder / "ours", seed=0)
    table = Table(f"the same ring, in a loop whose model takes {MODEL_S * 1e3:.0f} ms")
    with buffer.batches(BATCH) as batches, contextlib.closing(_loaded(buffer)) as loaded:
        next(loaded)  # the workers are there
        for name, call in (
            ("sample()", lambda: buffer.sample(BATCH)),
            ("batches()", lambda: next(batches)),
            ("DataLoader, 2 workers", lambda: next(loaded)),
        ):
            table.fact(f"share of the time waiting, {name}", f"{_waiting(call, folder, span):.1%}")
    buffer.close()
    table.fact("peak memory, maps included", f"{peak_memory() / 1e6:,.0f} MB")
    return table


def _waiting(batch: Callable[[], object], folder: Path, span: float) -> float:
    """Return the share of a loop's time in which its model waits for the next batch."""
    drop_cache(folder)
    waited, began, first = 0.0, perf_counter(), True
    while first or perf_counter() - began < span:
        waited += seconds(batch)
        sleep(MODEL_S)
        first = False
    return waited / (perf_counter() - began)


# -- compressed columns --------------------------------------------------------------------------

WAYS: dict[str, str | Zarr] = {
    "memmap": "memmap",
    "zarr": "zarr",
    "zarr, 4 steps": Zarr(chunk_steps=4),
    "zarr, 32 steps": Zarr(chunk_steps=32),
    "zarr, lz4": Zarr("lz4"),
    "zarr, none": Zarr("none"),
}
BESIDE = ("zarr", "zarr, lz4", "zarr, none")
"""Ways that zarr-python's own indexing is timed beside: it takes a quarter of a second a batch."""


def codecs(place: Place) -> Iterator[Table]:
    """Time what each codec saves, and what it costs to write and to read clips, warm and cold: frames of two
    simulations, and noise."""
    count, length = place.size(10, 2), place.size(200, 20)
    for name, env, needs, options in (
        ()
        if place.tiny
        else (
            ("CartPole", "CartPole-v1", "pygame", {}),
            ("HalfCheetah (MuJoCo)", "HalfCheetah-v5", "mujoco", {"width": 64, "height": 64}),
        )
    ):
        try:
            if importlib.util.find_spec(needs) is None:
                raise ImportError(f"{needs} is not installed")
            frames = _rendered(env, options, count, length)
        except Exception as error:  # no display, no driver
            yield Table(f"codecs: {name}", notes=[f"left out: {error}"])
        else:
            yield _codecs(place, name, frames)
    yield _codecs(place, "noise", np.random.default_rng(0).integers(0, 256, (count, length, 64, 64, 3), np.uint8))


def _codecs(place: Place, name: str, frames: Array) -> Table:
    episodes, length, batch = place.size(100, 4), frames.shape[1], place.size(256, 8)
    steps = episodes * length
    table = Table(f"codecs, {name}: {steps:,} frames of 64x64x3; clips of {HISTORY}, batches of {batch}")
    calls, told = dict[str, Callable[[], object]](), dict[str, tuple[float, float, float]]()
    with place.folder() as folder, contextlib.ExitStack() as stack:
        for number, (way, storage) in enumerate(WAYS.items()):
            home = folder / str(number)
            buffer = ReplayBuffer(steps, HISTORY, path=home, seed=0, storage={"pixels": storage}, threads=1)
            stack.callback(buffer.close)
            written = seconds(partial(fill, buffer, pixels(frames), episodes))
            drawn = buffer.sample(batch)
            for clip, n, step in zip(drawn["pixels"], drawn["action"][:, 0, 0], drawn["reward"][:, 0], strict=True):
                assert (clip == frames[int(n) % len(frames), int(step) : int(step) + HISTORY]).all()
            calls[way] = partial(buffer.sample, batch)
            if way != "memmap":
                calls[f"{way}: its decoder"] = _decoder(buffer, steps, batch)
            if way in BESIDE:
                calls[f"{way}: zarr-python"] = _zarr_python(home, steps, batch)
            buffer.flush()
            cold = []
            for _ in range(place.size(3, 1)):
                drop_cache(home)
                cold.append(seconds(calls[way]))
            told[way] = steps * FRAME / _size(home), steps * FRAME / written / 1e6, batch / float(np.median(cold))
            for _ in range(place.size(20, 1)):  # readahead has stopped after these draws
                buffer.sample(batch)
        table.time(calls, place.size(7, 1), place.size(2, 1))
    for way, (smaller, written, cold_rate) in told.items():
        table.fact(
            way,
            f"{smaller:.1f} times smaller; write {written:,.0f} MB/s; clips/s on one thread "
            f"{batch / table.median(way):,.0f} warm, {cold_rate:,.0f} cold",
        )
        if way in BESIDE:
            table.faster(way, f"{way}: zarr-python", at_least=10 if way == "zarr" else None)
        if way != "memmap":
            share = table.median(f"{way}: its decoder") / table.median(way)
            table.bar(f"{way}: share of the decoder's own speed", share, at_least=0.7 if way == "zarr" else None)
    table.notes.append(
        "its decoder: the same chunks, decoded one after the other from memory into the same place; "
        "a share depends on how long the decoder takes for a chunk; "
        "zarr-python: Array.oindex on the same column"
    )
    return table


def _rendered(env_id: str, options: dict[str, int], count: int, length: int) -> Array:
    import gymnasium
    from PIL import Image

    os.environ.setdefault("MUJOCO_GL", "egl")
    env = gymnasium.make(env_id, render_mode="rgb_array", **options)
    env.action_space.seed(0)
    frames = np.empty((count, length, 64, 64, 3), np.uint8)
    for number in range(count):
        env.reset(seed=number)
        for step in range(length):
            frames[number, step] = Image.fromarray(env.render()).resize((64, 64), Image.Resampling.BILINEAR)
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
    env.close()
    return frames


def _size(home: Path) -> int:
    """Return the bytes on disk of the pixels' column: whole blocks, as the disk gives them."""
    [column] = (home / "columns").glob("*-pixels.*")
    return sum(path.stat().st_blocks * 512 for path in (column.rglob("*") if column.is_dir() else [column]))


def _starts(steps: int, batch: int, rng: np.random.Generator) -> Array:
    return rng.integers(steps - HISTORY, size=batch)[:, None] + np.arange(HISTORY)


def _zarr_python(home: Path, steps: int, batch: int) -> Callable[[], object]:
    """Return zarr-python's own indexing."""
    import zarr

    [column] = (home / "columns").glob("*-pixels.zarr")
    array, rng = zarr.open_array(column, mode="r"), np.random.default_rng(1)
    return lambda: array.oindex[_starts(steps, batch, rng).reshape(-1)]


def _decoder(buffer: ReplayBuffer, steps: int, batch: int) -> Callable[[], object]:
    """Return what decodes the chunks of a batch, and does nothing else."""
    rows = buffer.engine.owned.rows
    assert rows is not None
    column: Any = rows.by_name["pixels"]
    chunks = np.unique(_starts(steps, batch, np.random.default_rng(1)) // column._steps).tolist()
    encoded = [column._read(chunk) for chunk in chunks]
    into = np.empty((column._steps, column._row), np.uint8)

    def decode() -> None:
        for data in encoded:
            column._codec.decode(data, into)

    return decode
