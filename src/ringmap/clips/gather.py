"""Gathers batches of clips: numbers to positions to rows, each copied once.

    numbers -> ClipIndex -> anchors (B,) -> slots (B, H) -> one take per column
                                ^                                 |
                                +---- redraw those evicted <---- validate

A clip is named by its anchor: a position, from which the offsets of its columns count (cut.py).

Invariants: a clip is returned only if the tail after the copy tells that its rows were live
during the copy; a clip that was evicted meanwhile is redrawn uniformly, and counted.
Not here: which clips are requested (samplers), which steps they hold (cut.py), what is done with a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringmap.clips.bounds import Bounds
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut, Layout, Places, Steps, Taken, places_of
from ringmap.clips.draws import NO_CROSSING, Crossing, Drawn, integers
from ringmap.clips.index import ClipIndex
from ringmap.clips.items import (
    EpisodeMoment,
    Items,
    Numbers,
    call_functions,
    compute,
    pad,
    put_added,
)
from ringmap.clips.rings import AdjacentRings
from ringmap.errors import NoClipsError
from ringmap.storage.columns.base import Column
from ringmap.storage.columns.copying import SPLIT_NBYTES, Readahead, take
from ringmap.storage.columns.rows import AdjacentRows, Rows
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import put
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.process import Forkable
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import lost, redraw_lost
from ringmap.storage.ring.arrays import all_true, highest, lowest
from ringmap.storage.ring.links import WholeEpisodes
from ringmap.storage.ring.ring import ClipNumber, Position

__all__ = ["GONE", "MOST_CHOICES", "PINNED", "ClipReader", "Pinned", "Plan", "Redraw"]

Array = np.ndarray[Any, np.dtype[Any]]

PINNED = 1 << 62
"""An id of PINNED + p means the clip whose anchor is position p of the ring, in every process and at any time."""

GONE = -1
"""Stands for the anchor of a clip that was evicted: another clip is drawn in its place."""

Redraw = Callable[[int], Array]
"""Returns the anchors of so many clips, drawn in place of evicted ones."""

_MOST_PLANS = 32

MOST_CHOICES = 1024
"""Clips of which a redraw takes the newest, at most."""


class Pinned:
    """Clip numbers `[base, end)` of one span, as of one moment of one numbering; see `SpanIndex`.

    They are the clips of the newest episodes that start before position `head`, in any numbering.
    """

    __slots__ = ("base", "end", "head", "numbering")

    def __init__(self, base: ClipNumber, end: ClipNumber, numbering: object, head: Position) -> None:
        self.base, self.end, self.numbering, self.head = base, end, numbering, head

    @property
    def count(self) -> int:
        """Number of clips."""
        return self.end - self.base

    @property
    def heads(self) -> dict[int, tuple[int, int]]:
        """Ring number -> head and number of clips: what other processes need to know of this moment."""
        return {0: (self.head, self.count)}


class ClipReader(Forkable):
    """Reads clips of a source, also while a writer in any thread or process fills it. `rng`: redraws clips that were
    evicted before they could be read."""

    holds_episodes = True
    """Whether its clips are steps of episodes, not transitions."""
    columns: Any = None
    """Of transitions, what makes batches of rows; None: its clips are steps of episodes."""
    capacity: int | None = None
    """The number of newest clips that count; None: all."""

    def __init__(self, source: Handle, rng: np.random.Generator) -> None:
        self.source = source
        self.rng = rng
        self.index = ClipIndex(source.live)
        self.num_redraws = 0
        self._plans: dict[int, Plan] = {}
        self.watch = Readahead(source.disk.system)

    def whole_episodes(self) -> WholeEpisodes:
        """Return the episodes that count now, parts joined; of transitions those of their environments."""
        with thread.searching, self.source.lock:
            return self.source.live.whole

    def pin(self, cut: Cut) -> Pinned:
        """Return the clips that exist now. O(1) when nothing changed."""
        with thread.searching, self.source.lock:
            return self.pin_here(cut)

    def pin_here(self, cut: Cut) -> Pinned:
        """Do the work of `pin`, for a caller that holds the lock of the source."""
        index = self.index.of(cut.span, cut.least, cut.across)
        return Pinned(index.base, index.end, index.numbering, self.source.head)

    def window(self, cut: Cut) -> ClipRange:
        """Return the clips that exist now, for samplers. O(1)."""
        with thread.searching, self.source.lock:
            index = self.index.of(cut.span, cut.least, cut.across)
            return ClipRange(self.source, index, before=cut.before)

    def at(
        self,
        positions: Array,
        cut: Cut,
        out: dict[str, Array] | None = None,
        threads: int = 1,
        asked: bool = False,
        crossing: Crossing | None = None,
        redraw: Redraw | None = None,
        numbers: EpisodeMoment | None = None,
    ) -> dict[str, Array]:
        """Return the clips with these anchors, column -> `(B, ...)` as the cut has it.

        Args:
            positions: int64 `(B,)`, anchors at the last look; updated with the redrawn ones.
            cut: what they hold.
            out: column -> array to fill and return, of exactly that shape and dtype, C-contiguous.
            threads: maximum number of threads for the copy.
            asked: whether `want` was already called for them.
            crossing: as `draw` returned it with these positions, for this cut; None: it is looked up.
            redraw: draws in place of evicted clips; None: uniformly from all that are stored.
            numbers: of the episodes, if the caller needs them; those of this moment.

        Raises:
            NoClipsError: no clip is left to draw.
            LappedError: the writer overtook this reader for 5 s without progress.
        """
        if self.source.rows is None:  # nothing was ever stored
            self.replaced(np.full(len(positions), GONE), cut, redraw)
            return {}
        if numbers is None and cut.computed:
            numbers = EpisodeMoment(lambda: [(self.source, None)])
        number = None if numbers is None else numbers.of(self.source)
        while True:
            batch, good = self._gather(positions, cut, out, threads, asked, crossing, number)
            bad = lost(self.source, positions, good)
            if bad is not None:
                self._read_again(batch, positions, bad, cut, redraw, number)
            if numbers is None or not numbers.is_outdated:
                break
            numbers.begin()  # all numbers of a batch are of one moment
        if cut.functions:
            call_functions(batch, cut, len(positions))
        if cut.added:
            put_added(batch, cut, out)
        return batch

    def once(
        self,
        positions: Array,
        cut: Cut,
        out: dict[str, Array] | None = None,
        threads: int = 1,
        numbers: Numbers | None = None,
    ) -> tuple[dict[str, Array], Array | None]:
        """Do what `at` does, without redraws and functions; return which clips are not whole too, None for none."""
        if self.source.rows is None:  # nothing was ever stored
            return {}, np.ones(len(positions), np.bool_)
        batch, good = self._gather(positions, cut, out, threads, numbers=numbers)
        return batch, lost(self.source, positions, good)

    def read_adjacent(
        self, rings: AdjacentRings, places: Array, anchors: Array, cut: Cut, out: dict[str, Array] | None, threads: int
    ) -> tuple[dict[str, Array], Array, Array | None]:
        """Return clips of this ring and others as they are now, the position of the oldest row of each, and which are
        good so far, None for all; the caller validates them.

        `places`: of the ring of each clip among `rings`, `(B,)`; `anchors`: positions on these; `cut`: of columns
        alone, without bounds of episodes and functions; `out`, `threads`: as for `at`.
        """
        plan = _plan_of(rings.plans, cut, rings.rows, 0)
        slots: list[Places] = []
        for steps, is_alone in plan.steps:
            found = rings.slots(steps, anchors, places)
            slots.append(places_of(found, None, None) if is_alone else (found, None, None))
        if len(anchors) * cut.widest * rings.rows.row_nbytes < SPLIT_NBYTES:
            threads = 1
        batch = plan.copy(slots, len(anchors), out, threads, rings.head)
        return batch, anchors, None

    def layout(self, cut: Cut, schema: Schema, size: int) -> Layout:
        """Return the shape and dtype of the columns of a batch."""
        return cut.layout(schema, size)

    def _read_again(
        self,
        batch: dict[str, Array],
        positions: Array,
        bad: Array,
        cut: Cut,
        redraw: Redraw | None,
        numbers: Numbers | None,
    ) -> None:
        """Redraw the bad clips of a batch, and read them."""

        def gather(which: Array) -> Array | None:
            found, good = self._gather(positions[which], cut, numbers=numbers)
            for name, values in found.items():
                if name in batch:
                    batch[name] = put(batch[name], which, values)
                else:  # it could not be computed from rows that were being overwritten: `which` is the whole batch
                    batch[name] = values
            return good

        draw, choices = redraw or partial(self._redraw, cut=cut), 0

        def newer(count: int) -> Array:
            """Draw for each clip the newest of so many: a reader that is overtaken again and again must get ahead of
            the writer."""
            nonlocal choices
            choices = min(2 * choices or 1, MOST_CHOICES)
            found: Array = draw(count * choices).reshape(choices, count).max(axis=0)
            return found

        def others(which: Array) -> Array:
            return self.replaced(self.anchors_at(positions[which], cut), cut, newer)

        advice = "raise max_steps, or ask for smaller batches"
        redraw_lost(self.source, positions, bad, gather, others, self.source.folder, advice)

    def draw(self, count: int, cut: Cut, rng: np.random.Generator) -> Drawn | None:
        """Return `count` clips drawn uniformly, or None when there are none."""
        with thread.searching, self.source.lock:
            index = self.index.of(cut.span, cut.least, cut.across)
            if index.end <= index.base:
                return None
            shift = index.shift
            if shift is not None:
                return Drawn(integers(rng, index.base + shift, index.end + shift, count), NO_CROSSING)
            numbers = integers(rng, index.base, index.end, count)
            return index.drawn(numbers, cut.before, rng, cut.around)

    def starts(self, positions: Array, cut: Cut) -> Array:
        """Tell for each position whether it is an anchor now. O(B log episodes)."""
        with thread.searching, self.source.lock:
            return self.index.of(cut.span, cut.least, cut.across).are(positions, cut.before)

    def anchors_at(self, positions: Array, cut: Cut) -> Array:
        """Return the positions; GONE for one that is no anchor now. O(B log episodes)."""
        good = self.starts(positions, cut)
        return positions if all_true(good) else np.where(good, positions, GONE)

    def pin_as(self, heads: Sequence[tuple[int, int]], cut: Cut) -> Pinned:
        """Return the clips of the moment of another process, given head and number of clips of each ring, of one here:
        those of the episodes that start before the head."""
        ((head, count),) = heads
        if self.source.head < head:
            self.source.refresh()
        with thread.searching, self.source.lock:
            index = self.index.of(cut.span, cut.least, cut.across)
            end = index.end_before(Position(head))
            return Pinned(ClipNumber(end - count), end, index.numbering, Position(head))

    def place(self, numbers: Array, pinned: Pinned, cut: Cut) -> Array:
        """Return the anchors of the clips with these numbers; GONE for an evicted one."""
        with thread.searching, self.source.lock:
            index = self.index.of(cut.span, cut.least, cut.across)
            if index.numbering is not pinned.numbering:  # other numbers, the same positions
                numbers = numbers + (index.end_before(pinned.head) - pinned.end)
            if not len(numbers) or (lowest(numbers) >= index.base and highest(numbers) < index.end):
                return index.positions(numbers, cut.before)
            gone = (numbers < index.base) | (numbers >= index.end)
            positions, kept = np.full(len(numbers), GONE), numbers[~gone]
            if len(kept):
                positions[~gone] = index.positions(kept, cut.before)
            return positions

    def replaced(self, positions: Array, cut: Cut, redraw: Redraw | None = None) -> Array:
        """Return the positions of anchors, int64 `(B,)`, with another clip in place of each that is GONE: drawn by
        `redraw`, or uniformly from all that are stored, and counted.

        Raises:
            NoClipsError: no clip is left to draw.
        """
        if not len(positions) or lowest(positions) != GONE:
            return positions
        gone = positions == GONE
        count = int(gone.sum())
        positions = positions.copy()
        positions[gone] = self._redraw(count, cut) if redraw is None else redraw(count)
        self.num_redraws += count
        return positions

    def _redraw(self, count: int, cut: Cut) -> Array:
        """Return the anchors of `count` clips drawn uniformly from all that are stored."""
        drawn = self.draw(count, cut, self.rng)
        if drawn is None:
            with thread.searching, self.source.lock:
                lengths = self.source.live.whole_lengths
                why = (
                    f"no clips of {cut.span} steps are left: all were evicted or cleared; collect more first"
                    if not len(lengths)
                    else cut.why_none(lengths)
                )
            raise NoClipsError(f"{self.source.folder}: {why}")
        return drawn.positions

    def _gather(
        self,
        anchors: Array,
        cut: Cut,
        out: dict[str, Array] | None = None,
        threads: int = 1,
        asked: bool = False,
        crossing: Crossing | None = None,
        numbers: Numbers | None = None,
    ) -> tuple[dict[str, Array], Array | None]:
        """Return the clips with these anchors as they are now, and which of them lie in an episode, None if all do."""
        rows, head = self.source.rows, self.source.head  # before any row is read
        assert rows is not None
        plan = self._plans.get(id(cut))
        if plan is None or plan.rows is not rows:
            plan = _plan_of(self._plans, cut, rows, rows.ring.rows)
        is_covered = rows.is_covered or plan.has_text
        if threads > 1 and len(anchors) * cut.widest * rows.row_nbytes < SPLIT_NBYTES:
            threads = 1
        bounds: Bounds | None = None
        inside: Array | None = None
        if plan.needs_bounds:
            crossing = None  # a draw knows the steps of items without padding only
            bounds = Bounds(self.source, anchors, cut.across)
            places, inside = bounds.places(plan.steps, is_covered)
        else:
            places = plan.places(anchors, is_covered)
            if crossing is None and plan.can_cross and self.source.live.links is not None:
                crossing = Crossing.of(self.source, anchors, cut.around)
            if crossing is NO_CROSSING:
                crossing = None
            elif crossing is not None:
                for spots, (every, _, positions) in zip(plan.spots, places, strict=True):
                    crossing.put(every, spots, plan.size, positions)
        if rows.large:
            if not asked:
                self._want(rows, plan, places)
            self.watch.begin()
        batch = plan.copy(places, len(anchors), out, threads, head, rows if is_covered else None)
        if rows.large:
            self.watch.end()
        if bounds is not None:
            if cut.computed:
                found = cut.episode_numbers or numbers
                assert found is not None
                inside = self._compute(batch, bounds.items(cut, batch, self.rng, found), cut, inside)
            inside = bounds.still_whole(inside)
        elif crossing is not None:
            inside = crossing.still_whole(self.source, len(anchors))
        return batch, inside

    def _compute(self, batch: dict[str, Array], items: Items, cut: Cut, inside: Array | None) -> Array | None:
        """Add the computed columns; return which items are good so far, None for all."""
        try:
            compute(batch, items, cut)
        except Exception:
            # Rows that are being overwritten may hold anything: only an error over whole ones is the caller's.
            if lost(self.source, items.position, inside) is None:
                raise
            return np.zeros(len(items), np.bool_)
        return inside

    def want(self, anchors: Array, cut: Cut) -> None:
        """Ask the disk for clips that are to be read soon, if that pays off."""
        rows = self.source.rows
        if rows is not None and rows.large and self.watch.is_cold:
            plan = _plan_of(self._plans, cut, rows, rows.ring.rows)
            if plan.needs_bounds:
                places, _ = Bounds(self.source, anchors, cut.across).places(plan.steps, False)
            else:
                places = plan.places(anchors, False)
            self._want(rows, plan, places)

    def _want(self, rows: Rows, plan: Plan, places: list[Places]) -> None:
        """Ask for all columns before any of them is touched."""
        if self.watch.is_cold:
            for name, _, _, number, _ in plan.columns:
                column = rows.by_name[name]
                if column.is_large:
                    column.want(places[number][0])


class Plan:
    """What to gather for a cut over these rows, on a ring of `size`: made once.

    `steps`: the distinct steps, and whether they come without an axis of their own; `columns`: name, column, how it is
    held, the number of its steps, and the shape of a row that is folded.
    """

    __slots__ = (
        "can_cross",
        "columns",
        "cut",
        "has_text",
        "needs_bounds",
        "rows",
        "size",
        "spots",
        "steps",
    )

    def __init__(self, cut: Cut, rows: Rows | AdjacentRows, size: int) -> None:
        self.cut, self.rows = cut, rows
        self.needs_bounds, self.size = cut.needs_bounds, size
        self.steps: list[tuple[Steps, bool]] = []
        self.columns: list[tuple[str, Column, Taken, int, tuple[int, ...] | None]] = []
        for name, column in rows.by_name.items():
            taken = cut.of(name)
            if taken is not None:
                key = taken.steps, taken.is_alone
                if key not in self.steps:
                    self.steps.append(key)
                folded = taken.shape(0, column.spec)[1:] if taken.fold else None
                self.columns.append((name, column, taken, self.steps.index(key), folded))
        self.has_text = bool(cut.held(rows.texts))
        self.can_cross = len(cut.around.array) > 1 and not self.needs_bounds
        """Whether an item may have steps in several parts, with none of them padded."""
        self.spots = [cut.around.spots(steps.array) for steps, _ in self.steps]
        """Where the steps are among those of an item that does."""

    def places(self, anchors: Array, is_covered: bool) -> list[Places]:
        """Return where each of the steps is, none of which is padded; with its positions if rows are covered."""
        found: list[Places] = []
        for steps, is_alone in self.steps:
            slots = steps.slots(anchors, self.size)
            at = anchors[:, None] + steps.array if is_covered else None
            found.append(places_of(slots, None, at) if is_alone else (slots, None, at))
        return found

    def copy(
        self,
        places: list[Places],
        size: int,
        out: dict[str, Array] | None,
        threads: int,
        head: int,
        covered: Rows | None = None,
    ) -> dict[str, Array]:
        """Return the columns of a batch of `size` clips, given where each of the plan's steps is. `covered`: the rows,
        if they may be elsewhere than in the files."""
        batch: dict[str, Array] = {}
        for name, column, taken, number, folded in self.columns:
            where, is_pad, positions = places[number]
            into = None if out is None else out.get(name)
            if folded is not None and into is not None:
                into = into.reshape(*where.shape, *column.spec.shape)
            if covered is not None and positions is not None:
                (values,) = covered.take([name], positions, head, [into], threads, where)
            elif threads > 1:
                values = take(column, where, into, threads, head)
            else:
                values = column.take(where, into, head)
            if folded is not None:
                values = values.reshape(size, *folded)
            batch[name] = values
            if is_pad is not None:
                pad(batch, values, taken, is_pad, out)
        return batch


def _plan_of(plans: dict[int, Any], cut: Cut, rows: Rows | AdjacentRows, size: int) -> Plan:
    """Return what to gather for a cut, from those that were made before."""
    plan: Plan | None = plans.get(id(cut))  # a plan keeps its cut, so that no other gets its id
    if plan is None or plan.rows is not rows:
        while len(plans) >= _MOST_PLANS:
            plans.pop(next(iter(plans)), None)
        plan = plans[id(cut)] = Plan(cut, rows, size)
    return plan
