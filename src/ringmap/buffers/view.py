"""A view: the episodes of one moment, as a dataset whose ids do not change.

    starts   [40, 52, 60]   positions on the ring, the same in every process
    lengths  [12,  8, 30]   ids -> (episode, step) -> position -> the buffer's own reader

An item is a clip, or holds what a window says, around one step, its anchor.

Invariants: ids, length, and the steps of a clip never change; a clip whose episode was evicted is redrawn from the
present content of the buffer, and counted.
Not here: rows (the buffer's), the order of a pass (passes.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ringmap.buffers import lookup
from ringmap.buffers.batch import Batch
from ringmap.buffers.engine import Engine
from ringmap.buffers.lookup import ClipBuffer, fitting
from ringmap.buffers.options import positive, sendable
from ringmap.buffers.prefetch import Batches, drawn_ahead
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut
from ringmap.clips.gather import PINNED
from ringmap.clips.index import ClipIndex
from ringmap.clips.wanted import tell_no_lanes
from ringmap.clips.window import WindowSpec
from ringmap.datasets.base import Dataset, clip_id, clip_ids
from ringmap.datasets.windows import Runs
from ringmap.errors import ClipIndexError, InputError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.ring.chains import NONE, Parts, WholeEpisodes
from ringmap.storage.ring.live import LiveEpisodes

__all__ = ["BufferView", "split"]

Array = np.ndarray[Any, np.dtype[Any]]


class _Numbers:
    """The numbers of a view's episodes."""

    def __init__(self, starts: Array) -> None:
        self.order = np.argsort(starts, kind="stable")
        self.starts = starts[self.order]

    def __call__(self, starts: Array) -> Array:
        """Return the number of the episode that begins at each position; -1 where none does. O(B log episodes)."""
        found = np.minimum(self.starts.searchsorted(starts), max(0, len(self.starts) - 1))
        if not len(self.starts):
            return np.full(len(starts), -1)
        numbers: Array = np.where(self.starts[found] == starts, self.order[found], -1)
        return numbers


class BufferView(Dataset):
    """Pinned episodes of a buffer, made by `buffer.view()` and `buffer.split()`.

    A pickled view carries its episodes (12 bytes each) and the pickled buffer, so that every
    rank that receives it counts alike: `DistributedSampler(view)` never sees another length.

    Args:
        buffer: the buffer to read.
        starts: position of the first step of each episode, int64.
        lengths: steps of each episode.
        cut: what an item holds; None: a clip of the buffer.
        stored: episodes with their parts joined, if there are parts, and the number in it of each episode of the view.
        is_part: whether the view has left out stored episodes.

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
        self, buffer: ClipBuffer, starts: Array, lengths: Array, cut: Cut | None = None,
        stored: tuple[WholeEpisodes, Array] | None = None, is_part: bool = False,
    ) -> None:  # fmt: skip
        if is_part and cut is not None and cut.across:
            raise InputError(
                "BufferView: a sequence with across=True runs on into the next stored episode, which this view may have left out; use "
                "across=False, or a view of the whole buffer"
            )
        self._is_part = is_part
        sizes = np.asarray(lengths, np.int64)
        super().__init__(sizes, np.cumsum(sizes) - sizes, buffer.frameskip, buffer.num_steps)
        self._buffer = buffer
        self.starts = np.array(starts, np.int64)
        """Position of the first step of each episode, also if that was evicted."""
        self._stored = stored
        if cut is not None and cut.computed:
            cut = replace(cut, episode_numbers=_Numbers(self.starts))
        self._cut = cut
        self._told_short = cut is not None  # the buffer said so when it made the cut
        self.fps, self.reward_at = buffer.fps, buffer.reward_at
        self._live: tuple[int, ClipIndex] | None = None

    @classmethod
    def of(cls, buffer: ClipBuffer, cut: Cut | None = None) -> BufferView:
        """Return a view of all that is stored now (for a reader: at its last refresh)."""
        source = buffer.engine.source
        with source.memory:
            live = source.live
            if live.chains is None:
                return cls(buffer, live.starts, live.lengths, cut)
            whole = live.whole
            return cls(buffer, whole.names, whole.lengths, cut, (whole, np.arange(len(whole))))

    @property
    def cut(self) -> Cut:
        """What an item holds."""
        return super().cut if self._cut is None else self._cut

    @property
    def span(self) -> int:
        """Steps that an episode must have for an item."""
        return super().span if self._cut is None else self._cut.span

    def view(
        self, window: WindowSpec | None = None, columns: Iterable[str] | None = None, anchors: Any = None,
        drop_all_padded: bool = False,
    ) -> BufferView:  # fmt: skip
        """Return a view of the same episodes with other items, as `ReplayBuffer.view` does."""
        chosen = None
        if callable(anchors):
            chosen, anchors = self.where(anchors), None
        cut = self._cut_for(window, columns, anchors, drop_all_padded)
        made = BufferView(self._buffer, self.starts, self.lengths, cut, self._stored, self._is_part)
        return made if chosen is None else made.take(chosen)

    def _schema(self, where: str) -> Schema:
        schema = self.engine.source.schema
        return super()._schema(where) if schema is None else schema

    def take(self, episodes: Sequence[int] | Array) -> BufferView:
        """Return a view of some of the episodes, in this order."""
        chosen = self._episode_numbers(episodes)
        stored = self._stored and (self._stored[0], self._stored[1][chosen])
        return BufferView(
            self._buffer, self.starts[chosen], self.lengths[chosen], self._cut, stored, True
        )

    @property
    def head(self) -> int:
        """One past the newest position of the view."""
        if not len(self.lengths):
            return 0
        if self._stored is None:
            return int(self.starts[-1] + self.lengths[-1])
        starts, lengths, _ = self._stored[0].parts_in(self._stored[1])
        return int(starts[-1] + lengths[-1])

    def before(self, head: int) -> BufferView:
        """Return a view of what is stored before a position."""
        if self._stored is None:
            return self.take(np.flatnonzero(self.starts < head))
        starts, lengths, parts = self._stored[0].parts_in(self._stored[1])
        old = starts < head
        whole = WholeEpisodes(starts[old], lengths[old], Parts(*(v[old] for v in parts)), {})
        everything = whole, np.arange(len(whole))
        return BufferView(self._buffer, whole.names, whole.lengths, self._cut, everything)

    def where(self, wanted: Callable[[dict[str, Any]], Any]) -> Array:
        """Return the numbers of the episodes whose data, a dict, `wanted` accepts; an episode evicted since is left out.

        Raises:
            InputError: `wanted` returned something else than a truth value.
        """
        numbers = []
        for ep in range(len(self.lengths)):
            try:
                data = self.get_episode_data(ep)
            except ClipIndexError:
                continue
            if bool(wanted({name: values[0] for name, values in data.items()})):
                numbers.append(ep)
        return np.array(numbers, np.int64)

    @property
    def engine(self) -> Engine:
        """The engine of the buffer."""
        return self._buffer.engine

    @property
    def transform(self) -> Any:
        """That of the buffer."""
        return self._buffer.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        if transform is not None:
            raise InputError(
                "BufferView: set transform on the buffer; a view hands out the same clips"
            )

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        schema = self.engine.source.schema
        return [] if schema is None else schema.names

    @property
    def num_redraws(self) -> int:
        """Clips that the buffer redrew so far."""
        return self.engine.num_redraws

    def positions(self, ids: Array) -> Array:
        """Return the positions on the ring of the anchors of the clips with these ids: of their first steps, without a window."""
        episodes, starts = self._locate(ids)
        if self._stored is not None:
            whole, chosen = self._stored
            return whole.positions(whole.places[chosen[episodes]] + starts)
        found: Array = self.starts[episodes] + starts
        return found

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """Return one clip, or with a list of ids the batch, as the buffer does."""
        if np.ndim(idx):
            return lookup.mapping(self, self._places(idx))
        number = clip_id(idx, "BufferView", has_batches=True)
        return lookup.one(self, int(self._places([number])[0]))

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips at once. PyTorch's DataLoader calls this method."""
        return lookup.several(self, self._places(indices))

    def _places(self, indices: Any) -> Array:
        return PINNED + self.positions(clip_ids(indices, "BufferView"))

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        index, gone = self._index_now(ep), 0
        if self._stored is not None:
            whole, chosen = self._stored
            now = self.engine.source.live.whole
            gone = int(now.first_steps[index] - whole.first_steps[chosen[ep]])
            if gone > start:
                raise self._evicted(ep)
        steps = self.engine.episodes.steps(index, start - gone, end - gone, "ReplayBuffer")
        return dict(zip(self.column_names, steps, strict=True))

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the episode data of the episodes that the buffer holds now."""
        return self.engine.episodes.data_names()

    def get_episode_data(
        self, idx: int | Sequence[int] | Array | None = None
    ) -> dict[str, list[Any]]:
        """Return values constant within an episode, as the buffer does.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted since.
        """
        numbers = self._episode_numbers(idx)
        now = np.array([self._index_now(ep) for ep in numbers.tolist()], np.int64)
        return self.engine.episodes.data(now)

    def _lane_runs(self) -> Runs:
        if self._stored is None:
            return super()._lane_runs()
        if self._found_runs is None:
            runs = self._stored[0].by_lane()
            if NONE in runs.lanes:
                tell_no_lanes("BufferView")
            self._found_runs = self.lengths, Runs(self.lengths, runs.episodes, runs.places)
        return self._found_runs[1]

    def _why_no_clips(self) -> str:
        return self.cut.why_none(self.lengths)

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
        with source.memory:
            if self._live is None or self._live[0] != os.getpid():
                if self._stored is None:
                    order = np.argsort(self.starts, kind="stable")
                    live = LiveEpisodes(self.starts[order], self.lengths[order])
                else:
                    starts, lengths, parts = self._stored[0].parts_in(self._stored[1])
                    live = LiveEpisodes(starts, lengths, parts=parts)
                    whole = self._stored[0]
                    for name in whole.names[~whole.is_open].tolist():
                        live.end(name, 0)
                self._live = os.getpid(), ClipIndex(live)
            index = self._live[1]
            index.live.evict_before(source.tail)
            found = index.of(cut.span, cut.least, cut.across)
            return ClipRange(source, found, before=cut.before)

    def sample(
        self, batch_size: int, step: int | None = None, *, out: Mapping[str, Array] | None = None
    ) -> Batch[Array]:
        """Draw a batch of items of the view, through the sampler of the buffer.

        Args:
            batch_size: B.
            step: as for `ReplayBuffer.sample`.
            out: as for `ReplayBuffer.sample`.

        Raises:
            InputError, ClipIndexError, NoClipsError, LappedError: as `ReplayBuffer.sample`.
        """
        positive("BufferView.sample", "batch_size", batch_size)
        into = None if out is None else fitting(out, self.engine, batch_size, self.cut)
        positions, weigh = self.engine.draw_among(self, batch_size, self.cut, step)
        columns = self.engine.read(positions, self.cut, into)
        return Batch(columns, positions, weigh and weigh(positions))

    def batches(
        self, batch_size: int, steps: int | None = None, prefetch: int = 2, to: str = "numpy",
        device: Any = None, pin_memory: bool = False,
    ) -> Batches:  # fmt: skip
        """Return an endless iterator over `sample(batch_size)`, as `ReplayBuffer.batches` does."""

        def ahead(size: int, count: int | None) -> Iterator[Batch[Any]]:
            draw = partial(self.engine.draw_among, self, size, self.cut)
            return drawn_ahead(self.engine, draw, self.cut, count)

        return Batches(self.sample, ahead, batch_size, steps, prefetch, to, device, pin_memory)

    def __getstate__(self) -> dict[str, Any]:
        for name, function in self.cut.functions:
            sendable("BufferView", f"window[{name!r}]", function)
        return {**super().__getstate__(), "_live": None}

    def _index_now(self, ep: int) -> int:
        """Return the present number of this episode in the buffer."""
        start, source = int(self.starts[ep]), self.engine.source
        with source.memory:
            if source.live.chains is not None:
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

    def __repr__(self) -> str:
        return f"BufferView(episodes={len(self.lengths)}, clips={len(self)}, of={self._buffer!r})"


def split(view: BufferView, train: float, seed: int) -> tuple[BufferView, BufferView]:
    """Return two views that share no episode."""
    if not 0 <= train <= 1:
        raise InputError(f"ReplayBuffer.split: train must lie between 0 and 1, got {train!r}")
    # By a hash of each episode's position: as the buffer grows, hardly any episode changes sides.
    ranks = np.argsort(_mixed(view.starts.astype(np.uint64), seed), kind="stable")
    count = round(train * len(ranks))
    return view.take(np.sort(ranks[:count])), view.take(np.sort(ranks[count:]))


def _mixed(values: Array, seed: int) -> Array:
    """Return splitmix64 of each value.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    golden = 0x9E3779B97F4A7C15
    mixed = values * np.uint64(golden) + np.uint64(((seed + 1) * golden) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    found: Array = mixed ^ (mixed >> np.uint64(31))
    return found
