"""The rows of an episode: T steps are T + 1 rows, and where there is no value, the row is blank.

    row          0    1   ...   T-1    T
    observation  o0   o1        oT-1   oT
    action       a0   a1        aT-1   --     taken at the observation of its row
    reward       --   r1        rT-1   rT     came with the observation of its row
    next_obs     o1   o2        oT     --     the observation of the next row

    blank (--):  floats, complex   NaN         text    ""
                 integers, flags   0           dates   NaT

Not here: which environment plays which episode (world/, recording/).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["blank", "blank_like", "rows_of"]

Array = np.ndarray[Any, np.dtype[Any]]


def blank(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a blank value of a shape and dtype.

    Example:
        >>> blank((2,), np.float32), blank((), np.int64), blank((), "<U3")
        (array([nan, nan], dtype=float32), array(0), array('', dtype='<U3'))
    """
    kind = np.dtype(dtype).kind
    if kind in "fcmM":
        return np.full(shape, "NaT" if kind in "mM" else np.nan, dtype)
    return np.zeros(shape, dtype)


def blank_like(value: Any) -> Any:
    """Return the blank value of the column that holds a value, an array or a string."""
    return "" if isinstance(value, str) else blank(value.shape, value.dtype)


def rows_of(kind: str, values: Any, none: Any, begins: bool = True, ends: bool = True) -> Any:
    """Return the rows of a column, with a blank in the row that has no value.

    Args:
        kind: "action" (the last row is blank), "reward" (the first), "next" (each row takes the value of the row
            after it, and the last is blank), or any other name (`values` as they are).
        values: a value per row, an array or a list; "next" without `ends` needs one row more.
        none: the blank value.
        begins: whether the first of `values` is the first row of the episode.
        ends: whether the last of `values` is its last row.

    Returns:
        `values` itself, changed in place; for "next" other rows.

    Example:
        >>> rows_of("reward", [5.0, 1.0, 2.0], np.nan), rows_of("next", [1, 2, 3], 0)
        ([nan, 1.0, 2.0], [2, 3, 0])
    """
    if kind == "next":
        if not ends:
            return values[1:]
        if isinstance(values, list):
            return [*values[1:], none]
        return np.concatenate([values[1:], none[None]])
    if kind == "action" and ends:
        values[-1] = none
    elif kind == "reward" and begins:
        values[0] = none
    return values
