"""Nested values as flat columns: `{"obs": {"camera": x}}` and `{"obs/camera": x}`.

    {"camera": {"left": frames}, "state": x}        <->  obs/camera/left, obs/state
    [{"state": x0}, {"state": x1}], a dict per step  ->  obs/state
    x                                               <->  obs

A ring and a dataset have flat columns. A slash joins the keys when values are stored, and separates them when they are
read.

Invariants: no key of a nested value contains a slash; no value takes the place of another one.
Not here: values whose shapes are declared (buffers/nested.py), the form in which batches are returned
(buffers/emit.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.errors import InputError

__all__ = ["flat", "flattened", "is_nested", "is_tensordict", "nested", "root"]

_JOINT = "/"
_FLAT = {np.ndarray, bool, int, float, str, bytes, *np.sctypeDict.values()}


def is_nested(value: Any) -> bool:
    """Tell whether a value is a mapping or a TensorDict, or a list of mappings."""
    if type(value) in _FLAT:
        return False
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    return isinstance(value, Mapping) or is_tensordict(value)


def flattened(columns: Any, where: str) -> dict[str, Any]:
    """Return columns, some of which may be nested, as flat ones; columns of arrays and numbers as they are.

    Args:
        columns: a mapping, possibly of mappings and of lists with a mapping for each step, or a TensorDict.
        where: the caller to name in an error.

    Raises:
        InputError: a key of a nested value is no string, is empty or has a slash; a nested value has no values; two
            values would be one column; the mappings of a list have different keys.

    Example:
        >>> flattened({"obs": [{"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"c": 4}}], "x/y": [5, 6]}, "here")
        {'obs/a': [1, 3], 'obs/b/c': [2, 4], 'x/y': [5, 6]}
    """
    if type(columns) is dict and _FLAT.issuperset(map(type, columns.values())):
        return columns  # most steps that are appended
    by_name: dict[str, Any] = {}
    for name, value in _leaves("", columns, where):
        if name in by_name:
            raise InputError(
                f"{where}: two values would be the column {name!r}, one of them nested in {root(name)!r}; rename one"
            )
        by_name[name] = value
    return by_name


def _leaves(prefix: str, values: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value by their full names; only a flat column of the outermost one may have a
    slash."""
    _check_holds_columns(values, prefix, where)
    for key, value in values.items():
        deep = is_nested(value)
        if deep or prefix:
            _check_key(key, prefix, where)
        name = _full(prefix, key)
        if not deep:
            yield name, value
            continue
        if isinstance(value, list | tuple):
            value = _transposed(name, value, where)
        if not is_tensordict(value) and not len(value):
            raise InputError(f"{where}: {name} has no leaves: an empty mapping is no column; leave it out")
        yield from _leaves(name, value, where)


def _transposed(name: str, steps: Sequence[Any], where: str) -> dict[Any, list[Any]]:
    """Return a mapping for each step as a mapping of a list for each key."""
    keys = steps[0].keys()
    for number, step in enumerate(steps):
        if not isinstance(step, Mapping) or step.keys() != keys:
            got = list(step) if isinstance(step, Mapping) else type(step).__name__
            raise InputError(
                f"{where}: {name}: step {number} has {got}, and step 0 {list(keys)}; a column has a value for each step"
            )
    return {key: [step[key] for step in steps] for key in keys}


def flat(batch: Any, where: str) -> tuple[dict[str, Any], bool]:
    """Return a batch as flat columns, and whether it was nested: then none of its keys has a slash, and `nested`
    reverts it.

    Args:
        batch: as for `flattened`.
        where: the caller to name in an error.

    Raises:
        InputError: as `flattened`; the batch is not a mapping, a key is not a string, or a nested batch has a slash in
            a key.

    Example:
        >>> flat({"obs": 1, "next": {"obs": 2}}, "here")
        ({'obs': 1, 'next/obs': 2}, True)
    """
    if not isinstance(batch, Mapping) and not is_tensordict(batch):
        raise InputError(f"{where}: expected a mapping of columns or a TensorDict, got {type(batch).__name__}")
    columns = flattened(batch, where)
    deep = any(map(is_nested, batch.values()))
    for name in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        if deep or not isinstance(name, str):
            _check_key(name, "", where)
    return columns, deep


def nested(columns: Mapping[str, Any], where: str = "nested") -> dict[str, Any]:
    """Return flat columns as the nested ones that they came from.

    Raises:
        InputError: a column has the name of what holds another one.

    Example:
        >>> nested({"obs": 1, "next/obs": 2})
        {'obs': 1, 'next': {'obs': 2}}
    """
    batch: dict[str, Any] = {}
    for name, value in columns.items():
        *parents, last = name.split(_JOINT)
        inside = batch
        for depth, parent in enumerate(parents, 1):
            outer = _JOINT.join(parents[:depth])
            if outer in columns:
                raise InputError(
                    f"{where}: there is a column {outer!r}, and another one in it, {name!r}: ask for one of them "
                    "(columns=), or for both flat"
                )
            inside = inside.setdefault(parent, {})
        inside[last] = value
    return batch


def root(name: str) -> str:
    """Return the outermost key of a flat name."""
    return name.partition(_JOINT)[0]


def is_tensordict(value: Any) -> bool:
    """Tell whether a value is a TensorDict (or a tensorclass), without importing the package."""
    module = sys.modules.get("tensordict")
    return module is not None and (isinstance(value, module.TensorDictBase) or module.is_tensorclass(value))


def _check_holds_columns(batch: Any, prefix: str, where: str) -> None:
    """Raise for what a TensorDict holds, and does not show among its items: it would be lost."""
    module = sys.modules.get("tensordict")
    if module is None or not is_tensordict(batch):
        return
    if module.is_non_tensor(batch):
        raise InputError(
            f"{where}: {prefix or 'the batch'} holds no tensors, but {batch.tolist()!r:.60}; a column can't store it: "
            "leave it out, or give numbers"
        )
    if not isinstance(batch, module.LazyStackedTensorDict):
        return
    shared = set(batch.keys())
    some = {str(name) for row in batch.tensordicts for name in row.keys()} - shared  # noqa: SIM118
    for name in sorted(some):
        raise InputError(
            f"{where}: only some rows have {_full(prefix, name)}; a column has a value for each row: give all rows the "
            "same keys"
        )
    for name in shared:
        try:
            batch.get(name)
        except RuntimeError as error:
            raise InputError(
                f"{where}: {_full(prefix, name)} has not one shape in all rows; pad it: {str(error).splitlines()[0]}"
            ) from None


def _check_key(name: Any, prefix: str, where: str) -> None:
    inside = f"{prefix}: " if prefix else ""
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: {inside}keys are strings, and not empty, got {name!r}")
    if _JOINT in name:
        raise InputError(
            f"{where}: {inside}key {name!r} holds a slash, which joins the keys of nested values; rename it"
        )


def _full(prefix: str, name: str) -> str:
    return f"{prefix}{_JOINT}{name}" if prefix else name
