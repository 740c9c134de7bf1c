"""Background: a thread that does what is due for an open buffer: a sync every few seconds, the commit of an old group.

It is a daemon, started by the first commit. It holds no strong reference, so that a buffer that is no longer referenced
ends it. Where no thread can start (a limit on processes), commits do the work: one that comes when it is due waits for
it. While the interpreter ends, what is left is for the next writer.
Not here: what is done, and when it is due (store.py).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from ringmap.storage.disk import calls
from ringmap.storage.read.handle import Handle

__all__ = ["Background"]

log = logging.getLogger("ringmap")

T = TypeVar("T", bound=Handle)
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
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None

    def within(self, seconds: float, work: Callable[[T], None]) -> None:
        """Have work done within so many seconds. For a call that holds its locks: a failure is not raised."""
        has_thread = self._thread is not None and self._thread.is_alive()
        if work in self._due:
            if has_thread or time.monotonic() < self._due[work]:
                return
            calls.thread.noted.append(partial(_do, work, self._target))
        self._due[work] = time.monotonic() + seconds
        if has_thread:
            self._ends.put(False)
        elif not sys.is_finalizing():  # a thread would end before it begins, and `start` wait for it for ever
            is_first, args = self._thread is None, (self._target, self._due, self._ends)
            thread = self._thread = threading.Thread(target=_run, args=args, name="ringmap-background", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if is_first and (target := self._target()) is not None:
                    log.warning(
                        "%s: no thread can start (%s): every %g s a commit syncs what is stored, and waits for it; "
                        "after the last one call flush()",
                        target.folder,
                        error,
                        seconds,
                    )

    def stop(self) -> None:
        """Tell the thread to end."""
        self._ends.put(True)

    def join(self) -> None:
        """Wait until it has ended. It may be waiting for the locks of its target.

        A handler that interrupts such a wait does not wait: two nested waits of one thread for another
        may never end.
        """
        thread, me = self._thread, threading.get_ident()
        if thread is None or me in self._waiting or me == thread.ident:
            return
        self._waiting.add(me)
        try:
            if thread.is_alive():
                thread.join()
        finally:
            self._waiting.discard(me)


def _run(target: weakref.ref[T], due: Due[T], ends: queue.SimpleQueue[bool]) -> None:
    while True:
        first = min(list(due.values()), default=None)
        wait_s = None if first is None else min(max(0.0, first - time.monotonic()), threading.TIMEOUT_MAX)
        with contextlib.suppress(queue.Empty):
            if ends.get(timeout=wait_s):
                ends.put(True)  # for a second thread: after an interrupt `is_alive` may report that this one has ended
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
