"""What the views of one ring and of many share: pinned episodes, items cut out of them, draws.

    a view      starts, lengths -> ids;  positions(ids), draw(size), take(episodes), with_cut(cut), moment
    shared      items by id, sample, batches, where, split, view, passes
    live        refresh(), or a pass that begins: another view of the same buffer and selection takes its place

Invariants: ids, length, and the steps of a clip never change; of a live view they change only where it moves.
Not here: where the steps of an id stand (view.py, sharded/view.py), the order of a pass (passes.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers import lookup
from ringmap.buffers.batch import Batch, rows_of
from ringmap.buffers.engine import Engine
from ringmap.buffers.loader_state import LoaderState
from ringmap.buffers.lookup import Clips, fitting
from ringmap.buffers.options import sendable
from ringmap.buffers.passes import PassSampler
from ringmap.buffers.pins import outlives_its_pass
from ringmap.buffers.prefetch import Batches, drawn_ahead
from ringmap.clips.cut import Cut
from ringmap.clips.draws import Crossing, Drawn
from ringmap.clips.gather import GONE, PINNED
from ringmap.clips.items import EpisodeMoment
from ringmap.clips.window import WindowSpec
from ringmap.datasets.base import Dataset, Where, clip_id, clip_ids
from ringmap.datasets.batch import Layout, worker
from ringmap.datasets.choose import choose
from ringmap.datasets.split import Arcs
from ringmap.errors import ClipIndexError, InputError, StaleCopyError
from ringmap.storage.columns.values import nested

__all__ = ["EpisodeNumbers", "Live", "PinnedView"]

Array = np.ndarray[Any, np.dtype[Any]]


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


class PinnedView(Dataset):
    """Pinned episodes of a buffer.

    Args:
        buffer: the buffer to read.
        starts: name of the first step of each episode, int64.
        lengths: steps of each episode.
        cut: what an item holds; None: a clip of the buffer.
    """

    def __init__(self, buffer: Any, starts: Array, lengths: Array, cut: Cut | None) -> None:
        super().__init__(lengths, np.cumsum(lengths) - lengths, buffer.frameskip, buffer.num_steps)
        self._buffer = buffer
        self.starts = starts
        """Name of the first step of each episode, also if that was evicted."""
        if cut is not None and cut.computed:
            cut = replace(cut, episode_numbers=EpisodeNumbers(starts))
        self._cut = cut
        self._moves: Live | None = None
        self._moment: dict[str, Any] | None = None
        self._newer: PinnedView | None = None
        self._moments: LoaderState | None = None
        self._as_of = 0
        self._told_short = cut is not None  # the buffer said so when it made the cut
        self.fps, self.reward_at = buffer.fps, buffer.reward_at

    # -- what a view provides ----------------------------------------------------------------

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine of the buffer."""

    @classmethod
    @abstractmethod
    def of(cls, buffer: Any, cut: Cut | None = None) -> Self:
        """Return a view of all that is stored now (for a reader: at its last refresh)."""

    @property
    @abstractmethod
    def ended(self) -> Array:
        """Tell of each episode whether it had ended: bool `(episodes,)`."""

    @abstractmethod
    def _named(self) -> dict[str, Any]:
        """Return the moment, as JSON."""

    @classmethod
    @abstractmethod
    def _at(cls, buffer: Any, moment: Any, where: str) -> Self:
        """Return the view of the episodes of a moment.

        Raises:
            InputError: it is none of this buffer.
        """

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

    @abstractmethod
    def redraw(self, count: int) -> Array:
        """Return the anchors of `count` clips, as `engine` reads them, drawn uniformly from those that are still
        stored.

        Raises:
            NoClipsError: none is.
        """

    @abstractmethod
    def take(self, episodes: Sequence[int] | Array) -> Self:
        """Return a view of some of the episodes, in this order."""

    @abstractmethod
    def with_cut(self, cut: Cut | None) -> Self:
        """Return a view of the same episodes with other items."""

    @abstractmethod
    def positions_of(self, episodes: Array, steps: Array) -> Array:
        """Return where steps of episodes stand, as the engine reads them."""

    @abstractmethod
    def steps_of(self, episodes: Array, positions: Array) -> Array:
        """Return which steps of episodes stand at these positions, -1 for none: what `positions_of` takes back."""

    @abstractmethod
    def origins(self) -> tuple[Array, Array]:
        """Return what each episode that is still stored was first stored as; see `Dataset.origins`."""

    def positions(self, ids: Array) -> Array:
        """Return the anchors of the clips with these ids, as the engine reads them: of their first steps, without a
        window."""
        return self.positions_of(*self._locate(ids))

    def are_stored(self, episodes: Array, steps: Array) -> Array | None:
        """Tell which steps are still stored, bool `(B,)`."""
        self.engine.refresh()
        anchors = self.engine.anchors_at(self.positions_of(episodes, steps), Cut.clip(1))
        found: Array = anchors != GONE
        return found

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
        """Clips that the buffer redrew so far."""
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
        if self._moment is None:
            self._check_moment()
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
        """Raise in a worker whose copy of a live view is of an earlier moment than that by which its owner counts now.

        Raises:
            StaleCopyError: it is. What is read by position (`pass_sampler`) is the same at all moments.
        """
        if self._moments is not None and self._is_behind:
            raise StaleCopyError(
                f"{type(self).__name__}: this worker has a copy of a live view from when it started, and the view "
                "moved since, so ids "
                "and numbers of episodes mean others there; make the loader with sampler=view.pass_sampler(), whose "
                "items name positions, or with persistent_workers=False"
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

    @abstractmethod
    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips that can be drawn: those of episodes that are still stored."""

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
        where, asked = (
            f"{type(self).__name__}.locate",
            clip_ids(ids, f"{type(self).__name__}.locate"),
        )
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
        return {**super().__getstate__(), "_newer": None}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({'live, ' * self.is_live}episodes={len(self.lengths)}, clips={len(self)}, "
            f"of={self._buffer!r})"
        )


class _ViewClips:
    """Finds and reads the clips of a view: `Clips`, with ids of the view, or PINNED + position. Redraws come from the
    view."""

    def __init__(self, view: PinnedView) -> None:
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
