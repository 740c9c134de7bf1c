"""Nested values whose shapes are declared: `Leaves` knows their columns.

    {"camera": (64, 64, 3), "state": (4,)}  ->  obs/camera, obs/state

Where shapes are not declared, a ring of batches records beside the rows that a batch was nested, since the name of a
flat column may contain a slash.

Invariants: leaves keep the order of their declaration, and are returned with the declared dtype, or an error names the
leaf. Not here: how keys are joined (storage/columns/values.py), the form in which batches are returned (batch.py).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.storage.columns.schema import ColumnSpec, portable
from ringmap.storage.columns.values import as_array, cast, flat, is_nested, nested

__all__ = ["Leaves", "dtype_of", "leaf_array"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Leaves:
    """The leaves of one nested value: `columns` by full name, and the `prefix` of them all."""

    prefix: str
    columns: tuple[ColumnSpec, ...]

    @classmethod
    def parse(cls, prefix: str, given: Any, dtype: Any, where: str) -> Leaves:
        """Read a shape, a nested mapping name -> shape or (shape, dtype), or a Gymnasium space; `dtype`: of a leaf
        without its own."""
        default = dtype_of(dtype, where)
        found, _ = flat({prefix: given}, where)
        return cls(prefix, tuple(_spec(name, leaf, default, where) for name, leaf in found.items()))

    @cached_property
    def names(self) -> list[str]:
        """Full names of the leaves."""
        return [spec.name for spec in self.columns]

    @cached_property
    def is_nested(self) -> bool:
        """Whether the value is a mapping."""
        return self.names != [self.prefix]

    def flatten(self, value: Any, where: str) -> dict[str, Any]:
        """Return the leaves of a nested value by full name, unconverted."""
        if not self.is_nested and (
            type(value) is np.ndarray or not is_nested(value)
        ):  # what `add` is given at each step
            return {self.prefix: value}
        found, _ = flat({self.prefix: value}, where)
        if found.keys() != set(self.names):
            raise InputError(f"{where}: {self.prefix}: expected leaves {self.names}, got {list(found)}")
        return {name: found[name] for name in self.names}

    def rows(self, value: Any, where: str) -> dict[str, Array]:
        """Return a nested value as arrays `(N, *shape)` of the spec's dtypes; one step is N = 1."""
        rows: dict[str, Array] = {}
        for spec, (name, leaf) in zip(self.columns, self.flatten(value, where).items(), strict=True):
            array = leaf_array(leaf, where, name)
            if array.shape == spec.shape:
                array = array[None]
            if array.ndim != len(spec.shape) + 1 or array.shape[1:] != spec.shape:
                raise InputError(
                    f"{where}: {name} has shape {array.shape}, expected {spec.shape} or (N, {str(spec.shape)[1:]}"
                )
            if array.dtype != spec.dtype:
                array = cast(array, spec.dtype, "safe", f"{where}: {name}")
            rows[name] = np.ascontiguousarray(array)
        if len(rows) > 1 and len({len(values) for values in rows.values()}) > 1:
            sizes = {name: len(values) for name, values in rows.items()}
            raise InputError(f"{where}: {self.prefix}: leaves differ in their number of rows: {sizes}")
        return rows

    def nest(self, rows: Mapping[str, Any]) -> Any:
        """Return the nested value of these leaves."""
        return nested({name: rows[name] for name in self.names})[self.prefix]


def dtype_of(given: Any, where: str) -> np.dtype[Any]:
    """Return a NumPy dtype for one of NumPy's, Python's or torch's."""
    name = str(given).removeprefix("torch.") if type(given).__module__.startswith("torch") else given
    try:
        dtype = portable(np.dtype(name))
    except TypeError:
        raise InputError(f"{where}: {given!r} is no dtype of a column") from None
    if dtype.kind not in "biufc":
        raise InputError(f"{where}: {given!r} is no dtype of numbers")
    return dtype


def leaf_array(value: Any, where: str, name: str) -> Array:
    """Return an array without objects; array-likes and tensors are converted."""
    array = as_array(value, f"{where}: {name}", "row")
    if array.dtype.kind == "O":
        raise InputError(f"{where}: {name} is ragged or holds objects; give an array")
    return array


def _spec(name: str, given: Any, dtype: np.dtype[Any], where: str) -> ColumnSpec:
    """Return the column for a leaf of a spec."""
    if getattr(given, "shape", None) is not None and getattr(given, "dtype", None) is not None:
        given, dtype = tuple(given.shape), dtype_of(given.dtype, f"{where}: {name!r}")
    elif isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], tuple | list):
        given, dtype = given[0], dtype_of(given[1], f"{where}: {name!r}")
    try:
        sizes = (given,) if isinstance(given, int | np.integer) else given
        shape = tuple(operator.index(size) for size in sizes)
        if any(size < 0 for size in shape):
            raise ValueError(shape)
    except (TypeError, ValueError):
        raise InputError(
            f"{where}: {name}: expected a shape, a nested mapping of shapes, or a Gymnasium space, got {given!r}"
        ) from None
    return ColumnSpec(name, shape, dtype)
