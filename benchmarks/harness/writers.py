"""Processes that write episodes of states when they are told how many: each to a ring of its own, or into a queue."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringmap import ReplayBuffer

__all__ = ["STATE", "STEPS", "Writer", "episode", "queueing", "writing"]

Array = np.ndarray[Any, np.dtype[Any]]

STEPS, STATE = 100, 17


def episode() -> dict[str, Array]:
    """Return the episode that all of them write."""
    states = np.random.default_rng(0).normal(size=(STEPS, STATE)).astype(np.float32)
    return {"state": states, "reward": states[:, 0], "step": np.arange(STEPS)}


class Writer:
    """Writes episodes to a ring."""

    def __init__(self, ring: str, steps: int = 50 * STEPS) -> None:
        self._buffer, self._episode = ReplayBuffer(steps, path=ring), episode()

    def write(self, episodes: int) -> int:
        """Write so many; return the number of steps."""
        for _ in range(episodes):
            self._buffer.write_episode(self._episode)
        return episodes * STEPS


class _Sender:
    """Puts episodes into a queue, by way of its feeding thread."""

    def __init__(self, queue: Any) -> None:
        self._queue, self._episode = queue, episode()

    def write(self, episodes: int) -> int:
        """Put so many; return the number of steps."""
        for _ in range(episodes):
            self._queue.put(self._episode)
        return episodes * STEPS


def writing(ring: str) -> contextlib.AbstractContextManager[Any]:
    """Start a process that writes to a ring when it is told how much, and end it; it answers with the number of
    steps."""
    return _process(Writer, ring)


def queueing(queue: Any) -> contextlib.AbstractContextManager[Any]:
    """Start a process that puts episodes into a queue, likewise."""
    return _process(_Sender, queue)


@contextlib.contextmanager
def _process(made: Callable[[Any], Any], where: Any) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")  # a fork would have the threads of Ray
    pipe, theirs = context.Pipe()
    process = context.Process(target=_write_when_told, args=(made, where, theirs))
    process.start()
    try:
        yield pipe
    finally:
        pipe.send(0)
        process.join()


def _write_when_told(made: Callable[[Any], Any], where: Any, pipe: Any) -> None:
    writer = made(where)
    while episodes := pipe.recv():
        pipe.send(writer.write(episodes))
