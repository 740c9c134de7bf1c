"""Background: a thread that does what is due for an open buffer: a sync every few seconds, the commit of an old group.

It is a daemon, started by the first call that stores something, which is refused where none can start (a limit on
processes). It holds no strong reference, so that a buffer that is no longer referenced ends it. While the interpreter
ends, what is left is for the next writer.
Not here: what is done, and when it is due (store.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from ringmap.errors import EnvironmentFault

__all__ = ["Background"]

log = logging.getLogger("ringmap")

T = TypeVar("T")
Due = dict[Callable[[T], None], float]


class Background(Generic[T]):
    """Does work on a target, which is kept by a weak reference, when it is due."""

    def __init__(self, target: T) -> None:
        # A simple queue may be put to anywhere, also in the middle of a `get` of the same thread; an event may not.
        ends = self._ends = queue.SimpleQueue[bool]()
        """True: the thread ends; False: it looks at what is due."""
        self._target = weakref.ref(target, lambda _: ends.put(True))
        self._due: Due[T] = {}
        """When work is due, by the monotonic clock."""
        self._thread: threading.Thread | None = None

    def within(self, seconds: float, work: Callable[[T], None]) -> None:
        """Have work done within so many seconds, at least. For a call that has changed nothing yet.

        Raises:
            EnvironmentFault: no thread can start.
        """
        if work in self._due:
            return
        if self._thread is None and not sys.is_finalizing():  # `start` would wait for ever for what ends at once
            thread = threading.Thread(
                target=_run, args=(self._target, self._due, self._ends), name="ringmap-background", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise EnvironmentFault(
                    errno.EAGAIN,
                    f"{error}, and a buffer that is written needs one, for its syncs; nothing was stored: raise the "
                    "limit of processes (ulimit -u), then call it again",
                ) from error
            self._thread = thread
        try:
            self._due[work] = time.monotonic() + seconds
        finally:  # also after an interrupt in between: else it sleeps
            self._ends.put(False)

    def stop(self) -> None:
        """Tell the thread to end."""
        self._ends.put(True)

    def join(self) -> None:
        """Wait until it has ended. The caller holds no lock that its work takes."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _run(target: weakref.ref[T], due: Due[T], ends: queue.SimpleQueue[bool]) -> None:
    while True:
        first = min(list(due.values()), default=None)
        wait_s = None if first is None else min(max(0.0, first - time.monotonic()), threading.TIMEOUT_MAX)
        with contextlib.suppress(queue.Empty):
            if ends.get(timeout=wait_s):
                ends.put(True)  # for a second thread, started after an interrupt of the first start
                return
        for work, at in list(due.items()):
            if at <= time.monotonic() and due.pop(work, None) is not None and not _do(work, target):
                return


def _do(work: Callable[[T], None], target: weakref.ref[T]) -> bool:
    """Do the work on the target; tell whether it still exists."""
    alive = target()
    if alive is None:
        return False
    try:
        work(alive)
    except Exception:
        log.exception("the work in the background failed")
    return True
