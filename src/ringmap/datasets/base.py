"""The contract of a dataset: episodes of columns, cut into clips.

    lengths [5, 3]   span 2          clip ids 0 1 2 3 | 4 5
                                     episode  0 0 0 0 | 1 1
                                     start    0 1 2 3 | 0 1

A clip is `span = num_steps * frameskip` steps of one episode. Observations keep every
`frameskip`-th step; the column `action` keeps all of them, folded to (num_steps, -1).
A view may say otherwise: its `cut` decides which steps are anchors, and what an item holds.
A subclass supplies `column_names` and `_load_slice`; all else follows from these two, and
may be overridden by what is faster.
Not here: files (stored.py and formats/), batches (PyTorch's DataLoader makes them).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from ringmap.arguments import positive
from ringmap.clips.cut import Cut
from ringmap.clips.index import ClipIndex, ClipPairs
from ringmap.clips.window import Wanted, WindowSpec, check_anchors, tell_no_lanes, warn_unreached
from ringmap.datasets.batch import worker
from ringmap.datasets.episode import EpisodeDict, PictureAxes, as_nested, is_image, stored_layout
from ringmap.datasets.episode_table import choose
from ringmap.datasets.loader_batches import as_clip, collates_whole, of_columns, stacked
from ringmap.datasets.split import Arcs, shares_of, split_seed
from ringmap.datasets.windows import DatasetRows, Runs, fold, gather, rows_by_slices
from ringmap.errors import (
    ClipIndexError,
    InputError,
    NoClipsError,
    SubscriptError,
    UnknownColumnError,
)
from ringmap.storage.columns.copying import aligned
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.values import nested
from ringmap.storage.read.episodes import FIRST_STEP, ORIGIN_KEY, origin_of
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.live import LiveEpisodes
from ringmap.storage.ring.ring import ClipId

__all__ = [
    "Dataset",
    "LoaderDataset",
    "SelectedDataset",
    "Transform",
    "Where",
    "WrappedDataset",
    "as_dataset",
    "clip_id",
    "clip_ids",
    "fold_actions",
    "in_range",
    "num_rows",
]

log = logging.getLogger("ringmap")

if TYPE_CHECKING:  # to a type checker a DataLoader takes it; at run time torch is not needed
    from torch.utils.data import Dataset as _TorchDataset

    _Base = _TorchDataset[dict[str, Any]]
else:
    _Base = object

Array = np.ndarray[Any, np.dtype[Any]]
Transform = Callable[[dict[str, Any]], dict[str, Any]]
D = TypeVar("D", bound="Dataset")
Where = str | Callable[[dict[str, Any]], Any]
"""Which episodes are wanted: a condition (`ringmap.clips.where`), or a function of an episode's data, a dict."""


class LoaderDataset(_Base):
    """What a DataLoader takes: a dataset, or a buffer."""

    def pinned(self) -> Any:
        """Return what there is now, numbered so that no writer changes it: this dataset, if it does not grow."""
        return self


class Dataset(LoaderDataset):
    """Episodes of columns, read as clips, whole, or in chunks.

    Args:
        lengths: steps of each episode.
        offsets: row of each episode's first step.
        frameskip: stride between the observations of a clip.
        num_steps: observations in a clip.
        transform: maps an episode's dict to the one to return; `_load_slice` applies it.

    Raises:
        InputError: `frameskip` or `num_steps` is not positive, or the arrays do not match.

    Processes and threads: safe to share and to pickle as far as the subclass's `_load_slice` is.

    Source: stable-worldmodel, Replay Buffer guide ("Frameskip semantics").

    Example:
        >>> class Ramp(Dataset):
        ...     column_names = property(lambda self: ["x", "action"])
        ...
        ...     def _load_slice(self, ep, start, end):
        ...         rows = np.arange(start, end) + self.offsets[ep]
        ...         return {"x": rows, "action": rows}
        >>> ramp = Ramp([5, 3], [0, 5], frameskip=2, num_steps=2)
        >>> len(ramp), list(ramp.clip_indices)
        (2, [(0, 0), (0, 1)])
        >>> ramp[-1]["x"].tolist(), ramp[-1]["action"].tolist()
        ([1, 3], [[1, 2], [3, 4]])
    """

    frameskip: int = 1
    num_steps: int = 1
    transform: Transform | None = None
    fps: Fraction | float | None = None
    """Steps per second, for windows in seconds; None: not known."""
    reward_at: str | None = None
    """Where rewards stand: "next": in the row of the step that their action led to, "same": in the row of the
    action."""
    _cut: Cut | None = None
    _source_episodes: Array | None = None
    _arcs: Arcs | None = None
    """Of the side of a split that this is, or is a part of."""
    _found_runs: tuple[Array, Runs] | None = None
    _clips: ClipIndex | None = None
    _rows: DatasetRows | None = None
    _draws: tuple[Any, np.random.Generator] | None = None
    _told_empty = False
    _told_short = False

    def __init__(
        self,
        lengths: Any,
        offsets: Any,
        frameskip: int = 1,
        num_steps: int = 1,
        transform: Transform | None = None,
    ) -> None:
        for name, value in (("frameskip", frameskip), ("num_steps", num_steps)):
            if value <= 0:
                raise InputError(f"{type(self).__name__}: {name} must be positive, got {value}")
        self._lengths = np.array(lengths, np.int32).reshape(-1)
        self._offsets = np.array(offsets, np.int64).reshape(-1)
        if len(self._lengths) != len(self._offsets):
            raise InputError(
                f"{type(self).__name__}: {len(self._lengths)} lengths but "
                f"{len(self._offsets)} offsets; expected one of each per episode"
            )
        self._lengths.flags.writeable = self._offsets.flags.writeable = False
        self.frameskip = frameskip
        self.num_steps = num_steps
        self.transform = transform

    # -- what a subclass supplies ------------------------------------------------------------

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order; a list of the caller's own."""
        raise NotImplementedError(f"{type(self).__name__} must supply column_names")

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        """Return steps `[start, end)` of episode `ep`: every column dense, `transform` applied.

        Shapes: column -> (end - start, ...). A column other than `action` may come with every
        `frameskip`-th step only (as subclasses written for stable-worldmodel do): clips take it so.

        Raises:
            ClipIndexError: the episode or steps lie outside what is stored.
        """
        raise NotImplementedError(f"{type(self).__name__} must supply _load_slice")

    # -- episodes ----------------------------------------------------------------------------

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int32."""
        return self._lengths

    @property
    def offsets(self) -> Array:
        """Row of each episode's first step, int64."""
        return self._offsets

    def load_episode(self, episode_idx: int, *, nest: bool = False) -> dict[str, Any]:
        """Return one whole episode: every column dense, nothing folded, `transform` applied.

        `write_episode` of a buffer or a writer takes it back as it is: images that were turned to
        channels first are stored in their own order again.

        Args:
            episode_idx: its number.
            nest: return the columns `obs/a`, `obs/b` as `{"obs": {"a": ..., "b": ...}}`.

        Raises:
            ClipIndexError: there is no such episode.
            InputError: `nest`, and a column has the name of what would hold another one.
        """
        ep = self._episode_number(episode_idx)
        episode = self._load_slice(ep, 0, int(self.lengths[ep]))
        return as_nested(episode, self._where("load_episode")) if nest else episode

    def load_chunk(self, episodes_idx: Sequence[int] | Array, start: Any, end: Any) -> list[dict[str, Any]]:
        """Return steps `[start[i], end[i])` of episode `episodes_idx[i]`, for each i.

        Shapes: observations (end - start, ...), dense; `action` ((end - start) // frameskip, -1).

        Raises:
            ClipIndexError: an episode or step lies outside what is stored.
            InputError: the lists differ in length, or a chunk is no multiple of `frameskip` long.
        """
        episodes, starts, ends = self._chunks(episodes_idx, start, end)
        if not len(episodes) == len(starts) == len(ends):
            raise InputError(
                f"{type(self).__name__}.load_chunk: {len(episodes)} episodes, {len(starts)} starts "
                f"and {len(ends)} ends; expected as many of each"
            )
        chunks = []
        for number, first, stop in zip(episodes.tolist(), starts.tolist(), ends.tolist(), strict=True):
            steps = self._load_slice(self._episode_number(number), first, stop)
            if "action" in steps:
                if (stop - first) % self.frameskip:
                    raise InputError(
                        f"{type(self).__name__}.load_chunk: {stop - first} steps of episode "
                        f"{number} do not fold into groups of frameskip={self.frameskip}; ask for a multiple of it"
                    )
                folds = (stop - first) // self.frameskip
                steps["action"] = fold_actions(steps["action"], folds)
            chunks.append(steps)
        return chunks

    def _chunks(self, *given: Any) -> list[Array]:
        """Return the episodes, starts and ends of chunks as arrays."""
        where, names = self._where("load_chunk"), ("episodes", "starts", "ends")
        return [whole_numbers(v, f"{where}: {name}").reshape(-1) for name, v in zip(names, given, strict=True)]

    def load_steps(
        self, episode_idx: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return steps `[start, end)` of one episode, dense: every column, or those of `columns`; `transform` applied.

        Raises:
            ClipIndexError: there are no such steps.
            UnknownColumnError: there is no such column.
        """
        for name in columns or ():
            self._check_column(name, "load_steps")
        steps = self._load_slice(operator.index(episode_idx), start, end)
        if columns is None:
            return steps
        return EpisodeDict({name: steps[name] for name in columns}, getattr(steps, "channels_first", ()))

    def episode_data(self, episode_idx: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} if it has none.

        Raises:
            ClipIndexError: there is no such episode.
        """
        found = self.get_episode_data(operator.index(episode_idx))
        return {name: values[0] for name, values in found.items() if values[0] is not None}

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the values that are constant within an episode, first seen first."""
        return []

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return the values that are constant within an episode.

        Args:
            idx: an episode, several (duplicates are welcome), or None for all.

        Returns:
            name -> one value per asked episode; None where an episode lacks it.

        Raises:
            ClipIndexError: there is no such episode.
        """
        self._episode_numbers(idx)
        return {}

    def each_episode(self, with_data: bool, is_live: bool = False) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield `(columns, values constant within the episode)` of each episode, as they are stored; the latter only
        on request, and with its origin.

        Of a dataset that grows these are the episodes that it holds when this begins; one that is evicted meanwhile is
        left out. So it is of a view that was made for this (`is_live`).

        Raises:
            ClipIndexError: an episode of another view was evicted.
        """
        pinned = self.pinned()
        is_live = is_live or pinned is not self
        lineages, ordinals = pinned.origins()
        for number in range(len(pinned.lengths)):
            try:
                episode, data = dict(stored_layout(pinned.load_episode(number))), {}
                if with_data:
                    found = pinned.get_episode_data([number])
                    data = {name: values[0] for name, values in found.items() if values[0] is not None}
                    data[ORIGIN_KEY] = origin_of(lineages[number].tobytes(), int(ordinals[number]))
            except ClipIndexError:
                if not is_live:
                    raise
                continue  # evicted since
            yield episode, data

    def first_steps(self) -> Array:
        """Return how many steps of each episode were evicted before it was copied, int64 `(n,)`: `first_step` in its
        data, where it is.

        The first step that is left of such an episode is no beginning: it has a reward, and nothing is reset there.

        Cost: reads the data of all episodes, if one has such a value.
        """
        found = np.zeros(len(self.lengths), np.int64)
        if FIRST_STEP in self.episode_column_names:
            for number, value in enumerate(self.get_episode_data()[FIRST_STEP]):
                if isinstance(value, int | np.integer) and value > 0:
                    found[number] = value
        return found

    def marked_ring(self) -> tuple[Handle, Array] | None:
        """Return the ring that the episodes are in, for `Marks`, and the positions of their first steps; None if they
        are in none."""
        return None

    def close(self) -> None:
        """Close open files; the next read opens them again. A dataset without open files does nothing."""

    # -- clips -------------------------------------------------------------------------------

    @property
    def span(self) -> int:
        """Steps from a clip's first to the end of its last: `num_steps * frameskip`."""
        return self.num_steps * self.frameskip

    @property
    def cut(self) -> Cut:
        """What an item holds, and which steps are its anchors: those of a clip are its first steps, with `span` steps
        from each on."""
        if self._cut is not None:
            return self._cut
        cut, span = Cut.clip(self.num_steps, self.frameskip), self.span
        return cut if cut.span == span else replace(cut, after=span - 1)

    @property
    def clip_indices(self) -> Sequence[tuple[int, int]]:
        """The `(episode, step)` of the anchor of every clip, its first step, oldest episode first; no memory per
        clip."""
        cut = self.cut
        if cut.across:
            runs = self._lane_runs()
            return ClipPairs(runs.index, cut.span, of_run=runs.steps_of)
        return ClipPairs(self._clip_index(), cut.span, before=cut.before, least=cut.least)

    @property
    def num_unreachable_steps(self) -> int:
        """Number of steps that are in no clip, since their episodes are too short for one. O(episodes)."""
        return self.cut.unreached(self.lengths)

    @property
    def is_view(self) -> bool:
        """Whether it is a view with items of its own: see `view`."""
        return self._cut is not None

    @property
    def source_episodes(self) -> Array:
        """The number that each episode has in the dataset that `where=`, or `take`, selected it from, int64."""
        if self._source_episodes is None:
            return np.arange(len(self.lengths))
        return self._source_episodes.copy()

    def _fresh(self) -> Self:
        """Return a copy that has found nothing yet."""
        made = copy.copy(self)
        made._rows = made._clips = made._found_runs = None
        return made

    def _name(self, made: D, chosen: Array) -> D:
        """Tell a dataset of some of the episodes which these are."""
        made._source_episodes, made._arcs = self.source_episodes[chosen], self._arcs
        return made

    def take(self, episodes: Sequence[int] | Array) -> Dataset:
        """Return a dataset of some of the episodes, in this order, numbered from 0.

        Raises:
            ClipIndexError: there is no such episode.
        """
        return SelectedDataset(self, self._episode_numbers(episodes))

    def origins(self) -> tuple[Array, Array]:
        """Return what each episode was first stored as, by which it is the same in every copy.

        Returns:
            The lineage of the ring of each, uint8 `(n, 16)`, and its number there, uint64 `(n,)`. A file that does not
            say it: lineage zero, and the numbers of the episodes in the file.
        """
        pinned = self.pinned()
        if pinned is not self:  # a buffer
            found: tuple[Array, Array] = pinned.origins()
            return found
        return np.zeros((len(self.lengths), 16), np.uint8), self.source_episodes.astype(np.uint64)

    def split(self, train: float | Sequence[float] = 0.9, seed: int = 0) -> tuple[Dataset, ...]:
        """Return datasets that share no episode: `train` of the episodes, and the rest.

        The side of an episode depends on the episode and the seed alone: it is the same in every process, after any
        growth and eviction, and in every copy of the episode. The share is exact to within 3 episodes of a ring, or of
        a file. A split of a side
        divides that side: 0.9 of 0.8 is 0.72. Episodes that a view has lost are on no side.

        Args:
            train: the share of the first side; or the shares of all sides, such as `[0.8, 0.1, 0.1]`.
            seed: of the choice.

        Raises:
            InputError: the shares are not between 0 and 1, or do not add up to 1; a side has no episode.

        Source: Weyl's equidistribution on the golden ratio.

        Example:
            >>> from ringmap.data import ReplayBuffer
            >>> buf = ReplayBuffer(max_steps=100, seed=0)
            >>> for number in range(10):
            ...     buf.write_episode({"x": np.full(5, number)})
            >>> train, test = buf.split(0.8)
            >>> len(train.lengths), len(test.lengths)
            (8, 2)
        """
        where = f"{type(self).__name__}.split"
        shares, seed = shares_of(train, where), split_seed(seed, where)
        pinned = self.pinned()
        lineages, ordinals = pinned.origins()
        there = pinned._episodes_left()
        arcs = self.arcs() or Arcs.whole(seed)
        sides = list[Dataset]()
        for part, share in zip(arcs.divided(shares, seed), shares, strict=True):
            chosen = np.flatnonzero(part.hold(lineages, ordinals) & there)
            if not len(chosen):
                raise InputError(
                    f"{where}: the side of {share:g} has none of the {int(there.sum())} episodes; of "
                    f"{part.longest_wait} episodes in a row it has one: collect more first, or make it larger"
                )
            side = pinned.take(chosen)
            side._arcs = part
            sides.append(side)
        return tuple(sides)

    def arcs(self) -> Arcs | None:
        """Return the arcs of the side of a split that this is, or is a part of; None if it is of none."""
        return self._arcs

    def _episodes_left(self) -> Array:
        """Tell which episodes are still stored, at least with their last step, bool `(n,)`."""
        count = len(self.lengths)
        stored = self.are_stored(np.arange(count), np.maximum(np.asarray(self.lengths) - 1, 0))
        return np.ones(count, np.bool_) if stored is None else stored

    def selected(self, where: Where, caller: str, marks: Any = None) -> Dataset:
        """Return a dataset of the episodes that are wanted; `marks` is the file of their flags and notes."""
        pinned: Dataset = self.pinned()
        return pinned.take(choose(pinned, where, marks, f"{caller}: where"))

    def steps_as_stored(
        self, episode: int, start: int, end: int, names: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Return steps `[start, end)` as they are stored, whatever this dataset loads and makes of them.

        `names`: the columns to return, as far as there are; None: all but pictures.
        """
        known = names and [name for name in names if name in self.column_names]
        if known is not None and not known:
            return {}
        steps = stored_layout(self.load_steps(episode, start, end, known))
        found = {name: np.asarray(values) for name, values in steps.items()}
        return found if names else {name: v for name, v in found.items() if v.ndim <= 2}

    def stored_rows(self, first: int, stop: int, names: Sequence[str]) -> dict[str, Array]:
        """Return the rows of episodes `[first, stop)` as `steps_as_stored` returns them, end to end.

        Raises:
            ClipIndexError: one was evicted.
        """
        lengths = self.lengths[first:stop].tolist()
        parts = [self.steps_as_stored(first + i, 0, length, names) for i, length in enumerate(lengths)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def view(
        self,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
        *,
        where: Where | None = None,
    ) -> Dataset:
        """Return this dataset with other items: what a window says, around one step each, the anchor.

        Args:
            window: name -> `Window`, the steps of that column around a step t; `Computed`; or a function of the batch,
                columns as they are stored, that returns a column. In place of `num_steps`: a column without a window
                comes at t alone.
            columns: names of the columns to read; None: all.
            anchors: the steps t to leave out at the ends of episodes, `slice(2, -7)` the first 2 and the last 7. It
                changes the items and their number alone.
            drop_all_padded: whether to leave out steps t at which a padded column would be padding alone.
            where: the episodes to keep, numbered from 0 (`source_episodes` has their numbers before): a condition such
                as `"return > 100 and task = 'lift'"`, or a function of an episode's data (a dict) that tells whether
                the episode is wanted.

        Raises:
            ArgumentTypeError: (TypeError) `anchors` is a function.
            InputError: an unknown column, a name that is taken, a value that a column can't hold, a sum over rewards
                while it is not known where they stand (`reward_at`); a condition that can't be read, or names what no
                episode has.
            NoClipsError: a window over a dataset without steps, whose columns are not known.

        Cost: no rows are copied. `where` reads the data of every episode, and of `return` and `ended` the columns
        behind them.

        Example:
            >>> from ringmap.data import Window, load_dataset, get_format
            >>> import tempfile
            >>> path = tempfile.mkdtemp() + "/demo.h5"
            >>> with get_format("hdf5").open_writer(path) as writer:
            ...     writer.write_episode({"state": [0.0, 1.0, 2.0], "action": [0, 1, 2]})
            >>> item = load_dataset(path).view({"action": Window(range(-1, 2), pad="edge")})[0]
            >>> float(item["state"]), item["action"].tolist(), item["action_is_pad"].tolist()
            (0.0, [0, 0, 1], [True, False, False])
        """
        if where is not None:
            chosen = self.selected(where, self._where("view"))
            return chosen.view(window, columns, anchors, drop_all_padded)
        made = copy.copy(self)
        made._cut = self._cut_for(window, columns, anchors, drop_all_padded)
        made._told_short, made._told_empty, made._found_runs = False, False, None
        if made.cut.across:
            made._lane_runs()  # raises, if some episodes are left out
        made._tell_short()
        made.tell_none()
        return made

    def _cut_for(
        self, window: WindowSpec | None, columns: Iterable[str] | None, anchors: Any, drop_all_padded: bool
    ) -> Cut | None:
        """Return the cut of a request; as it is now, if nothing else is asked for."""
        where = self._where("view")
        check_anchors(where, anchors)
        if columns is not None and not isinstance(columns, str):
            columns = tuple(columns)
        wanted = Wanted(
            self.num_steps,
            self.frameskip,
            window,
            columns,
            anchors,
            drop_all_padded,
            self.fps,
            self.reward_at,
        )
        if not wanted.is_plain:
            return wanted.cut(where, self._schema(where))
        if drop_all_padded:
            raise InputError(f"{where}: drop_all_padded is for padded columns; pass window=")
        return self._cut

    def _where(self, method: str) -> str:
        """Return the beginning of a message about a call: which dataset, and which method."""
        return f"{type(self).__name__}.{method}"

    def picture_axes(self) -> PictureAxes:
        """Return the columns of pictures, as far as they are known without reading, and how their axes are handed
        out."""
        schema = getattr(self, "schema", None)
        if not isinstance(schema, Schema):
            return {}
        return {spec.name: (spec, False) for spec in schema.columns if is_image(spec)}

    def _schema(self, where: str) -> Schema:
        """Return the columns, as they are stored."""
        first = self._first_row(self.column_names)
        if first is None:
            raise NoClipsError(f"{where}: nothing is stored yet; collect first")
        return Schema.of(first)

    def _tell_short(self) -> None:
        """Say once in the log that many steps are in no clip."""
        if not self._told_short:
            self._told_short = True
            if worker() is None:
                warn_unreached(self._anchor_lengths(), self.cut, type(self).__name__)

    def tell_none(self) -> None:
        """Say once in the log that this view has no item, if it has episodes."""
        lengths = self._anchor_lengths()
        sizes = np.asarray(lengths, np.int64).sum(keepdims=True) if self.cut.across else lengths
        if worker() is None and not self.cut.counts(sizes).any():
            self._no_length()

    def __len__(self) -> int:
        self._tell_short()
        return len(self.clip_indices) or self._no_length()

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """Return one clip, or what the window of a view says; with a list of ids the batch: column -> `(B, ...)`, text
        as arrays.

        Shapes: observations (num_steps, ...), `action` (num_steps, -1); with a window of n offsets (n, ...), without
        one (...).

        Raises:
            ClipIndexError: the id is out of range, or there are no clips. Negative ids count
                from the end.
            SubscriptError: it is not an integer.
        """
        name = type(self).__name__
        if np.ndim(idx):
            return self._batch(clip_ids(idx, name))
        return self.__getitems__([clip_id(idx, name, has_batches=True)])[0]

    def sample(self, batch_size: int, *, nest: bool = False) -> dict[str, Any]:
        """Draw a batch of clips, each equally likely, with replacement: column -> `(B, ...)`, as `dataset[ids]`.

        Draws are another process's in each worker of a DataLoader. For draws that repeat:
        `dataset[rng.integers(len(dataset), size=B)]`.

        Args:
            batch_size: B.
            nest: as for `load_episode`.

        Raises:
            InputError: `batch_size` is not positive.
            NoClipsError: there are no clips.
        """
        where = f"{type(self).__name__}.sample"
        size, count = positive(where, "batch_size", batch_size), len(self)
        if not count:
            raise NoClipsError(f"{where}: {self._why_no_clips()}")
        batch = self._batch(Dataset._generator(self).integers(count, size=size))
        return nested(batch, where) if nest else batch

    def batches(self, batch_size: int, steps: int | None = None) -> Iterator[dict[str, Any]]:
        """Return an iterator over `steps` calls of `sample(batch_size)`; without `steps` it does not end."""
        batch_size = positive(f"{type(self).__name__}.batches", "batch_size", batch_size)
        numbers = itertools.count() if steps is None else range(steps)
        return (self.sample(batch_size) for _ in numbers)

    def _batch(self, ids: Array) -> dict[str, Any]:
        """Return clips as one batch."""
        items = self.__getitems__(ids if len(ids) or not len(self) else np.zeros(1, np.int64))
        if not items:
            return {}
        found = stacked(items)
        return found if len(ids) else {name: values[:0] for name, values in found.items()}

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips at once: what PyTorch's DataLoader calls.

        Raises:
            ClipIndexError: as for one clip.
        """
        episodes, steps = self._locate(clip_ids(indices, type(self).__name__))
        if self._cut is None or not len(episodes):
            return [as_clip(clip) for clip in self._load_clips(episodes, steps)]
        return self._as_batch(self._columns_at(episodes, steps, self._cut), len(episodes), self._cut)

    # -- whole columns -----------------------------------------------------------------------

    def get_col_data(self, col: str) -> Array:
        """Return a column of all steps as an array, images in stored order.

        Raises:
            UnknownColumnError: there is no such column.

        Cost: reads and holds the whole column. This general form loads every episode.
        """
        self._check_column(col, "get_col_data")
        parts = [self._stored_rows(ep, 0, int(n), [col])[col] for ep, n in enumerate(self.lengths) if n]
        return np.concatenate(parts) if parts else np.empty(0)

    def get_dim(self, col: str) -> int:
        """Return how many values a step of a column holds.

        Raises:
            UnknownColumnError: there is no such column.
        """
        self._check_column(col, "get_dim")
        row = self._first_row([col])
        if row is None:
            raise InputError(f"{type(self).__name__}.get_dim: no steps are stored yet")
        return int(np.prod(row[col].shape[1:]))

    def get_row_data(self, row_idx: int | Sequence[int] | Array) -> dict[str, Any]:
        """Return steps by row, all columns, images in stored order.

        Args:
            row_idx: a row, or several in any order; step t of episode i is row `offsets[i] + t`.
                Negative rows count from the end.

        Returns:
            column -> array (...) for one row, (n, ...) for several.

        Raises:
            ClipIndexError: a row lies outside what is stored.
        """
        rows = self._row_numbers(row_idx)
        order = np.argsort(self.offsets, kind="stable")
        episodes = order[np.searchsorted(self.offsets[order], rows, side="right") - 1]
        steps = rows - self.offsets[episodes]
        found = {name: v[:, 0] for name, v in self._rows_at(self.column_names, episodes, steps[:, None], None).items()}
        return {name: v[0] for name, v in found.items()} if np.ndim(row_idx) == 0 else found

    def items_at(self, ids: Array) -> dict[str, Any]:
        """Return items by id as one batch; clips of one step come as they are stored, `(n, ...)`."""
        if self.items_are_rows:
            return self.get_row_data(ids)  # actions are not folded
        items = self.__getitems__(ids.tolist())
        batch = {name: np.asarray(values) for name, values in stacked(items).items()}
        is_step = (self.cut.history, self.cut.frameskip) == (1, 1)
        return {name: values[:, 0] for name, values in batch.items()} if is_step else batch

    def merge_col(self, source: Sequence[str] | str, target: str, dim: int = -1) -> None:
        """Join columns along axis `dim` into a new column in memory.

        Raises:
            NotImplementedError: this kind of dataset can't.
        """
        raise NotImplementedError(f"{type(self).__name__} can't merge columns")

    # -- helpers for subclasses --------------------------------------------------------------

    def _locate(self, ids: Array) -> tuple[Array, Array]:
        """Return the episodes of clip ids, and the steps of their anchors; negative ids count from the end."""
        cut = self.cut
        runs = self._lane_runs() if cut.across else None
        clips = self._clip_index() if runs is None else runs.index
        index = clips.of(cut.span, cut.least)
        size = index.end - index.base
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
        if low < -size or high >= size:
            name = type(self).__name__
            if not size:
                raise ClipIndexError(f"{name}: empty: {self._why_no_clips()}")
            raise ClipIndexError(f"{name}: clip {low if low < -size else high} is out of range for {size} clips")
        if low < 0:
            ids = np.where(ids < 0, ids + size, ids)
        ordinals, starts = index.locate(ids + index.base)
        if runs is not None:
            return runs.steps_of(ordinals - index.first, starts)
        return ordinals - index.first, starts + cut.before if cut.before else starts

    @property
    def _lacks_episodes(self) -> bool:
        """Whether episodes of its source that are not in it may lie between those that are."""
        return self._source_episodes is not None

    def _lane_runs(self) -> Runs:
        """Return the episodes as they follow each other, for items that run on into the next."""
        lengths = self.lengths
        if self._lacks_episodes:
            raise InputError(
                f"{type(self).__name__}: a sequence with across=True runs on into the next episode, which this view "
                "may have left out; use across=False, or a view of all episodes"
            )
        if self._found_runs is None or self._found_runs[0] is not lengths:
            if self._found_runs is None and worker() is None:
                tell_no_lanes(type(self).__name__)
            self._found_runs = lengths, Runs(np.asarray(lengths, np.int64))
        return self._found_runs[1]

    def _columns_at(self, episodes: Array, steps: Array, cut: Cut) -> dict[str, Any]:
        """Return the columns of the items at these anchors, in the form that users get, not folded yet."""
        rng = self._generator() if cut.computed else None
        found = gather(self._item_rows(cut), episodes, steps, rng)
        if worker() is None:  # a worker copies them into shared memory
            found = {name: aligned(values) for name, values in found.items()}
        return self._shown(found)

    def _as_batch(self, columns: dict[str, Any], count: int, cut: Cut) -> list[Any]:
        """Return the items of a batch, in a form that a DataLoader collates without a copy, if there is one."""
        fold(columns, cut)
        if columns and all(map(collates_whole, columns.values())):
            return of_columns(columns, count)
        return [as_clip(item) for item in self._as_items(columns, count)]

    def _as_items(self, columns: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Return the items of a batch one by one, with text as Python's own."""
        columns = {
            name: v.tolist() if isinstance(v, np.ndarray) and v.dtype.kind in "SU" else v for name, v in columns.items()
        }
        return [{name: values[i] for name, values in columns.items()} for i in range(count)]

    def _rows_at(self, names: Sequence[str], episodes: Array, steps: Array, run: range | None) -> dict[str, Array]:
        """As `read_rows`, without `transform` where the dataset stores them."""

        def load(episode: int, start: int, end: int) -> dict[str, Any]:
            return self.load_steps(episode, start, end, names)

        return rows_by_slices(load, names, episodes, steps, run)

    def read_rows(
        self, names: Sequence[str], episodes: Array, steps: Array, run: range | None = None
    ) -> dict[str, Array]:
        """Return steps of episodes, name -> `(B, n, ...)`, fresh arrays, images in stored order, after `transform`.

        Args:
            names: of the columns.
            episodes: `(B,)`.
            steps: `(B, n)`; or `(B,)` with `run`. All that are asked for lie inside the episodes.
            run: offsets from each of the steps, alike for all.
        """
        if self.transform is None:
            return self._rows_at(names, episodes, steps, run)
        return rows_by_slices(self._load_slice, names, episodes, steps, run)

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch in the form that users get."""
        return columns

    def _rows_are_fixed(self) -> bool:
        """Tell whether the rows stay as they are, so that sums over them may be kept."""
        return False

    def _item_rows(self, cut: Cut) -> DatasetRows:
        """Return the rows that items of this cut are read from: made once for these episodes."""
        lengths, rows = self.lengths, self._rows
        if (
            rows is None
            or rows.cut is not cut
            or (rows.given is not lengths and not np.array_equal(rows.given, lengths))
        ):
            rows = self._rows = DatasetRows(
                cut,
                self._rows_at,
                self.column_names,
                lengths,
                self.offsets,
                self._rows_are_fixed(),
                self.first_steps,
            )
        return rows

    def _generator(self) -> np.random.Generator:
        """Return the generator of computed columns: in a worker, one of the worker's own."""
        told = worker()
        home = None if told is None else (told.id, told.seed)
        if self._draws is None or self._draws[0] != home:
            seed = None if told is None else told.seed
            self._draws = home, np.random.default_rng(seed)
        return self._draws[1]

    def _load_clips(self, episodes: Array, starts: Array) -> list[dict[str, Any]]:
        """Return the clips of these episodes and first steps, each folded."""
        span = self.span
        return [
            self._fold(self._load_slice(ep, first, first + span))
            for ep, first in zip(episodes.tolist(), starts.tolist(), strict=True)
        ]

    def _fold(self, steps: Mapping[str, Any]) -> dict[str, Any]:
        clip = {}
        for name, value in steps.items():
            if name == "action":
                value = fold_actions(value, self.num_steps)
            elif self.frameskip > 1 and len(value) == self.span:
                value = value[:: self.frameskip]
            clip[name] = value
        return clip

    @property
    def items_are_rows(self) -> bool:
        """Whether item i is row i, and nothing more: clips of one step, of episodes that are never evicted."""
        none = np.empty(0, np.int64)
        plain = (self.num_steps, self.frameskip) == (1, 1) and not self.is_view
        return plain and self.transform is None and self.are_stored(none, none) is None

    def are_stored(self, episodes: Array, steps: Array) -> Array | None:
        """Tell which steps are still stored, bool `(B,)`; None for all: only a view of a buffer loses any, the oldest
        first."""
        return None

    def _why_no_clips(self) -> str:
        return self.cut.why_none(self.lengths, "num_steps")

    def _no_length(self) -> int:
        """Return 0, and say why in the log, once, if there are episodes."""
        if len(self.lengths):
            if _loader_asks():
                raise NoClipsError(f"{type(self).__name__}: {self._why_no_clips()}")
            if not self._told_empty:
                self._told_empty = True
                log.warning("%s: len() is 0: %s", type(self).__name__, self._why_no_clips())
        return 0

    def _clip_index(self) -> ClipIndex:
        if self._clips is None:
            self._clips = ClipIndex(LiveEpisodes.from_lengths(self.lengths))
        return self._clips

    def _anchor_lengths(self) -> Array:
        """Return the steps of each episode that clips are cut from."""
        return self.lengths

    def _episode_number(self, idx: int) -> int:
        return int(self._episode_numbers(operator.index(idx))[0])

    def _episode_numbers(self, idx: int | Sequence[int] | Array | None) -> Array:
        """Return episode numbers as an array, checked, negative ones counted from the end."""
        count = len(self.lengths)
        return np.arange(count) if idx is None else in_range(idx, count, "episode", type(self).__name__)

    def _row_numbers(self, idx: int | Sequence[int] | Array) -> Array:
        """Return row numbers as an array, checked, negative ones counted from the end."""
        return in_range(idx, self.count_rows(), "row", type(self).__name__)

    def count_rows(self) -> int:
        """Return how many rows there are, as of one moment."""
        return num_rows(self.lengths, self.offsets)

    def _check_column(self, col: str, method: str) -> None:
        if col not in self.column_names:
            raise UnknownColumnError(
                f"{type(self).__name__}.{method}: no column {col!r}; there are {self.column_names}"
            )

    def _first_row(self, names: Sequence[str]) -> dict[str, Array] | None:
        """Return a step of the first episode that is still stored; None if none is."""
        lengths = np.asarray(self.lengths)
        for number in np.flatnonzero(lengths).tolist():
            with contextlib.suppress(ClipIndexError):  # evicted since; the last step goes last
                return self._stored_rows(number, int(lengths[number]) - 1, int(lengths[number]), names)
        return None

    def _stored_rows(self, ep: int, start: int, end: int, names: Sequence[str]) -> dict[str, Array]:
        found = self._rows_at(names, np.array([ep]), np.array([start]), range(end - start))
        return {name: values[0] for name, values in found.items()}

    def __getstate__(self) -> dict[str, Any]:
        own = ("_clips", "_rows", "_draws")  # of this object in this process
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(episodes={len(self.lengths)}, steps={int(self.lengths.sum())}, "
            f"num_steps={self.num_steps}, frameskip={self.frameskip}, columns={self.column_names})"
        )


def _loader_asks() -> bool:
    """Tell whether the caller outside of this package is a sampler of PyTorch: nothing else says so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ringmap."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch.utils.data")


class OtherDataset(Dataset):
    """A dataset of another library: an object with the methods that load, as it is now.

    Args:
        dataset: it. `lengths` and `load_episode(i)` are enough: such a one has clips of one step, and reads whole
            episodes for them.
    """

    def __init__(self, dataset: Any) -> None:
        lengths = np.asarray(dataset.lengths, np.int64)
        offsets = np.cumsum(lengths) - lengths
        super().__init__(lengths, offsets, getattr(dataset, "frameskip", 1), getattr(dataset, "num_steps", 1))
        self.dataset = dataset
        self._load = getattr(dataset, "_load_slice", self._cut_out)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        names = getattr(self.dataset, "column_names", None)
        if names is None:
            names = self.dataset.load_episode(0) if len(self.lengths) else ()
        return list(names)

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        found: dict[str, Any] = self._load(ep, start, end)
        return found

    def _cut_out(self, ep: int, start: int, end: int) -> dict[str, Any]:
        return {name: values[start:end] for name, values in self.dataset.load_episode(ep).items()}

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the values that are constant within an episode, first seen first."""
        return list(getattr(self.dataset, "episode_column_names", ()))

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return the values that are constant within an episode, as the dataset does."""
        numbers = self._episode_numbers(idx)
        found: dict[str, list[Any]] = getattr(self.dataset, "get_episode_data", lambda _: {})(numbers)
        return found

    def close(self) -> None:
        """Close its files."""
        self.dataset.close()


class WrappedDataset(Dataset):
    """A dataset of the episodes of another one, `dataset`; a subclass may number them anew."""

    dataset: Dataset

    def _inner(self, episodes: Array) -> Array:
        """Return the numbers of episodes in the other dataset."""
        return episodes

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return self.dataset.column_names

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        return self.dataset._load_slice(self._there(ep), start, end)

    def origins(self) -> tuple[Array, Array]:
        """Return those of the other dataset."""
        lineages, ordinals = self.dataset.origins()
        every = self._inner(np.arange(len(self.lengths)))
        return lineages[every], ordinals[every]

    def are_stored(self, episodes: Array, steps: Array) -> Array | None:
        """Tell which steps are still stored in the other dataset."""
        return self.dataset.are_stored(self._inner(episodes), steps)

    def _rows_at(self, names: Sequence[str], episodes: Array, steps: Array, run: range | None) -> dict[str, Array]:
        return self.dataset.read_rows(names, self._inner(episodes), steps, run)

    def picture_axes(self) -> PictureAxes:
        """Return those of the other dataset."""
        return self.dataset.picture_axes()

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        return self.dataset._shown(columns)

    def _rows_are_fixed(self) -> bool:
        return self.dataset._rows_are_fixed()

    def steps_as_stored(
        self, episode: int, start: int, end: int, names: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Return steps as they are stored; see `Dataset.steps_as_stored`."""
        return self.dataset.steps_as_stored(self._there(episode), start, end, names)

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the values that are constant within an episode, first seen first."""
        return self.dataset.episode_column_names

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return the values that are constant within an episode, as the other dataset does.

        Raises:
            ClipIndexError: there is no such episode.
        """
        return self.dataset.get_episode_data(self._inner(self._episode_numbers(idx)))

    def close(self) -> None:
        """Close the files of the other dataset."""
        self.dataset.close()

    def _there(self, episode: int) -> int:
        return int(self._inner(self._episode_numbers(operator.index(episode)))[0])


class SelectedDataset(WrappedDataset):
    """Some episodes of any dataset.

    Args:
        dataset: the whole.
        episodes: their numbers there.
    """

    def __init__(self, dataset: Dataset, episodes: Array) -> None:
        lengths = np.asarray(dataset.lengths, np.int32)[episodes]
        offsets = np.cumsum(lengths, dtype=np.int64) - lengths
        super().__init__(lengths, offsets, dataset.frameskip, dataset.num_steps)
        self.dataset, self._episodes = dataset, episodes
        self._cut, self.fps, self.reward_at = dataset._cut, dataset.fps, dataset.reward_at
        self._source_episodes, self._arcs = dataset.source_episodes[episodes], dataset.arcs()

    def _inner(self, episodes: Array) -> Array:
        return self._episodes[episodes]


def as_dataset(part: Any, where: str) -> Dataset:
    """Return a dataset of ours: this one, or what an object with the same methods has now.

    Raises:
        InputError: it is none; `where` names the call.
    """
    if isinstance(part, Dataset):
        return part
    if hasattr(part, "lengths") and hasattr(part, "load_episode"):
        return OtherDataset(part)
    if isinstance(part, str | os.PathLike):
        remedy = f"open it first: load_dataset({os.fspath(part)!r})"
    elif hasattr(part, "sample"):
        remedy = (
            "a buffer of rows has no episodes to join, and no goals: draw from it with sample(batch_size), or mix it "
            "with a dataset in an OfflineToOnlineReplayBuffer"
        )
    else:
        remedy = "expected a ReplayBuffer, what load_dataset returns, or another ringmap.data.Dataset"
    raise InputError(f"{where} is a {type(part).__name__}, and no dataset of episodes; {remedy}")


def num_rows(lengths: Array, offsets: Array) -> int:
    """Return how many rows these episodes reach over: one past the last row of any."""
    return int((offsets + lengths).max()) if len(lengths) else 0


def in_range(idx: Any, count: int, what: str, where: str) -> Array:
    """Return numbers in `[-count, count)` as an int64 array `(n,)`, negative ones counted from the end.

    Raises:
        ClipIndexError: one lies outside.
        InputError: they are not integers (a mask, for one).
    """
    numbers = whole_numbers(idx, f"{where}: {what} numbers").reshape(-1)
    wrong = numbers[(numbers < -count) | (numbers >= count)]
    if len(wrong):
        raise ClipIndexError(f"{where}: {what} {wrong[0]} is out of range for {count} {what}s")
    return np.where(numbers < 0, numbers + count, numbers)


def whole_numbers(given: Any, where: str) -> Array:
    """Return integers as an int64 array, which never means other ones than were given.

    Args:
        given: an integer, or an array or a list of them.
        where: what to name in an error.

    Raises:
        InputError: they are not integers (a mask, for one).
        ClipIndexError: one is greater than any number of an item.
    """
    numbers = np.asarray(given)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise InputError(
            f"{where} must be a list of integers, got {numbers.dtype} of shape {numbers.shape}; turn a mask into "
            "numbers with np.flatnonzero"
        )
    if numbers.size and numbers.dtype == np.uint64 and int(numbers.max()) >> 63:
        raise ClipIndexError(f"{where}: {int(numbers.max())} is out of range")
    return numbers.astype(np.int64, copy=False)


def clip_id(idx: Any, where: str, has_batches: bool = False) -> ClipId:
    """Return the index of a dataset as an integer.

    Args:
        idx: what was given.
        where: the class, for the message.
        has_batches: whether a list of ids is taken, too (by the caller).

    Raises:
        SubscriptError: it is not an integer.
    """
    try:
        return ClipId(operator.index(idx))
    except TypeError:
        pass
    instead = "for steps of an episode call load_chunk([i], start, end), for a column get_col_data(name)"
    if isinstance(idx, str):
        instead = f"for a whole column call get_col_data({idx!r}), of one clip take dataset[i][{idx!r}]"
    elif isinstance(idx, slice) or np.ndim(idx):
        several = "dataset[list(range(...))]" if has_batches else "dataset.__getitems__(range(...))"
        instead = f"for several clips take {several}; {instead}"
    raise SubscriptError(f"{where}: a clip id is an integer, got {idx!r:.80}; {instead}")


def clip_ids(indices: Any, where: str) -> Array:
    """Return clip ids as an int64 array `(B,)`.

    Raises:
        InputError: they are not integers (a mask, for one), or not in one row.
    """
    given = np.asarray(indices if hasattr(indices, "__array__") else list(indices))
    ids = whole_numbers(given, f"{where}: clip ids")
    if ids.size and ids.ndim != 1:
        raise InputError(f"{where}: clip ids must be a list of integers, got an array of shape {ids.shape}")
    return ids.reshape(-1)


def fold_actions(actions: Any, num_steps: int) -> Any:
    """Return actions (K * num_steps, ...) as (num_steps, K * ...), arrays and tensors alike.

    Example:
        >>> fold_actions(np.arange(4), 2).tolist()
        [[0, 1], [2, 3]]
    """
    width = int(np.prod(actions.shape, dtype=np.int64)) // num_steps if num_steps else 0
    return actions.reshape(num_steps, width)
