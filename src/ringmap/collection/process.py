"""Collectors as processes of this machine.

    parent ─── pipe ─── collector-3 ─► runs/replay/collector-3
                                   └─► runs/replay/collect/collector-3.log

Invariants: a collector does not outlive its parent, wherever it is at that moment.
Not here: what it plays (collector.py), when it is started again (supervisor.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ringmap.collection.collector import Message, failure_of, limit_threads, play
from ringmap.collection.job import Job
from ringmap.collection.rings import finished_at, ring_of
from ringmap.collection.supervisor import Ending
from ringmap.storage.disk.system import System

__all__ = ["THREADS", "Processes", "log_of", "run"]

THREADS = "OMP_NUM_THREADS"
"""The environment variable that OpenMP, MKL, OpenBLAS and PyTorch read."""

STOPPED = 130
"""Exit code of a collector that was told to stop by a signal."""

_HINT = (
    "; its traceback was printed, or is in its log. A script that calls ringmap.collect needs "
    '`if __name__ == "__main__":` around it'
)
_GRACE_S = 1.0
"""After a signal to stop, before the kill."""
_TAIL_NBYTES, _TAIL_LINES = 8192, 15


class Processes:
    """Starts collectors as processes. `folder`: of their logs; `context`: how they start."""

    def __init__(self, job: Job, path: str, folder: str, context: str) -> None:
        self._job, self._path, self._folder = job, path, folder
        self._context: Any = multiprocessing.get_context(context)
        self._is_spawned = context == "spawn"

    def start(self, number: int) -> _Process:
        """Start a collector."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=run,
            args=(number, self._job, self._path, self._folder, os.getpid(), theirs),
            name=f"ringmap-collector {number}",
        )
        started = _Process(process, ours, ring_of(self._path, number), log_of(self._folder, number), self._job)
        # A fork server would keep what it is started with, for all of its children.
        held = _interrupts_held() if self._is_spawned else contextlib.nullcontext()
        with theirs, held, _environment(self._job.threads):
            process.start()
        return started

    def wait(self, workers: Sequence[_Process], timeout_s: float) -> None:
        """Wait until one of them says something, or ends."""
        wait([handle for worker in workers for handle in worker.handles], timeout_s)

    def stop(self, workers: Sequence[_Process]) -> None:
        """End them: by a signal that lets each close its world, then by a kill."""
        try:
            for worker in workers:
                worker.process.terminate()
            until = time.monotonic() + _GRACE_S
            for worker in workers:
                worker.process.join(max(0.0, until - time.monotonic()))
        finally:  # a second Ctrl-C comes here, too
            for worker in workers:
                if worker.process.exitcode is None:  # else its number may be another's by now
                    _kill_group(worker.process)
                    worker.process.kill()
                worker.close()


class _Process:
    """A collector that runs as a process."""

    def __init__(self, process: Any, pipe: Connection, ring: str, log: str, job: Job) -> None:
        self.process, self._pipe, self._job, self._ring, self._log = process, pipe, job, ring, log

    @property
    def handles(self) -> list[Any]:
        """What can be waited for."""
        return [*([] if self._pipe.closed else [self._pipe]), self.process.sentinel]

    @property
    def place(self) -> str:
        """Where it prints."""
        return f"its log: {self._log}"

    def hear(self) -> list[Message]:
        """Return what it said since the last call."""
        found: list[Message] = []
        try:
            while not self._pipe.closed and self._pipe.poll():
                found.append(self._pipe.recv())
        except (EOFError, OSError):  # killed in the middle of a word: it has ended
            self._pipe.close()
        return found

    def say(self, answer: range | None) -> None:
        """Answer it."""
        with contextlib.suppress(OSError):  # it died, and its ring will be counted
            self._pipe.send(answer)

    def ending(self) -> Ending | None:
        """Return how it ended; None while it runs."""
        code = self.process.exitcode
        if code is None:
            return None
        hint = _HINT if code > 0 and code != STOPPED else None
        return Ending(_ending(code), f" (process {self.process.pid})", code == 0, hint)

    def finished(self) -> set[int]:
        """Return what its ring holds."""
        return finished_at(self._ring, self._job.collection, self._job.wait_s)

    def tail(self) -> str:
        """Return the last lines of its log."""
        with contextlib.suppress(OSError), open(self._log, "rb") as file:
            file.seek(max(0, os.path.getsize(self._log) - _TAIL_NBYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
        return "    (it printed nothing)"

    def close(self) -> None:
        """Forget it."""
        self.process.join()
        self.process.close()
        self._pipe.close()


def log_of(folder: str, number: int) -> str:
    """Return the file into which a collector prints."""
    return os.path.join(folder, f"collector-{number}.log")


def run(number: int, job: Job, path: str, folder: str, parent: int, pipe: Connection) -> None:
    """Be collector `number` of a collection at `path`, a child of the process `parent`, until no seeds are left."""
    _follow_parent(parent, System())
    _listen_to_signals()
    _log_into(log_of(folder, number), number)
    try:
        if job.threads is not None:
            limit_threads(job.threads)
        play(number, job, ring_of(path, number), pipe)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except Exception as error:
        failure = failure_of(error)
        print(failure.text, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # the parent is gone
            pipe.send(failure)
        sys.exit(1)


def _follow_parent(parent: int, system: System) -> None:
    """Let this process end when its parent does, wherever it is at that moment."""
    if system.end_with(parent):
        return
    process = multiprocessing.parent_process()
    assert process is not None

    def watch() -> None:
        process.join()
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel would; what is committed stays

    threading.Thread(target=watch, name="ringmap-parent", daemon=True).start()


def _listen_to_signals() -> None:
    """Let the parent say when to stop: Ctrl-C in a terminal is for it alone."""
    with contextlib.suppress(OSError):  # the leader of a session already
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _log_into(path: str, number: int) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    # A process that was not spawned may have others here, of its server.
    sys.stdout, sys.stderr = (
        open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115 - as long as the process lives
        for fd in (1, 2)
    )
    faulthandler.enable()
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    print(f"-- collector {number}, process {os.getpid()}, {now}", flush=True)


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
