"""A dataset over the columns of a file, returned as PyTorch tensors or NumPy arrays.

    clip ids -> episodes, anchors -> rows -> source.windows -> tensors -> transform -> fold
                                               (one read per column and batch)

Every built-in reader is this class over a `ColumnSource` of its format: a format defines how
rows are found, this class defines what users get. Columns that torch has no dtype for
(strings, dates, bytes) stay NumPy arrays; in a clip, text is a list, which the DataLoader
can batch.
Not here: bytes on disk (formats/), the clip arithmetic (base.py, clips/).
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.datasets.base import Dataset, Transform, clip_ids, num_rows
from ringmap.datasets.episode import EpisodeDict, PictureAxes, is_image, to_channels_first
from ringmap.datasets.loader_batches import as_clip
from ringmap.errors import ClipIndexError, InputError, UnknownColumnError, UnsupportedError
from ringmap.extras import require
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.read.episodes import ORIGIN_KEY, origin_in, origins_at
from ringmap.storage.read.handle import Handle
from ringmap.storage.records.blobs import is_shown

__all__ = ["ColumnSource", "StoredDataset"]

Array = np.ndarray[Any, np.dtype[Any]]

LAYOUTS = ("CHW", "HWC")
OUTPUTS = ("torch", "numpy")
_DENSE = 2
"""Rows of a run for each step of an item: up to here, reading the whole run costs less than reading its steps one by
one."""


class ColumnSource(Protocol):
    """Columns of rows at a path: the seam between a format and `StoredDataset`.

    Obligations: `windows` returns fresh, writable arrays in native byte order, and may be called
    from any thread; the object pickles without data or handles and opens again by itself in
    whatever process it wakes up in (fork and spawn), where it refuses a path that now holds
    something else. It may have `reward_at`, "next" or "same": where rewards stand; `fps`, the steps per second;
    `first_steps`, how many steps of each episode were evicted; and
    `unsupported`, name -> what it is ("of dtype ..., which is not read"): columns that are there, sound, and not in
    `schema`.
    """

    path: str

    @property
    def schema(self) -> Schema:
        """Columns in order: names, per-step shapes, dtypes."""
        ...

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int32."""
        ...

    @property
    def offsets(self) -> Array:
        """Row of each episode's first step, int64."""
        ...

    @property
    def episode_columns(self) -> list[str]:
        """Names of the values that are constant within an episode, first seen first."""
        ...

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows `s, s + stride, ... < s + length` of these columns for each s of `starts`.

        Shapes: column -> (len(starts), ceil(length / stride), ...), images in stored order.
        """
        ...

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} when it has none."""
        ...

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        ...


class StoredDataset(Dataset):
    """Episodes that lie in a file, as PyTorch tensors or NumPy arrays.

    Args:
        source: where the columns come from.
        num_steps: observations in a clip.
        frameskip: stride between the observations of a clip.
        transform: maps a dict of columns to the one to return; it sees actions unfolded.
        layout: "CHW" returns images as (T, C, H, W), "HWC" as they are stored.
        output: "torch" returns tensors, "numpy" arrays, for which PyTorch need not be installed.
        keys_to_load: the columns to return; None for all.
        keys_to_drop: columns to leave out of all, if there are such.
        keys_to_cache: columns to hold in memory.
        keys_to_merge: new column -> the columns to join into it (as `merge_col` takes them).
        unknown: refused by name.

    Raises:
        InputError: an option is wrong.
        UnknownColumnError: an option names a column that is not stored.
        UnsupportedError: a column is of a kind that is not read, and `keys_to_load` does not leave it out.
        MissingExtraError: from a read: tensors were asked for, and PyTorch is not installed.

    Processes and threads: reads are as thread-safe as the source; pickling takes the settings and
    cached columns along, never the data.
    """

    def __init__(
        self,
        source: ColumnSource,
        *,
        num_steps: int = 1,
        frameskip: int = 1,
        transform: Transform | None = None,
        layout: str = "CHW",
        output: str = "torch",
        keys_to_load: Sequence[str] | None = None,
        keys_to_drop: Collection[str] = (),
        keys_to_cache: Sequence[str] = (),
        keys_to_merge: Mapping[str, Sequence[str] | str] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise InputError(
                f"{source.path}: unknown option {next(iter(unknown))!r}; known: num_steps (a buffer's history_len), "
                "frameskip, transform, layout, output, keys_to_load, keys_to_drop, keys_to_cache, keys_to_merge"
            )
        if layout not in LAYOUTS:
            raise InputError(f"{source.path}: layout must be one of {LAYOUTS}, got {layout!r}")
        if output not in OUTPUTS:
            raise InputError(f"{source.path}: output must be one of {OUTPUTS}, got {output!r}")
        super().__init__(source.lengths, source.offsets, frameskip, num_steps, transform)
        self.source = source
        self._begins: Array = self._offsets
        """The row of the source at which each episode begins."""
        Facts.of(source).give(self)
        self.layout = layout
        self.output = output
        stored = {spec.name: spec for spec in source.schema.columns}
        unsupported: Mapping[str, str] = getattr(source, "unsupported", {})
        self.dropped = [n for n in (*stored, *unsupported) if n in keys_to_drop and keys_to_load is None]
        """The columns that were left out."""
        unsupported = {n: what for n, what in unsupported.items() if n not in self.dropped}
        names = [n for n in stored if n not in self.dropped]
        names = names if keys_to_load is None else list(keys_to_load)
        for name in (*(unsupported if keys_to_load is None else ()), *names, *keys_to_cache):
            if name in unsupported:
                raise UnsupportedError(
                    f"{source.path}: column {name!r} is {unsupported[name]}; read the others with "
                    f"keys_to_load={list(stored)}, or copy them with drop={list(unsupported)}"
                )
            if name not in stored:
                raise UnknownColumnError(f"{source.path}: no column {name!r}; there are {list(stored)}")
        self._specs: dict[str, ColumnSpec] = {name: stored[name] for name in names}
        self._cache: dict[str, Array] = {}
        self._turned = frozenset(n for n in names if layout == "CHW" and is_image(stored[n]))
        for name in keys_to_cache:
            self._cache[name] = self._whole(name)
        for target, given in (keys_to_merge or {}).items():
            self.merge_col(given, target)

    @property
    def path(self) -> str:
        """Where the data lies."""
        return self.source.path

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return list(self._specs)

    @property
    def schema(self) -> Schema:
        """Columns in order: names, per-step shapes (as stored), dtypes."""
        return Schema(tuple(self._specs.values()))

    def picture_axes(self) -> PictureAxes:
        """Return the columns of pictures; in layout "CHW" all come channels first."""
        return {n: (s, n in self._turned) for n, s in self._specs.items() if is_image(s)}

    def marked_ring(self) -> tuple[Handle, Array] | None:
        """Return the ring that the episodes are in, and their positions; None of a format without marks of its own."""
        ask = getattr(self.source, "ring", None)
        found: tuple[Handle, Array] | None = None if ask is None else ask()
        return found if found is None or self._source_episodes is None else (found[0], found[1][self._source_episodes])

    def close(self) -> None:
        """Give the file back, so that it may be appended to; the next read opens it again."""
        self.source.close()

    # -- episodes ----------------------------------------------------------------------------

    def _steps(self, ep: int, start: int, end: int, names: Sequence[str]) -> dict[str, Any]:
        """Return steps of an episode in the form that users get, without `transform`."""
        length = int(self.lengths[self._episode_number(ep)])
        if not 0 <= start <= end <= length:
            raise ClipIndexError(
                f"{self.path}: steps [{start}, {end}) are out of range for episode {ep} of {length} steps"
            )
        found = self._shown(self._windows(names, self._begins[[ep]] + start, end - start, 1))
        return EpisodeDict({name: values[0] for name, values in found.items()}, self._turned.intersection(names))

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        steps = self._steps(ep, start, end, list(self._specs))
        if self.transform is None:
            return steps
        made = self.transform(steps)
        # A transform may return a new dict: what is still an image with its channels in front stays marked.
        still = {n for n in self._turned if n in made and _channels_lead(made[n], self._specs[n])}
        return EpisodeDict(made, still)

    def load_steps(
        self, episode_idx: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return steps `[start, end)` of one episode, dense; with `columns`, only these are read, if there is no
        `transform`.

        Raises:
            ClipIndexError: there are no such steps.
            UnknownColumnError: there is no such column.
        """
        if columns is None or self.transform is not None:
            return super().load_steps(episode_idx, start, end, columns)
        for name in columns:
            self._check_column(name, "load_steps")
        return self._steps(operator.index(episode_idx), start, end, list(columns))

    def steps_as_stored(
        self, episode: int, start: int, end: int, names: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Return steps as they are stored; see `Dataset.steps_as_stored`."""
        specs = self.source.schema.columns
        wanted = [s.name for s in specs if (len(s.shape) <= 1 if names is None else s.name in names)]
        found = self.source.windows(wanted, self._begins[[episode]] + start, end - start)
        return {name: values[0] for name, values in found.items()}

    def stored_rows(self, first: int, stop: int, names: Sequence[str]) -> dict[str, Array]:
        """Return the rows of episodes end to end, in one read for each run of them; see `Dataset.stored_rows`."""
        wanted = [spec.name for spec in self.source.schema.columns if spec.name in names]
        filled = np.flatnonzero(self.lengths[first:stop]) + first
        begins, sizes = self._begins[filled], self.lengths[filled].astype(np.int64)
        cuts = [0, *(np.flatnonzero(begins[1:] != begins[:-1] + sizes[:-1]) + 1).tolist(), len(filled)]
        runs = list(itertools.pairwise(cuts)) if len(filled) else []
        parts = [self.source.windows(wanted, begins[a : a + 1], int(sizes[a:b].sum())) for a, b in runs]
        if not parts:
            return {n: v[0] for n, v in self.source.windows(wanted, np.zeros(1, np.int64), 0).items()}
        if len(parts) == 1:
            return {name: parts[0][name][0] for name in wanted}
        return {name: np.concatenate([part[name][0] for part in parts]) for name in wanted}

    def take(self, episodes: Sequence[int] | Array) -> StoredDataset:
        """Return a dataset of some of the episodes, in this order, numbered from 0; columns in memory are shared.

        Raises:
            ClipIndexError: there is no such episode.
        """
        chosen = self._episode_numbers(episodes)
        made = self._name(self._fresh(), chosen)
        made._begins, made._lengths = self._begins[chosen], self._lengths[chosen]
        made._offsets = np.cumsum(made._lengths, dtype=np.int64) - made._lengths
        made._lengths.flags.writeable = made._offsets.flags.writeable = False
        made._cache, made._specs = dict(self._cache), dict(self._specs)
        return made

    def _in_source(self, episodes: Array) -> Array:
        """Return the numbers that episodes have in the source."""
        return episodes if self._source_episodes is None else self._source_episodes[episodes]

    def origins(self) -> tuple[Array, Array]:
        """Return what the ring, or the file, says of each episode; see `Dataset.origins`."""
        ring = self.marked_ring()
        if ring is not None:
            lineages, ordinals, _ = origins_at(*ring)
            return lineages, ordinals
        lineages, ordinals = super().origins()
        if ORIGIN_KEY in self.source.episode_columns:
            for number in range(len(self.lengths)):
                said = origin_in(self._data_at(number))
                if said is not None:
                    lineages[number], ordinals[number] = np.frombuffer(said[0], np.uint8), said[1]
        return lineages, ordinals

    def first_steps(self) -> Array:
        """Return how many steps of each episode were evicted; a ring knows it without its data. See
        `Dataset.first_steps`."""
        known = getattr(self.source, "first_steps", None)
        return super().first_steps() if known is None else known[self._in_source(np.arange(len(self.lengths)))]

    def episode_data(self, episode_idx: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} if it has none. Reads those of this episode.

        Raises:
            ClipIndexError: there is no such episode.
        """
        found = self._data_at(self._episode_number(episode_idx))
        return {name: value for name, value in found.items() if is_shown(name)}

    def _data_at(self, number: int) -> Mapping[str, Any]:
        """Return all data of an episode, those too that users do not see."""
        return self.source.episode_data(int(self._in_source(np.array([number]))[0]))

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the values that are constant within an episode, first seen first."""
        return [name for name in self.source.episode_columns if is_shown(name)]

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return the values that are constant within an episode.

        Args:
            idx: an episode, several (duplicates are welcome), or None for all.

        Returns:
            name -> one value per asked episode; None where an episode lacks it.

        Raises:
            ClipIndexError: there is no such episode.
        """
        numbers = self._in_source(self._episode_numbers(idx))
        records = [self.source.episode_data(number) for number in numbers.tolist()]
        return {name: [r.get(name) for r in records] for name in self.episode_column_names}

    # -- clips -------------------------------------------------------------------------------

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips at once: what PyTorch's DataLoader calls, and collates without a copy.

        Raises:
            ClipIndexError: as for one clip.
        """
        episodes, steps = self._locate(clip_ids(indices, type(self).__name__))
        if not len(episodes):
            return []
        cut = self.cut
        columns = self._columns_at(episodes, steps, cut)
        if self.transform is None:
            return self._as_batch(columns, len(episodes), cut)
        # It sees actions unfolded, and clips before their text becomes lists.
        items = [{n: v[i] for n, v in columns.items()} for i in range(len(episodes))]
        return [as_clip(self._fold(self.transform(item))) for item in items]

    def _rows_at(self, names: Sequence[str], episodes: Array, steps: Array, run: range | None) -> dict[str, Array]:
        """As `Dataset._rows_at`, straight from the source: `transform` is not applied."""
        offsets = self._begins[episodes]
        if run is not None:
            return self._windows(names, offsets + (steps + run[0]), run[-1] - run[0] + 1, run.step)
        rows = offsets[:, None] + steps
        if not len(rows) or rows.shape[1] == 1:
            return self._windows(names, rows[:, 0], rows.shape[1], 1)
        found = {name: self._cache[name].take(rows, 0) for name in names if name in self._cache}
        stored = [name for name in names if name not in found]
        if stored:
            found.update(self._runs(stored, rows, offsets, offsets + self.lengths[episodes]))
        return found

    def _runs(self, names: Sequence[str], rows: Array, starts: Array, ends: Array) -> dict[str, Array]:
        """Return rows `(B, n)` of the source: each item out of one run of rows in its episode `[start, end)`."""
        lowest = rows.min(1)
        widths = rows.max(1) - lowest + 1
        wide = widths > _DENSE * rows.shape[1]
        left, parts, order = np.flatnonzero(~wide), [], []
        while len(left):
            width = int(widths[left].max())
            first = np.minimum(lowest[left], ends[left] - width)
            # Items of episodes shorter than that come next, with a smaller width.
            fits = first >= starts[left]
            chosen, first = left[fits], first[fits]
            found = self.source.windows(names, first, width, 1)
            where = np.arange(len(chosen))[:, None], rows[chosen] - first[:, None]
            parts.append({name: values[where] for name, values in found.items()})
            order.append(chosen)
            left = left[~fits]
        if wide.any():
            order.append(np.flatnonzero(wide))
            single, index = np.unique(rows[wide], return_inverse=True)
            found = self.source.windows(names, single, 1, 1)
            index = index.reshape(-1, rows.shape[1])
            parts.append({name: values[:, 0].take(index, 0) for name, values in found.items()})
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.concatenate(order))
        return {name: np.concatenate([part[name] for part in parts])[back] for name in names}

    def _rows_are_fixed(self) -> bool:
        return True

    def _where(self, method: str) -> str:
        return f"{self.path}: {method}"

    def _schema(self, where: str) -> Schema:
        return self.schema

    def _fold(self, steps: Mapping[str, Any]) -> dict[str, Any]:
        items = super()._fold(steps) if self.cut.history else dict(steps)
        return {
            name: value.tolist() if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "SU" else value
            for name, value in items.items()
        }

    # -- whole columns -----------------------------------------------------------------------

    def get_col_data(self, col: str) -> Array:
        """Return a column of all steps as a NumPy array of its stored dtype, images in stored order.

        Raises:
            UnknownColumnError: there is no such column.

        Cost: reads and holds the whole column.
        """
        self._check_column(col, "get_col_data")
        if self._source_episodes is None:
            return self._whole(col).copy() if col in self._cache else self._whole(col)
        if col in self._cache:
            rows = np.repeat(self._begins - self.offsets, self.lengths) + np.arange(int(self.lengths.sum()))
            return self._cache[col].take(rows, 0)
        return self.stored_rows(0, len(self.lengths), [col])[col]

    def get_dim(self, col: str) -> int:
        """Return how many values a step of a column holds. O(1).

        Raises:
            UnknownColumnError: there is no such column.
        """
        self._check_column(col, "get_dim")
        return int(np.prod(self._specs[col].shape))

    def merge_col(self, source: Sequence[str] | str, target: str, dim: int = -1) -> None:
        """Join columns along axis `dim` into the column `target`, held in memory.

        Args:
            source: column names in order, or a regular expression that their beginnings match.
            target: name of the new column; one of that name is replaced in this view of the file.
            dim: axis of the joined array, whose axis 0 is time; never 0. A column of scalars counts
                as (T, 1).

        Raises:
            UnknownColumnError: a column is not there.
            InputError: nothing matches, or the shapes do not join.

        Cost: reads and holds all these columns.
        """
        where = f"{self.path}: merge_col"
        names = [n for n in self._specs if re.match(source, n)] if isinstance(source, str) else list(source)
        if not names:
            raise InputError(f"{where}: no column matches {source!r}; there are {self.column_names}")
        for name in names:
            self._check_column(name, "merge_col")
        parts = [self._whole(name) for name in names]
        parts = [part[:, None] if part.ndim == 1 else part for part in parts]
        try:
            merged = np.concatenate(parts, axis=dim)
        except ValueError as error:
            raise InputError(f"{where}: {names} do not join along axis {dim}: {error}") from None
        if merged.shape[0] != parts[0].shape[0]:
            raise InputError(f"{where}: axis {dim} is time; join along another")
        self._rows = None
        self._cache[target] = merged
        self._specs[target] = ColumnSpec(target, merged.shape[1:], merged.dtype)
        turned = self.layout == "CHW" and is_image(self._specs[target])
        self._turned = self._turned | {target} if turned else self._turned - {target}

    # -- helpers -----------------------------------------------------------------------------

    def _whole(self, name: str) -> Array:
        """Return a column of all rows of the source."""
        if name in self._cache:
            return self._cache[name]
        count = num_rows(self.source.lengths, self.source.offsets)
        rows: Array = self.source.windows([name], np.zeros(1, np.int64), count)[name][0]
        return rows

    def _windows(self, names: Sequence[str], starts: Array, length: int, stride: int) -> dict[str, Array]:
        """Return windows of columns, from memory where a column is held there."""
        if not self._cache:
            return self.source.windows(names, starts, length, stride)
        stored = [name for name in names if name not in self._cache]
        found = self.source.windows(stored, starts, length, stride) if stored else {}
        rows = starts[:, None] + np.arange(0, length, stride)
        return {n: found[n] if n in found else self._cache[n].take(rows, 0) for n in names}

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self.output == "torch":
            try:
                import torch
            except ModuleNotFoundError:
                require("torch", f"{self.path}: tensors", instead='open it with output="numpy"')
                raise
            for name, values in columns.items():
                if _torch_has(values.dtype):
                    columns[name] = torch.from_numpy(values)
        for name in self._turned:
            if name in columns:
                columns[name] = to_channels_first(columns[name])
        return columns


@functools.cache
def _torch_has(dtype: np.dtype[Any]) -> bool:
    """Ask torch itself: the answer grew with its versions."""
    import torch

    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def _channels_lead(value: Any, spec: ColumnSpec) -> bool:
    shape, dtype = tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", ""))
    return len(shape) == 4 and shape[1] == spec.shape[-1] and dtype.endswith(str(spec.dtype))
