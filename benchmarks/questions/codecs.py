"""Compressed columns: what each codec saves, and what it costs to write and to read clips, warm and cold."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import fill, pixels
from benchmarks.harness.limit import drop_cache
from benchmarks.harness.place import Place
from benchmarks.harness.plots import rates
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn, seconds
from ringmap import ReplayBuffer, Zarr

Array = np.ndarray[Any, np.dtype[Any]]

HISTORY, FRAME = 4, 64 * 64 * 3

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


def run(place: Place) -> list[Table]:
    """Time each codec on frames of two simulations, and on noise."""
    length = place.size(200, 20)
    tables, panels = [], dict[str, dict[str, float]]()
    for name, frames in _sources(place, length).items():
        if isinstance(frames, str):
            tables.append(Table(f"codecs: {name}", notes=[frames]))
            continue
        table = _one(place, name, frames, panels)
        tables.append(table)
    rates(place.out / "codecs.png", tables[0], panels, "clips a second, warm; compression in brackets")
    return tables


def _one(place: Place, name: str, frames: Array, panels: dict[str, dict[str, float]]) -> Table:
    episodes, length, batch = place.size(100, 4), frames.shape[1], place.size(256, 8)
    steps = episodes * length
    table = Table(f"codecs, {name}: {steps:,} frames of 64x64x3; clips of {HISTORY}, batches of {batch}")
    with place.folder() as folder, contextlib.ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {}
        found: dict[str, dict[str, float]] = {}
        for way, storage in WAYS.items():
            home = folder / str(len(found))
            buffer = ReplayBuffer(steps, HISTORY, path=home, seed=0, storage={"pixels": storage}, threads=1)
            stack.callback(buffer.close)
            taken = seconds(partial(fill, buffer, pixels(frames), episodes))
            found[way] = {
                "ratio": steps * FRAME / _size(home),
                "write": steps * FRAME / taken / 1e6,
            }
            _assert_holds(buffer.sample(batch), frames)
            calls[way] = partial(buffer.sample, batch)
            if way != "memmap":
                calls[f"{way}: its decoder"] = _decoder(buffer, steps, batch)
                calls[f"{way}: its decoder, from the files"] = _decoder(buffer, steps, batch, True)
            if way in BESIDE:
                calls[f"{way}: zarr-python"] = _theirs(home, steps, batch)
            buffer.flush()
            cold = []
            for _ in range(place.size(3, 1)):
                drop_cache(home)
                cold.append(seconds(partial(buffer.sample, batch)))
            found[way]["cold"] = batch / float(np.median(cold))
            for _ in range(place.size(20, 1)):  # readahead has stopped after these draws
                buffer.sample(batch)
        times = in_turn(calls, place.size(7, 1), burst=place.size(2, 1))
        table.add_all(times)
        panels[name] = {}
        for way, one in found.items():
            warm = batch / table.times[way]["median"]
            table.fact(
                way,
                f"{one['ratio']:.1f} times smaller; write {one['write']:,.0f} MB/s; clips/s on one thread "
                f"{warm:,.0f} warm, {one['cold']:,.0f} cold",
            )
            panels[name][f"{way} ({one['ratio']:.1f})".replace("zarr", "ringmap zarr")] = warm
            if way in BESIDE:
                table.faster(way, f"{way}: zarr-python", at_least=10 if way == "zarr" else None)
            if way != "memmap":
                share = table.times[f"{way}: its decoder"]["median"] / table.times[way]["median"]
                bar = 0.7 if way == "zarr" else None
                table.bar(f"{way}: share of the decoder's own speed", share, at_least=bar)
    table.notes.append(
        "its decoder: the same chunks, decoded one after the other from memory into the same place; from the files: "
        "each file is opened and read first; a share depends on how long the decoder takes for a chunk; "
        "zarr-python: Array.oindex on the same column"
    )
    return table


def _sources(place: Place, length: int) -> dict[str, Array | str]:
    """Return frames `(episodes, steps, 64, 64, 3)` by source, or why there are none."""
    count = place.size(10, 2)
    noise = np.random.default_rng(0).integers(0, 256, (count, length, 64, 64, 3), np.uint8)
    found: dict[str, Array | str] = {}
    if place.tiny:
        return {"noise": noise}
    for name, env, needs, options in (
        ("CartPole", "CartPole-v1", "pygame", {}),
        ("HalfCheetah (MuJoCo)", "HalfCheetah-v5", "mujoco", {"width": 64, "height": 64}),
    ):
        if importlib.util.find_spec(needs) is None:
            found[name] = f"left out: {needs} is not installed"
            continue
        os.environ.setdefault("MUJOCO_GL", "egl")
        try:
            found[name] = _rendered(env, options, count, length)
        except Exception as error:  # no display, no driver
            found[name] = f"left out: {error}"
    return {**found, "noise": noise}


def _rendered(env_id: str, options: dict[str, int], count: int, length: int) -> Array:
    import gymnasium
    from PIL import Image

    env = gymnasium.make(env_id, render_mode="rgb_array", **options)
    env.action_space.seed(0)
    frames = np.empty((count, length, 64, 64, 3), np.uint8)
    for number in range(count):
        env.reset(seed=number)
        for step in range(length):
            picture = Image.fromarray(env.render())
            frames[number, step] = np.asarray(picture.resize((64, 64), Image.Resampling.BILINEAR))
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
    env.close()
    return frames


def _size(home: Path) -> int:
    """Return the bytes on disk of the pixels' column: whole blocks, as the disk gives them."""
    (column,) = (home / "columns").glob("*-pixels.*")
    files = column.rglob("*") if column.is_dir() else [column]
    return sum(path.stat().st_blocks * 512 for path in files)


def _assert_holds(batch: dict[str, Array], frames: Array) -> None:
    for clip, number, step in zip(batch["pixels"], batch["action"][:, 0, 0], batch["reward"][:, 0], strict=True):
        expected = frames[int(number) % len(frames), int(step) : int(step) + HISTORY]
        assert (clip == expected).all()


def _theirs(home: Path, steps: int, batch: int) -> Callable[[], object]:
    """Return zarr-python's own indexing."""
    import zarr

    (column,) = (home / "columns").glob("*-pixels.zarr")
    array, rng = zarr.open_array(column, mode="r"), np.random.default_rng(1)

    def gather() -> object:
        starts = rng.integers(steps - HISTORY, size=batch)
        return array.oindex[(starts[:, None] + np.arange(HISTORY)).reshape(-1)]

    return gather


def _decoder(buffer: ReplayBuffer, steps: int, batch: int, read: bool = False) -> Callable[[], object]:
    """Return what decodes the chunks of a batch, and does nothing else; `read`: after reading their files."""
    rows = buffer.engine.owned.rows
    assert rows is not None
    column: Any = rows.by_name["pixels"]
    rng = np.random.default_rng(1)
    starts = rng.integers(steps - HISTORY, size=batch)
    chunks = np.unique((starts[:, None] + np.arange(HISTORY)) // column._steps).tolist()
    encoded = [column._read(chunk) for chunk in chunks]
    into = np.empty((column._steps, column._row), np.uint8)

    def decode() -> None:
        for chunk, data in zip(chunks, encoded, strict=True):
            column._codec.decode(column._read(chunk) if read else data, into)

    return decode
