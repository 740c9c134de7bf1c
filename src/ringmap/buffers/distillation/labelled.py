"""Rows with their newest labels: a ring, and a log of labels that is created with the first relabelling.

    DIR/rows     [ round 0 | round 1 | round 2 ]      a ring of rows, one commit per add
    DIR/labels   [ ep 3 | ep 5 ]                      later labels of some, one commit per episode

Invariants: a label exists only if its row does; a copy of both is whole, or absent.
Not here: the ring (steps.py), the log (labels.py), which rows are drawn (buffer.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ringmap.buffers.distillation.labels import LABELS_PER_ROW, LabelLog
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.steps import StepRing, whole
from ringmap.errors import UnknownFormatError
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.columns.values import root
from ringmap.storage.directory import examine
from ringmap.storage.disk.calls import Turn
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import local_path
from ringmap.storage.read.read_live import redraw_lost
from ringmap.storage.records.manifest import LABELS as LABELS_KIND
from ringmap.storage.records.manifest import Kind

__all__ = ["LABELS", "LabelledRows", "rows_path"]

Array = np.ndarray[Any, np.dtype[Any]]

LABELS = ("teacher_actions", "teacher_log_std", "teacher_logits")


class LabelledRows:
    """A ring of rows with a column `stamp`, and their labels.

    Args:
        ring: the rows.
        path: the directory of both; None for RAM.
        options: of the log, when it is created: durability, sync_every_s.
    """

    def __init__(self, ring: StepRing, path: str | None, options: Mapping[str, Any]) -> None:
        self.ring = ring
        self.path = path
        self._options = options
        self.log: LabelLog | None = None
        self._turn = Turn()
        if self.writes:
            self._find_log()

    @property
    def writes(self) -> bool:
        """Whether this handle is the writer."""
        return self.ring.buffer.mode == "r+"

    @property
    def _disk(self) -> Disk:
        return self.ring.engine.disk

    # -- reading -----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Move a reader to the newest state."""
        if self.writes:
            return
        if self.log is None:  # only one log, whichever thread opens it first
            self._turn.take("DistillationBuffer.refresh", lambda: None if self.log else self._find_log())
        if self.log is not None:
            self.log.refresh()
        else:
            self.ring.buffer.refresh()

    def read(self, ids: Array) -> tuple[dict[str, Array], Array]:
        """Return rows by id with their newest labels, flat; and which rows are still stored: the others are
        meaningless.

        Adds to the stored columns: `ids`, and `label_round`, the round of the label.
        """
        columns, _ = self.ring.read(ids)
        columns["label_round"] = columns["round"].copy()
        del columns["stamp"]
        columns["ids"] = ids
        if self.log is not None:
            self.log.overlay(ids, columns)
        return columns, self.ring.holds_still(ids)  # a label is valid only while its row is stored

    def drawn(self, draw: Callable[[int], Array], count: int, where: str) -> dict[str, Array]:
        """Return rows as `read` does, all of them still stored: one that was evicted meanwhile is redrawn.

        Args:
            draw: returns the ids of a given number of rows.
            count: number of rows.
            where: the method to name in an error.

        Raises:
            LappedError: the writer overtook this reader for 5 s without progress.
        """
        ids = draw(count)
        columns, held = self.read(ids)
        if held.all():
            return columns

        def gather(which: Array) -> Array:
            again, good = self.read(ids[which])
            for name, values in again.items():
                columns[name][which] = values
            return good

        source = self.ring.engine.source
        redraw_lost(
            source,
            ids,
            ~held,
            gather,
            lambda which: draw(len(which)),
            where,
            "raise the capacity",
            self.refresh,
        )
        return columns

    # -- writing -----------------------------------------------------------------------------

    def labels(self) -> Schema | None:
        """Return the label columns; None before the first row."""
        schema = self.ring.schema
        if schema is None:
            return None
        return Schema(tuple(spec for spec in schema.columns if root(spec.name) in LABELS))

    def relabel(self, ids: Array, round: int, labels: Mapping[str, Array]) -> None:
        """Give rows in the window new labels, in one commit."""
        if self.log is None:
            specs = self.labels()
            assert specs is not None
            self.log = self._made_log(list(specs.columns))
        self.ring.engine.commit_pending("DistillationBuffer.relabel")  # a row is stored before its label
        self.log.write(ids, round, labels)

    def _made_log(self, specs: list[ColumnSpec]) -> LabelLog:
        self.ring.engine.source.disk.check_held("DistillationBuffer")  # the log is made by path
        size, schema = LABELS_PER_ROW * self.ring.capacity, LabelLog.schema(specs)
        log = ReplayBuffer(
            size,
            path=self._log_path,
            schema=schema,
            disk=self._disk,
            kind=Kind(LABELS_KIND),
            **self._options,
        )
        return LabelLog(self.ring, log)

    @property
    def _log_path(self) -> str | None:
        return None if self.path is None else os.path.join(self.path, "labels")

    def _find_log(self) -> None:
        """Open the log of labels if there is one on disk."""
        self.ring.engine.source.disk.check_held("DistillationBuffer")
        path, disk = self._log_path, self._disk
        if path is None or not disk.exists(path) or examine(disk, path) != "buffer":
            return
        how: Mapping[str, Any] = {"mode": "r+", **self._options} if self.writes else {}
        self.log = LabelLog(self.ring, ReplayBuffer.open(path, disk=disk, kind=LABELS_KIND, **how))

    # -- both together -----------------------------------------------------------------------

    def flush(self, notes: Mapping[str, Any]) -> None:
        """Force rows and labels to the disk, with notes."""
        self.ring.buffer.flush(notes=notes)
        if self.log is not None:
            self.log.log.flush()

    def copy_to(self, path: str | os.PathLike[str], notes: Mapping[str, Any], where: str) -> None:
        """Write a copy of both to a new directory, with these notes.

        Raises:
            ExistsError: the directory exists.
        """
        with whole(self._disk, local_path(path), where) as folder:
            self.ring.copy_to(rows_path(folder, where, self._disk), notes)
            if self.log is not None:
                self.log.log.snapshot(os.path.join(folder, "labels"))

    def check(self) -> list[Any]:
        """Return the faults of both, each finding with its file."""
        log = [] if self.log is None else self.log.log.check()
        return [*self.ring.buffer.check(), *log]

    def close(self) -> None:
        """Flush labels, and release files and locks even if that raises."""
        try:
            if self.log is not None:
                self.log.log.close()
        finally:
            self.ring.close()


def rows_path(path: str | os.PathLike[str], where: str, disk: Disk) -> str:
    """Return the path of the rows in a directory, existing or not.

    Raises:
        UnknownFormatError: the directory holds something else.
    """
    folder = local_path(path)
    if disk.exists(folder) and disk.is_folder(folder):
        names = {name for name in disk.names(folder) if not name.startswith(".")}
        if names and "rows" not in names:
            raise UnknownFormatError(
                f"{where}: {folder} holds something else, such as {min(names)!r}; choose another path"
            )
    return os.path.join(folder, "rows")
