"""Names for the integers that locate data: a type checker tells them apart, at run time they are `int`.

    clip id --- + base ---> clip number --- ClipIndex ---> position --- % rows ---> slot
                               ordinal --- LiveEpisodes ---^

Scalars have these types; for an array the docstring names the type of its values. Arithmetic returns a plain `int`, and
the
code that does it names the result: `Slot(position % rows)`. docs/explanation/glossary.md has a table of them, with
their ranges.
"""

from __future__ import annotations

from typing import NewType

__all__ = ["NOWHERE", "ORIGIN", "ClipId", "ClipNumber", "Ordinal", "Position", "Slot"]

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
