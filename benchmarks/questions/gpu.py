"""A GPU: how fast pixels reach it, beside a bare copy of as many bytes, and how long a model waits for them."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import ReplayBuffer

SIZE, HISTORY = 256, 4


def run(place: Place) -> list[Table]:
    """Time `batches(device="cuda", pin_memory=True)`; where there is no GPU, say so."""
    import torch

    table = Table(f"batches of {SIZE} clips of {HISTORY} frames of 64x64x3 to a GPU")
    if not torch.cuda.is_available():
        table.notes.append("not measured: no GPU here")
        return [table]
    table.fact("GPU", torch.cuda.get_device_name())
    frames = place.size(20_000, 1_000)
    with place.folder(ram=True) as folder:
        buf = ReplayBuffer(frames, path=folder / "pixels", seed=0, history_len=HISTORY)
        rng = np.random.default_rng(0)
        for _ in range(frames // 200):
            buf.write_episode({"pixels": rng.integers(0, 256, (200, 64, 64, 3), np.uint8)})
        _copies(place, table, buf, torch)
        _waits(place, table, buf, torch)
        buf.close()
    return [table]


def _copies(place: Place, table: Table, buf: ReplayBuffer, torch: Any) -> None:
    """Time a batch from the iterator to the GPU, and a bare copy of as many bytes from page-locked memory."""
    host = torch.from_numpy(buf.sample(SIZE)["pixels"]).pin_memory()
    count = place.size(20, 2)

    def bare() -> None:
        for _ in range(count):
            host.to("cuda", non_blocking=True)
        torch.cuda.synchronize()

    batches = buf.batches(SIZE, to="torch", device="cuda", pin_memory=True, prefetch=4)

    def ours() -> None:
        for _ in range(count):
            next(batches)
        torch.cuda.synchronize()

    with batches:
        names = f"a bare page-locked copy, {count} times", f"batches(), {count} of them"
        times = in_turn(dict(zip(names, (bare, ours), strict=True)), place.size(30, 2))
    table.add_all(times)
    table.faster(names[1], names[0], at_least=0.9)


def _waits(place: Place, table: Table, buf: ReplayBuffer, torch: Any) -> None:
    """Time a model that computes for about three batches' time on each batch, with batches and with one batch that
    stays."""
    one = torch.randn(4096, 4096, device="cuda")

    def compute(pixels: Any) -> None:
        made = one
        for _ in range(place.size(40, 2)):
            made = made @ one / 64
        (made.sum() + pixels.float().mean()).item()

    steps = place.size(50, 2)
    kept = torch.from_numpy(buf.sample(SIZE)["pixels"]).cuda()

    def still() -> None:
        for _ in range(steps):
            compute(kept)

    def fed() -> None:
        with buf.batches(SIZE, steps=steps + 1, to="torch", device="cuda", pin_memory=True) as batches:
            compute(next(batches)["pixels"])
            nonlocal began
            began = perf_counter()
            for batch in batches:
                compute(batch["pixels"])
            taken.append(perf_counter() - began)

    began, taken = 0.0, list[float]()
    still()
    alone = list[float]()
    for _ in range(place.size(10, 2)):
        start = perf_counter()
        still()
        alone.append(perf_counter() - start)
        fed()
    names = f"{steps} steps of a model on a batch that stays", f"{steps} steps on batches()"
    table.add(names[0], alone)
    table.add(names[1], taken)
    more = table.times[names[1]]["median"] / table.times[names[0]]["median"] - 1
    table.bar("the share of the time that the model waits", more, at_most=0.02)
