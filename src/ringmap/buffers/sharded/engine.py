"""The engine over many rings: what `Engine` does for one, with ids that name the ring, too.

    look     every ring, without a system call (members.py)
    draw     one draw and one search for all clips, however many rings there are (clip_table.py)
    read     one copy for each column, or one for each ring where columns are compressed, items padded or episodes in
             parts; bad clips are redrawn, from the others if their ring is gone

Invariants: those of `Engine`; a ring is looked at, read and redrawn by its own protocol; no ring waits for another.
Not here: which rings there are (rings.py), ring numbers (numbers.py), ids (moments.py), copies (clips/rings.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ringmap.buffers.batch import Batch
from ringmap.buffers.engine import DISK, Engine, Nest, wrong_id
from ringmap.buffers.loader_state import LoaderState
from ringmap.buffers.options import sendable
from ringmap.buffers.rings import Ring
from ringmap.buffers.sharded.clip_table import ClipTable
from ringmap.buffers.sharded.learner_state import LearnerState
from ringmap.buffers.sharded.moments import Moment, Moments, told_state
from ringmap.buffers.sharded.numbers import RingNumbers, apart, joined
from ringmap.buffers.sharded.priorities import FleetPriorities
from ringmap.buffers.sharded.removal import remove_ring
from ringmap.buffers.sharded.rings import Fleet
from ringmap.buffers.transitions.columns import TransitionColumns
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut, Layout
from ringmap.clips.draws import Crossing, Drawn
from ringmap.clips.gather import GONE, MOST_CHOICES, PINNED, ClipReader, Redraw
from ringmap.clips.items import EpisodeMoment, call_functions, put_added
from ringmap.clips.rings import RING_FAULTS, AdjacentRings, Piece, gather_many, groups
from ringmap.clips.samplers.base import BaseSampler, Sampler, draw_with
from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.datasets.batch import worker
from ringmap.errors import (
    ClosedError,
    InputError,
    NoClipsError,
    ReadOnlyError,
)
from ringmap.fleet.pace import Pace
from ringmap.storage.columns.copying import Readahead
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.calls import note_nested
from ringmap.storage.read.handle import Handle, Pulse
from ringmap.storage.read.read_live import retry
from ringmap.storage.ring.arrays import lowest

__all__ = ["ShardEngine", "Weights"]

Array = np.ndarray[Any, np.dtype[Any]]
Weights = str | Mapping[str, float]

_WHERE = "ShardedReplayBuffer"

_ADVICE = "raise max_steps of the rings, or ask for smaller batches"


class ShardEngine(Engine):
    """The open rings of a `ShardedReplayBuffer`.

    Args:
        rings: what finds and opens them.
        weights: "clips", "equal", or name -> weight.
        sampler: as for `Engine`.
        seed: of the generator.
        threads: as for `ReplayBuffer`.
        state: keeps the priorities of a prioritized sampler; None: they are in memory alone.

    Raises:
        InputError: the sampler draws by rank, or by the order of ids; or there are weights, too.
    """

    def __init__(
        self,
        rings: Fleet,
        weights: Weights = "clips",
        sampler: Sampler | None = None,
        seed: int | None = None,
        threads: int | None = None,
        state: LearnerState | None = None,
    ) -> None:
        super().__init__(None, sampler, seed)
        self.watch, self.pulse = Readahead(DISK.system), Pulse()
        self.members = rings
        rings.changed, rings.only_known = self._changed, self._only_known
        self.weights = weights
        self.threads = threads
        self.state = state
        self.sampler = self._over_rings(self.sampler)
        self._begin()

    def _over_rings(self, sampler: BaseSampler) -> BaseSampler:
        if sampler.given is None:
            return sampler
        name = type(sampler.given).__name__
        if self.weights != "clips":
            raise InputError(
                f"{_WHERE}: weights={self.weights!r} contradict a {name}: both say how often each clip is drawn; leave "
                "one of them out"
            )
        if isinstance(sampler, PrioritizedSampler):
            return FleetPriorities(sampler, self.members, self.state)
        if not (sampler.any_order or sampler.by_age):
            raise InputError(
                f"{_WHERE}: the clips of many rings have ids ring by ring, and the sampler {name} may take the highest "
                "for the newest; "
                "set any_order = True on it if it does not, draw with a RecencySampler, or from the rings apart"
            )
        return sampler

    def _begin(self, state: LoaderState | None = None) -> None:
        self.pins.loader_state = state or told_state()
        self.moments = Moments(self.members, self.pins.loader_state)
        self._is_drawing = False
        self._tables: dict[tuple[Any, ...], ClipTable] = {}
        self._adjacent: tuple[tuple[Ring, ...] | None, AdjacentRings | None] = None, None
        self._redraws = 0
        self._cuts: dict[tuple[int, int], tuple[Cut, Cut, Ring]] = {}
        self._times = {}

    # -- which rings --------------------------------------------------------------------------

    def start(self, wait_s: float) -> None:
        """Open the rings; wait for the first one.

        Raises:
            NoClipsError: there is none after `wait_s` seconds.
            InputError: the same ring twice.
        """
        self.members.start(wait_s)

    def _changed(self, gone: list[Ring]) -> None:
        """Read from other rings from now on."""
        rings = self.members.open
        self._redraws += sum(ring.reader.num_redraws for ring in gone)
        for ring in rings:
            ring.reader.rng = self.rng
            ring.reader.watch, ring.source.pulse = self.watch, self.pulse
        self._adjacent = None, None  # the maps of those that left end here
        self.rings = rings
        self.moments.tell()

    def check_open(self) -> None:
        """Raise if the buffer is closed; after a fork or a pickle, open the rings in this process.

        Raises:
            ClosedError: it is closed.
        """
        if self.is_closed:
            raise ClosedError(f"{_WHERE}: the buffer {self.members.where} is closed; open it again")
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.rng = np.random.default_rng()
            self._begin(self.pins.loader_state if worker() is not None else None)
            self.members.reopen()
        elif worker() is None and not self.pins.loader_state.is_mine:  # it follows no process
            self._begin()
        self.members.start_once()

    @property
    def priorities(self) -> FleetPriorities | None:
        """The priorities over all rings; None: clips are drawn otherwise."""
        return self.sampler if isinstance(self.sampler, FleetPriorities) else None

    # -- transitions --------------------------------------------------------------------------

    @property
    def transitions(self) -> TransitionColumns | None:
        """The columns of rings of transitions; None: they hold episodes, or it is not known yet."""
        self.check_open()
        return self.members.columns

    @property
    def nest(self) -> Nest | None:  # type: ignore[override]
        """What nests transitions, if observations are nested."""
        columns = self.members.columns
        return None if columns is None or not columns.is_nested else columns.nested

    def shown(self, batch: Batch[Any]) -> Batch[Any]:
        """Return a drawn batch as `TransitionReplayBuffer.sample` does, if it holds transitions."""
        columns = self.members.columns
        return batch if columns is None else columns.public(batch)

    def _refuse_clips(self, cut: Cut) -> None:
        """Raise if clips of several steps are asked for, and there are only transitions."""
        if cut.span != 1 and self.members.columns is not None:
            raise InputError(
                f"{_WHERE}: draws single transitions, got history_len={cut.history} * frameskip={cut.frameskip}"
            )

    # -- clips --------------------------------------------------------------------------------

    def count(self, cut: Cut, shared: bool = True) -> int:
        """Return how many clips of a cut exist, at the last refresh."""
        return self._moment(cut, shared).clips

    def _moment(self, cut: Cut, shared: bool = True) -> Moment:
        self.check_open()
        self._refuse_clips(cut)
        return self.moments.of(cut, shared and not self._is_drawing)

    def _only_known(self) -> bool:
        return self.moments.only_known()

    # -- draws --------------------------------------------------------------------------------

    def begin_draw(self) -> None:
        """Catch up with every ring, for a draw; in a worker, with the worker's own generator.

        Raises:
            RoleError: called by a signal handler, or a callable, in the middle of another call.
        """
        self.members.refuse_nested(f"{_WHERE}.sample")
        self.check_open()
        self.moments.clear()
        self._follow()
        self._begin_draw()

    def check_pace(self, pace: Pace, where: str) -> None:
        """Do nothing: all are rings on disk, and may lie in several directories."""

    def refresh(self) -> bool:
        """Catch up with every ring, and look for new ones; tell whether anything changed.

        Raises:
            RoleError: called by a signal handler, or a callable, in the middle of another call.
        """
        self.members.refuse_nested(f"{_WHERE}.refresh")
        self.check_open()
        self.moments.clear()
        return self._follow(scan=True)

    def _follow(self, scan: bool = False) -> bool:
        """Catch up with every ring, holding no positions; see `Members.follow`."""
        changed = self.members.follow(scan)
        self.pulse.begin()
        return changed

    def remove(self, ring: Ring, where: str) -> None:
        """Remove a ring, and forget its priorities.

        Raises:
            LockedError: a process writes it.
            EnvironmentFault: the disk fails.
        """
        with self.members.lock:
            remove_ring(ring.folder, where)
            self.members.leave(ring)
            if isinstance(self.sampler, FleetPriorities):
                self.sampler.drop(ring.number)
            if self.state is not None:
                self.state.drop(ring.uuid.hex())

    def _table(self, cut: Cut) -> ClipTable:
        """Return the clips of a cut on all rings; rings without commits since are not counted again. Holds the lock."""
        table = self._tables.get(cut.anchors)
        if table is None or table.rings is not self.members.open:
            if len(self._tables) > 32:
                self._tables.clear()
            table = self._tables[cut.anchors] = ClipTable(self.members.open, cut)
        table.follow(self.members.changes)
        return table

    def draw_positions(self, size: int, cut: Cut) -> Array | None:
        """Return the ids of `size` clips drawn from all rings, in random order; None when there are none."""
        with self.members.lock:
            table = self._table(cut)
            return table.draw(size, self._shares(table.rings), self.rng)

    def _shares(self, rings: tuple[Ring, ...]) -> Array | None:
        """Return the share of each ring in a draw, not scaled; None: as many as it has clips."""
        weights = self.weights
        if weights == "clips":
            return None
        if isinstance(weights, Mapping):
            return np.array([float(weights.get(ring.name, 0.0)) for ring in rings])
        return np.ones(len(rings))

    def draw(self, buffer: Any, size: int, cut: Cut, step: int | None = None) -> Drawn:
        """Draw `size` clips, as `Engine.draw` does."""
        self.begin_draw()
        self._refuse_clips(cut)
        step, sampler = self.next_step(step), self.sampler
        if sampler.given is None:
            ids = self.draw_positions(size, cut)
            if ids is None:
                raise NoClipsError(f"{_WHERE}.sample: {self.why_no_clips(cut)}")
            return Drawn(ids)
        if isinstance(sampler, FleetPriorities):
            with self.members.lock:
                drawn = sampler.draw(size, cut, step)
            if drawn is None:
                raise NoClipsError(f"{_WHERE}.sample: {self.why_no_clips(cut)}")
            return drawn
        with self.members.lock:
            self._is_drawing = True  # the ids of a sampler are of this moment, not of one that was told
            try:
                moment = self._moment(cut, shared=False)
                if not moment.clips:
                    raise NoClipsError(f"{_WHERE}.sample: {self.why_no_clips(cut)}")
                numbers, weigh = draw_with(sampler, step, buffer, size, cut.history or 1, f"{_WHERE}.sample")
            finally:
                self._is_drawing = False
            wrong = (numbers < 0) | (numbers >= moment.clips)
            if wrong.any():
                raise wrong_id(_WHERE, int(numbers[wrong][0]), moment.clips)
            if sampler.by_age:
                ranges = [(ring, ring.reader.window(cut)) for ring in self.members.open]
                numbers = self._by_age(numbers, ranges)
            found = self.replaced(self._placed(numbers, moment, cut), cut)
            return Drawn(found, weigh=weigh)

    def _draw_view(self, view: Any, size: int, cut: Cut, step: int) -> Drawn:
        sampler = self.sampler
        with self.members.lock:
            if not isinstance(sampler, FleetPriorities):
                return super()._draw_view(view, size, cut, step)
            drawn = sampler.draw(size, cut, step, view)
            if drawn is None:
                raise self._none_of(view)
            return drawn

    def anchors(self, ids: Array, cut: Cut) -> Array:
        """Return what `read` takes for clips with these ids, as `Engine.anchors` does."""
        self.check_open()
        self._draw_apart()
        highest = max(0, int(ids.max())) if len(ids) else 0
        if highest >= PINNED:
            return self.anchors_at(ids - PINNED, cut)
        moment = self._moment(cut)
        ids = np.where(ids < 0, ids + moment.clips, ids)
        if highest >= moment.clips:  # drawn in a process that knows more
            self.refresh()
            moment = self._moment(cut)
        return self._placed(ids, moment, cut)

    def _placed(self, ids: Array, moment: Moment, cut: Cut) -> Array:
        found = np.full(len(ids), GONE)
        for which, places in groups(moment.ends.searchsorted(ids, side="right")):
            ring = pinned = None
            if which < len(moment.numbers):
                ring, pinned = self.members.of(moment.numbers[which]), moment.pinned[which]
            if ring is None or pinned is None:
                self._redraws += len(places)
                continue
            first = int(moment.ends[which]) - pinned.count
            try:
                local = ring.reader.place(ids[places] - first + pinned.base, pinned, cut)
            except RING_FAULTS as error:
                self.members.drop(ring, error)
                self._redraws += len(places)
            else:
                found[places] = self._ids_of(ring, local)
        return found

    def _ids_of(self, ring: Ring, positions: Array) -> Array:
        """Return the ids of positions on a ring; those that are GONE stay so, and are counted for the ring."""
        gone = positions == GONE
        ring.reader.num_redraws += int(gone.sum())
        return np.where(gone, GONE, joined(ring.number, positions))

    def anchors_at(self, positions: Array, cut: Cut) -> Array:
        """Return the ids; GONE for one that is no anchor of the cut now, or whose ring is gone."""
        found, (numbers, local) = np.full(len(positions), GONE), apart(positions)
        for number, places in groups(numbers):
            ring = self.members.of(number)
            if ring is None:
                self._redraws += len(places)
                continue
            try:
                wanted = local[places]
                if ring.source.rows is None or wanted.max() + cut.after >= ring.source.head:
                    ring.source.refresh()
                found[places] = self._ids_of(ring, ring.reader.anchors_at(wanted, cut))
            except RING_FAULTS as error:
                self.members.drop(ring, error)
                self._redraws += len(places)
        return found

    def replaced(self, positions: Array, cut: Cut, redraw: Redraw | None = None) -> Array:
        """Return the ids with clips of any ring in place of those that are GONE, which were counted where they were
        found."""
        if not len(positions) or lowest(positions) != GONE:
            return positions
        gone, positions = positions == GONE, positions.copy()
        count = int(gone.sum())
        self._draw_apart()
        self._follow()
        positions[gone] = self._redrawn(count, cut) if redraw is None else redraw(count)
        return positions

    def _redrawn(self, count: int, cut: Cut) -> Array:
        """Return the ids of so many clips, drawn in place of others.

        Raises:
            NoClipsError: there is none.
        """
        drawn = self.draw_positions(count, cut)
        if drawn is None:
            raise NoClipsError(f"{_WHERE}: {self.why_no_clips(cut)}")
        return drawn

    def _newest(self, ids: Array) -> Array:
        """Return of each column the id that lies nearest to the head of its ring, by the steps that the ring holds;
        `ids`: `(n, B)`."""
        numbers, local = apart(ids)
        ages = np.ones(ids.shape)  # of a ring that is gone
        for ring in self.members.open:
            mine, source = numbers == ring.number, ring.source
            held = max(1, source.head - source.tail)
            ages[mine] = (source.head - local[mine]) / held
        found: Array = np.take_along_axis(ids, ages.argmin(axis=0)[None], 0)[0]
        return found

    # -- reads --------------------------------------------------------------------------------

    def read(
        self,
        positions: Array,
        cut: Cut,
        out: dict[str, Array] | None = None,
        asked: bool = False,
        crossing: Crossing | None = None,
        redraw: Redraw | None = None,
        *,
        numbers: EpisodeMoment | None = None,
    ) -> dict[str, Array]:
        """Return the clips with these ids, as `Engine.read` does; `positions` shows which were redrawn."""
        self.check_open()
        numbers = self.numbering(cut) if numbers is None else numbers
        while True:
            batch = self._read(positions, cut, out, asked, redraw, numbers)
            if numbers is None or not numbers.is_outdated:
                break
            numbers.begin()  # all numbers of a batch are of one moment
        return batch

    def numbering(self, cut: Cut) -> EpisodeMoment | None:
        """Return what numbers the episodes of one batch over all rings, as `Engine.numbering` does."""
        if not cut.computed or cut.episode_numbers is not None:
            return None
        members = self.members
        return EpisodeMoment(lambda: [(ring.source, partial(joined, ring.number)) for ring in members.open])

    def _read(
        self,
        positions: Array,
        cut: Cut,
        out: dict[str, Array] | None,
        asked: bool,
        redraw: Redraw | None,
        numbers: EpisodeMoment | None,
    ) -> dict[str, Array]:
        size = len(positions)
        batch: dict[str, Array] = {} if out is None else dict(out)
        if size:
            found = self._read_adjacent(positions, cut, batch, out is not None, asked)
        else:
            found, batch = positions, batch or self._read_none(positions, cut)
        which, left = (np.arange(size), size) if found is None else (found, len(found))
        read_twice, choices = np.full(size, GONE), 0
        draw = redraw or partial(self._redrawn, cut=cut)

        def newer(count: int) -> Array:
            """Draw for each clip the newest of so many, as a reader of one ring does that is overtaken again and
            again."""
            nonlocal choices
            choices = min(2 * choices or 1, MOST_CHOICES)
            return self._newest(draw(count * choices).reshape(choices, count))

        def attempt() -> int:
            nonlocal which
            bad = self._gather(positions, which, cut, size, batch, numbers)
            which = np.concatenate(bad) if bad else which[:0]
            return len(which)

        def redraw_bad() -> None:
            self._follow()
            now = positions[which]
            # A transition after which rows are missing is an anchor, and is never whole.
            again = now == read_twice[which]
            self._redraws += int(again.sum())
            wanted = np.where(again, GONE, self.anchors_at(now, cut))
            positions[which] = read_twice[which] = self.replaced(wanted, cut, newer)

        if found is None:
            left = attempt()
        if left:
            redraw_bad()
            retry(attempt, redraw_bad, self.members.where, _ADVICE)
        if cut.functions:
            call_functions(batch, cut, size)
        if cut.added and batch:
            put_added(batch, cut, out)
        if out is not None and self.members.columns is not None:
            batch = {name: batch[name] for name in self.layout(cut, size)}
        return batch

    def _read_none(self, positions: Array, cut: Cut) -> dict[str, Array]:
        """Return a batch without clips, as any ring with columns returns it; {} if there is none."""
        for ring in self.members.open:
            if ring.source.rows is not None:
                with contextlib.suppress(*RING_FAULTS):
                    return ring.reader.at(positions, self._cut_in(ring, cut))
        return {}

    def _read_adjacent(
        self, positions: Array, cut: Cut, batch: dict[str, Array], is_given: bool, asked: bool
    ) -> Array | None:
        """Read the clips from all rings at once; return the places of those that are still to be read.

        Returns:
            None if nothing was read: the rings must be asked one by one.
        """
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
        found, oldest, good = reader.read_adjacent(rings, places, local, cut, out, self.num_threads)
        if is_large:
            self.watch.end()
        for name, values in found.items():
            batch.setdefault(name, values)  # the caller's own are filled
        bad = rings.lost(places, oldest, good)
        return np.empty(0, np.int64) if bad is None else bad.nonzero()[0]

    def _side_by_side(self) -> AdjacentRings | None:
        """Return the open rings side by side; None if they can't be read at once."""
        rings = self.members.open
        known, made = self._adjacent
        if known is not rings or made is None or not made.is_current:
            try:
                made = AdjacentRings.of({ring.number: ring.reader for ring in rings}, self.pulse)
            except RING_FAULTS:  # reading that ring alone says what is wrong
                return None
            self._adjacent = rings, made
        return made if made.is_readable else None

    def _drop(self, reader: ClipReader, error: Exception) -> None:
        """Go on without the ring of a reader, if it is still open."""
        for ring in self.members.open:
            if ring.reader is reader:
                self.members.drop(ring, error)

    def _gather(
        self,
        positions: Array,
        which: Array,
        cut: Cut,
        size: int,
        batch: dict[str, Array],
        numbers: EpisodeMoment | None,
    ) -> list[Array]:
        homes, local = apart(positions.take(which))
        pieces, bad = list[Piece](), list[Array]()
        for number, places in groups(homes):
            ring = self.members.of(number)
            if ring is None:
                bad.append(which[places])
                continue
            own = self._cut_in(ring, cut)
            of_ring = None if numbers is None else numbers.of(ring.source)
            pieces.append(Piece(number, ring.reader, which[places], local[places], own, of_ring))

        def fail(piece: Piece, error: Exception) -> None:
            self._drop(piece.reader, error)

        return bad + gather_many(pieces, size, batch, self.num_threads, fail)

    def _cut_in(self, ring: Ring, cut: Cut) -> Cut:
        """Return the cut as one ring computes it: episodes are numbered over all rings, functions see the whole
        batch."""
        if not (cut.needs_bounds or cut.functions or ring.source.live.links is not None):
            return cut
        found = self._cuts.get((id(cut), ring.number))
        if found is None or found[2] is not ring:
            if len(self._cuts) > 32 * max(1, len(self.members.open)):
                self._cuts.clear()
            ids, given = partial(joined, ring.number), cut.episode_numbers
            of_view = None if given is None else lambda starts: given(ids(starts))
            own = replace(cut, functions=(), episode_numbers=of_view, step_ids=ids, ring=ring.number)
            found = self._cuts[id(cut), ring.number] = cut, own, ring
        return found[1]

    def layout(self, cut: Cut, size: int) -> Layout:
        """Return the shape and dtype of the columns of a batch; of computed ones, once they were computed here."""
        schema = self.schema
        if schema is None:
            return {}
        if self.members.columns is not None:
            return self.members.columns.layout(size, self.members.n_step == 1)
        return cut.layout(schema, size)

    def want(self, positions: Array, cut: Cut) -> None:
        """Ask the disk for clips that are to be read soon, if that pays off."""
        if not any(ring.source.rows and ring.source.rows.large for ring in self.rings):
            return
        numbers, local = apart(positions)
        for number, places in groups(numbers):
            ring = self.members.of(number)
            if ring is not None:
                ring.reader.want(local[places], cut)

    # -- what is stored -----------------------------------------------------------------------

    def each(self) -> Iterator[Ring]:
        """Yield the open rings, in the order of their numbers."""
        self.check_open()
        yield from self.members.open

    def all_rings(self) -> tuple[Ring, ...]:
        """Return the open rings, for a call that answers for all.

        Raises:
            BadRingsError: others can't be read, with on_bad="raise".
        """
        self.check_open()
        self.members.report()
        return self.rings

    def ring_at(self, number: int) -> Ring | None:
        """Return an open ring by its number; None: it is away."""
        ring = self.members.of(number)
        if ring is not None:
            ring.source.recover_if_stale()
        return ring

    def uuid_of(self, number: int) -> bytes:
        """Return what names a ring, which may be away."""
        return self.members.numbers.uuids[number]

    def number_of(self, uuid: bytes) -> int:
        """Return the number of the ring with this uuid; one that is away may come back."""
        return self.members.numbers.of(uuid)

    def episodes_only(self, what: str) -> None:
        """Raise if the rings hold transitions; `what`: the method to name.

        Raises:
            InputError: they do.
        """
        if self.transitions is not None:
            raise InputError(
                f"ShardedReplayBuffer.{what}: the rings {self.members.where} hold transitions, not episodes; "
                "read them with sample, batches, pass_sampler or by id"
            )

    @property
    def holds_episodes(self) -> bool:
        """Whether the clips are steps of episodes, not transitions, as far as it is known."""
        return self.transitions is None

    @property
    def schema(self) -> Schema | None:
        """The columns of all rings; None before the first episode of any."""
        self.check_open()
        return self.members.schema

    def why_no_clips(self, cut: Cut) -> str:
        """Return, in words, why no clip of this cut exists."""
        held = "episodes" if self.members.columns is None else "transitions"
        if isinstance(self.weights, Mapping) and not any(
            self.weights.get(ring.name) and ring.source.live.num_steps for ring in self.members.open
        ):
            names = [ring.name for ring in self.members.open]
            return f"weights={dict(self.weights)!r} give no weight to a ring with {held}; there are {names}"
        if not self.members.open:
            return f"no ring {self.members.where} can be read{self.members.why}; start a collector"
        if held == "transitions":
            return (
                f"0 transitions are stored {self.members.where}; add some first (readers see them with the "
                "commit: flush())"
            )
        lengths = [ring.lengths for ring in self.members.open]
        return cut.why_none(np.concatenate(lengths))

    # -- roles and copies ---------------------------------------------------------------------

    @property
    def source(self) -> Handle:
        """Raise: there is no single ring, to copy, to number or to write.

        Raises:
            ReadOnlyError: always.
        """
        self.refuse(_WHERE)

    def window(self, cut: Cut) -> ClipRange:
        """Raise: a clip range is one of a single ring.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{_WHERE}: this sampler draws by episode or position, which it can in a single ring; use one that asks "
            "for num_valid_ends only, a PrioritizedSampler, or draw from the rings apart"
        )

    def refuse(self, where: str) -> NoReturn:
        """Raise: rings are only read here.

        Raises:
            ReadOnlyError: always; it names the rings.
        """
        kind = "ReplayBuffer" if self.transitions is None else "TransitionReplayBuffer"
        raise ReadOnlyError(
            f"{where}: rings are only read here; open the ring to write, {kind}.open(path, mode='r+') of one of: "
            + (", ".join(ring.folder for ring in self.members.open) or f"none {self.members.where}")
        )

    @property
    def path(self) -> Path | None:
        """The directory or glob; None for a list."""
        return Path(self.members.paths) if isinstance(self.members.paths, str) else None

    def flush(self, where: str, notes: Mapping[str, Any] | None = None) -> None:
        """Force priorities to the disk, where `state` keeps them."""
        if note_nested(partial(self.flush, where, notes)):
            return
        self.check_open()
        self.sampler.flush()

    def close(self) -> None:
        """Do what `flush` does, and release all files."""
        if note_nested(self.close):
            return
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self.sampler.flush()
        finally:
            self.members.close()
            self.sampler.close()
            if self.state is not None:
                self.state.close()

    def to_send(self) -> dict[str, Any]:
        """Return what `received` builds a copy from: paths, settings and ring numbers."""
        rings = self.members
        return {
            "paths": rings.paths,
            "options": rings.options,
            "on_bad": rings.on_bad,
            "uuids": list(rings.numbers.uuids),
            "schema": rings.schema,
            "columns": rings.columns,
            "told": rings.told,
            "facts": rings.facts,
            "sums": rings.sums,
            "asked": rings.asked,
            "weights": self.weights,
            "threads": self.threads,
            "sampler": sendable(_WHERE, "sampler", self.sampler.given),
            "loader_state": self.pins.loader_state,
            "state": None if self.state is None else self.state.path,
            "seed_key": self.seed_key,
        }

    @classmethod
    def received(cls, state: Mapping[str, Any]) -> ShardEngine:
        """Return an engine of this process from what another process sent."""
        numbers = RingNumbers(state["uuids"])
        rings = Fleet(
            state["paths"], state["options"], state["on_bad"], numbers, state["sums"], state["asked"], state["told"]
        )
        rings.schema, rings.columns, rings.facts = state["schema"], state["columns"], state["facts"]
        kept = None if state["state"] is None else LearnerState(state["state"], write=False)
        engine = cls(rings, state["weights"], state["sampler"], threads=state["threads"], state=kept)
        engine.seed_key = state["seed_key"]
        if state["loader_state"] is not None:
            engine._begin(state["loader_state"])
        return engine

    def __reduce__(self) -> Any:
        return ShardEngine.received, (self.to_send(),)
