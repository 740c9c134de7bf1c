"""The columns of a buffer: names, per-step shapes and dtypes, in order.

    the user's input               the ring's input
    {"pixels": [frame, frame],  -> {"pixels": (T, H, W, C) uint8, C-contiguous,
     "action": tensor (T, A)}       "action": (T, A) float32}      little-endian

Invariants: a schema never changes once an episode is stored under it; every array
that `fit` returns has the schema's dtype and shape, and the exact input values.
Not here: where rows go (rows.py), episode data (records/blobs.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringmap.arguments import flag
from ringmap.errors import InputError
from ringmap.storage.columns.values import as_array, cast, flattened, in_words, is_nested

__all__ = ["TEXT", "Column", "ColumnSpec", "Schema", "as_columns", "portable", "stored_spec"]

Array = np.ndarray[Any, np.dtype[Any]]

_KINDS = "biufcSUMm"
"""NumPy dtype kinds that have a fixed size and one meaning on every machine."""

TEXT = np.dtype("<U0")
"""The dtype of a column of text of any length. Arrays of its values have the width of their longest."""

_CODES = np.dtype("<i4")

_STORED_DTYPE = re.compile(r"[<|][biufcSUMm][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
_ROW_LIMIT = 1 << 40


@dataclass(frozen=True)
class Column:
    """A column in the `schema=` of a buffer: `{"latent": ringmap.Column((512,), "float32", mutable=True)}`.

    Args:
        shape: of a step.
        dtype: of its values; `str` for text of any length, `"U40"` for text of at most 40 characters.
        mutable: whether `ReplayBuffer.update` may change values of stored steps. An episode may then leave the column
            out: its values are zeros until an update.

    Example:
        >>> import numpy as np, ringmap
        >>> schema = {"obs": ((3,), "float32"), "value": ringmap.Column((), "float32", mutable=True)}
        >>> buf = ringmap.ReplayBuffer(max_steps=100, schema=schema, seed=0)
        >>> buf.write_episode({"obs": np.zeros((10, 3), np.float32)})
        >>> batch = buf.sample(4)
        >>> buf.update(batch.ids, {"value": np.full(4, 0.5)})
        4
        >>> float(buf.load_episode(0)["value"].max())
        0.5
    """

    shape: Any
    dtype: Any
    mutable: bool = False


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column: its name, the shape of a step and the dtype (little-endian).

    `mutable`: whether values of stored steps may change. It does not count for equality: rows are the same either way.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    mutable: bool = field(default=False, compare=False)

    @property
    def is_text(self) -> bool:
        """Whether its values are text of any length: its rows are codes, of words that lie with the episode."""
        return self.dtype == TEXT

    @property
    def stored(self) -> ColumnSpec:
        """The column that its rows are stored in."""
        return ColumnSpec(self.name, self.shape, _CODES) if self.is_text else self

    @property
    def kind(self) -> str:
        """Its dtype, in words."""
        return in_words(self.dtype)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one step, as it is stored."""
        return math.prod(self.shape) * (_CODES if self.is_text else self.dtype).itemsize

    def has(self, dtype: np.dtype[Any]) -> bool:
        """Whether its values may stand in arrays of this dtype."""
        return dtype == self.dtype or (dtype.kind == "U" and self.is_text)

    def __str__(self) -> str:
        return f"{self.name!r} {self.shape} {self.kind}{' mutable' if self.mutable else ''}"


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a buffer, in the order in which the first episode named them."""

    columns: tuple[ColumnSpec, ...]
    texts: frozenset[str] = field(init=False, repr=False, compare=False)
    """The names of the columns of text."""

    def __post_init__(self) -> None:
        texts = frozenset(spec.name for spec in self.columns if spec.is_text)
        object.__setattr__(self, "texts", texts)

    @property
    def names(self) -> list[str]:
        """Column names in order."""
        return [spec.name for spec in self.columns]

    @property
    def mutable(self) -> Schema:
        """The columns whose values may change."""
        return Schema(tuple(spec for spec in self.columns if spec.mutable))

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Schema:
        """Infer the schema of an episode whose values are already arrays. A column of str is text of any length."""
        dtypes = {n: TEXT if a.dtype.kind == "U" else portable(a.dtype) for n, a in arrays.items()}
        return cls(tuple(ColumnSpec(name, a.shape[1:], dtypes[name]) for name, a in arrays.items()))

    @classmethod
    def parse(cls, given: Any, where: str = "schema") -> Schema:
        """Read a schema in the form that a user gives.

        Args:
            given: column -> `(shape, dtype)` or `Column`; or a Gymnasium space (a Dict space: its keys; any
                other: the column `observation`); or an example episode, column -> array or list. Nested mappings and
                spaces: keys joined by slashes.
            where: the caller to name in an error.

        Raises:
            InputError: it is none of these, is empty, or names a dtype without a fixed size.
        """
        if isinstance(given, Schema):
            return given
        if _is_space(given):
            is_dict = isinstance(getattr(given, "spaces", None), Mapping)
            given = _columns_of(given, "") if is_dict else {"observation": _columns_of(given, "observation")}
        if not isinstance(given, Mapping) or not given:
            raise InputError(
                f"{where}: expected column -> (shape, dtype), a Gymnasium space or an example "
                f"episode, got {type(given).__name__}"
            )
        specs: list[ColumnSpec] = []
        example: dict[str, Any] = {}
        for name in given:
            _check_name(name, where)
        for name, value in flattened(given, where).items():
            if isinstance(value, Column) or _is_shape_and_dtype(value):
                specs.append(_spec_of(name, value if isinstance(value, Column) else Column(*value), where))
            else:
                example[name] = value
        if specs and example:
            raise InputError(
                f"{where}: {next(iter(example))!r} is not a (shape, dtype) pair as the others are; "
                "give pairs for all columns, or an example episode"
            )
        return cls(tuple(specs)) if specs else cls.of(as_columns(example, where))

    def fit(self, rows: Mapping[Any, Any], casting: str, where: str) -> dict[str, Array]:
        """Return rows, as a user gives them, in this schema's order and dtypes, or raise before anything changes.

        A mutable column that is missing is filled with zeros. No rows fit every schema.

        Raises:
            InputError: as `as_columns`; a column is missing or extra, a step has another shape, or (with
                casting="safe") a value can't be held by the column's dtype.
        """
        fitted: dict[str, Array] = {}
        steps: int | None = None
        for spec in self.columns:
            values = rows.get(spec.name)
            if type(values) is not np.ndarray or values.shape[1:] != spec.shape or not values.ndim:
                break
            if steps is None:
                steps = len(values)
            elif len(values) != steps:
                break
            if not spec.has(values.dtype):
                if _is_no_column(values.dtype):
                    break
                values = cast(values, spec.dtype, casting, f"{where}: column {spec.name!r}")
            fitted[spec.name] = values if values.flags.c_contiguous else np.ascontiguousarray(values)
        if len(fitted) == len(self.columns) == len(rows):
            return fitted
        return self.fit(self._completed(as_columns(rows, where), where), casting, where)

    def _completed(self, arrays: dict[str, Array], where: str) -> dict[str, Array]:
        """Return the arrays with zeros for the mutable columns that are missing, or raise for others or other
        shapes."""
        steps = len(next(iter(arrays.values()), ()))
        if arrays and not steps:
            return {spec.name: np.empty((0, *spec.shape), spec.dtype) for spec in self.columns}
        left_out = [spec for spec in self.columns if spec.name not in arrays]
        missing = [spec.name for spec in left_out if not spec.mutable]
        extra = [name for name in arrays if name not in self.names]
        if extra or missing:
            raise InputError(
                f"{where}: schema mismatch: missing columns {missing}, extra columns {extra}; "
                f"the schema was locked to {self.names}"
            )
        for spec in self.columns:
            if (shape := arrays.get(spec.name, np.empty((0, *spec.shape))).shape[1:]) != spec.shape:
                raise InputError(f"{where}: column {spec.name!r} has per-step shape {shape}, expected {spec.shape}")
        return arrays | {s.name: np.zeros((steps, *s.shape), s.dtype) for s in left_out}


def _spec_of(name: str, column: Column, where: str) -> ColumnSpec:
    mutable = flag(column.mutable)
    if not _is_shape_and_dtype((column.shape, column.dtype)) or mutable is None:
        raise InputError(
            f"{where}: column {name!r}: expected Column(shape, dtype, mutable=True or False), got {column!r}"
        )
    try:
        dtype = portable(np.dtype(column.dtype))
    except TypeError as error:
        raise InputError(f"{where}: column {name!r}: {error}") from None
    sizes = column.shape if isinstance(column.shape, tuple | list) else (column.shape,)
    spec = ColumnSpec(name, tuple(int(n) for n in sizes), dtype, mutable)
    if any(n < 0 for n in spec.shape):
        raise InputError(f"{where}: column {name!r}: negative size in shape {spec.shape}")
    _check_dtype(name, dtype, where)
    if spec.is_text and mutable:
        raise InputError(
            f"{where}: column {name!r} is of text and mutable; name a width, as in 'U40': text of any length is stored "
            "with its episode and can't change"
        )
    return spec


def stored_spec(name: Any, shape: Any, dtype: Any, mutable: bool = False) -> ColumnSpec:
    """Read a column's description from a file, with all checks: the file may be damaged or forged.

    Raises:
        ValueError: it does not describe a column.

    Example:
        >>> stored_spec("obs", [3], "<f4").row_nbytes
        12
        >>> stored_spec("obs", [3], "|O")
        Traceback (most recent call last):
        ValueError: column 'obs': dtype '|O'
    """
    if not isinstance(name, str):
        raise ValueError(f"column name {name!r}")
    kind = None
    with suppress(TypeError, ValueError):
        kind = np.dtype(dtype) if isinstance(dtype, str) and _STORED_DTYPE.fullmatch(dtype) else None
    if kind is None or kind.str != dtype or kind.char in "gG":
        raise ValueError(f"column {name!r}: dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"column {name!r}: shape {shape!r}")
    spec = ColumnSpec(name, tuple(shape), kind, mutable)
    if not kind.itemsize and (mutable or not spec.is_text):
        raise ValueError(f"column {name!r}: dtype {dtype!r}{' mutable' if mutable else ''}")
    room = math.prod(max(n, 1) for n in shape) * spec.stored.dtype.itemsize
    if len(shape) > 63 or room > _ROW_LIMIT:  # NumPy takes 64 axes, and time is one
        raise ValueError(f"column {name!r}: shape {shape!r} is too large")
    return spec


def _is_no_column(dtype: np.dtype[Any]) -> bool:
    """Tell whether values of a dtype have no fixed size, or not one meaning on every machine."""
    return dtype.kind not in _KINDS or dtype.char in "gG"


def portable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the little-endian form of a dtype."""
    return dtype.newbyteorder("<") if dtype.byteorder not in "<|" or dtype.isnative is False else dtype


def as_columns(episode: Mapping[Any, Any], where: str) -> dict[str, Array]:
    """Convert an episode's values to arrays of equal length; existing arrays are not copied.

    Args:
        episode: column -> list of per-step arrays, bulk array, or tensor; or nested, a mapping of such, or a list of
            mappings.
        where: the method to name in an error.

    Raises:
        InputError: a name is not a string; a scalar; a ragged or object column; a value that would change (values.py);
            lengths that differ; two nested values that would be one column.
    """
    arrays: dict[str, Array] = {}
    for name, value in episode.items():
        if type(name) is not str:
            _check_name(name, where)
        array = value
        if type(array) is not np.ndarray:
            if is_nested(array):
                return as_columns(flattened(episode, where), where)
            array = as_array(array, f"{where}: column {name!r}")
        if array.ndim == 0:
            raise InputError(
                f"{where}: column {name!r} is a scalar; expected one value per step, that is an "
                "array or list whose first axis is time"
            )
        if array.dtype.kind not in _KINDS or array.dtype.char in "gG":
            array = as_array(array, f"{where}: column {name!r}")
            _check_dtype(name, array.dtype, where)
        arrays[name] = array
    lengths = {len(a) for a in arrays.values()}
    if len(lengths) > 1:
        first, *rest = arrays
        other = next(n for n in rest if len(arrays[n]) != len(arrays[first]))
        raise InputError(
            f"{where}: column {other!r} has {len(arrays[other])} steps, expected "
            f"{len(arrays[first])} as in {first!r}; every column must span the whole episode"
        )
    return arrays


def _check_dtype(name: str, dtype: np.dtype[Any], where: str) -> None:
    if dtype.kind == "O":
        raise InputError(
            f"{where}: column {name!r} holds Python objects (or is ragged); give arrays of one shape "
            "and a fixed-size dtype, or put values that are constant within an episode in '_episode_data'"
        )
    if _is_no_column(dtype):
        raise InputError(
            f"{where}: column {name!r} has dtype {dtype}, which has no fixed meaning on every machine; "
            "use bool, integers, floats up to 64 bits, complex, text, bytes of a fixed width, or dates"
        )
    if dtype.kind == "S" and dtype.itemsize == 0:
        raise InputError(f"{where}: column {name!r} has dtype {dtype} of width 0; give it a width")


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str):
        raise InputError(f"{where}: column names are strings, got {name!r} ({type(name).__name__})")


def _is_shape_and_dtype(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    shape, dtype = value
    sizes = shape if isinstance(shape, tuple | list) else [shape]
    return all(isinstance(n, int | np.integer) for n in sizes) and isinstance(dtype, str | type | np.dtype)


def _is_space(value: Any) -> bool:
    """Tell whether a value is a Gymnasium space, by its attributes: gymnasium is not imported."""
    return hasattr(value, "contains") and hasattr(value, "sample")


def _columns_of(space: Any, name: str) -> Any:
    """Return the columns of a space: those of Dict and Tuple spaces as a mapping, nested as these are."""
    inner = getattr(space, "spaces", None)
    if inner is not None:
        parts = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
        return {str(key): _columns_of(part, f"{name}/{key}" if name else str(key)) for key, part in parts}
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None and isinstance(dtype, np.dtype) and dtype == TEXT:  # `Text`
        shape = ()
    if shape is None or dtype is None:
        raise InputError(
            f"schema: space {name!r} ({type(space).__name__}) has no single shape and dtype; "
            "flatten it with gymnasium.spaces.utils.flatten_space, or give (shape, dtype) pairs"
        )
    return Column(tuple(shape), dtype)
