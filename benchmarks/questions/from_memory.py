"""How fast is a batch from memory? Rows in the page cache: one thread beside one thread, all cores beside all cores.

Where a library has no threads, the benchmark starts one for each core, and each thread draws its own batches. ringmap
divides one batch among its threads. stable-worldmodel runs after TorchRL, whose threads use a core for a while after
each call: its own calls are so long that this does not show.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.data import Stored, columns_of
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn, seconds
from benchmarks.peers import buffers, reverb
from benchmarks.peers.base import Peer, Spec, full
from ringmap import ReplayBuffer
from ringmap.storage.disk.system import cores

Array = np.ndarray[Any, np.dtype[Any]]
Calls = dict[str, Callable[[], object]]

BATCH, HISTORY = 256, 4
OURS, NEXT = "ringmap", "ringmap, history 2 (the next step too)"
MEMCPY = "memcpy of as many pixels, contiguous: a bound"
TAKES, FANCY = "NumPy, draw and takes", "NumPy, one fancy index per column"
OWN_THREADS = ("ringmap", "TorchRL", "memcpy")
"""What divides a batch among threads itself; of the others, each thread draws batches."""
THREADS = (
    "all cores: ours, TorchRL and memcpy divide each batch; of the others each thread draws batches of its own, "
    "and the time is that of the call divided by their number"
)


def sampling(place: Place) -> Iterator[Table]:
    """Time pixels and state vectors."""
    with ThreadPoolExecutor(cores()) as pool:
        yield from _pixels(place, pool)
        yield from _states(place, pool)


def _pixels(place: Place, pool: ThreadPoolExecutor) -> Iterator[Table]:
    stored = Stored.of_pixels(place.size(500, 20, 100), place.size(200, 100))
    folder, rng, count = place.new_folder(), np.random.default_rng(0), BATCH * HISTORY
    buffer = place.closing(stored.ring(folder / "buffer", HISTORY))
    columns = columns_of(folder / "buffer")
    frames = columns["pixels"]

    def fancy_index() -> dict[str, Array]:
        slots = stored.starts(BATCH, HISTORY, rng)[:, None] + np.arange(HISTORY)
        return {name: column[slots] for name, column in columns.items()}

    def memcpy() -> None:
        parts = buffer.threads or cores()
        start, copy = int(rng.integers(len(frames) - count)), np.empty_like(frames[:count])
        ends = [count * part // parts for part in range(parts + 1)]
        copying = [pool.submit(np.copyto, copy[i:j], frames[start + i : start + j]) for i, j in pairwise(ends[:-1])]
        np.copyto(copy[ends[-2] :], frames[start + ends[-2] : start + count])
        for part in copying:
            part.result()

    what = f"clips of {HISTORY} steps of 64x64x3 pixels and 3 small columns, {stored.num_steps:,} steps stored"
    one, every = tables = _tables(what)
    for batch in (buffer.sample(BATCH), fancy_index()):
        stored.assert_holds(batch, BATCH, HISTORY)
    kinds: list[type[Peer]] = [buffers.TorchRLSlices, buffers.StableWorldmodel, buffers.SheeprlSequences]
    kinds += [buffers.SheeprlEpisodes, buffers.CpprbFiles, buffers.Dreamer]
    calls: Calls = {OURS: lambda: buffer.sample(BATCH), FANCY: fancy_index}
    peers = full(kinds, Spec.of(stored, folder, BATCH, HISTORY), stored, one)
    calls |= {peer.name: (lambda peer=peer: peer.sample(BATCH)) for peer in peers}
    _time(tables, {**calls, MEMCPY: memcpy}, buffer, pool, place.size(40, 2, 12), place.size(10, 2))
    beside = None if place.tiny or place.quick else _reverb(every, calls[OURS], stored)
    one.rank(OURS, {MEMCPY: 0.65, FANCY: 0.9})
    every.rank(OURS)
    if beside is not None:
        every.add(reverb.NAME, beside[0])
        ratio = float(np.median(beside[0]) / np.median(beside[1]))
        what = f"{OURS}: times as fast as {reverb.NAME}, median of turns beside it"
        every.bar(what, ratio, ours=OURS, other=reverb.NAME)
    for table in tables:
        table.notes.append(
            "sheeprl's sequences, cpprb's steps and DreamerV3's sequences do not keep to an episode; cpprb draws 4 "
            "steps for each clip"
        )
    every.notes.append(THREADS)
    yield from tables


def _reverb(table: Table, ours: Callable[[], object], stored: Stored) -> tuple[list[float], list[float]] | None:
    """Return the times of Reverb, and of ours in turns beside it, if there is a Python that has it."""
    python = os.environ.get("RINGMAP_BENCH_REVERB")
    if python is None:
        table.fact("skipped, Reverb", f"needs a Python of its own: {Path(reverb.__file__).name} says how")
        return None
    times, beside = list[float](), list[float]()
    with reverb.serving(python, stored.num_episodes, stored.length) as pipe:
        for _ in range(5):
            beside += [seconds(ours) for _ in range(100)]
            pipe.send(2.0)
            times += pipe.recv()
    return times, beside


def _states(place: Place, pool: ThreadPoolExecutor) -> Iterator[Table]:
    stored = Stored.of_states(place.size(100_000, 100, 10_000), place.size(10, 5))
    folder, rng = place.new_folder(), np.random.default_rng(0)
    buffer = place.closing(stored.ring(folder / "buffer"))
    columns = columns_of(folder / "buffer")

    def takes() -> dict[str, Array]:
        slots = rng.integers(stored.num_steps, size=BATCH)
        return {n: column.take(slots, axis=0, mode="clip") for n, column in columns.items()}

    def fancy_index() -> dict[str, Array]:
        slots = rng.integers(stored.num_steps, size=BATCH)
        return {name: column[slots] for name, column in columns.items()}

    one, every = tables = _tables(f"state vectors, 4 small columns, history 1, {stored.num_steps:,} steps stored")
    for batch in (buffer.sample(BATCH), takes(), fancy_index()):
        stored.assert_holds(batch, BATCH, 1)
    stored.assert_holds(buffer.sample(BATCH, 2), BATCH, 2)
    kinds: list[type[Peer]] = [buffers.TorchRLSlices, buffers.StableWorldmodel, buffers.SheeprlSequences]
    kinds += [buffers.Cpprb, buffers.StableBaselines3]
    calls: Calls = {OURS: lambda: buffer.sample(BATCH), NEXT: lambda: buffer.sample(BATCH, 2)}
    calls |= {TAKES: takes, FANCY: fancy_index}
    peers = full(kinds, Spec.of(stored, folder, BATCH, 1), stored, one)
    calls |= {peer.name: (lambda peer=peer: peer.sample(BATCH)) for peer in peers}
    _time(tables, calls, buffer, pool, place.size(100, 2, 25), place.size(10, 2))
    one.rank(OURS, {TAKES: 0.5, "cpprb": 1, "Stable-Baselines3": 1})
    every.rank(OURS)
    for peer in peers:
        if peer.lacks:
            one.faster(NEXT, peer.name)
            one.notes.append(f"{peer.name} returns obs twice, now and next, as tensors, and no discount")
    every.notes.append(
        THREADS + "; a small batch is never divided, and the draws wait for each other's interpreter lock"
    )
    yield from tables


def _tables(what: str) -> tuple[Table, Table]:
    return Table(f"one thread: sample({BATCH}) of {what}"), Table(f"all {cores()} cores: sample({BATCH}) of {what}")


def _time(
    tables: tuple[Table, Table], calls: Calls, buffer: ReplayBuffer, pool: ThreadPoolExecutor, rounds: int, burst: int
) -> None:
    """Fill both tables: one thread, then all cores; in each, all parties in turn."""
    one, every = tables
    many = {name: call if name.startswith(OWN_THREADS) else _by_each(call, pool) for name, call in calls.items()}
    for table, threads, parties in ((one, 1, calls), (every, cores(), many)):
        buffer.threads = None if threads > 1 else 1
        _torch_threads(threads)
        for name, times in in_turn(parties, rounds, burst).items():
            shared = threads > 1 and not name.startswith(OWN_THREADS)
            table.add(name, times / threads if shared else times)
    slower = [name for name in one.times if one.median(name) < every.median(name)]
    every.times |= {name: one.times[name] for name in slower}
    if slower:
        every.notes.append("more threads are slower, so this is one thread again: " + ", ".join(slower))


def _by_each(call: Callable[[], object], pool: ThreadPoolExecutor) -> Callable[[], object]:
    """Return a call that has every core draw a batch."""
    return lambda: [drawn.result() for drawn in [pool.submit(call) for _ in range(cores())]]


def _torch_threads(count: int) -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(count)


# -- rollouts ------------------------------------------------------------------------------------


def rollout(place: Place) -> Iterator[Table]:
    """Time the advantages of 24 steps of 4096 environments, beside the loop over steps that guides show."""
    import torch

    from ringmap import RolloutBuffer

    steps, envs = 24, place.size(4096, 64)
    torch.manual_seed(0)
    buf = RolloutBuffer(envs, steps, (1,), (1,))
    for _ in range(steps):
        done, zeros = (torch.rand(envs) < 0.05).float(), torch.zeros(envs, 1)
        buf.add(zeros, None, zeros, torch.randn(envs), done, torch.randn(envs), torch.zeros(envs))
    last = torch.randn(envs)

    def loop() -> torch.Tensor:
        advantages, later = torch.zeros(steps, envs), torch.zeros(envs)
        for t in reversed(range(steps)):
            following = last if t == steps - 1 else buf.values[t + 1]
            delta = buf.rewards[t] + 0.99 * following * (1 - buf.dones[t]) - buf.values[t]
            later = delta + 0.99 * 0.95 * (1 - buf.dones[t]) * later
            advantages[t] = later
        return advantages

    buf.compute_returns_and_advantages(last)
    torch.testing.assert_close(buf.advantages, loop(), rtol=1e-4, atol=1e-5)
    table = Table(
        f"returns and advantages of {steps} steps of {envs:,} environments, {torch.get_num_threads()} threads"
    )
    ours, theirs = "RolloutBuffer", "the loop over steps, on tensors"
    calls: Calls = {ours: lambda: buf.compute_returns_and_advantages(last), theirs: loop}
    table.time(calls, place.size(60, 2), place.size(10, 2))
    table.limit(ours, "ms", at_most=3)
    table.faster(ours, theirs)
    table.notes.append("ours also fills in returns, and counts timeouts")
    yield table


# -- to a GPU ------------------------------------------------------------------------------------


def gpu(place: Place) -> Iterator[Table]:
    """Time `batches(device="cuda", pin_memory=True)` beside a bare copy of as many bytes, and a model that waits."""
    import torch

    table = Table(f"batches of {BATCH} clips of {HISTORY} frames of 64x64x3 to a GPU")
    if not torch.cuda.is_available():
        table.notes.append("not measured: no GPU here")
        yield table
        return
    table.fact("GPU", torch.cuda.get_device_name())
    stored = Stored.of_pixels(place.size(100, 5), 200)
    buf = place.closing(stored.ring(place.new_folder(ram=True) / "pixels", HISTORY))
    host = torch.from_numpy(buf.sample(BATCH)["pixels"]).pin_memory()
    one, kept = torch.randn(4096, 4096, device="cuda"), host.cuda()
    count, steps, taken = place.size(20, 2), place.size(50, 2), list[float]()
    options: dict[str, Any] = {"to": "torch", "device": "cuda", "pin_memory": True, "columns": ["pixels"]}

    def bare() -> None:
        for _ in range(count):
            host.to("cuda", non_blocking=True)
        torch.cuda.synchronize()

    def ours() -> None:
        for _ in range(count):
            next(batches)
        torch.cuda.synchronize()

    def compute(pixels: Any) -> None:
        """Take about three batches' time."""
        made = one
        for _ in range(place.size(40, 2)):
            made = made @ one / 64
        (made.sum() + pixels.float().mean()).item()

    def still() -> None:
        for _ in range(steps):
            compute(kept)

    def fed() -> None:
        with buf.batches(BATCH, steps=steps + 1, **options) as fresh:
            compute(next(fresh)["pixels"])
            began = perf_counter()
            for batch in fresh:
                compute(batch["pixels"])
            taken.append(perf_counter() - began)

    names = f"a bare page-locked copy, {count} times", f"batches(), {count} of them"
    with buf.batches(BATCH, prefetch=4, **options) as batches:
        table.time(dict(zip(names, (bare, ours), strict=True)), place.size(30, 2))
    table.faster(names[1], names[0], at_least=0.9)
    names = f"{steps} steps of a model on a batch that stays", f"{steps} steps on batches()"
    table.add(names[0], in_turn({"still": still, "fed": fed}, place.size(10, 2))["still"])
    table.add(names[1], taken[1:])
    more = table.median(names[1]) / table.median(names[0]) - 1
    table.bar("the share of the time that the model waits", more, at_most=0.02)
    yield table
