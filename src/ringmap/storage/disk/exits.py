"""The end of a process: an object of this process may do what nobody would do after it.

    return, exception, sys.exit            atexit
    a child of multiprocessing             its own finalizers: it calls no function of atexit
    os._exit, a signal that kills          nothing: as any kill
    a fork's copy                          nothing: the objects are its parent's

Invariants: an object is called in the process that named it, once; what it raises is said, and the others are called.
Not here: what they do (buffers/engine.py).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from typing import Protocol

from ringmap.storage.disk.calls import end_noted

__all__ = ["before_exit"]

log = logging.getLogger("ringmap")

_LATE = -100
"""The priority of our finalizer in a child of multiprocessing: after its queues are flushed, and its own children are
joined."""


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

        util.Finalize(None, _end, exitpriority=_LATE)
    else:
        atexit.register(_end)


def _end() -> None:
    end_noted()
    for one in list(_named):
        try:
            one.end_process()
        except Exception:
            log.exception("what is left to do at the end of the process failed")
    _named.clear()


def _after_fork_in_child() -> None:
    global _is_watched
    _named.clear()
    _is_watched = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
