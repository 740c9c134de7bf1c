"""Collect the errors of a call that has to continue, and raise them at its end.

Invariants: the first error is raised, with the others as its notes; none is lost.
Not here: the consequences (recorder.py).
"""

from __future__ import annotations

__all__ = ["Faults"]


class Faults:
    """Collects errors, and the slots whose episodes they cut.

    Example:
        >>> faults = Faults()
        >>> with faults.collecting("env 3: not stored", 3):
        ...     raise ValueError("planted")
        >>> faults.cut
        {3}
        >>> faults.throw()
        Traceback (most recent call last):
        ValueError: planted
        env 3: not stored
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.cut: set[int] = set()

    def note(self, error: Exception, about: str, *cut: int) -> None:
        """Keep an error, with a note about its context; it cuts the episodes of these slots."""
        error.add_note(about)
        self.errors.append(error)
        self.cut.update(cut)

    def collecting(self, about: str, *cut: int) -> _Collecting:
        """Note an exception of the `with` block."""
        return _Collecting(self, about, cut)

    def throw(self) -> None:
        """Raise the first error, if there is one."""
        if self.errors:
            first, *others = self.errors
            for error in others:
                first.add_note(f"and {type(error).__name__}: {error}")
            raise first


class _Collecting:
    def __init__(self, faults: Faults, about: str, cut: tuple[int, ...]) -> None:
        self._faults, self._about, self._cut = faults, about, cut

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._faults.note(error, self._about, *self._cut)
        return isinstance(error, Exception)
