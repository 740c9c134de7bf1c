"""Datasets made of datasets: side by side (columns), or one after the other (episodes).

    MergeDataset   clip 7 = {**a[7], **b[7]}          the same episodes, more columns
    ConcatDataset  clips of a | clips of b            the same columns, more episodes

    ids -> replaced: others in place of what was evicted -> read each part -> stored: nothing was evicted meanwhile

A view redraws by itself what it has lost. Two views would redraw apart, and their columns would not belong together; a
goal would lie in another episode than its clip. So such a dataset replaces items before it asks its parts.

Invariants: only the parts are held, and nothing is copied; each part is read once per batch; all pictures have their
channels first, or none. A part that grows (a buffer) is followed: ids, episodes and rows are those of the parts at the
call.
Not here: goals (goal.py), datasets merged into a new file (formats/catalog/).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, Self, TypeVar

import numpy as np

from ringmap.clips.cut import Cut
from ringmap.clips.facts import REWARDS, Facts, name_among
from ringmap.clips.index import ClipIndex
from ringmap.clips.window import WindowSpec
from ringmap.datasets.base import (
    Dataset,
    as_dataset,
    clip_ids,
)
from ringmap.datasets.batch import worker
from ringmap.datasets.episode import (
    EpisodeDict,
    PictureAxes,
    as_nested,
    channels_are_last,
    to_channels_first,
)
from ringmap.datasets.loader_batches import as_clip
from ringmap.datasets.split import Arcs
from ringmap.errors import ClipIndexError, InputError, NoClipsError
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.read.read_live import retry
from ringmap.storage.ring.live import LiveEpisodes

__all__ = ["ConcatDataset", "MergeDataset", "read_stored", "stored_items"]


Array = np.ndarray[Any, np.dtype[Any]]


T = TypeVar("T")


class _Joined(Dataset):
    """The shared base class: parts, with the same clip settings."""

    _told_reward_at: str | None = None
    _agreed: PictureAxes = {}  # noqa: RUF012
    """The axes of the dataset that this one was made of."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        name = type(self).__name__
        if isinstance(datasets, str | os.PathLike | Dataset) or not isinstance(datasets, Iterable):
            raise InputError(f"{name}: expected a list of datasets, got {type(datasets).__name__}")
        self.datasets = [as_dataset(part, f"{name}: dataset {number}") for number, part in enumerate(datasets)]
        if not self.datasets:
            raise InputError(f"{name}: Need at least one dataset")
        first = self.datasets[0]
        super().__init__([], [], frameskip=first.frameskip, num_steps=first.num_steps)
        for number, part in enumerate(self.datasets):
            if (part.num_steps, part.frameskip) != (self.num_steps, self.frameskip):
                raise InputError(
                    f"{type(self).__name__}: dataset {number} has num_steps={part.num_steps}, "
                    f"frameskip={part.frameskip}, expected {self.num_steps} and {self.frameskip} as "
                    "in dataset 0; open them alike"
                )
            if part.cut.anchors != first.cut.anchors and (part.is_view or first.is_view):
                raise InputError(
                    f"{name}: dataset {number} has other anchors than dataset 0; make views with the same windows, or "
                    "join the datasets first and make a view of all"
                )
        self.fps = _rate(self.datasets, name)

    @property
    def reward_at(self) -> str | None:
        """Where rewards stand: as the parts say that have them. May be assigned."""
        return self._told_reward_at or self._reward_at_of_parts()

    @reward_at.setter
    def reward_at(self, reward_at: str | None) -> None:
        self._told_reward_at = reward_at

    def _reward_at_of_parts(self) -> str | None:
        raise NotImplementedError

    @property
    def cut(self) -> Cut:
        """What an item holds, and which steps are its anchors; without a window of its own that of the first part."""
        return self.datasets[0].cut if self._cut is None else self._cut

    def _cut_for(
        self, window: WindowSpec | None, columns: Iterable[str] | None, anchors: Any, drop_all_padded: bool
    ) -> Cut | None:
        found = super()._cut_for(window, columns, anchors, drop_all_padded)
        return self.cut if found is None and any(part.is_view for part in self.datasets) else found

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the values that are constant within an episode, of all parts, first seen first."""
        return list(dict.fromkeys(n for part in self.datasets for n in part.episode_column_names))

    def pinned(self) -> Dataset:
        """Return what the parts have now, joined."""
        parts = [part.pinned() for part in self.datasets]
        return self if all(a is b for a, b in zip(parts, self.datasets, strict=True)) else self._over(parts)

    def _over(self, parts: list[Dataset]) -> Self:
        """Return the same over other parts."""
        made = self._fresh()
        made._agreed = self.picture_axes()  # some parts alone may hand out other axes
        made.datasets, made._lengths = parts, np.empty(0, np.int32)
        return made

    def _clip_index(self) -> ClipIndex:
        lengths = np.asarray(self.lengths)
        if self._clips is None or not np.array_equal(lengths, self._lengths):
            self._lengths = lengths
            self._clips = ClipIndex(LiveEpisodes.from_lengths(lengths))
        return self._clips

    def _homes(self) -> list[tuple[Dataset, list[str]]]:
        """Return the parts, and the names of the columns that come from each."""
        return [(part, part.column_names) for part in self.datasets]

    def picture_axes(self) -> PictureAxes:
        """Return the columns of pictures of all parts: all come channels first if one part has one of its own so."""
        found, turned = PictureAxes(), False
        for axes in (self._agreed, *(part.picture_axes() for part in self.datasets)):
            found = {**axes, **found}
            turned = turned or any(first for _, first in axes.values())
        return {name: (spec, turned) for name, (spec, _) in found.items()}

    def _aligner(self) -> Callable[[Any, Any], Any]:
        """Return what gives the columns of a part the axes on which all parts agree; an episode is marked."""
        turned = {name: spec for name, (spec, first) in self.picture_axes().items() if first}
        known = {id(part): part.picture_axes() for part in self.datasets} if turned else {}

        def aligned(part: Any, columns: Any) -> Any:
            left = {}
            for name, stored in turned.items():
                spec, first = known[id(part)].get(name, (stored, False))
                if name in columns and not first and channels_are_last(columns[name], spec):
                    left[name] = to_channels_first(columns[name])
            if not left:
                return columns
            marked: frozenset[str] = getattr(columns, "channels_first", frozenset())
            return EpisodeDict({**columns, **left}, marked.union(left))

        return aligned

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        # Each as the first part that has it shows it, one that none has as part 0 does.
        shown, left, aligned = dict(columns), dict(columns), self._aligner()
        for part, names in (*self._homes(), (self.datasets[0], list(columns))):
            mine = {name: left.pop(name) for name in names if name in left}
            shown.update(aligned(part, part._shown(mine)))
        return shown

    @property
    def _lacks_episodes(self) -> bool:
        """Whether it, or one of its parts, does."""
        return super()._lacks_episodes or any(part._lacks_episodes for part in self.datasets)

    def _rows_are_fixed(self) -> bool:
        return all(part._rows_are_fixed() for part in self.datasets)


class MergeDataset(_Joined):
    """Columns of several datasets of the same episodes, as one dataset.

    Args:
        datasets: what to join; at least one.
        keys_from_dataset: the columns to take from each, one list per dataset; None for all. Of two
            columns of one name the first dataset's is taken.

    Raises:
        InputError: (ValueError) no datasets; another number of clips or other episodes than in the
            first; a list too few, or a column that is not there.

    Example:
        >>> import numpy as np
        >>> from ringmap.data import ReplayBuffer
        >>> frames, labels = ReplayBuffer(10), ReplayBuffer(10)
        >>> frames.write_episode({"x": np.arange(3)})
        >>> labels.write_episode({"x": np.zeros(3), "label": np.arange(10, 13)})
        >>> clip = MergeDataset([frames, labels])[2]
        >>> clip["x"].tolist(), clip["label"].tolist()
        ([2], [12])
    """

    def __init__(self, datasets: Sequence[Any], keys_from_dataset: Sequence[Sequence[str]] | None = None) -> None:
        super().__init__(datasets)
        first = self.datasets[0]
        for number, part in enumerate(self.datasets[1:], 1):
            if len(part) != len(first) or not np.array_equal(part.lengths, first.lengths):
                raise InputError(
                    f"MergeDataset: dataset {number} has {len(part)} clips in {len(part.lengths)} "
                    f"episodes, expected the same episodes as dataset 0 ({len(first)} clips in "
                    f"{len(first.lengths)} episodes)"
                )
        self._keys: list[list[str]] | None = None
        if keys_from_dataset is not None:
            self._keys = [list(keys) for keys in keys_from_dataset]
            if len(self._keys) != len(self.datasets):
                raise InputError(
                    f"MergeDataset: keys_from_dataset has {len(self._keys)} lists for "
                    f"{len(self.datasets)} datasets; give one per dataset"
                )
            for part, keys in zip(self.datasets, self.keys_from_dataset, strict=True):
                for name in keys:
                    part._check_column(name, "MergeDataset")

    @property
    def keys_from_dataset(self) -> list[list[str]]:
        """The columns that are taken from each dataset."""
        if self._keys is not None:
            return self._keys
        taken: set[str] = set()
        found = []
        for part in self.datasets:
            found.append([name for name in part.column_names if name not in taken])
            taken.update(found[-1])
        return found

    def _reward_at_of_parts(self) -> str | None:
        homes = zip(self.datasets, self.keys_from_dataset, strict=True)
        rewarding = [part for part, keys in homes if name_among(REWARDS, keys)]
        return _agreed(_placed(rewarding[:1] or self.datasets))

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return list(dict.fromkeys(name for keys in self.keys_from_dataset for name in keys))

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int32."""
        lengths: Array = self.datasets[0].lengths
        return lengths

    @property
    def offsets(self) -> Array:
        """Row of each episode's first step in the first dataset, int64."""
        offsets: Array = self.datasets[0].offsets
        return offsets

    def __len__(self) -> int:
        return super().__len__() if self.is_view else min(len(part) for part in self.datasets)

    def take(self, episodes: Sequence[int] | Array) -> MergeDataset:
        """Return the same columns of some of the episodes, as `Dataset.take`."""
        chosen = self._episode_numbers(episodes)
        made = self._over([part.take(chosen) for part in self.datasets])
        return self._name(made, chosen)

    def _rows_at(self, names: Sequence[str], episodes: Array, steps: Array, run: range | None) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for part, keys in zip(self.datasets, self.keys_from_dataset, strict=True):
            mine = [name for name in names if name in keys and name not in found]
            if mine:
                found.update(part.read_rows(mine, episodes, steps, run))
        return found

    def _homes(self) -> list[tuple[Dataset, list[str]]]:
        return list(zip(self.datasets, self.keys_from_dataset, strict=True))

    def arcs(self) -> Arcs | None:
        """Return those of the first part, of a side of all their own."""
        return self._arcs or self.datasets[0].arcs()

    def origins(self) -> tuple[Array, Array]:
        """Return those of the first part."""
        return self.datasets[0].origins()

    def are_stored(self, episodes: Array, steps: Array) -> Array | None:
        """Tell which steps are still stored in every part."""
        found: Array | None = None
        for part in self.datasets:
            stored = part.are_stored(episodes, steps)
            if stored is not None:
                found = stored if found is None else found & stored
        return found

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips at once; each part is asked once. In place of one that a part has lost comes another one
        of all parts."""
        ids = _in_range(indices, len(self), "MergeDataset")
        return read_stored(self, self._locate, ids, self._clips_at, "MergeDataset")

    def _clips_at(self, numbers: Array) -> list[dict[str, Any]]:
        ids = numbers.tolist()
        if self.is_view:
            return super().__getitems__(ids)
        parts = [part.__getitems__(ids) for part in self.datasets]
        keys = [
            self._held(part, keys, clips[0]) if clips else keys
            for part, keys, clips in zip(self.datasets, self.keys_from_dataset, parts, strict=True)
        ]
        aligned = self._aligner()
        return [as_clip(dict(self._join(clips, aligned, keys))) for clips in zip(*parts, strict=True)]

    def _held(self, part: Any, keys: list[str], item: Any) -> list[str]:
        """Return the columns to take from the items of a part: with those that its window adds, if it has one."""
        if not part.is_view:
            return keys
        if self._keys is None:
            return list(item)
        left_out = {how.mask for name, how in part.cut.named.items() if name not in keys}
        left_out.update(name for name in part.column_names if name not in keys)
        return [name for name in item if name not in left_out]

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        parts = [part._load_slice(ep, start, end) for part in self.datasets]
        return self._join(parts, self._aligner())

    def _join(
        self,
        parts: Sequence[Any],
        aligned: Callable[[Any, Any], Any],
        taken: Sequence[list[str]] | None = None,
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        turned: set[str] = set()
        homes = zip(self.datasets, parts, taken or self.keys_from_dataset, strict=True)
        for dataset, given, keys in homes:
            part = aligned(dataset, given)
            marked: frozenset[str] = getattr(part, "channels_first", frozenset())
            for name in keys:
                if name in part and name not in values:
                    values[name] = part[name]
                    turned |= {name} & marked
        return EpisodeDict(values, turned) if turned else values

    def get_col_data(self, col: str) -> Array:
        """Return a column of all steps, from the dataset that it comes from."""
        found: Array = self._home(col, "get_col_data").get_col_data(col)
        return found

    def merge_col(self, source: Sequence[str] | str, target: str, dim: int = -1) -> None:
        """Join columns of one part into a new column there.

        Raises:
            InputError: no part holds them all.
        """
        for part, keys in zip(self.datasets, self.keys_from_dataset, strict=True):
            if isinstance(source, str) or set(source) <= set(part.column_names):
                part.merge_col(source, target, dim)
                self._rows = None
                if self._keys is not None and target not in keys:
                    keys.append(target)
                return
        raise InputError(f"MergeDataset.merge_col: no single dataset holds {list(source)}")

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return the values that are constant within an episode; of two of one name the first."""
        found: dict[str, list[Any]] = {}
        for part in self.datasets:
            for name, values in part.get_episode_data(idx).items():
                found.setdefault(name, values)
        return found

    def _home(self, col: str, method: str) -> Any:
        for part, keys in zip(self.datasets, self.keys_from_dataset, strict=True):
            if col in keys:
                return part
        self._check_column(col, method)
        raise AssertionError(col)


class ConcatDataset(_Joined):
    """Episodes of several datasets, one dataset after the other.

    Args:
        datasets: what to stack; at least one, opened with the same `num_steps` and `frameskip`.

    Raises:
        InputError: (ValueError) no datasets, clips cut differently, other columns, shapes or dtypes, or rewards that
            stand elsewhere (`reward_at`).

    Example:
        >>> import numpy as np
        >>> from ringmap.data import ReplayBuffer
        >>> old, new = ReplayBuffer(100), ReplayBuffer(100)
        >>> both = ConcatDataset([old, new])
        >>> old.write_episode({"x": np.arange(3)})
        >>> new.write_episode({"x": np.arange(10, 12)})
        >>> [int(both[i]["x"][0]) for i in range(len(both))]
        [0, 1, 2, 10, 11]
    """

    _are_alike = False

    def __init__(self, datasets: Sequence[Any]) -> None:
        super().__init__(datasets)
        first: tuple[int, str] | None = None
        for number, placed in enumerate(_placed(self.datasets)):
            if placed is not None and first is not None and placed != first[1]:
                raise InputError(
                    f"ConcatDataset: dataset {number} has its rewards at {placed!r}, dataset {first[0]} at "
                    f"{first[1]!r}; convert one of them first, to rows of one kind"
                )
            first = first or (None if placed is None else (number, placed))
        self._columns()

    def _reward_at_of_parts(self) -> str | None:
        said = {
            placed
            for part, placed in zip(self.datasets, _placed(self.datasets), strict=True)
            if placed is not None or (len(part.lengths) and name_among(REWARDS, part.column_names))
        }
        return said.pop() if len(said) == 1 else None

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in the order of the first part that has any yet.

        Raises:
            InputError: a part has others.
        """
        return list(self._columns())

    def _columns(self) -> dict[str, ColumnSpec | None]:
        """Return the columns of the parts, None where only the name is known; an empty buffer has none yet."""
        first: tuple[int, dict[str, ColumnSpec | None]] | None = None
        self._are_alike = True
        for number, part in enumerate(self.datasets):
            found = _columns_of(part)
            if not found:
                self._are_alike = False
                continue
            first = first or (number, found)
            for name in {**first[1], **found}:
                one, other = first[1].get(name), found.get(name)
                if name not in first[1] or name not in found:
                    lacks, has = (number, first[0]) if name not in found else (first[0], number)
                    raise InputError(
                        f"ConcatDataset: dataset {lacks} has no column {name!r}, which dataset {has} has; load the "
                        "same columns of all (columns=, or keys_to_load=)"
                    )
                if one is not None and other is not None and _kind_of(one) != _kind_of(other):
                    raise InputError(
                        f"ConcatDataset: column {name!r} is {other.dtype} {other.shape} in dataset {number}, but "
                        f"{one.dtype} {one.shape} in dataset {first[0]}; convert one of them first"
                    )
        return {} if first is None else first[1]

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int32."""
        return np.concatenate([np.asarray(part.lengths, np.int32) for part in self.datasets])

    @property
    def offsets(self) -> Array:
        """Row of each episode's first step, int64."""
        before = np.cumsum([0, *(part.count_rows() for part in self.datasets)])
        return np.concatenate(
            [np.asarray(p.offsets, np.int64) + n for p, n in zip(self.datasets, before, strict=False)]
        )

    def __len__(self) -> int:
        return super().__len__() if self.is_view else sum(len(part) for part in self.datasets)

    def take(self, episodes: Sequence[int] | Array) -> ConcatDataset:
        """Return some of the episodes, as `Dataset.take`: a part for each run of episodes of one part."""
        chosen = self._episode_numbers(episodes)
        ends = np.cumsum([len(part.lengths) for part in self.datasets])
        homes = np.searchsorted(ends, chosen, side="right")
        firsts = ends - [len(part.lengths) for part in self.datasets]
        cuts = [0, *(np.flatnonzero(np.diff(homes)) + 1).tolist(), len(chosen)]
        runs = [(int(homes[a]), chosen[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
        parts = [self.datasets[home].take(run - firsts[home]) for home, run in runs]
        made = self._over(parts or [self.datasets[0].take(chosen)])
        return self._name(made, chosen)

    def _rows_at(self, names: Sequence[str], episodes: Array, steps: Array, run: range | None) -> dict[str, Array]:
        if not self._are_alike:  # a buffer may have its first episode by now
            self._columns()
        parts: dict[str, list[Array]] = {name: [] for name in names}
        order = []
        for part, where, local in self._grouped(episodes, [len(p.lengths) for p in self.datasets]):
            order.append(where)
            for name, values in part.read_rows(names, local, steps[where], run).items():
                parts[name].append(values)
        back = np.argsort(np.concatenate(order))
        return {name: np.concatenate(values)[back] for name, values in parts.items()}

    def arcs(self) -> Arcs | None:
        """Return those that all parts share, of a side of them its own; None where the parts are of several sides."""
        shared = {part.arcs() for part in self.datasets}
        return self._arcs or (shared.pop() if len(shared) == 1 else None)

    def origins(self) -> tuple[Array, Array]:
        """Return those of the parts."""
        lineages, ordinals = zip(*(part.origins() for part in self.datasets), strict=True)
        return np.concatenate(lineages), np.concatenate(ordinals)

    def are_stored(self, episodes: Array, steps: Array) -> Array | None:
        """Tell which steps are still stored in their parts."""
        found = np.ones(len(episodes), np.bool_)
        for part, where, local in self._grouped(episodes, [len(p.lengths) for p in self.datasets]):
            stored = part.are_stored(local, steps[where])
            if stored is not None:
                found[where] = stored
        return found

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips at once, grouped by part: each is asked once."""
        if self.is_view:
            return super().__getitems__(indices)
        if not self._are_alike:
            self._columns()
        sizes = [len(part) for part in self.datasets]
        ids = _in_range(indices, sum(sizes), "ConcatDataset")
        clips: list[Any] = [None] * len(ids)
        aligned = self._aligner()
        for part, where, local in self._grouped(ids, sizes):
            for at, clip in zip(where.tolist(), part.__getitems__(local.tolist()), strict=True):
                made = aligned(part, clip)
                clips[at] = clip if made is clip else as_clip(dict(made))
        return clips

    def load_episode(self, episode_idx: int, *, nest: bool = False) -> dict[str, Any]:
        """Return one whole episode; as `Dataset.load_episode`."""
        part, ep = self._part_of(self._episode_number(episode_idx))
        episode: dict[str, Any] = self._aligner()(part, part.load_episode(ep))
        return as_nested(episode, "ConcatDataset.load_episode") if nest else episode

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        part, local = self._part_of(self._episode_number(ep))
        steps: dict[str, Any] = self._aligner()(part, part._load_slice(local, start, end))
        return steps

    def get_col_data(self, col: str) -> Array:
        """Return a column of all steps, part by part.

        Raises:
            UnknownColumnError: no part has it.
        """
        self._check_column(col, "get_col_data")
        return np.concatenate([part.get_col_data(col) for part in self.datasets if col in part.column_names])

    def merge_col(self, source: Sequence[str] | str, target: str, dim: int = -1) -> None:
        """Join columns along axis `dim` into a new column, in every part."""
        for part in self.datasets:
            part.merge_col(source, target, dim)
        self._rows = None

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return the values that are constant within an episode; None where its part lacks one."""
        numbers = self._episode_numbers(idx)
        found: dict[str, list[Any]] = {name: [None] * len(numbers) for name in self.episode_column_names}
        sizes = [len(part.lengths) for part in self.datasets]
        for part, where, local in self._grouped(numbers, sizes):
            for name, values in part.get_episode_data(local).items():
                for at, value in zip(where.tolist(), values, strict=True):
                    found[name][at] = value
        return found

    def _grouped(self, numbers: Array, sizes: list[int]) -> Iterable[tuple[Any, Array, Array]]:
        """Yield `(part, positions in numbers, numbers within the part)` for each part that is asked."""
        ends = np.cumsum(sizes)
        homes = np.searchsorted(ends, numbers, side="right")
        for home in np.unique(homes).tolist():
            where = np.flatnonzero(homes == home)
            yield self.datasets[home], where, numbers[where] - (ends[home] - sizes[home])

    def _part_of(self, episode: int) -> tuple[Any, int]:
        sizes = [len(part.lengths) for part in self.datasets]
        part, _, local = next(iter(self._grouped(np.array([episode]), sizes)))
        return part, int(local[0])


def _in_range(indices: Any, size: int, name: str) -> Array:
    ids = clip_ids(indices, name)
    wrong = ids[(ids < -size) | (ids >= size)]
    if len(wrong):
        what = f"clip {wrong[0]} is out of range for {size} clips"
        raise ClipIndexError(f"{name}: {what if size else 'empty: there are no clips'}")
    return np.where(ids < 0, ids + size, ids)


def _columns_of(part: Any) -> dict[str, ColumnSpec | None]:
    """Return the columns of a part as they are stored, as far as it says so without reading."""
    schema = getattr(part, "schema", None)
    if isinstance(schema, Schema) and getattr(part, "transform", None) is None:
        return {spec.name: spec for spec in schema.columns}
    return dict.fromkeys(part.column_names)


def _kind_of(spec: ColumnSpec) -> Any:
    """Return what has to be alike in all parts: shape and dtype, of text its kind."""
    return spec.shape, spec.dtype.kind if spec.dtype.kind in "SU" else spec.dtype


def _rate(parts: Sequence[Any], name: str) -> Fraction | None:
    """Return the rate of the parts that know it, or refuse two."""
    known, at = Facts(), 0
    for number, part in enumerate(parts):
        facts = Facts.of(part)
        known.refuse_rate(facts, name, f"dataset {at}", f"dataset {number}")
        if known.fps is None:
            known, at = facts, number
    return known.fps


def _placed(parts: Sequence[Any]) -> list[str | None]:
    """Return where the rewards of each part stand, as far as it knows."""
    return [part.reward_at for part in parts]


def _agreed(values: Sequence[T | None]) -> T | None:
    """Return the value that all parts which know one share; None if there is none."""
    known = {value for value in values if value is not None}
    return known.pop() if len(known) == 1 else None


Locate = Callable[[Array], tuple[Array, Array]]
"""Returns the episodes of items, and the steps of their anchors."""

_MOST_ERRORS = 10


def read_stored(dataset: Dataset, locate: Locate, ids: Array, read: Callable[[Array], T], where: str) -> T:
    """Return `read(ids)`, with other items, drawn uniformly, in place of those that were evicted.

    Raises:
        NoClipsError: all were.
        LappedError: the writer overtook this reader for 5 s without progress.
    """
    found, errors = list[T](), 0

    def attempt() -> int:
        nonlocal ids, errors
        ids = _replaced(dataset, locate, ids, where)
        try:
            items = read(ids)
        except ClipIndexError:  # of a step that was evicted since
            errors += 1
            if errors == _MOST_ERRORS:
                raise
            return 1
        if not stored_items(dataset, locate, ids).all():
            return 1
        found.append(items)
        return 0

    retry(attempt, lambda: None, where, "raise max_steps of the buffer")
    return found[0]


def _replaced(dataset: Dataset, locate: Locate, ids: Array, where: str) -> Array:
    stored = stored_items(dataset, locate, ids)
    if stored.all():
        return ids
    left = np.flatnonzero(stored_items(dataset, locate, np.arange(len(dataset))))
    if not len(left):
        raise NoClipsError(f"{where}: all episodes of the view were evicted since it was made; make a new view")
    info = worker()
    rng = np.random.default_rng(None if info is None else (info.seed, int(ids.sum())))
    return np.where(stored, ids, left[rng.integers(len(left), size=len(ids))])


def stored_items(dataset: Dataset, locate: Locate, ids: Array) -> Array:
    """Tell which items are still stored, bool `(B,)`."""
    episodes, anchors = locate(ids)
    stored = dataset.are_stored(episodes, np.maximum(anchors - dataset.cut.before, 0))
    return np.ones(len(ids), np.bool_) if stored is None else stored
