"""Adapters (sinks): one for each kind of buffer.

    EpisodeSink     a ReplayBuffer, also in a mix: whole episodes, or streamed ones
    RowSink         a TransitionReplayBuffer, also in a mix: a row per step
    RingSink        the ring of rows in a mix: a row per step

Invariants: a buffer that can't be filled is refused when its sink is made, before anything changes.
Not here: the rows themselves (open_episodes.py), when an episode ends (recorder.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ringmap.buffers.base import Buffer
from ringmap.buffers.offline_to_online import OfflineToOnlineReplayBuffer
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.steps import StepRing
from ringmap.buffers.transitions.buffer import TransitionReplayBuffer
from ringmap.clips.facts import Facts
from ringmap.errors import InputError, ReadOnlyError, RingmapError
from ringmap.fleet.pace import Pace, paced
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.recording.keys import Keys
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.columns.values import as_array, nested

__all__ = ["EpisodeSink", "RowSink", "Sink", "Sinks"]

Array = np.ndarray[Any, np.dtype[Any]]


class Sink:
    """The interface of every sink.

    Attributes:
        buffer: the buffer that the user passed.
        columns: its columns; None if the transition builder decides.
        casting: how values may be converted.
        num_stored: episodes, or batches of rows, stored so far.
        pace: which each commit keeps; None: none.
        max_steps: of an episode.
        stream: whether rows are put on disk as they come; with `commit_every`, committed so many at a time.
        path: the directory that is written; None in RAM.
        copy_to: writes a copy of what is stored to a new directory.
    """

    path: Path | None
    copy_to: Callable[[str], None]
    by_step = stream = False
    commit_every: int | None = None
    num_stored = 0
    pace: Pace | None = None
    max_steps = sys.maxsize

    def __init__(self, buffer: Any, columns: tuple[ColumnSpec, ...] | None, casting: str) -> None:
        self.buffer, self.columns, self.casting = buffer, columns, casting
        self.names = [] if columns is None else [spec.name for spec in columns]

    @property
    def layout(self) -> Any:
        """The properties that two buffers must share for a swap."""
        found = None if self.columns is None else frozenset((c.name, c.shape, c.dtype.str) for c in self.columns)
        return self.by_step, found

    @property
    def joins(self) -> bool:
        """Whether `write_joined` stores episodes."""
        return False

    def write_joined(self, rows: Mapping[str, Array], lengths: Sequence[int], data: Sequence[Mapping[str, Any]]) -> int:
        """Store whole episodes whose rows lie one behind the other; return how many: `write` is for the rest."""
        return 0

    def sync(self) -> None:
        """Make durable what was written without a sync."""

    def give_up(self, slot: int) -> None:
        """Commit the streamed part of a slot's episode, if possible; else the next opening decides."""


class EpisodeSink(Sink):
    """Whole episodes; with `stream`, their rows as they come; with `commit_every`, these as parts."""

    def __init__(
        self,
        target: Any,
        buffer: ReplayBuffer,
        columns: tuple[ColumnSpec, ...] | None,
        stream: bool,
        commit_every: int | None = None,
    ) -> None:
        super().__init__(target, columns, buffer.options.casting)
        self.path, self.copy_to = buffer.path, buffer.snapshot
        self.commit_every = commit_every
        self.max_steps = buffer.max_steps if commit_every is None else sys.maxsize
        self.stream = stream or commit_every is not None
        self._inner = buffer
        self._open: dict[int, Any] = {}

    def write(self, episode: Mapping[str, Any], data: Mapping[str, Any], sync: bool = True) -> None:
        """Store a whole episode with its data, in one commit. `sync`: False if `sync` is called after the last one."""
        if self._inner.schema is None:
            episode = self._typed(episode)
        if data:
            episode = {**episode, EPISODE_DATA_KEY: data}
        rows = len(next((v for n, v in episode.items() if n != EPISODE_DATA_KEY), ()))
        with paced(self.pace, rows, self.buffer):
            if self.buffer is self._inner:
                self._inner.write_episode(episode, sync=sync)
            else:
                self.buffer.extend(episode)  # and its mixing state with it
        self.num_stored += 1

    @property
    def joins(self) -> bool:
        """Whether `write_joined` stores episodes; with a pace each is stored alone, as it waits for its own room."""
        return not self.stream and self.buffer is self._inner and self.pace is None

    def write_joined(self, rows: Mapping[str, Array], lengths: Sequence[int], data: Sequence[Mapping[str, Any]]) -> int:
        """Store whole episodes, as `ReplayBuffer.write_joined` does."""
        count = self._inner.write_joined(rows, lengths, data)
        self.num_stored += count
        return count

    def sync(self) -> None:
        """Make durable what was written without a sync."""
        self._inner.engine.make_durable("ReplayBufferCollectionWrapper")

    def append(self, slot: int, step: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Stream a row of a slot's open episode, which has this data."""
        if slot not in self._open:
            self._open[slot] = self._inner.begin_episode(commit_every=self.commit_every, episode_data=data, lane=slot)
        if self._inner.schema is None:
            rows = self._typed({name: as_array(value, name, "item")[None] for name, value in step.items()})
            step = {name: values[0] for name, values in rows.items()}
        stream, every = self._open[slot], self.commit_every
        with paced(self.pace, every if every and (stream.num_steps + 1) % every == 0 else 0, self.buffer):
            stream.append(step)

    def _typed(self, rows: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return rows in the dtypes of the columns that the buffer is about to adopt."""
        if self.columns is None:
            return rows
        return Schema(self.columns).fit(rows, self.casting, "ReplayBufferCollectionWrapper")

    def finish(self, slot: int, terminated: bool, truncated: bool) -> None:
        """Commit a slot's streamed episode."""
        stream = self._open.pop(slot, None)
        if stream is not None:
            rows = stream.num_steps
            with paced(self.pace, rows if self.commit_every is None else rows % self.commit_every, self.buffer):
                stream.finish(terminated, truncated)
            self.num_stored += 1

    def give_up(self, slot: int) -> None:
        """Commit the streamed part of a slot's episode, if possible; else the next opening decides."""
        with contextlib.suppress(RingmapError):
            self.finish(slot, False, False)


class RowSink(Sink):
    """Transitions, a batch of them per step."""

    by_step = True

    def __init__(self, buffer: TransitionReplayBuffer) -> None:
        schema = buffer.given_schema
        super().__init__(buffer, _transition_columns(schema), "safe")
        self.path, self.copy_to = buffer.path, buffer.save
        self._extra = schema.names[schema.names.index("truncated") + 1 :]
        self._seen = [name for name in self.names if name.partition("/")[0].endswith("obs")]
        self._most, self._is_named = 0, False

    def add(self, rows: Mapping[str, Any], fresh: Array, slots: Sequence[int]) -> None:
        """Store transitions, column -> `(n, ...)`, of these slots; `fresh` `(n,)` says which are the first of an
        episode."""
        with paced(self.pace, len(fresh), self.buffer):
            self._add(rows, fresh, slots)
        self.num_stored += 1

    def _add(self, rows: Mapping[str, Any], fresh: Array, slots: Sequence[int]) -> None:
        # Slots that are reset have no transition; then each row says whose it is. A buffer of stacks refuses that, and
        # says why.
        self._is_named |= len(slots) < self._most
        self._most = max(self._most, len(slots))
        whole = nested({name: rows[name] for name in self._seen if name in rows})
        self.buffer.add(
            whole.get("obs"),
            rows["action"],
            rows["reward"],
            whole.get("next_obs"),
            rows["terminated"],
            whole.get("critic_obs"),
            whole.get("next_critic_obs"),
            truncated=rows.get("truncated"),
            fresh=fresh,
            extra={name: rows[name] for name in self._extra} or None,
            lane=slots if self._is_named else None,
        )


class RingSink(RowSink):
    """Transitions, into the ring of rows in a buffer that mixes."""

    def __init__(
        self, mix: OfflineToOnlineReplayBuffer, ring: StepRing, columns: tuple[ColumnSpec, ...], casting: str
    ) -> None:
        Sink.__init__(self, mix, columns, casting)
        self.path, self.copy_to = ring.path, mix.save

    def _add(self, rows: Mapping[str, Any], fresh: Array, slots: Sequence[int]) -> None:
        self.buffer.extend(dict(rows))


class Sinks:
    """Makes the sink of a buffer, which asks for its kind: see `Buffer.recorded_by`. `built`: whether a transition
    builder computes the columns."""

    def __init__(self, keys: Keys, built: bool, stream: bool, commit_every: int | None, pace: Pace | None) -> None:
        self._keys, self._built, self._stream, self._commit_every = keys, built, stream, commit_every
        self._pace, self._where = pace, keys.where

    def of(self, buffer: Any) -> Sink:
        """Return the sink for a buffer."""
        sink: Sink = buffer.recorded_by(self) if isinstance(buffer, Buffer) else self.refuse(buffer)
        if self._pace is not None:
            self._pace.check_ring(sink.path, self._where)
            sink.pace = self._pace
        return sink

    def episodes(self, ring: ReplayBuffer, target: Any) -> Sink:
        """Return the sink for a ring of episodes."""
        columns = None if ring.schema is None else ring.schema.columns
        if columns is None and not self._built:
            columns = self._keys.default()
        self._check(ring, target, columns, ring.options.casting)
        if not self._built:
            ring.expect_facts(Facts("next"), self._where)
        ring.check_commit_every(self._where, self._commit_every)
        return EpisodeSink(target, ring, columns, self._stream, self._commit_every)

    def transitions(self, buffer: TransitionReplayBuffer) -> Sink:
        """Return the sink for a buffer of transitions."""
        sink = RowSink(buffer)
        self._check(buffer, buffer, sink.columns, sink.casting)
        self._refuse_parts(buffer)
        return sink

    def rows(self, ring: StepRing, mix: OfflineToOnlineReplayBuffer) -> Sink:
        """Return the sink for the ring of rows in a buffer that mixes."""
        columns = _ring_columns(mix, None if ring.schema is None else ring.schema.columns, self._keys)
        casting = ring.buffer.options.casting
        self._check(ring.buffer, mix, columns, casting)
        self._refuse_parts(ring)
        return RingSink(mix, ring, columns, casting)

    def refuse(self, buffer: Any, why: str = "") -> NoReturn:
        """Raise InputError for what can't be filled."""
        raise InputError(
            f"{self._where}: can't record into a {type(buffer).__name__}: "
            + (why or "expected a ReplayBuffer, a TransitionReplayBuffer or an OfflineToOnlineReplayBuffer of ours")
        )

    def _check(self, ring: Any, target: Any, columns: tuple[ColumnSpec, ...] | None, casting: str) -> None:
        if ring.mode != "r+":
            raise ReadOnlyError(f"{self._where}: {target!r} only reads; open it with mode='r+'")
        if columns is not None and not self._built:
            self._keys.check(columns, casting, type(target).__name__)

    def _refuse_parts(self, buffer: Any) -> None:
        if self._commit_every is not None:
            raise InputError(
                f"{self._where}: commit_every={self._commit_every} is for buffers of episodes; a "
                f"{type(buffer).__name__} stores each step as it comes"
            )


def _transition_columns(schema: Schema) -> tuple[ColumnSpec, ...]:
    """Return the columns of a step of a transition buffer by the names that recordings use."""
    renamed = {"observations": "obs", "critic_observations": "critic_obs"}
    found: list[ColumnSpec] = []
    for spec in schema.columns:
        first, *rest = spec.name.split("/")
        if first in renamed:
            name = "/".join([renamed[first], *rest])
            found += [ColumnSpec(n, spec.shape, spec.dtype) for n in (name, f"next_{name}")]
        elif first == "actions":
            found.append(ColumnSpec("action", spec.shape, spec.dtype))
    flag = np.dtype(np.bool_)
    tail = ("reward", np.dtype(np.float32)), ("terminated", flag), ("truncated", flag)
    extra = schema.columns[schema.names.index("truncated") + 1 :]
    return (*found, *(ColumnSpec(name, (), dtype) for name, dtype in tail), *extra)


def _ring_columns(
    buffer: OfflineToOnlineReplayBuffer, columns: tuple[ColumnSpec, ...] | None, keys: Keys
) -> tuple[ColumnSpec, ...]:
    """Return the columns of the ring of rows in a buffer that mixes: those of its offline data."""
    names = [c.name for c in columns] if columns else list(getattr(buffer.offline_buffer, "column_names", []))
    if not any(name.split("/")[0] == "next_obs" for name in names):
        # Rows of episodes have the reward that came with the observation, transitions the one that follows.
        raise InputError(
            f"{keys.where}: the online ring takes transitions, but its offline data has the columns {names} and no "
            "next_obs: in episodes a reward stands one row later; give online_storage=ReplayBuffer(...), which "
            "takes episodes"
        )
    if columns is not None:
        return columns
    return tuple(
        ColumnSpec(name, *keys.known[name][:2]) if name in keys.known else ColumnSpec(name, (), np.dtype(float))
        for name in names
    )
