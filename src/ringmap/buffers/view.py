"""A view: the episodes of one moment, as a dataset whose ids do not change.

    part 0: starts, lengths on ring 0     part 1: starts, lengths on ring 4     ...       of one ring there is one part
    home     [0, 0, 0, 1, 1]              episode of the view -> part, and its number in there; None: part after part
    local    [0, 1, 2, 0, 1]
    ids -> (episode, step) -> position -> the buffer's own reader

An item is a clip, or holds what a window says, around one step, its anchor. A live view is replaced, by `refresh` or
where a pass begins, by another one of the same buffer and selection.

Invariants: ids, length, and the steps of a clip never change, of a live view only where it moves; in place of a clip
whose episode was evicted comes another one of the view, drawn uniformly from those that are left, and counted. What a
view holds is numbers, so that it travels without rings, and outlives one that is away.
Not here: rows (engine.py), the order of a pass (passes.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers import lookup
from ringmap.buffers.batch import Batch, rows_of
from ringmap.buffers.engine import Engine
from ringmap.buffers.lookup import ClipBuffer, Clips, fitting
from ringmap.buffers.options import sendable
from ringmap.buffers.passes import PassSampler
from ringmap.buffers.prefetch import Batches, drawn_ahead
from ringmap.buffers.rings import Ring, RingEpisodes, Rings, apart, episodes_of, joined, moment_of, pack, unpack
from ringmap.buffers.sharded.clip_table import ClipTable
from ringmap.buffers.workers import LoaderState, outlives_its_pass
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut
from ringmap.clips.draws import Crossing, Drawn
from ringmap.clips.gather import GONE, PINNED
from ringmap.clips.index import ClipIndex
from ringmap.clips.items import EpisodeMoment
from ringmap.clips.rings import groups
from ringmap.clips.window import WindowSpec, tell_no_lanes
from ringmap.datasets.base import Dataset, Where, clip_id, clip_ids
from ringmap.datasets.batch import Layout, worker
from ringmap.datasets.episode_table import choose
from ringmap.datasets.split import Arcs
from ringmap.datasets.windows import Runs
from ringmap.errors import ClipIndexError, InputError, NoClipsError, StaleCopyError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.values import nested
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.links import NONE, Parts
from ringmap.storage.ring.live import LiveEpisodes

__all__ = ["BufferView"]

Array = np.ndarray[Any, np.dtype[Any]]


_ROWS = 4096
"""Rows of transitions that are parts by themselves: so many stop to count before the parts are looked at again."""


@dataclass(frozen=True, slots=True)
class Live:
    """What a live view holds at each moment: the episodes to keep, None for all, the items to cut out of them, and the
    side of a split."""

    where: Where | None
    cut: Cut | None
    arcs: Arcs | None = None


class EpisodeNumbers:
    """The numbers of a view's episodes. `is_live`: whether the view moves, which a worker's copy of them does not
    see."""

    def __init__(self, starts: Array, is_live: bool = False) -> None:
        self.is_live = is_live
        self.order = np.argsort(starts, kind="stable")
        self.starts = starts[self.order]

    def __call__(self, starts: Array) -> Array:
        """Return the number of the episode that begins at each position; -1 where none does. O(B log episodes).

        Raises:
            InputError: of a live view, in a worker.
        """
        if self.is_live and worker() is not None:
            raise InputError(
                "Index: a worker does not know how a live view numbers its episodes, since it moves in the process "
                "that owns the loader; use num_workers=0, or a view without live=True"
            )
        found = np.minimum(self.starts.searchsorted(starts), max(0, len(self.starts) - 1))
        if not len(self.starts):
            return np.full(len(starts), -1)
        numbers: Array = np.where(self.starts[found] == starts, self.order[found], -1)
        return numbers


class Part(NamedTuple):
    """Episodes of one ring, by its number."""

    number: int
    episodes: RingEpisodes


class BufferView(Dataset):
    """Pinned episodes of a buffer, made by its `view()` and `split()`.

    A pickled view carries its episodes (12 bytes each) and the pickled buffer, so that every
    rank that receives it counts alike: `DistributedSampler(view)` never sees another length.

    Args:
        buffer: the buffer to read.
        parts: the episodes of each ring.
        home: for each episode of the view, its part; None: part after part.
        local: its number in there.
        cut: what an item holds; None: a clip of the buffer.

    Processes and threads: as the buffer.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100)
        >>> buf.write_episode({"obs": np.arange(10)})
        >>> view = buf.view()
        >>> buf.write_episode({"obs": np.arange(5)})
        >>> len(view), len(buf), view[9]["obs"].tolist()
        (10, 15, [9])
    """

    def __init__(
        self,
        buffer: ClipBuffer,
        parts: Sequence[Part],
        home: Array | None = None,
        local: Array | None = None,
        cut: Cut | None = None,
    ) -> None:
        if cut is not None and cut.across and (len(parts) != 1 or parts[0].episodes.is_part):
            raise InputError(
                "BufferView: a sequence with across=True runs on into the next episode of its ring, which this "
                "view may have left out, or can't number over many rings; use across=False, or a view of the whole "
                "buffer if it is one ring"
            )
        parts = [part._replace(episodes=part.episodes.frozen()) for part in parts]
        self._parts = tuple(parts)
        if len(parts) == 1 and home is None:
            starts, sizes = parts[0].episodes.starts, parts[0].episodes.lengths
            if parts[0].number:
                starts = joined(parts[0].number, starts)
        else:
            counts = [len(part.episodes.starts) for part in parts]
            if home is None or local is None:
                home = np.repeat(np.arange(len(counts)), counts)
                local = np.concatenate([np.empty(0, np.int64), *map(np.arange, counts)])
            sizes, starts = np.zeros(len(home), np.int64), np.zeros(len(home), np.int64)
            for which, places in groups(home):
                number, episodes = parts[which]
                sizes[places] = episodes.lengths[local[places]]
                starts[places] = joined(number, episodes.starts[local[places]])
        self._home, self._local = home, local
        super().__init__(sizes, np.cumsum(sizes) - sizes, buffer.frameskip, buffer.num_steps)
        self._buffer: Any = buffer
        self.starts = starts
        """Id of the first step of each episode, also if that was evicted."""
        self._left: dict[int, tuple[Handle, int, ClipIndex]] = {}
        self._table: ClipTable | None = None
        if cut is not None and cut.computed:
            cut = replace(cut, episode_numbers=EpisodeNumbers(starts))
        self._cut = cut
        self._moves: Live | None = None
        self._moment: dict[str, Any] | None = None
        self._newer: BufferView | None = None
        self._moments: LoaderState | None = None
        self._as_of = 0
        self._told_short = cut is not None  # the buffer said so when it made the cut
        self.fps, self.reward_at = buffer.fps, buffer.reward_at

    @property
    def engine(self) -> Engine:
        """The engine of the buffer."""
        engine: Engine = self._buffer.engine
        return engine

    # -- which episodes ----------------------------------------------------------------------

    @classmethod
    def of(cls, buffer: Any) -> Self:
        """Return a view of all that is stored now (for a reader: at its last refresh)."""
        return cls(buffer, [Part(ring.number, ring.pinned_episodes()) for ring in buffer.engine.all_rings()])

    @classmethod
    def of_pass(cls, buffer: Any) -> Self:
        """Return the same for a pass, which needs no episodes of transitions: these are as they were committed."""
        return cls(buffer, [Part(ring.number, ring.pinned()) for ring in buffer.engine.all_rings()])

    def with_cut(self, cut: Cut | None) -> Self:
        """Return a view of the same episodes with other items."""
        self._check_moment()
        made = type(self)(self._buffer, self._parts, self._home, self._local, cut)
        made._source_episodes, made._arcs = self._source_episodes, self._arcs
        return made

    def take(self, episodes: Sequence[int] | Array) -> Self:
        """Return a view of some of the episodes, in this order."""
        chosen = self._episode_numbers(episodes)
        parts, home, numbers = list(self._parts), None, None
        if self._home is None or self._local is None:
            parts[0] = parts[0]._replace(episodes=parts[0].episodes.take(chosen))
        else:
            home, local, numbers = self._home[chosen], self._local[chosen], np.zeros(len(chosen), np.int64)
            for which, part in enumerate(parts):  # a part without any is empty: numbers of parts stay
                mine = (home == which).nonzero()[0]
                parts[which] = part._replace(episodes=part.episodes.take(local[mine]))
                numbers[mine] = np.arange(len(mine))
        made = type(self)(self._buffer, parts, home, numbers, self._cut)
        made._source_episodes, made._arcs = self.source_episodes[chosen], self._arcs
        return made

    def _by_part(self, episodes: Array) -> list[tuple[Part, Any, Array]]:
        """Return these episodes part by part: the part, the places of its episodes among these, their numbers in it."""
        if self._home is None or self._local is None:
            return [(self._parts[0], slice(None), episodes)]
        home, local = self._home[episodes], self._local[episodes]
        return [(self._parts[which], places, local[places]) for which, places in groups(home)]

    @property
    def ended(self) -> Array:
        """Tell of each episode whether it had ended: bool `(episodes,)`."""
        self._check_moment()
        found = np.ones(len(self._lengths), np.bool_)
        for part, places, local in self._by_part(np.arange(len(found))):
            found[places] = part.episodes.ended[local]
        return found

    def _named(self) -> dict[str, Any]:
        rings = [moment_of(self.engine.uuid_of(part.number), part.episodes) for part in self._parts]
        order = {} if self._home is None or self._local is None else {"home": self._home, "local": self._local}
        return {"rings": rings, **pack(order)}

    @classmethod
    def _at(cls, buffer: Any, moment: Mapping[str, Any], where: str) -> Self:
        """Return the view of the episodes of a moment; a ring of it that is away may come back."""
        rings, parts = moment.get("rings"), list[Part]()
        if not isinstance(rings, list):
            raise InputError(f"{where}: this is no moment of a view: rings={rings!r:.80}")
        for one in rings:
            uuid, episodes = episodes_of(one, where)
            number = buffer.engine.number_of(uuid)
            if number is None:
                raise InputError(f"{where}: the moment is of another buffer: uuid {uuid.hex()}")
            parts.append(Part(number, episodes))
        if "home" not in moment and len(parts) == 1:
            return cls(buffer, parts)
        home, local = unpack(moment, ("home", "local"), where).values()
        counts = [len(part.episodes.starts) for part in parts]
        # Each episode of each part once: draws are from whole parts.
        every = (
            np.repeat(np.arange(len(parts)), counts),
            np.concatenate([np.empty(0, np.int64), *map(np.arange, counts)]),
        )
        order = np.lexsort((local, home)) if len(home) == len(local) else np.empty(0, np.int64)
        is_each_once = np.array_equal(home[order], every[0]) and np.array_equal(local[order], every[1])
        if len(home) != len(local) or not is_each_once or len({part.number for part in parts}) < len(parts):
            raise InputError(f"{where}: this is no moment of a view: its episodes do not fit")
        return cls(buffer, parts, home, local)

    @classmethod
    def at(cls, buffer: Any, moment: Any, where: str) -> Self:
        """Return the view of a moment.

        Raises:
            InputError: it is none of this buffer.
        """
        if not isinstance(moment, Mapping):
            raise InputError(f"{where}: expected what `moment` of a view returned, got {moment!r:.80}")
        episodes = {name: value for name, value in moment.items() if name != "arcs"}
        made = cls._at(buffer, episodes, where)
        made._arcs = Arcs.of_json(moment["arcs"], where) if "arcs" in moment else None
        return made

    # -- where steps stand -------------------------------------------------------------------

    def positions_of(self, episodes: Array, steps: Array) -> Array:
        """Return where steps of episodes stand, as the engine reads them: on one ring their positions."""
        if self._home is None and not self._parts[0].number:
            return self._parts[0].episodes.positions(episodes, steps)
        found = np.zeros(len(episodes), np.int64)
        for part, places, local in self._by_part(episodes):
            found[places] = joined(part.number, part.episodes.positions(local, steps[places]))
        return found

    def steps_of(self, episodes: Array, positions: Array) -> Array:
        """Return which steps of episodes stand at these positions, -1 for none: what `positions_of` takes back."""
        found = np.full(len(episodes), -1)
        for part, places, local in self._by_part(episodes):
            found[places] = part.episodes.steps_of(local, apart(positions[places])[1])
        return found

    def origins(self) -> tuple[Array, Array]:
        """Return what each episode that is still stored was first stored as; see `Dataset.origins`."""
        count = len(self._lengths)
        lineages, ordinals = np.zeros((count, 16), np.uint8), np.zeros(count, np.uint64)
        self.engine.check_open()
        for part, places, local in self._by_part(np.arange(count)):
            ring = self.engine.ring_at(part.number)
            if ring is not None:
                lineages[places], ordinals[places] = ring.origins(part.episodes.starts[local])
        return lineages, ordinals

    def marked_ring(self) -> tuple[Handle, Array] | None:
        """Return the ring, for `Marks`, and the positions of the view's episodes; None for many rings."""
        if self._home is not None:
            return None
        part = self._parts[0]
        ring = self.engine.ring(part.number)
        return None if ring is None else (ring.source, part.episodes.starts)

    def positions(self, ids: Array) -> Array:
        """Return the anchors of the clips with these ids, as the engine reads them: of their first steps, without a
        window."""
        view = self._now()
        return view.positions_of(*view._locate(ids))

    def are_stored(self, episodes: Array, steps: Array) -> Array | None:
        """Tell which steps are still stored, bool `(B,)`."""
        self.engine.refresh()
        anchors = self.engine.anchors_at(self.positions_of(episodes, steps), Cut.clip(1))
        found: Array = anchors != GONE
        return found

    # -- whole episodes ----------------------------------------------------------------------

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        names: list[str] = self._buffer.column_names
        return names

    def _schema(self, where: str) -> Schema:
        return self.engine.schema or super()._schema(where)

    def _cut_for(
        self, window: WindowSpec | None, columns: Iterable[str] | None, anchors: Any, drop_all_padded: bool
    ) -> Cut | None:
        if drop_all_padded or any(given is not None for given in (window, columns, anchors)):
            self.engine.episodes_only("view(window=, columns=, anchors=)")
        return super()._cut_for(window, columns, anchors, drop_all_padded)

    def _ring_of(self, ep: int) -> tuple[Ring, int, int]:
        """Return the ring of an episode, its number there now, and how many of its first steps went since."""
        self.engine.episodes_only("load_episode")
        part, _, local = self._by_part(np.array([ep]))[0]
        ring, which = self.engine.ring(part.number), int(local[0])
        if ring is None:
            raise ClipIndexError(f"BufferView: the ring of episode {ep} is away")
        name, source = part.episodes.starts[which : which + 1], ring.source
        with thread.searching, source.lock:
            live = source.live
            if live.links is None:
                index = int(live.starts.searchsorted(name[0]))
                if index < len(live) and live.starts[index] == name[0]:
                    return ring, index, 0
            else:
                index = int(live.whole.find(name)[0])
                if index >= 0:
                    stored = part.episodes.stored
                    before = 0 if stored is None else int(stored[0].first_steps[stored[1][which]])
                    return ring, index, int(live.whole.first_steps[index]) - before
        raise self._evicted(ep)

    @staticmethod
    def _evicted(ep: int) -> ClipIndexError:
        return ClipIndexError(f"BufferView: episode {ep} was evicted since the view was made")

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        return self._read_steps(ep, start, end, None)

    def _read_steps(self, ep: int, start: int, end: int, columns: Sequence[str] | None) -> dict[str, Any]:
        ring, index, gone = self._ring_of(ep)
        if gone > start:
            raise self._evicted(ep)
        schema, names = ring.source.schema, None if columns is None else list(columns)
        steps = ring.episodes.steps(index, start - gone, end - gone, "ReplayBuffer", names)
        assert schema is not None
        found = dict(zip(names or schema.names, steps, strict=True))
        return found if columns is not None else {name: found[name] for name in self.column_names}

    def load_steps(
        self, episode_idx: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return steps `[start, end)` of one episode, dense: every column, or those of `columns`, which alone are read.

        Raises:
            ClipIndexError: there are no such steps, or they were evicted since, or their ring is away.
            UnknownColumnError: there is no such column.
        """
        for name in columns or ():
            self._check_column(name, "load_steps")
        return self._read_steps(operator.index(episode_idx), start, end, columns)

    def episode_data(self, episode_idx: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} if it has none. Reads its data alone.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted since, or its ring is away.
        """
        ring, index, _ = self._ring_of(self._episode_number(episode_idx))
        return ring.episodes.data_of(index, "BufferView.episode_data")

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the episode data of the episodes that the buffer holds now."""
        self.engine.episodes_only("get_episode_data")
        names: list[str] = self._buffer.episode_column_names
        return names

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return values constant within an episode, as the buffer does.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted since, or its ring is away.
        """
        self.engine.episodes_only("get_episode_data")
        numbers = self._episode_numbers(idx)
        return self.engine.data(self.starts[numbers], lambda place: self._evicted(int(numbers[place])))

    @property
    def _lacks_episodes(self) -> bool:
        """Whether the view has left out stored episodes."""
        return any(part.episodes.is_part for part in self._parts)

    def _lane_runs(self) -> Runs:
        stored = self._parts[0].episodes.stored if self._home is None else None
        if stored is None:
            return super()._lane_runs()
        if self._found_runs is None:
            runs = stored[0].by_lane()
            if NONE in runs.lanes:
                tell_no_lanes("BufferView")
            self._found_runs = self.lengths, Runs(self.lengths, runs.episodes, runs.places)
        return self._found_runs[1]

    # -- items -------------------------------------------------------------------------------

    @property
    def clips(self) -> Clips:
        """What finds and reads the clips."""
        return _ViewClips(self)

    @property
    def cut(self) -> Cut:
        """What an item holds."""
        return super().cut if self._cut is None else self._cut

    @property
    def span(self) -> int:
        """Steps that an episode must have for an item."""
        return super().span if self._cut is None else self._cut.span

    @property
    def transform(self) -> Any:
        """That of the buffer."""
        return self._buffer.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        if transform is not None:
            raise InputError(f"{type(self).__name__}: set transform on the buffer; a view hands out the same clips")

    @property
    def num_redraws(self) -> int:
        """Clips that the buffer redrew so far, in this process."""
        return self.engine.num_redraws

    def view(
        self,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
        *,
        where: Where | None = None,
    ) -> Self:
        """Return a view of the same episodes with other items, or of some of them, as `ReplayBuffer.view` does.

        It stays as it is, also that of a live view: it has the episodes of this moment.
        """
        if where is not None:
            chosen = self.selected(where, self._where("view"))
            return chosen.view(window, columns, anchors, drop_all_padded)
        made = self.with_cut(self._cut_for(window, columns, anchors, drop_all_padded))
        made.tell_none()
        return made

    def selected(self, where: Where, caller: str, marks: Any = None) -> Self:
        """Return a view of the episodes that are wanted; see `Dataset.selected`."""
        self.engine.episodes_only("view(where=)")
        wanted = choose(self, where, marks, f"{caller}: where")
        # What a condition asks for may come with the end: its data, its return, a mark.
        return self.take(wanted[self.ended[wanted]])

    # -- moments -----------------------------------------------------------------------------

    @property
    def moment(self) -> dict[str, Any]:
        """The episodes of the view, as JSON: `buffer.view(at=moment)` has their number and ids, in any process,
        whatever was evicted since.

        Cost: 1 to 3 bytes for each episode; made once.
        """
        self._check_moment()
        if self._moment is None:
            self._moment = self._named()
            if self._arcs is not None:
                self._moment["arcs"] = self._arcs.as_json()
        return dict(self._moment)

    @property
    def is_live(self) -> bool:
        """Whether the view moves: see `ReplayBuffer.view`."""
        return self._moves is not None

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int32."""
        self._check_moment()
        return self._lengths

    def _locate(self, ids: Array) -> tuple[Array, Array]:
        self._check_moment()
        return super()._locate(ids)

    def _check_moment(self) -> None:
        """Raise in a worker whose copy of a live view is of an earlier moment than that of its owner."""
        if self._moments is not None and self._is_behind:
            raise StaleCopyError(
                f"{type(self).__name__}: this worker has a copy of a live view from when it started, and the view "
                "moved since, so ids and numbers of episodes mean others there; make the loader with "
                "sampler=view.pass_sampler(), whose items name positions, or with persistent_workers=False"
            )

    @property
    def _is_behind(self) -> bool:
        """Whether this is a worker's copy of a live view, and ids may be of a later moment.

        Those of the pass with which a worker began, and ends, are of its own, wherever the view moved meanwhile.
        """
        moments = self._moments
        if moments is None or moments.is_mine or worker() is None:
            return False
        return moments.generation != self._as_of and outlives_its_pass()

    def _now(self) -> Self:
        """Return this view; of a live one, what it is now, whatever another thread moves it to meanwhile."""
        if self._moves is None:
            return self
        now = object.__new__(type(self))
        now.__dict__ = self.__dict__  # `move_to` replaces it as a whole
        return now

    def _go_live(self, moves: Live) -> None:
        """Begin to move."""
        self._moves, self._moments = moves, LoaderState(numbers=0)
        self.move_to(self)

    def refresh(self) -> bool:
        """Move a live view to what is stored now; tell whether anything changed.

        Raises:
            InputError: the view is not live.
        """
        if self._moves is None:
            raise InputError(
                f"{type(self).__name__}.refresh: this view stays as it is; make it with view(live=True), or make a new "
                "one"
            )
        before = self.starts, self.lengths, self.ended
        self.engine.commit_pending(f"{type(self).__name__}.refresh")  # workers see what is committed
        self.engine.refresh()
        made = self.of(self._buffer)
        if self._moves.where is not None:
            made = made.selected(self._moves.where, self._where("view"))
        if self._moves.arcs is not None:
            made = made.take(np.flatnonzero(self._moves.arcs.hold(*made.origins())))
            made._arcs = self._moves.arcs
        self.move_to(made)
        now = self.starts, self.lengths, self.ended
        return not all(map(np.array_equal, now, before))

    @classmethod
    def asked(
        cls, buffer: Any, cut: Cut | None, where: Where | None, live: bool, at: Mapping[str, Any] | None, caller: str
    ) -> Self:
        """Return the view that `view` of a buffer was asked for; `caller`: to name in an error."""
        if at is None:
            made = cls.of(buffer)
            if where is not None:
                made = made.selected(where, caller)
        else:
            if live or where is not None:
                raise InputError(
                    f"{caller}: at= names the episodes of a moment, and leaves no choice to where= or live=; give it "
                    "alone, or with a window"
                )
            made = cls.at(buffer, at, caller)
        made = made.with_cut(cut)
        if live:
            made._go_live(Live(where, cut))
        made.tell_none()
        return made

    def redraw_here(self, count: int) -> Array:
        """Do what `redraw` does; a worker's copy of a live view, which no pass moves, draws from what it selects now
        where the view moved, or half of it is gone.

        Raises:
            NoClipsError: nothing is left to draw.
        """
        if self._moves is None or worker() is None:
            return self.redraw(count)
        # The ids of a worker stay those of the pass: it is another view that moves.
        view = self if self._newer is None else self._newer
        if view._is_behind or 2 * view.num_valid_ends() <= len(view):
            newer = self.of(self._buffer)
            newer._moves = self._moves
            newer.num_steps, newer.frameskip = self.num_steps, self.frameskip
            newer.refresh()
            self._newer = newer
            return newer.redraw(count)
        return view.redraw(count)

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips that can be drawn: those of episodes that are still stored, on rings that are
        open."""
        engine = self.engine
        engine.check_open()
        if engine.many is not None:
            return engine.moment(self.cut, self).count
        clips = self.range()
        return 0 if clips is None else clips.count

    def range(self) -> ClipRange | None:
        """Return the clips of a view of one ring that are still stored; None: there are none. For a caller that has
        called `check_open`."""
        return self._now()._range_on(self.engine.rings[0])

    def table(self, rings: Rings) -> ClipTable:
        """Return where the clips of the view are that are still stored, on the rings that are open. Holds their
        lock."""
        view = self._now()
        table = view._table
        if table is None or table.rings is not rings.open:
            table = view._table = ClipTable(rings.open, view._range_on)
        table.follow(rings)
        return table

    def _range_on(self, ring: Ring) -> ClipRange | None:
        """Return the clips of the view on a ring that are still stored."""
        for number, episodes in self._parts:  # noqa: B007 - the one of this ring
            if number == ring.number:
                break
        else:
            return None
        if not len(episodes.starts):
            return None
        source, cut = ring.source, self.cut
        source.recover_if_stale()
        # Those of a pass are as they were committed, and a part of such may still count.
        low = source.tail if episodes.stored is None else ring.low
        with thread.searching, source.lock:
            live, left = source.live, self._left.get(ring.number)
            if left is None or left[0] is not source or left[1] != live.era or left[2].live.is_inside(low):
                until = low if ring.reader.capacity is None else low + _ROWS
                left = self._left[ring.number] = source, live.era, ClipIndex(_among(episodes, live, until))
            index = left[2]
            index.live.evict_before(low)
            return ClipRange(source, index.of(cut.span, cut.least, cut.across), before=cut.before)

    def clip_windows(self, history_len: int = 1) -> list[ClipRange]:
        """Return the clips of the view whose episodes are still stored, for samplers, ring by ring."""
        self.engine.check_open()
        if self.engine.many is not None:
            return self.engine.windows(self.cut, self)
        clips = self.range()
        return [] if clips is None else [clips]

    def clip_window(self, history_len: int = 1) -> ClipRange:
        """Return the clips of the view whose episodes are still stored, for samplers.

        Raises:
            InputError: they are on many rings.
        """
        return self.engine.only(self.clip_windows(history_len))

    def redraw(self, count: int) -> Array:
        """Return the anchors of `count` clips, as `engine` reads them, drawn uniformly from those that are still
        stored.

        Raises:
            NoClipsError: all were evicted, or their rings are away.
        """
        engine, found = self.engine, None
        engine.check_open()
        if engine.many is not None:
            with engine.members.lock:
                found = self.table(engine.members).draw(count, None, engine.rng)
        elif (clips := self.range()) is not None:
            with thread.searching, clips.lock:
                clips.follow()
                found = clips.draw(count, engine.rng)
        if found is None:
            raise NoClipsError(f"BufferView: {self.why_no_clips()}")
        return found

    def why_no_clips(self) -> str:
        """Return, in words, why no clip of the view can be drawn."""
        if not len(self):
            return self._why_no_clips()
        away = "" if self._home is None else ", or their rings are away"
        return f"all episodes of the view were evicted since it was made{away}; make a new view"

    def pinned(self) -> Self:
        """Return this view; of a live one, a view of its moment that stays as it is."""
        if self._moves is None:
            return self
        made = self.with_cut(self._moves.cut)
        made.num_steps, made.frameskip = self.num_steps, self.frameskip
        made._moment = self._moment
        return made

    def begin_pass(self) -> Self:
        """Return the view of a pass that begins: for `PassSampler`."""
        if self._moves is not None:
            self.refresh()
        return self.pinned()

    def view_at(self, moment: Mapping[str, Any]) -> Self:
        """Return the view of an earlier pass: for `PassSampler`.

        Raises:
            InputError: the moment is not one of this view.
        """
        where = f"{type(self).__name__}.pass_sampler"
        made = self.at(self._buffer, moment, where)
        if self._moves is None and made.moment != self.moment:
            raise InputError(
                f"{where}: the state is of a view of another moment; make this one with view(at=state['moment']), or "
                "with live=True"
            )
        if self._moves is not None and made._arcs != self._moves.arcs:
            raise InputError(f"{where}: the state is of another side of a split, or of a view that is none")
        return made.with_cut(self._cut if self._moves is None else self._moves.cut)

    def move_to(self, view: Any) -> None:
        """Move a live view to the moment of another view of the same buffer: for `PassSampler`. A view that is not live
        stays."""
        if self._moves is None:
            return
        made = view.with_cut(self._moves.cut)
        made.num_steps, made.frameskip = self.num_steps, self.frameskip
        made._moves, made._moment = self._moves, view._moment
        if made._cut is not None and made._cut.computed:
            numbers = EpisodeNumbers(made.starts, is_live=True)
            made._cut = replace(made._cut, episode_numbers=numbers)
        made._moments = self._moments
        if made._moments is not None and made._moments.is_mine:
            made._moments.tell()  # first: a worker that is forked now refuses
            made._as_of = made._moments.generation
        self.__dict__ = made.__dict__  # at once: another thread may draw

    def pass_sampler(
        self, shuffle: bool = True, seed: int = 0, rank: int = 0, num_ranks: int = 1, drop_last: bool = False
    ) -> PassSampler:
        """Return a sampler for a DataLoader over this view: each item once in a pass, which can be resumed.

        A live view moves where a pass begins. See `ReplayBuffer.pass_sampler`.
        """
        return PassSampler(self, shuffle, seed, rank, num_ranks, drop_last)

    # -- items by id -------------------------------------------------------------------------

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """Return one clip, or with a list of ids the batch, as the buffer does.

        In place of one whose episode was evicted comes another one of the view, drawn uniformly from those that are
        left. The batch has the `ids` of what came, and `redrawn`, bool `(B,)`, marks it.

        Raises:
            NoClipsError: none is left.
        """
        if np.ndim(idx):
            return lookup.mapping(self, clip_ids(idx, type(self).__name__))
        return lookup.one(self, clip_id(idx, type(self).__name__, has_batches=True))

    def items_at(self, ids: Array) -> dict[str, Any]:
        """Return items by id as one batch; clips of one step come as they are stored, `(n, ...)`."""
        batch, is_step = self[ids], (self.cut.history, self.cut.frameskip) == (1, 1)
        return rows_of(batch, self.engine.schema, len(ids)) if is_step else batch

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips at once, as with a list of ids. PyTorch's DataLoader calls this method."""
        return lookup.several(self, clip_ids(indices, type(self).__name__))

    def locate(self, ids: Any) -> tuple[Array, Array]:
        """Return in which episodes of the view steps are, and which steps they are there, as the buffer does.

        Raises:
            ClipIndexError: a step was evicted, or is in no episode of the view.
        """
        where = f"{type(self).__name__}.locate"
        self.engine.episodes_only("locate")
        asked = clip_ids(ids, where)
        episodes, _ = lookup.locate(self.with_cut(lookup.STANDS), asked, where)
        steps = self.steps_of(episodes, asked)
        if (steps < 0).any():
            raise ClipIndexError(
                f"{where}: no step with the id {int(asked[steps < 0][0])} is in this view; its episode has grown since"
            )
        return episodes, steps

    def _why_no_clips(self) -> str:
        return self.cut.why_none(self.lengths)

    def split(self, train: float | Sequence[float] = 0.9, seed: int = 0) -> tuple[Self, ...]:
        """Return views that share no episode; see `Dataset.split`. Of a live view they are live, each of its own
        side."""
        sides: tuple[Self, ...] = super().split(train, seed)  # type: ignore[assignment]
        if self._moves is not None:
            for side in sides:
                side._go_live(replace(self._moves, arcs=side._arcs))
        return sides

    # -- draws -------------------------------------------------------------------------------

    def draw(self, size: int, step: int | None = None) -> Drawn:
        """Draw clips of episodes that are still stored, through the sampler of the buffer.

        Raises:
            NoClipsError: all were evicted, or their rings are away.
        """
        return self.engine.draw_among(self, size, self.cut, step)

    def sample(
        self,
        batch_size: int,
        step: int | None = None,
        *,
        out: Mapping[str, Array] | None = None,
        nest: bool = False,
    ) -> Batch[Array]:
        """Draw a batch of items of the view, through the sampler of the buffer.

        Args:
            batch_size: B.
            step: as for `ReplayBuffer.sample`.
            out: as for `ReplayBuffer.sample`.
            nest: as for `ReplayBuffer.sample`.

        Raises:
            InputError, ClipIndexError, NoClipsError, LappedError: as `ReplayBuffer.sample`.
        """
        batch_size = positive(f"{type(self).__name__}.sample", "batch_size", batch_size)
        into = None if out is None else fitting(out, self.engine, batch_size, self.cut)
        positions, crossing, weigh = self.draw(batch_size, step)
        asked = positions.copy()
        columns = self.clips.read(positions, self.cut, into, crossing=crossing)
        batch = self.engine.shown(Batch(columns, positions, weigh and weigh(positions), asked))
        return batch.like(nested(batch, f"{type(self).__name__}.sample")) if nest else batch

    def batches(
        self,
        batch_size: int,
        steps: int | None = None,
        prefetch: int = 2,
        to: str = "numpy",
        device: Any = None,
        pin_memory: bool = False,
    ) -> Batches:
        """Return an endless iterator over `sample(batch_size)`, as `ReplayBuffer.batches` does."""

        def ahead(size: int, count: int | None) -> Iterator[Batch[Any]]:
            ahead = drawn_ahead(self.clips, partial(self.draw, size), self.cut, count)
            return map(self.engine.shown, ahead)

        return Batches(self.sample, ahead, batch_size, steps, prefetch, to, device, pin_memory)

    def __getstate__(self) -> dict[str, Any]:
        for name, function in self.cut.functions:
            sendable(type(self).__name__, f"window[{name!r}]", function)
        if self._moves is not None:
            sendable(type(self).__name__, "where", self._moves.where)
        return {**super().__getstate__(), "_newer": None, "_left": {}, "_table": None}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({'live, ' * self.is_live}episodes={len(self.lengths)}, clips={len(self)}, "
            f"of={self._buffer!r})"
        )


class _ViewClips:
    """The `Clips` of a view: with ids of the view, or PINNED + position, and redraws from the view."""

    def __init__(self, view: BufferView) -> None:
        self._view, self._engine = view, view.engine

    def anchors(self, ids: Array, cut: Cut) -> Array:
        is_pinned = len(ids) > 0 and int(ids.max()) >= PINNED
        return self._engine.anchors(ids if is_pinned else PINNED + self._view.positions(ids), cut)

    def replaced(self, positions: Array, cut: Cut) -> Array:
        return self._engine.replaced(positions, cut, self._view.redraw_here)

    def read(
        self,
        positions: Array,
        cut: Cut,
        out: dict[str, Array] | None = None,
        asked: bool = False,
        crossing: Crossing | None = None,
        *,
        numbers: EpisodeMoment | None = None,
    ) -> dict[str, Array]:
        redraw = self._view.redraw_here
        return self._engine.read(positions, cut, out, asked, crossing, redraw, numbers=numbers)

    def numbering(self, cut: Cut) -> EpisodeMoment | None:
        return self._engine.numbering(cut)

    def layout(self, cut: Cut, size: int) -> Layout:
        return self._engine.layout(cut, size)

    def want(self, positions: Array, cut: Cut) -> None:
        self._engine.want(positions, cut)


def _among(episodes: RingEpisodes, live: LiveEpisodes, rows_until: int) -> LiveEpisodes:
    """Return the episodes of a view that are among the live ones of their ring, parts apart. O(episodes).

    A disk may have lost one, and others were written in its place: then no live episode has all of its steps.

    `rows_until`: of parts that begin before it each row is a part.
    """
    if episodes.stored is None:
        order = np.argsort(episodes.starts, kind="stable")
        starts, lengths = episodes.starts[order], episodes.lengths[order]
        kept = live.has(starts, lengths)
        return LiveEpisodes(starts[kept], lengths[kept])
    whole, chosen = episodes.stored
    numbers, times = np.unique(chosen, return_counts=True)
    most = int(times.max(initial=1))
    previous: Array | None
    rounds = [whole.parts_in(numbers[times > again]) for again in range(most)]
    starts, lengths = (np.concatenate([one[i] for one in rounds]) for i in (0, 1))
    chains, steps, lanes, previous = (np.concatenate(v) for v in zip(*(one[2] for one in rounds), strict=True))
    # What was taken again is an episode of its own, whose name comes right after that of the first.
    again = np.repeat(np.arange(most), [len(one[0]) for one in rounds])
    if (split := (starts < rows_until) & (lengths > 1)).any():
        counts = np.where(split, lengths, 1)
        firsts = np.cumsum(counts) - counts
        later = np.arange(counts.sum()) - np.repeat(firsts, counts)
        starts, chains, steps, lanes, again = (np.repeat(v, counts) for v in (starts, chains, steps, lanes, again))
        starts, steps, lengths = starts + later, steps + later, np.repeat(np.where(split, 1, lengths), counts)
        previous = None
    order = np.argsort(starts, kind="stable")
    kept = order[live.has(starts[order], lengths[order])]
    before = None if previous is None else previous[kept]
    parts = Parts((chains * most + again)[kept], steps[kept], lanes[kept], before)
    left = LiveEpisodes(starts[kept], lengths[kept], parts=parts)
    names = np.unique(parts.chains)
    for name in names[~whole.is_open[whole.find(names // most)]].tolist():
        left.end(name, 0)
    return left
