"""Collect the errors of a call that has to continue, and raise them at its end.

Invariants: the first error is raised, with the others as its notes; none is lost.
Not here: the consequences (recorder.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["Faults"]


class Faults:
    """Collects errors, and the slots whose episodes they cut.

    Example:
        >>> faults = Faults()
        >>> with faults.cutting(3, "env 3: not stored"):
        ...     raise ValueError("planted")
        >>> faults.cut
        {3}
        >>> faults.throw()
        Traceback (most recent call last):
        ValueError: planted
        env 3: not stored
    """

    def __init__(self) -> None:
        self.found: list[Exception] = []
        self.cut: set[int] = set()

    def note(self, error: Exception, about: str) -> None:
        """Keep an error, with a note about its context."""
        error.add_note(about)
        self.found.append(error)

    @contextlib.contextmanager
    def noting(self, about: str) -> Iterator[None]:
        """Keep an exception of the block."""
        try:
            yield
        except Exception as error:
            self.note(error, about)

    @contextlib.contextmanager
    def cutting(self, slot: int, about: str) -> Iterator[None]:
        """Keep an exception of the block, and mark a slot's episode as cut by it."""
        try:
            yield
        except Exception as error:
            self.cut.add(slot)
            self.note(error, about)

    @classmethod
    def onto(cls, other: Faults) -> Faults:
        """Return faults with the errors of another, and without its cuts."""
        made = cls()
        made.found = other.found
        return made

    def throw(self) -> None:
        """Raise the first error, if there is one."""
        if self.found:
            first, *others = self.found
            for error in others:
                first.add_note(f"and {type(error).__name__}: {error}")
            raise first
