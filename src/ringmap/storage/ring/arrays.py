"""Arrays of integers: one that grows at one end and drops values at the other; extremes of small batches; a search.

NumPy's reductions cost 1.1 to 1.3 us a call, however short the array; `argmin` and `argmax` 0.3 to 0.5, and a search in
the bytes of booleans 0.1. A small batch needs three such answers, in a call of 15 us.

Not here: positions and what they mean.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np

__all__ = ["GrowingArray", "all_true", "distinct", "found_in", "highest", "lowest"]

Array = np.ndarray[Any, np.dtype[Any]]
N = TypeVar("N", bound=int)


class GrowingArray(Generic[N]):
    """A NumPy array that grows at one end and drops values, or rows, at the other.

    Append and drop are O(1) amortised; a slice is a view. A list of Python
    integers would cost 8 times the memory and could not be searched in bulk.
    """

    __slots__ = ("_data", "_offset", "_stop")

    def __init__(self, values: Array, first: int = 0) -> None:
        self._data = values
        self._offset = first
        self._stop = first + len(values)

    def append(self, value: int, first: int) -> None:
        """Add `value` at the end; values before ordinal `first` may be dropped. O(1) amortised."""
        used = self._stop - self._offset
        if used == len(self._data):
            self.reserve(1, first)
            used = self._stop - self._offset
        self._data[used] = value
        self._stop += 1

    def extend(self, values: Array, first: int) -> None:
        """Add all `values` at the end, as `append` does. O(len(values)) amortised."""
        count = len(values)
        self.reserve(count, first)
        used = self._stop - self._offset
        self._data[used : used + count] = values
        self._stop += count

    def reserve(self, count: int, first: int) -> None:
        """Reserve memory for `count` values, so that they can be added in parts without a copy. O(1) amortised."""
        used = self._stop - self._offset
        if used + count > len(self._data):
            kept = self._data[first - self._offset : used]
            size = len(kept) + count
            fresh = np.empty((size + max(size // 8, 64), *self._data.shape[1:]), self._data.dtype)
            fresh[: len(kept)] = kept
            self._data, self._offset = fresh, first

    def change(self, ordinal: int, value: int) -> int:
        """Replace one value; return by how much it is greater. O(1)."""
        at = ordinal - self._offset
        before: int = self._data.item(at)
        self._data[at] = value
        return value - before

    def span(self, first: int, last: int) -> Array:
        """Return the values of ordinals `[first, last)`: a view, valid until the next append."""
        return self._data[first - self._offset : last - self._offset]

    def take(self, ordinals: Array) -> Array:
        """Return a copy of the values of these ordinals."""
        found: Array = self._data.take(ordinals - self._offset, 0)
        return found

    def at(self, ordinal: int) -> N:
        """Return one value. O(1)."""
        return self._data.item(ordinal - self._offset)  # type: ignore[no-any-return]


def distinct(values: Array) -> Array:
    """Return the values in order, each once, `(n,)`. O(n log n).

    As `np.unique`, which at its first call imports half of NumPy: a signal handler may come in the middle of that.
    """
    ordered = np.sort(values, axis=None)
    kept = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=kept[1:])
    found: Array = ordered[kept]
    return found


def lowest(values: Array) -> int:
    """Return the smallest of some integers; there must be one.

    Example:
        >>> lowest(np.array([5, 3, 9]))
        3
    """
    found: int = values.item(values.argmin())
    return found


def highest(values: Array) -> int:
    """Return the greatest of some integers; there must be one.

    Example:
        >>> highest(np.array([5, 3, 9]))
        9
    """
    found: int = values.item(values.argmax())
    return found


def all_true(flags: Array) -> bool:
    """Tell whether all of some booleans are true; so are none.

    Example:
        >>> all_true(np.array([True, False])), all_true(np.array([], np.bool_))
        (False, True)
    """
    return b"\0" not in flags.tobytes()


def found_in(numbers: Array, wanted: Array) -> tuple[Array | slice, Array]:
    """Return which of `wanted` are among sorted numbers, an index into them, and the places of these.

    Example:
        >>> found_in(np.array([3, 5, 9]), np.array([9, 4, 3]))
        (array([ True, False,  True]), array([2, 0]))
    """
    places = numbers.searchsorted(wanted)
    if not len(numbers):
        return np.zeros(len(wanted), np.bool_), places[:0]
    known: Array = numbers.take(places, mode="clip") == wanted
    if known.all():  # a number beyond the last one differs from it
        return slice(None), places
    return known, places[known]
