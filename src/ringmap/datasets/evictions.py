"""Items that have left a view of a buffer, for datasets that join several reads to one item.

    ids -> replaced: others of the dataset in place of what was evicted -> read each part -> were_stored: nothing was
    evicted meanwhile

A view redraws by itself what it has lost. Two views would redraw apart, and their columns would not belong together; a
goal would lie in another episode than its clip. So such a dataset replaces items before it asks its parts.

Not here: what is stored (buffers/), the item of one view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from ringmap.clips.cut import Cut
from ringmap.datasets.batch import worker
from ringmap.errors import ClipIndexError, NoClipsError
from ringmap.storage.read.read_live import retry

__all__ = ["read_stored", "stored_items"]

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")
Locate = Callable[[Array], tuple[Array, Array]]
"""Returns the episodes of items, and the steps of their anchors."""

_MOST_ERRORS = 10


class Losing(Protocol):
    """A dataset whose oldest episodes may be evicted."""

    @property
    def cut(self) -> Cut: ...
    def __len__(self) -> int: ...
    def are_stored(self, episodes: Array, steps: Array) -> Array | None: ...


def read_stored(dataset: Losing, locate: Locate, ids: Array, read: Callable[[Array], T], where: str) -> T:
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


def _replaced(dataset: Losing, locate: Locate, ids: Array, where: str) -> Array:
    stored = stored_items(dataset, locate, ids)
    if stored.all():
        return ids
    left = np.flatnonzero(stored_items(dataset, locate, np.arange(len(dataset))))
    if not len(left):
        raise NoClipsError(f"{where}: all episodes of the view were evicted since it was made; make a new view")
    info = worker()
    rng = np.random.default_rng(None if info is None else (info.seed, int(ids.sum())))
    return np.where(stored, ids, left[rng.integers(len(left), size=len(ids))])


def stored_items(dataset: Losing, locate: Locate, ids: Array) -> Array:
    """Tell which items are still stored, bool `(B,)`."""
    episodes, anchors = locate(ids)
    stored = dataset.are_stored(episodes, np.maximum(anchors - dataset.cut.before, 0))
    return np.ones(len(ids), np.bool_) if stored is None else stored
