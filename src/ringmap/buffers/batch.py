"""A batch that knows which clips it holds: a dict of columns, with the attributes `ids`, `weights` and `redrawn`.

Invariants: keys are columns and nothing else; the attributes belong to this batch, whatever is drawn later.
Not here: where columns come from (sampled.py, transitions/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ringmap.storage.columns.schema import Schema

__all__ = ["Batch", "rows_of"]

Array = np.ndarray[Any, np.dtype[Any]]
V = TypeVar("V")


class Batch(dict[str, V]):
    """Column -> `(B, ...)`: what `sample()`, `batches()` and a DataLoader return. A plain dict with attributes.

    Args:
        columns: name -> values.
        ids: int64 `(B,)`, for `update_priorities`: the position of each clip, unique to that clip. Always an array.
        weights: float32 `(B,)`, factors for the losses, of the same kind as the columns; None where the sampler
            draws without priorities.
        asked: the ids that were asked for, or drawn; None: those that came.
        numbered: the numbers of episodes in it, and their names; None: it has none, or they are those of a view.
    """

    __slots__ = ("_asked", "ids", "numbered", "weights")

    def __init__(
        self,
        columns: Mapping[str, V] | Iterable[tuple[str, V]] = (),
        ids: Array | None = None,
        weights: Any = None,
        asked: Array | None = None,
        numbered: tuple[Array, Array] | None = None,
    ) -> None:
        dict.__init__(self, columns)
        self.ids = ids
        self.weights = weights
        self._asked = asked
        self.numbered = numbered

    @property
    def redrawn(self) -> Array:
        """Which clips came in place of others, which had been evicted, bool `(B,)`."""
        if self.ids is None or self._asked is None:
            return np.zeros(0 if self.ids is None else len(self.ids), np.bool_)
        found: Array = self.ids != self._asked
        return found

    @property
    def like(self) -> Callable[..., Batch[Any]]:
        """What makes a batch of other columns, with the attributes of this one. It can be pickled."""
        return partial(Batch, ids=self.ids, weights=self.weights, asked=self._asked, numbered=self.numbered)

    def copy(self) -> Batch[V]:
        """Return a shallow copy, attributes included."""
        return self.like(self)

    def mapped(self, convert: Callable[[Any], Any]) -> Batch[Any]:
        """Return the batch with every column, also of nested ones, and the weights converted."""
        weights = None if self.weights is None else convert(self.weights)
        return Batch(_mapped(self, convert), self.ids, weights, self._asked, self.numbered)


def _mapped(columns: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    return {n: _mapped(v, convert) if isinstance(v, dict) else convert(v) for n, v in columns.items()}


def rows_of(clips: Mapping[str, Any], schema: Schema | None, count: int) -> dict[str, Any]:
    """Return clips of one step without their time axis, each column in its stored shape."""
    shapes = {spec.name: spec.shape for spec in (schema.columns if schema is not None else ())}
    return {name: v.reshape(count, *shapes[name]) if name in shapes else v[:, 0] for name, v in clips.items()}
