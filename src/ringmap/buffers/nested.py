"""Nested batches and flat ones: `{"next": {"reward": r}}` and `{"next.reward": r}`.

A ring has flat columns. A dot joins the names on the way in, and parts them on the way out; that a batch was
nested is remembered beside the rows, since a flat name may hold a dot of its own.
Not here: what the columns hold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ringmap.errors import InputError, MissingExtraError

__all__ = ["as_tensordict", "flat", "is_tensordict", "nested", "tensordict_class"]


def flat(batch: Any, where: str) -> tuple[dict[str, Any], bool]:
    """Return a batch as flat columns, and whether it was nested.

    Args:
        batch: a mapping, of mappings if need be, or a TensorDict.
        where: what to call it in an error.

    Raises:
        InputError: it is no mapping, a key is no string, or a nested batch has a dot in a key.

    Example:
        >>> flat({"obs": 1, "next": {"obs": 2}}, "here")
        ({'obs': 1, 'next.obs': 2}, True)
    """
    if not isinstance(batch, Mapping) and not is_tensordict(batch):
        raise InputError(
            f"{where}: expected a mapping of columns or a TensorDict, got {type(batch).__name__}"
        )
    found: dict[str, Any] = {}
    deep = _into(found, batch, "", where)
    if deep:
        for name in _keys(batch):
            if "." in name:
                raise InputError(
                    f"{where}: key {name!r} holds a dot, which joins the keys of a nested batch; rename it"
                )
    return found, deep


def _keys(batch: Any) -> list[str]:
    names = []
    for name, value in batch.items():
        names.append(name)
        if isinstance(value, Mapping) or is_tensordict(value):
            names += _keys(value)
    return names


def _into(found: dict[str, Any], batch: Any, prefix: str, where: str) -> bool:
    deep = False
    for name, value in batch.items():
        if not isinstance(name, str):
            raise InputError(f"{where}: keys are strings, got {name!r}")
        if isinstance(value, Mapping) or is_tensordict(value):
            _into(found, value, f"{prefix}{name}.", where)
            deep = True
        else:
            found[prefix + name] = value
    return deep


def nested(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat columns as the nested batch that they came from.

    Example:
        >>> nested({"obs": 1, "next.obs": 2})
        {'obs': 1, 'next': {'obs': 2}}
    """
    batch: dict[str, Any] = {}
    for name, value in columns.items():
        *parents, last = name.split(".")
        inside = batch
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = value
    return batch


def is_tensordict(value: Any) -> bool:
    """Tell whether a value is a TensorDict (or a tensorclass), without importing the package."""
    module = sys.modules.get("tensordict")
    return module is not None and (
        isinstance(value, module.TensorDictBase) or module.is_tensorclass(value)
    )


def tensordict_class(where: str) -> Any:
    """Return `tensordict.TensorDict`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise MissingExtraError(
            f'{where}: a TensorDict needs tensordict; pip install "ringmap[torchrl]"'
        ) from error
    return TensorDict


def as_tensordict(columns: Mapping[str, Any], size: int, deep: bool, where: str) -> Any:
    """Return flat columns of tensors as a TensorDict of batch size `[size]`."""
    return tensordict_class(where)(nested(columns) if deep else dict(columns), batch_size=[size])
