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
from ringmap.clips.items import Computed, Items
from ringmap.storage.columns.schema import Schema
from ringmap.storage.read.read_live import is_live

__all__ = ["ReturnToGo"]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST = 1 << 22
"""Rewards summed at a time: 32 MiB."""


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
        source = items.source
        assert source.rows is not None
        rows, key = source.rows.ring.rows, (source.manifest.uuid, items.reward_at)
        kept = self._kept
        if kept is None or kept.key != key:
            kept = self._kept = _Sums(key, rows)
        offsets = np.array((0,) if self.offsets is None else self.offsets)
        places, is_pad = clamp(items.position[:, None] + offsets, items.start, items.length)
        slots = slots_of(places, items.start, rows)
        unknown = (kept.owners.take(slots) != places + 1).any(1)
        sums = kept.values.take(slots)
        if unknown.any():
            sums[unknown] = self._summed(items.part(unknown), kept, places[unknown])
        sums[is_pad] = 0.0
        if self.offsets is None:
            return sums[:, 0]
        return {items.name: sums, f"{items.name}_is_pad": is_pad}

    def _summed(self, items: Items, kept: _Sums, places: Array) -> Array:
        """Return the sums at positions `(B, n)` whose episodes are not known yet, and keep those of whole episodes."""
        starts, first, number = np.unique(items.start, return_index=True, return_inverse=True)
        found = np.empty(places.shape)
        longest = int(items.length.max())
        part = max(1, _MOST // longest)
        for at in range(0, len(starts), part):
            chosen = items.part(first[at : at + part])
            sums = self._suffix_sums(chosen)
            mine = (number >= at) & (number < at + part)
            rows = number[mine] - at
            found[mine] = sums[rows[:, None], places[mine] - items.start[mine, None]]
            kept.put(chosen, sums)
        return found

    def _suffix_sums(self, items: Items) -> Array:
        """Return the sums at every step of the items' episodes, float64 `(B, longest)`, 0 beyond their ends."""
        longest = int(items.length.max())
        steps = np.arange(longest)
        values, is_pad = items.take(self.of, np.broadcast_to(steps, (len(items), longest)))
        rewards = np.where(is_pad, 0, values).astype(np.float64, copy=False)
        if items.reward_at == "next":  # the reward of a step's action stands one row later
            rewards = np.concatenate([rewards[:, 1:], np.zeros((len(items), 1))], 1)
        if self.gamma == 1:
            return rewards[:, ::-1].cumsum(1)[:, ::-1]
        sums, ahead = rewards, 1
        while ahead < longest:  # sums over 1, 2, 4, ... steps
            following = sums[:, ahead:] * self.gamma**ahead
            sums = np.concatenate([sums[:, :-ahead] + following, sums[:, -ahead:]], 1)
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

    def put(self, items: Items, sums: Array) -> None:
        """Keep the sums of episodes that are still whole, now that they were read."""
        steps = np.arange(sums.shape[1])
        inside = steps < items.length[:, None]
        places = (items.start[:, None] + steps)[inside]
        # While the lock is held no other thread keeps newer sums, whose rows these would replace.
        with items.source.memory:
            if not len(places) or not is_live(items.source, int(items.start.min())):
                return
            slots = places % len(self.owners)
            self.values[slots] = sums[inside]
            self.owners[slots] = places + 1
