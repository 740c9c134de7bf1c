"""Return-to-go: the sum of all rewards from a step to the end of its episode.

    rewards of some episodes -> suffix sums, once -> kept at the slot of each step -> one take per batch

Invariants: kept sums were computed from whole rows; they count only for an episode that is marked at its first step.
Those of an evicted episode are replaced by those of the episodes that take its rows. Each open ring has sums of its
own.
"""

from __future__ import annotations

import itertools
import math
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ringmap.clips.computed.nstep import check_discount, check_scalar
from ringmap.clips.cut import clamp, slots_of
from ringmap.clips.items import Computed, ItemRows, Items
from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.calls import thread
from ringmap.storage.ring.ring import Position, Ring

__all__ = ["ReturnToGo"]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST = 1 << 22
"""Rewards summed at a time: 32 MiB."""
_SMALLEST = -230.0
"""Logarithm of the smallest factor that a reward is divided by: 1e-100."""


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
        self.gamma = check_discount("ReturnToGo", gamma)
        self.of = of
        self.offsets: tuple[int, ...] | None = None
        if offsets is not None:
            from ringmap.clips.window import Window

            self.offsets = Window(offsets).offsets
        self._kept: WeakKeyDictionary[Any, dict[str | None, _Sums]] = WeakKeyDictionary()
        """By what the rows are, and where their rewards stand."""

    def reads(self, schema: Schema) -> tuple[str, ...]:
        """Return the column it reads."""
        return (self.of,)

    def check(self, schema: Schema, where: str) -> None:
        """Raise InputError unless rewards are one number per step."""
        check_scalar(self.of, schema, where)

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
