"""The supervisor: leases seeds to collectors, and starts those again that die.

    due ──► start ──► runs ──► dies ──► its ring is counted ──► due again, later each time
                        │                        └─► five times without a new episode: given up
                        └─► no seeds are left: it closes its world and its ring, and ends

The next collector that asks for seeds plays those that a dead one did not finish. If a ring can't be counted, because
its node is away, its seeds stay leased until it can.
Nothing of this is stored: a supervisor that is killed is run again, and counts the rings.

Invariants: no collector runs when `run` returns or raises.
Not here: who may begin (collect.py), which seeds are whose (seeds.py), what a collector runs in (process.py,
ringmap.ray.actors).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ringmap.collection.collector import Ask, Began, Done, Failed, Message
from ringmap.collection.seeds import Seeds
from ringmap.errors import EnvironmentFault, RolloutError

__all__ = ["Ending", "Supervisor", "Worker", "Workers"]

log = logging.getLogger("ringmap")

_MOST_DEATHS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LOOK_S = 0.5
"""How often an ending is asked for: that of a process that left children is not told otherwise."""
_COUNT_S = 1.0
"""How often a ring is asked for that could not be counted."""
_CLOSING_S = 30.0
"""For closing a world when all is collected."""
_WIDE = 100


@dataclass(frozen=True, slots=True)
class Ending:
    """How a collector ended. `text`: in words, after its name: "was killed by SIGKILL"; `process`: which it was, in
    brackets; `is_clean`: nothing was wrong; `hint`: where to look, if it ended by itself and did not say why."""

    text: str
    process: str
    is_clean: bool
    hint: str | None


class Worker(Protocol):
    """A collector that runs, or ran."""

    @property
    def place(self) -> str:
        """Where to look for what it printed, for messages."""

    def hear(self) -> list[Message]:
        """Return what it said since the last call. Does not wait."""

    def say(self, answer: range | None) -> None:
        """Answer it; if it has ended, nothing happens."""

    def ending(self) -> Ending | None:
        """Return how it ended; None while it runs. What it said before can be heard then."""

    def finished(self) -> set[int] | None:
        """Return what its ring holds of the collection, once it has ended; None: the ring can't be reached now."""

    def tail(self) -> str:
        """Return its last words, as indented lines."""

    def close(self) -> None:
        """Let go of one that has ended."""


W = TypeVar("W", bound=Worker)


class Workers(Protocol[W]):
    """What collectors run in."""

    def start(self, number: int) -> W:
        """Start a collector."""

    def wait(self, workers: Sequence[W], timeout_s: float) -> None:
        """Wait until one of them says something or ends."""

    def stop(self, workers: Sequence[W]) -> None:
        """End them, and wait for their ends."""


class _Seat(Generic[W]):
    """One collector, through all of its lives."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"collector {number}"
        self.holder: Hashable = number
        self.worker: W | None = None
        self.due = 0.0
        self.deaths = 0  # since its last episode
        self.episodes = 0
        self.has_begun = self.is_given_up = False
        self.failure: Failed | None = None


class Supervisor(Generic[W]):
    """Plays what is left of a collection with a number of collectors.

    Args:
        where: the call, for messages.
        workers: what the collectors run in.
        seeds: what is finished, and what is not.
        collectors: how many.
        bar: a progress bar.
        away_s: how long to wait for rings that can't be reached when nothing else is left.
    """

    def __init__(
        self, where: str, workers: Workers[W], seeds: Seeds, collectors: int, bar: Any, away_s: float = 0.0
    ) -> None:
        self._where, self._workers, self._seeds, self._bar = where, workers, seeds, bar
        self._seats = [_Seat[W](number) for number in range(collectors)]
        self._away: list[tuple[_Seat[W], Hashable, W]] = []
        """Collectors that ended, with the holder of their seeds, whose rings can't be counted yet."""
        self._away_s, self._counted_at, self._idle_since = away_s, 0.0, 0.0

    def run(self) -> None:
        """Play until every seed is finished."""
        try:
            while self._seeds.left:
                self._start_due()
                self._hear()
                if self._away:
                    self._count_away()
            until = time.monotonic() + _CLOSING_S
            while self._running and time.monotonic() < until:
                self._hear()
            if late := ", ".join(seat.name for seat in self._seats if seat.worker is not None):
                text = "%s: all is collected, but %s did not end in %.0f s, and is stopped"
                log.warning(text, self._where, late, _CLOSING_S)
        finally:
            self._workers.stop(self._running)

    # -- lives ---------------------------------------------------------------------------------

    @property
    def _running(self) -> list[W]:
        return [seat.worker for seat in self._seats if seat.worker is not None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for seat in self._seats:
            if seat.worker is None and not seat.is_given_up and seat.due <= now:
                seat.failure = None
                seat.worker = self._workers.start(seat.number)

    def _hear(self) -> None:
        """Wait for something to happen, and answer it."""
        dues = [s.due for s in self._seats if s.worker is None and not s.is_given_up and self._seeds.left]
        left = max(0.0, min([_LOOK_S, *(due - time.monotonic() for due in dues)]))
        seats = [(seat, seat.worker) for seat in self._seats if seat.worker is not None]
        self._workers.wait([worker for _, worker in seats], left)
        for seat, worker in seats:
            ending = worker.ending()  # asked first: what it said before can be heard
            for message in worker.hear():
                self._answer(seat, worker, message)
            if ending is not None:
                self._bury(seat, worker, ending)

    def _answer(self, seat: _Seat[W], worker: W, message: Message) -> None:
        match message:
            case Ask():
                block = self._seeds.lease(seat.holder) or range(0)
                worker.say(block if self._seeds.left else None)
            case Began():
                seat.has_begun = True
            case Done(offset=offset):
                self._seeds.finish(seat.holder, offset)
                self._count(seat, 1)
            case Failed():
                seat.failure = message

    def _count(self, seat: _Seat[W], episodes: int) -> None:
        seat.episodes += episodes
        seat.deaths = 0
        if shutil.get_terminal_size().columns >= _WIDE:
            each = " ".join(f"{s.number}:{'-' if s.is_given_up else s.episodes}" for s in self._seats)
            self._bar.set_postfix_str(each, refresh=False)
        self._bar.update(episodes)

    # -- deaths --------------------------------------------------------------------------------

    def _bury(self, seat: _Seat[W], worker: W, ending: Ending) -> None:
        """Count what a collector that ended left in its ring, and decide when it is started again."""
        seat.worker = None
        worker.close()
        if not self._seeds.left:
            if not ending.is_clean:
                text = "%s: all is collected, but %s %s as it closed; %s"
                log.warning(text, self._where, seat.name, ending.text, worker.place)
            return
        if not seat.has_begun and (seat.failure is not None or ending.hint is not None):
            self._raise_for(seat, worker, ending)
        finished = worker.finished()
        if finished is None:
            text = "%s: the ring of %s can't be reached, and keeps its seeds until it can; %s"
            log.warning(text, self._where, seat.name, worker.place)
            self._away.append((seat, seat.holder, worker))
            seat.holder = (seat.number, object())
        elif found := self._seeds.release(seat.holder, finished):
            self._count(seat, found)
        seat.deaths += 1
        if seat.deaths < _MOST_DEATHS:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (seat.deaths - 1))
            seat.due = time.monotonic() + pause_s
            text = "%s: %s%s %s, and is started again in %.1f s; %s"
            log.warning(text, self._where, seat.name, ending.process, ending.text, pause_s, worker.place)
            return
        seat.is_given_up = True
        text = (
            f"{self._where}: {seat.name} is given up: it ended {_MOST_DEATHS} times without a new episode, the last "
            f"time it {ending.text}; {worker.place}; the last lines:\n{worker.tail()}"
        )
        if all(s.is_given_up for s in self._seats):
            raise RolloutError(
                f"{text}\nNo collector is left, and {self._seeds.left} episodes are missing; what was collected stays: "
                "call it again once the cause is gone"
            )
        log.warning("%s\nIts seeds go to the others", text)

    def _raise_for(self, seat: _Seat[W], worker: W, ending: Ending) -> None:
        """Raise the error of a collector that could not begin: it would not the next time."""
        failure = seat.failure
        if failure is None:
            raise RolloutError(f"{self._where}: {seat.name} {ending.text} before it began; {worker.place}{ending.hint}")
        if failure.error is not None:
            failure.error.add_note(f"{self._where}: in {seat.name}; {worker.place}")
            raise failure.error
        raise RolloutError(
            f"{self._where}: {seat.name} could not begin; {worker.place}; its traceback:\n{failure.text}"
        )

    def _count_away(self) -> None:
        """Count the rings that can be reached again. What they did not finish goes to all."""
        now = time.monotonic()
        if now - self._counted_at < _COUNT_S:
            return
        for one in list(self._away):
            seat, holder, worker = one
            if (finished := worker.finished()) is not None:
                self._away.remove(one)
                if found := self._seeds.release(holder, finished):
                    self._count(seat, found)
        self._counted_at = now = time.monotonic()
        held = self._seeds.held_by(holder for _, holder, _ in self._away)
        if held < self._seeds.left or not held:
            self._idle_since = now
        elif now - self._idle_since > self._away_s:
            places = "; ".join(sorted({worker.place for *_, worker in self._away}))
            raise EnvironmentFault(
                f"{self._where}: the last {held} seeds are leased to collectors whose rings can't be reached: "
                f"{places}. What was collected stays: bring them back and call it again"
            )
