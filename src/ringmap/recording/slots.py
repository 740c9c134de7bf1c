"""Slots: where each environment of a batch is in its episodes, in integers only.

    NEW ─reset─► PLAYING ─step─► PLAYING ... ─over─┬─ NEXT_STEP ─► WAITING ─its reset row─► PLAYING
                    ▲                              ├─ SAME_STEP ─► PLAYING, of the next episode
                    └──────────── reset ───────────┴─ DISABLED ──► ENDED, until it is reset

The meaning of a row for a slot depends on its state: a slot that was PLAYING took a step; one that was
WAITING shows the first observation of its next episode, and took none.

Invariants: an episode has a number of its own, counted in the order in which episodes begin; `steps`
counts the steps of the open episode; a slot that is not PLAYING has none open.
Not here: observations (open_episodes.py), Gymnasium, buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from ringmap.errors import RoleError

__all__ = ["DISABLED", "ENDED", "NEW", "NEXT_STEP", "PLAYING", "SAME_STEP", "WAITING", "Slots"]

Array = np.ndarray[Any, np.dtype[Any]]

NEW, PLAYING, WAITING, ENDED = range(4)
NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"
"""The values of Gymnasium's `AutoresetMode`."""

_AFTER = {NEXT_STEP: WAITING, SAME_STEP: PLAYING, DISABLED: ENDED}


class Slots:
    """The state of `num` environments.

    Args:
        num: how many.
        mode: `NEXT_STEP`, `SAME_STEP` or `DISABLED`.

    Cost: a row costs what happens in it: few slots end in one.

    Example:
        >>> slots = Slots(2, NEXT_STEP)
        >>> slots.reset([0, 1])
        >>> slots.advance(over=[0])  # the first one's episode ends
        []
        >>> slots.playing, slots.steps.tolist()
        ([1], [0, 1])
        >>> slots.advance(over=[])  # its reset row, and a step of the second
        [0]
        >>> slots.playing, slots.steps.tolist(), slots.episode.tolist()
        ([0, 1], [0, 2], [2, 1])
    """

    def __init__(self, num: int, mode: str) -> None:
        self.mode = mode
        self.state = [NEW] * num
        self.steps = np.zeros(num, np.int64)
        self.episode = np.full(num, -1, np.int64)
        self.num_begun = 0
        self._everyone = list(range(num))
        self._others = set(self._everyone)  # slots that are not PLAYING

    @property
    def playing(self) -> list[int]:
        """Which have an episode open. O(1) if all have."""
        if not self._others:
            return self._everyone
        return [slot for slot in self._everyone if slot not in self._others]

    def is_playing(self, slot: int) -> bool:
        """Whether a slot has an episode open."""
        return slot not in self._others

    def check_step(self, where: str) -> None:
        """Raise unless all of them may be stepped."""
        if all(self.state[slot] == WAITING for slot in self._others):
            return
        for state, what in (
            (NEW, "has not been reset yet"),
            (ENDED, "has ended its episode and resets only when told to"),
        ):
            found = sorted(slot for slot in self._others if self.state[slot] == state)
            if found:
                raise RoleError(f"{where}: step before reset: env {found} {what}; call reset first")

    def advance(self, over: Collection[int], cut: Collection[int] = ()) -> list[int]:
        """Take in a row of a step, and return the slots whose episode begins with it.

        Args:
            over: whose episode is over, as the environment says.
            cut: whose open episode ended before this row, by an error.
        """
        self.steps += 1
        if not (over or cut or self._others):
            return []
        begun = []
        for slot in sorted(self._others):
            self.steps[slot] = 0
            if self.state[slot] == WAITING and slot not in over:
                begun.append(slot)
        for slot in over:
            after = _AFTER[self.mode]
            if after == PLAYING:
                begun.append(slot)
            else:
                self._leave(slot, after)
        begun += [slot for slot in cut if slot not in over]
        begun.sort()
        self.reset(begun)
        return begun

    def reset(self, slots: Iterable[int]) -> None:
        """Begin an episode in these slots."""
        for slot in slots:
            self.state[slot] = PLAYING
            self._others.discard(slot)
            self.episode[slot] = self.num_begun
            self.steps[slot] = 0
            self.num_begun += 1

    def split(self) -> None:
        """Begin a new episode in every slot with an open one: another buffer takes the next rows."""
        self.reset(self.playing)

    def lose(self, slots: Iterable[int]) -> None:
        """Forget the state of these slots: the next row of each begins an episode, whatever its flags."""
        for slot in slots:
            if self.state[slot] != NEW:
                self._leave(slot, WAITING)

    def _leave(self, slot: int, state: int) -> None:
        self.state[slot] = state
        self.steps[slot] = 0
        self._others.add(slot)
