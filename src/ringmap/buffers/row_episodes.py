"""Rows that a buffer stores, cut into episodes where they end: what `StoredDataset` reads.

    rows          r0 r1 r2 | r3 | r4 ..        | a flag says so, or the next row does not begin with what a row led to
    columns       those of the rows: obs, action, reward, next_obs, ...; an action's reward is in its row

    transitions   lane 0: t0 t1 t2 | t3 ..     | an episode ended, or the lane broke
    episode, T = 3  obs     o0 o1 o2 o3        o3: the next observation of t2
                    action  a0 a1 a2 --        -- blank, as in recorded episodes (datasets/episode.py)
                    reward  -- r0 r1 r2

Rows of several environments that were added in turn do not go on from each other: where rows have next observations,
each is an episode of its own then, never one of rows that do not belong together. Columns of transitions have the names
that recordings give; stacks are whole, rewards are those of single steps, whatever `frame_stack` and `n_step` are.

Invariants: each row that counts is in one episode, once, in the order in which they came, those of transitions in the
order of their last ones; an episode whose rows were evicted since is an error, never other rows.
Not here: the ring (steps.py), how a transition is read (transitions/nstep.py).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from ringmap.buffers.steps import StepRing
from ringmap.datasets.episode import blank
from ringmap.errors import InputError, LappedError, ReplacedError, UnknownColumnError
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.disk.paths import local_path
from ringmap.storage.read.episodes import ORIGIN_KEY, origin_of

__all__ = ["FRONT_EVICTED", "RowEpisodes", "RowSource", "TransitionSource"]


Array = np.ndarray[Any, np.dtype[Any]]

_FLAGS = ("terminated", "truncated", "done", "dones")
_NEXT = ("next_", "next/")


class RowEpisodes(ABC):
    """The rows of a buffer as episodes, as they are when it is made.

    `given`: the buffer, or its directory, which `open_at` opens; `name`: what a buffer in RAM is.
    """

    schema: Schema
    lengths: Array

    def __init__(self, given: Any, open_at: Callable[[str], Any], name: str) -> None:
        is_path = isinstance(given, str | os.PathLike)
        self._path = local_path(given) if is_path else ""
        self._open, self._open_at, self._uuid = None if is_path else given, open_at, b""
        self.episode_columns = list[str]()
        self.path = str(self._buffer.path or f"{name} in RAM")
        self._buffer.engine.commit_pending("episode_dataset")
        self._buffer.engine.refresh()

    @property
    def _buffer(self) -> Any:
        """The buffer; a directory is opened again after `close`."""
        if self._open is None:
            opened = self._open_at(self._path)
            uuid = opened.engine.owned.manifest.uuid
            if self._uuid not in (b"", uuid):
                opened.close()
                raise ReplacedError(f"{self._path}: holds another buffer than when it was opened; open it again")
            self._open, self._uuid = opened, uuid
        return self._open

    @cached_property
    def offsets(self) -> Array:
        """Row of each episode's first step, int64."""
        found: Array = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return found

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows `s, s + stride, ... < s + length` of columns for each s of `starts`, `(starts, rows, ...)`."""
        known = self.schema.names
        for name in columns:
            if name not in known:
                raise UnknownColumnError(f"{self.path}: no column {name!r}; there are {known}")
        rows = np.asarray(starts, np.int64)[:, None] + np.arange(0, length, stride)
        try:
            found = self._take(columns, rows.reshape(-1))
        except LappedError:
            raise self._evicted() from None
        return {name: values.reshape(*rows.shape, *values.shape[1:]) for name, values in found.items()}

    @abstractmethod
    def _take(self, columns: Sequence[str], rows: Array) -> dict[str, Array]:
        """Return columns of these rows, `(rows, ...)`."""

    def _evicted(self) -> ReplacedError:
        return ReplacedError(
            f"{self.path}: the buffer's writer evicted rows since its episodes were looked up; look them up again"
        )

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} if it has none."""
        return {}

    def close(self) -> None:
        """Close the directory, if it was opened here; the next read opens it again."""
        if self._path and self._open is not None:
            self._open.close()
            self._open = None


class RowSource(RowEpisodes):
    """The rows of a ring, or of its directory, if a column tells where an episode ends.

    Cost: reads the flags of all rows, and their observations if they have next ones.
    """

    reward_at = "same"

    def __init__(self, ring: StepRing | str | os.PathLike[str]) -> None:
        super().__init__(ring, StepRing.open, "a ring of rows")
        self.schema = self._buffer.schema or Schema(())
        self._positions = self._buffer.ids()
        ends = self._ends()
        self.lengths = np.diff(np.concatenate([[0], np.flatnonzero(ends) + 1])).astype(np.int32)

    def _ends(self) -> Array:
        """Tell after which rows an episode ends."""
        names, at = set(self.schema.names), self._positions
        ends = np.zeros(len(at), np.bool_)
        if not len(at):
            return ends
        later = [f"next/{flag}" for flag in _FLAGS if f"next/{flag}" in names]
        flags = later or [flag for flag in _FLAGS if flag in names]
        pairs = [
            (name, name.removeprefix(prefix))
            for prefix in _NEXT
            for name in self.schema.names
            if name.startswith(prefix)
            and name.removeprefix(prefix) in names
            and name.removeprefix(prefix) not in (*_FLAGS, "reward")
        ]
        if not flags and not pairs:
            raise InputError(
                f"{self.path}: no column of its rows, {self.schema.names}, tells where an episode ends (terminated, "
                "truncated, done, or "
                "next observations); read them as rows: for batch in OfflineToOnlineReplayBuffer.open(path, "
                "offline).rows()"
            )
        for flag in flags:
            ends |= self._buffer.column(flag, at).reshape(len(at), -1).any(1)
        for name, first in pairs:
            led_to, begun = self._buffer.column(name, at[:-1]), self._buffer.column(first, at[1:])
            if led_to.dtype == begun.dtype and led_to.shape == begun.shape:
                same = [a.tobytes() == b.tobytes() for a, b in zip(led_to, begun, strict=True)]
                ends[:-1] |= ~np.array(same, np.bool_)
        ends[:-1] |= np.diff(at) != 1
        ends[-1] = True
        return ends

    def _take(self, columns: Sequence[str], rows: Array) -> dict[str, Array]:
        return {name: self._buffer.column(name, self._positions[rows]) for name in columns}


FRONT_EVICTED = "front_evicted"
"""The episode value of an episode whose first transitions don't count any more."""

_OBSERVED = {"observations": "obs", "critic_observations": "critic_obs"}
_ACTION, _LATER = "action", {"reward": "rewards", "terminated": "dones", "truncated": "truncated"}
_CHUNK = 1024


class TransitionSource(RowEpisodes):
    """The episodes of a buffer of transitions, or of its directory, which `open_at` opens.

    Cost: reads the flags of all transitions, and the next observation of each episode's last one.
    """

    reward_at = "next"

    def __init__(self, buffer: Any, open_at: Callable[..., Any]) -> None:
        super().__init__(buffer, partial(open_at, device=None), "a buffer of transitions")
        self._name_columns()
        self._positions, self._begins, self._front_evicted, self._ordinals = self._chains()
        self.lengths = (np.diff(self._begins, append=len(self._positions)) + 1).astype(np.int32)
        self.episode_columns = [ORIGIN_KEY, FRONT_EVICTED] if self._front_evicted.any() else [ORIGIN_KEY]
        self._lineage: bytes = self._buffer.engine.owned.manifest.lineage

    def _name_columns(self) -> None:
        """Find the columns of an episode, and the column of the buffer, or the leaf of a batch, that each is."""
        given, specs = self._buffer.given_schema, list[ColumnSpec]()
        self._stored: dict[str, str] = {}
        taken = {*_OBSERVED.values(), _ACTION, *_LATER}
        names = {stored: name for name, stored in _LATER.items()} | {"actions": _ACTION}
        for spec in given.columns:
            first, joint, rest = spec.name.partition("/")
            name = names.get(spec.name) or _OBSERVED.get(first, first) + joint + rest
            if name == spec.name and spec.name in taken - {"truncated"}:
                name = f"extra/{name}"
            self._stored[name] = spec.name
            specs.append(ColumnSpec(name, spec.shape, spec.dtype))
        self.schema = Schema(tuple(specs))
        self._observed = [n for n in self.schema.names if self._stored[n].partition("/")[0] in _OBSERVED]

    def _chains(self) -> tuple[Array, Array, Array, Array]:
        """Return positions, episode by episode; where each episode begins; which lack their front; and ordinals."""
        reader, ring = self._buffer.reader, self._buffer.rows
        at = ring.ids()
        at = at[reader.has_frames(at)]
        while True:
            ordinals = reader.ordinals(at)
            order, begins, cut = chained(at, ordinals, ring.column("lanes", at).astype(np.int64))
            last = at[order[np.append(begins[1:], len(at))[: len(begins)] - 1]]
            lost = np.zeros(len(last), np.bool_)
            for begin in range(0, len(last), _CHUNK):
                lost[begin : begin + _CHUNK] = ~self._read(last[begin : begin + _CHUNK])[1]
            if not lost.any():
                return at[order], begins, cut, ordinals[order[begins]]
            at = at[~np.isin(at, last[lost])]  # such a one is never drawn either

    def _read(self, positions: Array) -> tuple[dict[str, Array], Array]:
        """Return single transitions, flat, and which of them are whole."""
        reader = self._buffer.reader
        batch, good = reader.singly(positions)
        bad = np.flatnonzero(~good)
        if len(bad):  # the next observation of one of the newest call is a row by now
            self._buffer.refresh()
            again, good[bad] = reader.singly(positions[bad])
            for name, values in again.items():
                batch[name][bad] = values
        return batch, good

    def _take(self, columns: Sequence[str], rows: Array) -> dict[str, Array]:
        episodes = self.offsets.searchsorted(rows, side="right") - 1
        steps = rows - self.offsets[episodes]
        counts = self.lengths[episodes] - 1
        before = self._begins[episodes]
        is_last, is_first = steps == counts, steps == 0
        here = self._positions[before + np.minimum(steps, counts - 1)]
        led_here = self._positions[before + np.maximum(steps - 1, 0)]
        specs = {spec.name: spec for spec in self.schema.columns}
        observed = [name for name in columns if name in self._observed]
        seen = self._observations(observed, here, is_last) if observed and len(rows) else {}
        found = {}
        for name in columns:
            spec = specs[name]
            if name in seen:
                found[name] = seen[name]
            elif not len(rows):
                found[name] = np.empty((0, *spec.shape), spec.dtype)
            else:
                at, none = (led_here, is_first) if name in _LATER else (here, is_last)
                values = self._buffer.rows.column(self._stored[name], at)
                values[none] = blank(spec.shape, spec.dtype)
                found[name] = values
        return found

    def _observations(self, names: Sequence[str], at: Array, is_last: Array) -> dict[str, Array]:
        """Return the observations of transitions, and of the last of an episode the next ones."""
        found, whole = {}, np.arange(len(at))
        if self._buffer.has_stacks:
            left = whole
        else:  # most observations are a row of their own
            left = np.flatnonzero(is_last)
            found = {name: self._buffer.rows.column(self._stored[name], at) for name in names}
        for begin in range(0, len(left), _CHUNK):
            part = left[begin : begin + _CHUNK]
            batch, good = self._read(at[part])
            if not good.all():
                raise self._evicted()
            for name in names:
                now, then = batch[self._stored[name]], batch[f"next_{self._stored[name]}"]
                into = found.setdefault(name, np.empty((len(at), *now.shape[1:]), now.dtype))
                into[part] = np.where(is_last[part].reshape(-1, *[1] * (now.ndim - 1)), then, now)
        return found

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return the origin of an episode, and `front_evicted` if its first transitions don't count any more."""
        data: dict[str, Any] = {ORIGIN_KEY: origin_of(self._lineage, int(self._ordinals[episode]))}
        return data | ({FRONT_EVICTED: True} if self._front_evicted[episode] else {})


def chained(at: Array, ordinals: Array, lanes: Array) -> tuple[Array, Array, Array]:
    """Return the numbers of transitions at ascending positions, episode by episode, in order of the episodes' last
    ones; where in these each episode begins; and which go on from a row that is not among these.

    Example:
        >>> order, begins, cut = chained(np.arange(6), np.array([7, 8, 7, 8, 9, 8]), np.array([-2, -2, 2, 2, 2, 2]))
        >>> order.tolist(), begins.tolist(), cut.tolist()
        ([0, 2, 4, 1, 3, 5], [0, 2, 3], [False, False, False])
    """
    order = ordinals.argsort(kind="stable")
    before = at - lanes
    is_first = np.ones(len(at), np.bool_)
    is_first[1:] = (np.diff(ordinals[order]) != 0) | (before[order[1:]] != at[order[:-1]])
    begins = is_first.nonzero()[0]
    counts = np.diff(begins, append=len(at))
    first, last = order[begins], order[begins + counts - 1]
    by_last = last.argsort()
    cut = (lanes[first] > 0) & ~np.isin(before[first], at)
    order = order[last[is_first.cumsum() - 1].argsort(kind="stable")]
    return order, np.cumsum(counts[by_last]) - counts[by_last], cut[by_last]
