"""Casting: converts values to a column's dtype, without changing their meaning.

Invariants: a value that "safe" accepts compares equal after the cast, except that a float may round to a float.
Not here: which dtype a column has (schema.py).
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from ringmap.errors import InputError

__all__ = ["cast", "in_words", "kept"]

Array = np.ndarray[Any, np.dtype[Any]]


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
        good = kept(values, result) if not apart else result == values.astype(target.kind)
    if not good.all():
        step = int(np.argmin(good.reshape(len(values), -1).all(axis=1)))
        _refuse(target, values, step, where, "does not fit")
    return result


def kept(values: Array, result: Array) -> Array:
    """Tell for each value whether a cast obeyed the safe rules."""
    source, target = values.dtype, result.dtype
    good: Array
    if source.kind == "c" and target.kind != "c":
        good = (values.imag == 0) & kept(values.real, result)
        return good
    if target.kind == "c" and source.kind == "c":
        good = kept(values.real, result.real) & kept(values.imag, result.imag)
        return good
    if target.kind in "fc" and source.kind in "fc":
        good = ~(np.isinf(result) & ~np.isinf(values))
        return good
    if target.kind in "iu" and source.kind in "iufc":
        info = np.iinfo(target)
        if source.kind == "f":
            # The bounds as floats: max + 1 is a power of two, so it is exact where max is not.
            inside = (values >= float(info.min)) & (values < float(info.max // 2 + 1) * 2)
        else:
            inside = (values >= max(info.min, np.iinfo(source).min)) & (values <= min(info.max, np.iinfo(source).max))
        good = inside & (result == values)
        return good
    if target.kind in "fc" and source.kind in "iu":
        back = result.real
        info = np.iinfo(source)
        # As float64: in a float16 the bounds would be infinite, and infinity inside them.
        wide = back.astype(np.float64)
        inside = (wide >= float(info.min)) & (wide < float(info.max // 2 + 1) * 2)
        exact = np.zeros(values.shape, np.bool_)
        exact[inside] = back[inside].astype(source) == values[inside]
        return exact
    if target.kind == "S" and source.kind == "U":
        good = np.char.decode(result, "ascii") == values
        return good
    if target.kind == "U" and source.kind == "S":
        good = np.char.encode(result, "ascii") == values
        return good
    if target.kind in "Mm":
        # Cast back again, because a comparison overflows silently as the cast does.
        back = result.astype(source)
        good = ((back == values) & ~np.isnat(result)) | (np.isnat(values) & np.isnat(result))
        return good
    good = result == values
    return good


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
