"""The priorities of a buffer, as one handle has them: in memory, and in the file where that handle may write.

Invariants: what the file holds is what `change` had been given when it returned; a reader and a forked child write
nothing.
Not here: the bytes (priorities.py), which clip a priority is of (clips/samplers).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ringmap.errors import EnvironmentFault
from ringmap.storage.sidecars.priorities import Leaves, PriorityFile
from ringmap.storage.source import Source

__all__ = ["StoredPriorities"]

log = logging.getLogger("ringmap")


class StoredPriorities:
    """Priorities of the rows of one buffer.

    Args:
        source: the buffer.
        kept: those that the caller has from before.
        in_fork: whether these are a parent process's, and newer than what is stored.

    Attributes:
        leaves: the priorities; changed by `change` alone.

    Raises:
        EnvironmentFault: the disk fails.
    """

    def __init__(self, source: Source, kept: Leaves | None, in_fork: bool = False) -> None:
        self._source = source
        self._pid = os.getpid()
        self.file: PriorityFile | None = None
        self._is_unsure = False
        rows, volatile = source.manifest.rows, source.disk.volatile
        if kept is not None and len(kept.values) != rows:
            kept = None
        if kept is not None and volatile:
            kept.upto = min(kept.upto, source.head)
        if not volatile:
            with self._clear_errors("mend the disk, then draw again"):
                stored = self._open()
            kept = kept if in_fork and kept is not None else stored
        self.leaves = kept or Leaves(np.ones(rows, np.float32))

    @property
    def writes(self) -> bool:
        """Whether changes go to the file."""
        source = self._source
        return source.writable and self._pid == os.getpid() and source.is_open

    @contextlib.contextmanager
    def _clear_errors(self, advice: str, where: str = "PrioritizedSampler") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = self._source.home.path(PriorityFile.names[0])
            raise EnvironmentFault(
                error.errno, f"{where}: {error.strerror or error} ({path}); {advice}"
            ) from error

    def _open(self) -> Leaves | None:
        """Open or make the file, and return what it holds."""
        home, writes = self._source.home, self.writes
        found: Leaves | None = None
        if PriorityFile.exists(home):
            path = home.path(PriorityFile.names[0])
            opened = PriorityFile.open(home, writes)
            if opened is None:
                faults = [f"has {home.disk.size(path)} bytes"]
            else:
                found, faults = opened.load()
            for fault in faults:
                log.warning("%s: %s; run ringmap.check on the buffer", path, fault)
            if writes and opened is not None and found is not None:
                if faults:
                    opened.checkpoint(found)
                self.file = opened
                return found
            if opened is not None:
                opened.close()
            if not writes:
                if found is not None:  # a power cut may have taken the rows beyond
                    found.upto = min(found.upto, self._source.head)
                return found
        if writes:
            found = Leaves(np.ones(home.rows, np.float32))
            PriorityFile.create(home, found)
            self.file = PriorityFile.open(home, write=True)
            assert self.file is not None
            self.file.load()
        return found

    def change(
        self, append: Callable[[PriorityFile], bool], change: Callable[[Leaves], None]
    ) -> None:
        """Change priorities, in the file first: by a frame of its log, or with all others where none fits.

        Raises:
            EnvironmentFault: the disk is full or fails. Nothing was changed.
        """
        file, leaves = self.file, self.leaves
        if file is not None and self.writes:
            self._source.disk.check_held("PrioritizedSampler")
            with self._clear_errors(
                "no priority was changed here, and in the file at most these: free space or mend the disk, then call it "
                "again"
            ):
                if not append(file):
                    changed = replace(leaves, values=leaves.values.copy())
                    change(changed)
                    file.checkpoint(changed)
        change(leaves)

    def rewrite(self) -> None:
        """Write all of `leaves`, which the caller changed, to the file. O(rows)."""
        if self.file is not None and self.writes:
            self.file.checkpoint(self.leaves)

    def sync(self) -> None:
        """Force the priorities to the disk itself.

        Raises:
            EnvironmentFault: the disk fails. Called again, it writes them all again first.
        """
        if self.file is None or not self.writes:
            return
        advice = "the newest priorities may not be on the disk: mend it, then call it again"
        with self._clear_errors(advice, "PrioritizedSampler.flush"):
            if self._is_unsure:  # a sync that failed is not made good by another
                self.file.checkpoint(self.leaves)
            self._is_unsure = True
            self.file.sync()
            self._is_unsure = False

    def close(self) -> None:
        """Give the file back; one of a parent process is left alone."""
        if self.file is not None and self._pid == os.getpid():
            self.file.close()
