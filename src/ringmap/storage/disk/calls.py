"""Calls: one at a time in a thread, so that no call meets the middle of another one.

    thread     write_episode ....................... end -> close()
                      ^     mark stands     ^
    handler           sample(): RoleError   close(): noted

A signal handler, a finalizer and the garbage collector run in the middle of whatever their thread does. While a call of
ours is under way its thread has a mark, and another call in that thread is refused, of any buffer: so locks need not be
reentrant, and nobody waits for a lock that the own thread holds. `close` and `flush` are noted instead, and done by the
call under way when it ends: a job that is preempted closes its buffer in a handler.

Code that we call (a sampler, a hook, an iterable) is not nested. The mark stands only while our own code runs.

Invariants: a mark is set and cleared by one frame, in `try` and `finally`; a forked child begins without one.
Not here: which calls these are, and locks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from ringmap.errors import ClosedError, RoleError

__all__ = ["Turn", "become_child", "end_noted", "lifted", "marked", "nested", "note_nested", "refuse_nested", "thread"]

Result = TypeVar("Result")


class _Thread(threading.local):
    """What is known of the calls of this thread."""

    def __init__(self) -> None:
        self.inside = False
        """The mark of a call that writes, syncs or closes: set and cleared in the frame that takes the locks."""
        self.searching = threading.Lock()
        """The mark of a search: `with thread.searching, handle.lock:`. A lock of this thread alone, since entering and
        leaving it is one step of the interpreter."""
        self.samplers: tuple[object, ...] = ()
        """Those that are in the middle of a draw: each knows that draw only."""
        self.noted: list[Callable[[], object]] = []
        """What is done when the call under way ends."""
        self.ends = False
        """Whether what was noted is being done."""

    @property
    def is_marked(self) -> bool:
        """Whether a call of this thread is under way."""
        return self.inside or self.searching.locked()


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
    if thread.inside or thread.searching.locked():
        raise nested(where)
    if thread.noted:
        end_noted()


def note_nested(call: Callable[[], object]) -> bool:
    """Note a call for later if a call of this thread is under way; tell whether."""
    if not thread.is_marked:
        return False
    thread.noted.append(call)
    return True


def end_noted() -> None:
    """Do what was noted while a call was under way. The caller has cleared the mark.

    What is interrupted stays noted, for the next call or the end of the process; what fails does not.
    """
    noted = thread.noted
    if thread.ends:  # by a call that was noted, when it ends
        return
    try:
        thread.ends = True
        while noted and not thread.is_marked:
            try:
                noted[0]()
            except ClosedError:  # a flush, of what is closed and flushed by now
                pass
            except Exception:
                del noted[:1]
                raise
            del noted[:1]
    finally:
        thread.ends = False


def marked(where: str, work: Callable[[], Result]) -> Result:
    """Do work under the mark of this thread. Raises what `refuse_nested` does."""
    refuse_nested(where)
    try:
        thread.inside = True
        return work()
    finally:
        thread.inside = False
        if thread.noted:
            end_noted()


def lifted(work: Callable[[], Result]) -> Result:
    """Do work without marks, which stand again afterwards: it is not ours, or of an object that nobody uses."""
    inside, searching, noted = thread.inside, thread.searching, thread.noted
    try:
        thread.inside, thread.searching = False, threading.Lock()
        thread.noted = []  # what was noted before waits for the call that it was noted for, which holds its locks
        return work()
    finally:
        noted.extend(thread.noted)
        thread.inside, thread.searching, thread.noted = inside, searching, noted


class Turn:
    """One at a time of calls that are made of other calls of ours, which have the marks: a thread waits for another
    one, and is refused in the middle of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        _turns.add(self)

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return type(self), ()  # a copy is of other calls

    @property
    def is_here(self) -> bool:
        """Whether this thread is in the middle of such a call."""
        return self._owner == threading.get_ident()

    def take(self, where: str, work: Callable[[], Result]) -> Result:
        """Do work while no other thread does.

        Raises:
            RoleError: a call of this thread is under way.
        """
        me = threading.get_ident()
        if thread.inside or thread.searching.locked() or self._owner == me:
            raise nested(where)
        with self._lock:
            try:
                self._owner = me
                return work()
            finally:
                self._owner = 0

    def become_child(self) -> None:
        """Forget the calls of the parent's other threads, which do not exist here."""
        self._lock = threading.Lock()
        if not self.is_here:
            self._owner = 0


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


def become_child() -> None:
    """Begin without marks, and without the calls of the parent's other threads; for the hook of process.py."""
    thread.inside, thread.searching, thread.samplers, thread.ends = False, threading.Lock(), (), False
    thread.noted.clear()
    for turn in list(_turns):
        turn.become_child()
