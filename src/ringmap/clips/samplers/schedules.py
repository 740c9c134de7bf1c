"""Schedules: a number that changes with the step."""

from __future__ import annotations

from dataclasses import dataclass

from ringmap.arguments import finite, positive_real

__all__ = ["Linear"]


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear from `start` at step 0 to `stop` at step `steps`, and `stop` after that.

    Raises:
        InputError: an end is not a finite number, or `steps` is not a positive number.

    Example:
        >>> beta = Linear(0.4, 1.0, steps=100)
        >>> beta(0), beta(50), beta(1000)
        (0.4, 0.7, 1.0)
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name in ("start", "stop"):
            object.__setattr__(self, name, finite("Linear", name, getattr(self, name)))
        object.__setattr__(self, "steps", positive_real("Linear", "steps", self.steps))

    def __call__(self, step: int) -> float:
        """Return the value at a step."""
        share = min(max(step / self.steps, 0.0), 1.0)
        return self.start + (self.stop - self.start) * share
