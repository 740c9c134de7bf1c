"""Retention: which of the rows of a ring are drawn.

    all    every round; a full ring refuses more rows  [ r0 r0 r1 r1 r2 r2 ]
    last   those of the last `keep_rounds` rounds              [ r1 r2 r2 ]
    fifo   the newest `capacity` rows, of any round

Invariants: the kept rows are the newest rows, from an id on; the rounds of rows never decrease.
Not here: the ring (steps.py), what a round is (buffer.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers.steps import StepRing
from ringmap.errors import InputError

__all__ = ["Retention"]

Array = np.ndarray[Any, np.dtype[Any]]


class Retention:
    """A rule: `kind` is "all", "last" or "fifo"; `keep_rounds` is for "last".

    Raises:
        InputError: the rule does not exist.
    """

    def __init__(self, kind: str, keep_rounds: int | None, where: str) -> None:
        if kind not in ("all", "last", "fifo"):
            raise InputError(f"{where}: retention must be 'all', 'last' or 'fifo', got {kind!r}")
        if (kind == "last") != (keep_rounds is not None):
            raise InputError(f"{where}: keep_rounds goes with retention='last', and only with it")
        if keep_rounds is not None:
            keep_rounds = positive(where, "keep_rounds", keep_rounds)
        self.kind, self.keep_rounds = kind, keep_rounds
        self._known: tuple[int | None, int] = None, 0

    def first(self, ring: StepRing, round: int | None) -> int:
        """Return the oldest id that is kept, one past the newest if there is none.

        Args:
            ring: the rows, with a column `round`.
            round: the current one, if only this handle adds rows, so that the result stays valid for the round;
                None: that of the newest row.

        Cost: O(log rows) once per round; for a reader each time.
        """
        if self.keep_rounds is None:
            return ring.oldest
        kept = self.keep_rounds
        if round is None:
            return ring.read_whole(lambda: _first_of(ring, kept))
        oldest = round - kept + 1
        known = self._known  # read once: another thread may change the round
        if known[0] != oldest:
            known = self._known = oldest, ring.read_whole(lambda: _first_of(ring, kept, round))
        return known[1]

    def check_room(self, ring: StepRing, first: int, count: int, where: str) -> None:
        """Raise InputError if `count` more rows would evict kept rows, of which `first` is the oldest."""
        kept = ring.added - first
        if self.kind == "fifo" or kept + count <= ring.capacity:
            return
        what = "of all rounds" if self.keep_rounds is None else f"of {self.keep_rounds} rounds"
        raise InputError(
            f"{where}: {count} more rows do not fit: {kept} rows {what} are kept, and capacity={ring.capacity}; "
            "raise it, keep fewer rounds, or let the oldest rows go with retention='fifo'"
        )

    def __repr__(self) -> str:
        kept: Any = "" if self.keep_rounds is None else f" {self.keep_rounds}"
        return f"{self.kind!r}{kept}"


def _first_of(ring: StepRing, keep_rounds: int, round: int | None = None) -> tuple[Array, int]:
    """Return the examined ids, and the oldest id of the last rounds; `round`: the last one, None: the newest row's."""
    low, high = 0, len(ring)
    looked = [ring.added - 1] if high else []
    if round is None:
        round = max(0, int(ring.take("round", np.array(looked))[0])) if high else 0
    while low < high:
        middle = (low + high) // 2
        looked.append(ring.id_at(middle))
        early = int(ring.take("round", np.array(looked[-1:]))[0]) <= round - keep_rounds
        low, high = (middle + 1, high) if early else (low, middle)
    first = ring.id_at(low) if low < len(ring) else ring.added
    return np.array(looked, np.int64), first
