"""Removes rings that nobody writes any more.

    due        which, oldest last commit first          "idle_s", "steps", "nbytes"
    remove     its writer's lock -> rename to retired/ -> delete

Invariants: a ring whose lock another process holds stays; the rename takes it from all readers and writers at once, so
that a kill in the middle leaves no half of a ring at its place.
Not here: what readers do without a ring (rings.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringmap.arguments import positive_real
from ringmap.buffers.sharded.rings import Ring
from ringmap.errors import InputError, LockedError
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import Paths
from ringmap.storage.disk.system import clear_errors
from ringmap.storage.inspect.describe import nbytes_of

__all__ = ["RETIRED", "Retiring", "idle_s", "remove_ring"]

RETIRED = "retired"
"""The folder beside the rings, in which one is deleted."""

_LIMITS = ("idle_s", "steps", "nbytes")


def idle_s(ring: Ring) -> float | None:
    """Return how many seconds ago a ring last stored a record, or was made; None if it is gone."""
    try:
        return max(0.0, time.time() - os.stat(ring.source.paths.table).st_mtime)
    except OSError:
        return None


def remove_ring(folder: str, where: str, disk: Disk | None = None) -> None:
    """Remove the directory of a ring.

    Raises:
        LockedError: a process writes it. Nothing was changed.
        EnvironmentFault: the disk fails, or does not allow it.
    """
    disk = disk or Disk()
    beside = os.path.join(os.path.dirname(folder), RETIRED)
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


class Retiring:
    """Which rings are to be removed.

    Args:
        limits: "idle_s": seconds since the last commit; "steps": that came into other rings since; "nbytes": what all
            rings may take on the disk.

    Raises:
        InputError: another limit, or not a positive number.
    """

    def __init__(self, limits: Mapping[str, float]) -> None:
        where = "ShardedReplayBuffer"
        if not isinstance(limits, Mapping) or not limits or any(n not in _LIMITS for n in limits):
            raise InputError(
                f"{where}: retire_after must name limits, such as {{'idle_s': 3600}}, among {', '.join(_LIMITS)}, got "
                f"{limits!r}"
            )
        self.limits: dict[str, float] = {}
        for name, value in limits.items():
            limit = positive_real(where, f"retire_after[{name!r}]", value)
            self.limits[name] = int(limit) if limit.is_integer() else limit
        self._came = 0
        self._heads: dict[bytes, tuple[int, int]] = {}  # uuid -> head, and what had come when it changed

    def due(self, rings: Sequence[Ring]) -> list[Ring]:
        """Return the rings beyond a limit, oldest last commit first; those that a process writes are left out.

        Cost: a system call for each ring; with "nbytes" one for each of its files.
        """
        ages = {id(ring): age for ring in rings if (age := idle_s(ring)) is not None}
        for ring in rings:
            head = int(ring.source.head)
            known = self._heads.get(ring.uuid)
            self._came += 0 if known is None else max(0, head - known[0])
            if known is None or head != known[0]:
                self._heads[ring.uuid] = head, self._came
        oldest = sorted((r for r in rings if id(r) in ages), key=lambda ring: -ages[id(ring)])
        free = [ring for ring in oldest if not _is_locked(ring)]
        found = [ring for ring in free if self._is_beyond(ring, ages[id(ring)])]
        budget = self.limits.get("nbytes")
        if budget is not None:
            sizes = {id(ring): nbytes_of(ring.folder) for ring in oldest}
            taken = sum(sizes.values()) - sum(sizes[id(ring)] for ring in found)
            for ring in free:
                if taken > budget and ring not in found:
                    found.append(ring)
                    taken -= sizes[id(ring)]
        return found

    def _is_beyond(self, ring: Ring, age: float) -> bool:
        seconds, steps = self.limits.get("idle_s"), self.limits.get("steps")
        if seconds is not None and age > seconds:
            return True
        return steps is not None and self._came - self._heads[ring.uuid][1] > steps


def _is_locked(ring: Ring) -> Any:
    return Disk().system.is_locked(ring.source.paths.lock) is not False
