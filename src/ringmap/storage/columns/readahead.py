"""Readahead for rows that are only on the disk: asks for all of them before the first is touched.

    slots -> bytes -> pages -> runs, in the file's order -> one hint each      want(...)
    how much did this thread read from the disk while a batch was gathered?    Readahead

A touched page that is not in memory is read alone, or with megabytes of neighbours that are not needed, while
the disk could serve 30 reads at once. So a large column turns the system's own readahead off, and names
each batch's pages beforehand. That costs half a millisecond per batch, which is wasted if all rows are in memory: after
a period in which nothing was read from the disk, hints stop until something is.

Invariants: a hint changes no byte, and may be left out.
Not here: copying.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.storage.disk.system import System

__all__ = ["Readahead", "runs"]

Array = np.ndarray[Any, np.dtype[Any]]

_PAGE = 4096
_QUIET_BATCHES = 16


def runs(slots: Array, row_nbytes: int, offset: int) -> list[tuple[int, int]]:
    """Return the byte ranges, whole pages in ascending order, that hold the rows at `slots`. O(rows log rows).

    Example:
        >>> runs(np.array([[0, 1, 2], [90, 91, 92]]), row_nbytes=1000, offset=4096)
        [(4096, 4096), (90112, 8192)]
    """
    begin = np.unique(slots.reshape(-1)) * row_nbytes + offset
    first = begin // _PAGE
    stop = (begin + (row_nbytes - 1)) // _PAGE + 1
    breaks = np.flatnonzero(first[1:] > stop[:-1]) + 1
    firsts = first[np.concatenate(([0], breaks))] * _PAGE
    stops = stop[np.concatenate((breaks - 1, [len(stop) - 1]))] * _PAGE
    return list(zip(firsts.tolist(), (stops - firsts).tolist(), strict=True))


class Readahead:
    """Decides whether hints pay off, from how much gathering has read from the disk so far.

    Args:
        system: tells how much this thread has read.
    """

    __slots__ = ("_quiet", "_seen", "_system")

    def __init__(self, system: System) -> None:
        self._system = system
        self._quiet = 0
        self._seen = 0

    @property
    def is_cold(self) -> bool:
        """Whether to give hints."""
        return self._quiet < _QUIET_BATCHES

    def begin(self) -> None:
        """Record that a gather begins."""
        self._seen = self._system.disk_reads()

    def end(self) -> None:
        """Record that a gather has ended."""
        self._quiet = 0 if self._system.disk_reads() > self._seen else self._quiet + 1
