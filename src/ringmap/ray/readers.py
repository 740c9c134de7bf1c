"""The readers of one learner: found, followed, lost and found again.

    every second    which nodes are alive      one call to Ray's head, in a thread; while it is away, the nodes that it
                                               named last
    4 in a second   a look of each reader
    a fault         the node counts as away until a look is answered; the others serve

Looks are sent while a learner draws.

Invariants: a node is drawn from by counts that were asked for less than a second ago; a fault of one node stops no
other. Not here: parts and batches (buffer.py), what a reader does (reader.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.errors import ClosedError, LockedError, NoClipsError, RingmapError
from ringmap.ray.cluster import Layout, Node, Roster, Scan, assign, copies, nodes_of, pinned_to, session_of
from ringmap.ray.reader import CALLS, PLAIN, Drawing, Reader, Report

__all__ = ["Readers", "Station", "first_line"]

log = logging.getLogger("ringmap")

_WHERE = "ringmap.ray.ReplayBuffer"
_NODES_S, _LOOK_S, _OLDEST_S = 1.0, 0.25, 1.0
_PAUSE_S = 0.02
_MOST_REQUESTS = 32


class Station:
    """A node, as a learner knows it."""

    def __init__(self, node: Node, actor: Any) -> None:
        self.node, self.actor = node, actor
        self.report: Report | None = None
        self.problem: str | None = None
        """Why it is away; None: it is not."""
        self.is_held = False
        """Whether it is away because another learner holds its priorities: its rings are not given to other nodes."""
        self.pending: Any = None
        self.asked_at = self.sent_at = 0.0
        """When the look was sent that was answered last, and when the last one was, in monotonic seconds."""

    def clips(self, request: bytes) -> int:
        """Return how many clips of a request it has, 0 while it is away."""
        return 0 if self.problem is not None or self.report is None else self.report.clips.get(request, 0)

    def share(self, request: bytes) -> float:
        """Return its chance against other nodes, not scaled."""
        return 0.0 if self.problem is not None or self.report is None else self.report.shares.get(request, 0.0)

    @property
    def state(self) -> str:
        """Why it has nothing to draw from, for a message."""
        if self.problem:
            return f"is away ({self.problem})"
        if self.report is None:
            return "has not answered yet"
        if not self.report.scan.folders:
            return "does not have the path"
        if not self.report.shards:
            return "".join(["reads no ring", *(f"; {f}: {why}" for f, why in self.report.scan.problems.items())])
        return "has no clips that are long enough"


class Readers:
    """Starts and follows the readers. `options`: of `ShardedReplayBuffer`; `patience_s`: for an answer; `drawing`: by
    priority, and where each node keeps them; `seed`: of all their draws."""

    def __init__(
        self,
        ray: Any,
        layout: Layout,
        options: Mapping[str, Any],
        patience_s: float,
        drawing: tuple[PrioritizedSampler, Layout] | None,
        seed: int | None,
    ) -> None:
        self._ray, self._layout, self._options = ray, layout, dict(options)
        self._drawing, self._seed, self._patience_s = drawing, seed, patience_s
        self.lock = threading.RLock()
        self.stations: dict[str, Station] = {}
        self._owners: dict[bytes, str] = {}
        self._roster: Roster = {}
        self._requests = [PLAIN]
        self._told: set[str] = set()
        self._session = session_of(ray)
        self._reader = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups=CALLS)(Reader)
        self._alive: list[Node] | None = None
        self._asking = threading.Thread()
        self._nodes_at = time.monotonic()
        self._take_nodes(nodes_of(ray))

    # -- following ----------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether Ray was shut down since, or started again."""
        return session_of(self._ray) != self._session

    def check(self, where: str) -> None:
        """Raise ClosedError if Ray was shut down."""
        if self.is_over:
            raise ClosedError(
                f"{where}: Ray was shut down, or started again, since it was opened; its readers have ended: open it "
                "again"
            )

    def follow(self) -> None:
        """Take in what was answered, and ask again what is due. About 0.2 ms."""
        now = time.monotonic()
        self.check(_WHERE)
        with self.lock:
            alive, self._alive = self._alive, None
            if alive is not None:
                self._take_nodes(alive)
            if now - self._nodes_at >= _NODES_S and not self._asking.is_alive():
                self._nodes_at = now
                # Not of a pool: the interpreter would wait for its threads at the end.
                self._asking = threading.Thread(target=self._ask_nodes, daemon=True)
                self._asking.start()
            pending = {s.pending: s for s in self.stations.values() if s.pending is not None}
            if pending:
                done, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0, fetch_local=True)
                for ref in done:
                    self._take_look(pending[ref])
                if done:
                    self._assign()
            for station in self.stations.values():
                if station.pending is None and now - station.sent_at >= _LOOK_S:
                    station.sent_at = now
                    folders = self._roster.get(station.node.id, ())
                    look = station.actor.look.options(concurrency_group="look")
                    station.pending = look.remote(self._layout.patterns, folders, list(self._requests))
                elif station.pending is not None and now - station.sent_at > self._patience_s:
                    self.lose(station, f"it has not answered for {self._patience_s:g} s")

    def _ask_nodes(self) -> None:
        """Ask Ray's head which nodes are alive; while it is away, no answer comes."""
        with contextlib.suppress(self._ray.exceptions.RayError, OSError):
            if not self.is_over:
                self._alive = nodes_of(self._ray)

    def _take_nodes(self, found: list[Node]) -> None:
        alive = {node.id: node for node in found}
        for gone in self.stations.keys() - alive.keys():
            station = self.stations.pop(gone)
            if station.report is not None and station.report.folders:
                log.warning("%s: node %s is gone; its clips are not drawn until it is back", _WHERE, station.node.name)
            self._ray.kill(station.actor)
        for node in alive.values():
            if node.id not in self.stations:
                self.stations[node.id] = Station(node, self._started_on(node))

    def _started_on(self, node: Node) -> Any:
        """Start the reader of a node, where Ray restarts it for ever. It ends with the process that has the handle."""
        drawing = None
        if self._drawing is not None:
            sampler, state = self._drawing
            drawing = Drawing(sampler.alpha, sampler.eps, state.folder(node))
        seed = None if self._seed is None else [self._seed, *node.name.encode()]
        return self._reader.options(scheduling_strategy=pinned_to(node)).remote(self._options, drawing, seed)

    def _take_look(self, station: Station) -> None:
        pending, station.pending = station.pending, None
        try:
            found: Report = self._ray.get(pending)
        except self._ray.exceptions.RayError as error:
            station.is_held = isinstance(getattr(error, "cause", None), LockedError)
            cause = getattr(error, "cause", None)
            self.lose(station, str(cause) if isinstance(cause, RingmapError) else first_line(error))
            return
        station.is_held = False
        station.asked_at, station.report = station.sent_at, found
        if station.problem is not None:
            log.warning("%s: node %s is back", _WHERE, station.node.name)
            station.problem = None
        problems = {**found.scan.problems, **{str(s.path): s.problem for s in found.shards if s.problem}}
        for folder, problem in problems.items():
            self._tell(f"node {station.node.name}: goes on without the ring {folder}: {problem}")

    def _assign(self) -> None:
        if any(not s.asked_at and s.problem is None for s in self.stations.values()):
            return  # or the first to answer would get the rings of all
        here = {key: s for key, s in self.stations.items() if s.problem is None or s.is_held}
        seen = {key: (s.node, Scan() if s.report is None else s.report.scan) for key, s in here.items()}
        self._roster, self._owners = assign(seen, self._layout, self._owners)
        for one, other in copies(seen):
            self._tell(
                f"{one.folder} on host {one.host} and {other.folder} on host {other.host} are the same ring (uuid "
                f"{one.uuid.hex()}), "
                "by a copy or a shared disk; it is read at one place. Copy rings with ReplayBuffer.snapshot"
            )
        for key, station in self.stations.items():
            opened = () if station.report is None else station.report.folders
            if self._roster.get(key, ()) != opened:  # at once: new rings join
                station.sent_at = min(station.sent_at, time.monotonic() - _NODES_S)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s: %s", _WHERE, text)

    def lose(self, station: Station, why: str) -> None:
        """Count a node as away until it answers a look."""
        with self.lock:
            if station.problem is None:
                log.warning(
                    "%s: the reader of node %s is away, and the others serve: %s", _WHERE, station.node.name, why
                )
            station.problem = why
            station.pending = None

    def empty(self, station: Station, request: bytes) -> None:
        """Draw no clips from a node that had none, until the next look."""
        with self.lock:
            if station.report is not None:
                station.report.shares[request] = 0.0

    def sizes(self) -> dict[tuple[int, int], str]:
        """Return the histories and strides of the rings that are open, and a node that has each."""
        reports = [(s.report, s.node.name) for s in self.stations.values() if s.report is not None]
        return {report.sizes: name for report, name in reports if report.sizes is not None}

    # -- what can be drawn from ---------------------------------------------------------------

    def of_ring(self, uuid: bytes) -> Station | None:
        """Return the node that reads a ring, None while it is away."""
        with self.lock:
            station = self.stations.get(self._owners.get(uuid, ""))
            return None if station is None or station.problem else station

    def shares(self, request: bytes, wait_s: float) -> dict[Station, float]:
        """Return the nodes that have clips of a request, with the chance of each, not scaled. Wait while a node is
        away, or no ring is there.
        """
        found: dict[Station, float] = {}

        def is_settled() -> bool:
            nonlocal found
            oldest = time.monotonic() - _OLDEST_S
            stations = self.stations
            here = [stations[i] for i in self._roster if i in stations and not stations[i].problem]
            if not here or any(s.asked_at < oldest for s in here):
                return False
            known = [s for s in here if s.report is not None and request in s.report.shares]
            known.sort(key=lambda s: s.node.name)  # in an order that a seed decides the draws with
            if len(known) < len(here):
                return False  # a look that counts is under way
            found = {s: share for s in known if (share := s.share(request))}
            is_waited_for = any(s.problem for s in stations.values())
            return bool(found) or not is_waited_for

        with self.lock:
            if self._drawing is not None:
                self._requests = list(dict.fromkeys((PLAIN, request)))  # masses are those of the last alone
            elif request not in self._requests:
                self._requests = [PLAIN, *self._requests[1:][-_MOST_REQUESTS:], request]
        self.wait(is_settled, wait_s)
        if not found:
            raise NoClipsError(f"{_WHERE}: {self.why_none()}")
        return found

    def wait(self, is_settled: Callable[[], bool], wait_s: float) -> bool:
        """Follow the nodes until something is so; tell whether it is."""
        until = time.monotonic() + wait_s
        while True:
            with self.lock:
                self.follow()
                if is_settled():
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE_S)

    def why_none(self) -> str:
        """Return, in words, why there is nothing to draw from."""
        with self.lock:
            states = sorted(f"node {s.node.name} {s.state}" for s in self.stations.values())
        return (
            f"no clips can be drawn from the rings below {self._layout.path}: {'; '.join(states)}; start a collector "
            "there, or wait longer (wait_s=)"
        )

    def close(self) -> None:
        """End the readers; those of a cluster that this process has left have ended."""
        with self.lock:
            stations, self.stations = self.stations, {}
            if not self.is_over:
                for station in stations.values():
                    self._ray.kill(station.actor)


def first_line(error: Exception) -> str:
    """Return what an error says, in a line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
