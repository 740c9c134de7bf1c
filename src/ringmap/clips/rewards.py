"""Columns that are computed from rewards: n-step returns, returns-to-go, and goals that were reached in hindsight.

    rewards of some episodes -> suffix sums, once -> kept at the slot of each step -> one take per batch

Invariants: kept sums were computed from whole rows; they count only for an episode that is marked at its first step.
Those of an evicted episode are replaced by those of the episodes that take its rows. Each open ring has sums of its
own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ringmap.arguments import positive
from ringmap.clips.cut import clamp, slots_of
from ringmap.clips.items import Computed, ItemRows, Items
from ringmap.clips.window import Window
from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.calls import thread
from ringmap.storage.ring.ring import Position, Ring

__all__ = ["Hindsight", "NStep", "ReturnToGo"]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST = 1 << 22
"""Rewards summed at a time: 32 MiB."""
_SMALLEST = -230.0
"""Logarithm of the smallest factor that a reward is divided by: 1e-100."""


class NStep(Computed):
    """Sum the rewards of the next n steps: `r + gamma r' + ... `, up to the end of the episode.

    Columns, `(B,)`: `<name>`, float64, the sum over m <= n steps; `<name>_discount`, float64, `gamma**m`, or 0 where
    the episode terminated there: the factor of the value of the step that it leads to; `<name>_steps`, int64, m. A
    truncated episode is not terminated: its last step is bootstrapped from. Where rewards stand at the "same" step, the
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
        self.gamma = _discount("NStep", gamma)
        self.of = of
        self.next = tuple(next)
        self._factors = self.gamma ** np.arange(self.n)

    def reads(self, schema: Schema) -> tuple[str, ...]:
        """Return the columns it reads."""
        return (self.of, *self.next)

    def check(self, schema: Schema, where: str) -> None:
        """Raise InputError unless rewards are one number per step."""
        _check_scalar(self.of, schema, where)

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


def _discount(where: str, gamma: Any) -> float:
    """Return gamma, if it lies in [0, 1]."""
    try:
        found = float(gamma)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found <= 1:
        raise InputError(f"{where}: gamma must lie in [0, 1], got {gamma!r}")
    return found


def _check_scalar(name: str, schema: Schema, where: str) -> None:
    """Raise InputError unless a column holds one real number per step."""
    spec = next(spec for spec in schema.columns if spec.name == name)
    if spec.shape or spec.dtype.kind not in "biuf":
        raise InputError(f"{where}: rewards must be one number per step, but column {spec}")


class ReturnToGo(Computed):
    """Sum the rewards from each step to the end of its episode, discounted: float64 `(B,)`, or `(B, n)` for n offsets.

    The reward of the step's own action counts, the reward that led to the step does not. With `offsets`, a column
    `<name>_is_pad`, bool `(B, n)`, tells which rows are no steps of the episode; their sum is 0. An episode that has
    not ended (`begin_episode(commit_every=)`) has no such sum: an InputError.

    Args:
        gamma: discount, in [0, 1].
        of: the column of rewards, one number per step.
        offsets: steps around the anchor, as for a `Window`; None: the anchor alone.

    Cost: O(B) once the sums of an episode are known, else O(steps of it). Memory: 8 bytes for each row of the ring, and
    for each row at which an episode begins.

    Source: Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", NeurIPS 2021, section 3.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, seed=0, reward_at="next")
        >>> buf.write_episode({"reward": np.array([np.nan, 1, 2, 4])})
        >>> buf.view(window={"return": ReturnToGo()})[[0, 1, 2, 3]]["return"].tolist()
        [7.0, 6.0, 4.0, 0.0]
    """

    needs_reward_at = True

    def __init__(self, gamma: float = 1.0, of: str = "reward", offsets: Any = None) -> None:
        self.gamma = _discount("ReturnToGo", gamma)
        self.of = of
        self.offsets: tuple[int, ...] | None = None if offsets is None else Window(offsets).offsets
        self._kept: WeakKeyDictionary[Any, dict[str | None, _Sums]] = WeakKeyDictionary()
        """By what the rows are, and where their rewards stand."""

    def reads(self, schema: Schema) -> tuple[str, ...]:
        """Return the column it reads."""
        return (self.of,)

    def check(self, schema: Schema, where: str) -> None:
        """Raise InputError unless rewards are one number per step."""
        _check_scalar(self.of, schema, where)

    def adds(self, name: str) -> tuple[str, ...]:
        """Return the names of its columns."""
        return (name,) if self.offsets is None else (name, f"{name}_is_pad")

    def compute(self, items: Items) -> Array | dict[str, Array]:
        """Return the column, and its mask."""
        rows = items.rows
        key = rows.key_of(self.of)
        known = {} if key is None else self._kept.setdefault(key, {})
        kept = known.get(items.reward_at)
        if kept is None:
            kept = known[items.reward_at] = _Sums(rows.size)
        offsets = np.array((0,) if self.offsets is None else self.offsets)
        if items.is_open.any():
            raise InputError(
                f"ReturnToGo: the episode at position {int(items.start[items.is_open][0])} has not ended, so the sum "
                "of its rewards is not known; finish it, draw from a view without it, or sum over n steps with NStep"
            )
        wanted = (items.origin + items.step)[:, None] + offsets
        places, is_pad = clamp(wanted, items.origin, items.length)
        slots = slots_of(places, items.origin, rows.size)
        unknown = kept.lack(items.origin, items.length)
        if unknown.any():
            self._sum(items, unknown, kept)
        sums = kept.values.take(slots)
        sums[is_pad] = 0.0
        if self.offsets is None:
            return sums[:, 0]
        return {items.name: sums, f"{items.name}_is_pad": is_pad}

    def _sum(self, items: Items, which: Array, kept: _Sums) -> None:
        """Sum the episodes of these items, and keep the sums. An episode that was evicted meanwhile is left out: its
        items are redrawn."""
        starts, first = np.unique(items.origin[which], return_index=True)
        ends = starts + items.length[which][first]
        sizes = (ends - starts).cumsum()
        done = 0
        while done < len(starts):
            before = int(sizes[done - 1]) if done else 0
            upto = max(done + 1, int(sizes.searchsorted(before + _MOST, side="right")))
            some = slice(done, upto)
            runs = _runs(starts[some], ends[some])
            stops = sizes[some] - before
            sums = self._rewards_of(items, runs, stops)
            self._sum_each(sums, stops.tolist())
            kept.put(items.rows, starts[some], ends[some], runs, sums)
            done = upto

    def _rewards_of(self, items: Items, runs: list[tuple[int, int]], stops: Array) -> Array:
        """Return the rewards of the actions of all steps of these runs, float64; `stops`: where each episode ends in
        them."""
        found, done = np.empty(int(stops[-1])), 0
        ahead = 1 if items.reward_at == "next" else 0  # it stands one row later
        for start, end in runs:
            count = end - start - ahead
            if count:
                found[done : done + count] = items.rows.read(self.of, start + ahead, count)
            done += end - start
        if ahead:
            found[stops - 1] = 0
        return found

    def _sum_each(self, rewards: Array, stops: list[int]) -> None:
        """Replace the rewards of each episode by the sums from every step to its end."""
        first, accumulate = 0, np.add.accumulate
        if self.gamma == 1:
            for stop in stops:
                backwards = rewards[first:stop][::-1]
                accumulate(backwards, 0, None, backwards)
                first = stop
            return
        if self.gamma == 0:
            return
        # Each reward divided by a power of gamma that must not vanish: a stretch of the episode at a time, the last one
        # first.
        most = int(_SMALLEST / math.log(self.gamma)) + 1
        longest = min(most, max(b - a for a, b in itertools.pairwise([0, *stops])))
        factors = self.gamma ** np.arange(longest - 1, -1, -1)
        for stop in stops:
            following = 0.0
            for upto in range(stop, first, -longest):
                part = rewards[max(first, upto - longest) : upto]
                factor = factors[longest - len(part) :]
                part /= factor
                backwards = part[::-1]
                accumulate(backwards, 0, None, backwards)
                part *= factor
                if upto < stop:
                    part += factor * (self.gamma * following)
                following = part[0]
            first = stop

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _kept=WeakKeyDictionary())


def _runs(starts: Array, ends: Array) -> list[tuple[int, int]]:
    """Return start and end of each run of episodes that stand one after the other, given in order."""
    breaks = np.flatnonzero(starts[1:] != ends[:-1])
    first, last = starts[[0, *(breaks + 1)]], ends[[*breaks, -1]]
    return list(zip(first.tolist(), last.tolist(), strict=True))


class _Sums:
    """The sums of the rows of one ring, at their slots.

    `stops` holds, at the slot of its first step, where each episode stopped when it was summed; 0 for none. Rows that
    are stored
    alone are an episode that grows: its sums change. A stop says which episode it is, since none is longer than the
    ring.
    """

    __slots__ = ("stops", "values")

    def __init__(self, rows: int) -> None:
        self.values = np.zeros(rows)
        self.stops = np.zeros(rows, np.int64)

    def lack(self, starts: Array, lengths: Array) -> Array:
        """Tell of each episode, by the position of its first step and its length, whether its sums are not kept."""
        found: Array = self.stops.take(starts % len(self.stops)) != starts + lengths
        return found

    def put(self, rows: ItemRows, starts: Array, stops: Array, runs: list[tuple[int, int]], sums: Array) -> None:
        """Keep the sums of these episodes, which make these runs, as far as they are still stored now that they were
        read."""
        ring, done = Ring(len(self.stops), 0), 0
        # While the lock is held no other thread keeps newer sums, whose rows these would replace.
        with thread.searching, rows.lock:
            tail = rows.newest_tail()
            for start, end in runs:
                first = max(start, tail)
                if first < end:
                    at = done + first - start
                    for slot, count in ring.pieces(Position(first), end - first):
                        self.values[slot : slot + count] = sums[at : at + count]
                        at += count
                done += end - start
            alive = starts >= tail
            self.stops[starts[alive] % len(self.stops)] = stops[alive]


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
