"""The seeds of a collection that several collectors share: finished, leased or waiting. No processes, no files.

    offsets   0 ....... [a, b) ....... [c, d) ....... episodes
              finished  leased to 0    leased to 1    waiting

A lease is a block of consecutive seeds, so that the progress that each ring keeps stays a few ranges. A block is a part
of what waits, so that blocks get smaller, and the collectors end together.

Invariants: each offset is finished, leased to one holder, or waiting.
Not here: who plays them, and where it is kept that they are finished.

Source: Polychronopoulos & Kuck 1987, Guided self-scheduling.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping

from ringmap.errors import InputError
from ringmap.world.progress import Progress, ranges_of

__all__ = ["Seeds", "finished_in"]

_SHARE = 4
"""A block is this part of what each collector would get of what waits."""


class Seeds:
    """Who plays which of the offsets `0 ... episodes - 1`.

    Args:
        episodes: how many.
        finished: the offsets that are finished already.
        collectors: how many will ask.

    Example:
        >>> seeds = Seeds(10, finished=[0, 1], collectors=1)
        >>> seeds.lease("a"), seeds.lease("b")
        (range(2, 4), range(4, 5))
        >>> seeds.finish("a", 2)
        >>> seeds.release("a", finished=[0, 1, 2, 3])  # it finished one more than it could say
        1
        >>> seeds.release("b", finished=[])
        0
        >>> seeds.lease("a"), seeds.left
        (range(4, 5), 6)
    """

    def __init__(self, episodes: int, finished: Iterable[int], collectors: int) -> None:
        self._waiting = ranges_of(set(range(episodes)) - set(finished))
        self._held: dict[Hashable, set[int]] = {}
        self._part = _SHARE * collectors
        self._episodes = episodes
        self.left = sum(map(len, self._waiting))
        """How many are not finished."""

    def lease(self, holder: Hashable) -> range | None:
        """Return a block for a holder, the lowest that waits; None if none does. O(blocks)."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        size = max(1, sum(map(len, self._waiting)) // self._part)
        block, rest = first[:size], first[size:]
        self._waiting[:1] = [rest] if rest else []
        self._held.setdefault(holder, set()).update(block)
        return block

    def finish(self, holder: Hashable, offset: int) -> None:
        """Count a seed of a holder's lease as finished. O(1).

        Raises:
            ValueError: it is not leased to this holder.
        """
        try:
            self._held.get(holder, set()).remove(offset)
        except KeyError:
            raise ValueError(f"offset {offset} is not leased to {holder!r}") from None
        self.left -= 1

    def release(self, holder: Hashable, finished: Container[int]) -> int:
        """Count what a holder that ended had finished, as its ring says; the rest of its lease waits again.

        Returns:
            How many it finished that were not known. O(what waits).
        """
        held = self._held.pop(holder, set())
        back = [k for k in held if k not in finished]
        self._waiting = ranges_of({*back, *(k for block in self._waiting for k in block)})
        self.left -= len(held) - len(back)
        return len(held) - len(back)

    def held_by(self, holders: Iterable[Hashable]) -> int:
        """Return how many seeds some holders have not finished. O(holders)."""
        return sum(len(self._held.get(holder, ())) for holder in holders)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        waiting = [k for block in self._waiting for k in block]
        held = [k for offsets in self._held.values() for k in offsets]
        assert len({*waiting, *held}) == len(waiting) + len(held) == self.left, "an offset is at two places"
        assert {*waiting, *held} <= set(range(self._episodes)), "an offset is none of the collection"


def finished_in(rings: Mapping[str, Progress], where: str) -> set[int]:
    """Return what all rings of a collection have finished together.

    Args:
        rings: the progress that each keeps, by the name of the ring.
        where: the call, for messages.

    Cost: O(episodes).
    """
    owner: dict[int, str] = {}
    first: tuple[str, Progress] | None = None
    for name, progress in rings.items():
        first = first or (name, progress)
        if progress.identity != first[1].identity:
            raise InputError(
                f"{where}: {name} holds a part of another collection with this seed than {first[0]}: "
                f"{progress.identity} there, {first[1].identity} here; move one of them elsewhere"
            )
        for k in progress.finished():
            if k in owner:
                raise InputError(
                    f"{where}: {owner[k]} and {name} both hold seed {progress.identity['seed'] + k}: was a ring "
                    "copied? Each seed is collected once; move one of the rings elsewhere"
                )
            owner[k] = name
    return set(owner)
