"""Transitions read from rows: sums of n rewards, and the observation after the last of these steps.

    position p, lanes N:   p -> p + N -> p + 2N          n_step = 3: r + gamma r' + gamma^2 r''
                                         \\__ its next observation: row p + 3N, or a separately stored one

A sum ends where an episode ends, and where a lane breaks. Where environments are named one by one and come out of turn,
the row that goes on is another than p + N, and says so: it is looked for. The frames of a stack (columns.py), N = 1:

    stack at p:          p - 3   p - 2   p - 1   p
    the next stack:              p - 2   p - 1   p   p + 1, or a separately stored frame

Invariants: a transition is returned with the next observation that it was added with; one that was evicted before it
was read whole is redrawn.
What is computed for each transition is computed for all at once, of one ring (`RowsOfOne`), or of several side by side
(`RowsOfAdjacent`); rings whose columns can't be mapped side by side are read one after the other (clips/rings.py).
Not here: which transitions are drawn (buffer.py), next observations without a row (lanes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ringmap.buffers.transitions.columns import TransitionColumns
from ringmap.buffers.transitions.lanes import FURTHEST, NextObservations
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import ROW, Cut, Layout
from ringmap.clips.draws import Crossing, Drawn
from ringmap.clips.gather import GONE, ClipReader, Pinned, Redraw
from ringmap.clips.items import EpisodeMoment, Numbers
from ringmap.clips.rings import RING_FAULTS, AdjacentRings, groups
from ringmap.errors import NoClipsError
from ringmap.storage.columns.copying import LEAST_NBYTES, aligned, pair, take
from ringmap.storage.columns.rows import Rows
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.commit.commit import ENDS, LANES, NUMBERS, numbered
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import lost, read_whole, redraw_lost
from ringmap.storage.ring.arrays import all_true
from ringmap.storage.ring.links import NONE, Parts, WholeEpisodes

__all__ = ["TransitionReader", "transition_reader"]

Array = np.ndarray[Any, np.dtype[Any]]

_LOOKED_AT = 128
"""Rows that are looked at together for one that goes on."""

_LARGE_NBYTES = 512
"""Bytes of an observation from which a batch of 256 takes blocks that an allocator may give back to the system."""


class RowsOfOne:
    """The rows of one ring, as of now.

    `head`: of the ring; `stop`: where the newest call ended; `is_dense`: whether all positions up to there are stored.
    """

    def __init__(self, source: Handle, next_observations: NextObservations) -> None:
        assert source.rows is not None
        self.source, self.rows, self.next_observations = source, source.rows, next_observations
        with thread.searching, source.lock:
            self.head, live = source.head, source.live
            self.stop: int = live.stop
            self.is_dense = live.is_dense

    def take(
        self,
        names: Sequence[str],
        at: Array,
        out: Sequence[Array | None] | None = None,
        threads: int = 1,
        which: Array | None = None,
    ) -> list[Array]:
        """Return columns of rows at `(B,)` or `(B, n)`, in the arrays of `out` where it has some; `which`: of some
        transitions."""
        return self.rows.take(names, at, self.head, out, threads)

    def are_live(self, at: Array, which: Array | None = None) -> Array:
        """Tell which positions are stored; `which`: of the transitions they are of, if not of all."""
        return are_live(self.source, at)

    def find(self, last: Array, which: Array) -> tuple[Array, dict[str, Array]]:
        """Return which of some transitions, with last steps at `last[which]`, have one apart, and these."""
        return self.next_observations.find(self.source, last[which], self.head)


class RowsOfAdjacent:
    """The rows of rings side by side, as of now, for transitions of the rings at `places`, in their order."""

    head = -1
    """Each ring has its own."""

    def __init__(self, rings: AdjacentRings, next_observations: Sequence[NextObservations], places: Array) -> None:
        self._rings, self._next_observations, self._ring_of = rings, next_observations, places
        ends = rings.ends()
        self.stop, self.is_dense = ends.stops.take(places), ends.is_dense
        self._laps, self._first = rings.laps(places), rings.first_rows(places)

    def take(
        self,
        names: Sequence[str],
        at: Array,
        out: Sequence[Array | None] | None = None,
        threads: int = 1,
        which: Array | None = None,
    ) -> list[Array]:
        """Return columns of rows, as `RowsOfOne.take` does."""
        laps, first, rows = self._laps, self._first, self._rings.rows
        if which is not None or at.ndim > 1:
            laps, first = (
                v if isinstance(v, int) else (v if which is None else v[which])[:, None] for v in (laps, first)
            )
        slots, head = at % laps, self._rings.head
        slots += first
        if out is None and threads == 1:
            return [rows.by_name[name].take(slots, None, head) for name in names]
        into = out or [None] * len(names)
        return [take(rows.by_name[n], slots, o, threads, head) for n, o in zip(names, into, strict=True)]

    def are_live(self, at: Array, which: Array | None = None) -> Array:
        """Return what `RowsOfOne.are_live` does."""
        found = np.empty(at.shape, np.bool_)
        for place, mine in groups(self._ring_of if which is None else self._ring_of.take(which)):
            found[mine] = are_live(self._rings.sources[place], at[mine])
        return found

    def find(self, last: Array, which: Array) -> tuple[Array, dict[str, Array]]:
        """Return what `RowsOfOne.find` does."""
        known, found, names = list[Array](), list[dict[str, Array]](), list[str]()
        for place, mine in groups(self._ring_of.take(which)):
            source = self._rings.sources[place]
            try:
                here, values = self._next_observations[place].find(source, last[which[mine]], source.head)
            except RING_FAULTS:  # the look after the copy says so
                continue
            if len(here):
                known.append(mine[here])
                found.append(values)
                names = list(values)
        if not known:
            return np.empty(0, np.int64), {}
        return np.concatenate(known), {name: np.concatenate([values[name] for values in found]) for name in names}


def are_live(source: Handle, positions: Array) -> Array:
    """Tell which positions are stored: repairs and power cuts leave gaps."""
    with thread.searching, source.lock:
        starts, lengths = source.live.starts, source.live.lengths
        if not len(starts):
            return np.zeros(positions.shape, np.bool_)
        index = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
        live: Array = (positions >= starts[index]) & (positions < starts[index] + lengths[index])
        return live


class _Found(NamedTuple):
    """Transitions, flat by leaf; which are whole (None: all); the positions of their oldest rows, and those after their
    last ones; where the newest call ended, and the head then."""

    batch: dict[str, Array]
    good: Array | None
    oldest: Array
    after: Array
    stop: Any
    head: int

    @property
    def newest(self) -> Array:
        """Which end in the newest call, bool `(B,)`."""
        found: Array = self.after >= self.stop
        return found


class _Plan(NamedTuple):
    """Names of columns: those read at a transition's own row, but for large observations; at each further row that is
    summed; at the row after the last. Those of small observations, of large ones, of frames. What `_room` has arrays
    for; and those of a batch, in order."""

    of_row: list[str]
    of_step: list[str]
    of_next: list[str]
    small: list[str]
    wide: list[str]
    stacked: list[str]
    paired: list[ColumnSpec]
    names: list[str]


class TransitionReader(ClipReader):
    """Reads transitions of `n_step` steps, discounted by `gamma`: the clips of a ring of rows, of which the newest
    `capacity` count."""

    holds_episodes = False
    columns: TransitionColumns

    def __init__(
        self,
        source: Handle,
        rng: np.random.Generator,
        columns: TransitionColumns,
        next_observations: NextObservations,
        capacity: int,
        n_step: int,
        gamma: float,
    ) -> None:
        super().__init__(source, rng)
        self.columns, self.next_observations = columns, next_observations
        self.capacity: int = capacity
        self.n_step, self.gamma = n_step, gamma

    # -- which transitions -------------------------------------------------------------------

    def window(self, cut: Cut = ROW) -> ClipRange:
        """Return the transitions that count now, numbered from the oldest. O(1)."""
        with thread.searching, self.source.lock:
            return self._now()

    def _now(self) -> ClipRange:
        """Do the work of `window`. Holds the lock of the source."""
        return ClipRange(self.source, self.index.of(1), self.capacity, has_episodes=False)

    def pin_here(self, cut: Cut) -> Pinned:
        """Return the transitions that count now, for a caller that holds the lock of the source."""
        now = self._now()
        return Pinned(now.base, now.end, now.index.numbering, now.head)

    def draw(self, count: int, cut: Cut, rng: np.random.Generator) -> Drawn | None:
        """Return `count` transitions drawn uniformly, or None when there are none."""
        with thread.searching, self.source.lock:
            now = self._now()
            return Drawn(now.index.draw(count, rng, base=now.base)) if now.count else None

    def starts(self, positions: Array, cut: Cut) -> Array:
        """Tell for each position whether a transition that counts stands there: rows are stored for longer."""
        found = super().starts(positions, cut)
        with thread.searching, self.source.lock:
            return found & (positions >= self._now().low)

    def place(self, numbers: Array, pinned: Pinned, cut: Cut) -> Array:
        """Return the positions of the transitions with these numbers; GONE for one that counts no more."""
        positions = super().place(numbers, pinned, cut)
        with thread.searching, self.source.lock:
            old = positions < self._now().low
        return np.where(old, GONE, positions) if old.any() else positions

    def _redraw(self, count: int, cut: Cut) -> Array:
        """Return the positions of `count` transitions drawn uniformly from all that count."""
        drawn = self.draw(count, cut, self.rng)
        if drawn is None:
            raise NoClipsError(f"{self.source.folder}: no rows are left to draw from; add some first")
        return drawn.positions

    # -- reading -----------------------------------------------------------------------------

    def at(
        self,
        positions: Array,
        cut: Cut = ROW,
        out: dict[str, Array] | None = None,
        threads: int = 1,
        asked: bool = False,
        crossing: Crossing | None = None,
        redraw: Redraw | None = None,
        numbers: EpisodeMoment | None = None,
    ) -> dict[str, Array]:
        """Return the transitions at these positions, flat; an evicted one is redrawn, and `positions` shows it. As
        `ClipReader.at`, without a cut, crossings and numbers."""
        source = self.source
        found = self._transitions(source, positions, out, asked, threads)
        bad = lost(source, found.oldest, found.good)
        if bad is not None:
            self._read_transitions_again(source, found, positions, bad, redraw)
        return self._put_into(found.batch, out)

    def once(
        self,
        positions: Array,
        cut: Cut,
        out: dict[str, Array] | None = None,
        threads: int = 1,
        numbers: Numbers | None = None,
    ) -> tuple[dict[str, Array], Array | None]:
        """Do what `at` does, without redraws; return the columns, and which transitions are not whole, None for
        none."""
        found = self._transitions(self.source, positions, out, threads=threads)
        return self._put_into(found.batch, out), lost(self.source, found.oldest, found.good)

    def _put_into(self, batch: dict[str, Array], out: dict[str, Array] | None) -> dict[str, Array]:
        """Return the columns of a batch in order, in the caller's arrays, where there are some."""
        if out is None:
            names = self._plan.names
            return {name: v if (v := batch[name]).nbytes < LEAST_NBYTES else aligned(v) for name in names}
        for name, into in out.items():
            if into is not batch[name]:
                np.copyto(into, batch[name])
        return {name: out.get(name, batch[name]) for name in self._plan.names}

    @cached_property
    def _plan(self) -> _Plan:
        columns = self.columns
        large = {spec.name for spec in columns.schema.columns if spec.row_nbytes >= _LARGE_NBYTES}
        wide = [name for name in columns.whole if name in large]
        small = [name for name in columns.whole if name not in large]
        flags = ["dones"] if self.n_step == 1 else ["dones", "truncated"]
        earlier = [] if columns.stack is None else [columns.stack.column.name]
        leaves = (spec for tree in columns.trees for spec in tree.columns)
        return _Plan(
            ["lanes", *small, "actions", "rewards", *flags, *(spec.name for spec in columns.extra), *earlier],
            ["lanes", "dones", "truncated", "rewards", *earlier],
            ["lanes", *small],
            small,
            wide,
            columns.stacked,
            [spec for spec in leaves if spec.name in {*wide, *columns.stacked}],
            list(columns.layout(0, self.n_step == 1)),
        )

    def layout(self, cut: Cut, schema: Schema, size: int) -> Layout:
        """Return the shape and dtype of each column of a batch."""
        return self.columns.layout(size, self.n_step == 1)

    def want(self, positions: Array, cut: Cut = ROW) -> None:
        """Ask the disk for transitions that are to be read soon, if that pays off."""
        rows = self.source.rows
        if rows is not None and rows.large and self.watch.is_cold:
            slots = positions % rows.ring.rows
            lanes, earlier = self._heads(rows, positions)
            if self.columns.stack is not None:
                at = self.columns.stack.positions(positions, lanes, earlier)
                slots = np.concatenate([at, (positions + lanes)[:, None]], 1) % rows.ring.rows
            for name in self.columns.observed:
                if rows.by_name[name].is_large:
                    rows.by_name[name].want(slots)

    def _heads(self, rows: Rows, positions: Array) -> tuple[Array, Array]:
        """Return the number of lanes of rows, and how many earlier frames they have."""
        names = [] if self.columns.stack is None else [self.columns.stack.column.name]
        lanes, *earlier = rows.take(["lanes", *names], positions)
        none = np.zeros(len(positions), np.uint8)
        return np.abs(lanes).astype(np.int64), earlier[0] if earlier else none

    def _read_transitions_again(
        self, source: Handle, found: _Found, positions: Array, bad: Array, instead: Redraw | None
    ) -> None:
        """Redraw the bad ones of a batch, and read them."""
        newest, head = found.newest, found.head

        def gather(which: Array) -> Array | None:
            nonlocal head
            again = self._transitions(source, positions[which])
            for name, values in again.batch.items():
                found.batch[name][which] = values
            newest[which], head = again.newest, again.head
            bad = lost(source, again.oldest, again.good)
            return None if bad is None else ~bad

        def redraw(which: Array) -> Array:
            at = positions[which]
            # A step of the newest call, read while another call came, has a following row now.
            stays = newest[which] & (at >= source.tail) & (source.head != head)
            return self.replaced(np.where(stays, at, GONE), ROW, instead)

        advice = "raise capacity, or ask for smaller batches"
        redraw_lost(source, positions, bad, gather, redraw, source.folder, advice)

    def singly(self, positions: Array) -> tuple[dict[str, Array], Array]:
        """Return single steps at these positions, flat, and which are whole, bool `(B,)`: the others mean nothing. None
        is redrawn."""
        single = self
        if self.n_step > 1:
            single = TransitionReader(
                self.source, self.rng, self.columns, self.next_observations, self.capacity, 1, self.gamma
            )
        found = single._transitions(self.source, positions)
        bad = lost(self.source, found.oldest, found.good)
        return found.batch, np.ones(len(positions), np.bool_) if bad is None else ~bad

    def has_frames(self, positions: Array) -> Array:
        """Tell which of these rows have all frames of their stacks; without stacks all have."""
        stack, rows = self.columns.stack, self.source.rows
        if stack is None or rows is None or not len(positions):
            return np.ones(len(positions), np.bool_)
        at = stack.positions(positions, *self._heads(rows, positions))
        found: Array = np.logical_and.reduce((at >= self.source.tail) & are_live(self.source, at), 1)
        return found

    def ordinals(self, at: Array) -> Array:
        """Return the ordinals of the episodes of rows that are stored, in the order of positions."""
        source = self.source
        assert source.rows is not None
        columns = source.rows.take([LANES, *ENDS, NUMBERS], at)
        late = (columns[-1] < 0).nonzero()[0]  # rows of an open group that a fork can't commit

        def before(positions: Array) -> Array:
            index = np.minimum(at.searchsorted(positions), len(at) - 1)
            _, done, truncated, numbers = (values[index] for values in columns)
            return np.where((at[index] == positions) & ~(done | truncated), numbers, -1)

        if len(late):
            names, rows = [LANES, *ENDS, NUMBERS], [values[late] for values in columns]
            columns[-1][late] = numbered(names, rows, int(at[late[0]]), source.next_ordinal, before)[0][-1]
        return columns[-1]

    def whole_episodes(self) -> WholeEpisodes:
        """Return the episodes of the transitions that count now, named by their ordinals: each run of rows of one
        episode in one commit is a part. O(transitions)."""
        source = self.source

        def read() -> tuple[Array, tuple[Array, Array, Array, Array]]:
            with thread.searching, source.lock:
                now, rows = self._now(), source.rows
                at = now.positions(np.arange(now.count))
                records = now.live.starts.searchsorted(at, side="right")
            if rows is None or not len(at):
                return at, (at, at, at, at)
            return at, (at, records, self.ordinals(at), np.logical_or(*rows.take(list(ENDS), at)))

        at, records, numbers, is_end = read_whole(source, read, source.folder, "raise capacity")
        if not len(at):
            return WholeEpisodes(at, at, None, {})
        begins = np.append(True, (np.diff(records) != 0) | (np.diff(numbers) != 0)).nonzero()[0]
        lengths, names = np.diff(begins, append=len(at)), numbers[begins]
        order = names.argsort(kind="stable")
        before, steps = np.cumsum(lengths[order]) - lengths[order], np.empty(len(names), np.int64)
        steps[order] = before - before[names[order].searchsorted(names[order])]
        ended = dict.fromkeys(numbers[is_end].tolist(), 0)
        return WholeEpisodes(at[begins], lengths, Parts(names, steps, np.full(len(names), NONE)), ended)

    def newest_of_lanes(self, most: int) -> tuple[Array, Array, Array, dict[str, Array], Array]:
        """Return the rows that no other goes on from among the newest `most`, or those of the newest call, oldest
        first: positions, strides, column `earlier`, what they led to, which end an episode."""
        source, rows = self.source, self.source.rows
        if rows is None or source.head == source.tail:
            none = np.empty(0, np.int64)
            return none, none, none, {}, none
        last = np.array([source.head - 1])  # of no call if the newest one was dropped, whose chunk may be gone
        newest = abs(int(rows.take(["lanes"], last)[0][0])) if are_live(source, last).all() else 0
        at = np.arange(max(source.tail, source.head - max(most, newest)), source.head)
        at = at[are_live(source, at)]
        lanes = rows.take(["lanes"], at)[0].astype(np.int64)
        at = at[~np.isin(at, (at - lanes)[lanes > 0])]
        batch, good = self.singly(at)
        at, led = at[good], {n: batch[f"next_{n}"][good] for n in self.columns.observed}
        dones, truncated = rows.take(["dones", "truncated"], at)
        return at, *self._heads(rows, at), led, dones | truncated

    def led_to(self, head: int) -> dict[str, Array] | None:
        """Return what the call that ended at `head` led to, from what was stored since; None if evicted."""
        source = self.source
        source.refresh()
        rows = source.rows
        assert rows is not None
        last = np.array([head - 1])
        count = abs(int(rows.take(["lanes"], last)[0][0]))
        if not 0 < count <= self.capacity or head - count < source.newest_tail():
            return None
        batch, good = self.singly(np.arange(head - count, head))
        if not good.all():
            return None
        led_to = {name: batch[f"next_{name}"] for name in self.columns.observed}
        return {n: v[:, -1] if n in self.columns.stacked else v for n, v in led_to.items()}

    def _transitions(
        self,
        source: Handle,
        positions: Array,
        out: dict[str, Array] | None = None,
        asked: bool = False,
        threads: int = 1,
    ) -> _Found:
        """Return the transitions at these positions of the ring, as they are now."""
        assert source.rows is not None
        is_large = bool(source.rows.large)
        if is_large:
            if not asked:
                self.want(positions)
            self.watch.begin()
        if self._plan.paired and out is None:
            out = self._room(len(positions))
        found = self._sums(RowsOfOne(source, self.next_observations), positions, out, threads)
        if is_large:
            self.watch.end()
        return found

    def _sums(
        self,
        rows: RowsOfOne | RowsOfAdjacent,
        positions: Array,
        out: dict[str, Array] | None,
        threads: int,
    ) -> _Found:
        plan, stack, stop = self._plan, self.columns.stack, rows.stop
        batch = dict(zip(plan.of_row, rows.take(plan.of_row, positions), strict=True))
        strides = np.abs(batch.pop("lanes")).astype(np.int64)

        def observe(prefix: str, at: Array, frames: Array, earlier: Any) -> None:
            """Read the large observations at some rows, and the stacks of frames at others, `(B, size)`."""
            for names, where in ((plan.wide, at), (plan.stacked, frames)):
                if names:
                    keys = [prefix + name for name in names]
                    into = None if out is None else [out.get(key) for key in keys]
                    batch.update(zip(keys, rows.take(names, where, into, threads), strict=True))
            if stack is not None:
                stack.blank([batch[prefix + name] for name in plan.stacked], earlier, int(bool(prefix)))

        def next_of(
            at: Array, strides: Array, names: list[str], wanted: Array | None = None
        ) -> tuple[Array, Array, list[Array]]:
            """Return the positions after some rows; which of these are rows with their next observations; and columns
            of these, the first of which is `lanes`.

            `wanted`: which are looked for further on if they are not where they are expected.
            """
            after = at + strides
            inside = after < stop
            if not rows.is_dense:  # of what was dropped even the files may be gone
                inside &= rows.are_live(after)
            if all_true(inside):
                then, *values = rows.take(names, after)
                found: Array = then == strides
            else:  # the newest call, or rows damaged by a power cut
                then, *values = rows.take(names, np.where(inside, after, at))
                found = inside & (then == strides)
            if wanted is not None and len(out_of_turn := (wanted & ~found).nonzero()[0]):
                further = self._further(rows, at, stop, out_of_turn)
                which = out_of_turn[further >= 0]
                if len(which):
                    after[which], found[which] = further[further >= 0], True
                    _, *values = rows.take(names, np.where(found, after, at))
            return after, (found if rows.is_dense else found & rows.are_live(after)), values

        last = at = oldest = positions
        earlier: Any = None
        stored: Array | None = None
        if stack is not None:
            earlier = batch.pop(stack.column.name)
            at = stack.positions(positions, strides, earlier)
            oldest = at[:, 0]
            if not rows.is_dense:
                stored = rows.are_live(at)
                at, stored = np.where(stored, at, positions[:, None]), np.logical_and.reduce(stored, 1)
        if plan.paired:
            observe("", positions, at, earlier)
        dones = batch["dones"]
        if self.n_step > 1:
            ended, rewards = dones | batch.pop("truncated"), batch["rewards"].astype(np.float64)
            on, discounts = np.ones(len(positions), np.bool_), np.full(len(positions), self.gamma)
            for power in range(1, self.n_step):
                on &= ~ended
                after, is_row, (done, truncated, reward, *ages) = next_of(last, strides, plan.of_step, on)
                on &= is_row
                if not on.any():
                    break
                strides, last = np.where(on, after - last, strides), np.where(on, after, last)
                dones, ended = np.where(on, done, dones), done | truncated
                np.add(rewards, self.gamma**power * reward, out=rewards, where=on)
                np.multiply(discounts, self.gamma, out=discounts, where=on)
                if ages:
                    earlier = np.where(on, ages[0], earlier)
            batch["rewards"], batch["discounts"] = rewards.astype(np.float32), discounts.astype(np.float32)
        batch["dones"] = dones.astype(np.float32)
        after, on, later = next_of(last, strides, plan.of_next)
        for name, values in zip(plan.small, later, strict=True):
            batch[f"next_{name}"] = values
        if plan.paired:
            end, frames = np.where(on, after, last), at
            if stack is not None:
                frames = at if self.n_step == 1 else stack.positions(last, strides, earlier)
                if self.n_step > 1 and not rows.is_dense:
                    frames = np.where(rows.are_live(frames), frames, last[:, None])
                frames = np.concatenate([frames[:, 1:], end[:, None]], 1)
            observe("next_", end, frames, earlier)
        good: Array | None = None
        if not all_true(on):
            good, apart = on.copy(), np.flatnonzero(~on)
            known, led_to = rows.find(last, apart)
            known = apart[known]
            good[known] = True
            for name, values in led_to.items():
                into = batch[f"next_{name}"]
                (into[:, -1] if name in plan.stacked else into)[known] = values
        if stored is not None:
            good = stored if good is None else good & stored
        return _Found(batch, good, oldest, after, stop, rows.head)

    def _further(self, rows: RowsOfOne | RowsOfAdjacent, at: Array, stop: Any, which: Array) -> Array:
        """Return the positions before `stop` of the rows that go on from the rows `at[which]`; -1 for none."""
        found, left = np.full(len(which), -1, np.int64), np.arange(len(which))
        ends = np.broadcast_to(stop, at.shape)[which]
        for begin in range(1, FURTHEST + 1, _LOOKED_AT):
            ahead = np.arange(begin, min(begin + _LOOKED_AT, FURTHEST + 1))
            part = which[left]
            here = at[part][:, None] + ahead
            within = here < ends[left][:, None]
            inside = within if rows.is_dense else within & rows.are_live(here, part)
            goes_on = inside & (rows.take(["lanes"], np.where(inside, here, at[part][:, None]), which=part)[0] == ahead)
            is_here = goes_on.any(1)
            found[left[is_here]] = at[part[is_here]] + ahead[goes_on[is_here].argmax(1)]
            left = left[~is_here & within[:, -1]]
            if not len(left):
                break
        return found

    def read_adjacent(
        self, rings: AdjacentRings, places: Array, anchors: Array, cut: Cut, out: dict[str, Array] | None, threads: int
    ) -> tuple[dict[str, Array], Array, Array | None]:
        """Return transitions of this ring and others as they are now, as `ClipReader.read_adjacent` does clips."""
        room = self._room(len(anchors)) if self._plan.paired and out is None else out
        apart = rings.plans.get(0)
        if apart is None:
            apart = rings.plans[0] = [reader.next_observations for reader in rings.readers]
        rows = RowsOfAdjacent(rings, apart, places)
        found = self._sums(rows, anchors, room, threads)
        return self._put_into(found.batch, out), found.oldest, found.good

    def _room(self, size: int) -> dict[str, Array]:
        """Return arrays for both stacks of each leaf, or both large observations, in one block each: an allocator gives
        memory back once as much is free as twice the largest block, and two of half the size cost page faults in
        each batch."""
        made = {}
        for spec in self._plan.paired:
            made[spec.name], made[f"next_{spec.name}"] = pair((size, *spec.shape), spec.dtype)
        return made


def transition_reader(
    source: Handle, rng: np.random.Generator, n_step: int = 1, gamma: float = 0.99
) -> TransitionReader:
    """Return the reader of a ring of transitions that has columns."""
    manifest = source.manifest
    columns = TransitionColumns.of(manifest)
    following = NextObservations(source.disk, source.folder, manifest, columns.observed)
    return TransitionReader(source, rng, columns, following, manifest.capacity, n_step, gamma)
