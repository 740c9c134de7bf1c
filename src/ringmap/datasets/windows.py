"""The items of a cut over the episodes of a dataset: a column is read once per batch.

    anchors (B,)  --Cut-->  steps (B, n), which are padding  --rows_at-->  columns  -->  computed columns

Invariants: only steps of the anchor's own episode are read; columns are as they are stored, images too.
Not here: which steps those are (clips/cut.py), how a dataset reads them (base.py, stored.py), tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringmap.clips.cut import Cut, Steps, Taken
from ringmap.clips.index import ClipIndex
from ringmap.clips.items import ItemRows, Items, call_functions, compute, pad
from ringmap.datasets.episode import stored_layout
from ringmap.errors import InputError
from ringmap.storage.ring.live import LiveEpisodes

__all__ = ["DatasetRows", "RowsAt", "Runs", "fold", "gather", "rows_by_slices"]

Array = np.ndarray[Any, np.dtype[Any]]

RowsAt = Callable[[Sequence[str], Array, Array, range | None], dict[str, Array]]
"""`(names, episodes, steps, run)` -> name -> values `(B, n, ...)`; see `Dataset._rows_at`."""


class Runs:
    """Episodes one after the other, in one run or several: a step has a place in that order.

    Args:
        lengths: steps of each episode.
        order: numbers of the episodes; None: as they come.
        breaks: places at which runs begin; None: there is one run.
    """

    def __init__(self, lengths: Array, order: Array | None = None, breaks: Array | None = None) -> None:
        order = np.arange(len(lengths)) if order is None else order
        sizes = np.asarray(lengths, np.int64)
        begins = np.empty(len(sizes), np.int64)
        begins[order] = np.cumsum(sizes[order]) - sizes[order]
        self._episodes = order[sizes[order] > 0]
        self._begins, self._places = begins[self._episodes], begins
        self.length = int(sizes.sum())
        self._breaks = np.zeros(min(1, len(sizes)), np.int64) if breaks is None else breaks
        self.index = ClipIndex(LiveEpisodes.from_lengths(np.diff(self._breaks, append=self.length)))
        """Numbers the items of the runs."""

    def steps_of(self, runs: Array, steps: Array) -> tuple[Array, Array]:
        """Return the episodes, and the steps in them, of steps of runs."""
        return self.locate(self._breaks.take(runs) + steps)

    def locate(self, places: Array) -> tuple[Array, Array]:
        """Return the episode of each place, and the step in it."""
        at = self._begins.searchsorted(places, side="right") - 1
        return self._episodes.take(at), places - self._begins.take(at)

    def places(self, episodes: Array, steps: Array) -> Array:
        """Return the places of steps of episodes."""
        found: Array = self._places.take(episodes) + steps
        return found


class DatasetRows(ItemRows):
    """The rows of a dataset, as `ItemRows`, and what to read of them: the position of a row is its number in the
    dataset.

    Args:
        cut: what the items hold.
        rows_at: reads steps of episodes.
        names: of the columns.
        lengths: steps of each episode.
        offsets: row of each episode's first step.
        fixed: whether the rows stay as they are.
        first_steps: returns how many steps of each episode were evicted before it was copied; asked once, if it
            matters.
    """

    def __init__(
        self,
        cut: Cut,
        rows_at: RowsAt,
        names: Sequence[str],
        lengths: Array,
        offsets: Array,
        fixed: bool,
        first_steps: Callable[[], Array],
    ) -> None:
        self.cut = cut
        self.rows_at = rows_at
        self.names = names
        self.given = lengths
        """The lengths as they were given."""
        self.lengths = np.asarray(lengths, np.int64)
        self.offsets = np.asarray(offsets, np.int64)
        self._fixed = fixed
        self._first_steps = first_steps
        self._gone: Array | None = None
        self.size = int((self.offsets + self.lengths).max()) if len(self.lengths) else 0
        filled = np.flatnonzero(self.lengths)  # an empty episode begins where the next one does
        self._order = filled[np.argsort(self.offsets[filled], kind="stable")]
        alike: dict[Steps, list[str]] = {}
        self.columns: list[tuple[str, Taken, int]] = []
        """Each column to read, how an item holds it, and the number of its steps in `alike`."""
        for name in names:
            taken = cut.of(name)
            if taken is not None:
                alike.setdefault(taken.steps, []).append(name)
                self.columns.append((name, taken, list(alike).index(taken.steps)))
        self.alike = list(alike.items())
        """Steps, and the names of the columns that have them."""
        self.run = Runs(self.lengths) if cut.across else None
        """The episodes as one, for items that run on into the next."""

    def take(self, column: str, places: Array, starts: Array) -> Array:
        """Return copies of rows."""
        if self.run is not None:
            found = self.at([column], places.reshape(-1))[column]
            return found.reshape(*places.shape, *found.shape[1:])
        first = starts.reshape(-1, *(1,) * (places.ndim - 1))
        steps = (places - first).reshape(len(places), -1)
        found = self.rows_at([column], self.episodes(starts), steps, None)[column]
        return found.reshape(*places.shape, *found.shape[2:])

    def at(self, names: Sequence[str], places: Array) -> dict[str, Array]:
        """Return the rows at places of the run, `(n, ...)`."""
        assert self.run is not None
        episodes, steps = self.run.locate(places)
        found = self.rows_at(names, episodes, steps[:, None], None)
        return {name: values[:, 0] for name, values in found.items()}

    def read(self, column: str, start: int, length: int) -> Array:
        """Return a copy of rows of one or more episodes that stand one after the other."""
        parts, end = [], start + length
        at = int(self.offsets[self._order].searchsorted(start, side="right")) - 1
        while start < end:
            episode = self._order[at : at + 1]
            first = start - self.offsets[episode]
            count = min(int(self.lengths[episode[0]] - first[0]), end - start)
            parts.append(self.rows_at([column], episode, first, range(count))[column][0])
            start, at = start + count, at + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def key_of(self, column: str) -> Any:
        """Return these rows, None where they may change."""
        return self if self._fixed else None

    def episodes(self, starts: Array) -> Array:
        """Return the numbers of the episodes that begin at these rows."""
        found: Array = self._order[self.offsets[self._order].searchsorted(starts)]
        return found

    def positions(self, places: Array) -> Array:
        """Return the rows in the dataset."""
        if self.run is None:
            return places
        episodes, steps = self.run.locate(places)
        found: Array = self.offsets.take(episodes) + steps
        return found

    def are_begins(self, places: Array) -> Array:
        """Tell at which of these places of the run an episode begins."""
        assert self.run is not None
        found: Array = self.run.locate(places)[1] == 0
        return found

    def first_steps(self, starts: Array) -> Array:
        """Return how many steps were evicted of the episodes that begin at these rows, before they were copied."""
        return self.gone(self.episodes(starts) if self.run is None else np.zeros(len(starts), np.int64))

    def gone(self, episodes: Array) -> Array:
        """Return how many steps of these episodes were evicted before they were copied."""
        if self._gone is None:
            self._gone = self._first_steps()
        found: Array = self._gone.take(episodes)
        return found


def gather(rows: DatasetRows, episodes: Array, steps: Array, rng: np.random.Generator | None) -> dict[str, Array]:
    """Return the columns of items, `(B, n, ...)` as the cut holds them, not folded yet.

    Args:
        rows: of the dataset.
        episodes: of the anchors, `(B,)`; at least one.
        steps: of the anchors in their episodes.
        rng: for computed columns that draw.
    """
    cut, lengths, run = rows.cut, steps, rows.run
    if cut.needs_bounds:
        lengths = rows.lengths.take(episodes)
    found: dict[str, Array] = {}
    masks: list[Array | None] = []
    for held, names in rows.alike:
        if run is not None:
            values, is_pad = _read_across(rows, run, held, names, episodes, steps, lengths), None
        else:
            values, is_pad = _read(rows, held, names, episodes, steps, lengths)
        found.update(values)
        masks.append(is_pad)
    batch: dict[str, Array] = {}
    for name, taken, number in rows.columns:
        column, is_pad = found[name], masks[number]
        batch[name] = column[:, 0] if taken.is_alone else column
        if is_pad is not None:
            pad(batch, column, taken, is_pad)
    if cut.computed:
        assert rng is not None
        starts = rows.offsets[episodes]
        items = Items(rows, cut, starts + steps, starts, lengths, batch, rng, rows.episodes)
        if run is not None:
            origins, whole = np.zeros(len(steps), np.int64), np.full(len(steps), run.length)
            places = run.places(episodes, steps)
            items = Items(rows, cut, starts + steps, starts, whole, batch, rng, rows.episodes, places, origins)
        compute(batch, items, cut)
    if cut.functions:
        call_functions(batch, cut, len(steps))
    return batch


def _read_across(
    rows: DatasetRows,
    run: Runs,
    held: Steps,
    names: list[str],
    episodes: Array,
    steps: Array,
    lengths: Array,
) -> dict[str, Array]:
    """Return columns with the same steps, `(B, n, ...)`, which run on into the next episodes."""
    inside = steps + held.highest < lengths
    if held.run is not None and inside.all():
        return rows.rows_at(names, episodes, steps, held.run)
    over = np.flatnonzero(~inside) if held.run is not None else np.arange(len(steps))
    places = run.places(episodes[over], steps[over])[:, None] + held.array
    late = rows.at(names, places.reshape(-1))
    found = {n: v.reshape(*places.shape, *v.shape[1:]) for n, v in late.items()}
    if len(over) == len(steps) or held.run is None:
        return found
    merged = {}
    within = rows.rows_at(names, episodes[inside], steps[inside], held.run)
    for name, values in within.items():
        both = np.concatenate([values, found[name]])
        merged[name] = both[np.argsort(np.concatenate([np.flatnonzero(inside), over]))]
    return merged


def _read(
    rows: DatasetRows, held: Steps, names: list[str], episodes: Array, steps: Array, lengths: Array
) -> tuple[dict[str, Array], Array | None]:
    """Return columns with the same steps, `(B, n, ...)`, and which of the rows are padding, None if none can be.

    `lengths` are those of the episodes, if the steps are padded.
    """
    run = held.run
    if run is not None and not held.padded:
        return rows.rows_at(names, episodes, steps, run), None
    starts = np.zeros(len(steps), np.int64)
    blanks = np.full(len(steps), held.blank_first)
    if (
        held.padded and held.blank_first
    ):  # of an episode that lost its front the first step that is left is like any other
        blanks[rows.gone(episodes) > 0] = 0
    if run is not None:
        # One run of rows for each item, moved into its episode: that holds the rows of an item with padding, too.
        width, wanted = run[-1] - run[0] + 1, steps + run[0]
        last = lengths - (width + held.blank_last)
        first = np.minimum(np.maximum(wanted, blanks), last)
        late = (first != wanted).nonzero()[0]
        if (last >= blanks).all() and (run.step == 1 or not len(late)):
            found = rows.rows_at(names, episodes, first, range(0, width, run.step))
            is_pad = np.zeros((len(steps), len(run)), np.bool_)
            if len(late):
                places, padding = held.places(steps[late], starts[late], lengths[late], (blanks[late], held.blank_last))
                is_pad[late] = padding
                where = late[:, None], places - first[late][:, None]
                for values in found.values():
                    values[late] = values[where]
            return found, is_pad
    places, padding = held.places(steps, starts, lengths, (blanks, held.blank_last))
    return rows.rows_at(names, episodes, places, None), padding


def fold(columns: dict[str, Any], cut: Cut) -> None:
    """Fold the columns of clips that hold all their steps, `(B, n, ...)`, to `(B, history, ...)`: arrays and tensors
    alike."""
    for name, taken in cut.named.items():
        if taken.fold and name in columns:
            values = columns[name]
            width = math.prod(values.shape[1:]) // taken.fold
            columns[name] = values.reshape(values.shape[0], taken.fold, width)


def rows_by_slices(
    load_slice: Callable[[int, int, int], Any],
    names: Sequence[str],
    episodes: Array,
    steps: Array,
    run: range | None,
) -> dict[str, Array]:
    """Return steps of episodes out of one slice for each: the general form of `Dataset._rows_at`."""
    if run is not None:
        steps = steps[:, None] + np.array(run)
    parts: dict[str, list[Array]] = {name: [] for name in names}
    lows, highs = steps.min(1).tolist(), (steps.max(1) + 1).tolist()
    is_run = steps.shape[1] == 1 or bool((np.diff(steps) == 1).all())
    for episode, low, high, wanted in zip(episodes.tolist(), lows, highs, steps, strict=True):
        found = stored_layout(load_slice(episode, low, high))
        for name in names:
            values = np.asarray(found[name])
            if len(values) != high - low:
                raise InputError(
                    f"a window needs every step of column {name!r}, but steps [{low}, {high}) of episode {episode} "
                    f"came as {len(values)} rows; open the dataset with frameskip=1"
                )
            parts[name].append(values if is_run else values[wanted - low])
    return {name: np.stack(values) for name, values in parts.items()}
