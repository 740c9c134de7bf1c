"""The reader of a node: an actor that looks for rings, counts their clips, and hands out parts of batches.

    look     what is there, how many clips of each request    one at a time, beside the reads
    read     a part of a batch                                 two at a time: one gathers while Ray stores the other
    update   priorities of clips                               one after the other

Rows are gathered into arrays that are used again; Ray copies them into its object store before the thread takes the
next call.
Invariants: it reads the rings that the call names, and no others; it holds nothing that a restart would lose:
priorities are in files of its node.
Not here: which rings (cluster.py), how many clips (readers.py).
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.buffers.rings import joined
from ringmap.buffers.sharded.buffer import Shard, ShardedReplayBuffer
from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.errors import InputError, NoClipsError
from ringmap.ray.cluster import Scan, rings_at

__all__ = ["CALLS", "PLAIN", "Changed", "Drawing", "Part", "Reader", "Report"]

Array = np.ndarray[Any, np.dtype[Any]]

PLAIN = pickle.dumps({})
"""The request for clips of the buffer's own history."""

CALLS = {"look": 1, "read": 2, "update": 1}
"""How many of each run at a time."""


@dataclass(slots=True)
class Report:
    """What a look found. `folders`: the rings that it was to read; `shards`: those, with what can't be read; `clips`:
    request -> how many; `shares`: request -> their chance against those of other nodes, not scaled."""

    scan: Scan
    folders: tuple[str, ...]
    pid: int
    clips: dict[bytes, int]
    shares: dict[bytes, float]
    shards: list[Shard]
    sizes: tuple[int, int] | None
    """History and stride of its rings."""


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
        self._options, self._drawing = dict(options), drawing
        self._seed = None if seed is None else int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._buffer: ShardedReplayBuffer | None = None
        self._folders: tuple[str, ...] = ()
        self._out: dict[tuple[int, bytes], dict[str, Array]] = {}

    def look(self, patterns: tuple[str, ...], folders: tuple[str, ...], requests: list[bytes]) -> Report:
        """Return what is there, and read these rings from now on."""
        scan = rings_at(patterns)
        if folders != self._folders:
            if self._buffer is None:
                self._buffer = self._open(folders)
            members = self._buffer.fleet
            members.paths = folders
            for ring in members.open:
                if ring.folder not in folders:  # another node reads it
                    members.leave(ring)
            self._folders = folders
        buffer = self._buffer
        if buffer is None:
            return Report(scan, folders, os.getpid(), {}, dict.fromkeys(requests, 0.0), [], None)
        buffer.refresh()
        clips = {request: self._count(buffer, request) for request in requests}
        shares: dict[bytes, float] = dict(clips)
        if (priorities := buffer.engine.priorities) is not None:  # of the newest request
            newest = requests[-1]
            cut = buffer.cut_of(**pickle.loads(newest)) if clips[newest] else None
            shares = {newest: 0.0 if cut is None else priorities.mass(cut)}
        sizes = buffer.history_len, buffer.frameskip
        return Report(scan, folders, os.getpid(), clips, shares, buffer.shards, sizes)

    def _count(self, buffer: ShardedReplayBuffer, request: bytes) -> int:
        try:
            cut = buffer.cut_of(**pickle.loads(request))
        except NoClipsError:  # there are no columns yet
            return 0
        except InputError:  # a draw raises it where the learner hears it
            cut = buffer.cut
        return buffer.engine.count(cut, False)

    def read(self, size: int, request: bytes) -> Part:
        """Return clips, drawn from the rings that the last look named."""
        buffer = self._opened()
        if buffer.engine.transitions is not None:
            raise InputError(
                "ringmap.ray.ReplayBuffer: the rings hold transitions, and only episodes are read over Ray; read them "
                "on the machine where they are, ringmap.data.ShardedReplayBuffer(path)"
            )
        # Of this thread, which takes no other call before Ray has stored what it returns here.
        known = self._out.setdefault((threading.get_ident(), request), {})
        fits = all(size <= len(values) for values in known.values())
        out = {name: values[:size] for name, values in known.items()} if fits else None
        batch = buffer.sample(size, out=out, **pickle.loads(request))
        if out is None:
            known.update(batch)
        assert batch.ids is not None
        priorities = buffer.engine.priorities
        masses = None if priorities is None else priorities.masses(batch.ids)
        return Part(dict(batch), batch.ids, list(buffer.fleet.numbers.uuids), masses)

    def update(self, changes: Sequence[Changed]) -> int:
        """Set priorities of clips; return how many: those evicted, and those of rings that are not open here, are
        passed over."""
        try:
            buffer = self._opened()
        except NoClipsError:
            return 0
        numbers = buffer.fleet.numbers
        known = [change for change in changes if change[0] in numbers]
        if not known:
            return 0
        ids = np.concatenate([joined(numbers.of(uuid), positions) for uuid, positions, _ in known])
        return buffer.update_priorities(ids, np.concatenate([values for *_, values in known]))

    def _opened(self) -> ShardedReplayBuffer:
        if self._buffer is None:  # a restart, before the first look
            raise NoClipsError("no ring is open here")
        return self._buffer

    def _open(self, folders: tuple[str, ...]) -> ShardedReplayBuffer:
        # The learner hears of rings that can't be read by the report.
        options = {"wait_s": 0, "on_bad": "skip", **self._options}
        by = self._drawing
        if by is None:
            return ShardedReplayBuffer(folders, seed=self._seed, **options)
        sampler = PrioritizedSampler(by.alpha, eps=by.eps, rng=self._seed)
        buffer = ShardedReplayBuffer(folders, sampler=sampler, state=by.state, **options)
        assert buffer.engine.priorities is not None
        buffer.engine.priorities.mass(buffer.cut)  # an update may come before a draw
        return buffer
