"""A collector: it plays leased seeds into a ring of its own.

    supervisor    ◄── Ask, Began, Done, Failed ───┐
                  ─── a range, or None: the end ──► collector ─► runs/replay/collector-3

It holds the lock of its ring before it asks for the first seeds. So whoever takes that lock knows that it plays no
more.

Invariants: it plays what it was leased, and nothing else.
Not here: what is leased to whom (supervisor.py), the process that it runs in (process.py; over Ray,
ringmap.ray.actors).
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ringmap.buffers.replay import ReplayBuffer
from ringmap.collection.job import Job, Parts
from ringmap.collection.rings import patiently
from ringmap.errors import InputError, RingmapError
from ringmap.world.collecting import collect_some
from ringmap.world.world import World

__all__ = ["Ask", "Began", "Done", "Failed", "Message", "Pipe", "failure_of", "limit_threads", "play"]

_PAUSE_S = 0.2
"""Before it asks again where all that is left is leased to others."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Give me seeds. The answer: a range, empty if all that are left are leased to others; None if none is left."""


@dataclass(frozen=True, slots=True)
class Began:
    """All is checked, and the first seed is played."""


@dataclass(frozen=True, slots=True)
class Done:
    """An episode is committed."""

    offset: int


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
    sent = None
    if isinstance(error, RingmapError):
        with contextlib.suppress(Exception):  # a class of the user's, with a constructor of its own
            sent = pickle.loads(pickle.dumps(error))
    return Failed(sent, traceback.format_exc())


def limit_threads(count: int) -> None:
    """Hold a torch that was imported before the environment variable was set; any other reads it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def play(number: int, job: Job, ring: str, pipe: Pipe) -> None:
    """Be collector `number` until there are no more seeds. `ring`: its directory; `pipe`: to the supervisor."""
    parts: Parts = pickle.loads(job.parts)
    world = parts.make_world(number)
    if not isinstance(world, World):
        raise InputError(f"{job.where}: make_world({number}) must return a ringmap.World, got {type(world).__name__}")

    def ask() -> range | None:
        pipe.send(Ask())
        answer: range | None = pipe.recv()
        return answer

    def seeds(block: range | None) -> Iterator[int]:
        """Yield seeds until none is free: then the open episodes are finished first."""
        pipe.send(Began())
        while block:
            yield from block
            block = ask()

    def finished(offset: int, steps: int) -> None:
        pipe.send(Done(offset))

    with world:
        if parts.policy is not None:
            world.set_policy(parts.policy)
        with patiently(lambda: ReplayBuffer(path=ring, **parts.ring), job.wait_s) as buffer:
            while (block := ask()) is not None:
                if not block:
                    time.sleep(_PAUSE_S)
                    continue
                collect_some(
                    world,
                    buffer,
                    job.collection,
                    seeds(block),
                    finished,
                    job.commit_every,
                    parts.weights,
                    parts.pace,
                    parts.drop,
                )
