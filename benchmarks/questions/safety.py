"""What each protection costs: the same ring, with one of them taken out. Only here: no option of the library does it.

write_episode    syncs of each commit | the default | no background syncs | no checksums | a bare copy into RAM
sample           two looks | one
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import xxhash

from benchmarks.harness.data import fill, noise, pixels, states
from benchmarks.harness.place import Place
from benchmarks.harness.plots import rates
from benchmarks.harness.race import one_look
from benchmarks.harness.table import Table
from benchmarks.harness.timing import seconds
from ringmap import ReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]
Way = tuple[Callable[[], object], Callable[[], AbstractContextManager[Any]]]
"""A call, and what is taken out of the library around it."""

POWER, DEFAULT = 'ringmap, durability="power": a sync for each episode', "ringmap, the default"
NO_SYNCS, NO_CHECKSUMS = "ringmap, without background syncs", "ringmap, without checksums"
COPY = "np.copyto into arrays in RAM"
TWO, ONE = "ringmap, two looks", "ringmap, one look: torn clips"
NEVER_S = 1e9


def run(place: Place) -> list[Table]:
    """Time writes of pixels and of small episodes, and draws."""
    frames = noise(place.size(200, 4), place.size(16, 2))
    small = place.size(4, 2)
    tables = [
        _writes(
            place,
            f"pixels: episodes of {frames.shape[1]} steps of 12 KiB",
            place.size(150, 4),
            partial(pixels, frames),
            1,
        ),
        _writes(
            place, f"states: episodes of {small} steps of 64 bytes", place.size(10_000, 20), partial(states, small), 20
        ),
        _draws(place, frames),
    ]
    panels = {
        title: {name: 1 / row["median"] for name, row in table.times.items()}
        for title, table in zip(("write_episode, pixels", "write_episode, states", "sample(256)"), tables, strict=True)
    }
    rates(place.out / "safety.png", tables[0], panels, "calls per second, medians")
    return tables


def _writes(
    place: Place, title: str, episodes: int, source: Callable[[], Iterator[dict[str, Array]]], burst: int
) -> Table:
    table = Table(f"write_episode, round a full ring on the disk; {title}")
    steps = len(next(source())["reward"]) * episodes
    with place.folder() as folder, contextlib.ExitStack() as stack:

        def ring(name: str, **options: Any) -> ReplayBuffer:
            made = ReplayBuffer(steps, path=folder / name, history_len=1, **options)
            stack.callback(made.close)
            return made

        rings = {
            POWER: ring("power", durability="power"),
            DEFAULT: ring("default"),
            NO_SYNCS: ring("unsynced", sync_every_s=NEVER_S),
            NO_CHECKSUMS: ring("unchecked"),
        }
        ways: dict[str, Way] = {}
        for name, buffer in rings.items():
            without = _no_checksums if name == NO_CHECKSUMS else contextlib.nullcontext
            with without():
                fill(buffer, source(), episodes)
            ways[name] = partial(_write_next, buffer, source()), without
        ways[COPY] = _copies(source(), episodes), contextlib.nullcontext
        times = _in_turn(ways, place.size(400, 2), burst)
        _prove(rings[DEFAULT], folder / "default", len(times[DEFAULT]) + burst, source())
    table.add_all(times)
    for name in (POWER, DEFAULT, NO_SYNCS, NO_CHECKSUMS):
        table.ratio(name, COPY)
    return table


def _draws(place: Place, frames: Array) -> Table:
    table = Table("sample(256), clips of 4 frames of 64x64x3, a ring of files in the page cache")
    episodes = place.size(100, 4)
    with place.folder(ram=True) as folder:
        path = folder / "ring"
        with ReplayBuffer(frames.shape[1] * episodes, 4, path=path) as made:
            fill(made, pixels(frames), episodes)
            made.close()
        with ReplayBuffer.open(path, seed=0) as buf:
            batch = buf.sample(256)
            assert (batch["reward"][:, 1:] == batch["reward"][:, :-1] + 1).all(), "no clips"
            draw = partial(buf.sample, 256)
            ways = {TWO: (draw, contextlib.nullcontext), ONE: (draw, one_look)}
            table.add_all(_in_turn(ways, place.size(200, 2), 5))
            buf.close()
    table.ratio(TWO, ONE)
    return table


def _in_turn(ways: dict[str, Way], rounds: int, burst: int) -> dict[str, list[float]]:
    """Return the seconds of each call; what is taken out is taken out and put back between them."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (call, without) in ways.items():
            with without():
                taken = [seconds(call) for _ in range(burst)]
            if turn:  # the first one warms up
                times[name] += taken
    return times


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    def nothing(*_: Any, **__: Any) -> int:
        return 0

    def no_bytes(*_: Any, **__: Any) -> bytes:
        return bytes(8)

    with mock.patch.multiple(xxhash, xxh3_64_intdigest=nothing, xxh3_64_digest=no_bytes):
        yield


def _write_next(buffer: ReplayBuffer, episodes: Iterator[dict[str, Array]]) -> None:
    buffer.write_episode(next(episodes))


def _copies(source: Iterator[dict[str, Array]], episodes: int) -> Callable[[], None]:
    first = next(source)
    rows = {name: np.stack([values] * episodes) for name, values in first.items()}
    places = cycle(range(episodes))

    def copy() -> None:
        place, episode = next(places), next(source)
        for name, values in episode.items():
            np.copyto(rows[name][place], values)

    return copy


def _prove(buffer: ReplayBuffer, path: Path, written: int, source: Iterator[dict[str, Array]]) -> None:
    """Raise unless the last episode is the one that was written last, for another process too."""
    expected = {}
    for _ in range(written):
        expected = {name: values.copy() for name, values in next(source).items()}
    with ReplayBuffer.open(path) as reader:
        for found in (buffer, reader):
            last = found.load_episode(found.num_episodes - 1)
            assert all(np.array_equal(last[name], expected[name]) for name in expected), "other rows"
        reader.close()
