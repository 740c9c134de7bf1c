"""Removes a ring that nobody writes any more.

    its writer's lock -> rename to removed/ -> delete

Invariants: a ring whose lock another process holds stays; the rename takes it from all readers and writers at once, so
that a kill in the middle leaves no half of a ring at its place.
Not here: what readers do without a ring (rings.py).
"""

from __future__ import annotations

import contextlib
import os
import time

from ringmap.buffers.rings import Ring
from ringmap.errors import LockedError
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import Paths
from ringmap.storage.disk.system import clear_errors

__all__ = ["REMOVED", "idle_s", "remove_ring"]

REMOVED = "removed"
"""The folder beside the rings, in which one is deleted."""


def idle_s(ring: Ring) -> float | None:
    """Return how many seconds ago a ring last stored a record, or was made; None if it is gone."""
    try:
        return max(0.0, time.time() - os.stat(ring.source.paths.table).st_mtime)
    except OSError:
        return None


def remove_ring(folder: str, where: str) -> None:
    """Remove the directory of a ring.

    Raises:
        LockedError: a process writes it. Nothing was changed.
        EnvironmentFault: the disk fails, or does not allow it.
    """
    disk = Disk()
    beside = os.path.join(os.path.dirname(folder), REMOVED)
    target = os.path.join(beside, os.path.basename(folder))
    lock = WriterLock(disk, Paths(folder).lock, folder)
    with clear_errors(where, folder):
        try:
            lock.acquire()
        except LockedError:
            raise LockedError(
                f"{where}: {folder} is written by {describe(holder_of(lock.path))}; a ring is removed once nobody "
                "writes it"
            ) from None
        try:
            make_folder(disk, beside)
            disk.discard(target)  # of a call that was killed
            disk.rename(folder, target)
            disk.sync_folder(os.path.dirname(folder))
        finally:
            lock.release()
        disk.discard(Paths(target).manifest)  # from here on nothing takes it for a ring
        disk.discard(target)
        with contextlib.suppress(OSError):  # another process is deleting one there
            if not disk.names(beside):
                disk.discard(beside)
