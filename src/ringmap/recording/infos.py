"""Extract the infos of one slot from those of a batch.

    {"x": (B,), "_x": mask, "d": {"y": (B,), "_y": mask}, "_d": mask}  ─►  {"x": x, "d": {"y": y}}

Gymnasium's vector environments say with `_name` which slots have a value; without it all have.
Invariants: a slot without a value has None here, never the value of another slot or an older one.
Not here: columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["info_of", "value_of"]


def info_of(infos: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """Return the info of one slot.

    Example:
        >>> info_of({"x": [1, 2], "_x": [True, False], "d": {"y": [3, 4]}}, 1)
        {'d': {'y': 4}}
    """
    found = {}
    for name in infos:
        if name.startswith("_") or (f"_{name}" in infos and not infos[f"_{name}"][slot]):
            continue
        value = infos[name]
        found[name] = info_of(value, slot) if isinstance(value, Mapping) else value[slot]
    return found


def value_of(infos: Mapping[str, Any], key: str, slot: int) -> Any:
    """Return one value of one slot, None where it has none; `a/b` is `b` in the dict `a`.

    Example:
        >>> value_of({"d": {"y": [3, 4]}}, "d/y", 0), value_of({"x": [1, 2], "_x": [True, False]}, "x", 1)
        (3, None)
    """
    if key not in infos and "/" in key:
        first, rest = key.split("/", 1)
        inner = infos.get(first)
        return value_of(inner, rest, slot) if isinstance(inner, Mapping) else None
    value = infos.get(key)
    if value is None or (f"_{key}" in infos and not infos[f"_{key}"][slot]):
        return None
    if isinstance(value, Mapping):  # a batch of dict observations
        return {name: part[slot] for name, part in value.items() if not name.startswith("_")}
    return value[slot]
