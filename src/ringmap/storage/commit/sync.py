"""Syncs: what makes commits durable, and the thread that does so every few seconds.

A daemon thread per open buffer and kind of work, started by its first commit. It holds no strong reference, so that a
buffer that is no longer referenced ends its thread. Where no thread can start (a limit on processes), commits do the
work: one that comes when it is due waits for it. While the interpreter ends, what is left is for the next writer.
Not here: which files are synced, in which order, and what a failed sync ends (files.py); when (store.py).
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from ringmap.storage.columns.rows import Rows
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.disk import calls
from ringmap.storage.disk.files import File
from ringmap.storage.read.handle import Handle
from ringmap.storage.records.state import State

__all__ = ["BackgroundSync", "Sync"]

log = logging.getLogger("ringmap")


T = TypeVar("T", bound=Handle)


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync of all that was committed up to a state, which is the mark afterwards.

    It is begun and ended with the writer's lock, and runs without it in the background. After one that failed nothing
    is known of what reached the disk: who runs it poisons the files.
    """

    files: CommitFiles
    upto: State
    rows: Rows | None
    beside: Sequence[Callable[[], None]]
    segments: Mapping[int, File]
    gone: list[str]

    @classmethod
    def begin(cls, files: CommitFiles, rows: Rows | None, beside: Sequence[Callable[[], None]]) -> Sync:
        """Note what was written by now. `beside`: syncs of sidecars, which come first."""
        return cls(files, files.state, rows, beside, files.segments.unsynced(), files.finished_streams_gone())

    def run(self) -> None:
        """Sync it all, the table last.

        Raises:
            OSError: a sync failed.
        """
        for sync in self.beside:
            sync()
        self.files.sync_all(self.rows, self.segments)

    def end(self) -> None:
        """Set the mark, unless a recovery came in between."""
        self.files.mark_synced(self.upto, self.segments, self.gone)


class BackgroundSync(Generic[T]):
    """Call `work(target)` every `every_s` seconds (of the monotonic clock) until stopped: a sync, or the commit of a
    group that no call has committed in time.

    Args:
        target: kept by a weak reference.
        every_s: seconds.
        work: a function of the target, which does not block its writer for long.
        name: of the thread.
    """

    def __init__(self, target: T, every_s: float, work: Callable[[T], None], name: str = "ringmap-sync") -> None:
        # A simple queue may be put to anywhere, also in the middle of a `get` of the same thread; an event may not.
        stop = self._stop = queue.SimpleQueue[None]()
        self._target = weakref.ref(target, lambda _: stop.put(None))
        self._every_s, self._work, self._name = every_s, work, name
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None
        self._due: float | None = None
        """The time at which a commit must do the work, where no thread could start."""

    def committed(self) -> None:
        """Record a commit, which stands: a failure here is not raised."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._due is not None:
            if time.monotonic() < self._due:
                return
            calls.thread.noted.append(partial(_do, self._work, self._target))  # the commit still has its locks
        if sys.is_finalizing():
            return  # a thread would end before it begins, and `start` wait for it for ever
        thread = self._thread = threading.Thread(
            target=_run, args=(self._work, self._target, self._stop, self._every_s), name=self._name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._without(error)

    def _without(self, error: RuntimeError) -> None:
        target = self._target()
        if self._due is None and target is not None:
            log.warning(
                "%s: no thread can start (%s): every %g s a commit syncs what is stored, and waits for it; after the "
                "last one call flush()",
                target.folder,
                error,
                self._every_s,
            )
        self._due = time.monotonic() + self._every_s

    def stop(self) -> None:
        """Tell the thread to end."""
        self._stop.put(None)

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


def _run(work: Callable[[T], None], target: weakref.ref[T], stop: queue.SimpleQueue[None], every_s: float) -> None:
    while True:
        try:
            stop.get(timeout=every_s)
        except queue.Empty:
            if not _do(work, target):
                return
        else:
            stop.put(None)  # for a second thread: after an interrupt `is_alive` may report that this one has ended
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
