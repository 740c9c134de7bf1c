"""Choose the episodes of a dataset or buffer that meet a condition: `return > 100 and not flags contains bad`.

    names in the condition -> only their values are read -> where.select -> numbers

Not here: the condition's grammar (where.py), marks (marks.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.datasets.marks import Mark, Marks
from ringmap.datasets.where import Values, names_in, select

__all__ = ["ENDED", "OWN", "REWARDS", "choose", "mark_values"]

Array = np.ndarray[Any, np.dtype[Any]]

REWARDS = ("reward", "rewards", "next.reward", "next/reward")
ENDED = ("", "terminated", "truncated")
OWN = ("episode", "length", "return", "ended", "flags", "note")
"""The names that every episode has, whatever its data are called."""


def mark_values(names: Array, marks: Mapping[int, Mark]) -> dict[str, Values]:
    """Return the columns `flags` (words, separated by spaces) and `note`; empty texts where an episode has none."""
    flags, notes = np.full(len(names), "", object), np.full(len(names), "", object)
    for at, mark in marks.items():
        row = int(np.searchsorted(names, at))
        if row < len(names) and names[row] == at:
            flags[row], notes[row] = " ".join(mark.flags), mark.note
    none = np.full(len(names), np.nan)
    return {"flags": Values(none, flags), "note": Values(none, notes)}


def choose(
    dataset: Any, condition: str, marks: str | os.PathLike[str] | None, where: str
) -> tuple[Array, Array]:
    """Return the numbers of the episodes that meet a condition, and their names (`Marks`), as they are now.

    Args:
        dataset: a dataset or buffer.
        condition: see `where.select`. Names: those of `OWN`, and of episode data.
        marks: the file of marks, by default the one beside the data.
        where: the caller to name in an error.

    Raises:
        InputError: the condition can't be parsed, or names what no episode has.

    Cost: reads the episode data if the condition names some; the rewards or endings of all episodes if it names `return` or `ended`.
    """
    asked = set(names_in(condition, where))
    ask = getattr(dataset, "marked_ring", None)
    ring = None if ask is None else ask()
    lengths = np.asarray(dataset.lengths, np.int64)
    names = np.arange(len(lengths)) if ring is None else np.asarray(ring[1])
    count = min(len(lengths), len(names))
    lengths, names = lengths[:count], names[:count]
    none = np.full(count, np.nan)
    columns = {name: Values(none) for name in OWN}
    columns["episode"] = Values(np.arange(count, dtype=np.float64))
    columns["length"] = Values(lengths.astype(np.float64))
    if asked & {"flags", "note"}:
        columns |= mark_values(names, Marks(dataset, marks).all())
    if asked & {"return", "ended"}:
        columns |= _outcomes(dataset, count, where)
    if asked - set(OWN):
        columns |= _data(dataset, count)
    return np.flatnonzero(select(condition, columns, count, where)), names


def _outcomes(dataset: Any, count: int, where: str) -> dict[str, Values]:
    returns, endings = np.full(count, np.nan), np.full(count, "", object)
    stored = list(dataset.column_names)
    reward = next((name for name in REWARDS if name in stored), None)
    for number in range(count):
        episode = dataset.load_episode(number)
        if reward is not None:
            returns[number] = np.nansum(np.asarray(episode[reward], np.float64))
        for name in reversed(ENDED[1:]):
            if name in episode and len(episode[name]) and np.asarray(episode[name][-1]).all():
                endings[number] = name
    return {"return": Values(returns), "ended": Values(np.full(count, np.nan), endings)}


def _data(dataset: Any, count: int) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for number in range(count):
        for name, value in dataset.episode_data(number).items():
            if name in OWN:
                continue
            if name not in found:
                found[name] = Values(np.full(count, np.nan), np.full(count, None, object))
            single = np.asarray(value)
            if single.size == 1 and single.dtype.kind in "biuf":
                found[name].numbers[number] = float(single.reshape(-1)[0])
            elif (texts := found[name].texts) is not None:
                texts[number] = str(value if single.size != 1 else single.reshape(-1)[0])
    return found
