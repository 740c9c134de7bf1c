"""The keeper of a node's folder: an actor that holds its lock while a collection runs, and counts its rings under their
locks.

    /data/replay/a/collect/lock          held from the first call to its end
    /data/replay/a/collect/nodes.json    the folders that hold rings of the collection, on all nodes
    /data/replay/a/collector-3           held from `take` to `release`

Invariants: `nodes.json` is replaced whole.
Not here: what the counts of all nodes say together (census.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmap.collection.job import Job
from ringmap.collection.rings import FOLDER, alone, finished_at, held
from ringmap.errors import CorruptError, LockedError
from ringmap.ray.cluster import Node, pinned_to
from ringmap.storage.disk.files import Disk
from ringmap.world.progress import Progress

__all__ = ["Count", "Keeper", "count_at", "keeper_on"]

_NODES = "nodes.json"
_MOST_NBYTES = 1 << 24
_PAUSE_S = 0.1


@dataclass(slots=True)
class Count:
    """What a keeper found. `progress`: of each ring that has a part; `nodes`: folder -> node, as noted at this node so
    far."""

    progress: dict[str, Progress]
    nodes: dict[str, str]


class Keeper:
    """Keeps the folder of one node.

    Args:
        folder: of the node.
        job: whose collection it is.
    """

    def __init__(self, folder: str, job: Job) -> None:
        self._folder, self._job = os.path.join(folder, FOLDER), job
        self._is_held = False
        self._lock = contextlib.ExitStack()
        self._rings = contextlib.ExitStack()

    def _hold(self) -> None:
        """Take the lock of the folder, in the first call after a start.

        Raises:
            LockedError: another call collects here, for all of `job.wait_s`.
            EnvironmentFault: the disk refuses it.
        """
        until = time.monotonic() + self._job.wait_s
        while not self._is_held:  # one whose driver was killed ends soon
            try:
                self._lock.enter_context(alone(self._folder, self._job.where))
                self._is_held = True
            except LockedError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_PAUSE_S)

    def take(self, rings: Sequence[str], patterns: Sequence[str]) -> Count:
        """Take the locks of rings, and return what they hold.

        Raises:
            LockedError: another call collects here, or another process writes a ring.
            InputError, DamageError: as `ringmap.collection.rings.finished_below`.
        """
        self._hold()
        self.release()
        progress = self._rings.enter_context(held(rings, self._job.collection, self._job.wait_s))
        nodes: dict[str, str] = {}
        for folder in [found for pattern in patterns for found in Disk().matching(pattern)]:
            nodes |= _noted_in(os.path.join(folder, FOLDER, _NODES))
        return Count(progress, nodes)

    def release(self) -> None:
        """Let go of the rings."""
        self._rings.close()

    def note(self, nodes: Mapping[str, str]) -> None:
        """Note which folders hold rings, so that it is known while their nodes are away."""
        self._hold()
        data = json.dumps(dict(nodes), sort_keys=True, indent=1).encode()
        Disk().replace_file(os.path.join(self._folder, _NODES), data)


def _noted_in(path: str) -> dict[str, str]:
    disk = Disk()
    if not disk.exists(path):
        return {}
    try:
        found = json.loads(disk.read_file(path, _MOST_NBYTES))
        if not all(isinstance(name, str) for name in found.values()):
            raise ValueError("a node's name is no text")
    except (ValueError, AttributeError) as error:
        raise CorruptError(
            f"{path}: does not list the nodes of a collection: {error}; remove it if no node with rings is away"
        ) from error
    return dict(found)


def count_at(ring: str, job: Job) -> set[int] | None:
    """Return what a ring holds; None if its folder is not on this machine."""
    if not Disk().is_folder(os.path.dirname(ring)):
        return None
    return finished_at(ring, job.collection, job.wait_s)


def keeper_on(ray: Any, node: Node, folder: str, job: Job) -> Any:
    """Start a keeper on a node; return its handle. It ends with the process that has the handle."""
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Keeper)
    return actor.options(scheduling_strategy=pinned_to(node)).remote(folder, job)
