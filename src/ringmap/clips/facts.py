"""What a source of episodes knows of all its steps: where rewards and ends stand, and how many steps are a second.

    source (dataset, buffer) --Facts.of--> Facts --encode--> {"reward_at": "next", "fps": "30000/1001"}
    --Facts.stated--> Facts

Whatever copies, joins or stores episodes carries both in this one object.
Invariants: a rate that is not known agrees with every other; a place of rewards that is not known, only with itself.
Not here: what windows and sums make of them (window.py), where a format stores them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ringmap.errors import InputError
from ringmap.storage.records.manifest import as_rate, rate_text, same_rate

__all__ = [
    "NAMES",
    "PREFIX",
    "REWARDS",
    "REWARD_AT",
    "TERMINATED",
    "TRUNCATED",
    "Facts",
    "check_fps",
    "check_reward_at",
    "name_among",
]

REWARDS = ("reward", "rewards", "next.reward", "next/reward")
TERMINATED = ("terminated", "next.terminated", "next/terminated")
TRUNCATED = ("truncated", "next.truncated", "next/truncated")
"""Names of columns, in the order in which they are looked for: ours, then those of LeRobot."""

REWARD_AT = ("next", "same")

NAMES = ("reward_at", "fps")
"""Of the facts, as they are encoded."""

PREFIX = "ringmap_"
"""Before these names in the metadata of formats that are not ours alone."""


def name_among(names: Sequence[str], columns: Container[str]) -> str | None:
    """Return the first of the names that is a column; None if none is.

    Example:
        >>> name_among(TERMINATED, ["obs", "next.terminated"])
        'next.terminated'
    """
    for name in names:
        if name in columns:
            return name
    return None


def check_reward_at(where: str, reward_at: Any) -> str | None:
    """Return `reward_at` if it is valid: "next", "same" or None."""
    if reward_at is not None and reward_at not in REWARD_AT:
        raise InputError(f"{where}: reward_at must be one of {(*REWARD_AT, None)}, got {reward_at!r}")
    found: str | None = reward_at
    return found


def check_fps(where: str, fps: Any) -> Fraction | None:
    """Return the steps per second as they are kept, if they are a positive number or None."""
    if fps is None:
        return None
    try:
        return as_rate(fps)
    except ValueError:
        raise InputError(f"{where}: fps must be a positive number of steps per second, got {fps!r}") from None


@dataclass(frozen=True, slots=True)
class Facts:
    """Where rewards stand, "next" or "same", and the steps per second; None: not known."""

    reward_at: str | None = None
    fps: Fraction | None = None

    @classmethod
    def of(cls, source: Any) -> Facts:
        """Return what a dataset, a buffer or a part of one knows; a third party's may say nothing, or nothing that has
        a meaning here."""
        return cls._lenient(getattr(source, "reward_at", None), getattr(source, "fps", None))

    @classmethod
    def stated(cls, stored: Any, prefix: str = "") -> Facts:
        """Return what a dataset states in its metadata, without what has no meaning here."""
        if not isinstance(stored, Mapping):
            return cls()
        reward_at, fps = (stored.get(prefix + name) for name in NAMES)
        return cls._lenient(reward_at, fps if isinstance(fps, str) else None)

    @classmethod
    def _lenient(cls, reward_at: Any, fps: Any) -> Facts:
        placed = reward_at if isinstance(reward_at, str) and reward_at in REWARD_AT else None
        with contextlib.suppress(ValueError):
            return cls(placed, as_rate(fps))
        return cls(placed)

    @classmethod
    def named(cls, where: str, reward_at: Any, fps: Any) -> Facts:
        """Return what a caller names.

        Raises:
            InputError: it is no place of rewards, or no rate.
        """
        return cls(check_reward_at(where, reward_at), check_fps(where, fps))

    def encode(self, prefix: str = "") -> dict[str, str]:
        """Return what is known, for JSON: name -> text."""
        rate = None if self.fps is None else rate_text(self.fps)
        return {prefix + n: v for n, v in zip(NAMES, (self.reward_at, rate), strict=True) if v is not None}

    def give(self, source: Any) -> None:
        """Set them on a source or a dataset."""
        source.reward_at, source.fps = self.reward_at, self.fps

    def over(self, others: Facts) -> Facts:
        """Return these, and of the others what these do not know."""
        return Facts(self.reward_at or others.reward_at, self.fps or others.fps)

    def refuse_rate(self, others: Facts, where: str, mine: str, theirs: str) -> None:
        """Raise InputError if both know their rate, and it is not the same.

        Args:
            others: of what these are to be joined with.
            where: the call to name in an error.
            mine: what these are of.
            theirs: what the others are of.
        """
        if self.fps is not None and others.fps is not None and not same_rate(self.fps, others.fps):
            raise InputError(
                f"{where}: {mine} has {rate_text(self.fps)} steps per second, and {theirs} {rate_text(others.fps)}; "
                "name the rate that counts: load_dataset(..., fps=), or fps= of convert, merge and dump"
            )
