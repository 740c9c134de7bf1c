"""Values for `ReplayBuffer.update`: checked and cast, before anything changes.

Not here: which steps are stored (storage/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.errors import InputError, UnknownColumnError
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.columns.values import as_array, cast, flattened

__all__ = ["updated"]

Array = np.ndarray[Any, np.dtype[Any]]


def updated(schema: Schema | None, ids: Any, values: Any, casting: str, where: str) -> tuple[Array, dict[str, Array]]:
    """Return the positions of an update, int64 `(n,)`, and column -> `(n, *shape)` in the column's dtype."""
    positions = _positions(ids, where)
    if not isinstance(values, Mapping) or not values:
        raise InputError(f"{where}: expected column -> values, got {values!r:.80}")
    values = flattened(values, where)
    specs = {spec.name: spec for spec in (schema.columns if schema is not None else ())}
    for name in values:
        if name not in specs:
            raise UnknownColumnError(f"{where}: no column {name!r}; there are {list(specs)}")
        if not specs[name].mutable:
            raise InputError(
                f"{where}: column {name!r} is not mutable; make a new buffer with schema={{..., {name!r}: "
                "ringmap.Column(shape, dtype, mutable=True)}, and fill it with extend_from"
            )
    fitted = {}
    for name, array in as_columns(values, where).items():
        spec = specs[name]
        expected = (*positions.shape, *spec.shape)
        if array.shape != expected:
            raise InputError(
                f"{where}: column {name!r} has shape {array.shape}, expected {expected}: that of the ids "
                f"{positions.shape}, and of a step {spec.shape}"
            )
        rows = array.reshape(positions.size, *spec.shape)
        if rows.dtype != spec.dtype:
            rows = cast(rows, spec.dtype, casting, f"{where}: column {name!r}")
        fitted[name] = rows
    return positions.reshape(-1), fitted


def _positions(ids: Any, where: str) -> Array:
    """Return ids as positions, int64, in their own shape."""
    found = as_array(ids, f"{where}: ids", "id")
    if not found.ndim or (found.dtype.kind not in "iu" and found.size):
        raise InputError(
            f"{where}: expected ids as an array of integers, such as batch.ids, got {found.dtype} {found.shape}"
        )
    return found.astype(np.int64, copy=False)
