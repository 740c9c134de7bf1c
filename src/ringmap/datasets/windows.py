"""The items of a cut over the episodes of a dataset: a column is read once per batch.

    anchors (B,)  --Cut-->  steps (B, n), which are padding  --rows_at-->  columns  -->  computed columns

Invariants: only steps of the anchor's own episode are read; columns are as they are stored, images too.
Not here: which steps those are (clips/cut.py), how a dataset reads them (base.py, stored.py), tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ringmap.clips.cut import Cut, Steps, Taken
from ringmap.clips.items import Items, call_functions, compute, pad
from ringmap.datasets.image_axes import stored_layout
from ringmap.errors import InputError

__all__ = ["DatasetRows", "RowsAt", "fold", "gather", "rows_by_slices"]

Array = np.ndarray[Any, np.dtype[Any]]

RowsAt = Callable[[Sequence[str], Array, Array, range | None], dict[str, Array]]
"""`(names, episodes, steps, run)` -> name -> values `(B, n, ...)`; see `Dataset._rows_at`."""


class DatasetRows:
    """The rows of a dataset, as `ItemRows`, and what to read of them: the position of a row is its number in the dataset.

    Args:
        cut: what the items hold.
        rows_at: reads steps of episodes.
        names: of the columns.
        lengths: steps of each episode.
        offsets: row of each episode's first step.
        key: equal for equal rows; None: the rows may change.
    """

    def __init__(
        self, cut: Cut, rows_at: RowsAt, names: Sequence[str], lengths: Array, offsets: Array, key: Any
    ) -> None:  # fmt: skip
        self.cut = cut
        self.rows_at = rows_at
        self.names: Collection[str] = names
        self.given = lengths
        """The lengths as they were given."""
        self.lengths = np.asarray(lengths, np.int64)
        self.offsets = np.asarray(offsets, np.int64)
        self.key = key
        self.size = int((self.offsets + self.lengths).max()) if len(self.lengths) else 0
        self.memory: AbstractContextManager[Any] = nullcontext()
        filled = np.flatnonzero(self.lengths)  # an empty episode begins where the next one does
        self._order = filled[np.argsort(self.offsets[filled], kind="stable")]
        self.columns: list[tuple[str, Taken]] = [
            (name, taken) for name in names if (taken := cut.of(name)) is not None
        ]
        """Each column to read, and how an item holds it."""
        alike: dict[Steps, list[str]] = {}
        for name, taken in self.columns:
            alike.setdefault(taken.steps, []).append(name)
        self.alike = list(alike.items())
        """The names of the columns with the same steps."""

    def take(self, column: str, places: Array, starts: Array) -> Array:
        """Return copies of rows."""
        first = starts.reshape(-1, *(1,) * (places.ndim - 1))
        steps = (places - first).reshape(len(places), -1)
        found = self.rows_at([column], self.episodes(starts), steps, None)[column]
        return found.reshape(*places.shape, *found.shape[2:])

    def read(self, column: str, start: int, length: int) -> Array:
        """Return a copy of the rows of a whole episode."""
        episode = self.episodes(np.array([start]))
        found: Array = self.rows_at([column], episode, np.zeros(1, np.int64), range(length))[
            column
        ][0]
        return found

    def episodes(self, starts: Array) -> Array:
        """Return the numbers of the episodes that begin at these rows."""
        found: Array = self._order[self.offsets[self._order].searchsorted(starts)]
        return found

    def newest_tail(self) -> int:
        """Return 0: rows of a dataset are not overwritten."""
        return 0


def gather(
    rows: DatasetRows, episodes: Array, steps: Array, rng: np.random.Generator | None
) -> dict[str, Array]:
    """Return the columns of items, `(B, n, ...)` as the cut holds them, not folded yet.

    Args:
        rows: of the dataset.
        episodes: of the anchors, `(B,)`; at least one.
        steps: of the anchors in their episodes.
        rng: for computed columns that draw.
    """
    cut = rows.cut
    found: dict[str, Array] = {}
    masks: dict[Steps, Array] = {}
    for held, names in rows.alike:
        wanted, run = steps, held.run
        if run is None or held.padded:
            places, is_pad = held.places(steps, np.zeros_like(steps), rows.lengths[episodes])
            if is_pad is not None:
                masks[held] = is_pad
            if run is None or (is_pad is not None and is_pad.any()):
                wanted, run = places, None
        found.update(rows.rows_at(names, episodes, wanted, run))
    batch: dict[str, Array] = {}
    for name, taken in rows.columns:
        values = found[name]
        batch[name] = values[:, 0] if taken.is_alone else values
        if masks and taken.steps.padded:
            pad(batch, values, taken, masks[taken.steps])
    if cut.computed:
        assert rng is not None
        starts = rows.offsets[episodes]
        items = Items(rows, cut, starts + steps, starts, rows.lengths[episodes], batch, rng)
        compute(batch, items, cut)
    if cut.functions:
        call_functions(batch, cut, len(steps))
    return batch


def fold(columns: dict[str, Any], cut: Cut) -> None:
    """Fold the columns of clips that hold all their steps, `(B, n, ...)`, to `(B, history, ...)`: arrays and tensors alike."""
    for name, taken in cut.named.items():
        if taken.fold and name in columns:
            values = columns[name]
            width = math.prod(values.shape[1:]) // taken.fold
            columns[name] = values.reshape(values.shape[0], taken.fold, width)


def rows_by_slices(
    load_slice: Callable[[int, int, int], Any], names: Sequence[str], episodes: Array, steps: Array,
    run: range | None,
) -> dict[str, Array]:  # fmt: skip
    """Return steps of episodes out of one slice for each: the general form of `Dataset._rows_at`.

    Raises:
        InputError: a slice is not dense.
    """
    if run is not None:
        steps = steps[:, None] + np.array(run)
    parts: dict[str, list[Array]] = {name: [] for name in names}
    for episode, wanted in zip(episodes.tolist(), steps, strict=True):
        low, high = int(wanted.min()), int(wanted.max()) + 1
        found = stored_layout(load_slice(episode, low, high))
        for name in names:
            values = np.asarray(found[name])
            if len(values) != high - low:
                raise InputError(
                    f"a window needs every step of column {name!r}, but steps [{low}, {high}) of episode {episode} came as "
                    f"{len(values)} rows; open the dataset with frameskip=1"
                )
            parts[name].append(values[wanted - low])
    return {name: np.stack(values) for name, values in parts.items()}
