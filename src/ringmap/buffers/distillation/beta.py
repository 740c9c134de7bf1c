"""Schedules of beta: the probability that the teacher acts in a round of DAgger.

Source: Ross, Gordon and Bagnell, "A Reduction of Imitation Learning and Structured Prediction to No-Regret
Online Learning", AISTATS 2011: beta falls to zero on average, as p ** i or as an indicator of the first round.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringmap.arguments import fraction, positive

__all__ = ["ExponentialBeta", "LinearBeta"]


@dataclass(frozen=True, slots=True)
class LinearBeta:
    """From `start` in round 0 to `end` in round `rounds`, and `end` after that.

    Example:
        >>> beta = LinearBeta(rounds=4)
        >>> [beta(round) for round in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    rounds: int
    start: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        positive("LinearBeta", "rounds", self.rounds)
        for name in ("start", "end"):
            fraction("LinearBeta", name, getattr(self, name))

    def __call__(self, round: int) -> float:
        """Return the probability that the teacher acts in this round."""
        share = min(max(round / self.rounds, 0.0), 1.0)
        return float(self.start + (self.end - self.start) * share)


@dataclass(frozen=True, slots=True)
class ExponentialBeta:
    """`decay ** round`: 1 in round 0. A decay of 0: the teacher acts in round 0 only.

    Example:
        >>> beta = ExponentialBeta(0.5)
        >>> [beta(round) for round in range(4)]
        [1.0, 0.5, 0.25, 0.125]
    """

    decay: float

    def __post_init__(self) -> None:
        fraction("ExponentialBeta", "decay", self.decay)

    def __call__(self, round: int) -> float:
        """Return the probability that the teacher acts in this round."""
        return float(self.decay ** max(round, 0))
