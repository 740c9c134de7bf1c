"""The n-step return: rewards summed over the next steps, and the step that they lead to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.clips.items import Computed, Items
from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema

__all__ = ["NStep", "check_discount", "check_scalar"]

Array = np.ndarray[Any, np.dtype[Any]]


class NStep(Computed):
    """Sum the rewards of the next n steps: `r + gamma r' + ... `, up to the end of the episode.

    Columns, `(B,)`: `<name>`, float64, the sum over m <= n steps; `<name>_discount`, float64, `gamma**m`, or 0 where
    the episode
    terminated there: the factor of the value of the step that it leads to; `<name>_steps`, int64, m. A truncated
    episode is not terminated: its last step is bootstrapped from. Where rewards stand at the "same" step, the
    observation after the last step is not stored, so the sum stops before the last step of an episode that did not
    terminate.

    Args:
        n: number of steps, positive.
        gamma: discount, in [0, 1].
        of: the column of rewards, one number per step.
        next: columns to take from the step it leads to, as `next_<column>`.

    Source: Sutton and Barto, Reinforcement Learning, 2nd edition, equation 7.1.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, seed=0, reward_at="next")
        >>> done = np.arange(5) == 4
        >>> buf.write_episode({"reward": np.array([np.nan, 1, 2, 4, 8]), "terminated": done})
        >>> batch = buf.view(window={"sum": NStep(2, gamma=0.5)})[[0, 2, 3]]
        >>> batch["sum"].tolist(), batch["sum_discount"].tolist(), batch["sum_steps"].tolist()
        ([2.0, 8.0, 8.0], [0.25, 0.0, 0.0], [2, 2, 1])
    """

    needs_reward_at = True

    def __init__(self, n: int, gamma: float = 0.99, of: str = "reward", next: Iterable[str] = ()):
        self.n = positive("NStep", "n", n)
        self.gamma = check_discount("NStep", gamma)
        self.of = of
        self.next = tuple(next)
        self._factors = self.gamma ** np.arange(self.n)

    def reads(self, schema: Schema) -> tuple[str, ...]:
        """Return the columns it reads."""
        return (self.of, *self.next)

    def check(self, schema: Schema, where: str) -> None:
        """Raise InputError unless rewards are one number per step."""
        check_scalar(self.of, schema, where)

    def adds(self, name: str) -> tuple[str, ...]:
        """Return the names of its columns."""
        return (name, f"{name}_discount", f"{name}_steps", *(f"next_{n}" for n in self.next))

    def compute(self, items: Items) -> dict[str, Array]:
        """Return the columns. O(B n)."""
        terminated = items.terminated
        first = 1 if items.reward_at == "next" else 0
        last = items.length - 1 - items.step  # steps to the last row
        if first == 0:
            last = last + terminated
        count = np.minimum(self.n, last)
        ahead = np.arange(self.n)
        values, _ = items.take(self.of, items.step[:, None] + (ahead + first))
        counted = np.where(ahead < count[:, None], values, 0.0).astype(np.float64, copy=False)
        counted *= self._factors
        discount = np.where(terminated & (count == last), 0.0, self.gamma**count)
        found = {
            items.name: counted.sum(1),  # a product of matrices would depend on the batch's size
            f"{items.name}_discount": discount,
            f"{items.name}_steps": count,
        }
        for name in self.next:
            found[f"next_{name}"] = items.take(name, items.step + count)[0]
        return found


def check_discount(where: str, gamma: Any) -> float:
    """Return gamma, if it lies in [0, 1]."""
    try:
        found = float(gamma)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found <= 1:
        raise InputError(f"{where}: gamma must lie in [0, 1], got {gamma!r}")
    return found


def check_scalar(name: str, schema: Schema, where: str) -> None:
    """Raise InputError unless a column holds one real number per step."""
    spec = next(spec for spec in schema.columns if spec.name == name)
    if spec.shape or spec.dtype.kind not in "biuf":
        raise InputError(f"{where}: rewards must be one number per step, but column {spec}")
