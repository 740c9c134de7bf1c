"""A student's rows: columns from the input of `add`, one step or many, and passes over them.

    student_observations[/leaf]...  teacher_actions  [teacher_log_std  teacher_logits  executed_actions  ...]
    actor_id  dones  round  policy_version  label_round  in every row

Labels and their round are mutable columns: `label_round` is the round of the row's newest label.

    row         0 1 2 3 4 5 6 7                    of many actors, in the order in which they were added
    actor       a b a b a b a b
    done            .   x x                        an episode ends at a done row, and at the last row

    epochs      [5 1 3 | 0 4 2 | 7 6]              rows, shuffled, in batches
    episodes    [0 2 4] [1 3] [5 7] [6]
    sequences   [0 2] [4 .] [1 3] [5 7] [6 .]      pieces of episodes, time-major, padded

Invariants: each row is in one episode, whose rows belong to one actor; a pass covers what is stored when it begins; a
row that is evicted before its turn is left out, and in sequences its whole piece is: no other row replaces it.
`actor_id` and `dones` have one number per row, whatever axes the input had; a row has all labels.
Not here: where rows are stored (steps.py), nested names (nested.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.columns.values import as_array, cast, flat, is_tensordict, root

__all__ = ["LABEL_ROUND", "MUTABLE", "episodes_of", "epoch", "fitted_labels", "pieces_of", "row_columns", "sequences"]

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Array]
Read = Callable[[Array], tuple[Columns, Array]]
"""Returns rows by id, and which of them are still stored."""

_LABELS = ("teacher_actions", "teacher_log_std", "teacher_logits")
LABEL_ROUND = "label_round"
MUTABLE = (*_LABELS, LABEL_ROUND)
"""The columns that a relabelling replaces."""


def row_columns(
    given: Mapping[str, Any], schema: Schema | None, obs_shape: Any, round: int, version: int, where: str
) -> dict[str, Array]:
    """Return the input of `add`, by the names of its arguments, as columns.

    Raises:
        InputError: unequal lengths, `actor_id` or `dones` without one number per row, a label that is missing or text.
    """
    rows, _ = flat({name: value for name, value in given.items() if value is not None}, where)
    columns: dict[str, Any] = {n: as_array(v, f"{where}: {n}", "row") for n, v in rows.items()}
    if _is_single(columns, schema, obs_shape, where):
        columns = {name: v[None] for name, v in columns.items()}
    for name in ("actor_id", "dones"):
        if name in columns:
            columns[name] = _one_a_row(name, columns[name], where)
    arrays = as_columns(columns, where)
    count = len(next(iter(arrays.values())))
    actors = arrays.setdefault("actor_id", np.arange(count))
    if actors.dtype.kind not in "iu":
        raise InputError(f"{where}: actor_id must be integers, got {actors.dtype}")
    dones = arrays.get("dones", np.zeros(count))
    if not np.isin(dones, (0, 1)).all():
        raise InputError(f"{where}: dones must be 0 or 1, got {dones}")
    for name in arrays:
        if root(name) in _LABELS and arrays[name].dtype.kind not in "biufc":
            raise InputError(f"{where}: {name} must be numbers, got {arrays[name].dtype}; store indices of texts")
    arrays |= {
        "actor_id": cast(actors, np.dtype(np.int64), "safe", f"{where}: actor_id"),
        "dones": dones != 0,
        "round": np.full(count, round),
        "policy_version": np.full(count, version),
        LABEL_ROUND: np.full(count, round),
    }
    if schema is not None and arrays.keys() != set(schema.names):
        _without_defaults(schema).fit(arrays, "safe", where)  # raises
    return arrays


def fitted_labels(given: Any, schema: Schema, count: int, where: str) -> dict[str, Array]:
    """Return a teacher's labels for `count` rows, its `teacher_actions` or a mapping of all, as columns."""
    if not isinstance(given, Mapping) and not is_tensordict(given):
        given = {"teacher_actions": given}
    labels, _ = flat(given, where)
    arrays = as_columns(labels, where)
    if arrays and len(next(iter(arrays.values()))) != count:
        raise InputError(f"{where}: {len(next(iter(arrays.values())))} labels for {count} rows; expected one for each")
    own = Schema(tuple(spec for spec in schema.columns if root(spec.name) in _LABELS))
    return _without_defaults(own).fit(arrays, "safe", where)


def _without_defaults(schema: Schema) -> Schema:
    """Return the columns as ones that all must be given: mutable ones that are missing would be stored as zeros."""
    return Schema(tuple(replace(spec, mutable=False) for spec in schema.columns))


def _is_single(columns: Mapping[str, Any], schema: Schema | None, obs_shape: Any, where: str) -> bool:
    """Tell whether these are the values of one step, by the shape of an observation."""
    name = next(n for n in columns if root(n) == "student_observations")
    shape = None
    if schema is not None:
        shape = next((spec.shape for spec in schema.columns if spec.name == name), None)
    elif obs_shape is not None:
        found = flat({"student_observations": obs_shape}, where)[0].get(name)
        shape = None if found is None else tuple(np.atleast_1d(found).tolist())
    if shape is not None:
        return np.ndim(columns[name]) == len(shape)
    return np.ndim(columns["teacher_actions"]) == 0 if "teacher_actions" in columns else False


def _one_a_row(name: str, values: Any, where: str) -> Array:
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise InputError(f"{where}: {name} has shape {array.shape}, expected (N,)")
    return array


def episodes_of(actors: Array, dones: Array) -> tuple[Array, Array]:
    """Return rows, in order of being added, in the order of their episodes, and the start of each episode in it; those
    are in order of first row. O(n log n).

    Example:
        >>> order, bounds = episodes_of(np.array([0, 1, 0, 1, 0]), np.array([0, 0, 1, 0, 0], bool))
        >>> [part.tolist() for part in np.split(order, bounds[1:-1])]
        [[0, 2], [1, 3], [4]]
    """
    count = len(actors)
    if not count:
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    by_actor = np.argsort(actors, kind="stable")
    last = np.ones(count, bool)
    last[:-1] = actors[by_actor][1:] != actors[by_actor][:-1]
    last |= dones[by_actor]
    ends = np.flatnonzero(last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    rank = np.argsort(by_actor[starts], kind="stable")
    sizes = (ends - starts)[rank]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    within = np.arange(count) - np.repeat(bounds[:-1], sizes)
    return by_actor[np.repeat(starts[rank], sizes) + within], bounds


def pieces_of(bounds: Array, length: int) -> tuple[Array, Array]:
    """Return the start of each piece of at most `length` rows in the order of episodes, and its number of rows.

    Example:
        >>> [part.tolist() for part in pieces_of(np.array([0, 5, 7]), 3)]
        [[0, 3, 5], [3, 2, 2]]
    """
    sizes = np.diff(bounds)
    counts = -(-sizes // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(bounds[:-1], counts) + number * length
    return starts, np.minimum(length, np.repeat(bounds[1:], counts) - starts)


def epoch(read: Read, order: Array, size: int, drop_last: bool) -> Iterator[Columns]:
    """Yield rows in this order, in batches of `size`, the last one smaller or dropped."""
    for at in range(0, len(order) - (size - 1 if drop_last else 0), size):
        columns, held = read(order[at : at + size])
        if held.all():
            yield columns
        elif held.any():
            yield {name: values[held] for name, values in columns.items()}


def sequences(
    read: Read,
    ids: Array,
    bounds: Array,
    length: int,
    size: int | None,
    drop_last: bool,
    rng: np.random.Generator | None,
) -> Iterator[Columns]:
    """Yield episodes, whose rows are `ids` and which begin at `bounds`, in pieces of `length` rows, `(length, B, ...)`,
    with `mask` and `is_first`; B is `size`, None: all at once; `rng` shuffles the pieces."""
    starts, sizes = pieces_of(bounds, length)
    first = np.isin(starts, bounds)
    count = len(starts)
    order = np.arange(count) if rng is None else rng.permutation(count)
    size = count if size is None else size
    for at in range(0, count - (size - 1 if drop_last else 0), size):
        chosen = order[at : at + size]
        made = _piece(read, ids, starts[chosen], sizes[chosen], first[chosen], length)
        if made is not None:
            yield made


def _piece(read: Read, ids: Array, starts: Array, sizes: Array, first: Array, length: int) -> Columns | None:
    """Return one batch of pieces; None if all of them lost a row."""
    steps = np.arange(length)[:, None]
    mask = steps < sizes
    taken = ids[np.where(mask, starts + steps, starts)]
    columns, held = read(taken.reshape(-1))
    whole = held.reshape(taken.shape).all(axis=0)
    if not whole.any():
        return None
    mask, first = mask[:, whole], first[whole]
    made: Columns = {}
    for name, values in columns.items():
        block = values.reshape(*taken.shape, *values.shape[1:])[:, whole]
        if root(name) == "hidden":
            made[name] = block[0]
        else:
            block[~mask] = np.zeros((), block.dtype)
            made[name] = block
    made["mask"], made["is_first"] = mask, first & (steps == 0)
    return made
