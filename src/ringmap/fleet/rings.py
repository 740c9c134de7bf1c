"""The rings below a directory: how many steps came into them, ever, and who writes them.

    runs/replay/collector-0    state.bin  head 12,400 ┐
    runs/replay/collector-1    state.bin  head 11,900 ┼─► 31,300 steps
    (deleted)                  mark             7,000 ┘

A mark is the highest head that was seen of a ring, by its uuid. So a ring that is deleted or cleared takes nothing
back, and a copy of one is not counted twice. Rows of an open group are in no head yet: they are counted in its file.

Invariants: the sum of the marks never falls; nothing is changed, locked or waited for.
Not here: rows, episodes (storage), what the sum is compared with (pace.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringmap.errors import ReplacedError, RingmapError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import describe, holder_of
from ringmap.storage.disk.paths import STEPS, Paths
from ringmap.storage.records.manifest import hold, read_manifest
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.step_file import OpenRows

__all__ = ["Rings"]


@dataclass(frozen=True, slots=True)
class _Ring:
    disk: Disk  # holds the folder
    folder: str
    uuid: str
    state: StateFile
    groups: dict[str, OpenRows] = field(default_factory=dict)

    def open_rows(self) -> list[tuple[int, int]]:
        """Return the rows of groups that were not committed a moment ago: the number of the record before, and how
        many."""
        folder, found = Paths(self.folder).open, []
        names = self.disk.names(folder)
        for gone in self.groups.keys() - set(names):
            del self.groups[gone]
        for name in names:
            group = self.groups.get(name)
            if group is None:
                group = OpenRows(self.disk, os.path.join(folder, name, STEPS))
                self.groups[name] = group
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
                group.catch_up()
                if group.after is not None:
                    found.append((group.after[0], group.count))
        return found


class Rings:
    """The rings that are children of a directory, now and later. Memory and two descriptors for each."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._known: dict[str, _Ring] = {}
        self.marks: dict[str, int] = {}
        """uuid -> steps, of each ring that was ever seen."""

    def look(self, uncommitted: bool = False) -> int:
        """Return how many steps ever came into the rings. About 15 us a ring.

        A ring that can't be read at this moment counts with its mark.

        Args:
            uncommitted: whether rows of open groups count, too. About 30 us more for each ring.
        """
        added = 0
        names = self._disk.names(self._path)
        for gone in self._known.keys() - set(names):
            del self._known[gone]
        for name in names:
            ring = self._ring(name)
            if ring is None:
                continue
            groups = ring.open_rows() if uncommitted else []  # first: the state tells which of them are committed
            # The newest whole slot: at worst the head before a commit that is just being shown.
            state = ring.state.newest()
            if state is not None:
                self.raise_marks({ring.uuid: state.head})
                added += sum(count for after, count in groups if after == state.seq)
        return sum(self.marks.values()) + added

    def raise_marks(self, marks: Mapping[str, int]) -> None:
        """Take over marks that are higher: uuid -> steps."""
        for uuid, steps in marks.items():
            if steps > self.marks.get(uuid, 0):
                self.marks[uuid] = steps

    def _ring(self, name: str) -> _Ring | None:
        folder = os.path.join(self._path, name)
        known = self._known.get(name)
        try:
            if known is not None:
                known.disk.check_held(folder)
                return known
        except ReplacedError:
            del self._known[name]
        try:
            if not self._disk.exists(Paths(folder).manifest):
                return None
            disk = hold(self._disk, folder)
            uuid = read_manifest(disk, folder).uuid
            state = StateFile.open(disk, Paths(folder).state, uuid, write=False)
        except (RingmapError, OSError):  # unfinished, damaged, or not to be read at this moment
            return None
        found = self._known[name] = _Ring(disk, folder, uuid.hex(), state)
        return found

    def is_written(self, elsewhere: bool = False) -> bool:
        """Whether a process writes any that the last look saw, or the system does not tell; `elsewhere`: a process
        other than this one."""
        return any(
            self._disk.system.is_locked(lock) is not False
            and not (elsewhere and holder_of(lock).get("pid") == os.getpid())
            for lock in self._locks()
        )

    def last_writer(self) -> str:
        """Name who wrote last, for a message."""
        holders = [(h.get("since") or "", lock, h) for lock in self._locks() if (h := holder_of(lock))]
        if not holders:
            return f"no ring is below {self._path}"
        _, lock, holder = max(holders, key=lambda found: found[0])
        return f"{describe(holder)} wrote {os.path.dirname(lock)}"

    def _locks(self) -> list[str]:
        return [Paths(ring.folder).lock for ring in list(self._known.values())]
