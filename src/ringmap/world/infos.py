"""Infos: the dicts of several environments as one dict of stacked values.

    {"state": (2,)}, {"state": (2,)}, ...  ->  {"state": (num_envs, 1, 2)}

A key is an array exactly while every environment has a value for it now, all of one shape.
Otherwise it is a list of `num_envs` values, None where an environment has none: a key that
came late, went away, or differs in shape never shows an old value as a new one. A key that
no environment has is gone.

Invariants: a row is a private copy: an environment's later changes to its arrays do not show;
an environment that is not put keeps its values.
Not here: who steps the environments (pool.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringmap.errors import InputError, RolloutError
from ringmap.storage.columns.values import as_array, cast

__all__ = ["Infos", "Row", "Rows", "as_row", "as_scalar"]

Array = np.ndarray[Any, np.dtype[Any]]
Row = dict[str, Any]
"""What one environment reported: name -> an array of our own, or any other object."""
Rows = Mapping[int, Row]
"""Those of some environments."""

_ARRAYS = "biufcmMSU"


def as_row(info: Mapping[str, Any]) -> Row:
    """Return an info with arrays, tensors and numbers as arrays of our own, the rest as it is.

    Example:
        >>> as_row({"state": [1.0], "step": 3, "name": "a"})
        {'state': [1.0], 'step': array(3), 'name': 'a'}
    """
    row = {str(name): _own(name, value) for name, value in info.items()}
    if len(row) < len(info):
        raise RolloutError(f"two keys of the info are written alike: {sorted(info, key=str)}; rename one")
    return row


def as_scalar(name: str, value: Any, dtype: type[np.generic]) -> Any:
    """Return a reward or a flag of a step as NumPy's scalar; a float may be rounded.

    Example:
        >>> as_scalar("reward", 0.5, np.float32), as_scalar("terminated", 1, np.bool_)
        (np.float32(0.5), np.True_)
    """
    if type(value) is bool and dtype is np.bool_:
        return dtype(value)
    where = f"World: {name!r} that the environment returned"
    array = as_array(value, where, "item")
    if array.size != 1:
        raise InputError(f"{where} has shape {array.shape}, expected one value a step")
    return cast(array.reshape(1), np.dtype(dtype), "safe", where)[0]


def _own(name: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        plain = value.dtype.kind in _ARRAYS
        return as_array(value, f"info {name!r}", "item").copy() if plain else value
    if isinstance(value, bool | int | float | np.generic):
        array = np.asarray(value)
        return array if array.dtype.kind in _ARRAYS else value
    if hasattr(value, "detach"):
        return as_array(value, f"info {name!r}").copy()
    return value


class Infos:
    """The newest row of each environment, and all of them stacked.

    Args:
        num_envs: how many environments.
    """

    def __init__(self, num_envs: int) -> None:
        self.rows: list[Row] = [{} for _ in range(num_envs)]
        self.stacked: dict[str, Any] = {}

    def put(self, rows: Rows) -> None:
        """Take new rows of some environments. Arrays of `stacked` are changed in place where they fit."""
        again: dict[str, None] = {}
        for env, row in rows.items():
            before, self.rows[env] = self.rows[env], row
            for name, value in row.items():
                held = self.stacked.get(name)
                if (
                    isinstance(held, np.ndarray)
                    and isinstance(value, np.ndarray)
                    and held.shape[2:] == value.shape
                    and held.dtype == value.dtype
                ):
                    held[env, 0] = value
                else:
                    again[name] = None
            again.update(dict.fromkeys(name for name in before if name not in row))
        self._stack(again)

    def _stack(self, names: Iterable[str]) -> None:
        for name in names:
            values = [row.get(name) for row in self.rows]
            if all(name not in row for row in self.rows):
                self.stacked.pop(name, None)
                continue
            arrays = [value for value in values if isinstance(value, np.ndarray)]
            alike = len(arrays) == len(values) and len({a.shape for a in arrays}) == 1
            kinds = {a.dtype.kind for a in arrays}
            if alike and (len({a.dtype for a in arrays}) == 1 or kinds <= set("biuf")):
                self.stacked[name] = np.stack(arrays)[:, None]
            else:
                self.stacked[name] = values
