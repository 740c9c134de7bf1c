"""A process: what its fork, its end and its threads mean, each in one place.

    fork     thread A of the parent draws: NumPy holds the generator's lock.   thread B forks.
             In the child that lock is held, and A does not exist to release it
    end      return, exception, sys.exit     atexit
             a child of multiprocessing      its own finalizers: it calls no function of atexit
             os._exit, a signal that kills   nothing: as any kill
             a fork's copy                   nothing: the objects are its parent's
    threads  may not start, as under a limit on processes: then the work is done by the caller

Before a fork every `Forkable` object may store what the child will look for. In a child, each gets new generators in
the states of the old ones, and new locks. What a helper has not begun when the caller could go on, the caller does
itself. What a helper reads from the disk counts as read by its caller.

Invariants: attributes that shared a generator before the fork share one after it; `end_process` of an object is called
once, in the process that named it, and what it raises is logged; nothing here that a finalizer can reach waits for a
lock.
Not here: what they do.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from ringmap.storage.disk import calls

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["Begun", "Forkable", "Renew", "before_exit", "begin", "disk_reads", "mapped", "pool"]

Item = TypeVar("Item")
Result = TypeVar("Result")
Renew = Callable[[np.random.Generator], np.random.Generator]

log = logging.getLogger("ringmap")

# -- forks ---------------------------------------------------------------------------------------


class Forkable:
    """Base class for objects with generators as attributes; a subclass with locks replaces them as well."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make an object that a fork finds: here, since copied and unpickled objects skip `__init__`."""
        made = super().__new__(cls)
        _made.add(made)
        return made

    def before_fork(self) -> None:
        """Do what a child relies on; called in the parent, in the thread that forks. May not raise."""

    def reset_after_fork(self, renewed: Renew) -> None:
        """Replace each generator by what `renewed` returns for it; called in a child, right after the fork."""
        for name, value in list(vars(self).items()):
            if isinstance(value, np.random.Generator):
                vars(self)[name] = renewed(value)


_made: weakref.WeakSet[Forkable] = weakref.WeakSet()


# -- the end -------------------------------------------------------------------------------------


class _Ends(Protocol):
    def end_process(self) -> None:
        """Do what nobody would do after this process."""


_named: weakref.WeakSet[_Ends] = weakref.WeakSet()
_is_watched = False


def before_exit(one: _Ends) -> None:
    """Let `one.end_process()` be called before this process ends by itself, if it still exists then."""
    global _is_watched
    _named.add(one)
    if _is_watched:
        return
    _is_watched = True
    process = sys.modules.get("multiprocessing.process")  # loaded in each of its children
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(None, _end, exitpriority=-100)  # after its queues are flushed, and its children are joined
    else:
        atexit.register(_end)


def _end() -> None:
    calls.end_noted()
    for one in list(_named):
        try:
            one.end_process()
        except Exception:
            log.exception("what is left to do at the end of the process failed")
    _named.clear()


# -- threads -------------------------------------------------------------------------------------

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
    """Return a pool with `count` running threads, or None if so many can't start (a limit on processes). A pool that
    starts them as work comes keeps a job whose thread can't start in its queue."""
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
    """Offer work to the helpers of this process, of which there are at least `helpers` then, if they can start. The
    caller calls `end`, or `drop`."""
    if _count < helpers:
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
        grown = pool(helpers, "ringmap-helper") if _count < helpers else None
        if grown is None:
            return
        old, _helpers, _count = _helpers, grown, helpers
    finally:
        _growing.release()
    if old is not None:
        old.shutdown(wait=False)


def _before_fork() -> None:
    for made in list(_made):
        made.before_fork()


def _after_fork_in_child() -> None:
    global _is_watched, _helpers, _count, _growing
    calls.become_child()
    _named.clear()
    _is_watched = False
    _helpers, _count, _growing = None, 0, threading.Lock()  # a child has none of its parent's threads
    _read.clear()
    known: dict[np.random.Generator, np.random.Generator] = {}

    def renewed(old: np.random.Generator) -> np.random.Generator:
        if old not in known:
            bits = type(old.bit_generator)()
            bits.state = old.bit_generator.state  # takes no lock, as any method of `old` would
            known[old] = np.random.Generator(bits)
        return known[old]

    for made in list(_made):
        made.reset_after_fork(renewed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
