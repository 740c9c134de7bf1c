"""A sum tree: finds the leaf for a mass, where each leaf has a mass.

    top      [   s0   |   s1   | ... ]            running sums, one binary search
    middle   [..16 sums..|..16 sums..| ... ]      each the sum of the 16 below it
    leaves   [..16..|..16..|..16..|..16..| ... ]

Levels of 16, not of 2: a batch descends through all of them at once, and a few wide NumPy calls
take less time than many narrow ones. The running sums of 16 masses are a product with a triangle of ones, which takes a
quarter of the time of `cumsum`. A parent is always recomputed from its children, so
that rounding errors don't pile up over a million updates.

Invariants: a parent is the sum of its children; no leaf is negative; a leaf of mass 0 is never found.
Not here: what a leaf stands for.
Cost: a draw of B masses O(B log n); an update of B leaves O(B log n), all vectorised. 8.6 bytes per leaf.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["SumTree"]

Array = np.ndarray[Any, np.dtype[Any]]

_FAN = 16
_SHIFT = 4
_TOP = 4096
"""Maximum number of entries in the highest level: it is summed completely after each change, in 15 us."""

_BEFORE = np.triu(np.ones((_FAN, _FAN)), 1)
"""Masses times this are the sums of the masses before each: in any order of additions they never decrease, and a mass
of 0 changes none."""


class SumTree:
    """Masses of `size` leaves, initially 0.

    Args:
        size: number of leaves.

    Example:
        >>> tree = SumTree(4)
        >>> tree.set(np.array([1, 3]), np.array([2.0, 6.0]))
        >>> tree.total, tree.find(np.array([0.0, 1.9, 2.0, 7.9])).tolist()
        (8.0, [1, 1, 3, 3])
    """

    __slots__ = ("_blocks", "_levels", "_sums", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._levels: list[Array] = []
        count = size
        while True:
            count = -(-max(count, 1) // _FAN) * _FAN
            self._levels.append(np.zeros(count))
            if count <= _TOP:
                break
            count //= _FAN
        self._blocks = [level.reshape(-1, _FAN) for level in self._levels]
        self._sums: Array | None = None

    @property
    def leaves(self) -> Array:
        """The masses, float64 `(size,)`: a view, for reading only."""
        return self._levels[0][: self.size]

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._top()[-1])

    def _top(self) -> Array:
        """Return the running sums of the highest level, kept until a mass changes."""
        sums = self._sums
        if sums is None:
            sums = self._sums = self._levels[-1].cumsum()
        return sums

    def set(self, slots: Array, masses: Array) -> None:
        """Set the masses of leaves; for a leaf that is named twice the last one counts. O(B log n)."""
        self._sums = None
        self._levels[0][slots] = masses
        for blocks, level in zip(self._blocks, self._levels[1:], strict=False):
            slots = slots >> _SHIFT
            level[slots] = _sums_of(blocks.take(slots, 0))
        self._sums = None  # another thread may have looked meanwhile

    def fill(self, start: int, masses: Array | float, count: int) -> None:
        """Set the masses of the `count` leaves from `start` on. O(count + log n)."""
        self._sums = None
        self._levels[0][start : start + count] = masses
        stop = start + count
        for blocks, level in zip(self._blocks, self._levels[1:], strict=False):
            start, stop = start >> _SHIFT, -(-stop // _FAN)
            level[start:stop] = _sums_of(blocks[start:stop])
        self._sums = None

    def find(self, masses: Array) -> Array:
        """Return the leaf that each of `masses`, in `[0, total)`, falls on when the leaves lie end to end.

        Cost: O(B log n). At least one leaf must have a positive mass.
        """
        found = self._find(masses, False)
        got = self._levels[0].take(found)
        if len(got) and got[got.argmin()] <= 0:
            # Rounding carried a mass beyond the last leaf of a block: rare, so that a bound at each level is only paid
            # for then.
            empty = got <= 0
            found[empty] = self._find(masses[empty], True)
        return found

    def _find(self, masses: Array, is_bounded: bool) -> Array:
        """Return what `find` does. `is_bounded`: whether a mass is kept below the sum of each block that it falls
        on."""
        sums = self._top()
        rest = np.minimum(masses, np.nextafter(sums[-1], 0.0))
        slots: Array = sums.searchsorted(rest, side="right")
        before = sums.take(slots - 1, mode="clip")
        before[slots == 0] = 0.0
        rest = rest - before
        rows = _rows(len(masses))
        for blocks in self._blocks[-2::-1]:
            below = blocks.take(slots, 0)
            before = below @ _BEFORE
            if is_bounded:
                # The sums may end slightly below the parent's: a leaf without mass must not be found then.
                rest = np.minimum(rest, np.nextafter(before[:, -1] + below[:, -1], 0.0))
            # The child is the last one with a sum before it that is not above the rest; the first sum is 0.
            child = (before <= rest[:, None]).argmin(1)
            child -= 1
            child &= _FAN - 1  # where all are not above, `argmin` is 0: the last child
            rest = rest - before.reshape(-1).take(rows + child)
            slots = (slots << _SHIFT) + child
        return slots

    def check(self) -> list[str]:
        """Return violated invariants, in words; empty when sound. O(n)."""
        faults = []
        if not (np.isfinite(self.leaves).all() and (self.leaves >= 0).all()):
            faults.append("sum tree: a leaf is negative or no number")
        if self._levels[0][self.size :].any():
            faults.append("sum tree: a leaf beyond the last one has a mass")
        for blocks, level in zip(self._blocks, self._levels[1:], strict=False):
            sums = _sums_of(blocks)
            if not np.array_equal(sums, level[: len(sums)]) or level[len(sums) :].any():
                faults.append("sum tree: a parent is not the sum of its children")
        if self._sums is not None and not np.array_equal(self._sums, self._levels[-1].cumsum()):
            faults.append("sum tree: the running sums are not those of the highest level")
        return faults


def _sums_of(blocks: Array) -> Array:
    """Return the sum of each block: the same for a block alone and among others, as `check` expects it."""
    found: Array = np.einsum("ij->i", blocks)
    return found


@lru_cache(maxsize=16)
def _rows(count: int) -> Array:
    """Return where each row of an array of sums starts."""
    rows = np.arange(count) * _FAN
    rows.flags.writeable = False
    return rows
