"""Reading what a writer may overwrite: the protocol of two looks, for all that is read.

    look up positions -> copy their rows -> look at the tail again: all positions at or after it? -> they are whole
           ^                                     |
           +------------ refresh <---- those before it: draw others, or look up again

A writer publishes a new tail before it overwrites a row before that tail. So a row that is at or after the tail once
its copy is complete was not touched while it was copied. The look after the copy is what counts; the
one before it, when positions are looked up, only saves work.

The copy has to be complete before the look begins. x86 keeps loads in order; ARM does not, and needs a system call or a
lock between the two. `newest_tail` of a reader begins with a system call. That of a writer's own handle is for threads
of the writer's process: they take turns by the lock of the interpreter, and a copy that let go of that lock took it again
before it returned.

Obligations: what is read is copied, since a view of a map changes later. Positions stay what they are through a
refresh, a restart of the writer and a recovery; ordinals and row numbers do not, so each try looks the positions up
again. Whether a row means something otherwise (it lies in a window, it has a next observation) is found out besides
the look, never in place of it.

Invariants: what is returned was live through its copy; a reader gives up after `MOST` looks in a row of which none left
less to read than the first, never earlier.
Not here: which positions there are, how rows are copied; a reader that waits for a state (reader.py, snapshot.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from ringmap.errors import LappedError
from ringmap.storage.ring.integers import Position

__all__ = ["MOST", "Live", "is_live", "look_again", "lost", "read_again", "read_whole"]

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

MOST = 10


class Live(Protocol):
    """What is read while it changes: see `Source`."""

    def newest_tail(self) -> Position:
        """Return the position below which rows may have been overwritten by now."""

    def refresh(self) -> bool:
        """Catch up with the writer; tell whether anything changed."""


def look_again(
    attempt: Callable[[], int],
    refresh: Callable[[], object],
    where: str,
    advice: str,
    left: int | None = None,
) -> None:
    """Call `attempt` until it leaves nothing to read: the one loop of all readers.

    Args:
        attempt: reads what is left, looks again, and returns how much is left still.
        refresh: takes the newest state before the next attempt.
        where: what is read, for the error.
        advice: what to do about it.
        left: how much the first attempt left, if the caller made it; None: none was made.

    Raises:
        LappedError: of ten attempts in a row none left less than the first of them.
    """
    in_vain, before = 0, 0
    left = attempt() if left is None else left
    while left:
        in_vain = in_vain + 1 if 0 < before <= left else 1
        before = left
        if in_vain == MOST:
            raise LappedError(
                f"{where}: the writer overtook this reader {MOST} times in a row; {advice}"
            )
        refresh()
        left = attempt()


def is_live(source: Live, lowest: int) -> bool:
    """Look again: tell whether rows from this position on were live while they were copied. Called once the copy is complete."""
    return lowest >= source.newest_tail()


def lost(source: Live, positions: Array, good: Array | None = None) -> Array | None:
    """Look again: return which rows may have been overwritten while they were copied, bool `(B,)`; None for none.

    Called once the copy is complete.

    Args:
        source: what is looked at.
        positions: of the rows, int64 `(B,)`.
        good: which of them mean something otherwise, bool `(B,)`; None: all. The others count as lost.
    """
    tail = source.newest_tail()
    if good is None and (not len(positions) or np.minimum.reduce(positions) >= tail):
        return None
    bad: Array = positions < tail
    if good is not None:
        bad |= ~good
    return bad if bad.any() else None


def read_again(
    source: Live,
    positions: Array,
    bad: Array,
    gather: Callable[[Array], Array | None],
    redraw: Callable[[Array], Array],
    where: str,
    advice: str,
    refresh: Callable[[], object] | None = None,
) -> None:
    """Read again what a batch lost, until nothing is; what is whole is not read again.

    The first copy and the first look (`lost`) are the caller's, so that a batch that lost nothing costs no more than these.

    Args:
        source: what is looked at.
        positions: int64 `(B,)`; shows which rows were read in the end.
        bad: which of them were lost, bool `(B,)`.
        gather: copies the rows at `positions[which]` to where the caller keeps them; returns which of these mean
            something otherwise, bool, or None for all.
        redraw: returns positions in place of `positions[which]`, from the newest state: others, or the same again.
        where: what is read, for the error.
        advice: what to do about it.
        refresh: takes the newest state; None: that of the source.

    Raises:
        LappedError: the writer overtook this reader, ten times in a row without progress.
    """
    which = np.flatnonzero(bad)

    def attempt() -> int:
        nonlocal which
        positions[which] = redraw(which)
        good = gather(which)
        still = lost(source, positions[which], good)
        which = which[:0] if still is None else which[still]
        return len(which)

    look_again(attempt, refresh or source.refresh, where, advice, left=len(which))


def read_whole(
    source: Live,
    read: Callable[[], tuple[Array, T]],
    where: str,
    advice: str,
    refresh: Callable[[], object] | None = None,
) -> T:
    """Return what was read as of one moment: if a row of it is lost, all of it is looked up and read again.

    Args:
        source: what is looked at.
        read: looks positions up, copies what is there, and returns both; nothing is looked at again for no positions.
        where: what is read, for the error.
        advice: what to do about it.
        refresh: takes the newest state; None: that of the source.

    Raises:
        LappedError: the writer overtook this reader ten times in a row.
    """
    found: list[T] = []

    def attempt() -> int:
        positions, values = read()
        if len(positions) and not is_live(source, int(positions.min())):
            return 1
        found.append(values)
        return 0

    look_again(attempt, refresh or source.refresh, where, advice)
    return found[0]
