"""Return-to-go: the sum of all rewards from a step to the end of its episode.

    rewards of an episode -> suffix sums, once -> kept at the slot of each step -> one take per batch

Invariants: a kept sum belongs to the position beside it, and was computed from whole rows; sums of an evicted episode are
replaced by those of the episode that takes its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.clips.computed.nstep import check_discount, check_scalar
from ringmap.clips.cut import clamp, slots_of
from ringmap.clips.items import Computed, ItemRows, Items
from ringmap.storage.columns.schema import Schema
from ringmap.storage.ring.arithmetic import Ring
from ringmap.storage.ring.integers import Position

__all__ = ["ReturnToGo"]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST = 1 << 22
"""Rewards summed at a time: 32 MiB."""
_FEW = 8
"""Number of episodes below which a loop over their steps costs more than sums over 1, 2, 4, ... steps."""


class ReturnToGo(Computed):
    """Sum the rewards from each step to the end of its episode, discounted: float64 `(B,)`, or `(B, n)` for n offsets.

    The reward of the step's own action counts, the reward that led to the step does not. With `offsets`, a column
    `<name>_is_pad`, bool `(B, n)`, tells which rows are no steps of the episode; their sum is 0.

    Args:
        gamma: discount, in [0, 1].
        of: the column of rewards, one number per step.
        offsets: steps around the anchor, as for a `Window`; None: the anchor alone.

    Cost: O(B) once the sums of an episode are known, else O(steps of it). Memory: 16 bytes for each row of the ring.

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
        self._kept: _Sums | None = None

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
        key = None if rows.key is None else (rows.key, rows.size, items.reward_at)
        kept = self._kept
        if kept is None or key is None or kept.key != key:
            kept = self._kept = _Sums(key, rows.size)
        offsets = np.array((0,) if self.offsets is None else self.offsets)
        places, is_pad = clamp(items.position[:, None] + offsets, items.start, items.length)
        slots = slots_of(places, items.start, rows.size)
        unknown = (kept.owners.take(slots) != places + 1).any(1)
        if unknown.any():
            self._sum(items, unknown, kept)
        sums = kept.values.take(slots)
        sums[is_pad] = 0.0
        if self.offsets is None:
            return sums[:, 0]
        return {items.name: sums, f"{items.name}_is_pad": is_pad}

    def _sum(self, items: Items, which: Array, kept: _Sums) -> None:
        """Sum the episodes of these items, and keep the sums. An episode that was evicted meanwhile is left out: its items are redrawn."""
        starts, first = np.unique(items.start[which], return_index=True)
        runs = list(zip(starts.tolist(), items.length[which][first].tolist(), strict=True))
        while runs:
            part, steps = 0, 0
            while part < len(runs) and (not part or steps + runs[part][1] <= _MOST):
                steps += runs[part][1]
                part += 1
            rewards = [self._rewards(items, start, length) for start, length in runs[:part]]
            kept.put(items.rows, runs[:part], self._suffix_sums(rewards))
            del runs[:part]

    def _rewards(self, items: Items, start: int, length: int) -> Array:
        """Return the reward of the action of each step of an episode, float64."""
        stored = items.rows.read(self.of, start, length)
        if items.reward_at == "next":  # it stands one row later
            stored[:-1] = stored[1:]
            stored[-1] = 0
        return stored.astype(np.float64, copy=False)

    def _suffix_sums(self, rewards: list[Array]) -> list[Array]:
        """Return for each episode the sums from every step to its end."""
        if self.gamma == 1:
            return [values[::-1].cumsum()[::-1] for values in rewards]
        if len(rewards) < _FEW:
            return [self._doubled(values) for values in rewards]
        # Step by step, for all episodes at once: the ends stand beside each other.
        longest = max(map(len, rewards))
        block = np.zeros((longest + 1, len(rewards)))
        for number, values in enumerate(rewards):
            block[longest - len(values) : longest, number] = values
        scaled = np.empty(len(rewards))
        for step in range(longest - 1, -1, -1):
            np.multiply(block[step + 1], self.gamma, out=scaled)
            block[step] += scaled
        return [block[longest - len(v) : longest, n] for n, v in enumerate(rewards)]

    def _doubled(self, sums: Array) -> Array:
        """Return the sums of one episode, over 1, 2, 4, ... steps in turn."""
        ahead = 1
        while ahead < len(sums):
            following = sums[ahead:] * self.gamma**ahead
            sums = np.concatenate([sums[:-ahead] + following, sums[-ahead:]])
            ahead *= 2
        return sums

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


class _Sums:
    """The sums of the rows of one ring: `values[slot]` belongs to position `owners[slot] - 1`."""

    __slots__ = ("key", "owners", "values")

    def __init__(self, key: Any, rows: int) -> None:
        self.key = key
        self.values = np.zeros(rows)
        self.owners = np.zeros(rows, np.int64)

    def put(self, rows: ItemRows, runs: list[tuple[int, int]], sums: list[Array]) -> None:
        """Keep the sums of episodes, each with start and length, that are still whole now that they were read."""
        ring = Ring(len(self.owners), 0)
        # While the lock is held no other thread keeps newer sums, whose rows these would replace.
        with rows.memory:
            tail = rows.newest_tail()
            for (start, length), values in zip(runs, sums, strict=True):
                if start < tail:
                    continue
                done = 0
                for slot, count in ring.pieces(Position(start), length):
                    self.values[slot : slot + count] = values[done : done + count]
                    first = start + done + 1
                    self.owners[slot : slot + count] = np.arange(first, first + count)
                    done += count
