"""Nested observations as flat columns: which leaves there are, and how to get back and forth.

    {"camera": {"left": frames}, "state": x}  <->  observations/camera/left, observations/state
    x                                         <->  observations

Invariants: leaves keep the order in which the spec names them; values leave with the spec's dtype,
or an error names the leaf.
Not here: where columns are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.storage.casting import cast
from ringmap.storage.schema import ColumnSpec, portable

__all__ = ["Leaves", "as_array", "dtype_of"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Leaves:
    """The leaves of one nested observation: `columns` by full name, and the `prefix` of them all."""

    prefix: str
    columns: tuple[ColumnSpec, ...]

    @classmethod
    def parse(cls, prefix: str, given: Any, dtype: Any, where: str) -> Leaves:
        """Read a spec as a user gives it.

        Args:
            prefix: the name of the whole.
            given: a shape; a nested mapping name -> shape or (shape, dtype); or a Gymnasium space.
            dtype: of a leaf that names none.
            where: the method to name in an error.

        Raises:
            InputError: it is none of these.
        """
        found: list[ColumnSpec] = []
        _walk(prefix, given, dtype_of(dtype, where), where, found)
        if not found:
            raise InputError(f"{where}: {prefix} has no leaves")
        return cls(prefix, tuple(found))

    @property
    def names(self) -> list[str]:
        """Full names of the leaves."""
        return [spec.name for spec in self.columns]

    @property
    def is_nested(self) -> bool:
        """Whether the observation is a mapping."""
        return self.names != [self.prefix]

    def flatten(self, value: Any, where: str) -> dict[str, Any]:
        """Return the leaves of a nested value by full name, as they are.

        Raises:
            InputError: names are missing or too many.
        """
        found: dict[str, Any] = {}
        _flatten(self.prefix, value, found)
        if list(found) != self.names and set(found) != set(self.names):
            raise InputError(
                f"{where}: {self.prefix}: expected leaves {self.names}, got {list(found)}"
            )
        return {name: found[name] for name in self.names}

    def rows(self, value: Any, where: str) -> dict[str, Array]:
        """Return a nested value as arrays `(N, *shape)` of the spec's dtypes; one step is N = 1.

        Raises:
            InputError: a shape that does not fit, leaves that differ in N, or a value that the dtype can't hold.
        """
        rows: dict[str, Array] = {}
        for spec, (name, leaf) in zip(
            self.columns, self.flatten(value, where).items(), strict=True
        ):
            array = as_array(leaf, f"{where}: {name}")
            if array.shape == spec.shape:
                array = array[None]
            if array.ndim != len(spec.shape) + 1 or array.shape[1:] != spec.shape:
                raise InputError(
                    f"{where}: {name} has shape {array.shape}, expected {spec.shape} or (N, {str(spec.shape)[1:]}"
                )
            if array.dtype != spec.dtype:
                array = cast(array, spec.dtype, "safe", f"{where}: {name}")
            rows[name] = np.ascontiguousarray(array)
        if len({len(values) for values in rows.values()}) > 1:
            sizes = {name: len(values) for name, values in rows.items()}
            raise InputError(
                f"{where}: {self.prefix}: leaves differ in their number of rows: {sizes}"
            )
        return rows

    def nest(self, rows: Mapping[str, Any], prefix: str | None = None) -> Any:
        """Return the nested value that these leaves make up; `prefix` is what their names begin with there."""
        prefix = self.prefix if prefix is None else prefix
        if not self.is_nested:
            return rows[prefix]
        made: dict[str, Any] = {}
        for name in self.names:
            *path, last = name[len(self.prefix) + 1 :].split("/")
            at = made
            for part in path:
                at = at.setdefault(part, {})
            at[last] = rows[prefix + name[len(self.prefix) :]]
        return made


def dtype_of(given: Any, where: str) -> np.dtype[Any]:
    """Return a NumPy dtype for one of NumPy's, Python's or torch's."""
    name = (
        str(given).removeprefix("torch.") if type(given).__module__.startswith("torch") else given
    )
    try:
        return portable(np.dtype(name))
    except TypeError:
        raise InputError(f"{where}: {given!r} is no dtype of a column") from None


def as_array(value: Any, where: str) -> Array:
    """Return an array, or an array-like or tensor as one."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{where}: can't be made an array: {error}") from None
    if array.dtype.kind == "O":
        raise InputError(f"{where}: is ragged or holds objects; give an array")
    return array


def _walk(name: str, given: Any, dtype: np.dtype[Any], where: str, found: list[ColumnSpec]) -> None:
    if hasattr(given, "spaces") and isinstance(given.spaces, Mapping):
        given = given.spaces
    if isinstance(given, Mapping):
        for key, inner in given.items():
            if type(key) is not str or not key or "/" in key:
                raise InputError(
                    f"{where}: {name}: a key must be a string without '/', got {key!r}"
                )
            _walk(f"{name}/{key}", inner, dtype, where, found)
        return
    if getattr(given, "shape", None) is not None and getattr(given, "dtype", None) is not None:
        given, dtype = tuple(given.shape), dtype_of(given.dtype, where)
    elif isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], tuple | list):
        given, dtype = given[0], dtype_of(given[1], where)
    try:
        sizes = (given,) if isinstance(given, int | np.integer) else given
        shape = tuple(int(size) for size in sizes)
        if any(size < 0 for size in shape):
            raise ValueError(shape)
    except (TypeError, ValueError):
        raise InputError(
            f"{where}: {name}: expected a shape, a nested mapping of shapes, or a Gymnasium space, got {given!r}"
        ) from None
    found.append(ColumnSpec(name, shape, dtype))


def _flatten(name: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "batch_size")):
        for key in value.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            _flatten(f"{name}/{key}", value[key], found)
    else:
        found[name] = value
