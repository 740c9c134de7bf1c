"""Collectors as actors of Ray: where they are, what they say, how they end.

    start ──► Ray finds a place ──► Placed ──► the census admits its node ──► it plays
    talk, talk, ...    one under way: what it says, and the answers

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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Placed:
    """I am on this node. The answer: the directory of my ring."""

    node: str


class Collector:
    """The actor. Its `send` and `recv` are the pipe of a collector."""

    def __init__(self, number: int, job: Job) -> None:
        self._number, self._job = number, job
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._said: list[Any] = []
        self._is_over = False
        self._changed = threading.Condition()

    def play(self) -> None:
        """Play until there are no more seeds, or an error: it is said."""
        import ray

        try:
            self.send(Placed(ray.get_runtime_context().get_node_id()))
            if self._job.threads is not None:
                limit_threads(self._job.threads)
            play(self._number, self._job, self.recv(), self)
        except Exception as error:
            self.send(failure_of(error))
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def send(self, message: Any) -> None:
        """Say something, to whom talks next."""
        with self._changed:
            self._said.append(message)
            self._changed.notify_all()

    def recv(self) -> Any:
        """Wait for an answer."""
        return self._answers.get()

    def talk(self, answers: Sequence[Any]) -> tuple[list[Any], bool]:
        """Take answers; return what it said, and whether that is all. Wait a moment if it said nothing."""
        for one in answers:
            self._answers.put(one)
        with self._changed:
            self._changed.wait_for(lambda: self._said or self._is_over, _TALK_S)
            said, self._said = self._said, []
            return said, self._is_over


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
        talks = {worker.ask(): worker for worker in workers if worker.ending() is None}
        if not talks:
            time.sleep(timeout_s)
            return
        self._ray.wait(list(talks), num_returns=1, timeout=timeout_s)
        ready, _ = self._ray.wait(list(talks), num_returns=len(talks), timeout=0)
        for talk in ready:
            talks[talk].take()
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
        if workers:
            self._ray.wait([worker.over for worker in workers], num_returns=len(workers), timeout=_END_S)


class _Actor:
    """A collector that runs as an actor."""

    def __init__(self, ray: Any, actor: Any, number: int, census: Census, layout: Layout) -> None:
        self._ray, self._actor, self.number = ray, actor, number
        self._census, self._layout = census, layout
        self._ring = ""
        self.node: Node | None = None
        self.since = time.monotonic()
        self.over: Any = actor.play.remote()
        """The call that plays."""
        self._talk: Any = None
        self._answers: list[Any] = []
        self._messages: list[Message] = []
        self._ending: Ending | None = None
        self._last = "(Ray's own logs have what it printed)"

    def ask(self) -> Any:
        """Have a talk under way; return what can be waited for."""
        if self._talk is None:
            talk = self._actor.talk.options(concurrency_group="talk")
            self._talk, self._answers = talk.remote(self._answers), []
        return self._talk

    def take(self) -> None:
        """Take what the talk returned."""
        talk, self._talk = self._talk, None
        try:
            messages, is_over = answer(self._ray, talk, _END_S)
            for message in messages:
                if isinstance(message, Placed):
                    self._begin(message.node)
                    continue
                self._messages.append(message)
                if isinstance(message, Failed):
                    self._last = _indented(message.text)
            if is_over and self._ending is None:
                is_clean = not any(isinstance(m, Failed) for m in self._messages)
                self._ending = Ending("ended" if is_clean else "ended by an error", "", is_clean, None)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            self._last = _indented(str(error) or type(error).__name__)
            self._ending = Ending(f"was killed ({type(error).__name__})", "", False, None)

    def _begin(self, node_id: str) -> None:
        """Tell it where its ring is, once the census knows of its node."""
        self.node = next((node for node in nodes_of(self._ray) if node.id == node_id), None)
        if self.node is None:
            self._ending = Ending("was placed on a node that is gone", "", False, None)
            return
        self._census.admit(self.node)
        name = f"collector-{self.number}"
        self._census.homes[name] = node_id
        self._ring = os.path.join(self._layout.folder(self.node), name)
        self.say(self._ring)
        self.ask()

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

    def say(self, answer: Any) -> None:
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


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-_TAIL_LINES:])
