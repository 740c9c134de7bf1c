"""Hindsight: goals that were reached later in the same episode, in place of those that were meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringmap.clips.items import Computed, Items
from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema

__all__ = ["Hindsight"]

Array = np.ndarray[Any, np.dtype[Any]]


class Hindsight(Computed):
    """Relabel a share `k / (k + 1)` of the batch with goals that its own episodes achieved.

    Columns: the goals, `(B, ...)`, under the name of their column; `<name>`, bool `(B,)`, which were relabelled;
    `<name>_reward`, float64 `(B,)`, the reward of the anchor's action under its goal. The last step of an episode,
    after which nothing is stored, is never relabelled; `anchors=slice(0, -1)` leaves it out.

    Args:
        reward_fn: `(achieved, goal) -> rewards`, for `(n, ...)` achieved goals after the action and `(n, ...)` goals,
            `(n,)` numbers.
        strategy: "future": what is achieved at a step after the anchor, drawn uniformly; "final": at the last step;
            "episode": at any step.
        k: number of relabelled items for each that stays.
        goal: the column of goals.
        achieved: the column of achieved goals, of the same shape.
        reward: the column of rewards.

    Raises:
        InputError: an unknown strategy, a `k` that is negative, or a reward function that can't be called.

    Source: Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017, section 4.5.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, seed=0, reward_at="next")
        >>> position = np.arange(5.0)
        >>> buf.write_episode({"achieved_goal": position, "desired_goal": np.full(5, 9.0), "reward": -np.ones(5)})
        >>> def reached(achieved, goal):
        ...     return -(achieved != goal).astype(float)
        >>> batch = buf.sample(100, window={"again": Hindsight(reached, "final")}, anchors=slice(0, -1))
        >>> sorted(set(zip(batch["desired_goal"].tolist(), batch["again"].tolist())))
        [(4.0, True), (9.0, False)]
    """

    needs_reward_at = True

    def __init__(
        self,
        reward_fn: Callable[[Array, Array], Any],
        strategy: str = "future",
        k: float = 4,
        goal: str = "desired_goal",
        achieved: str = "achieved_goal",
        reward: str = "reward",
    ) -> None:
        if strategy not in ("future", "final", "episode"):
            raise InputError(f"Hindsight: strategy must be 'future', 'final' or 'episode', got {strategy!r}")
        if not callable(reward_fn):
            raise InputError(f"Hindsight: reward_fn must be a function, got {reward_fn!r}")
        if not 0 <= k < np.inf:
            raise InputError(f"Hindsight: k must not be negative, got {k!r}")
        self.reward_fn, self.strategy, self.k = reward_fn, strategy, k
        self.goal, self.achieved, self.reward = goal, achieved, reward

    def reads(self, schema: Schema) -> tuple[str, ...]:
        """Return the columns it reads."""
        return self.goal, self.achieved, self.reward

    def check(self, schema: Schema, where: str) -> None:
        """Raise InputError unless an achieved goal fits in the column of goals."""
        specs = {spec.name: spec for spec in schema.columns}
        goal, achieved = specs[self.goal], specs[self.achieved]
        if goal.shape != achieved.shape or not np.can_cast(achieved.dtype, goal.dtype, "same_kind"):
            raise InputError(f"{where}: an achieved goal can't be a goal: column {achieved}, but column {goal}")

    def adds(self, name: str) -> tuple[str, ...]:
        """Return the names of its columns."""
        return name, f"{name}_reward", self.goal

    def compute(self, items: Items) -> dict[str, Array]:
        """Return the columns. O(B)."""
        first = 1 if items.reward_at == "next" else 0
        goals, _ = items.take(self.goal, items.step)
        rewards = items.take(self.reward, items.step + first)[0].astype(np.float64)
        left = items.length - 1 - items.step
        chosen = (items.rng.random(len(items)) < self.k / (self.k + 1)) & (left > 0)
        if chosen.any():
            mine = items.part(chosen)
            new, _ = mine.take(self.achieved, self._steps(mine))
            after, _ = mine.take(self.achieved, mine.step + 1)
            found = np.asarray(self.reward_fn(after, new))
            if found.shape != (len(mine),):
                raise InputError(
                    f"Hindsight: reward_fn returned shape {found.shape} for {len(mine)} goals, expected ({len(mine)},)"
                )
            goals[chosen], rewards[chosen] = new, found
        return {items.name: chosen, f"{items.name}_reward": rewards, self.goal: goals}

    def _steps(self, items: Items) -> Array:
        """Return the step of each item's episode whose achieved goal it takes."""
        if self.strategy == "final":
            return items.length - 1
        if self.strategy == "future":
            return items.rng.integers(items.step + 1, items.length)
        return items.rng.integers(0, items.length)
