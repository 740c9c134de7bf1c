"""The episodes that transitions are of: those of each lane, from one ending to the next.

    rows            lane 0: t0 t1 t2 | t3 ..          | an episode ended, or the lane broke
    episode, T = 3  obs     o0 o1 o2 o3               o3: the next observation of t2
                    action  a0 a1 a2 --               -- blank, as in recorded episodes (datasets/episode_rows.py)
                    reward  -- r0 r1 r2

Columns have the names that recordings give: obs, action, reward, terminated, truncated. Stacks are whole, rewards are
those of single steps, whatever `frame_stack` and `n_step` are.

Invariants: each transition that counts is in one episode, once; an episode whose rows were evicted since is an error,
never other rows; episodes are in the order of their last transitions, so that new ones come last.
Not here: how a transition is read (nstep.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringmap.buffers.reopened import Reopened
from ringmap.datasets.episode_rows import blank
from ringmap.errors import LappedError, ReplacedError, UnknownColumnError
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.commit.commit import NUMBERS
from ringmap.storage.read.episodes import ORIGIN_KEY, origin_of

Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["FRONT_EVICTED", "TransitionSource"]

FRONT_EVICTED = "front_evicted"
"""The episode value of an episode whose first transitions don't count any more."""

_OBSERVED = {"observations": "obs", "critic_observations": "critic_obs"}
_ACTION, _LATER = "action", {"reward": "rewards", "terminated": "dones", "truncated": "truncated"}
_CHUNK = 1024


class TransitionSource:
    """The episodes of a buffer of transitions as they are now, as `StoredDataset` reads them.

    Args:
        buffer: the buffer, or its directory.
        open_at: opens a directory: `TransitionReplayBuffer.open`.

    Raises:
        NotFoundError, UnknownFormatError, CorruptError, InputError: as for `TransitionReplayBuffer.open`.

    Cost: reads the flags of all transitions, and the next observation of each episode's last one.
    """

    reward_at = "next"

    def __init__(self, buffer: Any, open_at: Callable[..., Any]) -> None:
        self._held = Reopened[Any](buffer, partial(open_at, device=None))
        self.path = str(self._buffer.path or "a buffer of transitions in RAM")
        self._name_columns()
        self._positions, counts, cut, self._ordinals = self._chains()
        self._lineage: bytes = self._buffer.engine.owned.manifest.lineage
        self._front_evicted = cut
        self._transitions_before = np.cumsum(counts) - counts
        self.lengths = (counts + 1).astype(np.int32)
        self.offsets = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.episode_columns = [ORIGIN_KEY, FRONT_EVICTED] if cut.any() else [ORIGIN_KEY]

    @property
    def _buffer(self) -> Any:
        """The buffer, opened again after `close`."""
        return self._held()

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
        """Return the positions of all transitions, episode by episode; the number of each; whether it lacks its front;
        and its ordinal."""
        buffer, reader = self._buffer, self._buffer.reader
        buffer.engine.commit_pending(f"{type(buffer).__name__}.episodes")
        buffer.refresh()
        ring = buffer.rows
        positions = ring.ids()
        positions = positions[reader.has_frames(positions)]
        while True:
            lanes, done, truncated = (ring.column(n, positions) for n in ("lanes", "dones", "truncated"))
            order, counts, cut = chained(positions, lanes.astype(np.int64), done | truncated)
            found = positions[order]
            last = found[np.cumsum(counts) - 1]
            lost = np.zeros(len(last), np.bool_)
            for at in range(0, len(last), _CHUNK):
                lost[at : at + _CHUNK] = ~self._is_whole(last[at : at + _CHUNK])
            if not lost.any():
                return found, counts, cut, self._ordinals_of(found[np.cumsum(counts) - counts])
            positions = positions[~np.isin(positions, last[lost])]  # such a one is never drawn either

    def _ordinals_of(self, firsts: Array) -> Array:
        """Return the ordinals of the episodes with these first transitions."""
        found: Array = self._buffer.rows.column(NUMBERS, firsts)
        late = np.flatnonzero(found < 0)  # rows of an open group that a fork can't commit
        late = late[np.argsort(firsts[late])]
        found[late] = self._buffer.engine.owned.next_ordinal + np.arange(len(late))
        return found

    def _is_whole(self, positions: Array) -> Array:
        return self._read(positions)[1]

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

    # -- as a column source ------------------------------------------------------------------

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows `s, s + stride, ... < s + length` of these columns for each s of `starts`.

        Shapes: column -> (len(starts), ceil(length / stride), ...).

        Raises:
            ReplacedError: transitions were evicted since, or the path now holds something else.
        """
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

    def _take(self, columns: Sequence[str], rows: Array) -> dict[str, Array]:
        episodes = self.offsets.searchsorted(rows, side="right") - 1
        steps = rows - self.offsets[episodes]
        counts = self.lengths[episodes] - 1
        before = self._transitions_before[episodes]
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

    def close(self) -> None:
        """Close the directory, if it was opened here."""
        self._held.close()

    def _evicted(self) -> ReplacedError:
        return ReplacedError(
            f"{self.path}: the buffer's writer evicted transitions since its episodes were looked up; look them up "
            "again"
        )


def chained(positions: Array, lanes: Array, ended: Array) -> tuple[Array, Array, Array]:
    """Return which transitions make up each episode.

    Args:
        positions: of the transitions, ascending, int64 `(n,)`.
        lanes: their column: a row with N > 0 continues the lane of the row N before it.
        ended: which of them end an episode.

    Returns:
        The numbers of the transitions, episode by episode, in order of the episodes' last ones; how many each episode
        has; and which of them go on from a row that is not among these.

    Example:
        >>> lanes, ends = np.array([-2, -2, 2, 2, 2, 2]), np.array([0, 0, 1, 0, 0, 0], bool)
        >>> order, counts, cut = chained(np.arange(6), lanes, ends)
        >>> order.tolist(), counts.tolist(), cut.tolist()
        ([0, 2, 4, 1, 3, 5], [2, 1, 3], [False, False, False])
    """
    number = np.arange(len(positions))
    before = positions - lanes
    at = np.minimum(positions.searchsorted(before), max(0, len(positions) - 1))
    is_here = (lanes > 0) & (positions[at] == before)
    first = np.where(is_here & ~ended[at], at, number)
    while True:  # each round doubles the distance that it jumps
        further = first[first]
        if (further == first).all():
            break
        first = further
    begins, counts = np.unique(first, return_counts=True)
    last = np.zeros(len(positions), np.int64)
    np.maximum.at(last, first, number)
    order = np.argsort(last[first], kind="stable")
    by_last = np.argsort(last[begins])
    begins, counts = begins[by_last], counts[by_last]
    return order, counts, ((lanes > 0) & ~is_here)[begins]
