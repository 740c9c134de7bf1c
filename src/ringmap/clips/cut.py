"""A cut: which steps of an episode an item holds, and which steps can be its anchor. Integers only.

    episode      start ........... anchor ........... start + length - 1
                      | before -->|      |<-- after |        steps that exist on both sides of every anchor
    a column     anchor + offsets                            clamped to the episode where it is padded

An item belongs to its anchor, a step of an episode. A clip of H observations with frameskip K is the cut whose anchor
is its first step: offsets 0, K, 2K, ..., and all H * K steps of `action`.

Invariants: an episode of L steps has max(0, L - before - after) anchors, one after the other (none if L < least); a
row without padding lies inside the episode for every anchor; a padded row is a row of the same episode.
Not here: rows and files (gather.py), the numbers of anchors (index.py), what a user writes (window.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringmap.clips.draws import Around
from ringmap.clips.index import counts
from ringmap.errors import InputError
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.ring.arrays import highest

__all__ = ["ANCHOR", "ROW", "Cut", "Ends", "Layout", "Places", "Steps", "Taken", "clamp", "places_of", "slots_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_STEPS = 1 << 24
Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


@dataclass(frozen=True)
class Steps:
    """Steps around an anchor.

    `offsets`: of each step, in any order; `padded`: whether one may leave the episode: it then means the nearest step
    that has a value; `blank_first`, `blank_last`: number of steps at the start, and at the end, of each episode in
    which the column has no value.

    Example:
        >>> Steps((-1, 0, 1), padded=True).places(np.array([10]), np.array([10]), np.array([2]))
        (array([[10, 10, 11]]), array([[ True, False, False]]))
    """

    offsets: tuple[int, ...]
    padded: bool = False
    blank_first: int = 0
    blank_last: int = 0
    lowest: int = field(init=False, compare=False, repr=False)
    """The smallest offset."""
    highest: int = field(init=False, compare=False, repr=False)
    """The greatest offset."""
    run: range | None = field(init=False, compare=False, repr=False)
    """The offsets, if they increase evenly."""
    array: Array = field(init=False, compare=False, repr=False)
    _upward: Array = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        offsets = np.array(self.offsets, np.int64)
        lowest = int(offsets.min())
        gaps = set(np.diff(offsets).tolist()) or {1}
        stride = gaps.pop() if len(gaps) == 1 else 0
        run = range(lowest, int(offsets[-1]) + 1, stride) if stride > 0 else None
        for name, value in (
            ("array", offsets),
            ("lowest", lowest),
            ("highest", int(offsets.max())),
            ("run", run),
            ("_upward", offsets - lowest),
        ):
            object.__setattr__(self, name, value)

    @property
    def before(self) -> int:
        """Steps that the episode must have before every anchor, if nothing is padded."""
        return max(0, self.blank_first - self.lowest)

    @property
    def after(self) -> int:
        """Steps that the episode must have after every anchor, if nothing is padded."""
        return max(0, self.highest + self.blank_last)

    def slots(self, anchors: Array, rows: int | Array) -> Array:
        """Return the slots `(B, n)` on a ring of `rows` rows, for anchors all of whose steps lie in their episodes.

        With an array `(B, 1)`, each anchor is on a ring of its own.
        """
        first = anchors + self.lowest if self.lowest else anchors
        slots: Array = first[:, None] % rows
        if len(self.offsets) > 1:
            wraps = not isinstance(rows, int) or (len(slots) and highest(slots) + self.highest - self.lowest >= rows)
            slots = slots + self._upward
            # An episode is at most as long as the ring, so one lap back is enough; a second modulo costs 4 times as
            # much.
            if wraps:
                np.subtract(slots, rows, out=slots, where=slots >= rows)
        return slots

    def places(
        self, anchors: Array, starts: Array, lengths: Array, blanks: tuple[Array, Array | int] | None = None
    ) -> tuple[Array, Array | None]:
        """Return the positions `(B, n)` of the steps around anchors, and which are padding, None if none can be.

        `starts`, `lengths`: of their episodes, `(B,)`; `blanks`: how many steps at the starts, and at the ends, of
        these have no value; None: as many as of any.
        """
        wanted = anchors[:, None] + self.array
        if not self.padded:
            return wanted, None
        return clamp(wanted, starts, lengths, *(blanks or (self.blank_first, self.blank_last)))


Places = tuple[Array, Array | None, Array | None]
"""Where the rows of one column of a batch are: slots, `(B, n)`, or `(B,)` for a step without an axis of its own; which
are padding, `(B, n)`, None if none can be; and positions as slots, None where rows are in the files alone, which are
read by slots."""


def places_of(slots: Array, is_pad: Array | None, positions: Array | None) -> Places:
    """Return where rows are, of the only step, which comes without an axis of its own."""
    return slots[:, 0], is_pad, None if positions is None else positions[:, 0]


def clamp(
    wanted: Array, starts: Array, lengths: Array, blank_first: int | Array = 0, blank_last: int | Array = 0
) -> tuple[Array, Array]:
    """Return positions `(B, ...)` moved into their episodes, and which of them had to move, or have no value.

    `starts`, `lengths`: of the episode of each row, `(B,)`; `blank_first`, `blank_last`: how many steps at the start
    and at the end of each have no value, one number or `(B,)`.

    Example:
        >>> clamp(np.array([[8, 10, 14]]), np.array([10]), np.array([4]), blank_last=1)
        (array([[10, 10, 12]]), array([[ True, False,  True]]))
    """
    shape = (-1, *(1,) * (wanted.ndim - 1))
    low = starts.reshape(shape)
    high = low + (lengths.reshape(shape) - 1)
    if isinstance(blank_first, int) and isinstance(blank_last, int) and not (blank_first or blank_last):
        places = np.minimum(np.maximum(wanted, low), high)
        return places, places != wanted
    first = low + (blank_first if isinstance(blank_first, int) else blank_first.reshape(shape))
    last = high - (blank_last if isinstance(blank_last, int) else blank_last.reshape(shape))
    is_pad = (wanted < first) | (wanted > last)
    # Where no step has a value, the row is still one of this episode.
    last = np.maximum(last, low)
    first = np.minimum(first, last)
    return np.minimum(np.maximum(wanted, first), last), is_pad


def slots_of(places: Array, starts: Array, rows: int) -> Array:
    """Return the slots of positions `(B, ...)` that lie in the episodes that start at `starts`."""
    lap = starts - starts % rows
    slots: Array = places - lap.reshape(-1, *(1,) * (places.ndim - 1))
    np.subtract(slots, rows, out=slots, where=slots >= rows)
    return slots


@dataclass(frozen=True, slots=True)
class Ends:
    """Which episodes of some items have more steps than are stored.

    `first_steps`: how many of each were evicted: if any, the oldest stored one is like any other; `is_open`: whether
    each has not ended, so that the newest stored one is like any other.
    """

    first_steps: Array
    is_open: Array

    def blanks(self, first: int, last: int) -> tuple[Array, Array]:
        """Return how many stored steps at the start and at the end of each episode have no value, given those of a
        whole one."""
        return np.where(self.first_steps > 0, 0, first), np.where(self.is_open, 0, last)


@dataclass(frozen=True)
class Taken:
    """How an item holds the steps of one column.

    `fold`: number of rows to fold them into, as `action` of a clip; 0: none; `is_alone`: whether the only step comes
    without an axis of its own; `fill`: the value of padded rows, None: that of the nearest step; `mask`: the column
    that tells which rows are padding, None: none does.
    """

    steps: Steps
    fold: int = 0
    is_alone: bool = False
    fill: Any = None
    mask: str | None = None

    def shape(self, size: int, spec: ColumnSpec) -> tuple[int, ...]:
        """Return the shape of the column in a batch of `size` items."""
        steps = len(self.steps.offsets)
        if self.fold:
            return size, self.fold, math.prod(spec.shape) * steps // self.fold
        return (size, *spec.shape) if self.is_alone else (size, steps, *spec.shape)


ANCHOR = Taken(Steps((0,)), is_alone=True)
"""A column at the anchor alone."""


@dataclass(frozen=True)
class Cut:
    """What an item holds, column by column, and where its anchor can be.

    Args:
        named: column -> how it is held.
        others: how columns are held that are not named; None: not at all.
        before, after: steps that every anchor has before and after it in its episode.
        least: steps that an episode with an anchor has at least; matters beyond `before + after + 1`.
        blanks: column -> steps without a value at the start and at the end of each episode.
        reward_at: where rewards stand, "next" or "same"; None: not known.
        computed: pairs of a name and the `Computed` behind it, in the order in which they are computed.
        functions: pairs of a name and a function of the whole batch that returns the column, called in this order at
            the end.
        episode_numbers: returns the numbers of episodes in a view, given the positions of their first steps; None: they
            are counted among those that are stored.
        step_ids: returns the ids of steps, given their positions; None: these are the ids.
        ring: the number of the ring that computes it, among several.
        history, frameskip: of a clip, for messages; 0 for any other cut.
        across: whether the steps run on into the next episode of the lane.

    Example:
        >>> cut = Cut.clip(history_len=2, frameskip=3)
        >>> cut.before, cut.after, cut.counts(np.array([4, 6, 9])).tolist()
        (0, 5, [0, 1, 4])
    """

    named: Mapping[str, Taken]
    others: Taken | None
    before: int = 0
    after: int = 0
    least: int = 0
    blanks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    reward_at: str | None = None
    computed: tuple[tuple[str, Any], ...] = ()
    functions: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = ()
    history: int = 0
    frameskip: int = 0
    episode_numbers: Callable[[Array], Array] | None = None
    step_ids: Callable[[Array], Array] | None = None
    ring: int = 0
    across: bool = False
    span: int = field(init=False)
    """Steps around an anchor that its episode must have: `before + 1 + after`."""
    widest: int = field(init=False)
    """The greatest number of steps of any column."""
    anchors: tuple[int, int, int, bool] = field(init=False)
    """What decides which steps are anchors: two cuts with the same value have the same anchors."""
    added: tuple[str, ...] = field(init=False)
    """Names of the columns that are computed."""
    around: Around = field(init=False, compare=False, repr=False)
    """The steps that an item holds; the anchor alone where gathering needs the bounds of the episodes."""
    computed_layout: Layout = field(init=False, compare=False, repr=False)
    """Shape of a row and dtype of the computed columns, as of the last batch."""
    needs_bounds: bool = field(init=False)
    """Whether gathering needs the bounds of the episodes: a column is padded, or computed."""

    def __post_init__(self) -> None:
        taken = [*self.named.values(), *([self.others] if self.others else [])]
        span = self.before + 1 + self.after
        least = self.least if self.least > span else 0
        needs_bounds = self.across or bool(self.computed) or any(t.steps.padded for t in taken)
        offsets = (offset for t in taken for offset in t.steps.offsets)
        added = [column for name, how in self.computed for column in how.adds(name)]
        for name, value in (
            ("span", span),
            ("added", (*added, *(name for name, _ in self.functions))),
            ("least", least),
            ("anchors", (self.before, self.after, least, self.across)),
            ("widest", max((len(t.steps.offsets) for t in taken), default=1)),
            ("needs_bounds", needs_bounds),
            ("computed_layout", {}),
            ("around", Around(() if needs_bounds else offsets)),
        ):
            object.__setattr__(self, name, value)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def clip(history_len: int, frameskip: int = 1, columns: tuple[str, ...] | None = None) -> Cut:
        """Return the cut of clips: `history_len` steps of a column, every `frameskip`-th, and all steps of `action`.
        `columns`: the names of those to hold; None: all.

        Raises:
            InputError: it has more steps than any clip in memory.
        """
        span = history_len * frameskip
        if span > _MOST_STEPS:
            raise InputError(
                f"a clip of history_len={history_len} and frameskip={frameskip} has {span:,} steps; at most "
                f"{_MOST_STEPS:,}"
            )
        strided = Taken(Steps(tuple(range(0, span, frameskip))))
        steps = strided.steps if frameskip == 1 else Steps(tuple(range(span)))
        dense = Taken(steps, fold=history_len)
        named, others = {"action": dense}, None if columns is not None else strided
        if columns is not None:
            named = {name: dense if name == "action" else strided for name in columns}
        return Cut(named, others, after=span - 1, history=history_len, frameskip=frameskip)

    def of(self, name: str) -> Taken | None:
        """Return how a column is held, or None."""
        return self.named.get(name, self.others)

    def held(self, names: Iterable[str]) -> list[str]:
        """Return which of these columns are held."""
        return [name for name in names if self.of(name) is not None]

    def layout(self, schema: Schema, size: int) -> Layout:
        """Return the shape and dtype of every column of a batch of `size` items, masks included; of computed ones, once
        they were computed here."""
        found: Layout = {}
        for spec in schema.columns:
            taken = self.of(spec.name)
            if taken is not None:
                found[spec.name] = taken.shape(size, spec), spec.dtype
                if taken.mask is not None:
                    found[taken.mask] = (size, len(taken.steps.offsets)), np.dtype(np.bool_)
        found.update({name: ((size, *shape), dtype) for name, (shape, dtype) in self.computed_layout.items()})
        return found

    def counts(self, lengths: Array) -> Array:
        """Return the number of anchors in episodes of these lengths, int64."""
        return counts(lengths, self.span, self.least)

    def unreached(self, lengths: Array) -> int:
        """Return how many steps of episodes of these lengths no item holds. O(episodes, and distinct lengths times
        offsets)."""
        if self.across:  # as one run
            lengths = np.asarray(lengths, np.int64).sum(keepdims=True)
        sizes, many = np.unique(np.asarray(lengths, np.int64), return_counts=True)
        taken = [*self.named.values(), *([self.others] if self.others else [])]
        anchors = self.counts(sizes)
        reached = upto = np.zeros(len(sizes), np.int64)
        for offset in sorted({offset for t in taken for offset in t.steps.offsets}):
            first = np.maximum(self.before + offset, upto)
            upto = np.clip(self.before + offset + anchors, upto, sizes)
            reached = reached + np.maximum(0, upto - first)
        return int(((sizes - reached) * many).sum())

    def why_none(self, lengths: Array, option: str = "history_len") -> str:
        """Return why episodes of these lengths have no anchor, and how to change that."""
        if self.across and len(lengths):
            return (
                f"no sequence of {self.span} steps fits in a lane: {int(np.sum(lengths))} steps are stored; collect "
                "more first"
            )
        if not len(lengths):
            return f"no clips of {self.span} steps are stored (0 episodes); collect more first"
        longest = int(np.max(lengths))
        if self.history:
            few = longest // self.frameskip
            remedy = f"{option}={few}" if few else f"frameskip={longest}"
            return (
                f"no clip of {self.span} steps ({option}={self.history} * frameskip={self.frameskip}) fits: the "
                f"longest stored episode (of {len(lengths)}) has {longest} steps; choose {remedy} or less, or collect "
                "longer episodes"
            )
        return (
            f"no step can be an anchor: this window needs episodes of at least {max(self.span, self.least)} steps "
            f"({self.before} before the anchor, {self.after} after it), and the longest stored episode (of "
            f"{len(lengths)}) "
            f"has {longest} steps; give the columns a pad=, choose smaller offsets, or collect longer episodes"
        )


ROW = Cut({}, ANCHOR)
"""Single rows."""
