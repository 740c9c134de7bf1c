"""Choose the episodes of a dataset or buffer that are wanted: `return > 100 and not flags contains bad`, or a function.

    names in the condition -> only their values are read -> where.select -> numbers

Not here: the condition's grammar (where.py), marks (marks.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ringmap.clips.facts import REWARDS, TERMINATED, TRUNCATED, name_among
from ringmap.clips.where import Values, names_in, select
from ringmap.datasets.marks import Mark, Marks
from ringmap.errors import ArgumentTypeError, ClipIndexError, InputError

__all__ = ["ENDED", "OWN", "choose", "mark_values"]

Array = np.ndarray[Any, np.dtype[Any]]

ENDED = ("", "terminated", "truncated")
OWN = ("episode", "length", "return", "ended", "flags", "note")
"""The names that every episode has, whatever its data are called."""


def mark_values(names: Array, marks: Mapping[int, Mark]) -> dict[str, Values]:
    """Return the columns `flags` (words, separated by spaces) and `note`; empty texts where an episode has none."""
    flags, notes = np.full(len(names), "", object), np.full(len(names), "", object)
    rows = {int(name): row for row, name in enumerate(names)}
    for at, mark in marks.items():
        row = rows.get(at)
        if row is not None:
            flags[row], notes[row] = " ".join(mark.flags), mark.note
    none = np.full(len(names), np.nan)
    return {"flags": Values(none, flags), "note": Values(none, notes)}


def choose(
    dataset: Any,
    where: str | Callable[[dict[str, Any]], Any],
    marks: str | os.PathLike[str] | None,
    caller: str,
) -> Array:
    """Return the numbers of the episodes that are wanted; one that is evicted meanwhile is not.

    Args:
        dataset: whose episodes keep their numbers (`Dataset.pinned`).
        where: a condition, see `where.select`, over the names of `OWN` and of episode data; or a function of the data
            of an episode, a dict with None for what it lacks.
        marks: the file of marks, by default the one beside the data.
        caller: to name in an error.

    Raises:
        ArgumentTypeError: `where` is neither.
        InputError: the condition can't be parsed, or names what no episode has; the function did not return a truth
            value.

    Cost: reads the episode data if they are asked for; the rewards or ends of all episodes if `return` or `ended` is.
    """
    lengths = np.asarray(dataset.lengths, np.int64)
    count = len(lengths)
    stored = np.ones(count, np.bool_)
    if callable(where):
        wanted = np.zeros(count, np.bool_)
        none = dict.fromkeys(dataset.episode_column_names)
        for number, data in _each(count, dataset.episode_data, stored):
            wanted[number] = _truth(where({**none, **data}), caller)
        return np.flatnonzero(wanted)
    if not isinstance(where, str):
        raise ArgumentTypeError(
            f"{caller}= takes a condition, such as 'return > 100', or a function of an episode's data, got "
            f"{where!r:.80}"
        )
    asked = set(names_in(where, caller))
    columns = {name: Values(np.full(count, np.nan)) for name in OWN}
    columns["episode"] = Values(np.arange(count, dtype=np.float64))
    columns["length"] = Values(lengths.astype(np.float64))
    if asked & {"flags", "note"}:
        of = Marks(dataset, marks)
        columns |= mark_values(of.names(), of.all())
    if asked & {"return", "ended"}:
        columns |= _outcomes(dataset, count, asked, stored, caller)
    if asked - set(OWN):
        columns |= _data(dataset, count, stored)
    if not count:  # no episode has a name yet: none is wanted
        columns |= {name: Values(np.empty(0)) for name in asked - set(columns)}
    return np.flatnonzero(select(where, columns, count, caller) & stored)


def _truth(answer: Any, caller: str) -> bool:
    try:
        return bool(answer)
    except (TypeError, ValueError):
        raise InputError(f"{caller}: the function returned {answer!r:.80}, expected True or False") from None


def _each(count: int, read: Callable[[int], Any], stored: Array) -> Iterator[tuple[int, Any]]:
    """Yield `(number, read(number))` of each episode; note in `stored` which were evicted."""
    for number in range(count):
        try:
            found = read(number)
        except ClipIndexError:
            stored[number] = False
        else:
            yield number, found


def _outcomes(dataset: Any, count: int, asked: set[str], stored: Array, caller: str) -> dict[str, Values]:
    """Return the sums of rewards, and how episodes ended, as far as they are asked for."""
    kinds = {"return": (REWARDS,), "ended": (TERMINATED, TRUNCATED)}
    every = [name for kind in asked & set(kinds) for names in kinds[kind] for name in names]
    returns, endings, known = np.full(count, np.nan), np.full(count, "", object), set[str]()
    for number, episode in _each(
        count, lambda n: dataset.steps_as_stored(n, 0, int(dataset.lengths[n]), every), stored
    ):
        known.update(episode)
        reward = name_among(REWARDS, episode)
        if reward is not None:
            returns[number] = np.nansum(np.asarray(episode[reward], np.float64))
        for kind, names in zip(ENDED[:0:-1], (TRUNCATED, TERMINATED), strict=True):
            name = name_among(names, episode)
            if name and len(episode[name]) and np.asarray(episode[name][-1]).all():
                endings[number] = kind
    for kind in asked & set(kinds):
        if count and not any(name_among(names, known) for names in kinds[kind]):
            expected = [name for names in kinds[kind] for name in names]
            raise InputError(f"{caller}: {kind!r} needs one of the columns {expected}, and none is stored")
    return {"return": Values(returns), "ended": Values(np.full(count, np.nan), endings)}


def _data(dataset: Any, count: int, stored: Array) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for number, data in _each(count, dataset.episode_data, stored):
        for name, value in data.items():
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
