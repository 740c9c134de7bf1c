"""A collector: it plays leased seeds into a ring of its own.

    supervisor    ◄── Ask, Began, Done, Failed ───┐
                  ─── a range, or None: the end ──► collector ─► runs/replay/collector-3

It holds the lock of its ring before it asks for the first seeds. So whoever takes that lock knows that it plays no
more.

Invariants: it plays what it was leased, and nothing else.
Not here: what is leased to whom (supervisor.py), the process that it runs in (process.py; over Ray,
ringmap.ray.collector).
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ringmap.buffers.replay import ReplayBuffer
from ringmap.collection.rings import patiently
from ringmap.errors import InputError, RingmapError
from ringmap.formats.common.refusals import KEEP_ALL, Drop
from ringmap.world.collecting import Collection, collect_some
from ringmap.world.world import World

__all__ = [
    "NOTHING",
    "Ask",
    "Began",
    "Done",
    "Failed",
    "Job",
    "Message",
    "Parts",
    "Pipe",
    "failure_of",
    "limit_threads",
    "play",
]

NOTHING = range(0)
"""Answer to one who asks and does not wait: nothing is free at this moment."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the caller gave, pickled as one: a policy and the model that its weights are loaded into stay one object."""

    make_world: Callable[[int], World]
    policy: Any
    weights: Any
    pace: Any
    ring: dict[str, Any]
    drop: Drop = KEEP_ALL


@dataclass(frozen=True, slots=True)
class Job:
    """What every collector of a collection is told. `where`: the call, for messages."""

    where: str
    collection: Collection
    parts: bytes
    commit_every: int | None
    threads: int | None
    wait_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Give me seeds. `waits`: once there are some; else at once, for episodes are open."""

    waits: bool


@dataclass(frozen=True, slots=True)
class Began:
    """All is checked, and the first seed is played."""


@dataclass(frozen=True, slots=True)
class Done:
    """An episode is committed."""

    offset: int
    steps: int


@dataclass(frozen=True, slots=True)
class Failed:
    """I end. `error`: for the caller, if it is one of ringmap's; `text`: the traceback."""

    error: RingmapError | None
    text: str


Message = Ask | Began | Done | Failed


class Pipe(Protocol):
    """The way to the supervisor."""

    def send(self, message: Any, /) -> None:
        """Say something."""

    def recv(self) -> Any:
        """Wait for an answer, and return it."""


def failure_of(error: Exception) -> Failed:
    """Return what a collector says when it ends by an error. To be called where it was caught."""
    return Failed(_sendable(error), traceback.format_exc())


def _sendable(error: Exception) -> RingmapError | None:
    """Return an error of ringmap's that can be received again."""
    if isinstance(error, RingmapError):
        with contextlib.suppress(Exception):  # a class of the user's, with a constructor of its own
            received: RingmapError = pickle.loads(pickle.dumps(error))
            return received
    return None


def limit_threads(count: int) -> None:
    """Hold a torch that was imported before the environment variable was set; any other reads it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def play(number: int, job: Job, ring: str, pipe: Pipe) -> None:
    """Play until there are no more seeds.

    Args:
        number: of the collector.
        job: what all are told.
        ring: the directory of its ring.
        pipe: to the supervisor.

    Raises:
        InputError: `make_world` returned no World.
        RingmapError: as `World.collect`.
    """
    parts: Parts = pickle.loads(job.parts)
    world = parts.make_world(number)
    if not isinstance(world, World):
        raise InputError(f"{job.where}: make_world({number}) must return a ringmap.World, got {type(world).__name__}")
    with world:
        if parts.policy is not None:
            world.set_policy(parts.policy)
        with patiently(lambda: ReplayBuffer(path=ring, **parts.ring), job.wait_s) as buffer:
            seeds = _Seeds(pipe)
            while (block := seeds.ask(waits=True)) is not None:
                collect_some(
                    world,
                    buffer,
                    job.collection,
                    seeds.stream(block),
                    seeds.finished,
                    job.commit_every,
                    parts.weights,
                    parts.pace,
                    parts.drop,
                )


class _Seeds:
    """The seeds as they come through the pipe."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def ask(self, waits: bool) -> range | None:
        """Return a block, or None at the end; without waiting also `NOTHING`."""
        self._pipe.send(Ask(waits))
        given: range | None = self._pipe.recv()
        return given

    def stream(self, block: range | None) -> Iterator[int]:
        """Yield seeds until none is free at this moment: then the open episodes are finished first."""
        self._pipe.send(Began())
        while block:
            yield from block
            block = self.ask(waits=False)

    def finished(self, offset: int, steps: int) -> None:
        """Say that an episode is committed."""
        self._pipe.send(Done(offset, steps))
