"""Gathers batches of clips: numbers to positions to rows, each copied once.

    numbers -> ClipIndex -> anchors (B,) -> slots (B, H) -> one take per column
                                ^                                 |
                                +---- redraw those evicted <---- look again

A clip is named by its anchor: a position, from which the offsets of its columns count (cut.py).

Invariants: a clip is returned only if a look after the copy shows that its rows were live
during the copy; a clip that was evicted meanwhile is redrawn uniformly, and counted.
Not here: which clips are requested (samplers), which steps they hold (cut.py), what is done with a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.clips.cut import Cut, Taken, slots_of
from ringmap.clips.index import ClipIndex
from ringmap.clips.items import Items
from ringmap.clips.threads import SPLIT_NBYTES, take
from ringmap.errors import NoClipsError
from ringmap.storage.columns.readahead import Readahead
from ringmap.storage.columns.rows import Rows
from ringmap.storage.disk.forks import Forkable
from ringmap.storage.read.read_live import lost, read_again
from ringmap.storage.read.source import Source
from ringmap.storage.ring.integers import ClipNumber, Position

__all__ = ["PINNED", "ClipReader", "Pinned"]

Array = np.ndarray[Any, np.dtype[Any]]

PINNED = 1 << 62
"""An id of PINNED + p means the clip whose anchor is position p of the ring, in every process and at any time."""


class Pinned:
    """Clip numbers `[base, end)` of one span, as of one moment of one era.

    They are the clips of the newest episodes that start before position `head`, in any era.
    """

    __slots__ = ("base", "end", "era", "head")

    def __init__(self, base: ClipNumber, end: ClipNumber, era: int, head: Position) -> None:
        self.base, self.end, self.era, self.head = base, end, era, head

    @property
    def count(self) -> int:
        """Number of clips."""
        return self.end - self.base


class ClipReader(Forkable):
    """Reads clips of a source, also while a writer in any thread or process fills it.

    Args:
        source: the open buffer.
        rng: redraws clips that were evicted before they could be read.
    """

    def __init__(self, source: Source, rng: np.random.Generator) -> None:
        self.source = source
        self.rng = rng
        self.index = ClipIndex(source.live)
        self.num_redraws = 0
        self.watch = Readahead(source.disk.system)

    def pin(self, cut: Cut) -> Pinned:
        """Return the clips that exist now. O(1) when nothing changed."""
        with self.source.memory:
            index = self.index.of(cut.span, cut.least)
            return Pinned(index.base, index.end, self.source.live.era, self.source.head)

    def batch(
        self, numbers: Array, pinned: Pinned, cut: Cut,
        out: dict[str, Array] | None = None, threads: int = 1,
    ) -> dict[str, Array]:  # fmt: skip
        """Return the clips with these numbers, column -> `(B, ...)` as the cut has it.

        Args:
            numbers: int64 `(B,)`, clip numbers of the pinned moment; one that was evicted, or
                never existed, is redrawn.
            pinned: that moment.
            cut: what they hold.
            out: column -> array to fill and return, of exactly that shape and dtype, C-contiguous.
            threads: maximum number of threads for the copy.

        Raises:
            NoClipsError: no clip is left to draw.
            LappedError: the writer overtook this reader ten times in a row without progress.
        """
        return self.at(self.place(numbers, pinned, cut), cut, out, threads)

    def at(
        self, positions: Array, cut: Cut, out: dict[str, Array] | None = None, threads: int = 1,
        asked: bool = False,
    ) -> dict[str, Array]:  # fmt: skip
        """Return the clips with these anchors, as `batch` does; `positions` is updated with the redrawn ones.

        `asked`: whether `want` was already called for them.
        """
        source = self.source
        if source.rows is None:  # nothing was ever stored
            if len(positions):
                self._redraw(len(positions), cut)
            return {}
        if len(positions) and np.minimum.reduce(positions) < 0:
            gone = positions < 0  # not to be read: a chunk that was never written is an error
            positions[gone] = self._redraw(int(gone.sum()), cut)
        batch, good = self._gather(positions, cut, out, threads, asked)
        bad = lost(source, positions, good)
        if bad is not None:
            self._read_again(batch, positions, bad, cut)
        return batch

    def _read_again(
        self, batch: dict[str, Array], positions: Array, bad: Array, cut: Cut
    ) -> None:  # fmt: skip
        """Redraw the bad clips of a batch, and read them."""

        def gather(which: Array) -> Array | None:
            found, good = self._gather(positions[which], cut)
            for name, values in found.items():
                if name in batch:
                    batch[name][which] = values
                else:  # it could not be computed from rows that were being overwritten: `which` is the whole batch
                    batch[name] = values
            return good

        def redraw(which: Array) -> Array:
            places = self.starting(positions[which], cut)
            gone = places < 0
            if gone.any():
                places[gone] = self._redraw(int(gone.sum()), cut)
            return places

        advice = "raise max_steps, or ask for smaller batches"
        read_again(self.source, positions, bad, gather, redraw, self.source.folder, advice)

    def draw(self, count: int, cut: Cut, rng: np.random.Generator) -> Array | None:
        """Return the anchors of `count` clips drawn uniformly, or None when there are none."""
        with self.source.memory:
            index = self.index.of(cut.span, cut.least)
            base, end = index.base, index.end
            if end <= base:
                return None
            positions = index.positions(rng.integers(base, end, count))
        return positions + cut.before if cut.before else positions

    def starting(self, positions: Array, cut: Cut) -> Array:
        """Return the positions, with -1 for one that is no anchor now: it is redrawn. O(B log episodes)."""
        starts, lengths, inside = self.bounds_of(positions)
        steps = positions - starts
        good = inside & (steps >= cut.before) & (steps + cut.after < lengths)
        if cut.least:
            good &= lengths >= cut.least
        return np.where(good, positions, -1)

    def bounds_of(self, positions: Array) -> tuple[Array, Array, Array]:
        """Return start and length of the episode of each position, and whether it lies in one; where not, 1 step at the position."""
        with self.source.memory:
            live = self.source.live
            if not len(live):
                return positions, np.ones(len(positions), np.int64), np.zeros(len(positions), bool)
            episodes = np.maximum(live.starts.searchsorted(positions, side="right") - 1, 0)
            starts, lengths = live.starts.take(episodes), live.lengths.take(episodes)
        steps = positions - starts
        inside = (steps >= 0) & (steps < lengths)
        if inside.all():
            return starts, lengths, inside
        return np.where(inside, starts, positions), np.where(inside, lengths, 1), inside

    def pin_before(self, head: Position, count: int, cut: Cut) -> Pinned:
        """Return the `count` clips of the episodes that start before position `head`: the moment of another process."""
        with self.source.memory:
            end = self.index.of(cut.span, cut.least).end_before(head)
            return Pinned(ClipNumber(end - count), end, self.source.live.era, head)

    def place(self, numbers: Array, pinned: Pinned, cut: Cut) -> Array:
        """Return the anchors of the clips with these numbers; an evicted one is redrawn."""
        source = self.source
        with source.memory:
            index = self.index.of(cut.span, cut.least)
            # After a recovery, or with another writer: other numbers, the same positions.
            if source.live.era != pinned.era:
                numbers = numbers + (index.end_before(pinned.head) - pinned.end)
            gone = (numbers < index.base) | (numbers >= index.end)
            if not gone.any():
                positions = index.positions(numbers)
                return positions + cut.before if cut.before else positions
            kept = numbers[~gone]
            positions = np.empty(len(numbers), np.int64)
            if len(kept):
                positions[~gone] = index.positions(kept) + cut.before
        source.refresh()  # they are drawn from the newest state
        positions[gone] = self._redraw(int(gone.sum()), cut)
        return positions

    def _redraw(self, count: int, cut: Cut) -> Array:
        """Return the anchors of `count` clips drawn uniformly from the newest state."""
        positions = self.draw(count, cut, self.rng)
        if positions is None:
            with self.source.memory:
                lengths = self.source.live.lengths
                why = (
                    f"no clips of {cut.span} steps are left: all were evicted or cleared; collect more first"
                    if not len(lengths)
                    else cut.why_none(lengths)
                )
            raise NoClipsError(f"{self.source.folder}: {why}")
        self.num_redraws += count
        return positions

    def _gather(
        self, anchors: Array, cut: Cut, out: dict[str, Array] | None = None, threads: int = 1,
        asked: bool = False,
    ) -> tuple[dict[str, Array], Array | None]:  # fmt: skip
        """Return the clips with these anchors as they are now, and which of them lie in an episode, None if all do."""
        rows, head = self.source.rows, self.source.head  # before any row is read
        assert rows is not None
        if threads > 1 and len(anchors) * cut.widest * rows.row_nbytes < SPLIT_NBYTES:
            threads = 1
        slots = _Slots(self, anchors, rows.ring.rows, cut)
        if rows.large:
            if not asked:
                self._want(rows, slots, cut)
            self.watch.begin()
        batch: dict[str, Array] = {}
        for name, column in rows.by_name.items():
            taken = cut.of(name)
            if taken is None:
                continue
            into = None if out is None else out.get(name)
            where, is_pad = slots.of(taken)
            if taken.fold and into is not None:
                into = into.reshape(*where.shape, *column.spec.shape)
            values = (
                take(column, where, into, threads, head)
                if threads > 1
                else column.take(where, into, head)
            )
            if taken.fold:
                values = values.reshape(taken.shape(len(anchors), column.spec))
            batch[name] = values
            if is_pad is not None:
                _pad(batch, values, taken, is_pad, out)
        if rows.large:
            self.watch.end()
        if cut.computed:
            return self._compute(batch, anchors, slots, cut)
        return batch, slots.inside

    def _compute(
        self, batch: dict[str, Array], anchors: Array, slots: _Slots, cut: Cut
    ) -> tuple[dict[str, Array], Array | None]:
        """Add the computed columns that read rows."""
        starts, lengths = slots.bounds
        items = Items(self.source, cut, anchors, starts, lengths, batch, self.rng)
        try:
            for name, column in cut.computed:
                items.name = name
                found = column.compute(items)
                batch.update(found if isinstance(found, dict) else {name: found})
        except Exception:
            # Rows that are being overwritten may hold anything: only an error over whole ones is the caller's.
            if lost(self.source, anchors, slots.inside) is None:
                raise
            return batch, np.zeros(len(anchors), np.bool_)
        return batch, slots.inside

    def want(self, anchors: Array, cut: Cut) -> None:
        """Ask the disk for clips that are to be read soon, if that pays off."""
        rows = self.source.rows
        if rows is not None and rows.large:
            self._want(rows, _Slots(self, anchors, rows.ring.rows, cut), cut)

    def _want(self, rows: Rows, slots: _Slots, cut: Cut) -> None:
        """Ask for all columns before any of them is touched."""
        if self.watch.is_cold:
            for name in rows.large:
                taken = cut.of(name)
                if taken is not None:
                    rows.by_name[name].want(slots.of(taken)[0])


class _Slots:
    """The slots of a batch, computed once for all columns that hold the same steps."""

    __slots__ = ("_anchors", "_known", "_rows", "bounds", "inside")

    def __init__(self, reader: ClipReader, anchors: Array, rows: int, cut: Cut) -> None:
        self._anchors, self._rows = anchors, rows
        self._known: dict[int, tuple[Array, Array | None]] = {}
        self.bounds: tuple[Array, Array] = anchors, anchors
        self.inside: Array | None = None
        if cut.needs_bounds:
            starts, lengths, inside = reader.bounds_of(anchors)
            self.bounds = starts, lengths
            self.inside = None if inside.all() else inside

    def of(self, taken: Taken) -> tuple[Array, Array | None]:
        """Return the slots of a column, `(B, n)` or `(B,)`, and which of them are padding, None if none can be."""
        steps = taken.steps
        found = self._known.get(id(steps))
        if found is None:
            if steps.padded:
                starts, lengths = self.bounds
                places, is_pad = steps.places(self._anchors, starts, lengths)
                found = slots_of(places, starts, self._rows), is_pad
            else:
                found = steps.slots(self._anchors, self._rows), None
            self._known[id(steps)] = found
        return (found[0][:, 0], found[1]) if taken.is_alone else found


def _pad(
    batch: dict[str, Array],
    values: Array,
    taken: Taken,
    is_pad: Array,
    out: dict[str, Array] | None,
) -> None:
    """Fill the padded rows of a column, and add its mask."""
    if taken.fill is not None:
        values[is_pad] = taken.fill
    if taken.mask is not None:
        into = None if out is None else out.get(taken.mask)
        if into is None:
            batch[taken.mask] = is_pad.copy()  # columns with the same steps share it
        else:
            np.copyto(into, is_pad)
            batch[taken.mask] = into
