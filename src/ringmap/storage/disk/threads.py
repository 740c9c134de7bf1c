r"""Thread pools, where the system can start threads; and the helpers of this process, for work of less than a millisecond.

    begin(work) --> a helper takes it --> end: its result
            \---> no helper took it yet -> end: done by the caller

A busy machine may have no core for a helper: what it has not begun when the caller could go on, the caller does itself.
Not here: the work of the threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

__all__ = ["Begun", "begin", "mapped", "pool"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_helpers: ThreadPoolExecutor | None = None
_count = 0


def pool(count: int, name: str) -> ThreadPoolExecutor | None:
    """Return a pool with `count` running threads, or None if so many can't start (a limit on processes).

    All start at once: a pool starts its threads as work comes, and a job whose thread can't start stays in its queue.
    """
    made, go = ThreadPoolExecutor(count, name), threading.Event()
    try:
        for _ in range(count):
            made.submit(go.wait)
    except RuntimeError:
        made.shutdown(wait=False, cancel_futures=True)
        return None
    finally:
        go.set()
    return made


def mapped(
    work: Callable[[Item], Result], items: Iterable[Item], count: int, name: str
) -> Iterator[Result]:
    """Yield `work(item)` for each item in order, done by `count` threads, or by this thread if none can start."""
    threads = pool(count, name)
    if threads is None:
        yield from map(work, items)
        return
    with threads:
        yield from threads.map(work, items)


class Begun(Generic[Result]):
    """Work that a helper may have taken."""

    def __init__(self, work: Callable[[], Result], future: Future[Result] | None) -> None:
        self._work, self._future = work, future

    def end(self) -> Result:
        """Return the result, or raise its error; do the work here if no helper has taken it."""
        if self._future is None or self._future.cancel():
            return self._work()
        return self._future.result()

    def drop(self) -> None:
        """Return once no helper does the work any more: it uses memory of the caller."""
        if self._future is not None and not self._future.cancel():
            wait([self._future])


def begin(work: Callable[[], Result], helpers: int = 1) -> Begun[Result]:
    """Offer work to the helpers of this process, of which there are at least `helpers` then, if they can start.

    The caller calls `end`, or `drop`.
    """
    global _helpers, _count
    if _helpers is None or _count < helpers:
        grown = pool(helpers, "ringmap-helper")
        if grown is not None:
            _helpers, _count = grown, helpers
    try:
        return Begun(work, None if _helpers is None else _helpers.submit(work))
    except RuntimeError:  # the interpreter is about to end
        return Begun(work, None)


def _forget_after_fork() -> None:
    global _helpers, _count
    _helpers, _count = None, 0  # a child process has none of its parent's threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
