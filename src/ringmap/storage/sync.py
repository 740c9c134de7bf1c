"""The background sync: what is committed reaches the disk itself every so many seconds.

A daemon thread per open buffer. It holds no strong reference, so that a buffer that goes
out of use ends its thread.
Not here: what a sync does (store.py).
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

__all__ = ["BackgroundSync"]

log = logging.getLogger("ringmap")


class Syncable(Protocol):
    """What can be synced behind its user's back."""

    def sync_in_background(self) -> None:
        """Sync, without keeping the writer waiting."""
        ...


class BackgroundSync:
    """Call `target.sync_in_background()` every `every_s` seconds (of the monotonic clock) until stopped."""

    def __init__(self, target: Syncable, every_s: float) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(target), self._stop, every_s),
            name="ringmap-sync",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, waiting for a sync under way."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _run(target: weakref.ref[Syncable], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        alive = target()
        if alive is None:
            return
        try:
            alive.sync_in_background()
        except Exception:
            log.exception("the background sync failed")
        del alive
