"""The names of the columns that say what came of a step: its reward, and whether its episode ended there.

    ours         reward        terminated        truncated
    of LeRobot   next.reward   next.terminated   next.truncated

Not here: where rewards stand (`reward_at`, window.py).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

__all__ = ["REWARDS", "TERMINATED", "TRUNCATED", "name_among"]

REWARDS = ("reward", "rewards", "next.reward", "next/reward")
TERMINATED = ("terminated", "next.terminated", "next/terminated")
TRUNCATED = ("truncated", "next.truncated", "next/truncated")


def name_among(names: Sequence[str], columns: Container[str]) -> str | None:
    """Return the first of the names that is a column; None if none is.

    Example:
        >>> name_among(TERMINATED, ["obs", "next.terminated"])
        'next.terminated'
    """
    return next((name for name in names if name in columns), None)
