"""Pins the set of clips, so that ids do not change, and tells it to the workers of a loader.

    the loader's process   pin ----> state       writer: as of now
                                       |         reader: as of its last refresh
    a worker               pin <-------+         as of the moment of the loader's process

Invariants: the ids of a reader do not change until it is refreshed; a worker counts clips as the process that owns its
loader. Not here: what copies the clips (clips/gather.py), the shared memory (loader_state.py).
"""

from __future__ import annotations

import sys
from typing import Any

from ringmap.buffers.loader_state import LoaderState
from ringmap.clips.cut import Cut
from ringmap.clips.gather import ClipReader, Pinned
from ringmap.datasets.batch import worker
from ringmap.errors import StaleCopyError
from ringmap.storage.disk.calls import thread
from ringmap.storage.ring.ring import Position

__all__ = ["Pins", "outlives_its_pass"]

_NEWEST, _STANDS = 0, 1


class Pins:
    """The pinned moments of one ring, by what decides which steps are anchors."""

    def __init__(self) -> None:
        self.loader_state = LoaderState()
        self.copied: int | None = None
        """For a copy of a ring in RAM: the commit that it was copied at."""
        self._of: dict[tuple[int, int, int, bool], Pinned] = {}
        self._told: tuple[int, ...] = ()
        self._fetcher: Any = None

    def clear(self) -> None:
        """Let the next look use the newest state."""
        self._of.clear()

    def of(self, reader: ClipReader, cut: Cut, shared: bool = True) -> Pinned:
        """Return the clips that exist: for a writer now, for a reader at its last refresh.

        A reader advances internally when it redraws; its length and ids must not change.

        Args:
            reader: of the ring.
            cut: of the clips.
            shared: whether this is the cut of the loader's clips, which workers count as its process does.
        """
        source = reader.source
        if source.writable:
            return reader.pin(cut)
        state = self.loader_state
        if not state.is_mine:
            if worker() is not None and shared:
                return self._as_told(reader, cut)
            state = self.loader_state = LoaderState() if worker() is None else state
        pinned = self._of.get(cut.anchors)  # another thread may drop it meanwhile
        if pinned is None:
            with thread.searching, source.lock:  # or another thread's moment could be told after this one
                self._of[cut.anchors] = pinned = reader.pin_here(cut)
                if state.is_mine and shared:
                    state.tell(_STANDS, pinned.head, pinned.count)
        return pinned

    def _as_told(self, reader: ClipReader, cut: Cut) -> Pinned:
        told = self.loader_state.told()
        generation, how, head, count = told[:4]
        if not generation or how == _NEWEST:
            reader.source.refresh()
            return reader.pin(cut)
        pinned = self._of.get(cut.anchors)
        if told != self._told or pinned is None:
            self._told = told
            if reader.source.head < head:
                reader.source.refresh()
            pinned = reader.pin_before(Position(head), count, cut)
            self._of[cut.anchors] = pinned
        return pinned

    def tell_copies(self, seq: int) -> None:
        """Tell copies of a ring in RAM the commit of the original."""
        if self.loader_state.is_mine:
            self.loader_state.tell(_NEWEST, 0, 0, seq)

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
        elif fetcher is not self._fetcher and told[0] and told[4] != self.copied:  # another pass
            raise StaleCopyError(
                "ReplayBuffer: this worker has a copy of a buffer in RAM from when it started, and the buffer was "
                "written since; make the loader with persistent_workers=False, or give the buffer a path="
            )


def _fetcher() -> Any:
    """Return the object that PyTorch's worker reads this batch with: it differs for each pass, and nothing else shows a
    pass."""
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
