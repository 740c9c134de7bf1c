"""Mending: the changes to a directory that repair is made of.

Invariants: each change may be interrupted, and what it leaves is found by the next repair; a file
that is made anew has its name only when it is whole and synced.
Not here: which changes, and in which order (plan.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial

from ringmap.storage.disk.files import Disk, File
from ringmap.storage.inspect.faults import FRESH
from ringmap.storage.inspect.raw_files import Files
from ringmap.storage.inspect.scan import Reached
from ringmap.storage.records.layout import STATE
from ringmap.storage.records.state import NO_BOOT, State, StateFile
from ringmap.storage.records.table import EpisodeTable, Record

__all__ = ["Hands"]


class Hands:
    """What changes the files of a buffer, by their relative names.

    Args:
        files: the directory.
        slots: records that the table has room for.
        uuid: the buffer's.
    """

    def __init__(self, files: Files, slots: int, uuid: bytes) -> None:
        self.disk: Disk = files.disk
        self.path = files.path
        self._slots = slots
        self._uuid = uuid

    def _opened(self, name: str) -> closing[File]:
        return closing(self.disk.open(self.path(name), write=True))

    def write_records(self, name: str, records: list[Record]) -> None:
        """Write records into the table, wherever it lies and whatever its size is."""
        with self._opened(name) as file:
            table = EpisodeTable(file, self._slots, self._uuid, mapped=False)
            for record in records:
                table.write(record)

    def wipe_record(self, name: str, number: int) -> None:
        """Wipe the slot of a record."""
        with self._opened(name) as file:
            EpisodeTable(file, self._slots, self._uuid, mapped=False).zero(number % self._slots)

    def append(self, name: str, data: bytes, offset: int) -> None:
        """Write bytes behind the end of a segment, durably: a record names them next."""
        with self._opened(name) as file:
            file.write(data, offset)
            file.sync()

    def move(self, source: str, target: str) -> None:
        """Give a file another name, durably."""
        self.disk.rename(self.path(source), self.path(target))
        for folder in {os.path.dirname(self.path(name)) for name in (source, target)}:
            self.disk.sync_folder(folder)

    def renew(self, name: str, make: Callable[[str], None]) -> None:
        """Make a file anew: under another name, whole and synced, then in its place."""
        self.discard(name + FRESH)
        make(self.path(name + FRESH))
        self.move(name + FRESH, name)

    def discard(self, name: str) -> None:
        """Remove a file, or a folder of a column, if it is there."""
        self.disk.discard(self.path(name))

    def reframe(self, name: str, size: int, frame: list[tuple[int, bytes]]) -> None:
        """Give a file its size, and what stands around its content.

        The header first: it shows that the file is ours, should this be interrupted.
        """
        path = self.path(name)
        for offset, data in frame:
            with self._opened(name) as file:
                file.write(data, offset)
            if self.disk.size(path) != size:
                self.disk.extend(path, size)

    def sync(self, files: Iterable[str], folders: Iterable[str] = ()) -> None:
        """Return once files, and the names in folders, are on the disk itself."""
        for name in files:
            if self.disk.is_folder(
                self.path(name)
            ):  # what is in it is replaced by synced files only
                self.disk.sync_folder(self.path(name))
                continue
            with self._opened(name) as file:
                file.sync()
        for folder in folders:
            self.disk.sync_folder(self.path(folder))

    def show(self, reached: Reached, known: list[State], missing: bool) -> None:
        """Write both states, of an era that no reader has seen, so that each looks at everything anew.

        The boot id is left out: the next writer verifies, and makes durable, what no sync vouches for.
        """
        path = self.path(STATE)
        if missing:
            self.renew(STATE, partial(_create_state, self.disk, self._uuid))
        elif self.disk.size(path) != StateFile.nbytes:
            self.disk.extend(path, StateFile.nbytes)
        # Without a valid state nothing tells the last era; the clock is ahead of any count of eras.
        era = max((state.era for state in known), default=time.time_ns())
        generation = max((state.generation for state in known), default=0)
        mark = min(reached.seq, max((state.mark for state in known), default=0))
        with self._opened(STATE) as file:
            state_file = StateFile(file, self._uuid)
            state_file.write_both(
                State(
                    generation + 1, reached.seq, reached.first, reached.tail, reached.head,
                    mark, era + 1, NO_BOOT,
                )
            )  # fmt: skip
            state_file.sync()


def _create_state(disk: Disk, uuid: bytes, path: str) -> None:
    StateFile.create(disk, path, uuid)
