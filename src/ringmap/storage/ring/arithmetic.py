"""Ring arithmetic: where steps are stored, in integers only.

        tail          head
         v              v
    [..|e2 e2 e2|e3 e3|  free  |spare]     rows = max_steps + spare, slot = position % rows

The spare rows exist so that an episode can be written where no live row is,
while the episodes that it will evict are still live.

Invariants: head - tail <= max_steps; a position never wraps, its slot does.
Not here: arrays, files, episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringmap.storage.ring.integers import Position, Slot

__all__ = ["Ring", "spare_rows"]


def spare_rows(max_steps: int) -> int:
    """Return the default number of spare rows for a ring of `max_steps`.

    A sixteenth, at least 1024 (an episode that long commits in one step), at most doubling the ring.
    """
    return min(max_steps, max(1024, max_steps // 16))


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of `max_steps` steps with `spare` more rows."""

    max_steps: int
    spare: int

    @property
    def rows(self) -> int:
        """Number of rows in every column."""
        return self.max_steps + self.spare

    def overwritten(self, head: int) -> Position:
        """Return the position below which every row is overwritten once `head` positions were written."""
        return Position(head - self.rows)

    def pieces(self, position: Position, count: int) -> list[tuple[Slot, int]]:
        """Return the one or two runs `(slot, steps)` of `count` steps from `position`."""
        slot = Slot(position % self.rows)
        first = min(count, self.rows - slot)
        return [(slot, first)] if first == count else [(slot, first), (Slot(0), count - first)]
