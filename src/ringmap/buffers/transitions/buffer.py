"""Transitions of many lanes, each observation stored once.

    add:    lane 0 1 2 | 0 1 2 | 0 1 2        row i is lane i; many calls are committed together
    rows:   [o r d ..  | o r d | o r d]
                   \\_______/ the next observation of a lane is its following row

Where a lane's observation is not bit for bit the next observation of its last step (an episode ended, an environment
was reset), the row is marked as fresh, and the next observation of that last step is stored with the commit, as its
episode data. The next observations of the newest rows are in a file beside the columns until the next commit.

    column lanes: N for a row that continues its lane, -N for a fresh one; N is the number of rows in the call, or, of
    named lanes, how far back the lane's last row is (lanes.py)

Invariants: what `add` returned from is stored whole; a transition is returned with the next observation that it
was added with, whatever came after it; only the newest `capacity` transitions count.
Not here: the ring (steps.py), its columns (columns.py), next observations without a row (lanes.py), n-step
sums (nstep.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringmap.arguments import fraction, positive
from ringmap.buffers import lookup
from ringmap.buffers.base import RingBuffer
from ringmap.buffers.batch import Batch, Emit, check_device
from ringmap.buffers.lookup import Clips
from ringmap.buffers.nested import leaf_array
from ringmap.buffers.passes import PassBuffer
from ringmap.buffers.prefetch import Batches, drawn_ahead
from ringmap.buffers.row_episodes import TransitionSource
from ringmap.buffers.sources import BufferSource
from ringmap.buffers.steps import StepRing
from ringmap.buffers.transitions.columns import FrameStack, TransitionColumns
from ringmap.buffers.transitions.lanes import FURTHEST, LaneEnds, NextObservations
from ringmap.buffers.transitions.nstep import TransitionReader
from ringmap.buffers.view import BufferView
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import ROW
from ringmap.clips.draws import Drawn, integers
from ringmap.clips.gather import PINNED
from ringmap.clips.samplers.base import Sampler, draw_with
from ringmap.datasets.base import clip_id, clip_ids
from ringmap.datasets.stored import StoredDataset
from ringmap.errors import ClipIndexError, InputError, LappedError, NotFoundError, ReplacedError
from ringmap.extras import require
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.formats.catalog.convert import convert
from ringmap.formats.registry import resolve_format
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.values import as_array, cast, nested
from ringmap.storage.commit.commit import UNNUMBERED, Commit, NewRecord
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.calls import note_nested, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.manifest import TRANSITIONS
from ringmap.storage.records.step_file import EARLIER_LIMIT
from ringmap.storage.ring.arrays import highest
from ringmap.storage.sidecars import Copied
from ringmap.storage.sidecars.successors import Successors

__all__ = ["TransitionReplayBuffer", "transition_source"]

Array = np.ndarray[Any, np.dtype[Any]]


_EARLIER_MOST = EARLIER_LIMIT // 2

_ROOM_LEAST = 256
"""Minimum of the rows beyond the capacity, and of the spare rows: calls of up to as many lanes are stored in one step
and evicted row by row."""


class TransitionReplayBuffer(RingBuffer, PassBuffer):
    """A ring of transitions `(s, a, r, s', done)` for DQN, SAC and similar algorithms.

    Args:
        capacity: transitions; the oldest ones are overwritten.
        obs_shape: of an observation: a shape, a nested mapping name -> shape or (shape, dtype), or a Gymnasium space.
        action_shape: of an action, or a Gymnasium space; `()` for a single index.
        device: the device of batches, as tensors; None: NumPy arrays.
        obs_dtype: of observation leaves without their own dtype.
        action_dtype: of actions.
        critic_obs_shape: of a second observation for the critic alone; None for none.
        n_step: number of discounted rewards summed per transition.
        gamma: the discount of these sums.
        frame_stack: K: observations are stacks of the newest K frames, `obs_shape` begins with K, and each frame is
            stored once; None: observations are stored as they are. Those of the critic always are.
        padding_type: what a stack has before the first frame of an episode: "reset", that frame again; "zero", zeros.
        extra: further columns of each transition: name -> shape or (shape, dtype); float32 without one.
        path: directory of the buffer; None for RAM. An existing buffer is opened with all its transitions.
        sampler: `fn(step, buffer, batch_size, history_len) -> ids`, such as `PrioritizedSampler`; None draws uniformly.
        seed: of the buffer's own generator. Used when the buffer is made.
        pin_memory: whether batches go to the device through page-locked memory.
        storage: how columns are stored, as for `ReplayBuffer`.
        durability: "process" or "power", as for `ReplayBuffer`.
        sync_every_s: seconds between background syncs.
        disk: as for `ReplayBuffer`.

    Raises:
        InputError: an argument is wrong, or contradicts a value fixed on disk.
        LockedError, CorruptError, EnvironmentFault: as for `ReplayBuffer`.

    Lanes: `len` is exact for calls of up to `max(256, capacity // 64)` lanes. A larger call is
        evicted whole, so a full buffer may lack up to as many transitions as the call has. With `frame_stack`,
        transitions whose older frames were evicted are redrawn; for calls of up to 256 lanes there are none.

    Durability: what `add` returned from survives a kill of the process, and at durability "power" a power cut. Calls
    are
        committed together: after a second, after as many rows as fit 8 MiB or the room beyond the capacity, and with
        `flush` and `close`. This handle draws them at once; readers and copies in other processes with the commit.

    Cost: `add` is one write, for any N, and a commit for many calls; observations are stored once.

    Processes and threads: as for `ReplayBuffer`: one writer, any number of live readers (`open(path)`); a pickled
        or forked copy only reads.

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

    def __init__(
        self,
        capacity: int,
        obs_shape: Any,
        action_shape: Any = (),
        device: Any = "cpu",
        obs_dtype: Any = np.float32,
        action_dtype: Any = np.int64,
        critic_obs_shape: Any = None,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        frame_stack: int | None = None,
        padding_type: str = "reset",
        extra: Mapping[str, Any] | None = None,
        path: str | os.PathLike[str] | None = None,
        sampler: Sampler | None = None,
        seed: int | None = None,
        pin_memory: bool = False,
        storage: Any = "memmap",
        durability: str = "process",
        sync_every_s: float = 30.0,
        disk: Disk | None = None,
    ) -> None:
        where = type(self).__name__
        capacity = positive(where, "capacity", capacity)
        self._read_as(n_step, gamma, device, pin_memory, where)
        stack = FrameStack.parse(frame_stack, padding_type, where)
        columns = TransitionColumns.parse(
            obs_shape, obs_dtype, critic_obs_shape, action_shape, action_dtype, where, stack, extra
        )
        room = min(int(capacity), max(_ROOM_LEAST, int(capacity) // 64))
        ring = StepRing(
            int(capacity),
            path=path,
            group=room,
            where=where,
            schema=columns.schema,
            storage=storage,
            durability=durability,
            seed=seed,
            sampler=sampler,
            sync_every_s=sync_every_s,
            disk=disk,
            older=0 if stack is None else stack.older(int(capacity)),
            kind=TRANSITIONS,
            stack=None if stack is None else (stack.size, stack.padding_type),
        )
        self._set_up(ring)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        device: Any = "cpu",
        n_step: int = 1,
        gamma: float = 0.99,
        pin_memory: bool = False,
        **options: Any,
    ) -> TransitionReplayBuffer:
        """Open the buffer at `path`: "r" for a live reader, "r+" for the writer.

        Args:
            path: its directory.
            mode: "r" or "r+".
            device: as for the constructor.
            n_step: as for the constructor.
            gamma: as for the constructor.
            pin_memory: as for the constructor.
            options: sampler, seed (of a reader's generator), durability, sync_every_s, reads, disk, as for
                `ReplayBuffer.open`.

        Raises:
            UnknownFormatError: the path holds something else.
        """
        where, buffer = f"{cls.__name__}.open", cls.__new__(cls)
        buffer._read_as(n_step, gamma, device, pin_memory, where)
        ring = StepRing.open(path, mode, kind=TRANSITIONS, where=where, **options)
        if ring.schema is None:
            ring.close()
            raise NotFoundError(
                f"{where}: {os.fspath(path)} has no columns yet: its birth was cut off, or is under way; "
                "open it with the constructor, which makes them"
            )
        buffer._set_up(ring)
        return buffer

    def _read_as(self, n_step: Any, gamma: Any, device: Any, pin_memory: Any, where: str) -> None:
        """Take how this handle returns transitions, checked before a directory is made: it is not stored."""
        self.n_step, self.gamma = int(positive(where, "n_step", n_step)), float(fraction(where, "gamma", gamma))
        self.device, self.pin_memory = check_device(device, where), bool(pin_memory)

    def _set_up(self, ring: StepRing) -> None:
        self._ring, self.engine = ring, ring.engine
        self.capacity = ring.capacity
        owned = ring.engine.owned
        assert owned.manifest.schema is not None
        self._columns = TransitionColumns.of(owned.manifest)
        self._next_observations = NextObservations(owned.disk, owned.folder, owned.manifest, self._columns.observed)
        ring.engine.read_with(
            partial(
                TransitionReader,
                columns=self._columns,
                next_observations=self._next_observations,
                capacity=self.capacity,
                n_step=self.n_step,
                gamma=self.gamma,
            )
        )
        given = {spec.name: spec for spec in self._columns.given.columns}
        self._ends = LaneEnds([given[name] for name in self._columns.observed], self.capacity)
        row = sum(spec.row_nbytes for spec in (*owned.manifest.schema.columns, *self._columns.unlinked.schema.columns))
        self._at_once = ring.at_once(row)
        stack = self._columns.stack
        self._most_lanes = self.capacity if stack is None else stack.most_lanes(self.capacity)
        if self.mode == "r+" and ring.engine.writer(type(self).__name__).power:
            ring.buffer.flush()  # for data written at the other level

    # -- writing -----------------------------------------------------------------------------

    def add(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        next_observations: Any,
        dones: Any,
        critic_observations: Any = None,
        next_critic_observations: Any = None,
        *,
        truncated: Any = None,
        fresh: Any = None,
        extra: Mapping[str, Any] | None = None,
        lane: Any = None,
    ) -> None:
        """Store one step, or a batch of N steps, where row i of each batch is lane i, or that of environment `lane[i]`.

        Args:
            observations: `(*obs_shape)` or `(N, *obs_shape)`, nested like `obs_shape`; arrays or tensors.
            actions: `(N, *action_shape)`.
            rewards: `(N,)`.
            next_observations: the observations after the step: at the end of an episode its last one, not the first
                of the next one.
            dones: `(N,)` terminated: only this stops bootstrapping.
            critic_observations: if `critic_obs_shape` was given.
            next_critic_observations: the same.
            truncated: `(N,)`: the episode was cut off here; n-step sums stop, bootstrapping continues.
            fresh: `(N,)`: the lane begins an episode here, so that n-step sums before it stop. Detected without it,
                unless the first observation equals the lane's last next observation bit for bit.
            extra: the columns that the buffer was made with, name -> `(N, *shape)`.
            lane: the environment of the step, or of each, `(N,)`: integers or text. For environments that are added one
                by one, or some in one call and others in the next. Without it each call has all lanes.

        Environments that are named may come in any order. In turn they cost what one call of all of them does; out of
        turn a step stores its next observation too. One that is missing for more than 1,024 rows begins anew.

        With `frame_stack` observations are whole stacks, `(N, *obs_shape)`, as the environment hands them out. An
        episode begins with a stack of one frame and padding; each further stack is the lane's last next one.

        Raises:
            InputError: with `frame_stack`: a stack neither goes on from the lane's last step nor begins an episode, or
                named environments come in another order than before. A call names an environment twice.
            InputError: shapes differ, a dtype can't hold a value, or N exceeds the capacity. Nothing was changed.
            ReadOnlyError, ClosedError: this handle may not write.
            EnvironmentFault: the disk is full or fails. Nothing was changed.

        Cost: one write, and a commit for many calls; at durability "power" one sync for each call. O(N).
        """
        where = f"{type(self).__name__}.add"
        columns, store = self._columns, self.engine.writer(where)
        if critic_observations is None and next_critic_observations is None and fresh is None and not extra:
            step = columns.as_given(observations, actions, rewards, next_observations, dones, truncated)
            if step is not None:
                is_single = type(step[2]) is not np.ndarray
                count = 1 if is_single else len(observations)
                if count <= self._most_lanes:
                    names = None if lane is None else _names_of(lane, count, where)
                    name = columns.observed[0]
                    now, after = {name: step[0]}, {name: next_observations}
                    if is_single and columns.stack is not None:
                        now, after = {name: step[0][None]}, {name: next_observations[None]}
                        is_single = False
                    self._store(store, now, after, step[1:], count, where, names, is_single=is_single)
                    return
        rows, after = columns.observations(
            observations, next_observations, critic_observations, next_critic_observations, where
        )
        count = len(rows[columns.observed[0]])
        rest = columns.rest(actions, rewards, dones, truncated, count, where)
        beside = columns.extra_rows(extra, count, where)
        if not count:
            return
        if count > self.capacity:
            raise InputError(
                f"{where}: {count} transitions exceed capacity={self.capacity}; raise capacity or add fewer at a time"
            )
        if count > self._most_lanes:
            assert columns.stack is not None
            raise InputError(
                f"{where}: {count} lanes with frame_stack={columns.stack.size}, but capacity={self.capacity} takes up "
                f"to {self._most_lanes}: a stack needs the rows of the calls before; raise capacity"
            )
        begun = None if fresh is None else _flags_of(fresh, count, f"{where}: fresh")
        names = None if lane is None else _names_of(lane, count, where)
        self._store(store, rows, after, [*rest.values()], count, where, names, begun, beside)

    def _store(
        self,
        store: Store,
        rows: dict[str, Array],
        after: dict[str, Array],
        rest: Sequence[Any],
        count: int,
        where: str,
        names: list[Any] | None,
        begun: Array | None = None,
        beside: Sequence[Array] = (),
        is_single: bool = False,
    ) -> None:
        """Store a checked call: `rest` are the columns up to `truncated`, `beside` those after `lanes`."""
        columns, ends, stack = self._columns, self._ends, self._columns.stack

        def work() -> None:
            nonlocal rows, after, beside
            store.recover_if_stale()
            if ends.head != store.head or ends.era != store.live.era:
                newest = self.reader.newest_of_lanes(0 if names is None else FURTHEST)
                ends.begin(store.head, store.live.era, names is not None, *newest)
            places, strides, parted = ends.match(names, rows, count, store, begun)
            lanes = strides if parted is None else np.where(parted, -strides, strides)
            led, ages = after, None
            if stack is not None:
                ages = self._check_stacks(stack, rows, after, places, strides, parted, names, where)
                rows, after = columns.newest(rows), columns.newest(after)
                beside = [*beside, ages]
            elif is_single and parted is not None:
                lanes = lanes[0]
            arrays = [*rows.values(), *rest, lanes, UNNUMBERED, *beside]

            def earlier() -> dict[str, Array]:
                return columns.newest(ends.earlier(places, strides, parted))

            if count <= self._at_once and ends.nbytes <= _EARLIER_MOST:
                store.append(
                    [*arrays, *after.values()],
                    count,
                    self._at_once,
                    where,
                    columns.unlinked,
                    earlier,
                    self.engine.committing,
                    is_single,
                )
            else:
                self._commit(store, arrays, after, earlier(), count, where)
            ends.follow(places, count, strides, ages, led, store.live.era)

        self._next_observations.turn.take(where, work)

    def _check_stacks(
        self,
        stack: FrameStack,
        rows: dict[str, Array],
        after: dict[str, Array],
        places: Any,
        strides: Any,
        parted: Array | None,
        names: list[Any] | None,
        where: str,
    ) -> Array:
        """Return the column `earlier` of a call whose stacks can be built again from the frames that are stored."""
        ends, columns = self._ends, self._columns
        stacks = {name: rows[name] for name in columns.stacked}
        begins = np.zeros(len(rows[columns.observed[0]]), np.bool_) if parted is None else parted
        stack.check(stacks, after, begins, (ends.count or len(begins)) if ends.in_order else len(begins), where)
        turned = ends.out_of_turn(places, strides, parted)
        if turned.any():
            which = int(turned.argmax())
            back, before = (np.broadcast_to(v, len(begins))[which] for v in (strides, ends.strides[places]))
            name = which if names is None else names[which]
            raise InputError(
                f"{where}: environment {name!r} comes {back} rows after its last step, and {before} before: a stack is "
                "read from rows that are equally far apart; with frame_stack give all environments, in one order, each "
                "time (of Gymnasium's vector environments those with AutoresetMode.SAME_STEP), or begin anew with a "
                "reset"
            )
        return stack.earlier(begins, ends.ages[places])

    def _commit(
        self,
        store: Store,
        arrays: Sequence[Any],
        after: Mapping[str, Array],
        earlier: Mapping[str, Array],
        count: int,
        where: str,
    ) -> None:
        """Store a call as a commit of its own."""
        given = [
            np.ascontiguousarray(np.broadcast_to(values, (count, *spec.shape)), spec.dtype)
            for spec, values in zip(self._columns.schema.columns, arrays, strict=True)
        ]
        apart = {name: np.ascontiguousarray(values) for name, values in after.items()}
        with self.engine.committing() as small:
            one = NewRecord(count, encode_data(earlier, where))
            store.commit(Commit([one], where, self._columns.schema, given, small=small, next_observations=apart))

    def clear(self) -> None:
        """Drop all transitions, in one commit."""
        where = f"{type(self).__name__}.clear"
        self.engine.writer(where)

        def work() -> None:
            self._ring.buffer.clear()
            self._ends.forget()

        self._next_observations.turn.take(where, work)

    # -- what is stored ----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of transitions that can be drawn: at most `capacity`. For a reader, as of its last refresh
        or draw."""
        if self.engine.source.writable:
            return len(self._ring)
        return min(self.engine.pin(ROW).count, self.capacity)

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of transitions, for samplers: ids are in `[0, n)`, oldest first."""
        self._one_step(history_len)
        return len(self._ring)

    def clip_window(self, history_len: int = 1) -> ClipRange:
        """Return the transitions that exist now, for samplers. O(1)."""
        self._one_step(history_len)
        return self._ring.window()

    def _one_step(self, history_len: int | None) -> None:
        if history_len not in (None, 1):
            raise InputError(f"{type(self).__name__}: draws single transitions, got history_len={history_len!r}")

    @property
    def rows(self) -> StepRing:
        """The ring of rows, for classes that build on this one."""
        return self._ring

    @property
    def reader(self) -> TransitionReader:
        """What reads transitions from the rows, for classes that build on this one."""
        reader = self.engine.reader
        assert isinstance(reader, TransitionReader)
        return reader

    @property
    def has_stacks(self) -> bool:
        """Whether it was made with `frame_stack`."""
        return self._columns.stack is not None

    # -- episodes ----------------------------------------------------------------------------

    def episode_dataset(self, **options: Any) -> StoredDataset:
        """Return the episodes that the transitions are of, as they are now: of each environment, from one ending to the
        next.

        An episode of T transitions has T + 1 rows, as recorded episodes have: `obs`, `action` (blank in the last row),
        `reward`, `terminated`, `truncated` (blank in the first), nested observations as `obs/name`, those of the critic
        as `critic_obs`, columns of `extra` beside the action. `reward_at` is "next". Rewards are those of single steps,
        and stacks are whole. One whose first transitions were evicted has `front_evicted` in its data; the newest of
        each environment may not have ended.

        An episode keeps its side of a `split`, as those of `ReplayBuffer` do: in each later call, in any process, and
        in copies.

        Args:
            options: of a dataset: `num_steps`, `frameskip`, `transform`, `keys_to_load`, ...; arrays by default
                (`output`, `layout`).

        Raises:
            InputError: an option is wrong. Reads raise `ReplacedError` once transitions of an episode were evicted.

        Cost: O(transitions); reads their flags, and one observation for each episode.

        Example:
            >>> buf = TransitionReplayBuffer(capacity=100, obs_shape=(), device=None)
            >>> for t in range(5):
            ...     buf.add(t, t, 1.0, t + 1, t == 2)
            >>> dataset = buf.episode_dataset()
            >>> [dataset.load_episode(i)["obs"].tolist() for i in range(2)]
            [[0.0, 1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]
        """
        return StoredDataset(TransitionSource(self, self.open), **{"output": "numpy", "layout": "HWC", **options})

    def episodes(self, *, nest: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the episodes of `episode_dataset`, as column -> list of rows, in the order in which they ended.

        The key `_episode_data` is included when the episode has data. An episode that is evicted meanwhile is left out.

        Args:
            nest: return the columns `obs/a`, `obs/b` as `{"obs": {"a": ..., "b": ...}}`.
        """
        each = ({n: v if n == EPISODE_DATA_KEY else list(v) for n, v in one.items()} for one in self._whole_episodes())
        return (nested(one, "TransitionReplayBuffer.episodes") for one in each) if nest else each

    def _whole_episodes(self) -> Iterator[dict[str, Any]]:
        dataset = self.episode_dataset()
        for number in range(len(dataset.lengths)):
            with contextlib.suppress(ReplacedError):
                episode, data = dict(dataset.load_episode(number)), dataset.episode_data(number)
                yield episode | ({EPISODE_DATA_KEY: data} if data else {})

    def dump(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        mode: str = "overwrite",
        *,
        progress: bool = True,
        **writer_options: Any,
    ) -> None:
        """Write the episodes of `episode_dataset` as a regular dataset; `convert` does the same.

        Args:
            path: as for `ReplayBuffer.dump`, and so the others.
            format: see there.
            mode: see there.
            progress: see there.
            writer_options: see there.

        Raises:
            InputError, FileExistsError: as `ReplayBuffer.dump`.
            ReplacedError: transitions were evicted meanwhile.
        """
        convert(
            self.episode_dataset(),
            path,
            dest_format=resolve_format(path, format, mode=mode, where=f"{type(self).__name__}.dump").name,
            mode=mode,
            progress=progress,
            **writer_options,
        )

    # -- reading -----------------------------------------------------------------------------

    def sample(self, batch_size: int, *, step: int | None = None, to: str | None = None) -> Batch[Any]:
        """Draw transitions with replacement, through the sampler.

        Args:
            batch_size: B.
            step: passed to the sampler; None uses the internal counter, and advances it.
            to: "numpy" or "torch"; None: decided by `device`.

        Returns:
            `observations, actions, rewards, next_observations, dones`, each `(B, ...)`, nested like `obs_shape`;
            `dones` and `rewards` float32. `critic_observations, next_critic_observations` if declared. With
            `n_step > 1` rewards are discounted sums, `next_observations` and `dones` belong to the last summed step,
            and `discounts` `(B,)` is the factor for the value of `next_observations`: gamma to the number of summed
            steps. Columns of `extra` come under their names. Attributes `ids` and `weights` as of
            `ReplayBuffer.sample`; with a sampler that has weights they are columns too.

        Raises:
            InputError: B is not positive, or exceeds the number stored.
            LappedError: the writer overtook this reader for 5 s without progress.

        Cost: O(B n_step), and one copy of the rows.
        """
        if type(batch_size) is not int or batch_size < 1:
            batch_size = positive(f"{type(self).__name__}.sample", "batch_size", batch_size)
            batch_size = int(batch_size)
        if to is not None and to not in ("numpy", "torch"):
            raise InputError(f"{type(self).__name__}.sample: to must be 'numpy' or 'torch', got {to!r}")
        positions, _, weigh = self._draw(batch_size, step, "sample")
        asked = positions.copy()
        columns: dict[str, Any] = self.engine.read(positions, ROW)
        weights: Any = weigh and weigh(positions)
        if weights is not None:
            columns["ids"], columns["weights"] = positions, weights
        if to == "torch" or (to is None and self.device is not None):
            require("torch", f"{type(self).__name__}.sample", instead="ask for to='numpy'")
            columns = Emit("torch", self.device, self.pin_memory).tensors(columns)
            weights = columns.get("weights")
        return Batch(self._columns.nested(columns), positions, weights, asked)

    def batches(
        self,
        batch_size: int,
        steps: int | None = None,
        prefetch: int = 2,
        to: str | None = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> Batches:
        """Return an endless iterator over `sample(batch_size)`, the next batches gathered while one is used.

        Args:
            batch_size: B.
            steps: batches until it ends; None: never.
            prefetch: batches gathered ahead by a background thread; 0: none, and no thread.
            to: as for `sample`.
            device: where tensors go; None: the buffer's.
            pin_memory: as for the constructor; None: the buffer's.

        Raises:
            InputError: an argument is wrong. Errors of `sample` are raised by the iterator.

        Example:
            >>> buf = TransitionReplayBuffer(capacity=100, obs_shape=(4,), device=None, seed=0)
            >>> buf.add(np.zeros((8, 4)), np.arange(8), np.zeros(8), np.ones((8, 4)), np.zeros(8))
            >>> with buf.batches(3, steps=2) as batches:
            ...     [batch["observations"].shape for batch in batches]
            [(3, 4), (3, 4)]
        """
        where = f"{type(self).__name__}.batches"
        batch_size = positive(where, "batch_size", batch_size)
        tensors = to == "torch" or (to is None and (self.device or device) is not None)
        if tensors:
            device = check_device(device, where) or self.device
            pin_memory = self.pin_memory if pin_memory is None else pin_memory
        draw = partial(self._draw, int(batch_size), None, "batches")

        def ahead(size: int, count: int | None) -> Iterator[Batch[Any]]:
            return map(self._columns.public, drawn_ahead(self.clips, draw, ROW, count))

        def sample(size: int) -> Batch[Any]:
            return self.sample(size, to="numpy")

        form = to or ("torch" if tensors else "numpy")
        return Batches(sample, ahead, int(batch_size), steps, prefetch, form, device, bool(pin_memory), where)

    def mix_source(self, items: Mapping[str, Any]) -> BufferSource:
        """Return what draws transitions for a mix, no more at once than are stored."""
        return BufferSource(self, self.sample, (1, 1), most=True)

    def recorded_by(self, sinks: Any, mix: Any = None) -> Any:
        """Return the sink that fills this buffer with transitions; a mix that holds it needs none of its own."""
        return sinks.transitions(self)

    # -- by id, for a DataLoader -------------------------------------------------------------

    kind = TRANSITIONS
    cut, num_steps, frameskip = ROW, 1, 1
    fps = reward_at = None

    @property
    def clips(self) -> Clips:
        """What finds and reads transitions: the engine."""
        return self.engine

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of a batch in order, flat."""
        return list(self.engine.layout(ROW, 0))

    @property
    def transform(self) -> Any:
        """What nests an item, if observations are nested."""
        return self._columns.nested if self._columns.is_nested else None

    def __getitem__(self, idx: Any) -> Any:
        """Return one transition, as `sample` does without the first axis, in NumPy; with a list of ids the batch.

        Raises:
            ClipIndexError: the id is out of range. Negative ids count from the end; 0 is the oldest.
            InputError: the ids of a list are not integers.
        """
        where = type(self).__name__
        if np.ndim(idx):
            ids = clip_ids(idx, where)
            if self.transform is None:
                return lookup.mapping(self, self._checked(ids))
            batch = lookup.read(self, self._checked(ids))
            return batch.like(self._columns.nested(batch))
        number = clip_id(idx, where, has_batches=True)
        return lookup.one(self, int(self._checked(np.array([number]))[0]))

    def _checked(self, ids: Array) -> Array:
        """Return ids of which none is negative; those of places on the ring as they are."""
        size, places = len(self), ids >= PINNED
        wrong = ~places & ((ids < -size) | (ids >= size))
        if wrong.any():
            raise ClipIndexError(
                f"{type(self).__name__}: transition {int(ids[wrong][0])} is out of range for {size} transitions"
            )
        return np.where(ids < 0, ids + size, ids)

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several transitions. PyTorch's DataLoader calls this method.

        One that was evicted since its id was drawn is redrawn and counted, so that a pass continues while the buffer is
        written. Workers see what was added before they were started; what is added later, once it is committed.
        """
        return lookup.several(self, clip_ids(indices, type(self).__name__))

    def pinned(self) -> BufferView:
        """Return a view of the transitions that exist now, for a pass: what is in it is committed."""
        self.engine.commit_pending(f"{type(self).__name__}.pass_sampler")
        return BufferView.of_pass(self)

    def view(self, *, live: bool = False, at: Mapping[str, Any] | None = None) -> BufferView:
        """Return a dataset of the transitions that are stored now, whose ids do not change, in any process. It returns
        NumPy arrays, as brackets do.

        Its episodes, which `take` and `split` choose, are those of the environments. An item is one transition; with
        `n_step` a sum, which ends with its episode.

        Args:
            live: whether it moves, as a view of a `ReplayBuffer` does.
            at: the `moment` of another view.

        Raises:
            InputError: as `ReplayBuffer.view`.

        Cost: reads 10 bytes of each transition; 0.9 us and 300 bytes for each run of rows of one episode. An
            environment that is added alone has few such runs; of several in turn each row is one.

        Example:
            >>> buf = TransitionReplayBuffer(capacity=100, obs_shape=(), device=None)
            >>> for t in range(6):
            ...     buf.add([t, -t], [0, 0], [1, 1], [t + 1, -t - 1], [t == 3, False])
            >>> view = buf.view()
            >>> view.lengths.tolist(), view.take([1])[[0, 1, 2]]["observations"].tolist()
            ([4, 6, 2], [0.0, -1.0, -2.0])
        """
        where = f"{type(self).__name__}.view"
        self.engine.commit_pending(where)
        return BufferView.asked(self, None, None, live, at, where)

    def split(self, train: float | Sequence[float] = 0.9, seed: int = 0) -> tuple[BufferView, ...]:
        """Return views that share no episode of an environment: `train` of the episodes, and the rest; see
        `Dataset.split`. The sides are those of `episode_dataset().split`.

        Args:
            train: the share of the first view, or the shares of all, such as `[0.8, 0.1, 0.1]`.
            seed: of the choice.
        """
        return self.view().split(train, seed)

    def _draw(self, size: int, step: int | None, what: str) -> Drawn:
        """Return the transitions of the next batch. `what`: the method to name in an error."""
        engine = self.engine
        engine.look()
        source, sampler = engine.rings[0].source, engine.sampler
        if sampler.given is None:
            positions, count = self._ring.draw_or_count(source, size, engine.rng)
            if size > count:
                raise self._too_few(f"{type(self).__name__}.{what}", size, count)
            engine.next_step(step)
            return Drawn(positions)
        where = f"{type(self).__name__}.{what}"
        window = self._ring.window()
        if size > window.count:
            raise self._too_few(where, size, window.count)
        step = engine.next_step(step)
        ids, weigh = draw_with(sampler, step, self, size, 1, where)
        if highest(ids.view(np.uint64)) >= window.count:  # a negative one is huge
            raise ClipIndexError(f"{where}: the sampler returned an id out of range for {window.count} transitions")
        seen = window.base, window.end
        with thread.searching, source.lock:
            window.follow()
            if (window.base, window.end) == seen:
                return Drawn(window.positions(ids), weigh=weigh)
            if not window.count:  # another thread cleared the buffer meanwhile
                raise self._too_few(where, size, 0)
            numbers = ids + seen[0]
            gone = (numbers < window.base) | (numbers >= window.end)
            if gone.any():
                numbers[gone] = integers(engine.rng, window.base, window.end, int(gone.sum()))
                engine.reader.num_redraws += int(gone.sum())
            return Drawn(window.positions(numbers - window.base), weigh=weigh)

    @staticmethod
    def _too_few(where: str, size: int, count: int) -> InputError:
        return InputError(
            f"{where}: batch_size={size}, but {count} transitions are stored; add more first, or draw fewer"
        )

    # -- priorities, roles, state ------------------------------------------------------------

    @property
    def sampler(self) -> Any:
        """The sampler of `sample`; may be assigned. None: uniform."""
        return self.engine.sampler.given

    @sampler.setter
    def sampler(self, sampler: Sampler | None) -> None:
        self._ring.buffer.sampler = sampler

    def update_priorities(self, ids: Any, values: Any) -> int:
        """Set the priorities of transitions; see `PrioritizedSampler.update_priorities`.

        Args:
            ids: `batch.ids`, an array or a tensor.
            values: their priorities.
        """
        return self._ring.buffer.update_priorities(
            leaf_array(ids, f"{type(self).__name__}.update_priorities", "ids"), values
        )

    @property
    def schema(self) -> Schema:
        """The columns of the ring, with their shapes and dtypes: each observation once, by leaf; of stacks one
        frame."""
        return self._columns.shown

    @property
    def given_schema(self) -> Schema:
        """The columns of a step as `add` takes them: whole stacks; without the columns that the buffer adds."""
        return self._columns.given

    def check(self) -> list[Any]:
        """Return the faults of the buffer; empty when sound. Reads all rows."""
        return self._ring.buffer.check()

    def flush(self) -> None:
        """Force all stored data, and the sampling state, to the disk."""
        self._ring.buffer.flush()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Copy the buffer to a directory that is new or empty; `open` opens the copy.

        Raises:
            ExistsError: something else is at the path.
            LappedError: the writer overtook this reader.
            EnvironmentFault: the disk has no room, or fails. Nothing is left at `path`.
        """
        where = f"{type(self).__name__}.save"
        source = self.engine.source

        def led_to(copied: Copied) -> Any:
            """Return the next observations of the copy's newest rows, where the writer has continued."""
            if copied.newest is None or not source.refresh() | (source.head != copied.head):
                return None
            found = self.reader.led_to(copied.newest.head)
            if found is None:
                raise LappedError(
                    f"{where}: {source.folder}: the writer overtook this reader; raise capacity, or save in its process"
                )
            return found

        self._next_observations.turn.take(where, lambda: self.engine.snapshot(path, where, {Successors: led_to}))

    def close(self) -> None:
        """Flush, and release files and lock; see `ReplayBuffer.close`."""
        if note_nested(self.close):
            return
        try:
            self._ring.close()
        finally:
            if self._ring.closed:
                self._next_observations.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle path and settings; a buffer in RAM pickles its stored data."""
        state = {name: self.__dict__[name] for name in ("n_step", "gamma", "device", "pin_memory")}
        state["ring"] = self._ring
        if self.path is None and len(self):
            ring = self._ring.engine.source
            newest = self._next_observations.turn.take(
                type(self).__name__, lambda: self._next_observations.newest(ring)
            )
            state["newest"] = newest.observations if newest.stop == newest.head else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        newest = state.pop("newest", None)
        ring = state.pop("ring")
        self.__dict__.update(state)
        self._set_up(ring)
        if newest is not None:
            ring.engine.writer(type(self).__name__).put_next_observations(newest)

    def _card(self) -> dict[str, str]:
        self.engine.check_open()
        return {
            "transitions": f"{len(self):,} of {self.capacity:,}",
            "n_step": f"{self.n_step}, gamma {self.gamma}",
            "columns": ", ".join(self.schema.names[:20]),
            "path": "RAM" if self.path is None else f"{self.path}, mode {self.mode!r}",
        }

    def __repr__(self) -> str:
        if self._ring.closed:
            return f"{type(self).__name__}(closed, path={str(self.path)!r})"
        place = "" if self.path is None else f", path={str(self.path)!r}, mode={self.mode!r}"
        shapes = {spec.name: spec.shape for tree in self._columns.trees for spec in tree.columns}
        return f"{type(self).__name__}({len(self)}/{self.capacity}, {shapes}, n_step={self.n_step}{place})"


def _names_of(lane: Any, count: int, where: str) -> list[Any]:
    """Return the name of the environment of each row: an integer or text, each once."""
    if type(lane) is int and count == 1:
        return [lane]
    if not isinstance(lane, list | tuple):
        lane = np.atleast_1d(as_array(lane, f"{where}: lane", "row")).tolist()
    names = [name.item() if isinstance(name, np.generic) else name for name in lane]
    if len(names) != count:
        raise InputError(f"{where}: lane names {len(names)} environments, but there are {count} rows")
    wrong = [name for name in names if isinstance(name, bool) or not isinstance(name, int | str)]
    if wrong:
        raise InputError(f"{where}: lane: an environment is named by an integer or text, got {wrong[0]!r}")
    if len(set(names)) < count:
        raise InputError(f"{where}: lane names an environment twice: {names!r:.60}; give its steps one by one")
    return names


def _flags_of(value: Any, count: int, where: str) -> Array:
    """Return a flag for each row, `(count,)`, of flags or of one for all."""
    flags = as_array(value, where, "row")
    if flags.shape not in ((), (count,)):
        raise InputError(f"{where} has shape {flags.shape}, expected ({count},)")
    if flags.dtype.kind not in "biuf":
        raise InputError(f"{where} is of {flags.dtype}, expected flags")
    return cast(np.broadcast_to(flags, count), np.dtype(np.bool_), "safe", where)


def transition_source(path: str | os.PathLike[str]) -> TransitionSource:
    """Return the episodes of the transitions in a directory."""
    return TransitionSource(path, TransitionReplayBuffer.open)
