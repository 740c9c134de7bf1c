"""The reader of a node: an actor that counts the clips of its rings, and hands out parts of batches.

    look   what is there, how many clips of each request    one at a time, beside the reads
    read   a part of a batch                                 two at a time: one gathers while Ray stores the other

Rows are gathered into arrays that are used again; Ray copies them into its object store before the thread takes the next call.
Invariants: it opens the rings that the call names, and no others; it holds nothing that a restart would lose.
Not here: which rings (roster.py), how many clips (readers.py).
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.buffers.sharded.buffer import Shard, ShardedReplayBuffer
from ringmap.errors import ClosedError, InputError, NoClipsError
from ringmap.ray.cluster import Node, Scan, pinned_to, rings_at

__all__ = ["PLAIN", "Part", "Reader", "Report", "started_on"]

Array = np.ndarray[Any, np.dtype[Any]]

PLAIN = pickle.dumps({})
"""The request for clips of the buffer's own history."""

_READS = 2


@dataclass(slots=True)
class Report:
    """What a look found.

    Args:
        scan: the rings that are there.
        folders: those that are open.
        clips: request -> how many clips.
        shards: the rings that are open, and those that can't be.
        history_len: of the buffer; None while none is open.
        frameskip: likewise.
        pid: of the reader.
    """

    scan: Scan
    folders: tuple[str, ...]
    clips: dict[bytes, int]
    shards: list[Shard]
    history_len: int | None
    frameskip: int | None
    pid: int


@dataclass(slots=True)
class Part:
    """A part of a batch. `ids`: of this reader; `uuids`: what their ring numbers mean."""

    columns: dict[str, Array]
    ids: Array
    uuids: list[bytes]


class Reader:
    """Reads the rings of one node.

    Args:
        options: of `ShardedReplayBuffer`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._lock = threading.Lock()
        self._folders: tuple[str, ...] = ()
        self._buffer: ShardedReplayBuffer | None = None
        self._out: dict[tuple[int, bytes], dict[str, Array]] = {}

    def look(
        self, patterns: tuple[str, ...], folders: tuple[str, ...], requests: list[bytes]
    ) -> Report:
        """Return what is there, and open the rings of the roster."""
        scan = rings_at(patterns)
        buffer = self._opened(folders)
        if buffer is None:
            return Report(scan, folders, {}, [], None, None, os.getpid())
        buffer.refresh()
        clips = {request: _count(buffer, pickle.loads(request)) for request in requests}
        sizes = buffer.history_len, buffer.frameskip
        return Report(scan, folders, clips, buffer.shards, *sizes, os.getpid())

    def read(self, size: int, request: bytes) -> Part:
        """Return clips, drawn uniformly from the rings that the last look opened.

        Raises:
            NoClipsError: there are none.
            InputError: the rings hold transitions.
        """
        while True:
            buffer = self._buffer
            if buffer is None:  # a restart, before the first look
                raise NoClipsError("no ring is open here")
            try:
                return self._read(buffer, size, request)
            except ClosedError:
                if buffer is self._buffer:
                    raise

    def _read(self, buffer: ShardedReplayBuffer, size: int, request: bytes) -> Part:
        if buffer.engine.transitions is not None:
            raise InputError(
                "ringmap.ray.ReplayBuffer: the rings hold transitions, and only episodes are read over Ray; read them on the machine "
                "where they are, ringmap.data.ShardedReplayBuffer(path)"
            )
        wanted = pickle.loads(request)
        # Of this thread, which takes no other call before Ray has stored what it returns here.
        known = self._out.setdefault((threading.get_ident(), request), {})
        fits = all(size <= len(values) for values in known.values())
        out = {name: values[:size] for name, values in known.items()} if fits else None
        batch = buffer.sample(size, out=out, **wanted)
        if out is None:
            known.update(batch)
        uuids = list(buffer.engine.rings.numbers.uuids)
        assert batch.ids is not None
        return Part(dict(batch), batch.ids, uuids)

    def _opened(self, folders: tuple[str, ...]) -> ShardedReplayBuffer | None:
        with self._lock:
            if folders != self._folders:
                before, self._buffer, self._folders = self._buffer, None, ()
                if folders:
                    self._buffer = ShardedReplayBuffer(folders, wait_s=0, **self._options)
                self._folders = folders
                if before is not None:
                    before.close()
            return self._buffer


def _count(buffer: ShardedReplayBuffer, wanted: Mapping[str, Any]) -> int:
    """Return how many clips of a request there are. O(rings), or O(episodes) with a window."""
    if "window" not in wanted:
        return buffer.num_valid_ends(wanted.get("history_len"))
    try:
        return len(buffer.view(**wanted).clip_indices)
    except NoClipsError:  # no columns yet
        return 0


def started_on(ray: Any, node: Node, options: Mapping[str, Any]) -> Any:
    """Start a reader on a node, where Ray restarts it for ever; return its handle. It ends with the process that has the handle."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={"look": 1, "read": _READS})(
        Reader
    )
    return actor.options(scheduling_strategy=pinned_to(node)).remote(dict(options))
