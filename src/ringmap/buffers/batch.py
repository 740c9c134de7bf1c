"""A batch that knows which clips it holds: a dict of columns, with the attributes `ids` and `weights`.

Invariants: keys are columns and nothing else; `ids` and `weights` belong to this batch, whatever is drawn later.
Not here: where columns come from (sampled.py, transitions/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

__all__ = ["Batch"]

Array = np.ndarray[Any, np.dtype[Any]]
V = TypeVar("V")


class Batch(dict[str, V]):
    """Column -> `(B, ...)`: what `sample()` and `batches()` return. A plain dict with two attributes.

    Args:
        columns: name -> values.
        ids: int64 `(B,)`, for `update_priorities`: the position of each clip, unique to that clip. Always an array.
        weights: float32 `(B,)`, factors for the losses, of the same kind as the columns; None where the sampler
            draws without priorities.
    """

    __slots__ = ("ids", "weights")

    def __init__(
        self,
        columns: Mapping[str, V] | Iterable[tuple[str, V]] = (),
        ids: Array | None = None,
        weights: Any = None,
    ) -> None:
        dict.__init__(self, columns)
        self.ids = ids
        self.weights = weights

    def copy(self) -> Batch[V]:
        """Return a shallow copy, attributes included."""
        return Batch(self, self.ids, self.weights)

    def mapped(self, convert: Callable[[Any], Any]) -> Batch[Any]:
        """Return the batch with every column, also of nested ones, and the weights converted."""
        weights = None if self.weights is None else convert(self.weights)
        return Batch(_mapped(self, convert), self.ids, weights)


def _mapped(columns: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    return {n: _mapped(v, convert) if isinstance(v, dict) else convert(v) for n, v in columns.items()}  # fmt: skip
