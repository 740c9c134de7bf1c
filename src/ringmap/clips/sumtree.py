"""A sum tree: finds the leaf for a mass, where each leaf has a mass.

    top      [   s0   |   s1   | ... ]            running sums, one binary search
    middle   [..32 sums..|..32 sums..| ... ]      each the sum of the 32 below it
    leaves   [..32..|..32..|..32..|..32..| ... ]

Levels of 32, not of 2: a batch descends through all of them at once, and three wide NumPy calls
take less time than twenty narrow ones. A parent is always recomputed from its children, so
that rounding errors don't pile up over a million updates.

Invariants: a parent is the sum of its children; no leaf is negative; a leaf of mass 0 is never found.
Not here: what a leaf stands for.
Cost: a draw of B masses O(B log n); an update of B leaves O(B log n), all vectorised. 8.3 bytes per leaf.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["SumTree"]

Array = np.ndarray[Any, np.dtype[Any]]

_FAN = 32
_SHIFT = 5
_TOP = 2048
"""Maximum number of entries in the highest level: it is summed completely at each draw, in 5 us."""


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

    __slots__ = ("_levels", "size")

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

    @property
    def leaves(self) -> Array:
        """The masses, float64 `(size,)`: a view, for reading only."""
        return self._levels[0][: self.size]

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._levels[-1].cumsum()[-1])

    def set(self, slots: Array, masses: Array) -> None:
        """Set the masses of leaves; for a leaf that is named twice the last one counts. O(B log n)."""
        self._levels[0][slots] = masses
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            slots = slots >> _SHIFT
            level[slots] = below.reshape(-1, _FAN)[slots].sum(1)

    def fill(self, start: int, masses: Array | float, count: int) -> None:
        """Set the masses of the `count` leaves from `start` on. O(count + log n)."""
        self._levels[0][start : start + count] = masses
        stop = start + count
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start >> _SHIFT, -(-stop // _FAN)
            level[start:stop] = below.reshape(-1, _FAN)[start:stop].sum(1)

    def find(self, masses: Array) -> Array:
        """Return the leaf that each of `masses`, in `[0, total)`, falls on when the leaves lie end to end.

        Cost: O(B log n). At least one leaf must have a positive mass.
        """
        sums = self._levels[-1].cumsum()
        rest = np.minimum(masses, np.nextafter(sums[-1], 0.0))
        slots = sums.searchsorted(rest, side="right")
        rest = rest - np.where(slots > 0, sums[slots - 1], 0.0)
        for level in self._levels[-2::-1]:
            below = level.reshape(-1, _FAN)[slots].cumsum(1)
            # The running sum may end slightly below the parent's: a leaf without mass must not be found then.
            rest = np.minimum(rest, np.nextafter(below[:, -1], 0.0))
            child = (below <= rest[:, None]).sum(1)
            rest = rest - np.where(child > 0, below[np.arange(len(child)), child - 1], 0.0)
            slots = (slots << _SHIFT) + child
        found: Array = slots
        return found

    def check(self) -> list[str]:
        """Return violated invariants, in words; empty when sound. O(n)."""
        faults = []
        if not (np.isfinite(self.leaves).all() and (self.leaves >= 0).all()):
            faults.append("sum tree: a leaf is negative or no number")
        if self._levels[0][self.size :].any():
            faults.append("sum tree: a leaf beyond the last one has a mass")
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            sums = below.reshape(-1, _FAN).sum(1)
            if not np.array_equal(sums, level[: len(sums)]) or level[len(sums) :].any():
                faults.append("sum tree: a parent is not the sum of its children")
        return faults
