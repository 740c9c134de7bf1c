"""How fast are single transitions? Adding, drawing, priorities at a million leaves and stacks of frames."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import count, cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import xxhash

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.peers.base import Peer, Spec, made
from benchmarks.peers.buffers import Cpprb, Rlox, StableBaselines3, TorchRL
from ringmap import TransitionReplayBuffer
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.inspect.describe import nbytes_of

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, DIM = 256, 8
RAM, DIRECTORY = "ringmap, in RAM", "ringmap, in a directory"
BARE = "the write and checksum of a row, bare"


def transitions(place: Place) -> Iterator[Table]:
    """Time priorities, adding and drawing with few and many lanes, and stacks of frames."""
    yield _priorities(place)
    yield from _plain(place)
    if not place.quick:
        yield _frames(place)


def steps(lanes: int, at: int) -> dict[str, Array]:
    """Return a step of each lane that carries its number: observation i is full of i, and leads to i + lanes."""
    numbers = np.arange(at, at + lanes)
    obs = np.repeat(numbers.astype(np.float32)[:, None], DIM, 1)
    columns = {"obs": obs, "action": numbers % 4, "reward": obs[:, 0].copy(), "next_obs": obs + np.float32(lanes)}
    return {**columns, "done": np.zeros(lanes, np.bool_)}


def as_one(step: Mapping[str, Array]) -> dict[str, Any]:
    """Return a step of one lane as one environment gives it."""
    one: dict[str, Any] = {name: values[0] for name, values in step.items()}
    return one | {name: one[name].item() for name in ("action", "reward", "done")}


class Ours(Peer):
    """ringmap: transitions as NumPy arrays."""

    setting = "device=None: NumPy arrays"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        obs, sampler = spec.first["obs"], PrioritizedSampler(rng=0) if spec.prioritized else None
        stacks = {"frame_stack": spec.stack} if spec.stack else {}
        options: dict[str, Any] = {"path": spec.folder, "sampler": sampler, **stacks}
        self.buffer = TransitionReplayBuffer(
            spec.size, obs.shape[1:], obs_dtype=obs.dtype, device=None, seed=0, **options
        )
        self._last: Any = None

    def add(self, rows: Mapping[str, Any]) -> None:
        self.buffer.add(rows["obs"], rows["action"], rows["reward"], rows["next_obs"], rows["done"])

    add_one = add

    def sample(self, size: int) -> Any:
        self._last = batch = self.buffer.sample(size)
        return batch

    def clips(self, batch: Any) -> Mapping[str, Any]:
        return {"obs": batch["observations"], "next_obs": batch["next_observations"]}

    def update(self, priorities: Array) -> None:
        self.buffer.update_priorities(self._last["ids"], priorities)

    def close(self) -> None:
        self.buffer.close()


def parties(place: Place, table: Table, kinds: tuple[type[Peer], ...], spec: Spec) -> dict[str, Peer]:
    """Return ours in RAM and in a directory, and the peers that are installed, in RAM."""
    beside = {f"{peer.called} {peer.name.split()[1]}": peer for peer in made(kinds, spec, table)}
    on_disk = Spec(**{**vars(spec), "folder": place.new_folder() / "buffer"})
    return {RAM: place.closing(Ours(spec)), DIRECTORY: place.closing(Ours(on_disk)), **beside}


def _assert_right(parties: Mapping[str, Peer], lanes: int) -> None:
    for name, party in parties.items():
        batch = party.clips(party.sample(BATCH))
        obs, after = np.asarray(batch["obs"]), np.asarray(batch["next_obs"])
        assert obs.shape == after.shape == (BATCH, DIM), name
        assert (obs == obs[:, :1]).all(), name
        assert len(np.unique(obs)) > BATCH // 8, name
        assert (after == obs + lanes).all(), name


def _priorities(place: Place) -> Table:
    size, lanes = place.size(1_000_000, 4_096, 200_000), 4_096
    table = Table(f"prioritized: {BATCH} of {size:,} transitions of {DIM} floats, all with priorities of their own")
    rng, spec = np.random.default_rng(0), Spec(steps(lanes, 0), size, lanes=lanes, prioritized=True)
    found = parties(place, table, (Cpprb, TorchRL, Rlox), spec)

    def turn(party: Peer) -> None:
        party.sample(BATCH)
        party.update(rng.random(BATCH))

    for party in found.values():
        for at in range(0, size, lanes):
            party.add(steps(lanes, at))
        for _ in range(place.size(200, 2)):
            turn(party)
    _assert_right(found, lanes)
    calls: dict[str, Callable[[], object]] = {
        f"{name}: sample, rows and all, and update": (lambda p=party: turn(p)) for name, party in found.items()
    }
    bare = f"{DIRECTORY}: draw and update alone"
    calls[bare] = _bare(place.new_folder() / "bare", size, rng)
    table.time(calls, place.size(60, 2, 20), place.size(20, 2))
    table.limit(bare, "us", at_most=200)
    table.rank(next(iter(calls)))
    table.notes.append(
        "cpprb, TorchRL and rlox keep their trees in compiled code, in RAM; ours in a directory stores each update"
    )
    return table


def _bare(folder: Path, size: int, rng: np.random.Generator) -> Callable[[], None]:
    sampler = PrioritizedSampler(rng=0)
    buf = TransitionReplayBuffer(size, (1,), device=None, path=folder, sampler=sampler)
    zeros = np.zeros((min(size, 4_096), 1))
    for _ in range(-(-size // len(zeros))):
        buf.add(zeros, zeros[:, 0], zeros[:, 0], zeros, zeros[:, 0])
    buf.sample(1)
    step = 0

    def call() -> None:
        nonlocal step
        step += 1
        window = buf.clip_window()
        positions = window.positions(sampler(step, buf, BATCH, 1))
        weigh = sampler.weigh()
        assert weigh is not None
        weigh(positions)
        sampler.update_priorities(positions, rng.random(BATCH))

    return call


def _plain(place: Place) -> Iterator[Table]:
    """Add steps to full rings, and sample from them; making the steps is not timed."""
    size, rounds, burst = place.size(100_000, 1_024, 20_000), place.size(100, 2, 40), place.size(20, 2)
    for lanes in (1, 64):
        what = f"a full ring of {size:,} transitions of {DIM} floats"
        table = Table(f"add a step of {lanes} lane{'s' * (lanes > 1)} to {what}; making the step is not timed")
        stored = [steps(lanes, i * lanes) for i in range(max(2, size // lanes))]
        kinds = (Cpprb, TorchRL, Rlox, StableBaselines3)
        found = parties(place, table, kinds, Spec(stored[0], size, lanes=lanes))
        for party in found.values():
            for step in stored:
                party.add(step)
        _assert_right(found, lanes)
        # Each in the shape that the library likes best.
        single = list(map(as_one, stored)) if lanes == 1 else []
        adds = {name: _adding(party, stored, single) for name, party in found.items()}
        if lanes == 1:
            adds[BARE] = _bare_add(place.new_folder() / "bare", single)
        table.time(adds, rounds, burst)
        _assert_right(found, lanes)
        table.rank(RAM)
        table.limit(RAM, "us", at_most=12 if lanes == 1 else None)
        table.limit(DIRECTORY, "us", at_most=20 if lanes == 1 else None)
        table.notes += [
            "in a directory of ours an add outlives a kill of the process once it returns; the others keep their "
            "rows in RAM",
            "; ".join(f"{name}: {party.setting}" for name, party in found.items()),
        ]
        if lanes == 1:
            _full(table, place.new_folder() / "full", place.size(1_000_000, 1_024, 100_000))
        yield table
        for number in (32, BATCH) if lanes == 1 else ():
            drawn = Table(f"sample({number}) from {what}")
            drawn.time({n: (lambda p=p, k=number: p.sample(k)) for n, p in found.items()}, rounds, burst)
            drawn.rank(RAM, {"cpprb": 1.0} if number == BATCH else None)
            if number == 32:
                drawn.limit(RAM, "us", at_most=15)
            drawn.notes.append("Stable-Baselines3 and TorchRL return tensors, the others NumPy arrays")
            yield drawn


def _bare_add(path: Path, single: list[Any]) -> Callable[[], None]:
    """Return what an `add` in a directory can't do without."""
    file, turn, rows = os.open(path, os.O_RDWR | os.O_CREAT), cycle(single), count()

    def bare() -> None:
        step = next(turn)
        tail = struct.pack("<qf??", step["action"], step["reward"], step["done"], False)
        packed = step["obs"].tobytes() + step["next_obs"].tobytes() + tail
        os.pwrite(file, packed + xxhash.xxh3_64_digest(packed), next(rows) * 96)

    return bare


def _full(table: Table, path: Path, size: int) -> None:
    """Tell what a ring of single adds takes on the disk, and how long opening it takes."""
    full, turn = Ours(Spec(steps(1, 0), size, path)), cycle([as_one(steps(1, i)) for i in range(256)])
    begun = perf_counter()
    for _ in range(size):
        full.add(next(turn))
    full.close()
    table.fact(f"{size:,} single adds and close, s", f"{perf_counter() - begun:.1f}")
    row = 4 * DIM + 8 + 4 + 1 + 1 + 4
    over = (nbytes_of(str(path)) - size * row) / size
    table.bar(f"bytes beside the {row} of a row, of {size:,}", over, at_most=40)
    begun = perf_counter()
    TransitionReplayBuffer.open(path, "r+", device=None).close()
    table.bar("opening it for writing, and closing, s", perf_counter() - begun, at_most=0.3)


def _adding(party: Peer, stored: list[Any], single: list[Any]) -> Callable[[], object]:
    if single and not isinstance(party, StableBaselines3):
        one, add_one = cycle(single), party.add_one
        return lambda: add_one(next(one))
    turn, add = cycle(stored), party.add
    return lambda: add(next(turn))


# -- stacks of frames ----------------------------------------------------------------------------

SIDE, STACK, EPISODE = 84, 4, 500


def _frame(number: int) -> Array:
    """Return a frame that carries its number."""
    frame = np.full((SIDE, SIDE), number % 251, np.uint8)
    frame[0, :4] = np.array([number], np.uint32).view(np.uint8)
    return frame


def _numbers(stacks: Any) -> Array:
    """Return the numbers of frames, `(B, STACK)`."""
    head = np.ascontiguousarray(np.asarray(stacks)[:, :, 0, :4])
    return head.view(np.uint32)[:, :, 0].astype(np.int64)


def _frames(place: Place) -> Table:
    """Time stacks of frames, each library at the settings that take it the fewest bytes, and tell the bytes."""
    size = place.size(20_000, 600)
    table = Table(f"stacks of {STACK} frames of {SIDE}x{SIDE} bytes, {size:,} transitions")
    now = np.stack([_frame(0)] * STACK)
    first = {"obs": now[None], "next_obs": now[None], "action": np.zeros(1, np.int64), "reward": np.ones(1, np.float32)}
    spec = Spec({**first, "done": np.zeros(1, np.bool_)}, size, stack=STACK)
    found = parties(place, table, (Cpprb, StableBaselines3), spec)
    took = {name: list[float]() for name in found}
    for number in range(1, size + 2):
        after = np.concatenate([now[1:], _frame(number)[None]])
        done = number % EPISODE == 0
        step = {"obs": now, "next_obs": after, "action": 0, "reward": 1.0, "done": done}
        rows = {**first, "obs": now[None], "next_obs": after[None], "done": np.array([done])}
        for name, party in found.items():
            add, given = (party.add, rows) if isinstance(party, StableBaselines3) else (party.add_one, step)
            begun = perf_counter()
            add(given)
            took[name].append(perf_counter() - begun)
        now = np.stack([_frame(number)] * STACK) if done else after
    table.add_all({f"{name}: add": times[len(times) // 2 :] for name, times in took.items()})
    for name, party in found.items():
        batch = party.clips(party.sample(64))
        obs, following = _numbers(batch["obs"]), _numbers(batch["next_obs"])
        start, back = obs[:, -1:] // EPISODE * EPISODE, np.arange(STACK - 1, -1, -1)
        assert (obs == np.maximum(obs[:, -1:] - back, start)).all(), name
        if name.startswith("ringmap"):  # Stable-Baselines3's is the next row, also where an episode ended
            assert (following == np.maximum(obs[:, -1:] + 1 - back, start)).all(), name
    for k in (32, 256):
        draws = {f"{n}: sample({k})": (lambda p=p, k=k: p.sample(k)) for n, p in found.items()}
        table.time(draws, place.size(100, 2), place.size(10, 2))
        for name in list(found)[2:]:
            for where in (RAM, DIRECTORY):
                table.faster(f"{where}: sample({k})", f"{name}: sample({k})")
    on_disk = found[DIRECTORY].spec.folder
    table.fact("ringmap, in a directory: bytes per transition, all files", nbytes_of(str(on_disk)) / size)
    table.fact("one frame", SIDE * SIDE)
    table.fact("both stacks of a transition", 2 * STACK * SIDE * SIDE)
    table.notes.append(
        "all at the settings that take the fewest bytes: frame_stack; cpprb's stack_compress (its stacks are the last "
        "axis) and next_of; Stable-Baselines3's optimize_memory_usage, which stores each stack once, 28,224 bytes"
    )
    return table
