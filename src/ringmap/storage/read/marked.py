"""The marks of a ring's stored episodes: those whose record is the one that was marked.

Not here: the file (sidecars/marks.py).
"""

from __future__ import annotations

from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars.marks import ANY, Mark, MarkFile

__all__ = ["mark_file", "marked", "record_key"]


def mark_file(source: Handle, path: str) -> MarkFile:
    """Return the file of marks at a path, as this ring sees it."""
    return MarkFile(source.home.disk, path, source.manifest.uuid.hex())


def record_key(source: Handle, position: int) -> str | None:
    """Return what tells an episode from another one at the same position; None if no stored episode begins there. O(log
    episodes)."""
    with source.memory:
        live = source.live
        ordinal = live.ordinal_from(Position(position))
        if ordinal < live.last and live.start(ordinal) == position:
            record = source.record_of(ordinal)
            return None if record is None else f"{record.rows_sum:016x}"
        if live.links is not None and position in live.whole.names:
            return ANY
        return None


def marked(source: Handle, marks: dict[int, Mark]) -> dict[int, Mark]:
    """Return the marks of stored episodes. O(marks log episodes)."""
    found = {}
    for position, mark in marks.items():
        key = record_key(source, position)
        if key is not None and (mark.record == key or ANY in (key, mark.record)):
            found[position] = mark
    return found
