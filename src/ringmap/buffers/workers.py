"""What the workers of a loader share with the process that owns it: which clips there are; and their generators.

    ids      0 ......... 29 | 30 ... 49 | 50 ...       of the pinned clips of ring 0, ring 1, ...

    the loader's process   moment -> told        writer: as of now; reader: as of its last refresh
    a worker               moment <- told        as of the moment of the loader's process

    told     is there a moment · newest commit of a ring in RAM · how many rings · uuid, head, clips of each:
             numbers in a block of shared memory, which forked workers inherit and spawned ones get with the buffer

Invariants: the ids of a reader do not change until it is refreshed, also if a ring leaves; a worker counts clips as the
process that owns its loader, and numbers no ring that this process has not numbered; only the process that made the
block writes, and a reader sees the told numbers whole or not at all.
Not here: what copies the clips (clips/gather.py, sharded/reader.py).
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from typing import Any, Protocol

import numpy as np

from ringmap.buffers.rings import Rings
from ringmap.clips.cut import Cut
from ringmap.clips.samplers.base import checked_rng, generator, seed_key
from ringmap.datasets.batch import worker
from ringmap.errors import StaleCopyError
from ringmap.storage.disk.process import Forkable

__all__ = ["LoaderState", "Pins", "WorkerGenerator", "outlives_its_pass"]


Array = np.ndarray[Any, np.dtype[Any]]

_EACH = 4
"""Numbers told of each ring: two halves of its uuid, its head, its clips."""


class Reads(Protocol):
    """What counts clips: a reader of one ring, or of many."""

    def pin(self, cut: Cut) -> Any:
        """Return the clips that exist, which say their `heads`."""
        ...

    def pin_as(self, heads: list[tuple[int, int]], cut: Cut) -> Any:
        """Return the clips of the moment of another process."""
        ...


class Pins:
    """The pinned moments of some rings, by what decides which steps are anchors.

    Args:
        most: how many rings there may be. Shared memory has room for all; pages that no ring needs take none.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self.loader_state = self._new_state()
        self.copied: int | None = None
        """For a copy of a ring in RAM: the commit that it was copied at."""
        self._of: dict[tuple[Any, ...], Any] = {}
        self._shared: Any = None
        self._generation = 0
        self._fetcher: Any = None

    def _new_state(self) -> LoaderState:
        return LoaderState(numbers=3 + _EACH * self._most)

    def begin(self, state: LoaderState | None = None) -> None:
        """Forget all moments. `state`: of the process that owns the loader; None: this process owns its own."""
        self.loader_state, self._shared = state or self._new_state(), None
        self._of.clear()

    @property
    def is_led(self) -> bool:
        """Whether another process numbers the rings, and pins."""
        return not self.loader_state.is_mine and worker() is not None

    def clear(self) -> None:
        """Let the next look use the newest state."""
        self._of.clear()

    def of(self, rings: Rings, reader: Reads, cut: Cut, shared: bool = True) -> Any:
        """Return the clips that exist: for a writer now, for readers at their last refresh.

        A reader advances internally when it redraws; its length and ids must not change.

        Args:
            rings: that are read.
            reader: of these.
            cut: of the clips.
            shared: whether this is the cut of the loader's clips, which workers count as its process does.
        """
        if rings.is_written:
            return reader.pin(cut)
        if not self.loader_state.is_mine:
            if worker() is None:
                self.begin()
            elif shared:
                return self._as_told(rings, reader, cut)
        moment = self._of.get(cut.anchors)  # another thread may drop it meanwhile
        if moment is None:
            with rings.lock:  # or another thread's moment could be told after this one
                self._of[cut.anchors] = moment = reader.pin(cut)
                if shared:
                    self._shared = moment
                    self.tell(rings)
        return moment

    def _as_told(self, rings: Rings, reader: Reads, cut: Cut) -> Any:
        state, moment = self.loader_state, self._of.get(cut.anchors)
        if moment is not None and state.generation == self._generation:
            return moment
        with rings.lock:
            generation = state.generation
            heads = self.learn(rings)
            if heads is None:
                rings.follow()
                return reader.pin(cut)
            if generation != self._generation:
                self._of.clear()
            self._of[cut.anchors] = moment = reader.pin_as(heads, cut)
            self._generation = generation
            return moment

    def tell(self, rings: Rings) -> None:
        """Tell workers the numbers of the rings, and the clips of the last shared moment."""
        if not self.loader_state.is_mine:
            return
        moment, uuids = self._shared, rings.uuids
        heads = {} if moment is None else moment.heads
        numbers = [int(moment is not None), 0, len(uuids)]
        for number, uuid in enumerate(uuids):
            numbers += [*np.frombuffer(uuid.ljust(16, b"\0"), np.int64).tolist(), *heads.get(number, (0, 0))]
        self.loader_state.tell(*numbers)

    def learn(self, rings: Rings) -> list[tuple[int, int]] | None:
        """Take over the ring numbers that were told; return head and clips of each ring in the moment that was, None
        for none."""
        if not self.is_led:
            return None
        told, uuids = self.loader_state.told(), rings.uuids
        generation, is_moment, _, count = told[:4]
        if not generation:
            return None
        heads = []
        for number in range(count):
            at = 4 + _EACH * number
            if number == len(uuids):
                uuids.append(np.array(told[at : at + 2], np.int64).tobytes())
            heads.append((told[at + 2], told[at + 3]))
        return heads if is_moment else None

    def tell_copies(self, seq: int) -> None:
        """Tell copies of a ring in RAM the commit of the original."""
        if self.loader_state.is_mine:
            self.loader_state.tell(0, seq, 0)

    def check_copy(self, seq: int) -> None:
        """Raise in a persistent worker that would return an old copy, of commit `seq`, of a ring in RAM."""
        state = self.loader_state
        if state.is_mine or worker() is None:
            return
        fetcher, told = _fetcher(), state.told()
        if self._fetcher is None:
            self._fetcher = fetcher
            if self.copied is None:
                self.copied = seq
        elif fetcher is not self._fetcher and told[0] and told[2] != self.copied:  # another pass
            raise StaleCopyError(
                "ReplayBuffer: this worker has a copy of a buffer in RAM from when it started, and the buffer was "
                "written since; make the loader with persistent_workers=False, or give the buffer a path="
            )


def _fetcher() -> Any:
    """Return the object that PyTorch's worker reads this batch with: it alone differs for each pass."""
    return _local_of("fetch", "self")


def outlives_its_pass() -> bool:
    """Whether this worker of a loader may read items of other passes than the one with which it began."""
    found = _local_of("_worker_loop", "persistent_workers")
    return found is None or bool(found)


def _local_of(function: str, name: str) -> Any:
    """Return a variable of a function of PyTorch's that calls us; None if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == function and name in frame.f_locals:
            return frame.f_locals[name]
    return None


NUMBERS = 6
"""Told numbers, where nothing else is said."""
_WAIT_S = 10.0
"""Timeout for an owner in the middle of a write: longer than it ever waits for a core, unless it was killed."""


class LoaderState:
    """A small block of shared memory with one writer.

    Args:
        arena: the block of the process that spawned this one; None makes a new block.
        numbers: how many numbers can be told.
    """

    def __init__(self, arena: Any = None, numbers: int = NUMBERS) -> None:
        self._pid = os.getpid() if arena is None else -1
        self._arena, self._numbers = arena, numbers
        self._size = numbers + 1
        block = mmap.mmap(-1, 8 * self._size) if arena is None else arena.buffer
        self._blocks: list[Array] = [np.frombuffer(block, np.int64, self._size)]
        self._telling = threading.RLock()

    @property
    def is_mine(self) -> bool:
        """Whether this process is the owner, which tells."""
        return self._pid == os.getpid()

    def tell(self, *numbers: int) -> None:
        """Replace the first of the told numbers by new ones."""
        with self._telling:
            for block in self._blocks:
                generation = int(block[0]) | 1  # odd: a write is under way, or was interrupted
                block[0] = generation
                block[1 : 1 + len(numbers)] = numbers
                block[0] = generation + 1

    @property
    def generation(self) -> int:
        """What changes when other numbers are told."""
        return int(self._blocks[0][0])

    def told(self) -> tuple[int, ...]:
        """Return the generation (0: nothing told, or the owner is dead), and the numbers told last."""
        block, until = self._blocks[0], 0.0
        while True:
            seen = block[: self._numbers + 1].copy()
            if seen[0] % 2 == 0 and seen[0] == block[0]:
                return tuple(seen.tolist())
            now = time.monotonic()
            until = until or now + _WAIT_S
            if now > until:
                return (0,) * (self._numbers + 1)
            time.sleep(0)

    def __reduce__(self) -> Any:
        from multiprocessing import heap
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is None:
            return _nobody, ()
        if self._arena is None:
            self._arena = heap.Arena(8 * self._size)
            block = np.frombuffer(self._arena.buffer, np.int64, self._size)
            with self._telling:
                block[:] = self._blocks[0]
                self._blocks.append(block)
        if sys.platform == "win32":
            return LoaderState, (self._arena, self._numbers)
        # By hand: the running pickler copied its table of reducers before `heap` was imported.
        return _spawned, (*heap.reduce_arena(self._arena), self._numbers)


def _spawned(make: Any, arena: Any, numbers: int) -> LoaderState:
    return LoaderState(make(*arena), numbers)


def _nobody() -> None:
    return None


class WorkerGenerator(Forkable):
    """One generator, from a seed; a copy in a worker begins with the seed that PyTorch gave the worker, and the given
    one."""

    def __init__(self, seed: int | None = None, where: str = "WorkerGenerator") -> None:
        self._rng, self._where = generator(seed, where, "seed"), where
        self._seed_key = seed_key(seed)
        self._worker: int | None = None

    @property
    def rng(self) -> np.random.Generator:
        """The generator of this process."""
        info = worker()
        if info is not None and self._worker != info.seed:
            self._worker = info.seed
            self._rng = np.random.default_rng([info.seed, self._seed_key])
        return self._rng

    @property
    def state(self) -> dict[str, Any]:
        """Its state, as JSON values; may be assigned."""
        return dict(self.rng.bit_generator.state)

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = checked_rng(self.rng, state, self._where)
