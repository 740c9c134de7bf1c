"""Transitions of many lanes, each observation stored once.

    add:    lane 0 1 2 | 0 1 2 | 0 1 2        one commit for each call, row i is lane i
    rows:   [o r d ..  | o r d | o r d]
                   \\_______/ the next observation of a lane is its following row

Where a lane's observation is not bit for bit what its last step led to (an episode ended, an environment was
reset), the row is marked as fresh, and what that step had led to is stored with the commit, as its episode data. What the newest
rows lead to stands in a file beside the columns until the next call (storage/successors.py).

    column lanes: N for a row that continues its lane, -N for a fresh one; N rows came with the call

Invariants: what `add` returned from is stored whole; a transition is handed out with the next observation that it
came with, whatever came after it; at most `capacity` transitions count, the newest ones.
Not here: rows and commits (storage/), nested names (leaves.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ringmap.buffers.handout import HandOut, check_device
from ringmap.buffers.nested import Leaves, as_array, dtype_of
from ringmap.buffers.options import positive
from ringmap.buffers.replay import ReplayBuffer
from ringmap.clips.samplers.base import Sampler
from ringmap.clips.window import Window
from ringmap.errors import ClipIndexError, CorruptError, EnvironmentFault, InputError, LappedError
from ringmap.storage.birth import Paths, examine, read_manifest
from ringmap.storage.blobs import encode_data
from ringmap.storage.casting import cast
from ringmap.storage.files import Disk
from ringmap.storage.schema import ColumnSpec, Schema
from ringmap.storage.source import Source
from ringmap.storage.successors import Successors

__all__ = ["TransitionReplayBuffer"]

Array = np.ndarray[Any, np.dtype[Any]]

_TRIES = 10
_ROOM_LEAST = 256
"""Rows beyond the capacity, and spare rows: calls of up to as many lanes are stored in one step and evicted row by row."""

_KEPT_NBYTES = 64 << 20
"""Next observations that are no rows, kept in memory after they were read."""

_OBS, _CRITIC = "observations", "critic_observations"
_TAIL = (
    ColumnSpec("rewards", (), np.dtype("<f4")),
    ColumnSpec("dones", (), np.dtype("?")),
    ColumnSpec("truncated", (), np.dtype("?")),
    ColumnSpec("lanes", (), np.dtype("<i4")),
)


class TransitionReplayBuffer:
    """A ring of transitions `(s, a, r, s', done)` for DQN, SAC and their kin.

    Args:
        capacity: transitions; the oldest ones are overwritten.
        obs_shape: of an observation: a shape, a nested mapping name -> shape or (shape, dtype), or a Gymnasium space.
        action_shape: of an action, or a Gymnasium space; `()` for one index.
        device: where batches go as tensors; None: NumPy arrays.
        obs_dtype: of observation leaves that name none.
        action_dtype: of actions.
        critic_obs_shape: of a second observation that only the critic sees; None for none.
        n_step: rewards summed up, discounted, per transition.
        gamma: the discount of these sums.
        path: directory of the buffer; None for RAM. One that is there already is opened with all it holds.
        sampler: `fn(step, buffer, batch_size, history_len) -> ids`, such as `PrioritizedSampler`; None draws uniformly.
        seed: of the buffer's own generator. Counts when the buffer is made.
        pin_memory: whether batches go to the device by way of page-locked memory.
        storage: how columns are stored, as for `ReplayBuffer`.
        durability: "process" or "power", as for `ReplayBuffer`.
        sync_every_s: seconds between background syncs.

    Raises:
        InputError: an argument is wrong, or contradicts what is fixed on disk.
        LockedError, CorruptError, EnvironmentFault: as for `ReplayBuffer`.

    Lanes: `len` is exact for calls of up to `max(256, capacity // 64)` lanes. A call of more is evicted whole, so that up to as
        many transitions as it has are missing from a full buffer.

    Cost: `add` is one commit, whatever N; observations are stored once. About 0.6 KB of the directory for each call comes on top
        of the rows: one call with many lanes takes less than many with one.

    Processes and threads: as for `ReplayBuffer`: one writer, any number of live readers (`open(path)`); a copy that was
        pickled or forked reads.

    Source: ApexRL, Buffers.

    Example:
        >>> buf = TransitionReplayBuffer(capacity=100, obs_shape=(4,), device=None, seed=0)
        >>> for t in range(6):
        ...     buf.add(np.full(4, t), action := 1, 0.5, np.full(4, t + 1), t == 5)
        >>> batch = buf.sample(3)
        >>> {name: values.shape for name, values in batch.items()}
        {'observations': (3, 4), 'actions': (3,), 'rewards': (3,), 'next_observations': (3, 4), 'dones': (3,)}
        >>> bool((batch["next_observations"] == batch["observations"] + 1).all())
        True
    """

    disk: ClassVar[Disk] = ReplayBuffer.disk

    def __init__(
        self, capacity: int, obs_shape: Any, action_shape: Any = (), device: Any = "cpu", obs_dtype: Any = np.float32,
        action_dtype: Any = np.int64, critic_obs_shape: Any = None, *, n_step: int = 1, gamma: float = 0.99,
        path: str | os.PathLike[str] | None = None, sampler: Sampler | None = None, seed: int | None = None,
        pin_memory: bool = False, storage: Any = "memmap", durability: str = "process", sync_every_s: float = 30.0,
    ) -> None:  # fmt: skip
        where = type(self).__name__
        positive(where, "capacity", capacity)
        leaves = [Leaves.parse(_OBS, obs_shape, obs_dtype, where)]
        if critic_obs_shape is not None:
            leaves.append(Leaves.parse(_CRITIC, critic_obs_shape, obs_dtype, where))
        action = Leaves.parse("actions", action_shape, dtype_of(action_dtype, where), where)
        if action.is_nested:
            raise InputError(f"{where}: action_shape: expected one shape, got a mapping")
        schema = Schema((*(c for one in leaves for c in one.columns), *action.columns, *_TAIL))
        room = min(int(capacity), max(_ROOM_LEAST, int(capacity) // 64))
        self._check_disk(path, int(capacity), schema, where)
        made = _Ring if path is None else _ring_on(self.disk)
        ring = made(
            int(capacity) + room, path=path, storage=storage, schema=schema, durability=durability, seed=seed,
            sampler=sampler, spare_rows=room, sync_every_s=sync_every_s,
        )  # fmt: skip
        self._begin(ring, n_step, gamma, device, pin_memory)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], mode: str = "r", *, device: Any = "cpu", n_step: int = 1,
        gamma: float = 0.99, pin_memory: bool = False, **options: Any,
    ) -> TransitionReplayBuffer:  # fmt: skip
        """Open the buffer at `path`: "r" for a live reader, "r+" for the writer.

        Args:
            path: its directory.
            mode: "r" or "r+".
            device: as for the constructor.
            n_step: as for the constructor.
            gamma: as for the constructor.
            pin_memory: as for the constructor.
            options: sampler, seed (of a reader's generator), durability, sync_every_s, reads, as for `ReplayBuffer.open`.

        Raises:
            UnknownFormatError: it holds something else.
        """
        ring = _ring_on(cls.disk).open(path, mode, **options)
        buffer = cls.__new__(cls)
        names = ring._owned.manifest.schema.names if ring._owned.manifest.schema else []
        if names[-4:] != [spec.name for spec in _TAIL]:
            ring.close()
            raise InputError(
                f"{cls.__name__}.open: {os.fspath(path)} holds no transitions, but columns {names}; open it with ReplayBuffer"
            )
        buffer._begin(ring, n_step, gamma, device, pin_memory)
        return buffer

    def _check_disk(
        self, path: str | os.PathLike[str] | None, capacity: int, schema: Schema, where: str
    ) -> None:
        """Say in the words of this class what disagrees with the disk."""
        if path is None or examine(self.disk, os.path.abspath(path)) != "buffer":
            return
        fixed = read_manifest(self.disk, os.path.abspath(path))
        found = fixed.max_steps - fixed.spare
        if fixed.schema is not None and fixed.schema == schema and found != capacity:
            raise InputError(
                f"{where}: capacity={capacity}, but the buffer on disk has capacity={found}; there is no resize: open it "
                f"with {where}.open, or make a new one"
            )

    def _begin(self, ring: ReplayBuffer, n_step: int, gamma: float, device: Any, pin: bool) -> None:
        where = type(self).__name__
        try:
            positive(where, "n_step", n_step)
            if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma <= 1:
                raise InputError(f"{where}: gamma must lie in [0, 1], got {gamma!r}")
            self.device = check_device(device, where)
        except InputError:
            ring.close()
            raise
        self.n_step, self.gamma, self.pin_memory = int(n_step), float(gamma), bool(pin)
        self._set_up(ring)

    def _set_up(self, ring: ReplayBuffer) -> None:
        self._ring = ring
        manifest = ring._owned.manifest
        schema = manifest.schema
        assert schema is not None
        self._schema = schema
        self.capacity = manifest.max_steps - manifest.spare
        self._trees = [
            Leaves(prefix, columns)
            for prefix in (_OBS, _CRITIC)
            if (columns := tuple(c for c in schema.columns if c.name.split("/")[0] == prefix))
        ]
        self._action = next(c for c in schema.columns if c.name == "actions")
        self._obs_names = [name for tree in self._trees for name in tree.names]
        paths = Paths(ring._owned.folder)
        self._successors = Successors(ring._owned.disk, paths.successors, manifest.uuid)
        self._lock = threading.RLock()
        self._pending: dict[str, Array] | None = None
        self._pending_head = -1
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._kept_nbytes = 0
        self._span = ring._clip_reader.index

    # -- writing -----------------------------------------------------------------------------

    def add(
        self, observations: Any, actions: Any, rewards: Any, next_observations: Any, dones: Any,
        critic_observations: Any = None, next_critic_observations: Any = None, *, truncated: Any = None,
    ) -> None:  # fmt: skip
        """Store one step, or a batch of N of them, row i of each batch being lane i.

        Args:
            observations: `(*obs_shape)` or `(N, *obs_shape)`, nested as `obs_shape` is; arrays or tensors.
            actions: `(N, *action_shape)`.
            rewards: `(N,)`.
            next_observations: what the step led to: at the end of an episode its last observation, not the first
                of the next one.
            dones: `(N,)` terminated: it alone stops bootstrapping.
            critic_observations: if `critic_obs_shape` was given.
            next_critic_observations: likewise.
            truncated: `(N,)`: the episode was cut off here; n-step sums stop, bootstrapping goes on.

        Raises:
            InputError: shapes that differ, a value that a dtype can't hold, N beyond the capacity. Nothing was changed.
            ReadOnlyError, ClosedError: this handle may not write.
            EnvironmentFault: the disk is full or fails. Nothing was changed.

        Cost: one commit and two small writes, about 100 us; O(N).
        """
        where = f"{type(self).__name__}.add"
        store = self._ring._writer(where)
        rows, after = self._observed(
            observations, next_observations, critic_observations, next_critic_observations, where
        )
        count = len(next(iter(rows.values())))
        if not count:
            return
        if count > self.capacity:
            raise InputError(
                f"{where}: {count} transitions exceed capacity={self.capacity}; raise capacity or add fewer at a time"
            )
        rows["actions"] = _rows(actions, self._action, count, where)
        given = {
            "rewards": rewards,
            "dones": dones,
            "truncated": False if truncated is None else truncated,
        }
        for spec in _TAIL[:3]:
            value = given[spec.name]
            if spec.name == "truncated" and truncated is None:
                value = np.zeros(count, np.bool_)
            rows[spec.name] = _rows(value, spec, count, where)
        with self._lock:
            store.settle()
            before = self._known_successors(store)
            fresh, extras = self._continued(rows, before, count)
            rows["lanes"] = np.where(fresh, -count, count).astype(np.int32)
            try:
                self._successors.write(store.head + count, after)
                if store.power:
                    self._successors.sync()
            except OSError as error:
                raise EnvironmentFault(
                    error.errno,
                    f"{where}: {error.strerror or error} ({error.filename or store.folder}); nothing was stored by this "
                    "call; free space or mend the disk, then call it again",
                ) from error
            data = encode_data(extras, where) if extras else b""
            with self._ring._sampling() as small:
                arrays = [rows[name] for name in self._schema.names]
                store.commit(self._schema, arrays, data, 0, where=where, small=small)
            self._successors.turn()  # first: an interrupt from here on is noticed by the head
            self._pending = {name: np.array(values) for name, values in after.items()}
            self._pending_head = store.head

    def _observed(
        self, now: Any, after: Any, critic: Any, critic_after: Any, where: str
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the leaves of both observations, cast and checked against each other."""
        pairs = [(now, after), (critic, critic_after)]
        if len(self._trees) == 1 and (critic is not None or critic_after is not None):
            raise InputError(f"{where}: critic observations, but critic_obs_shape was not given")
        rows: dict[str, Array] = {}
        later: dict[str, Array] = {}
        for tree, (one, other) in zip(self._trees, pairs, strict=False):
            if one is None or other is None:
                raise InputError(f"{where}: {tree.prefix} and next_{tree.prefix} are both needed")
            rows |= tree.rows(one, where)
            later |= tree.rows(other, where)
        sizes = {name: len(values) for name, values in rows.items()}
        sizes |= {f"next_{name}": len(values) for name, values in later.items()}
        if len({*sizes.values()}) > 1:
            raise InputError(f"{where}: expected as many rows of each, got {sizes}")
        return rows, later

    def _known_successors(self, store: Source) -> dict[str, Array] | None:
        """Return what the newest rows lead to, as of what is committed; None when nothing is, or it was lost."""
        if not store.seq or not len(store.live):
            self._pending = None
        elif self._pending is None or self._pending_head != store.head:
            self._pending = self._successors.find(store.head)
        self._pending_head = store.head
        return self._pending

    def _continued(
        self, rows: Mapping[str, Array], before: Mapping[str, Array] | None, count: int
    ) -> tuple[Array, dict[str, Array]]:
        """Return which lanes do not go on where they were, and what those had led to, to be stored apart."""
        if before is None:
            return np.ones(count, np.bool_), {}
        lanes = len(next(iter(before.values())))
        if lanes != count:
            return np.ones(count, np.bool_), {"lanes": np.arange(lanes, dtype=np.int32), **before}
        fresh = np.zeros(count, np.bool_)
        for name in self._obs_names:
            now, then = rows[name].reshape(count, -1), before[name].reshape(count, -1)
            fresh |= (now.view(np.uint8) != then.view(np.uint8)).any(axis=1)
        if not fresh.any():
            return fresh, {}
        left = np.flatnonzero(fresh)
        return fresh, {"lanes": left.astype(np.int32), **{n: v[left] for n, v in before.items()}}

    def clear(self) -> None:
        """Drop all transitions, in one commit."""
        with self._lock:
            self._ring.clear()
            self._pending = None

    # -- what there is -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the transitions that can be drawn: at most `capacity`."""
        return self._window().count

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of transitions, for samplers: ids run over `[0, n)`, oldest first."""
        self._one_step(history_len)
        return len(self)

    def clip_window(self, history_len: int = 1) -> Window:
        """Return which transitions there are now, for samplers. O(1)."""
        self._one_step(history_len)
        return self._window()

    def _one_step(self, history_len: int | None) -> None:
        if history_len not in (None, 1):
            raise InputError(
                f"{type(self).__name__}: draws single transitions, got history_len={history_len!r}"
            )

    def _window(self) -> Window:
        source = self._ring._source
        with source.memory:
            index = self._ring._clip_reader.index.of(1)
            return Window(
                source, index, max(index.base, index.end - self.capacity), index.end, False
            )

    # -- reading -----------------------------------------------------------------------------

    def sample(
        self, batch_size: int, *, step: int | None = None, to: str | None = None
    ) -> dict[str, Any]:
        """Draw transitions with replacement, through the sampler.

        Args:
            batch_size: B.
            step: handed to the sampler; None uses the internal counter, and advances it.
            to: "numpy" or "torch"; None: as `device` says.

        Returns:
            `observations, actions, rewards, next_observations, dones`, each `(B, ...)`, nested as `obs_shape` is; `dones` and
            `rewards` float32. `critic_observations, next_critic_observations` if there are any. With
            `n_step > 1` rewards are discounted sums, `next_observations` and `dones` those of the last step summed up, and `discounts`
            `(B,)` what to multiply the value of `next_observations` by: gamma to the number of steps summed up.
            With a sampler that has priorities: `ids` and `weights`.

        Raises:
            InputError: B is not positive, or more than is stored.
            LappedError: the writer overtook this reader ten times in a row.

        Cost: O(B n_step), one copy of the rows.
        """
        where = f"{type(self).__name__}.sample"
        positive(where, "batch_size", batch_size)
        if to not in (None, "numpy", "torch"):
            raise InputError(f"{where}: to must be 'numpy' or 'torch', got {to!r}")
        ring = self._ring
        ring._source.refresh()
        ring._draw_apart()
        if batch_size > len(self):
            raise InputError(
                f"{where}: batch_size={batch_size}, but {len(self)} transitions are stored"
            )
        ring._draws += 1
        if step is None:
            step = ring._counter
            ring._counter += 1
        positions = self._draw(int(batch_size), step)
        batch = self._read(positions)
        sampler = ring._sampler
        if hasattr(sampler, "drawn"):
            sampler.drawn(positions)  # type: ignore[union-attr]
            for name in ("ids", "weights"):
                if hasattr(sampler, name):
                    batch[name] = getattr(sampler, name)
        if to == "torch" or (to is None and self.device is not None):
            batch = HandOut("torch", self.device, self.pin_memory).tensors(batch)
        return self._nested(batch)

    def _draw(self, size: int, step: int) -> Array:
        """Return the positions of the next batch."""
        ring = self._ring
        source, sampler = ring._source, ring._sampler
        where = f"{type(self).__name__}.sample"
        quick = sampler is None or getattr(sampler, "is_quick", False)
        with source.memory if quick else contextlib.nullcontext():
            window = self._window()
            if sampler is None:
                return window.positions(ring._rng.integers(0, window.count, size))
            ids = np.asarray(sampler(step, self, size, 1))
            if ids.shape != (size,) or ids.dtype.kind not in "iu":
                raise InputError(
                    f"{where}: the sampler returned {ids.dtype} of shape {ids.shape}, expected integers of ({size},)"
                )
            if ((ids < 0) | (ids >= window.count)).any():
                raise ClipIndexError(
                    f"{where}: the sampler returned an id out of range for {window.count} transitions"
                )
            numbers = ids.astype(np.int64) + window.base
            with source.memory:  # a slow one did not keep the writer out
                window = self._window()
                gone = (numbers < window.base) | (numbers >= window.end)
                if gone.any():
                    numbers[gone] = ring._rng.integers(window.base, window.end, int(gone.sum()))
                return window.positions(numbers - window.base)

    def _read(self, positions: Array) -> dict[str, Any]:
        """Return the transitions at these positions, flat; one that is gone is drawn anew, and `positions` shows it."""
        source = self._ring._source
        unsure = np.arange(len(positions))
        batch: dict[str, Array] = {}
        for _ in range(_TRIES):
            found, good = self._gather(source, positions[unsure])
            if not batch:
                batch = found
            else:
                for name, values in found.items():
                    batch[name][unsure] = values
            tail = source.newest_tail()
            unsure = unsure[~good | (positions[unsure] < tail)]
            if not len(unsure):
                return batch
            source.refresh()
            with source.memory:
                window = self._window()
                drawn = self._ring._rng.integers(0, window.count, len(unsure))
                positions[unsure] = window.positions(drawn)
            self._ring._clip_reader.num_redraws += len(unsure)
        raise LappedError(
            f"{source.folder}: a batch could not be read in {_TRIES} tries: its writer overtook this reader each time; "
            "raise capacity, or ask for smaller batches"
        )

    def _gather(self, source: Source, positions: Array) -> tuple[dict[str, Array], Array]:
        """Return transitions flat by leaf, and which of them are whole."""
        rows = source.rows
        assert rows is not None
        with source.memory:
            head, newest = source.head, source.live.start(source.live.last - 1)
            dense = source.live.is_dense
        ring = rows.ring.rows

        def take(name: str, at: Array) -> Array:
            taken = rows.by_name[name].take((at % ring)[:, None], None, head)
            return taken.reshape(len(at), *taken.shape[2:])

        lanes = np.abs(take("lanes", positions)).astype(np.int64)

        def goes_on(at: Array) -> Array:
            """Tell which rows have a following row that is their next observation."""
            after = at + lanes
            inside = (at < newest) & (after < head)
            found: Array = inside & (take("lanes", np.where(inside, after, at)) == lanes)
            return found if dense else found & self._are_live(source, after)

        batch = {name: take(name, positions) for name in [*self._obs_names, "actions"]}
        rewards = take("rewards", positions).astype(np.float64)
        last, discounts = positions.copy(), np.full(len(positions), self.gamma)
        for power in range(1, self.n_step):
            ended = (
                take("dones", last)
                | take("truncated", last)
                | (last < positions + (power - 1) * lanes)
            )
            on = ~ended & goes_on(last)
            if not on.any():
                break
            last = np.where(on, last + lanes, last)
            rewards[on] += self.gamma**power * take("rewards", last[on])
            discounts[on] *= self.gamma
        batch["rewards"] = rewards.astype(np.float32)
        batch["dones"] = take("dones", last).astype(np.float32)
        if self.n_step > 1:
            batch["discounts"] = discounts.astype(np.float32)
        on = goes_on(last)
        after = np.where(on, last + lanes, last)
        for name in self._obs_names:
            batch[f"next_{name}"] = take(name, after)
        good = np.ones(len(positions), np.bool_)
        for i in np.flatnonzero(~on).tolist():
            found = self._apart(source, int(last[i]), head, newest)
            if found is None:
                good[i] = False
            else:
                for name in self._obs_names:
                    batch[f"next_{name}"][i] = found[name]
        return batch, good

    def _are_live(self, source: Source, positions: Array) -> Array:
        """Tell which positions lie in what is stored: repairs and power cuts leave gaps."""
        with source.memory:
            starts, lengths = source.live.starts, source.live.lengths
            index = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
            live: Array = (positions >= starts[index]) & (
                positions < starts[index] + lengths[index]
            )
            return live

    def _apart(
        self, source: Source, position: int, head: int, newest: int
    ) -> dict[str, Array] | None:
        """Return what a step led to that has no row of its own; None if it is gone, or was lost."""
        if position >= newest:
            with self._lock:
                if self._pending is None or self._pending_head != head:
                    self._pending, self._pending_head = self._successors.find(head), head
                pending = self._pending
            return (
                None if pending is None else {n: v[position - newest] for n, v in pending.items()}
            )
        with source.memory:
            live = source.live
            at = int(live.starts.searchsorted(position, side="right")) - 1
            if at < 0 or at + 1 >= len(live):
                return None
            ordinal = live.first + at
            start, stop = live.start(ordinal), live.start(ordinal) + live.length(ordinal)
            if not start <= position < stop or live.start(ordinal + 1) != stop:
                return None
        extras = self._extras(source, ordinal + 1, stop)
        if extras is None or "lanes" not in extras:
            return None
        lane = int(np.searchsorted(extras["lanes"], position - start))
        if lane == len(extras["lanes"]) or extras["lanes"][lane] != position - start:
            return None
        return {name: extras[name][lane] for name in self._obs_names}

    def _extras(self, source: Source, ordinal: int, start: int) -> dict[str, Any] | None:
        """Return what was stored apart with the call whose first row is at `start`."""
        with self._lock:
            if start in self._kept:
                self._kept.move_to_end(start)
                return self._kept[start]
        try:
            found = source.read_data(ordinal)
        except CorruptError:
            if source.newest_tail() > start:
                return None
            raise
        if found is not None:
            with self._lock:
                self._kept[start] = found
                self._kept_nbytes += _nbytes(found)
                while self._kept_nbytes > _KEPT_NBYTES:
                    self._kept_nbytes -= _nbytes(self._kept.popitem(last=False)[1])
        return found

    def _nested(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        made = {_OBS: self._trees[0].nest(batch)}
        made |= {name: batch[name] for name in ("actions", "rewards")}
        made[f"next_{_OBS}"] = self._trees[0].nest(batch, f"next_{_OBS}")
        made["dones"] = batch["dones"]
        for tree in self._trees[1:]:
            made[_CRITIC] = tree.nest(batch)
            made[f"next_{_CRITIC}"] = tree.nest(batch, f"next_{_CRITIC}")
        for name in ("discounts", "ids", "weights"):
            if name in batch:
                made[name] = batch[name]
        return made

    # -- the rest ----------------------------------------------------------------------------

    @property
    def sampler(self) -> Any:
        """What `sample` draws with; may be assigned. None: uniformly."""
        return self._ring._sampler

    @sampler.setter
    def sampler(self, sampler: Sampler | None) -> None:
        self._ring.sampler = sampler

    def update_priorities(self, ids: Any, values: Any) -> int:
        """Give transitions their priorities; see `PrioritizedSampler.update_priorities`.

        Args:
            ids: `batch["ids"]`, an array or a tensor.
            values: their priorities.
        """
        return self._ring.update_priorities(as_array(ids, "ids"), values)

    @property
    def path(self) -> Path | None:
        """The directory, or None for a buffer in RAM."""
        return self._ring.path

    @property
    def mode(self) -> str:
        """ "r+" for the writer, "r" for a reader."""
        return self._ring.mode

    @property
    def num_redraws(self) -> int:
        """Transitions drawn anew so far because they were overwritten before they could be read."""
        return self._ring.num_redraws

    def refresh(self) -> bool:
        """Show a reader the newest state; tell whether anything changed. `sample` does so by itself."""
        return self._ring.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return the sampling state, to go beside a checkpoint."""
        return self._ring.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on sampling where `state_dict` was taken."""
        self._ring.load_state_dict(state)

    def check(self) -> list[Any]:
        """Return what is wrong with the buffer; empty when sound. Reads all rows."""
        return self._ring.check()

    def flush(self) -> None:
        """Force everything stored, and the sampling state, to the disk itself."""
        self._sync_successors()
        self._ring.flush()

    def _sync_successors(self) -> None:
        if self.mode == "r+":
            with self._lock:
                for _ in range(2):  # both files, whichever counts
                    self._successors.sync()
                    self._successors.turn()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Make a copy of the buffer in a directory that is new or empty; `open` opens it.

        Priorities are not in it: `state_dict()` has them.

        Raises:
            ExistsError: something is there.
            EnvironmentFault: the disk has no room, or fails.
        """
        target = os.path.abspath(path)
        disk = self.disk
        with self._lock:
            self._ring.snapshot(target)
            copied = read_manifest(disk, target)
            head = int(copied.table["head"])
            known = self._pending_head == head
            pending = self._pending if known else self._successors.find(head)
            if pending is not None:
                copy = Successors(disk, Paths(target).successors, copied.uuid)
                copy.write(head, pending)
                copy.sync()
                copy.close()
                disk.sync_folder(target)

    def close(self) -> None:
        """Flush, and give files and lock back."""
        try:
            if not self._ring._closed:
                self._sync_successors()
        finally:
            self._successors.close()
            self._ring.close()

    def __enter__(self) -> TransitionReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        """Flush; the buffer stays open."""
        if not self._ring._closed:
            self.flush()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle path and settings; a buffer in RAM pickles what is stored."""
        state = {name: self.__dict__[name] for name in ("n_step", "gamma", "device", "pin_memory")}
        state["ring"] = self._ring
        if self.path is None and len(self):
            with self._lock:
                state["pending"] = self._known_successors(self._ring._source)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        pending = state.pop("pending", None)
        ring = state.pop("ring")
        self.__dict__.update(state)
        self._set_up(ring)
        if pending is not None:
            self._pending, self._pending_head = pending, ring._source.head
            self._successors.write(self._pending_head, pending)
            self._successors.turn()

    def __repr__(self) -> str:
        if self._ring._closed:
            return f"{type(self).__name__}(closed, path={str(self.path)!r})"
        place = "" if self.path is None else f", path={str(self.path)!r}, mode={self.mode!r}"
        shapes = {spec.name: spec.shape for spec in self._schema.columns[: len(self._obs_names)]}
        return f"{type(self).__name__}({len(self)}/{self.capacity}, {shapes}, n_step={self.n_step}{place})"


class _Ring(ReplayBuffer):
    """The ring of rows under a buffer of transitions."""

    disk = TransitionReplayBuffer.disk  # the very one, whatever `ReplayBuffer` has by now


def _ring_on(disk: Disk) -> type[ReplayBuffer]:
    """Return the ring whose files go through `disk`."""
    return _Ring if disk is _Ring.disk else type("_Ring", (_Ring,), {"disk": disk})


def _rows(value: Any, spec: ColumnSpec, count: int, where: str) -> Array:
    """Return a value as `(count, *shape)` of the column's dtype; one step may come without the first axis."""
    array = as_array(value, f"{where}: {spec.name}")
    if count == 1 and array.shape == spec.shape:
        array = array[None]
    if array.shape == (count, 1) and not spec.shape:
        array = array[:, 0]
    if array.shape != (count, *spec.shape):
        raise InputError(
            f"{where}: {spec.name} has shape {array.shape}, expected {(count, *spec.shape)}, as observations have "
            f"{count} rows"
        )
    if array.dtype != spec.dtype:
        array = cast(array, spec.dtype, "safe", f"{where}: {spec.name}")
    made: Array = np.array(array, order="C", copy=None)
    return made


def _nbytes(values: Mapping[str, Any]) -> int:
    return sum(v.nbytes for v in values.values() if isinstance(v, np.ndarray))
