"""A flat-out writer against readers on a small ring, and how many of their clips came out torn.

Each clip is asked whether it is whole (proof.py). `look_twice=False` takes the readers' second
look out: the control, which must tear.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Event
from unittest import mock

from benchmarks.harness.proof import Episodes, num_torn
from ringmap import ReplayBuffer
from ringmap.errors import LappedError
from ringmap.storage.columns.backends import Storage
from ringmap.storage.commit.store import Store
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.reader import Reader

__all__ = [
    "Ring",
    "Tally",
    "a_writer",
    "between_processes",
    "between_threads",
    "between_threads_of_a_reader",
    "one_look",
]

_WAIT_S = 120


@dataclass(frozen=True)
class Ring:
    """The field: a small ring of big rows is lapped often.

    `spare` below `longest` takes the way of the long episode, which retires first and then
    overwrites at once; otherwise one record does both. `storage`: how the columns are stored.
    """

    max_steps: int = 64
    spare: int = 8
    longest: int = 8
    row_nbytes: int = 65_536
    batch: int = 8
    history: int = 2
    storage: Storage = "memmap"


@dataclass(frozen=True)
class Tally:
    """What became of a race; `laps`: times that a reader gave up on a batch, as it says it does."""

    clips: int = 0
    torn: int = 0
    redraws: int = 0
    laps: int = 0
    episodes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))


def between_processes(folder: str, ring: Ring, clips: int, readers: int = 2, look_twice: bool = True) -> Tally:
    """Run a writer process against reader processes until these have read `clips` in all."""
    share = -(-clips // readers)
    with a_writer(folder, ring) as written:
        with ProcessPoolExecutor(readers, _context()) as pool:
            reading = [pool.submit(_read_in_process, folder, ring, share, look_twice, seed) for seed in range(readers)]
        tally = sum((r.result() for r in reading), Tally())
    return tally + written[0]


def _context() -> BaseContext:
    """Return how processes start that share nothing with this one; from a server, they import what it has not."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")


@contextlib.contextmanager
def a_writer(folder: str, ring: Ring) -> Iterator[list[Tally]]:
    """Have another process write without a pause; at the end the list given holds what it wrote."""
    context = _context()
    ready, stop = context.Event(), context.Event()
    written: list[Tally] = []
    with ProcessPoolExecutor(1, context, _meet, (ready, stop)) as pool:
        writing = pool.submit(_write_in_process, folder, ring)
        try:
            while not ready.wait(0.1):
                if writing.done():
                    writing.result()
            yield written
        finally:
            stop.set()
        written.append(writing.result(_WAIT_S))


def between_threads(folder: str | None, ring: Ring, clips: int, readers: int = 2, look_twice: bool = True) -> Tally:
    """Run a writer thread against reader threads of the same process and the same buffer."""
    buffer, number = _open(folder, ring)
    share = -(-clips // readers)
    tallies: list[Tally] = []

    def read() -> None:
        tallies.append(_read(buffer, ring, share))

    with contextlib.nullcontext() if look_twice else one_look():
        threads = [threading.Thread(target=read) for _ in range(readers)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            number = _write_some(buffer, ring, number)
    assert len(tallies) == readers, "a reader thread died"
    buffer.close()
    # The threads share one buffer and its count.
    return sum(tallies, Tally(redraws=buffer.num_redraws, episodes=number))


def between_threads_of_a_reader(folder: str, ring: Ring, clips: int, readers: int = 2) -> Tally:
    """Run a writer process against threads of this process that share one reader."""
    share = -(-clips // readers)
    with a_writer(folder, ring) as written:
        buffer = ReplayBuffer.open(folder, seed=0)
        with ThreadPoolExecutor(readers) as pool:
            reading = [pool.submit(_read, buffer, ring, share) for _ in range(readers)]
        tally = sum((r.result() for r in reading), Tally(redraws=buffer.num_redraws))
    buffer.refresh()
    stored = buffer.lengths
    assert stored.sum() <= ring.max_steps
    assert len(stored) == buffer.num_episodes
    buffer.close()
    return tally + written[0]


# -- the writer ----------------------------------------------------------------------------------


def _open(folder: str | None, ring: Ring) -> tuple[ReplayBuffer, int]:
    """Make the buffer and fill it, so that from here on every episode evicts."""
    buffer = ReplayBuffer(
        ring.max_steps,
        ring.history,
        path=folder,
        spare_rows=ring.spare,
        seed=0,
        sync_every_s=0,
        storage=ring.storage,
    )
    number = 0
    while number * ring.longest < 4 * ring.max_steps:
        number = _write_some(buffer, ring, number)
    return buffer, number


def _write_some(buffer: ReplayBuffer, ring: Ring, number: int) -> int:
    episodes = Episodes(ring.row_nbytes // 8, ring.longest)
    for n in range(number, number + 64):
        buffer.write_episode(episodes(n, ring.longest - n * 5 % (ring.longest // 2 + 1)))
    return number + 64


def _write_in_process(folder: str, ring: Ring) -> Tally:
    parent = os.getppid()
    buffer, number = _open(folder, ring)
    _ready.set()
    while not _stop.is_set() and os.getppid() == parent:
        number = _write_some(buffer, ring, number)
    buffer.close()
    return Tally(episodes=number)


# -- the readers ---------------------------------------------------------------------------------


def _read_in_process(folder: str, ring: Ring, clips: int, look_twice: bool, seed: int) -> Tally:
    with contextlib.nullcontext() if look_twice else one_look():
        buffer = ReplayBuffer.open(folder, seed=seed)
        tally = _read(buffer, ring, clips)
    return tally + Tally(redraws=buffer.num_redraws)


def _read(buffer: ReplayBuffer, ring: Ring, clips: int) -> Tally:
    done = torn = laps = 0
    while done < clips:
        try:
            batch = buffer.sample(ring.batch)
        except LappedError:
            laps += 1
            if laps > 100 + clips // ring.batch:
                raise
            continue
        done += ring.batch
        torn += num_torn(batch)
    return Tally(done, torn, 0, laps)


@contextlib.contextmanager
def one_look() -> Iterator[None]:
    """Take the second look out: nothing that was gathered ever counts as evicted."""

    def before_all(self: Handle) -> int:
        return -1

    with (
        mock.patch.object(Handle, "shown_tail", before_all),
        mock.patch.object(Reader, "shown_tail", before_all),
        mock.patch.object(Store, "shown_tail", before_all),
    ):
        yield


# -- meeting -------------------------------------------------------------------------------------


def _meet(ready: Event, stop: Event) -> None:
    global _ready, _stop
    _ready, _stop = ready, stop


_ready: Event
_stop: Event
