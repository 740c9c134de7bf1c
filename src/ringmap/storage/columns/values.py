"""Values as a user gives them, made flat columns of arrays: each one arrives as it was given, or an error names it.

    {"camera": {"left": frames}, "state": x}        <->          obs/camera/left, obs/state
    [{"state": x0}, {"state": x1}], a dict per step  ->          obs/state

    array, tensor, list per step, number  ->  as_array  ->  a plain NumPy array, whose every value equals the given one
                                          ->  cast      ->  an array of the column's dtype

NumPy converts more than that: it drops masks, writes the number of a list of texts and numbers as text, rounds
integers that have no common type, cuts NUL characters at the end of text, makes NaN of the missing values of other
libraries and drops their time zones. All of these are refused.

Invariants: no key of a nested value contains a slash, which joins the keys; no value takes the place of another one.
An array is returned as it is; the result has no mask. A value that "safe" accepts compares equal after the
cast, except that a float may round to a float.
Not here: which dtypes a column may have, and which it has (schema.py); nested values whose shapes are declared
(buffers/nested.py); the form in which batches are returned (buffers/batch.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from ringmap.errors import InputError

__all__ = [
    "NUMBERS",
    "as_array",
    "cast",
    "flat",
    "flattened",
    "in_words",
    "is_nested",
    "is_tensordict",
    "nested",
    "root",
]

Array = np.ndarray[Any, np.dtype[Any]]

NUMBERS = {bool, int, float}
"""Types of which NumPy makes an equal value, or an object."""
_COMPARED = {*NUMBERS, np.bool_, np.float16, np.float32, np.float64}
"""Types of which NumPy makes a value that Python compares exactly with the given one."""
_TEXT = {str, bytes}
_PLAIN = {*NUMBERS, *_TEXT, complex}
_OBJECTS = "OT"
"""Kinds of arrays that may hold nothing but text, or values of one type, and are looked at as lists are."""
_MOST_AXES = 64
"""NumPy's own limit."""
_GROUPS = {kind: group for group in ("biufc", "U", "S", "M", "m") for kind in group}
"""Kinds of dtypes whose values can be equal."""
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
    """Return columns, some of which may be mappings, lists with a mapping for each step, or TensorDicts, as flat ones.

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
    """Return a batch as flat columns, and whether it was nested: then `nested` reverts it.

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
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray:
            _refuse_masked(value, what, axis)
            value = np.asarray(value)
        if value.dtype.kind == "U":
            _refuse_no_characters(value, what)
        return value if value.dtype.kind not in _OBJECTS else as_array(value.tolist(), what, axis)
    if isinstance(value, list | tuple):
        return _of_list(value, what, axis)
    if hasattr(value, "detach"):
        return _of_tensor(value, what)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} can't be made an array: {error}") from None
    if isinstance(value, str | bytes) and array.item() != value:
        raise InputError(
            f"{what} is {_short(value)}: NumPy cuts NUL characters at the end of text; store it as an array of uint8, "
            "or without them"
        )
    kind = getattr(value, "dtype", getattr(value, "type", array.dtype))
    if kind is not array.dtype:
        _refuse_lost(value, kind, what)
    return as_array(array, what, axis) if array.ndim else array


def _of_list(value: Sequence[Any], what: str, axis: str) -> Array:
    leaves, depth = value, 0
    kinds = set(map(type, leaves))
    while kinds and kinds <= {list, tuple} and depth < _MOST_AXES:
        leaves, depth = list(chain.from_iterable(leaves)), depth + 1
        kinds = set(map(type, leaves))
    if kinds and not _are_alike(leaves, kinds):
        return _of_several(value, what, axis)
    try:
        array = np.asarray(value)
    except ValueError:
        raise _ragged(what, axis) from None
    rounds = array.dtype.kind == "f" and not any(issubclass(k, float | np.floating) for k in kinds)
    compared = array.dtype.kind != "O" and (len(kinds) > 1 or kinds & _TEXT)
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
        if part.dtype == array.dtype:
            continue
        is_other = _GROUPS.get(part.dtype.kind) != _GROUPS.get(array.dtype.kind)
        if is_other or rounds or not _kept(part, array[i, ...]).all():
            raise InputError(
                f"{what}: {axis} {i} is {_short(value[i])} of {part.dtype}, and would become {_short(array[i])} of "
                f"{array.dtype}, as the others are; give values of one type, or convert them yourself"
            )
    return array


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


def in_words(dtype: np.dtype[Any]) -> str:
    """Return a dtype as messages name it: text of any length is "text"."""
    return "text" if dtype.kind == "U" and not dtype.itemsize else str(dtype)


def cast(values: Array, target: np.dtype[Any], casting: str, where: str) -> Array:
    """Return `values` in another dtype.

    With casting="safe", float to float may round but not overflow; anything to integer or bool
    must be equal; integer to float must be equal; complex to real needs imaginary 0. casting="unsafe" is
    NumPy's `astype`. Text and bytes must fit, whatever `casting` is: they are never cut.

    Raises:
        InputError: for the first step that does not fit, with both dtypes.
    """
    source = values.dtype
    text, dates = "SU", "Mm"
    apart = (target.kind in text) != (source.kind in text)
    dated = target.kind in dates or source.kind in dates
    is_other = source.kind == "V" or (dated and target.kind != source.kind)
    if is_other or (apart and casting == "safe"):
        _refuse(target, values, 0, where, "is of another kind")
    # Of a complex array only the real part is cast: NumPy would warn that the other part is lost.
    real = values.real if source.kind == "c" and target.kind in "iuf" else values
    if source.kind == target.kind == "f":  # most casts: rewards and observations of environments
        try:
            with np.errstate(over="raise"):  # quicker than a search
                return values.astype(target)
        except FloatingPointError:
            pass
    try:
        with np.errstate(all="ignore"):
            result = real.astype(target)
    except (ValueError, UnicodeError, TypeError, OverflowError):
        _refuse(target, values, _first_refused(values, target, casting), where, "can't be converted")
    if casting == "unsafe" and target.kind not in text:
        return result
    with np.errstate(all="ignore"):
        good = _kept(values, result) if not apart else result == values.astype(target.kind)
    if not good.all():
        step = int(np.argmin(good.reshape(len(values), -1).all(axis=1)))
        _refuse(target, values, step, where, "does not fit")
    return result


def _kept(values: Array, result: Array) -> Array:
    """Tell for each value whether a cast obeyed the safe rules."""
    source, target = values.dtype, result.dtype
    good: Array
    if source.kind == "c":
        imaginary = _kept(values.imag, result.imag) if target.kind == "c" else values.imag == 0
        good = _kept(values.real, result.real) & imaginary
    elif source.kind == "f" and target.kind in "fc":
        good = ~(np.isinf(result) & ~np.isinf(values))
    elif source.kind == "f" and target.kind in "iu":
        good = _inside(values, target) & (result == values)
    elif source.kind in "iu" and target.kind in "fc":
        back, good = result.real, np.zeros(values.shape, np.bool_)
        # As float64: in a float16 the bounds would be infinite, and infinity inside them.
        inside = _inside(back.astype(np.float64), source)
        good[inside] = back[inside].astype(source) == values[inside]
    elif target.kind in "Mm":
        # Cast back again, because a comparison overflows silently as the cast does.
        back = result.astype(source)
        good = ((back == values) & ~np.isnat(result)) | (np.isnat(values) & np.isnat(result))
    elif source.kind != target.kind and target.kind in "SU":
        good = result.astype(source) == values
    else:
        good = result == values
    return good


def _inside(values: Array, target: np.dtype[Any]) -> Array:
    """Tell which floats lie in the range of an integer dtype.

    The bounds are floats, too: max + 1 is a power of two, so it is exact where max is not.
    """
    info = np.iinfo(target)
    inside: Array = (values >= float(info.min)) & (values < float(info.max // 2 + 1) * 2)
    return inside


def _first_refused(values: Array, target: np.dtype[Any], casting: str) -> int:
    """Return the first step that does not fit, when NumPy refuses the array as a whole."""
    for step in range(len(values) - 1):
        try:
            cast(values[step : step + 1], target, casting, "")
        except InputError:
            return step
    return len(values) - 1


def _refuse(target: np.dtype[Any], values: Array, step: int, where: str, what: str) -> NoReturn:
    shown = np.array2string(values[step, ...], threshold=6, edgeitems=2).replace("\n", "")
    remedy = "convert it, or pass casting='unsafe' to let values change"
    if target.kind in "SU" and what == "does not fit":
        remedy = "shorten it, or name a greater width in the schema" + (
            ", or str, for text of any length" if target.kind == "U" else ""
        )
    raise InputError(
        f"{where}: step {step} of dtype {values.dtype} {what} in the locked "
        f"dtype {in_words(target)}: {shown[:200]}; {remedy}"
    )
