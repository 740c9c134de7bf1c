"""The log of later labels: for each relabelled row the newest label, beside the ring of rows.

    rows    [ r40 r41 r42 r43 r44 r45 ]         first labels, never changed
                   |   |           |
    index         p7  p8          p3            row -> position in the log; -1: the row's own label
                   v   v           v
    log     [ .. p3 p4 p5 p6 | p7 p8 ]          one commit per relabelled episode

Before a commit evicts a label that is still the newest of its row, that label is committed again.

Invariants: a row's label is that of the last commit that names the row with its stamp; a label that is
the newest of a row in the window is never evicted.
Not here: the meaning of labels, the path of the log (labelled.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.steps import ROW, StepRing
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.disk.calls import Turn, thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import is_live, lost, retry

__all__ = ["LABELS_PER_ROW", "LabelLog"]

Array = np.ndarray[Any, np.dtype[Any]]

LABELS_PER_ROW = 3
_ADVICE = "raise the capacity"
_WHERE = "DistillationBuffer"


class LabelLog:
    """The newest labels of the rows of a ring.

    Args:
        ring: the ring of rows, with a column `stamp`.
        log: the buffer of labels.
    """

    def __init__(self, ring: StepRing, log: ReplayBuffer) -> None:
        self.ring = ring
        self.log = log
        self._slots = 0
        self._where: Array = np.empty(0, np.int64)
        self._rows: Array = np.empty(0, np.int64)
        self._seen = 0
        self._turn = Turn()

    @staticmethod
    def schema(labels: list[ColumnSpec]) -> Schema:
        """Return the columns of a log for these labels."""
        own = [("row", "<i8"), ("stamp", "<u8"), ("round", "<i8")]
        return Schema((*(ColumnSpec(n, (), np.dtype(d)) for n, d in own), *labels))

    def names(self) -> list[str]:
        """Return the columns that a relabelling replaces."""
        schema = self.log.schema
        return [] if schema is None else [n for n in schema.names if n not in ("row", "stamp")]

    # -- the index ---------------------------------------------------------------------------

    def follow(self) -> None:
        """Index what was committed since the last call. O(new labels).

        Raises:
            LappedError: the writer overtook this reader for 5 s without progress.
        """
        source = self.log.engine.source
        take_in = partial(self._turn.take, _WHERE, self._take_in)
        retry(take_in, source.refresh, source.folder, _ADVICE, retry_s=source.retry_s)

    def _take_in(self) -> int:
        """Index the labels that the log has now; return 1 if they were evicted during the read, else 0.

        Called in turn, so that in every thread labels come in the order of their commits, and
        those of one commit together.
        """
        source, ring = self.log.engine.source, self.ring
        if self._seen < source.tail:
            # At the start, or after being lapped: labels that were carried forward are read at their new place.
            self._seen = source.tail
            self._where[:] = -1
        head = source.head
        if self._seen >= head:
            return 0
        ring.buffer.refresh()  # after the log: a row is stored before its label
        rows = ring.engine.source.rows
        if rows is None:  # a power cut left labels without rows
            return 0
        if not self._slots:
            self._slots = rows.ring.rows
            self._where = np.full(self._slots, -1, np.int64)
            self._rows = np.full(self._slots, -1, np.int64)
        positions = np.arange(self._seen, head)
        positions = positions[self.log.engine.reader.starts(positions, ROW)]
        of, stamps = (_column(source, name, positions) for name in ("row", "stamp"))
        if not is_live(source, self._seen):
            return 1
        self._note(of, stamps, positions)
        self._seen = head
        return 0

    def refresh(self) -> None:
        """Move a reader to the newest labels and their rows."""
        self._catch_up()
        self.follow()

    def _catch_up(self) -> None:
        self.log.refresh()
        self.ring.buffer.refresh()  # after the log: a row is stored before its label

    def _note(self, rows: Array, stamps: Array, positions: Array) -> None:
        columns, held = self.ring.read(rows, ["stamp"])
        own = held & (columns["stamp"] == stamps)
        slots = rows[own] % self._slots
        self._where[slots] = positions[own]  # in order: the last label of a row stays
        self._rows[slots] = rows[own]

    def of(self, rows: Array) -> Array:
        """Return the position of each row's newest label, -1 for its own, all as of one moment. O(rows)."""
        return self._turn.take(_WHERE, lambda: self._of(rows))

    def _of(self, rows: Array) -> Array:
        if not self._slots:
            return np.full(len(rows), -1)
        slots = rows % self._slots
        return np.where(self._rows[slots] == rows, self._where[slots], -1)

    # -- reading -----------------------------------------------------------------------------

    def overlay(self, rows: Array, batch: dict[str, Array]) -> None:
        """Replace the labels in a batch of rows by newer ones, and their `round` as `label_round`."""
        source = self.log.engine.source

        def attempt() -> int:
            # Both in one turn: another thread may restart the index.
            where = self._turn.take(_WHERE, lambda: None if self._take_in() else self._of(rows))
            if where is None:
                return 1
            newer = np.flatnonzero(where >= 0)
            if not len(newer):
                return 0
            positions = where[newer]
            found = {name: _column(source, name, positions) for name in self.names()}
            if lost(source, positions) is not None:
                return 1  # the writer carried it forward meanwhile
            for name, values in found.items():
                batch["label_round" if name == "round" else name][newer] = values
            return 0

        retry(attempt, self._catch_up, source.folder, _ADVICE, retry_s=source.retry_s)

    # -- writing -----------------------------------------------------------------------------

    def write(self, rows: Array, round: int, labels: Mapping[str, Array]) -> None:
        """Give rows in the window new labels, in one commit.

        Cost: one commit, plus at most as many labels carried forward, amortised.
        """
        self.follow()  # an interrupt may have come between a commit and its note
        self._make_room(len(rows))
        stamps = self.ring.column("stamp", rows)
        rounds = np.full(len(rows), round)
        self._commit({"row": rows, "stamp": stamps, "round": rounds, **labels})

    def _commit(self, columns: Mapping[str, Array]) -> None:
        self.log.write_episode(columns)
        self.follow()

    def _make_room(self, count: int) -> None:
        """Commit again the labels that are still needed and that `count` new ones would evict.

        A commit of what an episode of the log still holds is not longer than that episode, so it evicts
        at most that episode.
        """
        log, source = self.log, self.log.engine.source
        done: int = source.tail
        while done < source.head + count - log.max_steps:
            with thread.searching, source.lock:
                at = int(source.live.starts.searchsorted(done))
                start, size = int(source.live.starts[at]), int(source.live.lengths[at])
            positions = np.arange(start, start + size)
            rows = _column(source, "row", positions)
            needed = positions[(self.of(rows) == positions) & self.ring.holds(rows)]
            if len(needed):
                names = ["row", "stamp", *self.names()]
                self._commit({name: _column(source, name, needed) for name in names})
            done = start + size


def _column(source: Handle, name: str, positions: Array) -> Array:
    rows = source.rows
    assert rows is not None
    return rows.take([name], positions)[0]
