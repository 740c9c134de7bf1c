"""An episode before it is written to a dataset: what a writer takes, and the check of the whole episode.

    {"reward": [0.0, 1.0], ...} -> stored axis order -> arrays of one length -> the schema's dtypes

A different dtype is accepted only if every value stays equal in the schema's dtype: values
are read back equal, including the dtype. (A buffer rounds floats; a dataset does not.)
Invariants: `check_episode` writes nothing and keeps nothing; its result fits the schema.
Not here: formats (base.py), where the rows are written (each format's writer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from ringmap.datasets.episode import stored_layout
from ringmap.errors import InputError
from ringmap.storage.columns.schema import ColumnSpec, Schema, as_columns

__all__ = [
    "EPISODE_DATA_KEY",
    "INSTEAD",
    "WRITE_MODES",
    "CheckedEpisode",
    "Writer",
    "check_episode",
    "no_append",
    "split_episode_data",
    "validate_write_mode",
]

Array = np.ndarray[Any, np.dtype[Any]]

EPISODE_DATA_KEY = "_episode_data"
"""The reserved key of an episode: a mapping of values that are constant within it."""

WRITE_MODES = ("append", "overwrite", "error")
"""What a writer does if a dataset exists: extend it (the default of a format that can), replace it, or refuse."""

INSTEAD = (
    "collect into a ring (ReplayBuffer(max_steps, path=...)) and convert that again with mode='overwrite', or merge "
    "the datasets into a new one (ringmap.data.merge)"
)
"""What to do where a format does not append."""


@runtime_checkable
class Writer(Protocol):
    """An object that episodes can be written to: a format's writer, or a buffer.

    Outside a `with` block a format's writer raises `RuntimeError`.
    """

    def __enter__(self) -> Self:
        """Open for writing."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, and never swallow the exception."""
        ...

    def write_episode(self, ep_data: Mapping[str, Any]) -> None:
        """Write one whole episode: column -> per-step list, or array of shape (T, ...)."""
        ...

    def write_episodes(self, episodes: Iterable[Mapping[str, Any]]) -> None:
        """Write episodes one by one."""
        ...


def validate_write_mode(mode: str) -> str:
    """Return `mode` if it is one of `WRITE_MODES`.

    Raises:
        InputError: it is not.
    """
    if mode not in WRITE_MODES:
        raise InputError(f"write mode must be one of {WRITE_MODES}, got {mode!r}")
    return mode


def no_append(where: str, path: Any) -> InputError:
    """Return the error for appending to a dataset of a format that can't."""
    return InputError(f"{where}: {path}: nothing is appended to a dataset of this format; {INSTEAD}")


def split_episode_data(ep_data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `(per-step columns, values constant within the episode)` of an episode.

    Raises:
        InputError: the episode, or the value under `_episode_data`, is not a mapping.

    Example:
        >>> split_episode_data({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        ({'reward': [0.0, 1.0]}, {'seed': 7})
    """
    if not isinstance(ep_data, Mapping):
        raise InputError(
            f"an episode is a mapping of column -> one value per step, got {type(ep_data).__name__}; of a list of "
            "steps make {name: [step[name] for step in steps] for name in steps[0]}"
        )
    columns = {name: value for name, value in ep_data.items() if name != EPISODE_DATA_KEY}
    constant = ep_data.get(EPISODE_DATA_KEY)
    if constant is None:
        return columns, {}
    if not isinstance(constant, Mapping):
        raise InputError(
            f"{EPISODE_DATA_KEY!r} must be a mapping of name -> value constant within the episode, "
            f"got {type(constant).__name__}"
        )
    return columns, dict(constant)


class CheckedEpisode:
    """An episode that may be written as it is.

    Attributes:
        length: number of steps.
        columns: column -> C-contiguous array (length, ...), in the schema's order and dtypes.
        data: the values constant within the episode.
        schema: the schema that the episode fits, or that this first episode defines.
        notes: what a format's `encode` wants to know when it exports the episode, as JSON.
    """

    __slots__ = ("columns", "data", "length", "notes", "schema")

    def __init__(self, columns: dict[str, Array], data: dict[str, Any], schema: Schema) -> None:
        self.columns = columns
        self.data = data
        self.schema = schema
        self.length = len(next(iter(columns.values())))
        self.notes: dict[str, Any] = {}


def check_episode(ep_data: Mapping[str, Any], schema: Schema | None, where: str) -> CheckedEpisode | None:
    """Return an episode in the form in which it is written, or None if it is empty.

    Args:
        ep_data: column -> per-step list, array or CPU tensor of shape (T, ...); `_episode_data`
            and the axis order of an `EpisodeDict` are supported.
        schema: the schema to fit, or None before the first episode.
        where: the method to name in an error.

    Raises:
        InputError: a scalar, ragged or object column; lengths that differ; a missing or extra
            column; another per-step shape; a dtype in which a value would change.

    Example:
        >>> first = check_episode({"reward": [0.0, 1.0]}, None, "doc")
        >>> check_episode({"reward": [7]}, first.schema, "doc").columns
        {'reward': array([7.])}
        >>> check_episode({"reward": ["7"]}, first.schema, "doc")
        Traceback (most recent call last):
        ringmap.errors.InputError: doc: column 'reward': step 0 of dtype <U1 does not fit ...
    """
    if not ep_data:
        return None
    columns, data = split_episode_data(stored_layout(ep_data))
    arrays = as_columns(columns, where)
    if not arrays or not len(next(iter(arrays.values()))):
        return None
    if schema is None:
        schema = Schema.of(arrays)
    specs = {spec.name: spec for spec in schema.columns}
    for name, values in arrays.items():
        spec = specs.get(name)
        if spec is None or values.shape[1:] != spec.shape:
            continue  # `fit` below names it
        if not spec.has(values.dtype):
            arrays[name] = _exact(values, spec, where)
    fitted = schema.fit(arrays, "safe", where)
    return CheckedEpisode(fitted, data, schema)


def _exact(values: Array, spec: ColumnSpec, where: str) -> Array:
    """Return `values` in the column's dtype if each value stays equal."""
    source, target = values.dtype, spec.dtype
    number = "biufc"
    if source.kind == target.kind or (source.kind in number and target.kind in number):
        with np.errstate(all="ignore"):
            result = _convert(values, target)
            same = _equal(values, _convert(result, source)) & _in_range(values, result)
        if same.all():
            return result
        step = int(np.argmin(same.reshape(len(values), -1).all(axis=1)))
    else:
        step = 0
    shown = np.array2string(values[step], threshold=6, edgeitems=2).replace("\n", "")[:200]
    raise InputError(
        f"{where}: column {spec.name!r}: step {step} of dtype {source} does not fit the schema's "
        f"dtype {target} without a change: {shown}; convert it, or write a new dataset"
    )


def _convert(values: Array, dtype: np.dtype[Any]) -> Array:
    """Convert as `astype` does, without its warning about a dropped imaginary part."""
    real: Array = values.real if values.dtype.kind == "c" and dtype.kind != "c" else values
    return real.astype(dtype)


def _in_range(values: Array, result: Array) -> Any:
    """Return where a cast stayed inside the integers' range: beyond it, processors differ."""
    source, target = values.dtype.kind, result.dtype.kind
    if source in "iu" and target in "iu":
        return (values < 0) == (result < 0)
    if source in "fc" and target in "iu":
        floats, info = values.real, np.iinfo(result.dtype)
    elif source in "iu" and target in "fc":
        floats, info = result.real, np.iinfo(values.dtype)
    else:
        return True
    # As float64, which holds the bounds (float16 would round them to inf); max + 1 is a power of
    # two, exact where max is not.
    floats = floats.astype(np.float64)
    return (floats >= float(info.min)) & (floats < float(info.max // 2 + 1) * 2)


def _equal(left: Array, right: Array) -> Array:
    """Compare value by value; NaN equals NaN, NaT equals NaT."""
    same: Array = left == right
    if left.dtype.kind in "fcmM":
        same |= (left != left) & (right != right)
    return same
