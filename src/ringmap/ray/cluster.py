"""The nodes of a Ray cluster by name, and the rings on each.

    path "/data/replay"           ->  /data/replay/{node}        rings of node a: /data/replay/a/collector-0, ...
    path "/data/{host}/replay"    ->  as it is

A node looks at the folders of every node's name, not of its own alone: a node that comes back under another name, or
beside another one on the same host, finds the rings that are there.

Invariants: nothing is changed; Ray is imported by the call that needs it.
Not here: who reads which ring (roster.py).
"""

from __future__ import annotations

import glob
import os
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ringmap.errors import ClosedError, InputError, RingmapError, RoleError
from ringmap.extras import require
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import Paths, local_path
from ringmap.storage.records.manifest import read_manifest

__all__ = [
    "Found",
    "Layout",
    "Lookout",
    "Node",
    "Scan",
    "Session",
    "answer",
    "nodes_of",
    "pinned_to",
    "ray_for",
    "rings_at",
]


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive. `id`: Ray's, another one after each start; `name`: `ray start --node-name`, else its
    address."""

    id: str
    name: str
    host: str


@dataclass(frozen=True, slots=True)
class Found:
    """A ring at a place. `home`: its folder without links; `host`: the machine."""

    uuid: bytes
    folder: str
    home: str
    host: str


@dataclass(slots=True)
class Scan:
    """What a node sees. `folders`: those that exist; `problems`: folder -> why it is not read."""

    rings: list[Found] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


def ray_for(where: str) -> Any:
    """Return the module `ray`.

    Args:
        where: the call that needs it.

    Raises:
        MissingExtraError: Ray is not installed.
        RoleError: this process is in no cluster.
    """
    require("ray", where)
    import ray

    if not ray.is_initialized():
        raise RoleError(
            f"{where}: Ray is not initialised in this process; call ray.init() on one machine, or ray.init('auto') on "
            "a cluster"
        )
    return ray


class Session:
    """The cluster that this process is in now, as long as it stays in it.

    Ray starts a new cluster for a call after `ray.shutdown()`, from any thread, and ends the process where an object of
    an earlier one is used. So what outlives a call asks this before the next one.

    Args:
        ray: the module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._id = self._now()

    def _now(self) -> tuple[str, str] | None:
        if not self._ray.is_initialized():
            return None
        context = self._ray.get_runtime_context()
        return context.get_node_id(), context.get_job_id()

    @property
    def is_over(self) -> bool:
        """Whether Ray was shut down since, or started again."""
        return self._now() != self._id

    def check(self, where: str) -> None:
        """Raise if it is over.

        Raises:
            ClosedError: it is.
        """
        if self.is_over:
            raise ClosedError(
                f"{where}: Ray was shut down, or started again, since it was opened; its readers have ended: open it "
                "again"
            )


def nodes_of(ray: Any) -> list[Node]:
    """Return the nodes that are alive, by name. One call to Ray's head, about a millisecond."""
    found = [
        Node(n["NodeID"], n["NodeName"].replace(os.sep, "_"), n["NodeManagerHostname"])
        for n in ray.nodes()
        if n["Alive"]
    ]
    return sorted(found, key=lambda node: (node.name, node.id))


class Lookout:
    """Asks Ray's head which nodes are alive, in a thread of its own: while the head is away, no answer comes.

    Args:
        ray: the module.
        session: whose nodes they are.
    """

    def __init__(self, ray: Any, session: Session) -> None:
        self._ray, self._session = ray, session
        self._answer: Future[list[Node]] | None = None

    def ask(self) -> None:
        """Ask, unless an answer is due."""
        if self._answer is None:
            self._answer = Future()
            # Not of a pool: the interpreter would wait for its threads at the end.
            threading.Thread(target=self._ask, args=(self._answer,), daemon=True).start()

    def _ask(self, answer: Future[list[Node]]) -> None:
        try:
            self._session.check("ringmap.ray")
            answer.set_result(nodes_of(self._ray))
        except Exception as error:
            answer.set_exception(error)

    def take(self) -> list[Node] | None:
        """Return the answer, once; None while there is none. Does not wait, and raises what asking raised."""
        if self._answer is None or not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        return answer.result()


def pinned_to(node: Node) -> Any:
    """Return the strategy of Ray that places a task or an actor on one node, and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.id, soft=False)


def answer(ray: Any, ref: Any, timeout_s: float | None = None) -> Any:
    """Wait for what a call returns.

    Raises:
        RingmapError: the call raised it, there.
        GetTimeoutError, RayError: Ray's own.
    """
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

    Raises:
        InputError: the path is none.

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
    """Return the rings that this machine has. One directory for each folder, and a small file for each ring.

    Raises:
        OSError: a folder can't be listed.
    """
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
                scan.rings.append(Found(uuid, ring, os.path.realpath(ring), host))
    return scan
