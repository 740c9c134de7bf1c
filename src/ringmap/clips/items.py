"""The items of one batch, as computed columns see them; and the base class of such columns.

    anchors (B,) + episodes (B,)  ->  Items  ->  Computed.compute(items)  ->  column (B, ...), or several
                                       |
                                       +-- take(column, steps): any steps of each anchor's own episode
                                              |
                                              +-- ItemRows: the rows of a ring, or of a dataset

Invariants: `take` returns rows of the anchor's own episode, whatever steps are asked for. Over a ring all of it happens
between the copy of the rows and its validation: an item whose rows were overwritten meanwhile is drawn and computed
again.
Not here: what is computed (rewards.py, sequences.py), which steps columns hold (cut.py).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from ringmap.clips.cut import Cut, Ends, Taken, clamp
from ringmap.clips.facts import TERMINATED, name_among
from ringmap.errors import InputError
from ringmap.storage.columns.copying import aligned
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle

__all__ = [
    "Computed",
    "EpisodeMoment",
    "ItemRows",
    "Items",
    "Numbers",
    "call_functions",
    "compute",
    "pad",
    "put_added",
]

Array = np.ndarray[Any, np.dtype[Any]]


Numbers = Callable[[Array], Array]
"""Returns the numbers of episodes, given the positions of their first steps."""


class ItemRows:
    """The rows that columns are computed from. A row is named by its position, a number that is the same for life.

    What this base class answers is true where nothing is overwritten, and episodes are whole.
    """

    names: Collection[str]
    """Names of the columns."""
    size: int
    """Number of slots; the slot of a row is its position modulo this."""
    lock: AbstractContextManager[Any] = nullcontext()
    """Held while sums of rows are kept."""

    def take(self, column: str, places: Array, starts: Array) -> Array:
        """Return copies of rows `(B, ...)`; row i is one of the episode that begins at position `starts[i]`."""
        raise NotImplementedError

    def read(self, column: str, start: int, length: int) -> Array:
        """Return a copy of rows of one or more episodes that stand one after the other."""
        raise NotImplementedError

    def key_of(self, column: str) -> Any:
        """Return an object: as long as it lives, the same values of a column stand at the same positions.

        None: nothing may be kept for later batches.
        """

    def are_begins(self, places: Array) -> Array:
        """Tell at which of these positions an episode begins."""
        raise NotImplementedError

    def positions(self, places: Array) -> Array:
        """Return where these rows are stored: numbers that no other row gets, in any process."""
        return places

    def first_steps(self, starts: Array) -> Array:
        """Return how many steps of the episodes that begin at these positions were evicted, int64."""
        return np.zeros(len(starts), np.int64)

    def newest_tail(self) -> int:
        """Return the position below which rows may have been overwritten by now."""
        return 0


class _RingMoment:
    """The numbers of the episodes of one ring; see `EpisodeMoment`."""

    def __init__(self, source: Handle) -> None:
        self._source = source
        with thread.searching, source.lock:
            live = source.live
            self._era, self._first, self.count = live.era, live.first, live.num_episodes
            self._whole = None if live.links is None else live.whole

    def of(self, names: Array) -> Array | None:
        """Return the numbers of episodes by name; None if one has none in this moment."""
        if self._whole is not None:
            found = self._whole.find(names)
            return None if (found < 0).any() else found
        with thread.searching, self._source.lock:
            live = self._source.live
            if live.era != self._era or live.links is not None:
                return None
            numbers: Array = live.starts.searchsorted(names) + (live.first - self._first)
        return numbers


class EpisodeMoment:
    """The numbers of the stored episodes as of one moment, ring by ring and oldest first: those of one batch.

    An episode that is evicted meanwhile keeps its number. One that began later has the next one, unless that is
    another's. `rings`: returns the rings now, each with what turns positions on it into names, or None;
    `is_outdated`: whether an episode had no number in this moment, so that the batch needs another one.
    """

    def __init__(self, rings: Callable[[], Iterable[tuple[Handle, Numbers | None]]]) -> None:
        self._rings = rings
        self.begin()

    def begin(self) -> None:
        """Take the moment now, and forget which numbers were asked for."""
        self.is_outdated, before = False, 0
        self._asked: list[tuple[Array, Array]] = []
        self._moments: dict[Handle, tuple[_RingMoment, int, Numbers | None]] = {}
        for source, name in self._rings():
            moment = _RingMoment(source)
            self._moments[source] = moment, before, name
            before += moment.count

    def of(self, source: Handle) -> Numbers:
        """Return what numbers the episodes of one of the rings."""
        return partial(self._numbers, source)

    def _numbers(self, source: Handle, starts: Array) -> Array:
        moment, before, name = self._moments.get(source, (None, 0, None))
        found = None if moment is None else moment.of(starts)
        if moment is None or found is None or (len(self._moments) > 1 and (found >= moment.count).any()):
            self.is_outdated = True
            return np.zeros(len(starts), np.int64)
        numbers = found + before
        self._asked.append((numbers, starts if name is None else name(starts)))
        return numbers

    def table(self) -> tuple[Array, Array] | None:
        """Return the numbers that were asked for, rising, and the names of their episodes; None if none was."""
        if not self._asked:
            return None
        numbers, names = (np.concatenate(values) for values in zip(*self._asked, strict=True))
        known, at = np.unique(numbers, return_index=True)
        return known, names[at]


class Items:
    """The items of a batch.

    Attributes:
        name: the name under which the column was asked for.
        rows: all rows.
        columns: the columns gathered and computed so far.
        position: of each anchor on the ring, int64 `(B,)`: the same for life, in every process.
        start: position of the first step of the anchor's episode: its name, also if that step was evicted.
        length: steps of that episode, int64.
        step: the anchor's step in it.
        origin: where the episode begins among `rows`: `start`, unless there are parts.
        rng: a generator, for draws.

    `numbers`: returns the numbers of episodes, given their `start`.
    """

    def __init__(
        self,
        rows: ItemRows,
        cut: Cut,
        anchors: Array,
        starts: Array,
        lengths: Array,
        columns: Mapping[str, Array],
        rng: np.random.Generator,
        numbers: Numbers,
        steps: Array | None = None,
        origins: Array | None = None,
        ends: Ends | None = None,
    ) -> None:
        self.name = ""
        self.rows = rows
        self.columns = columns
        self.position = anchors
        self.start = starts
        self.length = lengths.astype(np.int64)
        self.step: Array = anchors - starts if steps is None else steps
        self.origin: Array = starts if origins is None else origins
        self.rng = rng
        self._cut, self._numbers, self._ends = cut, numbers, ends

    def __len__(self) -> int:
        return len(self.position)

    @property
    def episode(self) -> Array:
        """Number of each anchor's episode in the view; without a view among those stored when the batch was read,
        oldest first."""
        return self._numbers(self.start)

    @property
    def ring(self) -> Array:
        """Number of the ring of each item, int64; 0 where there is one only."""
        return np.full(len(self), self._cut.ring)

    @property
    def anchor_ids(self) -> Array:
        """The id of each anchor, int64, as `update` and `update_priorities` take it."""
        return self._ids(self.position.copy())

    def ids(self, places: Array) -> Array:
        """Return the ids of steps, for `update`, given their places among `rows`."""
        return self._ids(self.rows.positions(places))

    def _ids(self, positions: Array) -> Array:
        ids = self._cut.step_ids
        return positions if ids is None else ids(positions)

    @property
    def is_open(self) -> Array:
        """Whether each anchor's episode has not ended: more parts of it may come."""
        return np.zeros(len(self), np.bool_) if self._ends is None else self._ends.is_open

    @property
    def first_step(self) -> Array:
        """How many steps of each anchor's episode were evicted: `step` counts from the oldest one that is left."""
        return self.rows.first_steps(self.origin) if self._ends is None else self._ends.first_steps

    @property
    def reward_at(self) -> str | None:
        """Where rewards stand: "next" to the step that their action led to, or at the "same" step; None: not known."""
        return self._cut.reward_at

    def blanks(self, column: str) -> tuple[int, int]:
        """Return how many steps at the start, and at the end, of each whole episode have no value in a column."""
        return self._cut.blanks.get(column, (0, 0))

    def take(self, column: str, steps: Array) -> tuple[Array, Array]:
        """Return rows of each anchor's own episode, and which of them are padding.

        Args:
            column: its name.
            steps: steps in the episode, integers `(B,)` or `(B, n)`; the first step of an episode is 0. One that lies
                outside the episode, or where the column has no value, means the nearest that has one.

        Returns:
            values `(B, ...)` or `(B, n, ...)`, and bool `(B,)` or `(B, n)`, True where a step was moved.

        Cost: one copy of the rows.
        """
        shape = (-1, *(1,) * (steps.ndim - 1))
        wanted = self.origin.reshape(shape) + steps
        blanks: tuple[int | Array, int | Array] = self.blanks(column)
        if self._ends is not None:
            blanks = self._ends.blanks(*self.blanks(column))
        places, is_pad = clamp(wanted, self.origin, self.length, *blanks)
        return self.rows.take(column, places, self.origin), is_pad

    @property
    def terminated(self) -> Array:
        """Whether each anchor's episode terminated, bool `(B,)`; see `terminated_at`."""
        return self.terminated_at(self.length - 1)

    def terminated_at(self, steps: Array) -> Array:
        """Return whether the flags at these steps `(B,)` or `(B, n)` say that the episode terminated; False without
        such a column.

        The column is `terminated`, of LeRobot `next.terminated`.
        """
        name = name_among(TERMINATED, self.rows.names)
        if name is None:
            return np.zeros(steps.shape, np.bool_)
        values, _ = self.take(name, steps)
        flags: Array = values.reshape(*steps.shape, -1)[..., -1] != 0
        return flags

    def part(self, which: Array) -> Items:
        """Return some of the items: `which` is a mask, or numbers. `columns` are left out."""
        found = copy.copy(self)
        found.columns = {}
        found.position, found.start, found.length = self.position[which], self.start[which], self.length[which]
        found.step, found.origin = self.step[which], self.origin[which]
        if self._ends is not None:
            found._ends = Ends(self._ends.first_steps[which], self._ends.is_open[which])
        return found


class Computed(ABC):
    """A column that is computed from stored ones, for a whole batch at once.

    A subclass implements `compute`; `reads` names the stored columns that must exist, so that a wrong name is refused
    before anything is drawn.

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

        It may be called again for some items of a batch, whose rows were overwritten during the call. An error that it
        raises over such rows is dropped.
        """


def pad(
    batch: dict[str, Array], values: Array, taken: Taken, is_pad: Array, out: Mapping[str, Array] | None = None
) -> None:
    """Fill the padded rows of a column, and add its mask to the batch."""
    if taken.fill is not None:
        values[is_pad] = taken.fill
    if taken.mask is not None:
        into = None if out is None else out.get(taken.mask)
        if into is None:
            batch[taken.mask] = aligned(is_pad.copy())  # columns with the same steps share it
        else:
            np.copyto(into, is_pad)
            batch[taken.mask] = into


def compute(batch: dict[str, Array], items: Items, cut: Cut) -> None:
    """Add the computed columns of a cut to a batch."""
    for name, column in cut.computed:
        items.name = name
        found = column.compute(items)
        batch.update(found if isinstance(found, dict) else {name: found})


def put_added(batch: dict[str, Array], cut: Cut, out: Mapping[str, Array] | None) -> None:
    """Move the columns that a cut adds to the caller's arrays, where these fit, and note their shapes."""
    for name in cut.added:
        values = batch[name]
        cut.computed_layout[name] = values.shape[1:], values.dtype
        into = None if out is None else out.get(name)
        if into is None or (into.shape, into.dtype) != (values.shape, values.dtype):
            batch[name] = aligned(values)
        elif into is not values:
            np.copyto(into, values)
            batch[name] = into


def call_functions(batch: dict[str, Array], cut: Cut, size: int) -> None:
    """Add the columns that functions of the caller make of a whole batch.

    Raises:
        InputError: one returned something else than a row per item.
    """
    for name, function in cut.functions:
        made = np.asarray(function(batch))
        if made.ndim < 1 or len(made) != size:
            raise InputError(
                f"window[{name!r}]: the function returned shape {made.shape} for a batch of {size}; expected ({size}, "
                "...)"
            )
        batch[name] = made
