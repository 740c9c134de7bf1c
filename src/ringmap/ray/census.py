"""Which seeds of a collection the rings of all nodes hold, counted while none of them can be written.

    a   rings of a, locked   0 ... 311        ┐
    b   rings of b, locked   312 ... 560      ┼─► 0 ... 560 are finished
    c   away, and noted at a and b            ─► wait for it, then refuse: its seeds would be played twice

    /data/replay/a/collect/lock          held by the keeper of a, an actor, from its first call to its end
    /data/replay/a/collect/nodes.json    the folders that hold rings of the collection, on all nodes
    /data/replay/a/collector-3           held from `take` to `release`

Before a collector plays on a node for the first time, the node's folder is noted at all nodes.

Invariants: all locks are held at one moment; a ring counts once, by its uuid; a noted folder that no node sees stops
the count; `nodes.json` is replaced whole.
Not here: who plays what (ringmap.collection.seeds).
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ringmap.collection.job import Job
from ringmap.collection.rings import FOLDER, alone, finished_at, held, patiently
from ringmap.collection.seeds import finished_in
from ringmap.errors import CorruptError, EnvironmentFault, InputError
from ringmap.ray.cluster import Layout, Node, Scan, answer, assign, nodes_of, pinned_to, rings_at, scanned
from ringmap.storage.disk.files import Disk
from ringmap.world.progress import Progress

__all__ = ["Census", "Keeper"]

_NODES = "nodes.json"
_MOST_NBYTES = 1 << 24
_PAUSE_S = 0.5
_PATIENCE_S = 30.0


@dataclass(slots=True)
class Count:
    """What a keeper found. `progress`: of each ring that has a part; `nodes`: folder -> node, as noted at this node so
    far."""

    progress: dict[str, Progress]
    nodes: dict[str, str]


class Keeper:
    """Keeps the folder of one node: an actor that holds its lock, and counts its rings under theirs."""

    def __init__(self, folder: str, job: Job) -> None:
        self._folder, self._job = os.path.join(folder, FOLDER), job
        self._is_held = False
        self._lock = contextlib.ExitStack()
        self._rings = contextlib.ExitStack()

    def _hold(self) -> None:
        """Take the lock of the folder, in the first call after a start: a driver that was killed ends soon."""
        if not self._is_held:
            patiently(lambda: self._lock.enter_context(alone(self._folder, self._job.where)), self._job.wait_s)
            self._is_held = True

    def take(self, rings: Sequence[str], patterns: Sequence[str]) -> Count:
        """Take the locks of rings, and return what they hold; raises as `finished_below` of ringmap.collection."""
        self._hold()
        self.release()
        progress = self._rings.enter_context(held(rings, self._job.collection, self._job.wait_s))
        nodes: dict[str, str] = {}
        for folder in [path for pattern in patterns for path in Disk().matching(pattern)]:
            nodes |= _noted_in(os.path.join(folder, FOLDER, _NODES))
        return Count(progress, nodes)

    def holds_episodes(self) -> bool:
        """Whether the rings of the folder hold episodes of the collection."""
        scan = rings_at((glob.escape(os.path.dirname(self._folder)),))
        count = self.take([ring.folder for ring in scan.rings], ())
        self.release()
        return any(len(progress) for progress in count.progress.values())

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
        nodes = json.loads(disk.read_file(path, _MOST_NBYTES))
        if not all(isinstance(name, str) for name in nodes.values()):
            raise ValueError("a node's name is no text")
    except (ValueError, AttributeError) as error:
        raise CorruptError(
            f"{path}: does not list the nodes of a collection: {error}; remove it if no node with rings is away"
        ) from error
    return dict(nodes)


def _count_at(ring: str, job: Job) -> set[int] | None:
    """Return what a ring holds; None if its folder is not on this machine."""
    if not Disk().is_folder(os.path.dirname(ring)):
        return None
    return finished_at(ring, job.collection, job.wait_s)


class Census:
    """Counts, and keeps the folders of nodes until it is closed. `lost`: names of nodes whose rings are gone."""

    def __init__(self, ray: Any, layout: Layout, job: Job, lost: Iterable[str]) -> None:
        self._ray, self._layout, self._job, self._lost = ray, layout, job, frozenset(lost)
        self._counter = ray.remote(num_cpus=0, max_retries=0)(_count_at)
        self._keepers: dict[tuple[str, str], tuple[str, Any]] = {}
        """Folder and host -> the node where its keeper is, and the keeper."""
        self._nodes: dict[str, str] = {}
        self._noted: dict[str, str] = {}
        self._noted_by: list[Any] = []
        self.homes: dict[str, str] = {}
        """The name of a ring's directory -> the id of a node that has one."""

    def count(self) -> set[int]:
        """Return which episodes are finished. Raises as `ringmap.ray.collect` does."""
        until = time.monotonic() + self._job.wait_s
        while True:
            seen = scanned(self._ray, self._layout, self._job.where, _PATIENCE_S, all_answer=False)
            counts = self._counted(seen)
            nodes = {folder: name for count in counts for folder, name in count.nodes.items()}
            there = {folder for _, scan in seen.values() for folder in scan.folders}
            away = {f: n for f, n in nodes.items() if f not in there and n not in self._lost}
            if not away:
                break
            self._release()
            if time.monotonic() >= until:
                places = ", ".join(f"{folder} of node {name}" for folder, name in away.items())
                raise EnvironmentFault(
                    f"{self._job.where}: these folders hold rings of this collection, and no node that is alive sees "
                    f"them: {places}. Their seeds can't be counted: start the node again, or, if its disk is gone, "
                    "pass its name in lost= to play them again"
                )
            time.sleep(_PAUSE_S)
        progress: dict[str, Progress] = {}
        for count in counts:
            progress |= count.progress
        finished = finished_in(progress, self._job.where)
        self._release()
        for ring in progress:
            nodes.setdefault(os.path.dirname(ring), os.path.basename(os.path.dirname(ring)))
        self._nodes = {folder: name for folder, name in nodes.items() if folder in there}
        return finished

    def _counted(self, seen: dict[str, tuple[Node, Scan]]) -> list[Count]:
        roster, _ = assign(seen, self._layout, {})
        rings: dict[tuple[str, str], list[str]] = {}
        for key, folders in roster.items():
            node = seen[key][0]
            self._keeper(node)
            rings.setdefault((self._layout.folder(node), node.host), []).extend(folders)
            self.homes |= {os.path.basename(folder): node.id for folder in folders}
        asked = [self._keepers[at][1].take.remote(folders, self._layout.patterns) for at, folders in rings.items()]
        return [answer(self._ray, ref) for ref in asked]

    def _keeper(self, node: Node) -> Any:
        folder = self._layout.folder(node)
        at = folder, node.host
        if at in self._keepers:
            home, keeper = self._keepers[at]
            if home == node.id or any(home == other.id for other in nodes_of(self._ray)):
                return keeper
            self._ray.kill(keeper)
        actor = self._ray.remote(num_cpus=0, max_restarts=-1)(Keeper)
        keeper = actor.options(scheduling_strategy=pinned_to(node)).remote(folder, self._job)
        self._keepers[at] = node.id, keeper
        return keeper

    def _release(self) -> None:
        for _, keeper in self._keepers.values():
            keeper.release.remote()

    def admit(self, node: Node) -> None:
        """Let collectors play on a node; an InputError if it joined since the count with episodes of this one."""
        keeper, folder = self._keeper(node), self._layout.folder(node)
        if folder not in self._nodes:
            if answer(self._ray, keeper.holds_episodes.remote(), _PATIENCE_S):
                raise InputError(
                    f"{self._job.where}: node {node.name} joined with rings that hold episodes of this collection; "
                    "call it again, and they are counted"
                )
            self._nodes[folder] = node.name
        if self._nodes == self._noted and keeper in self._noted_by:
            return
        self._noted, self._noted_by = dict(self._nodes), []
        for home, other in list(self._keepers.values()):
            try:
                answer(self._ray, other.note.remote(self._nodes))
            except self._ray.exceptions.RayError:
                if any(home == alive.id for alive in nodes_of(self._ray)):
                    raise
            else:
                self._noted_by.append(other)

    def finished_at(self, ring: str, node: Node) -> set[int] | None:
        """Return what a ring holds whose collector has ended; None while no node sees it."""
        for other in sorted(nodes_of(self._ray), key=lambda other: other.id != node.id):
            ref = self._counter.options(scheduling_strategy=pinned_to(other)).remote(ring, self._job)
            with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):  # the node is going away
                found: set[int] | None = answer(self._ray, ref, self._job.wait_s + _PATIENCE_S)
                if found is not None:
                    return found
        return None

    def close(self) -> None:
        """End the keepers."""
        for _, keeper in self._keepers.values():
            self._ray.kill(keeper)
        self._keepers = {}

    def __enter__(self) -> Census:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
