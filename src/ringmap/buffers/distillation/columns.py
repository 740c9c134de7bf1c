"""The columns of a student's rows: converts the input of `add`, one step or many, to columns of one length.

    student_observations[/leaf]...  teacher_actions  [teacher_log_std  teacher_logits  executed_actions  ...]
    actor_id  dones  round  policy_version  label_round  in every row

Labels and their round are mutable columns: `label_round` is the round of the row's newest label.

Invariants: `actor_id` and `dones` have one number per row, whatever axes the input had; a row has all labels.
Not here: where rows are stored (steps.py), nested names (nested.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.columns.values import as_array, cast, flat, is_tensordict, root

__all__ = ["LABEL_ROUND", "MUTABLE", "fitted_labels", "row_columns"]

Array = np.ndarray[Any, np.dtype[Any]]

_LABELS = ("teacher_actions", "teacher_log_std", "teacher_logits")
LABEL_ROUND = "label_round"
MUTABLE = (*_LABELS, LABEL_ROUND)
"""The columns that a relabelling replaces."""


def row_columns(
    given: Mapping[str, Any], schema: Schema | None, obs_shape: Any, round: int, version: int, where: str
) -> dict[str, Array]:
    """Return the input of `add` as columns.

    Args:
        given: by the names of `add`'s arguments, None for a missing one.
        schema: of the stored rows, None before the first.
        obs_shape: of one student observation, or name -> shape; None if not given.
        round: of the rows.
        version: of the policy.
        where: the method to name in an error.

    Raises:
        InputError: unequal lengths, `actor_id` or `dones` without exactly one number per row, a label that is missing
            or text.
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
    """Return a teacher's labels for `count` rows as columns.

    Args:
        given: their `teacher_actions`, or a mapping of all labels.
        schema: of the rows.
        count: number of rows.
        where: the method to name in an error.

    Raises:
        InputError: labels of the wrong columns, number, shape or dtype.
    """
    if not isinstance(given, Mapping) and not is_tensordict(given):
        given = {"teacher_actions": given}
    labels, _ = flat(given, where)
    arrays = as_columns(labels, where)
    if arrays and len(next(iter(arrays.values()))) != count:
        raise InputError(f"{where}: {len(next(iter(arrays.values())))} labels for {count} rows; expected one for each")
    own = Schema(tuple(spec for spec in schema.columns if root(spec.name) in _LABELS))
    return _without_defaults(own).fit(arrays, "safe", where)


def _without_defaults(schema: Schema) -> Schema:
    """Return columns none of which may be missing: a mutable one that is would be zeros."""
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
