"""Timing calls in turn: ours, theirs, ours, theirs, so that a busy machine is busy for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

__all__ = ["QUANTILES", "in_turn", "quantiles", "seconds"]

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


def quantiles(times: Any) -> dict[str, float]:
    """Return median, p90 and p99."""
    found = np.percentile(np.asarray(times), list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, found), strict=True))
