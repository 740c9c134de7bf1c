"""Reads batches of clips from many rings: what `ClipReader` does of one, with ids that name the ring, too.

    draw     one draw and one search for all clips, however many rings there are (clip_table.py)
    at       one copy for each column, or one for each ring where columns are compressed, items padded or episodes in
             parts; bad clips are redrawn, from the others if their ring is gone

Invariants: those of `ClipReader`; a ring is looked at, read and redrawn by its own protocol; no ring waits for another;
no callable of a user runs while the lock of the rings is held, but what computes columns of a batch.
Not here: which rings there are (rings.py), what ids mean (buffers/rings.py), copies (clips/rings.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ringmap.buffers.rings import Ring, Rings, apart, joined
from ringmap.buffers.sharded.clip_table import ClipTable, Moment
from ringmap.clips.cut import Cut, Layout
from ringmap.clips.draws import Crossing, Drawn
from ringmap.clips.gather import GONE, MOST_CHOICES, ClipReader, Redraw
from ringmap.clips.items import EpisodeMoment, call_functions, put_added
from ringmap.clips.rings import RING_FAULTS, AdjacentRings, Piece, gather_many, groups
from ringmap.errors import NoClipsError
from ringmap.storage.columns.copying import Readahead
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.process import Forkable
from ringmap.storage.disk.system import System
from ringmap.storage.read.handle import Pulse
from ringmap.storage.read.read_live import retry
from ringmap.storage.ring.arrays import highest, lowest

__all__ = ["ManyReader", "Weights"]

Array = np.ndarray[Any, np.dtype[Any]]
Weights = str | Mapping[str, float]

_ADVICE = "raise max_steps of the rings, or ask for smaller batches"


class ManyReader(Forkable):
    """Reads clips of many rings.

    Args:
        rings: those that are open, which this reader follows.
        rng: as for `ClipReader`.
        weights: how often each ring is drawn from: "clips", "equal", or name -> weight.
    """

    def __init__(self, rings: Rings, rng: np.random.Generator, weights: Weights = "clips") -> None:
        self.rings, self.weights = rings, weights
        self.begin(rng)

    def begin(self, rng: np.random.Generator) -> None:
        """Begin with nothing known: also in a forked child."""
        self.rng = rng
        self.watch, self.pulse = Readahead(System()), Pulse()
        self.num_redraws = 0
        """Clips redrawn so far that no reader of an open ring counts."""
        self._tables: dict[tuple[Any, ...], ClipTable] = {}
        self._adjacent: tuple[tuple[Ring, ...] | None, AdjacentRings | None] = None, None
        self._cuts: dict[tuple[int, int], tuple[Cut, Cut, Ring]] = {}

    def adopt(self, gone: Sequence[Ring] = ()) -> None:
        """Read from the rings that are open now. `gone`: those that left."""
        self.num_redraws += sum(ring.reader.num_redraws for ring in gone)
        for ring in self.rings.open:
            ring.reader.rng = self.rng
            ring.reader.watch, ring.source.pulse = self.watch, self.pulse
        self._adjacent = None, None  # the maps of those that left end here

    def follow(self, scan: bool = False) -> bool:
        """Catch up with every ring, holding no positions; tell whether anything changed. `scan`: whether to look for
        new ones now."""
        changed = self.rings.follow(scan)
        self.pulse.begin()
        return changed

    # -- which clips --------------------------------------------------------------------------

    def table(self, cut: Cut) -> ClipTable:
        """Return the clips of a cut on all rings; those without commits since are not counted again. Holds the lock."""
        table, rings = self._tables.get(cut.anchors), self.rings
        if table is None or table.rings is not rings.open:
            if len(self._tables) > 32:
                self._tables.clear()
            table = ClipTable(rings.open, lambda ring: ring.reader.window(cut))
            self._tables[cut.anchors] = table
        table.follow(rings)
        return table

    def pin(self, cut: Cut) -> Moment:
        """Return the clips that exist, as of the last look."""
        self.rings.report()
        with self.rings.lock:
            return self.table(cut).moment()

    def pin_as(self, heads: Sequence[tuple[int, int]], cut: Cut) -> Moment:
        """Return the clips of the moment of another process, given head and number of clips of each ring."""
        numbers = [number for number, (_, count) in enumerate(heads) if count]
        if any(self.rings.of(number) is None for number in numbers):
            self.follow(scan=True)
        made = Moment(numbers, [], np.cumsum([heads[number][1] for number in numbers], dtype=np.int64), [])
        for number in numbers:
            pinned, clips, ring = None, None, self.rings.of(number)
            if ring is not None:
                try:
                    pinned, clips = ring.reader.pin_as([heads[number]], cut), ring.reader.window(cut)
                except RING_FAULTS as error:
                    self.rings.drop(ring, error)
            made.pinned.append(pinned)
            made.ranges.append(clips)
        return made

    def place(self, ids: Array, moment: Moment, cut: Cut, table: ClipTable | None = None) -> Array:
        """Return the names of clips by their ids in a moment; GONE for one that was evicted. `table`: what the moment
        is of; None: all clips of the cut."""
        names, are_there = None, len(ids) == 0 or (lowest(ids) >= 0 and highest(ids) < moment.count)
        with self.rings.lock:
            of = self.table(cut) if table is None else table
            if are_there and of.moment() is moment:
                names = of.names(ids)
        places = moment.ends.searchsorted(ids, side="right")
        if names is None:  # commits came since, or there are no such ids
            names = np.full(len(ids), GONE)
            for place, which in groups(places):
                if place < len(moment.numbers):
                    first = int(moment.ends[place - 1]) if place else 0
                    names[which] = moment.names_on(place, ids[which] - first)
        if len(names) and lowest(names) == GONE:
            for place, which in groups(places[names == GONE]):
                self._count(moment.numbers[place] if place < len(moment.numbers) else -1, len(which))
        return names

    def _count(self, number: int, lost: int) -> None:
        """Count clips of a ring that are redrawn."""
        ring = self.rings.of(number) if number >= 0 else None
        if ring is None:
            self.num_redraws += lost
        else:
            ring.reader.num_redraws += lost

    def draw(self, size: int, cut: Cut, rng: np.random.Generator) -> Drawn | None:
        """Return `size` clips drawn from all rings, in random order; None when there are none."""
        with self.rings.lock:
            table = self.table(cut)
            names = table.draw(size, self._shares(table.rings), rng)
        return None if names is None else Drawn(names)

    def _shares(self, rings: tuple[Ring, ...]) -> Array | None:
        """Return the share of each ring in a draw, not scaled; None: as many as it has clips."""
        weights = self.weights
        if weights == "clips":
            return None
        if isinstance(weights, Mapping):
            return np.array([float(weights.get(ring.name, 0.0)) for ring in rings])
        return np.ones(len(rings))

    def anchors_at(self, positions: Array, cut: Cut) -> Array:
        """Return the names; GONE for one that is no anchor of the cut now, or whose ring is gone."""
        found, (numbers, local) = np.full(len(positions), GONE), apart(positions)
        if len(numbers) and highest(numbers) >= len(self.rings.uuids):  # a ring that only who named them has opened
            self.follow(scan=True)
        for number, places in groups(numbers):
            ring = self.rings.of(number)
            if ring is None:
                self.num_redraws += len(places)
                continue
            try:
                wanted = local[places]
                if ring.source.rows is None or wanted.max() + cut.after >= ring.source.head:
                    ring.source.refresh()
                at = ring.reader.anchors_at(wanted, cut)
            except RING_FAULTS as error:
                self.rings.drop(ring, error)
                self.num_redraws += len(places)
                continue
            gone = at == GONE
            ring.reader.num_redraws += int(gone.sum())
            found[places] = np.where(gone, GONE, joined(number, at))
        return found

    def replaced(self, positions: Array, cut: Cut, redraw: Redraw | None = None) -> Array:
        """Return the names with clips of any ring in place of those that are GONE, which were counted where they were
        found; see `ClipReader.replaced`.
        """
        if not len(positions) or lowest(positions) != GONE:
            return positions
        gone, positions = positions == GONE, positions.copy()
        count = int(gone.sum())
        positions[gone] = self._redraw(count, cut) if redraw is None else redraw(count)
        return positions

    def _redraw(self, count: int, cut: Cut) -> Array:
        drawn = self.draw(count, cut, self.rng)
        if drawn is None:
            raise NoClipsError(f"{self.rings.where}: {self.why_no_clips(cut)}")
        return drawn.positions

    def why_no_clips(self, cut: Cut) -> str:
        """Return, in words, why no clip of this cut exists."""
        rings, weights = self.rings.open, self.weights
        held = "episodes" if self.rings.columns is None else "transitions"
        if isinstance(weights, Mapping) and not any(
            weights.get(ring.name) and ring.source.live.num_steps for ring in rings
        ):
            names = [ring.name for ring in rings]
            return f"weights={dict(weights)!r} give no weight to a ring with {held}; there are {names}"
        if not rings:
            return f"no ring {self.rings.where} can be read{self.rings.why}; start a collector"
        if held == "transitions":
            return (
                f"0 transitions are stored {self.rings.where}; add some first (readers see them with the "
                "commit: flush())"
            )
        return cut.why_none(np.concatenate([ring.lengths for ring in rings]))

    # -- reads --------------------------------------------------------------------------------

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
        """Return the clips with these names, as `ClipReader.at` does; `positions` shows which were redrawn."""
        while True:
            batch = self._read(positions, cut, out, threads, asked, redraw, numbers)
            if numbers is None or not numbers.is_outdated:
                break
            numbers.begin()  # all numbers of a batch are of one moment
        return batch

    def _read(
        self,
        positions: Array,
        cut: Cut,
        out: dict[str, Array] | None,
        threads: int,
        asked: bool,
        redraw: Redraw | None,
        numbers: EpisodeMoment | None,
    ) -> dict[str, Array]:
        size = len(positions)
        batch: dict[str, Array] = {} if out is None else dict(out)
        if size:
            found = self._read_adjacent(positions, cut, batch, out is not None, threads, asked)
        else:
            found, batch = positions, batch or self._read_none(positions, cut)
        which, left = (np.arange(size), size) if found is None else (found, len(found))
        read_twice, choices = np.full(size, GONE), 0
        draw = redraw or partial(self._redraw, cut=cut)

        def newer(count: int) -> Array:
            """Draw for each clip the newest of so many, as an overtaken reader of one ring does."""
            nonlocal choices
            choices = min(2 * choices or 1, MOST_CHOICES)
            return self._newest(draw(count * choices).reshape(choices, count))

        def attempt() -> int:
            nonlocal which
            bad = self._gather(positions, which, cut, size, batch, threads, numbers)
            which = np.concatenate(bad) if bad else which[:0]
            return len(which)

        def redraw_bad() -> None:
            self.follow()
            now = positions[which]
            # A transition after which rows are missing is an anchor, and is never whole.
            again = now == read_twice[which]
            self.num_redraws += int(again.sum())
            wanted = np.where(again, GONE, self.anchors_at(now, cut))
            positions[which] = read_twice[which] = self.replaced(wanted, cut, newer)

        if found is None:
            left = attempt()
        if left:
            redraw_bad()
            retry(attempt, redraw_bad, self.rings.where, _ADVICE)
        if cut.functions:
            call_functions(batch, cut, size)
        if cut.added and batch:
            put_added(batch, cut, out)
        if out is not None and self.rings.columns is not None:
            batch = {name: batch[name] for name in self.layout(cut, None, size)}
        return batch

    def _newest(self, names: Array) -> Array:
        """Return of each column of names `(n, B)` that nearest to the head of its ring, by the steps that it holds."""
        numbers, local = apart(names)
        ages = np.ones(names.shape)  # of a ring that is gone
        for ring in self.rings.open:
            mine, source = numbers == ring.number, ring.source
            held = max(1, source.head - source.tail)
            ages[mine] = (source.head - local[mine]) / held
        found: Array = np.take_along_axis(names, ages.argmin(axis=0)[None], 0)[0]
        return found

    def _read_none(self, positions: Array, cut: Cut) -> dict[str, Array]:
        """Return a batch without clips, as any ring with columns returns it; {} if there is none."""
        for ring in self.rings.open:
            if ring.source.rows is not None:
                with contextlib.suppress(*RING_FAULTS):
                    return ring.reader.at(positions, self._cut_in(ring, cut))
        return {}

    def _read_adjacent(
        self, positions: Array, cut: Cut, batch: dict[str, Array], is_given: bool, threads: int, asked: bool
    ) -> Array | None:
        """Read the clips from all rings at once; return the places of those that are still to be read."""
        rings = None if cut.needs_bounds else self._side_by_side()
        if rings is None or cut.held(rings.rows.texts):
            return None
        numbers, local = apart(positions)
        places = rings.places(numbers)
        if places is None:
            return None
        is_large = bool(rings.rows.large)
        if is_large:
            if not asked:
                self.want(positions, cut)
            self.watch.begin()
        reader: ClipReader = rings.readers[0]
        out = batch if is_given else None
        found, oldest, good = reader.read_adjacent(rings, places, local, cut, out, threads)
        if is_large:
            self.watch.end()
        for name, values in found.items():
            batch.setdefault(name, values)  # the caller's own are filled
        bad = rings.lost(places, oldest, good)
        return np.empty(0, np.int64) if bad is None else bad.nonzero()[0]

    def _side_by_side(self) -> AdjacentRings | None:
        """Return the open rings side by side; None if they can't be read at once."""
        rings = self.rings.open
        known, made = self._adjacent
        if known is not rings or made is None or not made.is_current:
            try:
                made = AdjacentRings.of({ring.number: ring.reader for ring in rings}, self.pulse)
            except RING_FAULTS:  # reading that ring alone says what is wrong
                return None
            self._adjacent = rings, made
        return made if made.is_readable else None

    def _gather(
        self,
        positions: Array,
        which: Array,
        cut: Cut,
        size: int,
        batch: dict[str, Array],
        threads: int,
        numbers: EpisodeMoment | None,
    ) -> list[Array]:
        homes, local = apart(positions.take(which))
        pieces, bad = list[Piece](), list[Array]()
        for number, places in groups(homes):
            ring = self.rings.of(number)
            if ring is None:
                bad.append(which[places])
                continue
            own = self._cut_in(ring, cut)
            of_ring = None if numbers is None else numbers.of(ring.source)
            pieces.append(Piece(number, ring.reader, which[places], local[places], own, of_ring))

        def fail(piece: Piece, error: Exception) -> None:
            for ring in self.rings.open:
                if ring.reader is piece.reader:
                    self.rings.drop(ring, error)

        return bad + gather_many(pieces, size, batch, threads, fail)

    def _cut_in(self, ring: Ring, cut: Cut) -> Cut:
        """Return the cut as one ring computes it: episodes have numbers over all rings, functions the whole batch."""
        if not (cut.needs_bounds or cut.functions or ring.source.live.links is not None):
            return cut
        found = self._cuts.get((id(cut), ring.number))
        if found is None or found[2] is not ring:
            if len(self._cuts) > 32 * max(1, len(self.rings.open)):
                self._cuts.clear()
            ids, given = partial(joined, ring.number), cut.episode_numbers
            of_view = None if given is None else lambda starts: given(ids(starts))
            own = replace(cut, functions=(), episode_numbers=of_view, step_ids=ids, ring=ring.number)
            found = self._cuts[id(cut), ring.number] = cut, own, ring
        return found[1]

    def layout(self, cut: Cut, schema: Schema | None, size: int) -> Layout:
        """Return the shape and dtype of the columns of a batch; of computed ones, once they were computed here."""
        columns = self.rings.columns
        if columns is not None:
            made: Layout = columns.layout(size, self.rings.n_step == 1)
            return made
        return {} if schema is None else cut.layout(schema, size)

    def want(self, positions: Array, cut: Cut) -> None:
        """Ask the disk for clips that are to be read soon, if that pays off."""
        if not any(ring.source.rows and ring.source.rows.large for ring in self.rings.open):
            return
        numbers, local = apart(positions)
        for number, places in groups(numbers):
            ring = self.rings.of(number)
            if ring is not None:
                ring.reader.want(local[places], cut)
