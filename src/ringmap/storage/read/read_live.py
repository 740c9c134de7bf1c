"""Reads what a writer may overwrite: the one loop of all reads.

    look up positions -> copy their rows -> validate: are all positions at or after the newest tail? -> they are whole
           ^                                     |
           +------------ refresh <---- those before it: redraw, or look up again

A writer publishes a new tail before it overwrites a row before that tail. So a row that is at or after the tail once
its copy is complete did not change during the copy. Only the tail read after the copy counts; one read before it, when
positions are looked up, only saves work.

The copy must be complete before the tail is read. x86 keeps loads in order; ARM does not, and needs a system call or a
lock between the two. `newest_tail` of a reader makes a system call, or loads from a map where loads keep their order
(`StateFile.open`). That of a writer's own handle is for threads of the writer's process: the lock of the interpreter
orders them, and a copy that released that lock took it again before it returned.

Obligations: rows are copied, since a view of a map changes later. Positions keep their meaning through a refresh, a
restart of the writer and a recovery; ordinals and row numbers do not, so each try looks the positions up again. The
exception: a recovery after a failed sync may find an earlier state, and other episodes are stored at known positions.
Then all that a thread looked up before is lost (`Pulse.break_timeline`), also if another thread refreshes first.
Whether a row is valid in other ways (it lies in a window, it has a next observation) is checked too, never instead.

Invariants: returned rows were live during their copy; a reader gives up after `RETRY_S` seconds and `MOST` tries
without progress (fewer rows left to read), never earlier. A reader that gets no processor makes ten tries in
milliseconds, so their number alone does not count.
Not here: which positions exist, how rows are copied; a reader that waits for a state (reader.py, snapshot.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from ringmap.errors import LappedError
from ringmap.storage.ring.arrays import lowest
from ringmap.storage.ring.ring import Position

__all__ = ["MOST", "RETRY_S", "Source", "Tries", "is_live", "lost", "read_whole", "redraw_lost", "retry"]

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

MOST, RETRY_S = 10, 5.0


class Source(Protocol):
    """A source that changes while it is read: see `Handle`."""

    retry_s: float
    """Seconds without progress after which a read of it gives up."""

    def newest_tail(self) -> Position:
        """Return the position below which rows may have been overwritten by now."""

    def refresh(self) -> bool:
        """Catch up with the writer; tell whether anything changed."""


def is_live(source: Source, position: int) -> bool:
    """Validate a copy that is complete: tell whether rows from this position on were live during it."""
    return position >= source.newest_tail()


def lost(source: Source, positions: Array, good: Array | None = None) -> Array | None:
    """Validate a copy that is complete: return which rows, at positions `(B,)`, may have been overwritten during it,
    bool `(B,)`; None for none. Those that are not `good` otherwise count as lost."""
    tail = source.newest_tail()
    if good is None and (not len(positions) or lowest(positions) >= tail):
        return None
    bad: Array = positions < tail
    if good is not None:
        bad |= ~good
    return bad if bad.any() else None


class Tries:
    """Counts what is tried in vain: at least `MOST` times, and for `retry_s` seconds."""

    __slots__ = ("_begun", "_count", "_retry_s")

    def __init__(self, retry_s: float) -> None:
        self._retry_s, self._count, self._begun = retry_s, 0, 0.0

    def again(self) -> bool:
        """Count another try; tell whether it may be made."""
        count = self._count = self._count + 1
        if count == 1:
            self._begun = time.monotonic()
        return count < MOST or time.monotonic() - self._begun < self._retry_s

    def __str__(self) -> str:
        return f"{self._count} times in a row, for {self._retry_s:g} s"


def retry(
    attempt: Callable[[], int],
    refresh: Callable[[], object],
    where: str,
    advice: str,
    left: int | None = None,
    retry_s: float = RETRY_S,
) -> None:
    """Call `attempt`, which reads what is left, validates it and returns how much is still left, until that is nothing;
    `refresh` moves to the newest state before each further one.

    `left`: how much the first attempt left, if the caller made it; `where`, `advice`: the read, and the remedy, to name
    in an error; `retry_s`: seconds without progress after which it gives up.

    Raises:
        LappedError: for `retry_s` seconds, and in `MOST` consecutive attempts, none left less than the first of them.
    """
    left = attempt() if left is None else left
    tries, before = Tries(retry_s), left
    while left:
        if left < before:
            tries = Tries(retry_s)
        before = left
        if not tries.again():
            raise LappedError(f"{where}: the writer overtook this reader {tries}; {advice}")
        refresh()
        left = attempt()


def redraw_lost(
    source: Source,
    positions: Array,
    bad: Array,
    gather: Callable[[Array], Array | None],
    redraw: Callable[[Array], Array],
    where: str,
    advice: str,
) -> None:
    """Replace the lost rows of a batch until none is lost; whole rows are not read again.

    The caller makes the first copy and validates it (`lost`), so that a batch without losses has no further cost.

    Args:
        source: the source of the rows.
        positions: int64 `(B,)`; updated with the rows that were finally read.
        bad: which of them were lost, bool `(B,)`.
        gather: copies the rows at `positions[which]` to the caller's memory; returns which of these are valid
            otherwise, bool, or None for all.
        redraw: returns replacements for `positions[which]`, from the newest state: others, or the same again.
        where: the read to name in the error.
        advice: the remedy for the error.

    Raises:
        LappedError: as `retry`.
    """
    which = np.flatnonzero(bad)

    def attempt() -> int:
        nonlocal which
        positions[which] = redraw(which)
        still = lost(source, positions[which], gather(which))
        which = which[:0] if still is None else which[still]
        return len(which)

    retry(attempt, source.refresh, where, advice, len(which), source.retry_s)


def read_whole(
    source: Source,
    read: Callable[[], tuple[Array, T]],
    where: str,
    advice: str,
) -> T:
    """Return a read of one consistent state: if one of its rows is lost, all of it is looked up and read again.

    `read`: looks positions up, copies their rows, and returns both; without positions nothing is validated; `where`,
    `advice`: as for `retry`.

    Raises:
        LappedError: as `retry`.
    """
    found: list[T] = []

    def attempt() -> int:
        positions, values = read()
        found[:] = [values]
        return int(len(positions) and not is_live(source, int(positions.min())))

    retry(attempt, source.refresh, where, advice, retry_s=source.retry_s)
    return found[0]
