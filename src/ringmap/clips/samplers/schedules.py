"""Schedules: a number that changes with the step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Linear"]


@dataclass(frozen=True, slots=True)
class Linear:
    """From `start` at step 0 straight to `stop` at step `steps`, and `stop` from there on.

    Example:
        >>> beta = Linear(0.4, 1.0, steps=100)
        >>> beta(0), beta(50), beta(1000)
        (0.4, 0.7, 1.0)
    """

    start: float
    stop: float
    steps: int

    def __call__(self, step: int) -> float:
        """Return the value at a step."""
        share = min(max(step / self.steps, 0.0), 1.0)
        return self.start + (self.stop - self.start) * share
