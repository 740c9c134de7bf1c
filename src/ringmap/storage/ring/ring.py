"""The ring: where steps are stored, in integers only, and names for the integers that locate data.

        tail          head
         v              v
    [..|e2 e2 e2|e3 e3|  free  |spare]     rows = max_steps + spare, slot = position % rows

    clip id --- + base ---> clip number --- ClipIndex ---> position --- % rows ---> slot
                               ordinal --- LiveEpisodes ---^

The spare rows exist so that an episode can be written where no live row is, while the episodes that it will evict are
still live. A type checker tells the integers apart; at run time they are `int`. Scalars have these types; for an array
the docstring names the type of its values. Arithmetic returns a plain `int`, and the code that does it names the
result: `Slot(position % rows)`. docs/explanation/glossary.md has a table of them, with their ranges.

Invariants: head - tail <= max_steps; a position never wraps, its slot does.
Not here: arrays, files, episodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

__all__ = ["NOWHERE", "ORIGIN", "ClipId", "ClipNumber", "Ordinal", "Position", "Ring", "Slot", "spare_rows"]

Position = NewType("Position", int)
"""Of a step, counted from the first one ever stored: for life, in every process."""

ORIGIN = Position(0)
"""Of the first step ever stored."""

NOWHERE = Position((1 << 63) - 1)
"""Beyond all steps: as a tail, it says that every row is lost."""

Slot = NewType("Slot", int)
"""Of a row in the columns: position % rows."""

Ordinal = NewType("Ordinal", int)
"""Of an episode, counted from the oldest one that this process has seen: constant until an era ends."""

ClipNumber = NewType("ClipNumber", int)
"""Of a clip of one span, counted as ordinals are: constant until its `SpanIndex` numbers clips again."""

ClipId = NewType("ClipId", int)
"""Of a clip among those that exist: 0 is the oldest one, and an eviction moves them all."""


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
    rows: int = field(init=False)
    """Number of rows in every column."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.max_steps + self.spare)

    def overwritten(self, head: int) -> Position:
        """Return the position below which every row is overwritten once `head` positions were written."""
        return Position(head - self.rows)

    def pieces(self, position: Position, count: int) -> list[tuple[Slot, int]]:
        """Return the one or two runs `(slot, steps)` of `count` steps from `position`."""
        slot = Slot(position % self.rows)
        first = min(count, self.rows - slot)
        return [(slot, first)] if first == count else [(slot, first), (Slot(0), count - first)]
