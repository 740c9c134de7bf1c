"""The supervisor: leases seeds to collectors, and starts those again that die.

    due ──► start ──► runs ──► dies ──► its ring is counted ──► due again, later each time
                        │                        └─► five times without a new episode: given up, its seeds go to others
                        └─► no seeds are left: it closes its world and its ring, and ends

Nothing of this is stored: a supervisor that is killed is run again, and counts the rings.

Invariants: no collector runs when `run` returns or raises.
Not here: who may begin (collect.py), which seeds are whose (seeds.py).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from ringmap.collection.collector import (
    NOTHING,
    STOPPED,
    Ask,
    Began,
    Done,
    Failed,
    Job,
    log_of,
    run,
)
from ringmap.collection.rings import finished_at, ring_of
from ringmap.collection.seeds import Seeds
from ringmap.errors import RolloutError

__all__ = ["THREADS", "Supervisor"]

log = logging.getLogger("ringmap")

THREADS = "OMP_NUM_THREADS"
"""The environment variable that OpenMP, MKL, OpenBLAS and PyTorch read."""

_WHERE = "ringmap.collect"
_MOST_DEATHS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LOOK_S = 0.5
"""How often an exit code is asked for: the end of a process that left children is not told otherwise."""
_GRACE_S = 1.0
"""After a signal to stop, before the kill."""
_CLOSING_S = 30.0
"""For closing a world when all is collected."""
_TAIL_NBYTES, _TAIL_LINES = 8192, 15
_WIDE = 100


class _Seat:
    """One collector, through all of its processes."""

    def __init__(self, number: int, folder: str) -> None:
        self.number = number
        self.log = log_of(folder, number)
        self.process: Any = None
        self.pipe: Connection | None = None
        self.due = 0.0
        self.deaths = 0  # since its last episode
        self.episodes = 0
        self.has_begun = self.is_given_up = self.waits = False
        self.failure: Failed | None = None

    @property
    def name(self) -> str:
        return f"collector {self.number}"

    def tail(self) -> str:
        """Return the last lines of its log."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(0, os.path.getsize(self.log) - _TAIL_NBYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
        return "    (it printed nothing)"


class Supervisor:
    """Plays what is left of a collection with a number of collectors.

    Args:
        job: what every collector is told.
        seeds: what is finished, and what is not.
        collectors: how many.
        folder: of the logs.
        context: how the processes start.
        bar: a progress bar.
    """

    def __init__(
        self, job: Job, seeds: Seeds, collectors: int, folder: str, context: str, bar: Any
    ) -> None:  # fmt: skip
        self._job, self._seeds, self._folder, self._bar = job, seeds, folder, bar
        self._context: Any = multiprocessing.get_context(context)
        self._is_spawned = context == "spawn"
        self._seats = [_Seat(number, folder) for number in range(collectors)]

    def run(self) -> None:
        """Play until every seed is finished.

        Raises:
            RingmapError: a collector could not begin; its own error.
            RolloutError: it could not begin, with its traceback; or all were given up.
            KeyboardInterrupt: the collectors are stopped first.
        """
        try:
            while self._seeds.left:
                self._start_due()
                self._hear()
            self._dismiss()
        finally:
            self._stop()

    # -- processes -----------------------------------------------------------------------------

    def _start_due(self) -> None:
        now = time.monotonic()
        for seat in self._seats:
            if seat.process is None and not seat.is_given_up and seat.due <= now:
                self._start(seat)

    def _start(self, seat: _Seat) -> None:
        ours, theirs = self._context.Pipe()
        seat.pipe, seat.failure, seat.waits = ours, None, False
        process = self._context.Process(
            target=run, args=(seat.number, self._job, self._folder, theirs), name=f"ringmap-{seat.name}"
        )  # fmt: skip
        # A fork server would keep what it is started with, for all of its children.
        held = _interrupts_held() if self._is_spawned else contextlib.nullcontext()
        with theirs, held, _environment(self._job.threads):
            process.start()
            seat.process = process

    def _hear(self) -> None:
        """Wait for something to happen, and answer it."""
        running = [seat for seat in self._seats if seat.process is not None]
        dues = [s.due for s in self._seats if s.process is None and not s.is_given_up]
        left = max(0.0, min([_LOOK_S, *(due - time.monotonic() for due in dues)]))
        wait([s.pipe for s in running if s.pipe] + [s.process.sentinel for s in running], left)
        for seat in running:
            has_ended = (
                seat.process.exitcode is not None
            )  # asked first: what it said before is in the pipe
            self._read(seat)
            if has_ended:
                self._bury(seat)

    def _read(self, seat: _Seat) -> None:
        """Take what a collector says; one that is killed in the middle of a word has ended."""
        pipe = seat.pipe
        if pipe is None:
            return
        try:
            while pipe.poll():
                self._answer(seat, pipe.recv())
        except (EOFError, OSError):
            pipe.close()
            seat.pipe = None

    def _answer(self, seat: _Seat, message: object) -> None:
        match message:
            case Ask(waits=waits):
                seat.waits = True
                self._lease(seat)
                if seat.waits and not waits:
                    self._say(seat, NOTHING)
            case Began():
                seat.has_begun = True
            case Done(offset=offset):
                self._seeds.finish(seat.number, offset)
                self._count(seat, 1)
            case Failed():
                seat.failure = message

    def _lease(self, seat: _Seat) -> None:
        if seat.waits and (block := self._seeds.lease(seat.number)) is not None:
            self._say(seat, block)

    def _say(self, seat: _Seat, answer: range | None) -> None:
        seat.waits = False
        if seat.pipe is not None:
            with contextlib.suppress(OSError):  # it died, and its ring will be counted
                seat.pipe.send(answer)

    def _count(self, seat: _Seat, episodes: int) -> None:
        seat.episodes += episodes
        seat.deaths = 0
        if shutil.get_terminal_size().columns >= _WIDE:
            each = " ".join(
                f"{s.number}:{'-' if s.is_given_up else s.episodes}" for s in self._seats
            )
            self._bar.set_postfix_str(each, refresh=False)
        self._bar.update(episodes)

    # -- deaths --------------------------------------------------------------------------------

    def _bury(self, seat: _Seat) -> None:
        """Count what a collector that ended left in its ring, and decide when it is started again."""
        code, pid = seat.process.exitcode, seat.process.pid
        self._forget(seat)
        if not seat.has_begun and (seat.failure is not None or (code > 0 and code != STOPPED)):
            self._raise_for(seat, code)
        finished = finished_at(
            ring_of(self._job.path, seat.number), self._job.collection, self._job.wait_s
        )
        if found := self._seeds.died(seat.number, finished):
            self._count(seat, found)
        seat.deaths += 1
        if seat.deaths < _MOST_DEATHS:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (seat.deaths - 1))
            seat.due = time.monotonic() + pause_s
            log.warning(
                "%s: %s (process %s) %s, and is started again in %.1f s; its log: %s", _WHERE, seat.name, pid, _ending(code),
                pause_s, seat.log,
            )  # fmt: skip
            return
        seat.is_given_up = True
        self._seeds.give_up(seat.number)
        text = (
            f"{_WHERE}: {seat.name} is given up: it ended {_MOST_DEATHS} times without a new episode, the last time it {_ending(code)}; "
            f"its log: {seat.log}; the last lines:\n{seat.tail()}"
        )
        if all(s.is_given_up for s in self._seats):
            raise RolloutError(
                f"{text}\nNo collector is left, and {self._seeds.left} episodes are missing; what was collected stays: call it again "
                "once the cause is gone"
            )
        log.warning("%s\nIts seeds go to the others", text)
        for other in self._seats:
            self._lease(other)

    def _raise_for(self, seat: _Seat, code: int) -> None:
        """Raise the error of a collector that could not begin: it would not the next time."""
        failure = seat.failure
        if failure is None:
            raise RolloutError(
                f"{_WHERE}: {seat.name} {_ending(code)} before it began; its traceback was printed, or is in {seat.log}. A script "
                'that calls ringmap.collect needs `if __name__ == "__main__":` around it'
            )
        if failure.error is not None:
            failure.error.add_note(f"{_WHERE}: in {seat.name}; its log: {seat.log}")
            raise failure.error
        raise RolloutError(
            f"{_WHERE}: {seat.name} could not begin; its log: {seat.log}; its traceback:\n{failure.text}"
        )

    def _forget(self, seat: _Seat) -> None:
        seat.process.join()
        seat.process.close()
        if seat.pipe is not None:
            seat.pipe.close()
        seat.process = seat.pipe = None

    # -- the end -------------------------------------------------------------------------------

    def _dismiss(self) -> None:
        """Tell all that there are no more seeds, and let them close what they have."""
        until = time.monotonic() + _CLOSING_S
        while running := [seat for seat in self._seats if seat.process is not None]:
            for seat in running:
                if seat.waits:
                    self._say(seat, None)
            left = until - time.monotonic()
            if left <= 0:
                names = ", ".join(seat.name for seat in running)
                log.warning(
                    "%s: all is collected, but %s did not end in %.0f s, and is stopped",
                    _WHERE,
                    names,
                    _CLOSING_S,
                )
                return
            wait([s.pipe for s in running if s.pipe] + [s.process.sentinel for s in running], min(_LOOK_S, left))  # fmt: skip
            for seat in running:
                code = seat.process.exitcode
                self._read(seat)
                if code is not None:
                    self._forget(seat)
                    if code:
                        log.warning("%s: all is collected, but %s %s as it closed; its log: %s", _WHERE, seat.name, _ending(code), seat.log)  # fmt: skip

    def _stop(self) -> None:
        """End every process: by a signal that lets it close its world, then by a kill."""
        processes = [seat.process for seat in self._seats if seat.process is not None]
        try:
            for process in processes:
                process.terminate()
            until = time.monotonic() + _GRACE_S
            for process in processes:
                process.join(max(0.0, until - time.monotonic()))
        finally:  # a second Ctrl-C comes here, too
            for process in processes:
                if process.exitcode is None:  # else its number may be another's by now
                    _kill_group(process)
                    process.kill()
                process.join()
            for seat in self._seats:
                if seat.pipe is not None:
                    seat.pipe.close()


def _ending(code: int) -> str:
    if code == STOPPED:
        return "was stopped by a signal"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _kill_group(process: Any) -> None:
    """Kill a collector with the processes of its environments."""
    with contextlib.suppress(OSError):  # it has made no group yet
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let a process that is started here have Ctrl-C blocked until it is ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(threads: int | None) -> Iterator[None]:
    """Let a process that is started here use so many threads: what it imports first may read the variable."""
    if threads is None:
        yield
        return
    before = os.environ.get(THREADS)
    os.environ[THREADS] = str(threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before
