"""The rings below a directory, counted while nobody can write any of them.

    runs/replay/collector-0    lock  progress 0 ... 311   ┐
    runs/replay/collector-1    lock  progress 312 ... 560 ┼─► 0 ... 560 and 700 ... 702 are finished
    runs/replay/collector-7    lock  progress 700 ... 702 ┘   (of an earlier call, with more collectors)

Beside them is `collect/`: the lock of the collection, and logs.

Invariants: all locks are held at one moment; so no collector of a parent that was killed plays on.
Not here: which of the seeds are played by whom (seeds.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ringmap.buffers.replay import ReplayBuffer
from ringmap.collection.seeds import finished_in
from ringmap.errors import EnvironmentFault, LockedError
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import FINE, Paths
from ringmap.storage.disk.system import clear_errors
from ringmap.world.collecting import Collection, progress_of
from ringmap.world.progress import Progress

__all__ = ["FOLDER", "alone", "finished_at", "finished_below", "held", "patiently", "ring_of"]

T = TypeVar("T")

FOLDER, _LOCK = "collect", "lock"
_PAUSE_S = 0.02


def ring_of(path: str, number: int) -> str:
    """Return the directory of a collector's ring."""
    return os.path.join(path, f"collector-{number}")


def _rings_below(path: str, where: str) -> list[str]:
    """Return the directories of the rings that are children of a directory, in order; what links lead to, once."""
    disk = Disk()
    if not disk.is_folder(path):
        return []
    found = []
    for ring in [os.path.join(path, name) for name in sorted(disk.names(path)) if name not in FINE]:
        with clear_errors(where, ring, lambda: "so the seeds in it can't be counted"):
            if disk.exists(Paths(ring).manifest):
                found.append(os.path.realpath(ring))
    return list(dict.fromkeys(found))


def patiently(open_it: Callable[[], T], wait_s: float) -> T:
    """Open what takes a lock; if a process holds it, try for a while: one that was killed or orphaned ends soon."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return open_it()
        except LockedError:
            if time.monotonic() >= until:
                raise
            time.sleep(_PAUSE_S)


def finished_below(path: str, collection: Collection, wait_s: float, where: str) -> set[int]:
    """Return which episodes of a collection the rings below a directory hold together, while none of them is written.

    What a kill left of an episode is dropped, or counts, as the settings of its ring say (`interrupted`).

    Cost: O(episodes in the rings). All rings are open at once.
    """
    with held(_rings_below(path, where), collection, wait_s) as found:
        return finished_in(found, where)


@contextlib.contextmanager
def held(rings: Iterable[str], collection: Collection, wait_s: float) -> Iterator[dict[str, Progress]]:
    """Hold the locks of rings; yield the progress of those that have a part in a collection. See `finished_below`."""
    found: dict[str, Progress] = {}
    with contextlib.ExitStack() as stack:
        buffers = {ring: stack.enter_context(_opened(ring, wait_s)) for ring in rings}
        for ring, buffer in buffers.items():
            if (progress := progress_of(buffer, collection)) is not None:
                found[ring] = progress
        yield found


def finished_at(ring: str, collection: Collection, wait_s: float) -> set[int]:
    """Return which episodes of a collection one ring holds, none if it was not made yet; see `finished_below`."""
    if not Disk().exists(Paths(ring).manifest):
        return set()
    with _opened(ring, wait_s) as buffer:
        progress = progress_of(buffer, collection)
    return set() if progress is None else progress.finished()


def _opened(ring: str, wait_s: float) -> ReplayBuffer:
    return patiently(lambda: ReplayBuffer.open(ring, mode="r+"), wait_s)


@contextlib.contextmanager
def alone(folder: str, where: str) -> Iterator[None]:
    """Hold the lock of a collection."""
    disk = Disk()
    with clear_errors(where, folder):
        make_folder(disk, folder)
    if disk.system.is_network(folder):
        raise EnvironmentFault(
            f"{where}: {folder} lies on a network file system, where locks and maps of other hosts are not ours; put "
            "the rings on a local disk"
        )
    lock = WriterLock(disk, os.path.join(folder, _LOCK), folder)
    try:
        lock.acquire()
    except LockedError:
        raise LockedError(
            f"{where}: {describe(holder_of(lock.path))} is collecting here already; wait for it, or choose another path"
        ) from None
    try:
        yield
    finally:
        lock.release()
