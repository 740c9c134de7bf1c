"""Adapters (sinks): one for each kind of buffer.

    ReplayBuffer, the ReplayBuffer in an OfflineToOnlineReplayBuffer    whole episodes, or streamed ones
    TransitionReplayBuffer, the ring in an OfflineToOnlineReplayBuffer  a row per step

Invariants: a buffer that can't be filled is refused when its sink is made, before anything changes.
Not here: the rows themselves (open_episodes.py), when an episode ends (recorder.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.buffers.distillation.buffer import DistillationBuffer
from ringmap.buffers.offline_to_online.buffer import OfflineToOnlineReplayBuffer
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.rollout.buffer import RolloutBuffer
from ringmap.buffers.steps import StepRing
from ringmap.buffers.transitions.buffer import TransitionReplayBuffer
from ringmap.clips.facts import Facts
from ringmap.errors import InputError, ReadOnlyError, RingmapError
from ringmap.fleet.pace import Pace
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.recording.keys import Keys
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.columns.values import as_array

__all__ = ["EpisodeSink", "RowSink", "Sink", "sink_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_NO_KEYS: dict[type, str] = {
    DistillationBuffer: "a DistillationBuffer stores what a teacher would have done, which no environment says; call "
    "its add",
    RolloutBuffer: "a RolloutBuffer stores values and log-probabilities, which only the policy knows; call its add",
}


class Sink:
    """The interface of every sink.

    Attributes:
        buffer: the buffer that the user passed.
        columns: its columns; None if the transition builder decides.
        casting: how values may be converted.
        num_stored: episodes, or batches of rows, stored so far.
        pace: which each commit keeps; None: none.
        max_steps: of an episode.
    """

    by_step = False
    num_stored = 0
    pace: Pace | None = None
    max_steps = sys.maxsize

    def room(self, rows: int) -> contextlib.AbstractContextManager[None]:
        """Wait until a commit of so many rows may come in, which is made in the `with` block."""
        if self.pace is None or not rows:
            return contextlib.nullcontext()
        return self.pace.insert(rows, self.buffer.flush)

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
        given: Any,
        buffer: ReplayBuffer,
        columns: tuple[ColumnSpec, ...] | None,
        stream: bool,
        commit_every: int | None = None,
    ) -> None:
        super().__init__(given, columns, buffer.options.casting)
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
        with self.room(rows):
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
        with self.room(every if every and (stream.num_steps + 1) % every == 0 else 0):
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
            with self.room(rows if self.commit_every is None else rows % self.commit_every):
                stream.finish(terminated, truncated)
            self.num_stored += 1

    def give_up(self, slot: int) -> None:
        """Commit the streamed part of a slot's episode, if possible; else the next opening decides."""
        with contextlib.suppress(RingmapError):
            self.finish(slot, False, False)


class RowSink(Sink):
    """Transitions, a batch of them per step."""

    by_step = True

    def __init__(
        self, buffer: Any, columns: tuple[ColumnSpec, ...] | None, casting: str, extra: Sequence[str] = ()
    ) -> None:
        super().__init__(buffer, columns, casting)
        self._extra = extra
        self._most, self._is_named = 0, False

    def add(self, rows: Mapping[str, Any], fresh: Array, slots: Sequence[int]) -> None:
        """Store transitions, column -> `(n, ...)`, of these slots; `fresh` `(n,)` says which are the first of an
        episode."""
        with self.room(len(fresh)):
            self._add(rows, fresh, slots)
        self.num_stored += 1

    def _add(self, rows: Mapping[str, Any], fresh: Array, slots: Sequence[int]) -> None:
        if isinstance(self.buffer, OfflineToOnlineReplayBuffer):
            self.buffer.extend(dict(rows))
            return
        rows = dict(rows)
        # Slots that are reset have no transition; then each row says whose it is. A buffer of stacks refuses that, and
        # says why.
        self._is_named |= len(slots) < self._most
        self._most = max(self._most, len(slots))
        self.buffer.add(
            _nest(rows, "obs"),
            rows["action"],
            rows["reward"],
            _nest(rows, "next_obs"),
            rows["terminated"],
            _nest(rows, "critic_obs"),
            _nest(rows, "next_critic_obs"),
            truncated=rows.get("truncated"),
            fresh=fresh,
            extra={name: rows[name] for name in self._extra} or None,
            lane=slots if self._is_named else None,
        )


def _nest(rows: Mapping[str, Any], name: str) -> Any:
    """Return the rows under a name, nested by the slashes in their names."""
    if name in rows:
        return rows[name]
    made: dict[str, Any] = {}
    for column, values in rows.items():
        if column.startswith(f"{name}/"):
            *path, last = column.split("/")[1:]
            at = made
            for part in path:
                at = at.setdefault(part, {})
            at[last] = values
    return made or None


def sink_of(
    buffer: Any,
    keys: Keys,
    built: bool,
    stream: bool,
    commit_every: int | None = None,
    pace: Pace | None = None,
) -> Sink:
    """Return the sink for a buffer.

    Args:
        buffer: the buffer.
        keys: the keys that the environment provides.
        built: whether a transition builder computes the columns.
        stream: whether open episodes are to be streamed.
        commit_every: rows of an open episode to commit at a time; None: it is committed when it ends.
        pace: which each commit keeps.

    Raises:
        InputError: it is not a buffer, or its columns can't be filled, or the pace does not count it.
        ReadOnlyError, ClosedError: it may not be written.
    """
    sink = _sink_of(buffer, keys, built, stream, commit_every)
    if pace is not None:
        inner = buffer.online_buffer if isinstance(buffer, OfflineToOnlineReplayBuffer) else buffer
        pace.check_ring(inner.path, keys.where)
        sink.pace = pace
    return sink


def _sink_of(buffer: Any, keys: Keys, built: bool, stream: bool, commit_every: int | None = None) -> Sink:
    """Return the sink for a buffer; see `sink_of`."""
    where, inner = keys.where, buffer
    for kind, why in _NO_KEYS.items():
        if isinstance(buffer, kind):
            raise InputError(f"{where}: {why}")
    if isinstance(buffer, OfflineToOnlineReplayBuffer):
        inner = buffer.online_buffer
    if not isinstance(inner, ReplayBuffer | TransitionReplayBuffer | StepRing):
        what = type(inner).__name__
        raise InputError(
            f"{where}: can't record into a {what}: expected a ReplayBuffer, a TransitionReplayBuffer or an "
            "OfflineToOnlineReplayBuffer of ours"
        )
    ring = inner.buffer if isinstance(inner, StepRing) else inner
    if getattr(ring, "mode", "r+") != "r+":
        raise ReadOnlyError(f"{where}: {buffer!r} only reads; open it with mode='r+'")
    schema: Schema | None = inner.schema
    if isinstance(inner, TransitionReplayBuffer):
        columns: tuple[ColumnSpec, ...] | None = _transition_columns(inner.given_schema)
        casting = "safe"
    else:
        assert isinstance(ring, ReplayBuffer)
        casting = ring.options.casting
        columns = schema.columns if schema is not None else None
        if isinstance(inner, StepRing):
            columns = _ring_columns(buffer, columns, keys)
        elif columns is None and not built:
            columns = keys.default()
    if columns is not None and not built:
        keys.check(columns, casting, type(buffer).__name__)
    if isinstance(inner, ReplayBuffer):
        if not built:
            inner.expect_facts(Facts("next"), where)
        inner.check_commit_every(where, commit_every)
        return EpisodeSink(buffer, inner, columns, stream, commit_every)
    if commit_every is not None:
        raise InputError(
            f"{where}: commit_every={commit_every} is for buffers of episodes; a {type(inner).__name__} stores each "
            "step as it comes"
        )
    extra = []
    if isinstance(inner, TransitionReplayBuffer):
        extra = inner.given_schema.names[inner.given_schema.names.index("truncated") + 1 :]
    return RowSink(buffer, columns, casting, extra)


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
