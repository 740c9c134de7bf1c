"""The reader of a node: an actor that counts the clips of its rings, and hands out parts of batches.

    look     what is there, how many clips of each request    one at a time, beside the reads
    read     a part of a batch                                 two at a time: one gathers while Ray stores the other
    update   priorities of clips                               one after the other

Rows are gathered into arrays that are used again; Ray copies them into its object store before the thread takes the
next call.
Invariants: it opens the rings that the call names, and no others; it holds nothing that a restart would lose:
priorities are in files of its node.
Not here: which rings (cluster.py), how many clips (readers.py).
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.buffers.sharded.buffer import Shard, ShardedReplayBuffer
from ringmap.buffers.sharded.numbers import joined
from ringmap.clips.cut import Cut
from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.errors import ClosedError, InputError, NoClipsError
from ringmap.ray.cluster import Node, Scan, pinned_to, rings_at

__all__ = ["PLAIN", "Changed", "Drawing", "Part", "Reader", "Report", "started_on"]

Array = np.ndarray[Any, np.dtype[Any]]

PLAIN = pickle.dumps({})
"""The request for clips of the buffer's own history."""

_READS = 2


@dataclass(slots=True)
class Report:
    """What a look found. `folders`: the rings that are open; `shards`: those, and those that can't be; `clips`: request
    -> how many; `masses`: of the priorities of all clips of the newest request; None: clips are equally likely."""

    scan: Scan
    folders: tuple[str, ...]
    clips: dict[bytes, int]
    shards: list[Shard]
    history_len: int | None
    frameskip: int | None
    pid: int
    masses: dict[bytes, float] | None = None

    def has(self, request: bytes) -> bool:
        """Whether it says how likely clips of a request are."""
        return request in (self.clips if self.masses is None else self.masses)


@dataclass(slots=True)
class Part:
    """A part of a batch. `ids`: of this reader; `uuids`: what their ring numbers mean; `masses`: of the clips, if they
    have priorities."""

    columns: dict[str, Array]
    ids: Array
    uuids: list[bytes]
    masses: Array | None = None


Changed = tuple[bytes, Array, Array]
"""Clips of a ring, by its uuid: their positions, and their new priorities."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """How readers draw by priority: as a `PrioritizedSampler` with these options, whose priorities lie in the directory
    `state`."""

    alpha: float
    eps: float
    state: str


class Reader:
    """Reads the rings of one node. `options`: of `ShardedReplayBuffer`; `drawing`: by priority; `seed`: of draws."""

    def __init__(
        self, options: Mapping[str, Any], drawing: Drawing | None = None, seed: Sequence[int] | None = None
    ) -> None:
        self._options, self._drawing, self._seed = dict(options), drawing, seed
        self._lock = threading.Lock()
        self._folders: tuple[str, ...] = ()
        self._buffer: ShardedReplayBuffer | None = None
        self._out: dict[tuple[int, bytes], dict[str, Array]] = {}

    def look(self, patterns: tuple[str, ...], folders: tuple[str, ...], requests: list[bytes]) -> Report:
        """Return what is there, and open the rings of the roster."""
        scan = rings_at(patterns)
        buffer = self._opened(folders)
        if buffer is None:
            return Report(scan, folders, {}, [], None, None, os.getpid())
        buffer.refresh()
        cuts = {request: _cut(buffer, pickle.loads(request)) for request in requests}
        clips = {r: 0 if cut is None else buffer.engine.count(cut, False) for r, cut in cuts.items()}
        masses: dict[bytes, float] | None = None
        if (priorities := buffer.engine.priorities) is not None:
            newest = cuts[requests[-1]]
            masses = {requests[-1]: 0.0 if newest is None else priorities.mass(newest)}
        sizes = buffer.history_len, buffer.frameskip
        return Report(scan, folders, clips, buffer.shards, *sizes, os.getpid(), masses)

    def read(self, size: int, request: bytes) -> Part:
        """Return clips, drawn from the rings that the last look opened."""
        found: Part = self._while_open(lambda buffer: self._read(buffer, size, request))
        return found

    def _read(self, buffer: ShardedReplayBuffer, size: int, request: bytes) -> Part:
        if buffer.engine.transitions is not None:
            raise InputError(
                "ringmap.ray.ReplayBuffer: the rings hold transitions, and only episodes are read over Ray; read them "
                "on the machine where they are, ringmap.data.ShardedReplayBuffer(path)"
            )
        wanted = pickle.loads(request)
        # Of this thread, which takes no other call before Ray has stored what it returns here.
        known = self._out.setdefault((threading.get_ident(), request), {})
        fits = all(size <= len(values) for values in known.values())
        out = {name: values[:size] for name, values in known.items()} if fits else None
        batch = buffer.sample(size, out=out, **wanted)
        if out is None:
            known.update(batch)
        uuids = list(buffer.engine.members.rings.numbers.uuids)
        assert batch.ids is not None
        priorities = buffer.engine.priorities
        masses = None if priorities is None else priorities.masses(batch.ids)
        return Part(dict(batch), batch.ids, uuids, masses)

    def update(self, changes: Sequence[Changed]) -> int:
        """Set priorities of clips; return how many: those evicted, and those of rings that are not open here, are
        passed over."""
        try:
            count: int = self._while_open(lambda buffer: self._update(buffer, changes))
        except NoClipsError:  # a restart, before the first look
            return 0
        return count

    def _update(self, buffer: ShardedReplayBuffer, changes: Sequence[Changed]) -> int:
        numbers = buffer.engine.members.rings.numbers
        known = [change for change in changes if change[0] in numbers]
        if not known:
            return 0
        ids = np.concatenate([joined(numbers.of(uuid), positions) for uuid, positions, _ in known])
        return buffer.update_priorities(ids, np.concatenate([values for *_, values in known]))

    def _while_open(self, call: Callable[[ShardedReplayBuffer], Any]) -> Any:
        """Return what a call on the open rings returns; where others are opened meanwhile, call again on those."""
        while True:
            buffer = self._buffer
            if buffer is None:
                with self._lock:  # until they are open
                    buffer = self._buffer
            if buffer is None:  # a restart, before the first look
                raise NoClipsError("no ring is open here")
            try:
                return call(buffer)
            except ClosedError:
                if buffer is self._buffer:
                    raise

    def _opened(self, folders: tuple[str, ...]) -> ShardedReplayBuffer | None:
        with self._lock:
            if folders != self._folders:
                before, self._buffer, self._folders = self._buffer, None, ()
                if before is not None and self._drawing is not None:
                    before.close()  # it holds the lock of the priorities
                if folders:
                    self._buffer = self._open(folders)
                self._folders = folders
                if before is not None:
                    before.close()
            return self._buffer

    def _open(self, folders: tuple[str, ...]) -> ShardedReplayBuffer:
        by, seed = self._drawing, None
        # The learner hears of rings that can't be read by the report.
        options = {"wait_s": 0, "on_bad": "skip", **self._options}
        if self._seed is not None:  # of other rings another one
            words = [*self._seed, *"/".join(folders).encode()]
            seed = int(np.random.SeedSequence(words).generate_state(1)[0])
        if by is None:
            return ShardedReplayBuffer(folders, seed=seed, **options)
        sampler = PrioritizedSampler(by.alpha, eps=by.eps, rng=seed)
        buffer = ShardedReplayBuffer(folders, sampler=sampler, state=by.state, **options)
        assert buffer.engine.priorities is not None
        buffer.engine.priorities.mass(buffer.cut)  # an update may come before a draw
        return buffer


def _cut(buffer: ShardedReplayBuffer, wanted: Mapping[str, Any]) -> Cut | None:
    """Return which clips a request asks for; None: there are no columns yet."""
    try:
        return buffer.cut_of(**wanted)
    except NoClipsError:
        return None
    except InputError:  # a draw raises it where the learner hears it
        return buffer.cut


def started_on(
    ray: Any, node: Node, options: Mapping[str, Any], drawing: Drawing | None = None, seed: Sequence[int] | None = None
) -> Any:
    """Start a reader on a node, where Ray restarts it for ever; return its handle. It ends with the process that has
    the handle."""
    groups = {"look": 1, "read": _READS, "update": 1}
    actor = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups=groups)(Reader)
    return actor.options(scheduling_strategy=pinned_to(node)).remote(dict(options), drawing, seed)
