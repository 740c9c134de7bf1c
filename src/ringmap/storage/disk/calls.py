"""Calls: one at a time in a thread, so that no call meets the middle of another one.

    thread     write_episode ....................... end -> close()
                      ^     mark stands     ^
    handler           sample(): RoleError   close(): noted

A signal handler, a finalizer and the garbage collector run in the middle of whatever their thread does. While a call of
ours is under way its thread has a mark, and another call in that thread is refused: so locks need not be reentrant, and
nobody waits for a lock that the own thread holds. `close` and `flush` are noted instead, and done by the call under way
when it ends: a job that is preempted closes its buffer in a handler.

Code that we call (a sampler, a hook, an iterable) is not nested. The mark stands only while our own code runs.

Invariants: a mark is set and cleared by one frame, in `try` and `finally`; a forked child begins without one.
Not here: which calls these are, and locks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from ringmap.errors import RoleError

__all__ = ["end_noted", "lifted", "nested", "refuse_nested", "thread"]

Result = TypeVar("Result")


class _Thread(threading.local):
    """What is known of the calls of this thread."""

    def __init__(self) -> None:
        self.inside = False
        """The mark: whether a call is under way."""
        self.noted: list[Callable[[], object]] = []
        """What is done when it ends."""


thread = _Thread()


def nested(where: str) -> RoleError:
    """Return the error of a call inside another one."""
    return RoleError(
        f"{where}: called in the middle of another call of the same thread (from a signal handler or a finalizer); set "
        "a flag there, and call it when that call has returned"
    )


def refuse_nested(where: str) -> None:
    """Raise RoleError if a call of this thread is under way.

    After it has passed, none is: a handler that comes from now on returns first.
    """
    if thread.inside:
        raise nested(where)


def end_noted() -> None:
    """Do what was noted while a call was under way. The caller has cleared the mark."""
    noted = thread.noted
    while noted and not thread.inside:
        noted.pop(0)()


def lifted(work: Callable[[], Result]) -> Result:
    """Do work without the mark, which stands again afterwards: it is not ours, or of an object that nobody uses."""
    inside = thread.inside
    try:
        thread.inside = False
        return work()
    finally:
        thread.inside = inside


def _after_fork_in_child() -> None:
    thread.inside = False
    thread.noted.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
