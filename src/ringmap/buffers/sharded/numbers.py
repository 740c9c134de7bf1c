"""Ring numbers: which ring an id means.

    id, 62 bits   [ ring number: 14 | position on that ring: 48 ]      of ring 0 an id is the position itself

Invariants: the table of uuids only grows, and a ring has one number for as long as the table lives, also while it is
away; what has the table, such as a worker, understands the ids.
Not here: where rings lie (rings.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringmap.errors import InputError

__all__ = ["MOST_RINGS", "POSITION_BITS", "RingNumbers", "apart", "joined"]

Array = np.ndarray[Any, np.dtype[Any]]

POSITION_BITS = 48
MOST_RINGS = 1 << 14
_POSITION = (1 << POSITION_BITS) - 1


def apart(ids: Array) -> tuple[Array, Array]:
    """Return the ring number and the position of each id.

    Example:
        >>> [part.tolist() for part in apart(np.array([5, (3 << 48) + 7]))]
        [[0, 3], [5, 7]]
    """
    return ids >> POSITION_BITS, ids & _POSITION


def joined(number: int | Array, positions: Array) -> Array:
    """Return the ids of positions on one ring, or each on its own."""
    ids: Array = positions + (number << POSITION_BITS)
    return ids


class RingNumbers:
    """The append-only table of uuids: the number of a ring is its place in it."""

    def __init__(self, uuids: Iterable[bytes] = ()) -> None:
        self.uuids = list(uuids)

    def of(self, uuid: bytes) -> int:
        """Return the number of a ring; a new ring gets the next one.

        Raises:
            InputError: there are no numbers left.
        """
        if uuid not in self.uuids:
            if len(self.uuids) == MOST_RINGS:
                raise InputError(
                    f"ShardedReplayBuffer: more than {MOST_RINGS} rings have come and gone; open the buffer again"
                )
            self.uuids.append(uuid)
        return self.uuids.index(uuid)

    def __contains__(self, uuid: bytes) -> bool:
        return uuid in self.uuids
