"""Collectors as actors of Ray: where they are, what they say, how they end.

    start ──► Ray finds a place ──► the census admits its node ──► play (until the end)
                                                               └─► talk, talk, ... (one under way: answers back)

A collector plays in one thread of its actor, and `talk` is served by another: it returns at once when there is
something to hear.

Invariants: an actor is never started again by Ray, but by the supervisor, which counts its ring first.
Not here: what is played (ringmap.collection.collector), restarts and leases (ringmap.collection.supervisor).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringmap.collection.collector import Failed, Message, failure_of, limit_threads, play
from ringmap.collection.job import Job
from ringmap.collection.supervisor import Ending
from ringmap.ray.census import Census
from ringmap.ray.cluster import Layout, Node, answer, nodes_of

__all__ = ["Actors", "Collector"]

log = logging.getLogger("ringmap")

_TALK_S = 1.0
_PLACE_S = 20.0
_END_S = 10.0
_TAIL_LINES = 15


class Collector:
    """The actor. Its `send` and `recv` are the pipe of a collector."""

    def __init__(self, number: int, job: Job) -> None:
        self._number, self._job = number, job
        self._answers: queue.SimpleQueue[range | None] = queue.SimpleQueue()
        self._said: list[Message] = []
        self._is_over = False
        self._changed = threading.Condition()

    def place(self) -> str:
        """Return the id of its node."""
        import ray

        found: str = ray.get_runtime_context().get_node_id()
        return found

    def play(self, ring: str) -> None:
        """Play until there are no more seeds, or an error: it is said."""
        try:
            if self._job.threads is not None:
                limit_threads(self._job.threads)
            play(self._number, self._job, ring, self)
        except Exception as error:
            self.send(failure_of(error))
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def send(self, message: Message) -> None:
        """Say something, to whom talks next."""
        with self._changed:
            self._said.append(message)
            self._changed.notify_all()

    def recv(self) -> range | None:
        """Wait for an answer."""
        return self._answers.get()

    def talk(self, answers: Sequence[range | None]) -> list[Message]:
        """Take answers; return what it said, and wait a moment if it said nothing."""
        for one in answers:
            self._answers.put(one)
        with self._changed:
            self._changed.wait_for(lambda: self._said or self._is_over, _TALK_S)
            said, self._said = self._said, []
            return said


class Actors:
    """Starts collectors as actors. `options`: of Ray, for each."""

    def __init__(self, ray: Any, census: Census, layout: Layout, job: Job, options: Mapping[str, Any]) -> None:
        self._ray, self._census, self._layout, self._job = ray, census, layout, job
        self._options = {"num_cpus": 1, **options}
        self._told = False

    def start(self, number: int) -> _Actor:
        """Ask Ray for a collector: on the node where its ring lies if there is one, else anywhere."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        home = self._census.homes.get(f"collector-{number}")
        given: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
        if home is not None and any(home == node.id for node in nodes_of(self._ray)):
            given["scheduling_strategy"] = NodeAffinitySchedulingStrategy(home, soft=True)
        if self._job.threads is not None:
            given["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(self._job.threads)}}
        made = self._ray.remote(max_restarts=0, concurrency_groups={"talk": 1})(Collector)
        actor = made.options(**{**given, **self._options}).remote(number, self._job)
        return _Actor(self._ray, actor, number, self._census, self._layout)

    def wait(self, workers: Sequence[_Actor], timeout_s: float) -> None:
        """Wait until one of them says something or ends."""
        for worker in workers:
            worker.ask()
        refs = [ref for worker in workers for ref in worker.refs]
        if not refs:
            time.sleep(timeout_s)
            return
        self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for worker in workers:
            worker.take(set(ready))
        late = [str(w.number) for w in workers if w.node is None and time.monotonic() - w.since > _PLACE_S]
        if late and not self._told:
            self._told = True
            log.warning(
                "%s: Ray has no place yet for the collectors %s, and the others play: ask for fewer, or for less each "
                "(actor=)",
                self._job.where,
                ", ".join(late),
            )

    def stop(self, workers: Sequence[_Actor]) -> None:
        """End them by a kill: what is committed stays, and what is open is treated as after any kill."""
        for worker in workers:
            worker.close()
        refs = [worker.over for worker in workers if worker.over is not None]
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=_END_S)


class _Actor:
    """A collector that runs as an actor."""

    def __init__(self, ray: Any, actor: Any, number: int, census: Census, layout: Layout) -> None:
        self._ray, self._actor, self.number = ray, actor, number
        self._census, self._layout = census, layout
        self._ring = ""
        self.node: Node | None = None
        self.since = time.monotonic()
        self._place: Any = actor.place.remote()
        self.over: Any = None
        """The call that plays."""
        self._talk: Any = None
        self._answers: list[range | None] = []
        self._messages: list[Message] = []
        self._ending: Ending | None = None
        self._last = "(Ray's own logs have what it printed)"

    @property
    def refs(self) -> list[Any]:
        """What can be waited for."""
        return [ref for ref in (self._place, self.over, self._talk) if ref is not None]

    def ask(self) -> None:
        """Have a talk under way."""
        if self.over is not None and self._talk is None and self._ending is None:
            talk = self._actor.talk.options(concurrency_group="talk")
            self._talk, self._answers = talk.remote(self._answers), []

    def take(self, ready: set[Any]) -> None:
        """Take what has come."""
        try:
            if self._place in ready:
                place, self._place = self._place, None
                self._begin(answer(self._ray, place))
            is_over = self.over is not None and self.over in ready
            if self._talk is not None and (is_over or self._talk in ready):
                talk, self._talk = self._talk, None
                self._hear(answer(self._ray, talk, _END_S))
            if is_over:
                answer(self._ray, self.over)
                rest = self._actor.talk.options(concurrency_group="talk").remote([])
                self._hear(answer(self._ray, rest, _END_S))
                is_clean = not any(isinstance(m, Failed) for m in self._messages)
                self._ending = Ending("ended" if is_clean else "ended by an error", "", is_clean, None)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._last = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
            self._ending = Ending(f"was killed ({type(error).__name__})", "", False, None)

    def _begin(self, node_id: str) -> None:
        found = [node for node in nodes_of(self._ray) if node.id == node_id]
        if not found:
            self._ending = Ending("was placed on a node that is gone", "", False, None)
            return
        self.node = found[0]
        self._census.admit(self.node)
        ring = os.path.join(self._layout.folder(self.node), f"collector-{self.number}")
        self._census.homes[os.path.basename(ring)] = node_id
        self._ring = ring
        self.over = self._actor.play.remote(ring)
        self.ask()

    def _hear(self, messages: list[Message]) -> None:
        self._messages += messages
        for message in messages:
            if isinstance(message, Failed):
                lines = message.text.strip().splitlines()
                self._last = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])

    @property
    def place(self) -> str:
        """Where it is."""
        if self.node is None:
            return "it had no place yet"
        return f"its ring: {self._ring} on node {self.node.name}"

    def hear(self) -> list[Message]:
        """Return what it said since the last call."""
        found, self._messages = self._messages, []
        return found

    def say(self, answer: range | None) -> None:
        """Answer it, with the next talk."""
        self._answers.append(answer)

    def ending(self) -> Ending | None:
        """Return how it ended; None while it runs."""
        return self._ending

    def finished(self) -> set[int] | None:
        """Return what its ring holds; None while no node sees it."""
        return set() if self.node is None else self._census.finished_at(self._ring, self.node)

    def tail(self) -> str:
        """Return its last words."""
        return self._last

    def close(self) -> None:
        """Kill the actor."""
        self._ray.kill(self._actor)
