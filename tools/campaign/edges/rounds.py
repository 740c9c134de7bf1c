"""A round: an actor is forked, gets signals, may be killed; what it leaves is judged.

    server (warm, without threads) -> host (one round) -> actor (the scenario), its own process group

The schedule of threads and signals is the kernel's: a seed gives the same scenario and the same chances, not the same
round.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field

import numpy as np

import ringmap
from ringmap import DistillationBuffer, ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import RoleError
from tools.campaign.edges import actor as acting
from tools.campaign.edges import forks, others, planted, replaced, signals, threads
from tools.campaign.edges.ledger import DONE, SNAPSHOT, Ledger, faults
from tools.campaign.edges.proof import num_torn, spoiled, wrong

PLAYS = {
    "signals": signals.play,
    "threads": threads.play,
    "forks": forks.play,
    "replaced": replaced.play,
    "others": others.play,
}
WEIGHTS = {"signals": 5, "threads": 5, "forks": 3, "replaced": 3, "others": 4}
THEIRS = "zarr_io", "asyncio", "MainThread"
"""Threads of Zarr's, which stay."""

DEADLINE_S = 60.0
"""For a round of less than a second, on a machine that has other work: only a hang takes so long."""

IDLE_S = 5.0
"""Without any time of the processor for any thread of a round: they wait for each other."""


@dataclass(frozen=True)
class Told:
    """What a round is told: the same for the same seed and number."""

    seed: int
    number: int
    folder: str
    scenario: str
    seconds: float
    killed_after: float | None
    terms: int
    raises: bool
    signals: bool
    loader: bool
    plant: str | None = None

    @property
    def unordered(self):
        """Whether a later number may stand before an earlier one: a handler's call in the middle of another."""
        return self.scenario == "signals"

    @property
    def is_interrupted(self):
        """Whether signal handlers raise."""
        return (self.scenario == "signals" and self.raises) or (self.scenario == "others" and self.signals)

    @classmethod
    def of(cls, seed, number, folder, only=None, plant=None):
        rng = np.random.default_rng([seed, number, 7])
        names = [name for name in PLAYS if only is None or name in only]
        weights = np.array([WEIGHTS[name] for name in names], float)
        scenario = str(rng.choice(names, p=weights / weights.sum()))
        seconds = float(rng.uniform(0.1, 0.45))
        kill = rng.random() < 0.15
        return cls(
            seed,
            number,
            os.path.join(folder, f"round-{number}"),
            scenario,
            seconds,
            killed_after=float(rng.uniform(0.0, seconds + 0.3)) if kill and scenario != "replaced" else None,
            terms=int(rng.integers(0, 6)) if scenario in ("signals", "others") else 0,
            raises=bool(rng.random() < 0.35),
            signals=bool(rng.random() < 0.3),
            loader=scenario == "forks" and bool(rng.random() < 0.1),
            plant=plant,
        )


@dataclass
class Result:
    """What came of a round."""

    number: int
    scenario: str
    seconds: float = 0.0
    violations: list = field(default_factory=list)
    tallies: dict = field(default_factory=dict)
    log: str = ""


def play(told):
    """Play a round and judge it. Runs in a process of its own, without threads."""
    began = time.monotonic()
    adopt_orphans()
    os.makedirs(told.folder)
    ledger, log = Ledger(), os.path.join(told.folder, "log")
    open(log, "w").close()
    pid = os.fork()
    if not pid:
        act(told, ledger, log)
    found = watch(told, pid, ledger)
    result = Result(told.number, told.scenario)
    with open(log, errors="replace") as file:
        result.log = file.read()
    found += ledger.violations
    if result.log.strip() and not told.is_interrupted:
        found.append(("stderr", result.log[-1500:]))
    found += judged(told, ledger)
    result.violations, result.tallies = found, ledger.tallies
    result.seconds = time.monotonic() - began
    if not found:
        shutil.rmtree(told.folder, ignore_errors=True)
    return result


# -- the actor -----------------------------------------------------------------------------------


def act(told, ledger, log):
    """Be the actor; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_the_host()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        for sig in (signal.SIGTERM, signal.SIGALRM):  # until the scenario has its own
            signal.signal(sig, signal.SIG_IGN)
        if told.loader:
            import torch.utils.data  # noqa: F401 - ahead of the count of descriptors
        gc.collect()
        planted.plant(told.plant)
        before = acting.descriptors()
        whole(told, ledger, before)
        code = 0
    except BaseException:
        with contextlib.suppress(BaseException):
            ledger.violation("error", "the scenario: " + traceback.format_exc(limit=-12))
    with contextlib.suppress(BaseException):
        threading._shutdown()  # as an interpreter ends: join threads, then exit functions
        if not told.loader:
            atexit._clear()  # those of the host's process
        sys.stderr.flush()
    os._exit(code)


def adopt_orphans():
    """Let this process wait for the children of its children that died (Linux alone)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(36, 1)


def die_with_the_host():
    """Let the kernel kill this process when its parent dies (Linux alone)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def whole(told, ledger, before):
    """Play the scenario; see that nothing stays behind in the process."""
    actor = acting.Actor(told, ledger)
    PLAYS[told.scenario](actor)
    actor.strangers.close()
    del actor
    until = time.monotonic() + 3.0
    while True:
        gc.collect()
        # One whose start was interrupted is listed by Python for good, and does not run.
        left = [t for t in threading.enumerate() if t.name.startswith("ringmap") and t.is_alive()]
        more = [where for where in acting.descriptors() if where not in before]
        if not told.is_interrupted and not told.loader:
            left = [t for t in threading.enumerate()[1:] if not t.name.startswith(THEIRS)]
        else:  # an interrupt between open() and the line that keeps what it returned is nobody's fault
            more = []
        if (not left and not more) or time.monotonic() > until:
            break
        time.sleep(0.01)
    if left:
        frames = sys._current_frames()
        where = ["".join(traceback.format_stack(frames.get(thread.ident), 6)) for thread in left]
        ledger.violation("threads", f"still there after everything was closed: {left}\n{where}")
    if more:
        ledger.violation("descriptors", f"still open after everything was closed: {more}")


# -- the host ------------------------------------------------------------------------------------


def watch(told, pid, ledger):
    """Send signals, kill, wait; return what was wrong with how it ended."""
    rng = np.random.default_rng([told.seed, told.number, 8])
    began = time.monotonic()
    terms = sorted(rng.uniform(0.02, told.seconds, told.terms).tolist())
    used, since, looks = 0, 0.0, 0
    set_up = None
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic() - began
        if done:
            break
        if set_up is None and ledger.begun:
            set_up = now
        played = 0.0 if set_up is None else now - set_up
        if terms and played > terms[0]:
            terms.pop(0)
            os.kill(pid, signal.SIGTERM)
        if told.killed_after is not None and played > told.killed_after:
            end_group(pid)
            return []
        if now > 2 and now - looks > 0.5:
            looks, used_before, used = now, used, time_of_group(pid)
            since = now if used != used_before else since
        if now > DEADLINE_S or (since and now - since > IDLE_S):
            return hung(pid, now)
        time.sleep(0.002 if now < 1 else 0.02)
    end_group(pid)  # workers and children that it left behind
    code = os.waitstatus_to_exitcode(status)
    return [("died", f"ended with {code}")] if code not in (0, 1) else []


def end_group(pid):
    """Kill what is left of a group, and wait until all of it is gone: a child that is ending still holds the lock."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, 0)


def time_of_group(group):
    """Return the time of the processor, in ns, that the processes of a group have had."""
    used = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(pid)) == group:
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                        used += int(file.read().split()[0])
    return used


def hung(pid, now):
    """Let all threads of all processes of the round say where they are, and end them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGUSR2)
    time.sleep(1.0)
    end_group(pid)
    return [("hang", f"no end after {now:.0f} s; see the log for where its threads were")]


def judged(told, ledger):
    """Return what is wrong with what a round left."""
    found = []
    strangers = os.path.join(told.folder, "strangers")
    for name in os.listdir(strangers) if os.path.isdir(strangers) else ():
        if not name.endswith(".new") and (fault := spoiled(os.path.join(strangers, name))):
            found.append(("stranger", f"{name}: {fault}"))
    path = os.path.join(told.folder, "homes.json")
    homes = []
    if os.path.exists(path):
        with open(path) as file:
            homes = json.load(file)
    for home in homes:
        try:
            found += [] if home["path"] is None else of_home(home, ledger)
        except Exception:
            found.append(("will not open", traceback.format_exc(limit=-5)))
    entries = ledger.entries
    for entry in entries:
        kind, number, _, began, ended, how, world = entry
        if kind == SNAPSHOT and how == DONE:
            limit = next(h["max_steps"] for h in homes if h["world"] == world)
            try:
                copied, wrongs = stored(os.path.join(told.folder, f"snapshot-{number}"), "r", world)
                wrongs += faults(entries, copied, limit, world, began=ended, since=began)
                found += [(f"snapshot {judge}", text) for judge, text in wrongs]
            except Exception:
                found.append(("snapshot will not open", traceback.format_exc(limit=-5)))
    return found


def of_home(home, ledger):
    """Open a buffer as the next process would; return what is wrong with it."""
    path = home["path"]
    if not os.path.isdir(path):  # killed before it was born
        return [] if not ledger.entries else [("lost", f"{path} is gone")]
    found = []
    if home["kind"] == "episodes":
        there, found = stored(path, "r+", home["world"])
    else:
        with open(os.path.join(path, "manifest.json")) as file:
            kind = json.load(file)["kind"]
        with contextlib.closing(ReplayBuffer.open(path, "r+", kind=kind)) as buffer:
            there = [call for episode in buffer.episodes() for call in calls_of(episode)]
        found += of_other(home)
    found += faults(ledger.entries, there, home["max_steps"], home["world"], slack=home["slack"])
    if findings := ringmap.check(path):
        found.append(("check", f"{[str(f) for f in findings]}"))
    return found


def calls_of(episode):
    """Return `(number, rows)` of the calls whose rows were committed together."""
    for name in ("obs", "student_observations", "who"):
        for column, values in episode.items():
            if name in column and "next" not in column:
                numbers = np.stack(values).reshape(len(values), -1)[:, 0].astype(int)
                first = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
                counts = np.diff([*first, len(numbers)])
                return list(zip(numbers[first].tolist(), counts.tolist(), strict=True))
    raise AssertionError(list(episode))


def of_other(home):
    """Sample what another kind of buffer has; return what is wrong."""
    found = []
    for _ in range(4):
        if home["kind"] == "transitions":
            with contextlib.closing(TransitionReplayBuffer.open(home["path"], device=None, seed=1)) as buffer:
                if count := len(buffer):
                    found.append(others.wrong_transitions(buffer.sample(min(count, 256)), 1))
        elif home["kind"] == "distillation":
            with contextlib.closing(DistillationBuffer.open(home["root"], seed=1)) as buffer:
                if len(buffer):
                    found.append(others.wrong_labels(buffer.batch(256)))
    return [(f"stored {one[0]}", one[1]) for one in found if one is not None]


def stored(path, mode, world):
    """Return `(number, length)` of each stored episode, and what is wrong with them."""
    found, there = [], []
    try:
        buffer = ReplayBuffer.open(path, mode)
    except RoleError as error:
        return [], [("will not open", repr(error))]
    with contextlib.closing(buffer):
        if findings := buffer.check():
            found.append(("check", f"{[str(f) for f in findings]}"))
        if buffer.num_episodes:
            for episode in buffer.episodes():
                steps = {name: np.stack(values) for name, values in episode.items()}
                count = len(steps["step"])
                if fault := wrong(steps, world, 1):
                    found.append(("torn", f"stored: {fault}"))
                elif steps["step"][0] != 0 or steps["length"][0] != count:
                    found.append(("torn", f"stored: steps {steps['step'].tolist()} of {steps['length'][0]}"))
                there.append((int(steps["episode"][0]), count))
    return there, found


__all__ = ["PLAYS", "Result", "Told", "num_torn", "play"]
