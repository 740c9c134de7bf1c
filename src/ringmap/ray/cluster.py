"""The nodes of a Ray cluster by name, the rings on each, and which node reads which ring.

    path "/data/replay"           ->  /data/replay/{node}        rings of node a: /data/replay/a/collector-0, ...
    path "/data/{host}/replay"    ->  as it is

    node a sees   ring 1 (/data/a/0)  ring 2 (/data/b/0)  ─►  a reads 1
    node b sees   ring 1 (/data/a/0)  ring 2 (/data/b/0)  ─►  b reads 2        two raylets on one host
    node c sees   ring 1, at another host                 ─►  a copy: named, and not read

A node looks at the folders of every node's name, not of its own alone: a node that comes back under another name, or
beside another one on the same host, finds the rings that are there.

Invariants: nothing is changed; Ray is imported by the call that needs it; a ring, known by its uuid, is read by at most
one node: the one in whose folder it lies, else the one that read it before.
"""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringmap.errors import DamageError, InputError, RingmapError, RoleError
from ringmap.extras import require
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import Paths, local_path
from ringmap.storage.records.manifest import read_manifest

__all__ = [
    "Layout",
    "Node",
    "Place",
    "Roster",
    "Scan",
    "answer",
    "assign",
    "copies",
    "nodes_of",
    "pinned_to",
    "ray_for",
    "rings_at",
    "scanned",
    "session_of",
]

Roster = dict[str, tuple[str, ...]]
"""Node id -> folders of the rings that it reads."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive. `id`: Ray's, another one after each start; `name`: `ray start --node-name`, else its
    address."""

    id: str
    name: str
    host: str


@dataclass(frozen=True, slots=True)
class Place:
    """A ring at a place. `home`: its folder without links; `host`: the machine."""

    uuid: bytes
    folder: str
    home: str
    host: str


@dataclass(slots=True)
class Scan:
    """What a node sees. `folders`: those that exist; `problems`: folder -> why it is not read."""

    rings: list[Place] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


def ray_for(where: str) -> Any:
    """Return the module `ray`."""
    require("ray", where)
    import ray

    if not ray.is_initialized():
        raise RoleError(
            f"{where}: Ray is not initialised in this process; call ray.init() on one machine, or ray.init('auto') on "
            "a cluster"
        )
    return ray


def session_of(ray: Any) -> tuple[str, str] | None:
    """Return which cluster this process is in; None: none.

    Ray starts a new cluster for a call after `ray.shutdown()`, from any thread, and ends the process where an object of
    an earlier one is used. So what outlives a call compares this before the next one.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def nodes_of(ray: Any) -> list[Node]:
    """Return the nodes that are alive, by name. One call to Ray's head, about a millisecond."""
    found = [
        Node(n["NodeID"], n["NodeName"].replace(os.sep, "_"), n["NodeManagerHostname"])
        for n in ray.nodes()
        if n["Alive"]
    ]
    return sorted(found, key=lambda node: (node.name, node.id))


def pinned_to(node: Node) -> Any:
    """Return the strategy of Ray that places a task or an actor on one node, and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.id, soft=False)


def answer(ray: Any, ref: Any, timeout_s: float | None = None) -> Any:
    """Wait for what a call returns; an error of ringmap's is raised as the call raised it, others as Ray's."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RingmapError):
            raise error.cause from error
        raise


class Layout:
    """Where the rings of each node lie.

    Args:
        path: a directory, the same on each node; with `{node}` or `{host}` in it a template, else `{node}` is below it.
        where: the call, for messages.

    Example:
        >>> Layout("/data/replay", "").folder(Node("1f", "a", "host-1"))
        '/data/replay/a'
        >>> Layout("/disks/{host}/replay", "").folder(Node("1f", "a", "host-1"))
        '/disks/host-1/replay'
    """

    def __init__(self, path: str | os.PathLike[str], where: str) -> None:
        try:
            text = local_path(path)
        except TypeError:
            raise InputError(f"{where}: path must be a directory, got {path!r:.80}") from None
        self.path = text
        self._is_template = "{node}" in text or "{host}" in text
        self._template = text if self._is_template else os.path.join(text, "{node}")

    def folder(self, node: Node) -> str:
        """Return the folder below which a node makes its rings."""
        return self._template.replace("{node}", node.name).replace("{host}", node.host)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The globs of all folders whose children may be rings."""
        escaped = glob.escape(self._template).replace("{node}", "*").replace("{host}", "*")
        return (escaped,) if self._is_template else (glob.escape(self.path), escaped)


def rings_at(patterns: tuple[str, ...]) -> Scan:
    """Return the rings that this machine has. One directory for each folder, and a small file for each ring."""
    disk, scan, host = Disk(), Scan(), socket.gethostname()
    unlisted = dict[str, OSError]()
    folders = [found for pattern in patterns for found in disk.matching(pattern, unlisted)]
    scan.problems.update({folder: str(error) for folder, error in unlisted.items()})
    for folder in folders:
        if not disk.is_folder(folder):
            continue
        scan.folders.append(folder)
        for name in sorted(disk.names(folder)):
            ring = os.path.join(folder, name)
            try:
                if not disk.exists(Paths(ring).manifest):
                    continue
                uuid = read_manifest(disk, ring).uuid
            except (RingmapError, OSError) as error:
                scan.problems[ring] = str(error)
            else:
                scan.rings.append(Place(uuid, ring, os.path.realpath(ring), host))
    return scan


def scanned(ray: Any, layout: Layout, where: str, patience_s: float, all_answer: bool) -> dict[str, tuple[Node, Scan]]:
    """Return what each node sees. `all_answer`: raise RayError for one that does not; else it is left out."""
    look = ray.remote(num_cpus=0, max_retries=0)(rings_at)
    asked = [
        (node, look.options(scheduling_strategy=pinned_to(node)).remote(layout.patterns)) for node in nodes_of(ray)
    ]
    seen: dict[str, tuple[Node, Scan]] = {}
    for node, ref in asked:
        try:
            seen[node.id] = node, answer(ray, ref, patience_s)
        except (ray.exceptions.RayError, TimeoutError):
            if all_answer:
                raise
    for node, scan in seen.values():
        for folder, problem in scan.problems.items():
            raise DamageError(f"{where}: node {node.name}: {folder}: {problem}")
    for one, other in copies(seen):
        raise InputError(
            f"{where}: {one.folder} on host {one.host} and {other.folder} on host {other.host} are the same ring, by a "
            "copy or a shared disk: its episodes would count twice; move one of them elsewhere"
        )
    return seen


def assign(
    seen: Mapping[str, tuple[Node, Scan]], layout: Layout, before: Mapping[bytes, str]
) -> tuple[Roster, dict[bytes, str]]:
    """Give each ring to one of the nodes that see it; return the folders of each node, and uuid -> node id.

    `seen`: node id -> the node, and what it sees; `before`: uuid -> the id of the node that read it so far. O(rings).
    """
    best: dict[bytes, tuple[tuple[bool, bool, str, str], str, str]] = {}
    for node, scan in seen.values():
        own = layout.folder(node)
        for ring in scan.rings:
            is_own = ring.folder.startswith(own + "/")
            rank = not is_own, before.get(ring.uuid) != node.id, node.name, node.id
            if ring.uuid not in best or rank < best[ring.uuid][0]:
                best[ring.uuid] = rank, node.id, ring.folder
    folders: dict[str, list[str]] = {}
    for _, node_id, folder in best.values():
        folders.setdefault(node_id, []).append(folder)
    roster = {node_id: tuple(sorted(paths)) for node_id, paths in folders.items()}
    return roster, {uuid: node_id for uuid, (_, node_id, _) in best.items()}


def copies(seen: Mapping[str, tuple[Node, Scan]]) -> list[tuple[Place, Place]]:
    """Return pairs of places that hold one ring: copies, or a disk that two hosts share. One place, seen twice, is
    none."""
    first: dict[bytes, Place] = {}
    found: dict[tuple[str, str], tuple[Place, Place]] = {}
    for _, scan in seen.values():
        for ring in scan.rings:
            other = first.setdefault(ring.uuid, ring)
            if (other.home, other.host) != (ring.home, ring.host):
                found[ring.home, ring.host] = other, ring
    return list(found.values())
