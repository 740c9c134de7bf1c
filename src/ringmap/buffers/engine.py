"""What every buffer holds: its open rings, what draws from them, and what this process may do with them.

    ReplayBuffer, StepRing, transitions, labels, views, passes
                            |
                         Engine ---- sampler, generator, counter --> small state, which rides with commits
                        /      \\
              rings[i]: source, reader, episodes           a single ring is a fleet of one

    one ring       number 0: its own reader draws, places and reads (a branch that saves 25 calls a batch)
    a fleet        rings that come and go: ManyReader draws, places and reads (sharded/reader.py)

    opened         a Store, which writes, or a Reader, which follows the writer
    forked         its own Reader; for a buffer in RAM, the copy, which only reads
    unpickled      its own Reader; for a buffer in RAM, a Store of what was stored

Invariants: each process has one engine per buffer; a closed engine returns no source; a pickle holds paths and
settings, never a disk; only the process that opened a writer writes.
Not here: columns and transforms (replay.py), clips as a DataLoader takes them (lookup.py), files and commits
(storage/).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from ringmap.arguments import count
from ringmap.buffers.batch import Batch
from ringmap.buffers.episodes import StoredEpisodes
from ringmap.buffers.options import check_whole, sendable
from ringmap.buffers.rings import MOST_RINGS, Ring, Rings, apart, joined, remove_ring
from ringmap.buffers.sharded.clip_table import Clips, ClipTable, CommitTimes, Moment, in_order
from ringmap.buffers.sharded.priorities import FleetPriorities, LearnerState
from ringmap.buffers.sharded.reader import ManyReader, Weights
from ringmap.buffers.workers import Pins
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut, Layout
from ringmap.clips.draws import Crossing, Drawn, Weigh, integers
from ringmap.clips.gather import GONE, PINNED, ClipReader, Pinned, Redraw
from ringmap.clips.items import EpisodeMoment
from ringmap.clips.marks import marks_of_copy
from ringmap.clips.rings import groups
from ringmap.clips.samplers.base import (
    BaseSampler,
    Sampler,
    as_sampler,
    checked_rng,
    draw_with,
    generator,
    seed_key,
)
from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.clips.samplers.uniform import uniform
from ringmap.datasets.base import in_range
from ringmap.datasets.batch import worker
from ringmap.errors import (
    ClipIndexError,
    ClosedError,
    InputError,
    NoClipsError,
    ReadOnlyError,
    ReplacedError,
    RingmapError,
)
from ringmap.fleet.pace import Pace
from ringmap.storage.columns.schema import Schema
from ringmap.storage.commit.commit import Commit, NewRecord
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.calls import end_noted, note_nested, refuse_nested, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import describe, holder_of
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.disk.paths import local_path
from ringmap.storage.disk.process import Forkable, Renew, before_exit
from ringmap.storage.disk.system import clear_reads, cores
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.reader import Reader
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.table import PART, PartOf, Record
from ringmap.storage.ring.arrays import highest, lowest
from ringmap.storage.ring.ring import Ordinal
from ringmap.storage.sidecars.base import Marks
from ringmap.storage.sidecars.priorities import PriorityFile

if TYPE_CHECKING:
    from ringmap.buffers.sharded.rings import Fleet
    from ringmap.buffers.transitions.columns import TransitionColumns
    from ringmap.storage.inspect.snapshot import Kept

__all__ = ["Engine", "door", "wrong_id"]

log = logging.getLogger("ringmap")

Array = np.ndarray[Any, np.dtype[Any]]
Nest = Callable[[dict[str, Any]], dict[str, Any]]
MakeReader = Callable[[Handle, np.random.Generator], ClipReader]

_WHERE, _FLEET = "ReplayBuffer", "ShardedReplayBuffer"
_EXIT_S = 5.0
"""How long the end of a process waits for a call of another thread, which may never end."""

DISK = Disk()
"""The default door to the file system."""


def door(disk: Disk | None) -> Disk:
    """Return the door to the file system: the given one, or the default of the process."""
    return DISK if disk is None else disk


class _Drawing(threading.local):
    """What each thread is in the middle of.

    `moments`: of a draw from many rings, by view and cut, the clips of which its sampler returns ids; None: no draw.
    """

    moments: dict[Any, Moment] | None = None


class Engine(Forkable):
    """The open ring of a buffer, with its sampler, generator and role.

    For classes that build their own buffer; `ReplayBuffer.engine` is the engine of a buffer.

    Args:
        source: the ring, a `Store` or a `Reader`; or the rings of a fleet. The engine closes it.
        sampler: what draws; None draws uniformly.
        seed: of the generator. A writer continues from the state that the ring carries, if it carries one.
        disk: the door through which copies are written; None: the file system.
        weights: of a fleet, how often each ring is drawn from: "clips", "equal", or name -> weight.
        state: of a fleet, keeps the priorities of a prioritized sampler; None: they are in memory alone.

    Raises:
        InputError: the sampler can't be called, or the seed is not valid.

    Processes and threads: one thread may write while others read. A forked or unpickled engine of a ring on disk opens
    its own reader at first use.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> from ringmap.clips.cut import Cut
        >>> buf = ReplayBuffer(max_steps=100, seed=0)
        >>> buf.write_episode({"obs": np.arange(10)})
        >>> engine = buf.engine
        >>> cut = Cut.clip(1)
        >>> drawn = engine.draw(buf, 3, cut)
        >>> engine.read(drawn.positions, cut)["obs"].shape, engine.source.head
        ((3, 1), 10)
    """

    rings: tuple[Ring, ...] = ()
    """The rings as they were opened, even if they are closed now or belonged to the parent of a forked child. Another
    tuple after each change."""
    members: Rings
    """The rings that are open, and how they are followed."""
    has_branch: ClassVar[bool] = True
    """Whether a single ring is drawn from and read by its own reader; False in a test that it changes nothing."""

    def __init__(
        self,
        source: Handle | Fleet,
        sampler: Sampler | None = None,
        seed: int | None = None,
        *,
        disk: Disk | None = None,
        weights: Weights = "clips",
        state: LearnerState | None = None,
    ) -> None:
        self.disk = door(disk)
        self.threads: int | None = None
        self.rng = generator(seed, _WHERE, "seed")
        self.seed_key = seed_key(seed)
        """What the draws of workers follow from, beside their own seeds."""
        self.counter = 0
        self.numbered: tuple[Array, Array] = np.empty(0, np.int64), np.empty(0, np.int64)
        """The numbers of episodes in the last batch that had such, rising, and the names of these."""
        self.fleet = None if isinstance(source, Handle) else source
        """The rings, if they come and go; None: one was given."""
        self.weights, self.state = weights, state
        self.pins = Pins(1 if self.fleet is None else MOST_RINGS)
        self._drawing = _Drawing()
        self._draws = self._draws_stored = 0
        self._draws_as: tuple[int, np.random.SeedSequence] | None = None
        self._begun: BaseSampler | None = None
        self._make_reader: MakeReader = ClipReader
        self._times: dict[int, tuple[Ring, CommitTimes]] = {}
        self.many: ManyReader | None = None
        """What reads many rings; None: one ring, whose own reader does."""
        if isinstance(source, Handle):
            self._hold(source)
        else:
            self.members, self.many = source, ManyReader(source, self.rng, weights)
            source.changed, source.only_known = self._adopt, self._only_known
            self._pid, self.is_closed = os.getpid(), False
        self.sampler = self._over_rings(NO_SAMPLER if sampler is None else as_sampler(sampler, _WHERE))
        if isinstance(source, Store):
            saved = source.carried.get("sampling")
            if saved is not None:  # the store has refused an invalid one
                self.counter = int(saved["step"])
                self.rng.bit_generator.state = saved["rng"]
                self._restore_sampler(saved.get("sampler"))
            else:
                self._draws = 1  # a fresh generator is stored with the first commit
            self.sampler.attach(source)
            if not source.disk.volatile:
                before_exit(self)

    def _restore_sampler(self, state: Mapping[str, Any] | None) -> None:
        """Let the sampler continue from the state in the directory, if a sampler of the same kind left it."""
        if state and state.get("kind") == type(self.sampler.given).__name__:
            try:
                self.sampler.load_small_state(state)
            except (InputError, LookupError, TypeError, ValueError, ArithmeticError) as error:
                log.warning("%s: its sampler begins anew: %s", self.owned.folder, error)

    def _hold(self, source: Handle) -> None:
        self._give(Ring.of(0, "", source, self._make_reader(source, self.rng)))
        self._pid = os.getpid()
        self.is_closed = False
        self.pins.clear()

    def _give(self, ring: Ring) -> None:
        self.rings, self.members, self.many = (ring,), Rings((ring,)), None
        if not self.has_branch:
            self.many = ManyReader(self.members, self.rng)
            self.many.adopt()

    def _adopt(self, gone: list[Ring]) -> None:
        """Read from the rings of the fleet that are open now."""
        assert self.many is not None
        self.many.rng = self.rng
        self.many.adopt(gone)
        self._times.clear()
        self.rings = self.members.open
        self.pins.tell(self.members)

    def _only_known(self) -> bool:
        """Learn the ring numbers that were told, and tell whether others are given by another process."""
        self.pins.learn(self.members)
        return self.pins.is_led

    def start(self, wait_s: float) -> None:
        """Open the rings of a fleet; wait for the first one.

        Raises:
            NoClipsError: there is none after `wait_s` seconds.
            InputError: the same ring twice; or the sampler can't draw from so many.
        """
        assert self.fleet is not None
        self.fleet.start(wait_s)
        self._check_sampler(self.sampler)

    def reset_after_fork(self, renewed: Renew) -> None:
        """Replace the locks as well, which another thread may have held at the fork."""
        super().reset_after_fork(renewed)
        if (members := vars(self).get("members")) is not None:  # a thread may be making it
            members.lock = threading.RLock()

    def read_with(self, make: MakeReader) -> None:
        """Read clips with readers of another kind from now on, also after a fork.

        Args:
            make: returns a reader of a ring; it may not hold this engine, or both would live until the garbage
                collector comes.
        """
        self._make_reader = make
        self._give(replace(self.rings[0], reader=make(self.rings[0].source, self.rng)))

    # -- rings and roles ---------------------------------------------------------------------

    @property
    def owned(self) -> Handle:
        """The single ring as it was opened, closed or not: for its path, its manifest and its end."""
        return self.rings[0].source

    @property
    def source(self) -> Handle:
        """The single ring, open, as this process may see it, and in agreement with the files: the gate of all reads.

        Raises:
            ClosedError: the ring is closed.
            RoleError: a call of this thread is under way.
            ReadOnlyError: there are many.
        """
        if self.fleet is not None:
            self.refuse(_WHERE)
        if thread.inside or thread.searching.locked() or thread.noted:
            refuse_nested(_WHERE)
        owned = self.rings[0].source
        if self.is_closed:
            raise owned.closed(_WHERE)
        if self._pid != os.getpid() and not owned.disk.volatile:
            owned = self._reopen()
        owned.recover_if_stale()
        return owned

    def check_open(self) -> None:
        """Raise if the buffer is closed; after a fork or a pickle, open files of this process.

        Raises:
            ClosedError: it is closed.
        """
        fleet = self.fleet
        if fleet is None:
            self.source  # noqa: B018 - it says so
            return
        if self.is_closed:
            raise ClosedError(f"{_FLEET}: the buffer {fleet.where} is closed; open it again")
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.rng = np.random.default_rng()
            assert self.many is not None
            self.many.begin(self.rng)
            self.pins.begin(self.pins.loader_state if worker() is not None else None)
            fleet.reopen()
        elif not self.pins.loader_state.is_mine and worker() is None:  # it follows no process
            self.pins.begin()
        fleet.start_once()

    def _reopen(self) -> Handle:
        """Become a live reader: the open files of the parent process are not ours."""
        self.rng = np.random.default_rng()
        if worker() is None:
            self.pins.begin()  # it follows no process
        owned = self.owned
        self._hold(Reader(owned.disk, owned.folder, mapped=owned.mapped, uuid=owned.manifest.uuid))
        return self.owned

    @property
    def reader(self) -> ClipReader:
        """The reader that copies clips out of the single ring. Ask for `source` first: after a fork that opens another
        reader."""
        return self.rings[0].reader

    @property
    def episodes(self) -> StoredEpisodes:
        """The stored episodes of the ring, read whole."""
        self.source.pulse.begin()  # of the ring as it is after a fork or an interrupt
        self.commit_pending(_WHERE)
        return self.rings[0].episodes

    def ring_at(self, number: int) -> Ring | None:
        """Return an open ring by its number, None if it is away; for a caller that has called `check_open`."""
        ring = self.members.of(number)
        if ring is not None:
            ring.source.recover_if_stale()
        return ring

    def ring(self, number: int) -> Ring | None:
        """Return an open ring by its number, for a read of whole episodes; None: it is away."""
        self.check_open()
        self.commit_pending(_WHERE)
        ring = self.ring_at(number)
        if ring is not None:
            ring.source.pulse.begin()  # as it is after a fork or an interrupt
        return ring

    def all_rings(self) -> tuple[Ring, ...]:
        """Return the open rings, for a call that answers for all.

        Raises:
            BadRingsError: others can't be read, with on_bad="raise".
        """
        self.check_open()
        self.members.report()
        return self.rings

    def rings_to_read(self) -> tuple[Ring, ...]:
        """Return the open rings, for a call that reads whole episodes of all."""
        rings = self.all_rings()
        for ring in rings:
            ring.source.pulse.begin()  # as it is after a fork or an interrupt
        self.commit_pending(_WHERE)
        return rings

    def names_of(self, episodes: Array | None, where: str) -> Array:
        """Return the names of episodes, the ids of their first steps, by their numbers now (None: all)."""
        rings = self.rings_to_read()
        if len(rings) == 1 and not rings[0].number:
            return rings[0].episodes.names_of(episodes, where)
        each = [joined(ring.number, ring.episodes.names_of(None, where)) for ring in rings]
        names = np.concatenate([np.empty(0, np.int64), *each])
        return names if episodes is None else names[in_range(episodes, len(names), "episode", where)]

    def uuid_of(self, number: int) -> bytes:
        """Return what names a ring in all its copies; it may be away."""
        return self.members.uuids[number]

    def number_of(self, uuid: bytes) -> int | None:
        """Return the number of the ring with this uuid; None: it is none of this buffer. One that is away may come
        back."""
        return self.members.number_of(uuid)

    def data(self, names: Array, evicted: Callable[[int], Exception] | None) -> dict[str, list[Any]]:
        """Return name -> one value per episode, None where it has none, of episodes named by the ids of their first
        steps.

        Args:
            names: of the episodes.
            evicted: returns the error of one that is gone, by its place among these; None: it has no values.
        """
        found, (numbers, local) = dict[str, list[Any]](), apart(names)
        for number, places in groups(numbers):
            ring = self.ring(number)
            if ring is None:
                if evicted is None:
                    continue
                raise evicted(int(places[0]))
            error = None if evicted is None else partial(_at_place, evicted, places)
            for name, values in ring.episodes.data(local[places], error).items():
                column = found.setdefault(name, [None] * len(names))
                for place, value in zip(places.tolist(), values, strict=True):
                    column[place] = value
        return found

    def episodes_only(self, what: str) -> None:
        """Raise if the rings are known to hold transitions; `what`: the method to name.

        Raises:
            InputError: they do.
        """
        if self.transitions is None:
            return
        if self.fleet is not None:
            raise InputError(
                f"{_FLEET}.{what}: the rings {self.fleet.where} hold transitions, not episodes; read them with sample, "
                "batches, pass_sampler or by id"
            )
        raise InputError(
            f"TransitionReplayBuffer.{what}: it holds transitions, not episodes; read them with sample, batches, "
            "pass_sampler or by id, and whole episodes with episode_dataset"
        )

    @property
    def transitions(self) -> TransitionColumns | None:
        """The columns of rings of transitions; None: they hold episodes, or it is not known yet."""
        if self.fleet is None:
            columns: TransitionColumns | None = self.rings[0].reader.columns
            return columns
        self.check_open()
        return self.fleet.columns

    @property
    def nest(self) -> Nest | None:
        """What nests the columns of an item, or of a batch, of a fleet of transitions; None: they stay flat."""
        columns = None if self.fleet is None else self.fleet.columns
        return None if columns is None or not columns.is_nested else columns.nested

    @property
    def is_writer(self) -> bool:
        """Whether this handle writes, closed or not."""
        return self._pid == os.getpid() and any(isinstance(r.source, Store) for r in self.rings)

    def writer(self, where: str) -> Store:
        """Return the ring for writing.

        Raises:
            ReadOnlyError: this handle only reads.
        """
        for ring in self.rings:
            if self._pid == os.getpid() and isinstance(ring.source, Store):
                return ring.source
        self.refuse(where)

    def refuse(self, where: str) -> NoReturn:
        """Raise: this handle only reads.

        Raises:
            ReadOnlyError: always; it names who writes.
        """
        if self.fleet is not None:
            kind = "ReplayBuffer" if self.transitions is None else "TransitionReplayBuffer"
            raise ReadOnlyError(
                f"{where}: rings are only read here; open the ring to write, {kind}.open(path, mode='r+') of one of: "
                + (", ".join(ring.folder for ring in self.rings) or f"none {self.fleet.where}")
            )
        owned = self.owned
        if owned.disk.volatile:
            raise ReadOnlyError(
                f"{where}: this is a forked copy of a buffer in RAM, and only reads; write in the parent"
            )
        holder = describe(holder_of(owned.paths.lock))
        raise ReadOnlyError(
            f"{where}: this handle of {owned.folder} only reads; it was last opened for writing by {holder}; "
            "write there, or open it with mode='r+' once that is closed"
        )

    @property
    def path(self) -> Path | None:
        """The directory, or the glob of a fleet; None for a ring in RAM, or a list of rings."""
        return self.members.path

    def check_pace(self, pace: Pace, where: str) -> None:
        """Raise unless a pace counts the steps that come into this ring.

        Raises:
            InputError: the ring is in RAM, or in another directory.
        """
        if self.fleet is None:  # those of a fleet are on disk, and may lie in several directories
            pace.check_ring(self.path, where)

    def refresh(self) -> bool:
        """Move readers to the newest state, and look for new rings; tell whether anything changed. A writer is always
        up to date.

        Raises:
            RoleError: called by a signal handler, or a callable, in the middle of another call.
        """
        self.pins.clear()
        if self.many is None:
            return self.source.refresh()
        return self._follow(f"{_FLEET}.refresh", scan=True)

    def _follow(self, where: str, scan: bool = False) -> bool:
        """Catch up with many rings."""
        assert self.many is not None
        if self.fleet is not None:
            self.fleet.refuse_nested(where)
        self.check_open()
        return self.many.follow(scan)

    def remove(self, ring: Ring, where: str) -> None:
        """Remove a ring of a fleet, and forget its priorities.

        Raises:
            LockedError: a process writes it.
            EnvironmentFault: the disk fails.
        """
        assert self.fleet is not None
        with self.fleet.lock:
            remove_ring(ring.folder, where)
            self.fleet.leave(ring)
            if (priorities := self.priorities) is not None:
                priorities.drop(ring.number)
            if self.state is not None:
                self.state.drop(ring.uuid.hex())

    def use(self, sampler: Sampler | None) -> None:
        """Use another sampler from now on; None draws uniformly. The replaced sampler is closed.

        Raises:
            InputError: the sampler can't be called.
        """
        self.check_open()
        new = self._over_rings(NO_SAMPLER if sampler is None else as_sampler(sampler, _WHERE))
        self._check_sampler(new)
        if new.given is not self.sampler.given:
            self.sampler.close()
        self.sampler = new
        for ring in self.rings:
            if ring.source.writable:
                new.attach(ring.source)

    def _over_rings(self, sampler: BaseSampler) -> BaseSampler:
        """Return the sampler in the form that draws from these rings."""
        if self.fleet is None or sampler.given is None:
            return sampler
        if self.weights != "clips":
            raise InputError(
                f"{_FLEET}: weights={self.weights!r} contradict a {type(sampler.given).__name__}: both say how often "
                "each clip is drawn; leave one of them out"
            )
        if isinstance(sampler, PrioritizedSampler):
            assert self.many is not None
            return FleetPriorities(sampler, self.many, self.state)
        return sampler

    def _check_sampler(self, sampler: BaseSampler) -> None:
        """Raise if a sampler can't draw from as many rings as there are."""
        if len(self.rings) < 2 or sampler.given is None:
            return
        if isinstance(sampler, FleetPriorities):
            sampler.check_kind()
        elif not (sampler.any_order or sampler.by_age):
            raise InputError(
                f"{_FLEET}: the clips of many rings have ids ring by ring, and the sampler "
                f"{type(sampler.given).__name__} may take the highest for the newest; set any_order = True on it if it "
                "does not, draw with a RecencySampler, or from the rings apart"
            )

    @property
    def priorities(self) -> FleetPriorities | None:
        """The priorities over the rings of a fleet; None: clips are drawn otherwise."""
        return self.sampler if isinstance(self.sampler, FleetPriorities) else None

    # -- clips -------------------------------------------------------------------------------

    def pin(self, cut: Cut, shared: bool = True) -> Pinned | Moment:
        """Return the clips of a cut that exist; see `Pins.of`. To a sampler those of its draw."""
        self.check_open()
        if self.many is None:
            self.commit_pending(_WHERE)  # workers and views of it may be elsewhere
            pinned: Pinned = self.pins.of(self.members, self.rings[0].reader, cut, shared)
            return pinned
        self._refuse_clips(cut)
        if self._drawing.moments is not None:
            return self.moment(cut)
        self.commit_pending(_WHERE)
        moment: Moment = self.pins.of(self.members, self.many, cut, shared)
        return moment

    def moment(self, cut: Cut, view: Any = None) -> Moment:
        """Return the clips of many rings, or those of a view: as of the draw that this thread is in, or now."""
        moments = self._drawing.moments
        key = id(view), cut.anchors
        if moments is not None and key in moments:
            return moments[key]
        with self.members.lock:
            found = self.table(cut, view).moment()
        if moments is not None:
            moments[key] = found
        return found

    def table(self, cut: Cut, view: Any = None) -> ClipTable:
        """Return where the clips of many rings are, or those of a view. Holds the lock of the rings."""
        assert self.many is not None
        table: ClipTable = self.many.table(cut) if view is None else view.table(self.members)
        return table

    def windows(self, cut: Cut, view: Any = None) -> list[ClipRange]:
        """Return the clips of a cut that exist now, for samplers, ring by ring."""
        self.check_open()
        if self.many is None:
            return [self.rings[0].reader.window(cut)]
        return self.moment(cut, view).windows()

    def window(self, cut: Cut) -> ClipRange:
        """Return the clips of a cut that exist now, for samplers. O(1).

        Raises:
            InputError: they are on many rings.
        """
        if self.many is None:
            self.source  # noqa: B018 - a closed one says so
            return self.rings[0].reader.window(cut)
        return self.only(self.windows(cut))

    @staticmethod
    def only(windows: list[ClipRange]) -> ClipRange:
        """Return the clips of the only ring.

        Raises:
            InputError: there are many.
        """
        if len(windows) == 1:
            return windows[0]
        raise InputError(
            f"{_FLEET}: this sampler draws by position, which it can in a single ring; use one that asks for "
            "num_valid_ends or clip_windows only, a PrioritizedSampler, or draw from the rings apart"
        )

    def _refuse_clips(self, cut: Cut) -> None:
        """Raise if clips of several steps are asked for, and there are only transitions."""
        if cut.span != 1 and self.members.columns is not None:
            raise InputError(
                f"{_FLEET}: draws single transitions, got history_len={cut.history} * frameskip={cut.frameskip}"
            )

    def anchors(self, ids: Array, cut: Cut) -> Array:
        """Return the anchors of the clips with these ids, as `pin` counts them, or PINNED + position; GONE for an
        evicted one.

        Raises:
            StaleCopyError: a persistent worker has an old copy of a ring in RAM.
        """
        many = self.many
        if many is None:
            source = self.source
            reader: ClipReader | ManyReader = self.rings[0].reader
            if source.disk.volatile:
                self.pins.check_copy(source.seq)
        else:
            self.check_open()
            reader = many
        if cut.computed or many is not None:  # it may draw
            self._draw_apart()
        newest = max(0, highest(ids)) if len(ids) else 0
        if newest >= PINNED:
            return self.anchors_at(ids - PINNED, cut)
        pinned = self.pins.of(self.members, reader, cut)
        ids = np.where(ids < 0, ids + pinned.count, ids)
        if newest >= pinned.count:
            # The state here may be older than that of the process that drew the ids.
            self.refresh()
            pinned = self.pins.of(self.members, reader, cut)
        found: Array = reader.place(ids + pinned.base, pinned, cut)
        return found

    def count(self, cut: Cut, shared: bool = True) -> int:
        """Return how many clips of a cut exist, as `pin` has them."""
        return self.pin(cut, shared).count

    @property
    def holds_episodes(self) -> bool:
        """Whether its clips are steps of episodes, not transitions."""
        return self.transitions is None

    @property
    def schema(self) -> Schema | None:
        """The columns, once an episode was stored or a schema was given."""
        if self.fleet is None:
            return self.source.schema
        self.check_open()
        return self.fleet.schema

    def layout(self, cut: Cut, size: int) -> Layout:
        """Return the shape and dtype of the columns of a batch; of computed ones, once they were computed here."""
        schema = self.schema
        if schema is None:
            return {}
        if self.fleet is None:
            return self.rings[0].reader.layout(cut, schema, size)
        assert self.many is not None
        return self.many.layout(cut, schema, size)

    def anchors_at(self, positions: Array, cut: Cut) -> Array:
        """Return the positions; GONE for one that is no anchor of the cut now.

        Such a position is beyond what is stored, or comes from a pass of shorter clips: the steps around it would reach
        into another episode.
        """
        if self.many is not None:
            self.check_open()
            return self.many.anchors_at(positions, cut)
        source = self.source
        if source.rows is None or (len(positions) and positions.max() + cut.after >= source.head):
            self.refresh()
        return self.rings[0].reader.anchors_at(positions, cut)

    def replaced(self, positions: Array, cut: Cut, redraw: Redraw | None = None) -> Array:
        """Return the positions, with another clip in place of each that is GONE; see `ClipReader.replaced`.

        Raises:
            NoClipsError: no clip is left to draw.
        """
        if len(positions) and lowest(positions) == GONE:
            self._draw_apart()
            if self.many is None:
                self.source.refresh()  # they are drawn from the newest state
            else:
                self.many.follow()
        reader = self.many or self.rings[0].reader
        return reader.replaced(positions, cut, redraw)

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
        """Return the clips with these anchors, column -> `(B, ...)`; `positions` shows which were redrawn.

        Args:
            positions: int64 `(B,)`.
            cut: what the clips hold.
            out: column -> array to fill.
            asked: whether the disk was already asked for them.
            crossing: as `draw` returned it with these positions, for this cut; None: it is looked up.
            redraw: draws in place of evicted clips; None: uniformly from all that are stored.
            numbers: of the episodes, from `numbering`; None: the caller does not need them.

        Raises:
            NoClipsError: no clip is left to draw.
            LappedError: the writer overtook this reader for 5 s without progress.
        """
        reader, threads = self.many or self.rings[0].reader, self.threads or _threads_here()
        if self.many is not None and numbers is None:
            numbers = self.numbering(cut)
        try:
            batch = reader.at(positions, cut, out, threads, asked, crossing, redraw, numbers)
        except (OSError, ValueError, NoClipsError):
            self.check_open()  # if another thread closed it meanwhile, this says so
            with clear_reads(_WHERE, self.members.where):
                raise
        if thread.noted:
            end_noted()
        return batch

    def numbering(self, cut: Cut) -> EpisodeMoment | None:
        """Return what numbers the episodes of one batch, for `read`; None: no column says them, or a view numbers
        them."""
        if not cut.computed or cut.episode_numbers is not None:
            return None
        return EpisodeMoment(self._numbered)

    def _numbered(self) -> list[tuple[Handle, Callable[[Array], Array] | None]]:
        self.check_open()
        return [(ring.source, partial(joined, ring.number) if ring.number else None) for ring in self.rings]

    def names_in_batch(self, numbers: Array) -> Array | None:
        """Return the names of episodes, if all these numbers are in the batch that was handed out last, else None."""
        known, names = self.numbered
        if not len(known):
            return None
        at = np.minimum(known.searchsorted(numbers), len(known) - 1)
        return names[at] if np.array_equal(known[at], numbers) else None

    def hand_out(self, batch: Batch[Any]) -> None:
        """Note which episodes the numbers in a batch mean: it is handed out."""
        if batch.numbered is not None:
            self.numbered = batch.numbered

    def shown(self, batch: Batch[Any]) -> Batch[Any]:
        """Return a drawn batch of flat columns in the form that a caller sees."""
        columns = self.transitions
        return batch if columns is None else columns.public(batch)

    def want(self, positions: Array, cut: Cut) -> None:
        """Ask the disk for clips that are to be read soon, if that pays off."""
        (self.many or self.rings[0].reader).want(positions, cut)

    @property
    def num_threads(self) -> int:
        """Threads that copy a large batch in this process."""
        return self.threads or _threads_here()

    @property
    def has_lanes(self) -> bool:
        """Whether a lane is known of every stored episode."""
        self.check_open()
        return all(ring.has_lanes for ring in self.rings)

    @property
    def num_redraws(self) -> int:
        """Clips that this process redrew so far."""
        others = 0 if self.many is None else self.many.num_redraws
        return others + sum(ring.reader.num_redraws for ring in self.rings)

    # -- draws -------------------------------------------------------------------------------

    def look(self) -> None:
        """Move to the newest state, for a draw; in a worker, with the worker's own generator.

        Raises:
            RoleError: called by a signal handler, or a callable, in the middle of another call.
        """
        self.pins.clear()
        if self.many is None:
            source = self.source
            try:
                source.refresh()
            except OSError:
                self.source  # noqa: B018 - as in `read`
                raise
        else:
            self._follow(f"{_FLEET}.sample")
        self._begin_draw()

    def next_step(self, step: int | None = None) -> int:
        """Count a draw, and return the step for its sampler: `step`, or the counter, which advances."""
        self._draws += 1
        if step is None:
            step = self.counter
            self.counter += 1
        return step

    def draw(self, buffer: Any, size: int, cut: Cut, step: int | None = None) -> Drawn:
        """Draw `size` clips through the sampler.

        Args:
            buffer: what the sampler receives: its `num_valid_ends` and `clip_window` count the clips of this cut.
            size: number of clips.
            cut: what they hold.
            step: what the sampler receives; None: the counter, which advances.

        Raises:
            InputError, ClipIndexError: the sampler returned invalid ids.
            NoClipsError: no clip is stored.
        """
        self.look()
        step, sampler, many = self.next_step(step), self.sampler, self.many
        if many is not None:
            self._refuse_clips(cut)
        if sampler.given is None:
            drawn = (many or self.rings[0].reader).draw(size, cut, self.rng)
            if drawn is None:
                raise self._no_clips(cut)
            return drawn
        if many is None:
            positions, weigh = self._ask_positions(sampler, step, buffer, size, cut)
            return Drawn(positions, None, weigh)
        return self._draw_many(buffer, size, cut, step)

    def draw_among(self, view: Any, size: int, cut: Cut, step: int | None = None) -> Drawn:
        """Draw `size` clips of a view, as `draw` does; one that was evicted during the draw is replaced by another of
        the view.

        `view`: its `range` is the clips to draw from, of one ring; its `table` those of many.
        """
        self.look()
        step, sampler = self.next_step(step), self.sampler
        if self.many is not None:
            return self._draw_many(view, size, cut, step, view)
        clips: ClipRange | None = view.range()
        if clips is None or not clips.count:
            raise self._no_clips(cut, view)
        if sampler.given is None:
            ids, weigh = integers(self.rng, 0, clips.count, size), None
        else:
            ids, weigh = draw_with(sampler, step, view, size, cut.history or 1, f"{_WHERE}.sample")
            self._check_ids(ids, clips.count)
        drawn = _placed_among(clips, ids, cut, self.rng)
        if drawn is None:
            raise self._no_clips(cut, view)
        return Drawn(self.replaced(drawn.positions, cut, view.redraw), drawn.crossing, weigh)

    def _draw_many(self, buffer: Any, size: int, cut: Cut, step: int, view: Any = None) -> Drawn:
        """Draw clips of many rings, or of a view of these. No lock is held while a sampler draws, of one moment."""
        many, sampler, weigh, ids = self.many, self.sampler, None, None
        assert many is not None
        self._check_sampler(sampler)
        if self.priorities is not None:
            drawn = self.priorities.draw(size, cut, step, view)
            if drawn is None:
                raise self._no_clips(cut, view)
            return drawn
        while ids is None:
            moment = self.moment(cut, view)
            if not moment.count:
                raise self._no_clips(cut, view)
            if sampler.given is None:
                ids = integers(self.rng, 0, moment.count, size)
            else:
                ids, weigh = self._ask_ids(sampler, step, buffer, size, cut, moment, view)
        if sampler.by_age and len(moment.numbers) > 1:
            now = self.moment(cut, view)
            if not now.count:
                raise self._no_clips(cut, view)
            ids, moment = self._by_age(np.maximum(ids + (now.count - moment.count), 0), now), now
        with self.members.lock:
            table = self.table(cut, view)
        positions = many.place(ids, moment, cut, None if view is None else table)
        return Drawn(self.replaced(positions, cut, None if view is None else view.redraw), None, weigh)

    def _ask_ids(
        self, sampler: BaseSampler, step: int, buffer: Any, size: int, cut: Cut, moment: Moment, view: Any
    ) -> tuple[Array | None, Weigh | None]:
        """Return the ids that a sampler draws of a moment, and what weighs them; None: ask again in another moment."""
        before = self._drawing.moments
        try:
            self._drawing.moments = {(id(view), cut.anchors): moment}
            ids, weigh = draw_with(sampler, step, buffer, size, cut.history or 1, f"{_WHERE}.sample")
            self._check_ids(ids, moment.count)
        except (LookupError, ValueError):
            if not moment.is_outdated:
                raise
            return None, None
        finally:
            self._drawing.moments = before
        return ids, weigh

    @staticmethod
    def _check_ids(ids: Array, count: int) -> None:
        wrong = (ids < 0) | (ids >= count)
        if wrong.any():
            raise wrong_id(_WHERE, int(ids[wrong][0]), count)

    def _by_age(self, ids: Array, moment: Moment) -> Array:
        """Return the ids, ring by ring, of clips that a sampler names by their order in time."""
        clips, times = list[Clips](), self._times
        rings = [self.members.of(number) for number in moment.numbers]
        for ring, one, pinned in zip(rings, moment.ranges, moment.pinned, strict=True):
            if ring is None or one is None or pinned is None:
                continue
            known = times.get(ring.number)
            if known is None or known[0] is not ring:
                known = times[ring.number] = ring, CommitTimes(ring.source)
            clips.append(Clips(one.of_moment(pinned.base, pinned.end), known[1]))
        return in_order(ids, clips)

    def _ask_positions(
        self, sampler: BaseSampler, step: int, buffer: Any, size: int, cut: Cut
    ) -> tuple[Array, Weigh | None]:
        reader, history = self.rings[0].reader, cut.history or 1
        pinned = reader.pin(cut)
        if not pinned.count:
            raise self._no_clips(cut)
        try:
            ids, weigh = draw_with(sampler, step, buffer, size, history, f"{_WHERE}.sample")
            numbers = ids + pinned.base
        except (LookupError, ValueError) as error:
            if isinstance(error, RingmapError) or reader.pin(cut).count:
                raise
            # The clips were cleared during the draw: the sampler had nothing to draw from.
            raise self._no_clips(cut) from error
        # The sampler may have seen, and asked for, clips that were written meanwhile.
        newest = reader.pin(cut)
        wrong = (numbers < pinned.base) | (numbers >= newest.end)
        if wrong.any() and newest.numbering is pinned.numbering:
            raise wrong_id(_WHERE, int(numbers[wrong][0]) - pinned.base, newest.end - pinned.base)
        return self.replaced(reader.place(numbers, pinned, cut), cut), weigh

    def _no_clips(self, cut: Cut, view: Any = None) -> NoClipsError:
        why = self.why_no_clips(cut) if view is None else view.why_no_clips()
        return NoClipsError(f"{_WHERE if self.fleet is None else _FLEET}.sample: {why}")

    def why_no_clips(self, cut: Cut) -> str:
        """Return, in words, why no clip of this cut exists."""
        if self.fleet is not None:
            assert self.many is not None
            return self.many.why_no_clips(cut)
        source = self.source
        with thread.searching, source.lock:
            return cut.why_none(source.live.whole_lengths)

    def _draw_apart(self) -> None:
        """Give each worker its own draws: its copy of the buffer has the generator of the original."""
        info = worker()
        if info is not None and (self._draws_as is None or self._draws_as[0] != info.seed):
            seeds = np.random.SeedSequence([info.seed, self.seed_key])
            self._draws_as, self._begun = (info.seed, seeds), None
            self.rng = np.random.default_rng(seeds)
            for ring in self.rings:
                ring.reader.rng = self.rng
            if self.many is not None:
                self.many.rng = self.rng

    def _begin_draw(self) -> None:
        """Let the generator and the sampler of a worker draw apart from those of others."""
        self._draw_apart()
        if self._draws_as is not None and self._begun is not self.sampler:
            self.sampler.begin_in_worker(self._draws_as[1].spawn(1)[0])
            self._begun = self.sampler

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the sampling state (counter, generator, sampler state), to store with a checkpoint."""
        return self._state(self.sampler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue sampling from the state that `state_dict` returned.

        Raises:
            InputError: the state is not valid, or belongs to another sampler. Nothing was changed.
        """
        check_whole("load_state_dict", state, ("rng", "step"))
        self.check_open()  # a fork makes another generator
        rng = checked_rng(self.rng, state["rng"], _WHERE)
        step = count("load_state_dict", "step", state["step"])
        self._begin_draw()
        if "sampler" in state:
            self.sampler.load_state_dict(state["sampler"])
        self.rng.bit_generator.state = rng
        self.counter = step
        self._draws += 1

    def _state(self, kept: dict[str, Any] | None) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self.counter, "rng": self.rng.bit_generator.state}
        return state if kept is None else {**state, "sampler": kept}

    @contextlib.contextmanager
    def committing(self, notes: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any] | None]:
        """Yield the small state for a commit or a flush: the sampling state if it changed, and the notes added to the
        stored ones.

        The state counts as stored if the block raises no error. For a writer only.
        """
        draws, owned = self._draws, self.rings[0].source
        changed = draws != self._draws_stored
        small = {"sampling": self._state(self.sampler.small_state())} if changed else None
        if notes and isinstance(owned, Store):
            owned.recover_if_stale()
            small = {**(small or {}), "notes": {**owned.carried.get("notes", {}), **notes}}
        yield small
        if changed:
            self._draws_stored = draws
        if owned.disk.volatile:
            self.pins.tell_copies(owned.seq)

    def commit_pending(self, where: str) -> None:
        """Commit rows that only this handle shows yet, before something reads committed rows alone."""
        for ring in self.rings:
            source = ring.source
            if source.pending is not None and isinstance(source, Store) and self._pid == os.getpid():
                with self.committing() as small:
                    source.commit_pending(where, small)

    def before_fork(self) -> None:
        """Commit rows that only this handle shows yet: a child reads what is committed, and a DataLoader's workers are
        children."""
        self._commit_rest("forked with rows that the child will see later")

    def end_process(self) -> None:
        """Commit rows that only this handle shows yet: no thread does it after this process, only the next writer."""
        if self._pid == os.getpid() and self.owned.is_idle(_EXIT_S):
            self._commit_rest("the process ended with rows that others see once a writer opens the buffer")

    def _commit_rest(self, otherwise: str) -> None:
        """Commit rows that only this handle shows yet; if that fails, say what it means."""
        for ring in self.rings:
            source = ring.source
            if source.disk.volatile or self.is_closed or source.pending is None or not source.pending.count:
                continue
            try:
                self.commit_pending(_WHERE)
            except ReplacedError:  # nobody finds them any more
                pass
            except (OSError, RingmapError) as error:  # in the middle of a call of this thread, say
                log.warning("%s: %s: %s", source.folder, otherwise, error)

    def drop_chains(self, chains: Collection[int], where: str) -> None:
        """Drop episodes that were recorded in parts, by the positions of their first steps, durably. For a writer
        only."""
        self.writer(where).drop_chains(chains, where)

    def clear(self, where: str) -> None:
        """Drop every episode, in one commit."""
        store, stored = self.writer(where), self._draws_stored
        seq = store.seq
        with self.committing() as small:
            store.clear(small=small)
        if store.seq == seq:  # nothing was cleared, so there was no commit to carry the state
            self._draws_stored = stored

    def flush(self, where: str, notes: Mapping[str, Any] | None = None) -> None:
        """Force all stored data, and the small state, to the disk, or the priorities of a fleet; noted as `close` is.
        For a writer only, or a fleet."""
        if note_nested(partial(self.flush, where, notes)):
            return
        if self.fleet is not None:
            self.check_open()
            self.sampler.flush()
            return
        store = self.writer(where)
        self.sampler.flush()
        with self.committing(notes) as small:
            store.flush(small=small)

    def make_durable(self, where: str) -> None:
        """Flush, if durability is "power" and episodes were stored without a sync. For a writer only."""
        if self.writer(where).is_unsynced:
            self.flush(where)

    def remember(self, where: str, settings: Mapping[str, Any]) -> None:
        """Store settings in the manifest, with a flush. For a writer only."""
        store = self.writer(where)
        kept = {**(store.settings.remembered or {}), **settings}
        store.settings = replace(store.settings, remembered=kept)
        self.flush(where)

    def snapshot(
        self, path: str | os.PathLike[str], where: str, kept: Kept | None = None, ring: Ring | None = None
    ) -> None:
        """Copy a ring, the single one by default, to a directory, with the `kept` memory of sidecars other than
        priorities; see `ReplayBuffer.snapshot`."""
        from ringmap.storage.inspect.snapshot import snapshot  # here: an opening needs none of what this imports

        source = self.source if ring is None else ring.source
        own: Kept = {PriorityFile: lambda _: self.sampler.kept_priorities(), **(kept or {})}
        if not source.disk.volatile:
            own = {Marks: lambda state: marks_of_copy(source, state), **own}
        snapshot(source, self.disk, local_path(path), where, own)

    def close(self) -> None:
        """Flush, and release files and lock even if the flush raises; closing twice is allowed. In the middle of
        another call of the same thread it is noted, and done by that call.

        Raises:
            ReplacedError, SyncFailedError, EnvironmentFault: as `ReplayBuffer.close`.
        """
        if note_nested(self.close):
            return
        if self.fleet is not None:
            self._close_fleet(self.fleet)
            return
        source, mine = self.owned, self._pid == os.getpid()
        try:
            if isinstance(source, Store) and mine:
                try:
                    self.sampler.flush()
                finally:
                    with self.committing() as small:
                        source.close(small)
            elif source.is_open:
                source.close()
        finally:
            self.is_closed = self.is_closed or not source.is_open
            if self.is_closed and mine:
                self.sampler.close()

    def _close_fleet(self, fleet: Fleet) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self.sampler.flush()
        finally:
            fleet.close()
            self.sampler.close()
            if self.state is not None:
                self.state.close()

    # -- copies ------------------------------------------------------------------------------

    def to_send(self) -> dict[str, Any]:
        """Return what `received` builds a copy from: path and settings; for a ring in RAM, the stored episodes.

        Raises:
            InputError: the sampler is a lambda or a local function.
        """
        state = {
            "sampler": sendable(_WHERE, "sampler", self.sampler.given),
            "threads": self.threads,
            "loader_state": self.pins.loader_state,
            "seed_key": self.seed_key,
        }
        if self.fleet is not None:
            kept = None if self.state is None else self.state.path
            return {**state, "fleet": (type(self.fleet), self.fleet.to_send()), "weights": self.weights, "state": kept}
        owned = self.owned
        if not self.is_closed:
            self.commit_pending(_WHERE)  # what this handle shows, the copy shows, too
        if not isinstance(owned, Store) or not owned.disk.volatile:
            uuid = owned.manifest.uuid
            return {**state, "path": owned.folder, "mapped": owned.mapped, "uuid": uuid}
        self.source  # noqa: B018 - a closed one says so
        seq, newest, episodes = owned.seq, (owned.next_ordinal, owned.time), list[Any]()
        for ordinal in map(Ordinal, range(owned.live.first, owned.live.last)):
            found = owned.read_record(owned.live_record(ordinal))
            if found is None:  # another thread evicted it, and all before it too
                episodes.clear()
            else:
                episodes.append(found)
        return {
            **state,
            "max_steps": owned.manifest.max_steps,
            "spare": owned.manifest.spare if owned.rows is None else owned.rows.ring.spare,
            "settings": owned.settings,
            "schema": owned.schema,
            "born": owned.manifest.born,
            "lineage": owned.manifest.lineage,
            "newest": newest,
            "seq": seq,
            "begin": episodes[0][2].start if episodes else owned.head,
            "episodes": [
                (steps, data, record.flags, PartOf.of(record), _counted(record)) for steps, data, record in episodes
            ],
            "ends": _ends_of(owned),
            "sampling": self.state_dict() if self.sampler.given is None else None,
        }

    @classmethod
    def received(cls, state: Mapping[str, Any]) -> Engine:
        """Return an engine of this process from what another process sent."""
        if "fleet" in state:
            kept = None if state["state"] is None else LearnerState(state["state"], False, DISK)
            kind, fleet = state["fleet"]
            engine = cls(kind.received(fleet), state["sampler"], weights=state["weights"], state=kept)
        elif "path" in state:
            source = Reader(DISK, state["path"], mapped=state["mapped"], uuid=state["uuid"])
            engine = cls(source, state["sampler"])
        else:
            engine = cls(_stored_in_ram(state), state["sampler"])
            if state["sampling"] is not None:
                engine.load_state_dict(state["sampling"])
            engine.pins.copied = state["seq"]
        engine.threads, engine.seed_key = state["threads"], state["seed_key"]
        engine.pins.loader_state = state["loader_state"] or engine.pins.loader_state
        return engine

    def __reduce__(self) -> Any:
        return Engine.received, (self.to_send(),)


def _placed_among(clips: ClipRange, ids: Array, cut: Cut, rng: np.random.Generator) -> Drawn | None:
    """Return the clips of a view that were drawn by their ids, GONE for one that was evicted since; None if none is
    left.

    `clips`: of the view, when they were drawn.
    """
    with thread.searching, clips.lock:
        numbers = ids + clips.base
        gone = numbers < clips.index.base
        drawn = clips.index.drawn(numbers[~gone], cut.before, rng, cut.around)
    if drawn is None or not gone.any():
        return drawn
    positions = np.full(len(ids), GONE)
    positions[~gone] = drawn.positions
    return Drawn(positions)


def _at_place(error: Callable[[int], Exception], places: Array, place: int) -> Exception:
    return error(int(places[place]))


def _stored_in_ram(state: Mapping[str, Any]) -> Store:
    steps, spare, schema = state["max_steps"], state["spare"], state["schema"]
    store = Store.create(
        MemoryDisk(),
        "RAM",
        steps,
        spare,
        state["settings"],
        schema,
        state["born"],
        state["lineage"],
    )
    store.head = store.tail = state["begin"]  # positions have the same meaning in every copy
    for columns, data, flags, part, counted in state["episodes"]:
        store.next_ordinal, store.time = counted
        one = NewRecord(len(columns[0]), encode_data(data, _WHERE), flags, part)
        store.commit(Commit([one], _WHERE, schema, columns))
    for part, flags, data in state["ends"]:
        store.commit(Commit.of_end(part, flags, _WHERE, encode_data(data, _WHERE)))
    store.next_ordinal, store.time = state["newest"]
    return store


def _counted(record: Record) -> tuple[int, int]:
    """Return the next ordinal before an episode was stored, and the time when it was."""
    is_later = record.part & PART and record.chain != record.start
    return record.next_ordinal if is_later else record.ordinal, record.time


def _ends_of(store: Store) -> list[tuple[PartOf, int, dict[str, Any]]]:
    """Return what records without rows say of the ends of live chains: the part that would come next, flags and
    data."""
    chains, found = store.live.links, list[tuple[PartOf, int, dict[str, Any]]]()
    for seq in () if chains is None else chains.ended.values():
        record = store.table.read(seq)
        part = None if record is None else PartOf.of(record)
        if record is not None and part is not None and not record.length:
            found.append((part, record.flags, store.data_of(record)))
    return found


def wrong_id(where: str, number: int, count: int) -> ClipIndexError:
    """Return the error of a sampler that names a clip that does not exist; `count`: how many do."""
    return ClipIndexError(f"{where}.sample: the sampler returned id {number}, which is out of range for {count} clips")


class _NoSampler(BaseSampler):
    """The sampler of an engine without one: the engine's generator draws."""

    given = None

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        return uniform(buffer.engine.rng, buffer, batch_size, history_len)


NO_SAMPLER = _NoSampler()


@functools.lru_cache(maxsize=1)
def _threads_of(pid: int) -> int:
    info = worker()
    return max(1, cores() // (1 if info is None else info.num_workers))


def _threads_here() -> int:
    """Return the number of threads that gather in this process: workers share the cores."""
    return _threads_of(os.getpid())
