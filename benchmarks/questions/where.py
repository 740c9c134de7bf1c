"""Where the time of a batch goes: the draw, the index, the rows, the DataLoader, the way from a worker.

The parts are timed as they run, by methods wrapped for the purpose; a worker's clock is that of the
loader's process, so that the way between them can be told too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any
from unittest import mock

from torch.utils.data import DataLoader, default_collate

from benchmarks.harness.data import fill
from benchmarks.harness.place import Place
from benchmarks.harness.plots import shares
from benchmarks.harness.stored import Stored
from benchmarks.harness.table import Table
from ringmap import ReplayBuffer
from ringmap.buffers import lookup
from ringmap.buffers.sampled import Sampled
from ringmap.clips.gather import ClipReader
from ringmap.clips.index import SpanIndex

BATCH, HISTORY = 256, 4

Parts = dict[str, float]

_spent: Parts = {}


def run(place: Place) -> list[Table]:
    """Take batches of pixels apart; draw the plot."""
    stored = Stored.of_pixels(place.size(400, 20), place.size(100, 100))
    tables = []
    with place.folder() as folder:
        buffer = ReplayBuffer(stored.num_steps, HISTORY, path=folder / "buffer", seed=0)
        fill(buffer, iter(stored), stored.num_episodes)
        stored.assert_holds(buffer.sample(BATCH), BATCH, HISTORY)
        ways: dict[str, Callable[[], Iterator[Parts]]] = {
            "sample(), one thread": lambda: _samples(buffer, 1),
            "sample()": lambda: _samples(buffer, None),
            "DataLoader, no workers": lambda: _loads(buffer, 0),
            "DataLoader, one worker": lambda: _loads(buffer, 1),
            "the same by PyTorch's own transport": lambda: _loads_without_slots(buffer),
        }
        found: dict[str, list[Parts]] = {way: [] for way in ways}
        with _watched():
            for _ in range(place.size(5, 1)):
                for way, batches in ways.items():
                    for number, parts in zip(range(place.size(60, 5)), batches(), strict=False):
                        if number > 1:
                            found[way].append(parts)
        buffer.close()
    medians: dict[str, Parts] = {}
    for way, batches_of in found.items():
        table = Table(f"{way}: a batch of {BATCH} clips of {HISTORY} steps of 64x64x3 pixels and 3 small columns")
        for part in ("whole", *(part for part in batches_of[0] if part != "whole")):
            table.add(part, [parts[part] for parts in batches_of])
        medians[way] = {part: row["median"] * 1e3 for part, row in table.times.items() if part != "whole"}
        tables.append(table)
    tables[3].notes.append("no batch is asked for before the last has come: two workers would overlap")
    shares(place.out / "where.png", tables[-1], medians)
    return tables


def _samples(buffer: ReplayBuffer, threads: int | None) -> Iterator[Parts]:
    while True:
        buffer.threads = threads
        _spent.clear()
        start = perf_counter()
        buffer.sample(BATCH)
        whole = perf_counter() - start
        buffer.threads = None
        parts = {
            "draw": _spent["draw"] - _spent["index"],
            "index": _spent["index"],
            "rows": _spent["rows"],
        }
        yield {"whole": whole, **parts, "rest": whole - sum(parts.values())}


def _loads(buffer: Any, workers: int) -> Iterator[Parts]:
    loader: Any = DataLoader(
        buffer,
        BATCH,
        shuffle=True,
        num_workers=workers,
        collate_fn=_collate,
        prefetch_factor=1 if workers else None,
        multiprocessing_context="fork" if workers else None,
    )
    before = perf_counter()
    for batch in loader:
        now = perf_counter()
        spent = batch.pop("spent")
        del batch
        parts = {
            "index": spent["index"],
            "rows": spent["rows"],
            "collate": spent["collate"],
            "rest": spent["fetch"] - spent["index"] - spent["rows"],
            "order": max(0, spent["begin"] - before),  # which may be under way before the last is out
            "way back": now - spent["end"],
        }
        yield {"whole": now - before, **parts}
        before = now


def _loads_without_slots(buffer: ReplayBuffer) -> Iterator[Parts]:
    with mock.patch.object(lookup, "_room", return_value=None):
        yield from _loads(buffer, 1)


def _collate(clips: Any) -> Any:
    start = perf_counter()
    batch = default_collate(clips)
    end = perf_counter()
    batch["spent"] = {**_spent, "collate": end - start, "end": end}
    _spent.clear()
    return batch


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Have `_spent` say how long the parts of the newest batch took, in each process."""
    with contextlib.ExitStack() as stack:
        for owner, method, part in (
            (ClipReader, "draw", "draw"),
            (SpanIndex, "drawn", "index"),
            (SpanIndex, "positions", "index"),
            (ClipReader, "_gather", "rows"),
            (Sampled, "__getitems__", "fetch"),
        ):
            stack.enter_context(mock.patch.object(owner, method, _timed(part, getattr(owner, method))))
        yield


def _timed(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        start = perf_counter()
        _spent.setdefault("begin", start)
        try:
            return method(*args, **options)
        finally:
            _spent[part] = _spent.get(part, 0) + perf_counter() - start

    return call
