"""Alone: one call at a time in a process, of calls that take a lock file or fill a model.

A lock file keeps other processes out. Within a process it is not enough: a signal handler that calls in the middle of
the same call would wait for itself, and two threads that fill one model would mix two sets.

Invariants: a thread waits for another one, never for itself; a forked child waits for no thread of its parent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ringmap.storage.disk.calls import nested
from ringmap.storage.disk.process import Forkable, Renew

__all__ = ["Alone"]


class Alone(Forkable):
    """A lock of this process that a signal handler is refused, not given twice."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0

    @contextlib.contextmanager
    def __call__(self, where: str) -> Iterator[None]:
        """Hold the lock.

        Args:
            where: the method to name in the message.

        Raises:
            RoleError: this thread holds it, so the caller is a signal handler or a callback.
        """
        me = threading.get_ident()
        if self._owner == me:
            raise nested(where)
        with self._lock:
            try:
                self._owner = me
                yield
            finally:
                self._owner = 0

    def reset_after_fork(self, renewed: Renew) -> None:
        """Take a new lock: the thread that held the old one may not exist here."""
        self._lock, self._owner = threading.Lock(), 0
