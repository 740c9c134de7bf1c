"""A view: the episodes of one moment, as a dataset whose ids do not change.

    starts   [40, 52, 60]   positions on the ring, the same in every process
    lengths  [12,  8, 30]   ids -> (episode, step) -> position -> the buffer's own reader

An item is a clip, or holds what a window says, around one step, its anchor.

Invariants: ids, length, and the steps of a clip never change; in place of a clip whose episode was evicted comes
another one of the view, drawn uniformly from those that are left, and counted.
Not here: rows (the buffer's), the order of a pass (passes.py).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.buffers.engine import Engine
from ringmap.buffers.lookup import ClipBuffer
from ringmap.buffers.moments import RingEpisodes, episodes_of, moment_of
from ringmap.buffers.pinned_view import PinnedView
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut
from ringmap.clips.index import ClipIndex
from ringmap.clips.window import tell_no_lanes
from ringmap.datasets.windows import Runs
from ringmap.errors import ClipIndexError, InputError, NoClipsError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.episodes import origins_at
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.links import NONE, Parts
from ringmap.storage.ring.live import LiveEpisodes

__all__ = ["BufferView"]

Array = np.ndarray[Any, np.dtype[Any]]


class BufferView(PinnedView):
    """Pinned episodes of one ring, made by `buffer.view()` and `buffer.split()`.

    A pickled view carries its episodes (12 bytes each) and the pickled buffer, so that every
    rank that receives it counts alike: `DistributedSampler(view)` never sees another length.

    Args:
        buffer: the buffer to read.
        episodes: those of the view.
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

    def __init__(self, buffer: ClipBuffer, episodes: RingEpisodes, cut: Cut | None = None) -> None:
        if episodes.is_part and cut is not None and cut.across:
            raise InputError(
                "BufferView: a sequence with across=True runs on into the next stored episode, which this view may "
                "have left out; use across=False, or a view of the whole buffer"
            )
        super().__init__(buffer, episodes.starts, episodes.lengths, cut)
        self.ring_episodes = episodes._replace(lengths=self._lengths)
        """Its episodes, as they lie on the ring."""
        self._left: tuple[tuple[int, int], ClipIndex] | None = None

    @classmethod
    def of(cls, buffer: ClipBuffer, cut: Cut | None = None) -> BufferView:
        """Return a view of all that is stored now (for a reader: at its last refresh)."""
        source = buffer.engine.source
        with thread.searching, source.lock:
            live = source.live
            if live.links is None:
                return cls(buffer, RingEpisodes(live.starts.copy(), live.lengths), cut)
            whole = live.whole
            stored = whole, np.arange(len(whole))
            return cls(buffer, RingEpisodes(whole.names, whole.lengths, stored), cut)

    def _schema(self, where: str) -> Schema:
        schema = self.engine.source.schema
        return super()._schema(where) if schema is None else schema

    def with_cut(self, cut: Cut | None) -> BufferView:
        """Return a view of the same episodes with other items."""
        self._check_moment()
        made = BufferView(self._buffer, self.ring_episodes, cut)
        made._source_episodes, made._arcs = self._source_episodes, self._arcs
        return made

    def take(self, episodes: Sequence[int] | Array) -> BufferView:
        """Return a view of some of the episodes, in this order."""
        chosen = self._episode_numbers(episodes)
        made = BufferView(self._buffer, self.ring_episodes.take(chosen), self._cut)
        made._source_episodes, made._arcs = self.source_episodes[chosen], self._arcs
        return made

    def marked_ring(self) -> tuple[Handle, Array]:
        """Return the ring, for `Marks`, and the positions of the view's episodes."""
        return self.engine.source, self.starts

    @property
    def ended(self) -> Array:
        """Tell of each episode whether it had ended: bool `(episodes,)`."""
        self._check_moment()
        return self.ring_episodes.ended

    def _named(self) -> dict[str, Any]:
        return moment_of(_name_of(self.engine), self.ring_episodes)

    @classmethod
    def _at(cls, buffer: ClipBuffer, moment: Any, where: str) -> BufferView:
        """Return the view of the episodes of a moment.

        Raises:
            InputError: it is none of this buffer.
        """
        uuid, episodes = episodes_of(moment, where)
        if uuid != _name_of(buffer.engine):
            raise InputError(f"{where}: the moment is of another buffer: uuid {uuid.hex()}")
        return cls(buffer, episodes)

    @property
    def engine(self) -> Engine:
        """The engine of the buffer."""
        engine: Engine = self._buffer.engine
        return engine

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        schema = self.engine.source.schema
        return [] if schema is None else schema.names

    def origins(self) -> tuple[Array, Array]:
        """Return what each episode that is still stored was first stored as; see `Dataset.origins`."""
        lineages, ordinals, _ = origins_at(self.engine.source, self.starts)
        return lineages, ordinals

    def positions_of(self, episodes: Array, steps: Array) -> Array:
        """Return the positions on the ring of steps of episodes."""
        return self.ring_episodes.positions(episodes, steps)

    def steps_of(self, episodes: Array, positions: Array) -> Array:
        """Return which steps of episodes stand at these positions, -1 for none."""
        return self.ring_episodes.steps_of(episodes, positions)

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        return self._read_steps(ep, start, end, None)

    def _read_steps(self, ep: int, start: int, end: int, columns: Sequence[str] | None) -> dict[str, Any]:
        index, gone = self._index_now(ep), 0
        if self.ring_episodes.stored is not None:
            whole, chosen = self.ring_episodes.stored
            now = self.engine.source.live.whole
            gone = int(now.first_steps[index] - whole.first_steps[chosen[ep]])
            if gone > start:
                raise self._evicted(ep)
        names = self.column_names if columns is None else list(columns)
        steps = self.engine.episodes.steps(index, start - gone, end - gone, "ReplayBuffer", columns and names)
        return dict(zip(names, steps, strict=True))

    def load_steps(
        self, episode_idx: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return steps `[start, end)` of one episode, dense: every column, or those of `columns`, which alone are read.

        Raises:
            ClipIndexError: there are no such steps, or they were evicted since.
            UnknownColumnError: there is no such column.
        """
        for name in columns or ():
            self._check_column(name, "load_steps")
        return self._read_steps(operator.index(episode_idx), start, end, columns)

    def episode_data(self, episode_idx: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} if it has none. Reads its data alone.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted since.
        """
        index = self._index_now(self._episode_number(episode_idx))
        return self.engine.episodes.data_of(index, "BufferView.episode_data")

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the episode data of the episodes that the buffer holds now."""
        return self.engine.episodes.data_names()

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return values constant within an episode, as the buffer does.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted since.
        """
        numbers = self._episode_numbers(idx)
        return self.engine.episodes.data(self.starts[numbers], lambda place: self._evicted(int(numbers[place])))

    @property
    def _lacks_episodes(self) -> bool:
        """Whether the view has left out stored episodes."""
        return self.ring_episodes.is_part

    def _lane_runs(self) -> Runs:
        if self.ring_episodes.stored is None:
            return super()._lane_runs()
        if self._found_runs is None:
            runs = self.ring_episodes.stored[0].by_lane()
            if NONE in runs.lanes:
                tell_no_lanes("BufferView")
            self._found_runs = self.lengths, Runs(self.lengths, runs.episodes, runs.places)
        return self._found_runs[1]

    def why_no_clips(self) -> str:
        """Return, in words, why no clip of the view can be drawn."""
        return (
            "all episodes of the view were evicted since it was made; make a new view"
            if len(self)
            else self._why_no_clips()
        )

    # -- draws -------------------------------------------------------------------------------

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips that can be drawn: those of episodes that are still stored."""
        return self.clip_window().count

    def clip_window(self, history_len: int = 1) -> ClipRange:
        """Return the clips of the view whose episodes are still stored, for samplers."""
        source, cut = self.engine.source, self.cut
        with thread.searching, source.lock:
            made = os.getpid(), source.live.era
            if self._left is None or self._left[0] != made:
                self._left = made, ClipIndex(self._among(source.live))
            index = self._left[1]
            index.live.evict_before(source.tail)
            found = index.of(cut.span, cut.least, cut.across)
            return ClipRange(source, found, before=cut.before)

    def _among(self, live: LiveEpisodes) -> LiveEpisodes:
        """Return the episodes of the view that are among the live ones, parts apart. O(episodes)."""
        if self.ring_episodes.stored is None:
            order = np.argsort(self.starts, kind="stable")
            starts, lengths = self.starts[order], self.lengths[order]
            kept = live.has(starts)
            return LiveEpisodes(starts[kept], lengths[kept])
        whole, chosen = self.ring_episodes.stored
        numbers, times = np.unique(chosen, return_counts=True)
        most = int(times.max(initial=1))
        rounds = [whole.parts_in(numbers[times > again]) for again in range(most)]
        starts, lengths = (np.concatenate([one[i] for one in rounds]) for i in (0, 1))
        chains, steps, lanes, previous = (np.concatenate(v) for v in zip(*(one[2] for one in rounds), strict=True))
        # What was taken again is an episode of its own, whose name comes right after that of the first.
        again = np.repeat(np.arange(most), [len(one[0]) for one in rounds])
        order = np.argsort(starts, kind="stable")
        kept = order[live.has(starts[order])]
        parts = Parts((chains * most + again)[kept], steps[kept], lanes[kept], previous[kept])
        left = LiveEpisodes(starts[kept], lengths[kept], parts=parts)
        names = np.unique(parts.chains)
        for name in names[~whole.is_open[whole.find(names // most)]].tolist():
            left.end(name, 0)
        return left

    def redraw(self, count: int) -> Array:
        """Return the anchors of `count` clips drawn uniformly from those that are still stored.

        Raises:
            NoClipsError: none is.
        """
        engine = self.engine
        clips, source = self.clip_window(), engine.source
        with thread.searching, source.lock:
            clips.follow()
            drawn = clips.draw(count, engine.rng)
        if drawn is None:
            raise NoClipsError(f"BufferView: {self.why_no_clips()}")
        return drawn

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_left": None}

    def _index_now(self, ep: int) -> int:
        """Return the present number of this episode in the buffer."""
        start, source = int(self.starts[ep]), self.engine.source
        with thread.searching, source.lock:
            if source.live.links is not None:
                index = int(source.live.whole.find(np.array([start]))[0])
                if index >= 0:
                    return index
            else:
                index = int(source.live.starts.searchsorted(start))
                if index < len(source.live) and source.live.starts[index] == start:
                    return index
        raise self._evicted(ep)

    @staticmethod
    def _evicted(ep: int) -> ClipIndexError:
        return ClipIndexError(f"BufferView: episode {ep} was evicted since the view was made")


def _name_of(engine: Engine) -> bytes:
    """Return what names the ring, the same in all its copies: of one in RAM nothing does."""
    source = engine.source
    return b"" if source.disk.volatile else source.manifest.uuid
