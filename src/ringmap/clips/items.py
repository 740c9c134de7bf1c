"""The items of one batch, as computed columns see them; and the base class of such columns.

    anchors (B,) + episodes (B,)  ->  Items  ->  Computed.compute(items)  ->  column (B, ...), or several
                                       |
                                       +-- take(column, steps): any steps of each anchor's own episode

Invariants: `take` returns rows of the anchor's own episode, whatever steps are asked for. All of it happens between the
copy of the rows and the look after it: an item whose rows were overwritten meanwhile is drawn and computed again.
Not here: what is computed (the modules of `clips/computed`), which steps columns hold (cut.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.clips.cut import Cut, clamp, slots_of
from ringmap.storage.columns.schema import Schema
from ringmap.storage.read.handle import Handle

__all__ = ["Computed", "Items"]

Array = np.ndarray[Any, np.dtype[Any]]


class Items:
    """The items of a batch.

    Attributes:
        name: the name under which the column was asked for.
        columns: the columns gathered and computed so far.
        position: of each anchor on the ring, int64 `(B,)`: the same for life, in every process.
        start: position of the first step of the anchor's episode.
        length: steps of that episode, int64.
        step: the anchor's step in it.
        rng: a generator, for draws.
    """

    def __init__(
        self, source: Handle, cut: Cut, anchors: Array, starts: Array, lengths: Array,
        columns: Mapping[str, Array], rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self.name = ""
        self.source = source
        self.columns = columns
        self.position = anchors
        self.start = starts
        self.length = lengths.astype(np.int64)
        self.step: Array = anchors - starts
        self.rng = rng
        self._cut = cut

    def __len__(self) -> int:
        return len(self.position)

    @property
    def episode(self) -> Array:
        """Number of each anchor's episode in the view, -1 outside of it; without a view among those stored now, oldest first."""
        if self._cut.episode_numbers is not None:
            return self._cut.episode_numbers(self.start)
        with self.source.memory:
            found: Array = self.source.live.starts.searchsorted(self.start)
        return found

    @property
    def reward_at(self) -> str | None:
        """Where rewards stand: "next" to the step that their action led to, or at the "same" step; None: not known."""
        return self._cut.reward_at

    def blanks(self, column: str) -> tuple[int, int]:
        """Return how many steps at the start, and at the end, of each episode have no value in a column."""
        return self._cut.blanks.get(column, (0, 0))

    def take(self, column: str, steps: Array) -> tuple[Array, Array]:
        """Return rows of each anchor's own episode, and which of them are padding.

        Args:
            column: its name.
            steps: steps in the episode, integers `(B,)` or `(B, n)`; the first step of an episode is 0. One that lies outside the
                episode, or where the column has no value, means the nearest that has one.

        Returns:
            values `(B, ...)` or `(B, n, ...)`, and bool `(B,)` or `(B, n)`, True where a step was moved.

        Cost: one copy of the rows.
        """
        rows = self.source.rows
        assert rows is not None
        shape = (-1, *(1,) * (steps.ndim - 1))
        wanted = self.start.reshape(shape) + steps
        places, is_pad = clamp(wanted, self.start, self.length, *self.blanks(column))
        slots = slots_of(places, self.start, rows.ring.rows)
        return rows.by_name[column].take(slots, None, self.source.head), is_pad

    @property
    def terminated(self) -> Array:
        """Whether each anchor's episode terminated, bool `(B,)`: the last value of its column `terminated`; False without one."""
        rows = self.source.rows
        if rows is None or "terminated" not in rows.by_name:
            return np.zeros(len(self), np.bool_)
        ends, _ = self.take("terminated", self.length - 1)
        flags: Array = ends.reshape(len(self), -1)[:, -1] != 0
        return flags

    def part(self, which: Array) -> Items:
        """Return some of the items: `which` is a mask, or numbers. `columns` are left out."""
        found = Items(
            self.source, self._cut, self.position[which], self.start[which], self.length[which], {}, self.rng,
        )  # fmt: skip
        found.name = self.name
        return found


class Computed(ABC):
    """A column that is computed from stored ones, for a whole batch at once.

    A subclass implements `compute`; `reads` names the stored columns that must exist, so that a wrong name is refused before
    anything is drawn.

    Processes and threads: an object may be used by several threads, and is pickled to the workers of a DataLoader.

    Example:
        >>> class Speed(Computed):
        ...     def reads(self, schema):
        ...         return ("obs",)
        ...     def compute(self, items):
        ...         now, _ = items.take("obs", items.step)
        ...         before, _ = items.take("obs", items.step - 1)
        ...         return now - before
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, seed=0)
        >>> buf.write_episode({"obs": np.arange(0, 30, 3)})
        >>> sorted(set(buf.sample(64, window={"speed": Speed()})["speed"].tolist()))
        [0, 3]
    """

    needs_reward_at: bool = False
    """Whether it must be known where rewards stand (`reward_at`), as for a sum over them."""

    def reads(self, schema: Schema) -> tuple[str, ...]:
        """Return the names of the stored columns that `compute` reads, given the columns that exist."""
        return ()

    def check(self, schema: Schema, where: str) -> None:  # noqa: B027 - nothing to check
        """Raise InputError where it can't be computed from these columns. The columns of `reads` exist."""

    def adds(self, name: str) -> tuple[str, ...]:
        """Return the names of the columns that it adds to a batch, or replaces in it, if it was asked for as `name`."""
        return (name,)

    @abstractmethod
    def compute(self, items: Items) -> Array | dict[str, Array]:
        """Return the column, `(B, ...)`, or name -> column; each in memory of its own.

        It may be called again for some items of a batch, whose rows were overwritten during the call. An error that it raises over
        such rows is dropped.
        """
