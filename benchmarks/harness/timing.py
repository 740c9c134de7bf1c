"""Timing calls in turn: ours, theirs, ours, theirs, so that a busy machine is busy for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

__all__ = ["QUANTILES", "in_turn", "passes", "quantiles", "seconds", "stamps", "turns"]

Array = np.ndarray[Any, np.dtype[Any]]

QUANTILES = {"median": 50, "p90": 90, "p99": 99}
"""What is reported. An average would hide the syncs behind the many cheap calls, or the reverse."""


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call took."""
    start = perf_counter()
    call()
    return perf_counter() - start


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    burst: int = 1,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Array]:
    """Return the seconds of each call, name -> `(rounds * burst,)`.

    Args:
        calls: what to compare; each is called once first, and not counted.
        rounds: how often each has its turn.
        burst: calls in a row at each turn: more than 1 where the caches that the other one leaves
            behind are not the question.
        before: called ahead of every call, and not timed.
        clock: seconds; `time.thread_time` where all work is this thread's, since a busy machine takes its time away.
    """
    taken = {name: np.empty((rounds, burst)) for name in calls}
    for call in calls.values():
        call()
    for turn in range(rounds):
        for name, call in calls.items():
            row = taken[name][turn]
            for i in range(burst):
                if before is not None:
                    before()
                start = clock()
                call()
                row[i] = clock() - start
    return {name: times.ravel() for name, times in taken.items()}


def turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Return what each call returns at each of its turns: those that time themselves, and are not warmed up."""
    found: dict[str, list[Any]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(call())
    return found


def stamps(batches: Iterable[Any]) -> list[float]:
    """Return when a pass began, and when each batch had come."""
    at = [perf_counter()]
    for batch in batches:
        at.append(perf_counter())
        del batch
    return at


def passes(
    calls: Mapping[str, Callable[[int], Iterable[Any]]], workers: int, rounds: int, group: int
) -> dict[str, Array]:
    """Return the seconds per batch of each, over all passes, without the first batches of each."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, batches in calls.items():
            # The second batch was begun while the first was awaited; and the last is smaller.
            came = stamps(batches(workers))[1:-1]
            taken[name].extend(np.diff(came[group if workers else 0 :: group]) / group)
    return {name: np.array(times) for name, times in taken.items()}


def quantiles(times: Any) -> dict[str, float]:
    """Return median, p90 and p99."""
    found = np.percentile(np.asarray(times), list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, found), strict=True))
