"""Transitions read from rows: sums of n rewards, and the observation after the last of these steps.

    position p, lanes N:   p -> p + N -> p + 2N          n_step = 3: r + gamma r' + gamma^2 r''
                                         \\__ its next observation: row p + 3N, or a separately stored one

A sum ends where an episode ends, and where a lane breaks. The frames of a stack (stacks.py), N = 1:

    stack at p:          p - 3   p - 2   p - 1   p
    the next stack:              p - 2   p - 1   p   p + 1, or a separately stored frame

Invariants: a transition is returned with the next observation that it was added with; one that was evicted before it was
read whole is redrawn.
Not here: which transitions are drawn (buffer.py), next observations without a row (next_observations.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ringmap.buffers.steps import ROW, StepRing
from ringmap.buffers.transitions.columns import TransitionColumns
from ringmap.buffers.transitions.next_observations import NextObservations
from ringmap.clips.cut import Cut, Layout
from ringmap.clips.gather import PINNED
from ringmap.clips.threads import take
from ringmap.storage.columns.aligned import aligned, pair
from ringmap.storage.columns.rows import Rows
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import lost, read_again
from ringmap.storage.ring.extremes import all_true, highest

__all__ = ["TransitionReader"]

Array = np.ndarray[Any, np.dtype[Any]]


class _Found(NamedTuple):
    """Transitions, flat by leaf; which are whole (None: all); and what tells which end in the newest call, as of `head`.

    `oldest`: the positions of their oldest rows; `after`: those after their last ones; `stop`: where the newest call ended.
    """

    batch: dict[str, Array]
    good: Array | None
    oldest: Array
    after: Array
    stop: int
    head: int

    @property
    def newest(self) -> Array:
        """Which end in the newest call, bool `(B,)`."""
        found: Array = self.after >= self.stop
        return found


@dataclass(frozen=True)
class TransitionReader:
    """Reads transitions of `n_step` steps, discounted by `gamma`."""

    ring: StepRing
    columns: TransitionColumns
    following: NextObservations
    n_step: int
    gamma: float

    def read(
        self, positions: Array, cut: Cut = ROW, out: dict[str, Array] | None = None, asked: bool = False
    ) -> dict[str, Array]:  # fmt: skip
        """Return the transitions at these positions, flat; an evicted one is redrawn, and `positions` shows it.

        Args:
            positions: int64 `(B,)`.
            cut: always that of single rows.
            out: column -> array to fill and return, as `layout` says; missing columns are returned in new arrays.
            asked: whether `want` was called for them.

        Raises:
            LappedError: the writer overtook this reader ten times in a row without progress.
        """
        engine = self.ring.buffer.engine
        source = engine.source
        found = self._gather(source, positions, out, asked)
        bad = lost(source, found.oldest, found.good)
        if bad is not None:
            self._read_again(source, found, positions, bad)
        engine.pins.count_redraws(engine.readers[0].num_redraws)
        if out is None:
            batch = found.batch
            return {name: aligned(batch[name]) for name in self._names}
        for name, into in out.items():
            if into is not found.batch[name]:
                np.copyto(into, found.batch[name])
        return {name: out.get(name, found.batch[name]) for name in self._names}

    @cached_property
    def _of_row(self) -> list[str]:
        """Names of the columns that are read at a transition's own row, but for frames."""
        columns = self.columns
        names = ["lanes", *columns.whole, "actions", "rewards"]
        names += ["dones"] * (self.n_step == 1) + [spec.name for spec in columns.extra]
        return names if columns.stack is None else [*names, columns.stack.column.name]

    @cached_property
    def _of_next(self) -> list[str]:
        """Names of the columns that are read at the row after a transition's, but for frames."""
        return ["lanes", *self.columns.whole]

    @cached_property
    def _next_names(self) -> list[str]:
        """Names, in a batch, of the columns but the first that are read there."""
        return [f"next_{name}" for name in self.columns.whole]

    @cached_property
    def _names(self) -> list[str]:
        """Names of the columns of a batch, in order."""
        return list(self.layout(ROW, 0))

    def anchors(self, ids: Array, cut: Cut = ROW) -> Array:
        """Return the positions of the transitions with these ids, or of PINNED + position; an evicted one is redrawn.

        Raises:
            NoClipsError: none is left to draw.
        """
        engine = self.ring.engine
        if not len(ids) or int(ids.max()) < PINNED:
            engine.source  # noqa: B018 - a fork opens another reader
            ids = ids + max(0, engine.pins.of(engine.reader, cut).count - self.ring.capacity)
        positions = engine.anchors(ids, cut)
        old = positions < self.ring.oldest
        if old.any():  # rows are stored for longer than they count
            positions[old] = self._drawn(int(old.sum()))
        return positions

    def layout(self, cut: Cut, size: int) -> Layout:
        """Return the shape and dtype of each column of a batch."""
        return self.columns.layout(size, self.n_step == 1)

    def want(self, positions: Array, cut: Cut = ROW) -> None:
        """Ask the disk for transitions that are to be read soon, if that pays off."""
        source = self.ring.engine.source
        rows = source.rows
        if rows is not None and rows.large and self.ring.engine.reader.watch.is_cold:
            slots = positions % rows.ring.rows
            lanes, earlier = self._heads(rows, slots)
            if self.columns.stack is not None:
                at = self.columns.stack.positions(positions, lanes, earlier)
                slots = np.concatenate([at, (positions + lanes)[:, None]], 1) % rows.ring.rows
            for name in self.columns.observed:
                if rows.by_name[name].is_large:
                    rows.by_name[name].want(slots)

    def _heads(self, rows: Rows, slots: Array) -> tuple[Array, Array]:
        """Return the number of lanes of rows, and how many earlier frames they have."""
        lanes = np.abs(rows.by_name["lanes"].take(slots)).astype(np.int64)
        if self.columns.stack is None:
            return lanes, np.zeros(len(slots), np.uint8)
        return lanes, rows.by_name[self.columns.stack.column.name].take(slots)

    def _drawn(self, count: int) -> Array:
        """Return the positions of transitions drawn in place of others."""
        engine = self.ring.engine
        engine.reader.num_redraws += count
        return self.ring.draw(count, engine.rng)

    def _read_again(self, source: Handle, found: _Found, positions: Array, bad: Array) -> None:
        newest, head = found.newest, found.head

        def gather(which: Array) -> Array | None:
            nonlocal head
            again = self._gather(source, positions[which])
            for name, values in again.batch.items():
                found.batch[name][which] = values
            newest[which], head = again.newest, again.head
            bad = lost(source, again.oldest, again.good)
            return None if bad is None else ~bad

        def redraw(which: Array) -> Array:
            at = positions[which]
            # A step of the newest call, read while another call came, has a following row now.
            stays = newest[which] & (at >= source.tail) & (source.head != head)
            gone = np.flatnonzero(~stays)
            at[gone] = self._drawn(len(gone))
            return at

        advice = "raise capacity, or ask for smaller batches"
        read_again(source, positions, bad, gather, redraw, source.folder, advice)

    def led_to(self, head: int) -> dict[str, Array] | None:
        """Return the next observations of the call that ended at `head`, by leaf, from what was stored since; None if evicted."""
        source = self.ring.engine.source
        source.refresh()
        rows = source.rows
        assert rows is not None
        last = np.array([head - 1])
        count = abs(int(rows.take("lanes", last)[0]))
        if not 0 < count <= self.ring.capacity or head - count < source.newest_tail():
            return None
        positions = np.arange(head - count, head)
        found = replace(self, n_step=1)._gather(source, positions)
        if lost(source, found.oldest, found.good) is not None:
            return None
        led_to = {name: found.batch[f"next_{name}"] for name in self.columns.observed}
        return {n: v[:, -1] if n in self.columns.stacked else v for n, v in led_to.items()}

    def next_stacks(
        self, source: Handle, frames: Mapping[str, Array]
    ) -> tuple[dict[str, Array], Array] | None:
        """Return the stacks that the newest call led to, and its column `earlier`; None if a frame is not stored any more.

        Args:
            source: of the owner, with no other thread adding.
            frames: what the call led to, by leaf.
        """
        stack, rows, head = self.columns.stack, source.rows, source.head
        assert stack is not None
        assert rows is not None
        count = len(next(iter(frames.values())))
        positions = np.arange(head - count, head)
        lanes, earlier = self._heads(rows, positions % rows.ring.rows)
        at = stack.positions(positions, lanes, earlier)[:, 1:]
        if at.size and (at.min() < source.tail or not _are_live(source, at.reshape(-1)).all()):
            return None
        found = dict(frames)
        for name in self.columns.stacked:
            older = rows.by_name[name].take(at % rows.ring.rows)
            found[name] = np.concatenate([older, frames[name][:, None]], 1)
        stack.blank([found[name] for name in self.columns.stacked], earlier, 1)
        return found, earlier

    def _gather(
        self, source: Handle, positions: Array, out: dict[str, Array] | None = None, asked: bool = False
    ) -> _Found:  # fmt: skip
        rows, columns = source.rows, self.columns
        stack, is_single = columns.stack, self.n_step == 1
        assert rows is not None
        watch = self.ring.buffer.engine.readers[0].watch
        if rows.large:
            if not asked:
                self.want(positions)
            watch.begin()
        with source.memory:
            head, live = source.head, source.live
            # Without an episode another thread cleared the buffer meanwhile.
            stop: int = live.stop if live.first < live.last else head
            dense = live.is_dense
        names = self._of_row
        batch = dict(zip(names, rows.take_all(names, positions, head), strict=True))
        lanes = np.abs(batch.pop("lanes")).astype(np.int64)
        at = oldest = positions
        if stack is not None:
            earlier = batch.pop(stack.column.name)
            at = stack.positions(positions, lanes, earlier)
            oldest = at[:, 0]
            out = self._room(len(positions)) if out is None else out
            stacks = self._frames(rows, at, out, "", head)
            stack.blank(list(stacks.values()), earlier)
            batch |= stacks

        def of(name: str, at: Array) -> Array:
            return rows.take_all([name], at, head)[0]

        def next_of(at: Array, names: list[str]) -> tuple[Array, Array, list[Array]]:
            """Return the positions after some rows; which of these are rows with their next observations; and columns of these."""
            after = at + lanes
            if len(after) and highest(after) < stop:
                then, *values = rows.take_all(names, after, head)
                found: Array = then == lanes
            else:  # the newest call, or rows damaged by a power cut
                inside = after < stop
                where = np.where(inside, after, at)
                then, *values = rows.take_all(names, where, head)
                found = inside & (then == lanes)
            return after, (found if dense else found & _are_live(source, after)), values

        last = positions
        if is_single:
            batch["dones"] = batch["dones"].astype(np.float32)
        else:
            rewards = batch["rewards"].astype(np.float64)
            discounts = np.full(len(positions), self.gamma)
            for power in range(1, self.n_step):
                ended = (
                    of("dones", last)
                    | of("truncated", last)
                    | (last < positions + (power - 1) * lanes)
                )
                on = ~ended & next_of(last, ["lanes"])[1]
                if not on.any():
                    break
                last = np.where(on, last + lanes, last)
                rewards[on] += self.gamma**power * of("rewards", last[on])
                discounts[on] *= self.gamma
            batch["rewards"] = rewards.astype(np.float32)
            batch["dones"] = of("dones", last).astype(np.float32)
            batch["discounts"] = discounts.astype(np.float32)
        after, on, following = next_of(last, self._of_next)
        batch.update(zip(self._next_names, following, strict=True))
        if stack is not None:
            here = at
            if not is_single:
                earlier = of(stack.column.name, last)
                here = stack.positions(last, lanes, earlier)
            then = np.where(on, after, last)[:, None]
            stacks = self._frames(rows, np.concatenate([here[:, 1:], then], 1), out, "next_", head)
            stack.blank(list(stacks.values()), earlier, 1)
            batch |= stacks
        if rows.large:
            watch.end()
        good: Array | None = None
        if not all_true(on):
            good, apart = on.copy(), np.flatnonzero(~on)
            known, led_to = self.following.find(source, last[apart], head)
            good[apart[known]] = True
            for name, values in led_to.items():
                into = batch[f"next_{name}"]
                if name in columns.stacked:
                    into = into[:, -1]
                into[apart[known]] = values
        if stack is not None and not dense:
            stored = np.logical_and.reduce(_are_live(source, at.reshape(-1)).reshape(at.shape), 1)
            good = stored if good is None else good & stored
        return _Found(batch, good, oldest, after, stop, head)

    def _room(self, size: int) -> dict[str, Array]:
        """Return arrays for both stacks of each leaf, in one block.

        An allocator gives memory back to the system once as much is free as twice the largest block; then each batch costs page faults,
        which take longer than the copy. One block is below that, two of half the size are not.
        """
        made = {}
        for spec in self.columns.trees[0].columns:
            made[spec.name], made[f"next_{spec.name}"] = pair((size, *spec.shape), spec.dtype)
        return made

    def _frames(
        self, rows: Rows, at: Array, out: dict[str, Array] | None, prefix: str, head: int
    ) -> dict[str, Array]:  # fmt: skip
        """Return the stacks of frames at these positions `(B, size)`, by leaf, in `out` where it has them."""
        slots, threads = at % rows.ring.rows, self.ring.engine.num_threads
        found = {}
        for name in self.columns.stacked:
            into = None if out is None else out.get(prefix + name)
            found[prefix + name] = take(rows.by_name[name], slots, into, threads, head)
        return found


def _are_live(source: Handle, positions: Array) -> Array:
    """Tell which positions are stored: repairs and power cuts leave gaps."""
    with source.memory:
        starts, lengths = source.live.starts, source.live.lengths
        if not len(starts):
            return np.zeros(len(positions), np.bool_)
        index = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
        live: Array = (positions >= starts[index]) & (positions < starts[index] + lengths[index])
        return live
