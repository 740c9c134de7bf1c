"""Alone: one call at a time in a process, of calls that take a lock file or fill a model.

A lock file keeps other processes out. Within a process it is not enough: a signal handler that calls in the middle of
the same call would wait for itself, and two threads that fill one model would mix two sets.

Invariants: a thread waits for another one, never for itself; a forked child waits for no thread of its parent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ringmap.storage.disk.forks import Forkable, Renew
from ringmap.storage.read.handle import refuse_if_mine

__all__ = ["Alone"]


class Alone(Forkable):
    """A lock of this process that a signal handler is refused, not given twice."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def __call__(self, where: str) -> Iterator[None]:
        """Hold the lock.

        Args:
            where: the method to name in the message.

        Raises:
            RoleError: this thread holds it, so the caller is a signal handler or a callback.
        """
        refuse_if_mine(self._lock, where)
        with self._lock:
            yield

    def reset_after_fork(self, renewed: Renew) -> None:
        """Take a new lock: the thread that held the old one may not exist here."""
        self._lock = threading.RLock()
