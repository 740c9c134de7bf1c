"""Values as a user gives them, made arrays: each one arrives as it was given, or an error names it.

    array, tensor, list per step, number  ->  as_array  ->  a plain NumPy array, whose every value equals the given one

NumPy converts more than that: it drops masks, writes the number of a list of texts and numbers as text, rounds
integers that have no common type, cuts NUL characters at the end of text, makes NaN of the missing values of other
libraries and drops their time zones. All of these are refused.

Invariants: an array is returned as it is; the result has no mask.
Not here: which dtypes a column may have (schema.py), conversion to a column's dtype (casting.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.storage.columns.casting import kept

__all__ = ["NUMBERS", "as_array"]

Array = np.ndarray[Any, np.dtype[Any]]

_SEQUENCES = {list, tuple}
NUMBERS = {bool, int, float}
"""Types of which NumPy makes an equal value, or an object."""
_COMPARED = {*NUMBERS, np.bool_, np.float16, np.float32, np.float64}
"""Types of which NumPy makes a value that Python compares exactly with the given one."""
_TEXT = {str, bytes}
_PLAIN = {*NUMBERS, *_TEXT, complex}
_OBJECTS = "OT"
"""Kinds of arrays that may hold nothing but text, or values of one type, and are looked at as lists are."""
_ADVICE = "give values of one type, or convert them yourself"
_MOST_AXES = 64
"""NumPy's own limit."""


def as_array(value: Any, what: str, axis: str = "step") -> Array:
    """Return a value as a plain array; an array is not copied.

    Args:
        value: an array, a tensor on any device, a number, text, or a list of such.
        what: the value, to name in an error: the method, and the column.
        axis: the word for an item of the first axis.

    Raises:
        InputError: a value would change, or is masked; a list is ragged; a tensor has no dtype of NumPy's.

    Cost: none for an array. A list is looked through once, at the speed of C unless its values are of several types.

    Example:
        >>> as_array([1, 2.5], "doc")
        array([1. , 2.5])
        >>> as_array(["a", 1], "doc")
        Traceback (most recent call last):
        ringmap.errors.InputError: doc: step 1 is 1 of int64, and would become '1' ...
        >>> as_array(np.ma.masked_equal([1, 2], 2), "doc")
        Traceback (most recent call last):
        ringmap.errors.InputError: doc: step 1 is masked, 1 of 2 values are: ...
    """
    if type(value) is np.ndarray:
        if value.dtype.kind == "U":
            _refuse_no_characters(value, what)
        return value if value.dtype.kind not in _OBJECTS else as_array(value.tolist(), what, axis)
    if isinstance(value, np.ndarray):
        _refuse_masked(value, what, axis)
        return as_array(np.asarray(value), what, axis)
    if type(value) in _SEQUENCES or isinstance(value, list | tuple):
        return _of_list(value, what, axis)
    if hasattr(value, "detach"):
        return _of_tensor(value, what)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} can't be made an array: {error}") from None
    if isinstance(value, str | bytes) and array.item() != value:
        raise InputError(f"{what} is {_short(value)}: {_CUT}")
    kind = getattr(value, "dtype", getattr(value, "type", array.dtype))
    if kind is not array.dtype:
        _refuse_lost(value, kind, what)
    return as_array(array, what, axis) if array.ndim else array


_CUT = "NumPy cuts NUL characters at the end of text; store it as an array of uint8, or without them"


def _of_list(value: Sequence[Any], what: str, axis: str) -> Array:
    leaves, depth = value, 0
    kinds = set(map(type, leaves))
    while kinds and kinds <= _SEQUENCES and depth < _MOST_AXES:
        leaves, depth = list(chain.from_iterable(leaves)), depth + 1
        kinds = set(map(type, leaves))
    if kinds and not _are_alike(leaves, kinds):
        return _of_several(value, what, axis)
    try:
        array = np.asarray(value)
    except ValueError:
        raise _ragged(what, axis) from None
    rounds = array.dtype.kind == "f" and not any(issubclass(k, float | np.floating) for k in kinds)
    compared = len(kinds) > 1 or bool(kinds & _TEXT)
    compared = compared and array.dtype.kind != "O"
    if rounds or (compared and not _are_equal(array.ravel().tolist(), list(leaves))):
        return _of_several(value, what, axis)  # which says which one
    return array


def _are_equal(made: list[Any], given: list[Any]) -> bool:
    """Tell whether these are the same values; a NaN is one."""
    if made == given:
        return True
    return not [a for a, b in zip(made, given, strict=True) if a != b and (a == a or b == b)]


def _are_alike(leaves: Sequence[Any], kinds: set[type]) -> bool:
    """Tell whether NumPy changes none of these, or only such that Python compares exactly."""
    if len(kinds) != 1:
        return kinds <= _COMPARED or all(issubclass(k, int | np.integer | np.bool_) for k in kinds)
    (kind,) = kinds
    if kind is np.ndarray:
        return len({leaf.dtype for leaf in leaves}) == 1
    return kind in _PLAIN or issubclass(kind, np.number | np.bool_)


def _of_several(value: Sequence[Any], what: str, axis: str) -> Array:
    """Return a list of values that are not all of one type, each of which is compared."""
    parts = [as_array(item, f"{what}: {axis} {i}", "item") for i, item in enumerate(value)]
    try:
        array = np.asarray(parts)
    except ValueError:
        raise _ragged(what, axis) from None
    if array.dtype.kind == "O" or not parts:
        return array
    rounds = array.dtype.kind in "fc" and all(part.dtype.kind in "biu" for part in parts)
    for i, part in enumerate(parts):
        if part.dtype != array.dtype and (rounds or not _same(part, array[i, ...])):
            raise InputError(
                f"{what}: {axis} {i} is {_short(value[i])} of {part.dtype}, and would become {_short(array[i])} of "
                f"{array.dtype}, as the others are; {_ADVICE}"
            )
    return array


_KINDS = {kind: group for group in ("biufc", "U", "S", "M", "m") for kind in group}


def _same(given: Array, made: Array) -> bool:
    """Tell whether an array of another dtype has the same values."""
    if _KINDS.get(given.dtype.kind) != _KINDS.get(made.dtype.kind):
        return False
    return bool(kept(given, made).all())


def _of_tensor(tensor: Any, what: str) -> Array:
    try:
        array: Array = tensor.numpy(force=True)  # resolves a lazy conjugation, too
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"{what} can't be made an array: {error}; expected a tensor of a dtype that NumPy has, with values"
        ) from None
    return array


def _refuse_lost(value: Any, kind: Any, what: str) -> None:
    """Raise where an array of pandas, Arrow or Polars has more than NumPy's has: missing values, a time zone."""
    missing = getattr(value, "null_count", 0)
    missing = missing() if callable(missing) else missing
    if not missing and hasattr(value, "isna") and not isinstance(kind, np.dtype):
        missing = int(value.isna().sum())
    if missing:
        raise InputError(
            f"{what}: {missing} of {len(value)} values are missing, and NumPy would make NaN of them; fill them, and "
            "store which they were, if it matters, as values of their own"
        )
    if getattr(kind, "tz", None) is not None:
        raise InputError(
            f"{what} is of {kind}, and NumPy's dates have no time zone; convert it to UTC and drop the zone, and store "
            "the zone, if it matters, in '_episode_data'"
        )


def _refuse_no_characters(value: Array, what: str) -> None:
    """Raise where an array of strings that was never filled holds numbers that are no characters."""
    text = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
    if text.nbytes and text.view(np.uint32).max() > sys.maxunicode:
        raise InputError(f"{what} holds numbers beyond U+10FFFF, which are no characters: was the array ever filled?")


def _refuse_masked(value: Array, what: str, axis: str) -> None:
    masked = sys.modules.get("numpy.ma")  # who has a masked array has imported it
    if masked is None or not isinstance(value, masked.MaskedArray) or value.dtype.names:
        return
    mask = masked.getmaskarray(value)
    if not mask.any():
        return
    first = f": {axis} {int(mask.reshape(len(mask), -1).any(axis=1).argmax())}" if mask.ndim else ""
    raise InputError(
        f"{what}{first} is masked, {int(mask.sum())} of {mask.size} values are: what lies under a mask is no value; "
        "give .filled(a value), and the mask, if it matters, as values of its own"
    )


def _ragged(what: str, axis: str) -> InputError:
    return InputError(
        f"{what} is ragged: its {axis}s have different shapes; pad them to one shape, and store the sizes, if they "
        "matter, as values of their own"
    )


def _short(value: Any) -> str:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        value = value.item()
    return f"{value!r:.60}"
