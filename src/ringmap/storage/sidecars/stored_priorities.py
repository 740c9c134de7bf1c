"""The priorities of a buffer for one handle: in memory, and in the file if the handle may write.

Invariants: the file holds what `change` had received when it returned; a reader and a forked child write
nothing.
Not here: the bytes (priorities.py), the clip of a priority (clips/samplers).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from ringmap.storage.disk.advice import clear_errors
from ringmap.storage.sidecars.base import Home
from ringmap.storage.sidecars.priorities import Leaves, PriorityFile

__all__ = ["StoredPriorities"]

log = logging.getLogger("ringmap")


class Opened(Protocol):
    """An open buffer, as far as its priorities need it. `head`: one past its newest position."""

    @property
    def home(self) -> Home: ...
    @property
    def head(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...


class StoredPriorities:
    """Priorities of the rows of one buffer.

    Args:
        source: the buffer.
        kept: priorities that the caller has from before.
        in_fork: whether these are a parent process's, and newer than the stored ones.

    Attributes:
        leaves: the priorities; only `change` changes them.

    Raises:
        EnvironmentFault: the disk fails.
    """

    def __init__(self, source: Opened, kept: Leaves | None, in_fork: bool = False) -> None:
        self._source = source
        self._path = source.home.path(PriorityFile.names[0])
        self._pid = os.getpid()
        self.file: PriorityFile | None = None
        rows, volatile = source.home.rows, source.home.disk.volatile
        if kept is not None and len(kept.values) != rows:
            kept = None
        if kept is not None and volatile:
            kept.upto = min(kept.upto, source.head)
        if not volatile:
            with clear_errors("PrioritizedSampler", self._path, then="mend the disk, then draw again"):
                stored = self._open()
            kept = kept if in_fork and kept is not None else stored
        self.leaves = kept or Leaves(np.ones(rows, np.float32))

    @property
    def writes(self) -> bool:
        """Whether changes go to the file."""
        source = self._source
        return source.writable and self._pid == os.getpid() and source.is_open

    def _open(self) -> Leaves | None:
        """Open or make the file, and return its content."""
        home, writes = self._source.home, self.writes
        found: Leaves | None = None
        opened, faults = None, list[str]()
        if PriorityFile.exists(home):
            opened = PriorityFile.open(home, writes)
            found, faults = opened.load() if opened else (None, ["has the size of no such file"])
        for fault in faults:
            log.warning("%s: %s; run ringmap.check on the buffer", self._path, fault)
        if writes and opened is not None and found is not None:
            if faults:
                opened.checkpoint(found)
            self.file = opened
            return found
        if opened is not None:
            opened.close()
        if writes:
            found = Leaves(np.ones(home.rows, np.float32))
            PriorityFile.create(home, found)
            self.file = PriorityFile.open(home, write=True)
            assert self.file is not None
            self.file.load()
        elif found is not None:  # a power cut may have removed the rows beyond
            found.upto = min(found.upto, self._source.head)
        return found

    def change(self, append: Callable[[PriorityFile], bool], change: Callable[[Leaves], None]) -> None:
        """Change priorities, in the file first: by a frame of its log.

        Raises:
            EnvironmentFault: the disk is full or fails. Nothing was changed.
        """
        file, leaves = self.file, self.leaves
        if file is not None and self.writes:
            self._source.home.disk.check_held("PrioritizedSampler")
            then = (
                "no priority was changed here, and in the file at most these: free space or mend the disk, then call "
                "it again"
            )
            with clear_errors("PrioritizedSampler", self._path, then=then):
                if not append(file):
                    file.turn(leaves)
                    if not append(file):  # a frame is longer than a log
                        changed = replace(leaves, values=leaves.values.copy())
                        change(changed)
                        file.checkpoint(changed)
        change(leaves)

    def rewrite(self) -> None:
        """Write all of `leaves`, which the caller changed, to the file. O(rows)."""
        if self.file is not None and self.writes:
            self.file.checkpoint(self.leaves)

    def sync(self) -> None:
        """Force the priorities to the disk.

        Raises:
            EnvironmentFault: the disk fails. The next call first writes them all again.
        """
        if self.file is None or not self.writes:
            return
        then = "the newest priorities may not be on the disk: mend it, then call it again"
        with clear_errors("PrioritizedSampler.flush", self._path, then=then):
            self.file.keep(self.leaves)

    def close(self) -> None:
        """Release the file; a parent process's file is not touched."""
        if self.file is not None and self._pid == os.getpid():
            self.file.close()
