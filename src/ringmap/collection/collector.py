"""A collector: a process that plays leased seeds into a ring of its own.

    parent    ◄── Ask, Began, Done, Failed ───┐
              ─── a range, or None: the end ──► collector ─► runs/replay/collector-3
                                                         └─► runs/replay/collect/collector-3.log

It holds the lock of its ring before it asks for the first seeds. So whoever takes that lock knows that it plays no more.

Invariants: it plays what it was leased, and nothing else; it does not outlive its parent.
Not here: what is leased to whom (supervisor.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ringmap.buffers.replay import ReplayBuffer
from ringmap.collection.rings import patiently, ring_of
from ringmap.errors import InputError, RingmapError
from ringmap.storage.disk.system import System
from ringmap.world.collecting import Collection, collect_some
from ringmap.world.world import World

__all__ = ["Ask", "Began", "Done", "Failed", "Job", "Message", "Parts", "log_of", "run"]

STOPPED = 130
"""Exit code of a collector that was told to stop by a signal."""

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


@dataclass(frozen=True, slots=True)
class Job:
    """What every collector of a collection is told."""

    path: str
    collection: Collection
    parts: bytes
    commit_every: int | None
    threads: int | None
    wait_s: float
    parent: int


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


def log_of(folder: str, number: int) -> str:
    """Return the file into which a collector prints."""
    return os.path.join(folder, f"collector-{number}.log")


def run(number: int, job: Job, folder: str, pipe: Connection, system: System | None = None) -> None:
    """Be a collector until there are no more seeds.

    Args:
        number: which.
        job: what all are told.
        folder: of the log.
        pipe: to the parent.
        system: for tests.
    """
    _follow_parent(job.parent, system or System())
    _listen_to_signals()
    _log_into(log_of(folder, number), number)
    try:
        if job.threads is not None:
            _limit_threads(job.threads)
        _play(number, job, pipe)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except Exception as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # the parent is gone
            pipe.send(Failed(_sendable(error), text))
        sys.exit(1)


def _sendable(error: Exception) -> RingmapError | None:
    """Return an error of ringmap's that can be received again."""
    if isinstance(error, RingmapError):
        with contextlib.suppress(Exception):  # a class of the user's, with a constructor of its own
            received: RingmapError = pickle.loads(pickle.dumps(error))
            return received
    return None


def _follow_parent(parent: int, system: System) -> None:
    """Let this process end when its parent does, wherever it is at that moment."""
    if system.end_with(parent):
        return
    process = multiprocessing.parent_process()
    assert process is not None

    def watch() -> None:
        process.join()
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel would; what is committed stays

    threading.Thread(target=watch, name="ringmap-parent", daemon=True).start()


def _listen_to_signals() -> None:
    """Let the parent say when to stop: Ctrl-C in a terminal is for it alone."""
    with contextlib.suppress(OSError):  # the leader of a session already
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _log_into(path: str, number: int) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    # A process that was not spawned may have others here, of its server.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    print(f"-- collector {number}, process {os.getpid()}, {now}", flush=True)


def _limit_threads(count: int) -> None:
    """Hold a torch that was imported before the environment variable was set; any other reads it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def _play(number: int, job: Job, pipe: Connection) -> None:
    parts: Parts = pickle.loads(job.parts)
    world = parts.make_world(number)
    if not isinstance(world, World):
        raise InputError(
            f"ringmap.collect: make_world({number}) must return a ringmap.World, got {type(world).__name__}"
        )
    with world:
        if parts.policy is not None:
            world.set_policy(parts.policy)
        path = ring_of(job.path, number)
        with patiently(lambda: ReplayBuffer(path=path, **parts.ring), job.wait_s) as buffer:
            seeds = _Seeds(pipe)
            while (block := seeds.ask(waits=True)) is not None:
                collect_some(
                    world, buffer, job.collection, seeds.stream(block), seeds.finished, job.commit_every, parts.weights,
                    parts.pace,
                )  # fmt: skip


class _Seeds:
    """The seeds as they come through the pipe."""

    def __init__(self, pipe: Connection) -> None:
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
