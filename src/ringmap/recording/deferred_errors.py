"""Faults: what went wrong in a call that had to go on, raised in the end.

Invariants: the first error is the one that is raised, the others are its notes; none is lost.
Not here: what is done about it (recorder.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["Faults"]


class Faults:
    """Errors, and the slots whose episodes they cut.

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
        """Keep an error, and what it was about."""
        error.add_note(about)
        self.found.append(error)

    @contextlib.contextmanager
    def noting(self, about: str) -> Iterator[None]:
        """Keep what the block raises."""
        try:
            yield
        except Exception as error:
            self.note(error, about)

    @contextlib.contextmanager
    def cutting(self, slot: int, about: str) -> Iterator[None]:
        """Keep what the block raises, and that it cuts a slot's episode."""
        try:
            yield
        except Exception as error:
            self.cut.add(slot)
            self.note(error, about)

    @classmethod
    def onto(cls, other: Faults) -> Faults:
        """Return faults whose errors are another's, and whose cuts are nobody's."""
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
