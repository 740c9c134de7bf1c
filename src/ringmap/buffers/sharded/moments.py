"""Which clips have which ids: the rings' clips of one moment, counted ring by ring, and told to workers.

    ids      0 ......... 29 | 30 ... 49 | 50 ...       of the pinned clips of ring 0, ring 1, ...

    the loader's process   moment -> told        for each number: the ring's uuid, its head, its clips
    a worker               moment <- told

Invariants: the ids of a reader do not change until it is refreshed, also if a ring leaves; a worker counts clips as the
process that owns its loader, and numbers no ring that this process has not numbered.
Not here: what is done with a clip whose ring is away (engine.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringmap.buffers.loader_state import LoaderState
from ringmap.buffers.sharded.numbers import MOST_RINGS
from ringmap.buffers.sharded.rings import Fleet
from ringmap.clips.cut import Cut
from ringmap.clips.gather import Pinned
from ringmap.clips.rings import RING_FAULTS
from ringmap.datasets.batch import worker
from ringmap.storage.ring.ring import Position

__all__ = ["Moment", "Moments", "told_state"]

Array = np.ndarray[Any, np.dtype[Any]]

_EACH = 4
"""Numbers told of each ring: two halves of its uuid, its head, its clips."""


def told_state() -> LoaderState:
    """Return shared memory with room for all rings. Pages that no ring needs take no memory."""
    return LoaderState(numbers=2 + _EACH * MOST_RINGS)


class Moment(NamedTuple):
    """The clips of a cut at one moment: those of the ring `numbers[i]` have the ids up to `ends[i]`; not pinned: it is
    away."""

    numbers: list[int]
    pinned: list[Pinned | None]
    ends: Array

    @property
    def clips(self) -> int:
        """How many there are."""
        return int(self.ends[-1]) if len(self.ends) else 0


class Moments:
    """The pinned moments of a process, by what decides which steps are anchors.

    Args:
        members: the open rings.
        state: between the process that owns the loader and its workers.
    """

    def __init__(self, members: Fleet, state: LoaderState) -> None:
        self._members = members
        self._state = state
        self._of: dict[tuple[Any, ...], Moment] = {}
        self._told: Moment | None = None
        self._generation = 0

    @property
    def is_led(self) -> bool:
        """Whether another process numbers the rings, and pins."""
        return worker() is not None and not self._state.is_mine

    def clear(self) -> None:
        """Let the next look use the newest state."""
        self._of.clear()

    def of(self, cut: Cut, shared: bool) -> Moment:
        """Return the clips that exist: at the last refresh, in a worker as the loader's process counts them.

        Args:
            cut: of the clips.
            shared: whether this is the cut of the loader's clips, which workers count as its process does.
        """
        if shared and self.is_led:
            return self._as_told(cut)
        moment = self._of.get(cut.anchors)
        if moment is None:
            with self._members.lock:
                self._of[cut.anchors] = moment = self._now(cut)
                if shared:
                    self._told = moment
                    self.tell()
        return moment

    def _now(self, cut: Cut) -> Moment:
        self._members.report()
        rings = self._members.open
        pinned = [ring.reader.pin(cut) for ring in rings]
        counts = np.array([one.count for one in pinned], np.int64)
        return Moment([ring.number for ring in rings], list(pinned), np.cumsum(counts))

    def tell(self) -> None:
        """Tell workers the numbers of the rings, and the clips of the last shared moment."""
        if not self._state.is_mine:
            return
        moment, uuids = self._told, self._members.numbers.uuids
        clips = {} if moment is None else dict(zip(moment.numbers, moment.pinned, strict=True))
        numbers = [int(moment is not None), len(uuids)]
        for number, uuid in enumerate(uuids):
            pinned = clips.get(number)
            halves = np.frombuffer(uuid, np.int64).tolist()
            numbers += [*halves, *((0, 0) if pinned is None else (pinned.head, pinned.count))]
        self._state.tell(*numbers)

    def learn(self) -> list[tuple[int, int]] | None:
        """Take over the ring numbers that were told; return head and clips of each ring in the moment that was, None
        for none."""
        if not self.is_led:
            return None
        told, uuids = self._state.told(), self._members.numbers.uuids
        generation, is_moment, count = told[:3]
        if not generation:
            return None
        clips = []
        for number in range(count):
            at = 3 + _EACH * number
            if number == len(uuids):
                uuids.append(np.array(told[at : at + 2], np.int64).tobytes())
            clips.append((told[at + 2], told[at + 3]))
        return clips if is_moment else None

    def only_known(self) -> bool:
        """Learn the numbers that were told, and tell whether others are given by another process."""
        self.learn()
        return self.is_led

    def _as_told(self, cut: Cut) -> Moment:
        state, members = self._state, self._members
        moment = self._of.get(cut.anchors)
        if moment is not None and state.generation == self._generation:
            return moment
        with members.lock:
            generation = state.generation
            clips = self.learn()
            if clips is None:
                members.follow()
                return self._now(cut)
            numbers = [number for number, (_, count) in enumerate(clips) if count]
            if any(members.of(number) is None for number in numbers):
                members.follow(scan=True)
            pinned = [self._pin_before(number, *clips[number], cut) for number in numbers]
            ends = np.cumsum(np.array([clips[number][1] for number in numbers], np.int64))
            self._of[cut.anchors] = moment = Moment(numbers, pinned, ends)
            self._generation = generation
            return moment

    def _pin_before(self, number: int, head: int, count: int, cut: Cut) -> Pinned | None:
        ring = self._members.of(number)
        if ring is None:
            return None
        try:
            if ring.source.head < head:
                ring.source.refresh()
            return ring.reader.pin_before(Position(head), count, cut)
        except RING_FAULTS as error:
            self._members.drop(ring, error)
            return None
