r"""Thread pools, where the system can start threads; and the helpers of this process, for work of less than a
millisecond.

    begin(work) --> a helper takes it --> end: its result
            \---> no helper took it yet -> end: done by the caller

A busy machine may have no core for a helper: what it has not begun when the caller could go on, the caller does itself.
What a helper reads from the disk counts as read by its caller: `disk_reads`.
Not here: the work of the threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["Begun", "begin", "disk_reads", "mapped", "pool"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_RUSAGE_THREAD = getattr(resource, "RUSAGE_THREAD", None)

_helpers: ThreadPoolExecutor | None = None
_count = 0
_growing = threading.Lock()
_read: dict[int, int] = {}
"""What helpers have read from the disk so far, by thread: each changes its own number."""


def thread_reads() -> int:
    """Return a number that grows when this thread reads from the disk; always 0 if the system does not tell."""
    if _RUSAGE_THREAD is None:
        return 0
    used = resource.getrusage(_RUSAGE_THREAD)
    return used.ru_inblock + used.ru_majflt


def disk_reads() -> int:
    """Return a number that grows when this thread, or a helper of this process, reads from the disk."""
    return thread_reads() + sum(tuple(_read.values()))


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


def mapped(work: Callable[[Item], Result], items: Iterable[Item], count: int, name: str) -> Iterator[Result]:
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
    if _helpers is None or _count < helpers:
        _grow(helpers)
    try:
        return Begun(work, None if _helpers is None else _helpers.submit(_counted, work))
    except RuntimeError:  # the interpreter is about to end, or another thread has just made a larger pool
        return Begun(work, None)


def _counted(work: Callable[[], Result]) -> Result:
    before, helper = thread_reads(), threading.get_ident()
    try:
        return work()
    finally:
        _read[helper] = _read.get(helper, 0) + thread_reads() - before


def _grow(helpers: int) -> None:
    """Replace the helpers by so many, unless another thread was faster; the old ones end once they have done what they
    took."""
    global _helpers, _count
    if not _growing.acquire(blocking=False):  # by another thread, or by the call that a finalizer interrupts
        return
    try:
        grown = None if _helpers is not None and _count >= helpers else pool(helpers, "ringmap-helper")
        if grown is None:
            return
        old, _helpers, _count = _helpers, grown, helpers
    finally:
        _growing.release()
    if old is not None:
        old.shutdown(wait=False)


def _forget_after_fork() -> None:
    global _helpers, _count, _growing
    _helpers, _count = None, 0  # a child process has none of its parent's threads
    _growing = threading.Lock()
    _read.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
