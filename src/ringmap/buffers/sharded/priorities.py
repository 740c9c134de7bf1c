"""Priorities over many rings: a sum tree for each ring, and the sums of all of them; and the directory that keeps them.

    mass in [0, total)  ->  ends of the rings' masses  ->  ring, rest  ->  its sum tree  ->  position
                            [ ring 0 | ring 1 | ... ]

    update_priorities(ids, values)  ->  ring, position  ->  its tree and its file

    runs/learner/lock                      one learner at a time
    runs/learner/boot                      the boot id of the priorities
    runs/learner/UUID/priorities.bin       of the ring with this uuid

Invariants: a clip's chance is its mass over the masses of all rings; a tree follows the evictions of its own ring; a
new clip has the highest priority that a clip of any ring ever had; only the process that holds the lock writes;
priorities of rows that a power cut may have taken are dropped.
Not here: a tree and what follows a ring (clips/samplers/prioritized.py), the bytes of a file (storage/sidecars).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.buffers.rings import Ring, apart, joined
from ringmap.buffers.sharded.clip_table import ClipTable
from ringmap.buffers.sharded.reader import ManyReader
from ringmap.clips.cut import Cut
from ringmap.clips.draws import Drawn
from ringmap.clips.rings import groups
from ringmap.clips.samplers.base import BaseSampler
from ringmap.clips.samplers.prioritized import PrioritizedSampler, checked_priorities
from ringmap.errors import EnvironmentFault, InputError, LockedError
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import Paths
from ringmap.storage.disk.system import clear_errors
from ringmap.storage.read.handle import Handle
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.priorities import PriorityFile

__all__ = ["FleetPriorities", "LearnerState"]


Array = np.ndarray[Any, np.dtype[Any]]

_WHERE = "ShardedReplayBuffer"
_ONE_STEP = Cut.clip(1)


class FleetPriorities(BaseSampler):
    """A `PrioritizedSampler` over the rings of a `ShardedReplayBuffer`.

    Args:
        given: its options and generator.
        many: reads the rings.
        state: keeps the priorities; None: in memory, beginning with those that each ring's own writer stored.

    Cost: a draw of B clips O(B log rows), and about 30 us for each ring that it touches; an update as many, and a write
    for each
        ring. A ring without commits since the last draw costs nothing. A draw of other windows than the last one
        O(rows).

    Processes and threads: takes the lock of `members`.
    """

    has_priorities = True

    def __init__(self, given: PrioritizedSampler, many: ManyReader, state: LearnerState | None) -> None:
        self._given, self._many, self._members, self._state = given, many, many.rings, state
        given.stand_for(self)
        self._trees: dict[int, PrioritizedSampler] = {}  # by ring number
        self._restored: dict[str, Any] = {}  # by uuid
        self._highest = 1.0
        self._forget()

    def _forget(self) -> None:
        self._table: ClipTable | None = None
        """Of the last draw."""
        self._cut = _ONE_STEP
        self._seen, self._masses = np.empty(0, np.int64), np.empty(0)

    @property
    def given(self) -> PrioritizedSampler:
        """The sampler that the user gave."""
        return self._given

    def check_kind(self) -> None:
        """Raise unless it can draw from many rings."""
        if self._given.kind != "proportional":
            raise InputError(
                f"{_WHERE}: PrioritizedSampler(kind={self._given.kind!r}) can't span rings, since no ring knows the "
                "ranks in the others; use kind='proportional'"
            )

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Raise: the engine draws."""
        raise InputError(f"{_WHERE}: a PrioritizedSampler draws by sample(), not for {buffer!r}")

    def begin_in_worker(self, seeds: np.random.SeedSequence) -> None:
        """Draw from these seeds from now on; see `PrioritizedSampler.begin_in_worker`."""
        self._given.begin_in_worker(seeds)

    def _tree_of(self, ring: Ring) -> PrioritizedSampler:
        tree = self._trees.get(ring.number)
        if tree is None:
            state = self._state
            tree = self._given.for_ring(None if state is None else state.keeper)
            kept = self._restored.pop(ring.uuid.hex(), None)
            if kept is not None:
                tree.load_state_dict(kept)
            self._trees[ring.number] = tree
        return tree

    def _follow(self, cut: Cut, view: Any = None) -> ClipTable:
        """Bring the trees of rings that changed up to date, with all clips or those of a view. Holds the lock."""
        table = self._many.table(cut) if view is None else view.table(self._members)
        if table is not self._table or cut.anchors != self._cut.anchors:
            for ring in table.rings:  # all are loaded before a new clip gets the highest priority
                tree = self._tree_of(ring)
                tree.attach(ring.source)
                self._highest = max(self._highest, tree.highest)
            self._table, self._cut = table, cut
            self._seen, self._masses = np.full(len(table.rings), -1, np.int64), np.zeros(len(table.rings))
        for place in (self._seen != table.changes).nonzero()[0].tolist():
            clips, tree = table.ranges[place], self._trees[table.rings[place].number]
            self._masses[place] = 0.0 if clips is None else tree.mass_of(clips, self._highest)
        self._seen[:] = table.changes
        return table

    def draw(self, size: int, cut: Cut, step: int, view: Any = None) -> Drawn | None:
        """Return `size` clips of all rings, or of a view, by their ids; None when there are none."""
        with self._members.lock:
            table = self._follow(cut, view)
            ends = self._masses.cumsum()
            if not len(ends) or not ends[-1] > 0:
                return None
            total = float(ends[-1])
            masses = np.minimum(self._given.rng.random(size) * total, np.nextafter(total, 0.0))
            which = ends.searchsorted(masses, side="right")
            rest = masses - np.where(which > 0, ends[which - 1], 0.0)
            ids, found = np.empty(size, np.int64), np.empty(size)
            for place, at in groups(which):
                ring = table.rings[place]
                positions, found[at] = self._trees[ring.number].at(rest[at])
                ids[at] = joined(ring.number, positions)
            odds = int(table.counts.sum()) * (found / total)
        return Drawn(ids, weigh=self._given.weigher(ids.copy(), odds, step))  # without the lock: beta may be a callable

    def mass(self, cut: Cut) -> float:
        """Return the mass of all clips that exist now, as `draw` would find it: their chance against those of other
        buffers."""
        with self._members.lock:
            self._follow(cut)
            return float(self._masses.sum())

    def masses(self, ids: Array) -> Array:
        """Return the mass of each clip, as of the last draw; of one that is gone, and was drawn again uniformly, the
        mean of all."""
        with self._members.lock:
            found = np.full(
                len(ids), self._masses.sum() / max(1, 0 if self._table is None else self._table.counts.sum())
            )
            numbers, positions = apart(ids)
            for number, at in groups(numbers):
                tree = self._trees.get(number)
                if tree is not None:
                    masses = tree.masses(positions[at])
                    found[at] = np.where(masses > 0, masses, found[at])
        return found

    def update_priorities(self, ids: Any, values: Any) -> int:
        """Set the priorities of clips, and store them; return the number updated: those evicted, or whose ring left,
        are skipped.
        """
        where = f"{_WHERE}.update_priorities"
        places, priorities = checked_priorities(where, ids, values)
        with self._members.lock:
            table, done = self._table, 0
            if table is None:
                raise InputError(f"{where}: no clip was drawn with this sampler yet")
            numbers, local = apart(places)
            known = {ring.number: place for place, ring in enumerate(table.rings)}
            for number, at in groups(numbers):
                place, tree = known.get(number), self._trees.get(number)
                if place is None or tree is None or self._members.of(number) is not table.rings[place]:
                    continue
                clips = table.ranges[place] or table.rings[place].reader.window(self._cut)
                done += tree.put(clips, local[at], priorities[at])
                self._highest = max(self._highest, tree.highest)
                self._seen[place] = -1
        return done

    def drop(self, number: int) -> None:
        """Forget the priorities of a ring that was removed."""
        tree = self._trees.pop(number, None)
        if tree is not None:
            tree.close()

    # -- state -------------------------------------------------------------------------------

    def small_state(self) -> dict[str, Any]:
        """Return the state of the generator."""
        return self._given.small_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, with the priorities of each ring by its uuid. O(rows)."""
        with self._members.lock:
            uuids = self._members.uuids
            rings = {uuids[number].hex(): tree.state_dict() for number, tree in self._trees.items()}
            return {**self._given.small_state(), "rings": {**self._restored, **rings}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned: clips that are still live get their priorities back."""
        with self._members.lock:
            self._given.check_state_dict(state)
            rings = state.get("rings", {})
            if not isinstance(rings, Mapping):
                raise InputError(
                    f"{_WHERE}.load_state_dict: rings must be the states of rings by name, got {rings!r}; nothing was "
                    "changed"
                )
            for kept in rings.values():
                self._given.check_state_dict(kept)
            self._given.load_small_state(state)
            self._restored = dict(rings)
            for ring in self._members.open:
                kept = self._restored.pop(ring.uuid.hex(), None)
                if kept is not None:
                    self._tree_of(ring).load_state_dict(kept)
            self._forget()

    def flush(self) -> None:
        """Force the priorities to the disk."""
        with self._members.lock:
            for tree in self._trees.values():
                tree.flush()

    def close(self) -> None:
        """Close the files."""
        with self._members.lock:
            for tree in self._trees.values():
                tree.close()
            self._trees.clear()
            self._forget()

    def check(self) -> list[str]:
        """Return violated invariants, in words; empty when sound. O(rows)."""
        with self._members.lock:
            return [fault for tree in self._trees.values() for fault in tree.check()]


_LOCK, _BOOT = "lock", "boot"
_BOOT_MOST = 4096


class LearnerState:
    """An open directory of a learner.

    Args:
        path: the directory; made if it is not there.
        write: whether to take its lock and write; a copy in another process only reads.
        disk: through which it is written; None: the file system.

    Raises:
        InputError: the path is a ring.
        LockedError: another learner holds it.
        EnvironmentFault: it lies on a network file system, or can't be written to.
    """

    def __init__(self, path: str, write: bool, disk: Disk | None = None) -> None:
        self.path = path
        self.disk = Disk() if disk is None else disk
        self._pid = os.getpid()
        self._lock: WriterLock | None = None
        if not write:
            return
        if os.path.lexists(Paths(path).manifest):
            raise InputError(f"{_WHERE}: state={path} is a ring; give a directory of the learner's own")
        with clear_errors(_WHERE, path):
            make_folder(self.disk, path)
        if self.disk.system.is_network(path):
            raise EnvironmentFault(
                f"{_WHERE}: state={path} lies on a network file system, whose locks are not ours; give one on a local "
                "disk"
            )
        lock = WriterLock(self.disk, os.path.join(path, _LOCK), path)
        try:
            lock.acquire()
        except LockedError:
            raise LockedError(
                f"{_WHERE}: state={path} is held by {describe(holder_of(lock.path))}; give each learner its own, or "
                "close the other one"
            ) from None
        self._lock = lock
        try:
            with clear_errors(_WHERE, path):
                self._drop_after_a_reboot()
        except BaseException:
            self.close()
            raise

    def _drop_after_a_reboot(self) -> None:
        """Drop the priorities of another boot, with which a ring may have lost rows, and reused their positions."""
        boot, at = self.disk.boot_id() or b"", os.path.join(self.path, _BOOT)
        known = self.disk.read_file(at, _BOOT_MOST) if self.disk.exists(at) else None
        if known == boot:
            return
        for name in self.disk.names(self.path) if known is not None else ():
            self.drop(name)
        self.disk.put(at, at + ".tmp", boot, synced=True)

    def drop(self, uuid: str) -> None:
        """Remove what is kept of a ring, by its uuid in hexadecimal; nothing for another name."""
        folder = os.path.join(self.path, uuid)
        if self.is_writable and len(uuid) == 32 and self.disk.is_folder(folder):
            for name in (*PriorityFile.names, *PriorityFile.temporary):
                self.disk.discard(os.path.join(folder, name))

    @property
    def is_writable(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None and self._pid == os.getpid()

    def home(self, source: Handle) -> Home:
        """Return where sidecars of a ring lie here; the directory may not be there."""
        uuid = source.manifest.uuid
        folder = os.path.join(self.path, uuid.hex())
        return Home(self.disk, folder, uuid, source.home.rows, source.schema)

    def keeper(self, source: Handle) -> _Keeper:
        """Return what keeps the priorities of a ring."""
        home = self.home(source)
        if self.is_writable:
            with clear_errors(_WHERE, home.folder):
                make_folder(self.disk, home.folder)
        return _Keeper(self, source, home)

    def close(self) -> None:
        """Release the lock; a forked child leaves it to its parent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            if self._pid == os.getpid():
                lock.release()
            else:
                lock.drop_in_child()


@dataclass(frozen=True, slots=True)
class _Keeper:
    """A ring as `StoredPriorities` sees it: its rows, and the directory of the learner."""

    state: LearnerState
    source: Handle
    home: Home

    @property
    def head(self) -> int:
        return self.source.head

    @property
    def writable(self) -> bool:
        return self.state.is_writable

    @property
    def is_open(self) -> bool:
        return self.state.is_writable
