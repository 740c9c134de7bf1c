"""Rounds: threads, forks and a replaced directory around one buffer of any kind, at random; what is left is judged.

    python -m tools.campaign.rounds --rounds 2000 --seed 1
    python -m tools.campaign.rounds --seed 1 --round 17 --times 50      one of them again

A round has a process of its own. Each row proves itself; each writing call is entered with how it ended, and from the
entries follows what may be stored. The schedule of threads is the kernel's: a seed gives the same chances, not the same
round. The last line is JSON. Not here: signal handlers, at each line (inside.py); kills (tests/faults/crash).
"""

import argparse
import collections
import contextlib
import faulthandler
import functools
import gc
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings

import numpy as np

import ringmap
from benchmarks.harness.proof import Episodes, num_torn
from ringmap import DistillationBuffer, OfflineToOnlineReplayBuffer, ReplayBuffer, TransitionReplayBuffer, Zarr
from ringmap.errors import (
    ClipIndexError,
    ClosedError,
    InputError,
    NoClipsError,
    ReadOnlyError,
    ReplacedError,
    RingmapError,
    RoleError,
    SyncFailedError,
)
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.read import reader as live_reader
from tests.disks import ram_folder
from tests.unit.buffers.processes import Child

HANGS_S, CHILD_HANGS_S, ENOUGH = 90, 20, 80
"""Seconds after which a round, or a forked child of it, hangs; calls of a round at least."""
OPEN, DONE, REFUSED = 0, 1, 2
WRITE, CLEAR, SNAPSHOT = 1, 2, 3
NEVER = 1 << 60
THEIRS = "zarr_io", "asyncio"
"""Threads of Zarr's, which stay."""
STORAGES = "memmap", Zarr("lz4", 6), {"row": Zarr("none", 16)}, {"row": Zarr("zstd", 8), "step": Zarr("lz4", 8)}


# -- what was called, and what may be stored ---------------------------------------------------------------


class Calls:
    """What was called, with ticks, so that two calls overlap exactly if neither ended before the other began.

    DONE: it is there, unless capacity or a clear took it; REFUSED: it is not; OPEN: it is there or not.
    """

    def __init__(self):
        self.entries, self._ticks = [], itertools.count(1)

    def begin(self, kind, number=0, length=0):
        """Note that a call begins; return its entry: `[kind, number, length, began, ended, how]`."""
        self.entries.append(entry := [kind, number, length, next(self._ticks), NEVER, OPEN])
        return entry

    def end(self, entry, how):
        entry[5] = how
        entry[4] = next(self._ticks)


def faults(entries, stored, max_steps, began=NEVER, since=0, slack=0):
    """Return what is wrong with the stored episodes, `(judge, text)`, if these calls were made.

    Args:
        entries: of `Calls`.
        stored: `(number, length)` of each episode, oldest first.
        max_steps: of the buffer.
        began: tick; calls that began later do not count (of a snapshot: when it returned).
        since: tick; calls that ended later than this may count or not (of a snapshot: when it began). 0: none.
        slack: rows that may be evicted together, before there is no room for one of them.
    """
    calls = [e for e in entries if e[3] < began]
    if since:
        calls = [e if e[4] <= since or e[5] == REFUSED else [*e[:4], NEVER, OPEN] for e in calls]
    writes = {e[1]: e for e in calls if e[0] == WRITE}
    clears = [e for e in calls if e[0] == CLEAR and e[5] != REFUSED]
    numbers = [number for number, _ in stored]
    wrong = []
    for number, length in stored:
        if number not in writes:
            wrong.append(("extra", f"episode {number} is stored, which no call wrote"))
        elif writes[number][5] == REFUSED:
            wrong.append(("refused", f"episode {number} is stored, but its call was refused"))
        elif writes[number][2] != length:
            wrong.append(("torn", f"episode {number} has {length} steps, of {writes[number][2]}"))
    if len(set(numbers)) != len(numbers):
        wrong.append(("twice", f"stored twice: {sorted(n for n in set(numbers) if numbers.count(n) > 1)}"))
    if wrong:
        return wrong
    there = [writes[number] for number in numbers]
    for one, two in itertools.pairwise(there):
        if two[4] < one[3]:
            wrong.append(("order", f"episode {two[1]} ended before {one[1]} began, and stands behind it"))
    total = sum(e[2] for e in there)
    if total > max_steps:
        wrong.append(("capacity", f"{total} steps are stored, of {max_steps}"))
    for clear in clears:
        before = [e[1] for e in there if e[4] < clear[3]]
        if clear[5] == DONE and before:
            wrong.append(("clear", f"{before} are stored, and a clear came after them"))
    first_end = min((e[4] for e in there), default=NEVER)
    missing = {n: e for n, e in writes.items() if n not in set(numbers) and e[5] != REFUSED}
    for write in missing.values():
        if write[5] == OPEN:
            continue
        # Neither capacity nor a clear takes it, and leaves an older one.
        is_lost = first_end < write[3]
        if not is_lost and not any(c[4] > write[3] and c[3] < first_end for c in clears):
            # What may stand behind it, and be gone as well, or have made its room and not be stored yet.
            after = sum(e[2] for e in missing.values() if e is not write and e[4] > write[3])
            is_lost = write[2] + total + after <= max_steps - slack
        if is_lost:
            wrong.append(("lost", f"episode {write[1]} of {write[2]} steps is gone: {total} of {max_steps} are stored"))
    return wrong


class Strangers:
    """Files beside the buffer that some other part of the program opens and closes all the time.

    Whoever uses a descriptor of his after it was closed hits one of them.
    """

    SIZE = 1 << 16

    def __init__(self, folder, violation):
        self.folder, self._violation, self._open, self._made = folder, violation, [], 0
        os.makedirs(folder, exist_ok=True)

    def turn(self, count=1):
        """Close the oldest, open new ones."""
        for _ in range(count):
            if len(self._open) >= 12:
                self._close(*self._open.pop(0))
            number, self._made = self._made, self._made + 1
            path = os.path.join(self.folder, str(number % 40))
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.pwrite(fd, self.content(number), 0)
            self._open.append((fd, number, os.fstat(fd).st_ino))

    def content(self, number):
        return f"stranger {number} ".encode() + bytes((number * 7 + i * 13) % 251 for i in range(256)) * 255

    def _close(self, fd, number, inode):
        try:
            same = os.fstat(fd).st_ino == inode and os.pread(fd, 2 * self.SIZE, 0) == self.content(number)
        except OSError:
            same = False
        if not same:
            self._violation("stranger", f"the file with descriptor {fd} is another one, closed, or was written into")
            return
        os.close(fd)

    def close(self):
        while self._open:
            self._close(*self._open.pop())


# -- buffers: each makes calls that are entered, and reads that are proved ---------------------------------


class Home:
    """A buffer, in RAM or in a directory, and the handle that writes it. One class for each kind."""

    world = slack = calls = 0
    refused = (NoClipsError, ClipIndexError)  # LappedError is a NoClipsError

    def __init__(self, round, in_ram=False):
        self.round, self.calls_made, self.in_ram = round, round.calls, in_ram
        self.path = os.path.join(round.folder, "buf")
        self.numbers, self.snapshots, self.gone = itertools.count(), itertools.count(), False
        """`gone`: the directory was replaced, or may be in the middle of a call."""
        self.draw(round.rng)
        self.buffer = self.opened()

    @property
    def place(self):
        return {} if self.in_ram else {"path": self.path}

    def entered(self, kind, number, length, call, more=()):
        """Make a writing call, and enter how it ended; return its error unless it returned."""
        entry = self.calls_made.begin(kind, number, length)
        error = self.plain(call, more)
        how = DONE if error is None else REFUSED if isinstance(error, (RoleError, *more)) else OPEN
        self.calls_made.end(entry, how)
        return error

    def plain(self, call, refused=()):
        """Make a call; return its error unless it returned. What it may not raise is a violation."""
        self.round.tallies["calls"] += 1
        try:
            call()
        except (RoleError, *refused) as error:
            self.round.tallies["refused"] += 1
            return error
        except Exception as error:
            if not (self.gone and isinstance(error, RingmapError | OSError)):
                self.round.violation("error", traceback.format_exc(limit=-10))
            return error
        return None

    def flush(self, rng):
        return self.plain(self.buffer.flush)

    def close(self):
        return self.plain(self.buffer.close)

    def look(self, rng, buffer=None):
        """Read in one way or another, and prove it; return the error, if it may be raised."""
        return self.plain(functools.partial(self.read, rng, self.buffer if buffer is None else buffer), self.refused)

    def read(self, rng, buffer):
        self.prove(self.sample(buffer, int(rng.integers(1, 33))))

    def prove(self, batch):
        self.round.tallies["reads"] += 1
        if wrong := self.wrong(batch):
            self.round.violation(*wrong)

    def others(self):
        """Return what else threads do with it, by name."""
        return {"flush": self.flush}

    def stored(self):
        """Return `(number, length)` of all that a process finds that opens it next; prove it."""
        with open(os.path.join(self.path, "manifest.json")) as file:
            kind = json.load(file)["kind"]
        with contextlib.closing(ReplayBuffer.open(self.path, "r+", kind=kind)) as buffer:
            return [call for episode in buffer.episodes() for call in self.calls_of(episode)]


class Whole(Home):
    """Episodes that prove themselves."""

    longest = 24

    def draw(self, rng):
        self.max_steps, self.words = int(rng.integers(100, 400)), int(rng.choice([4, 16, 128]))
        self.prioritized = rng.random() < 0.3
        self.settings = {
            "history_len": int(rng.integers(1, 4)),
            "spare_rows": 64,
            "seed": int(rng.integers(1 << 30)),
            "storage": STORAGES[rng.integers(len(STORAGES))],
            "durability": "power" if rng.random() < 0.25 else "process",
            "sync_every_s": float(rng.choice([0, 0.01, 30.0])),
            "reads": str(rng.choice(["map", "pread"])),
        }

    def opened(self):
        sampler = PrioritizedSampler(rng=0) if self.prioritized else None
        return ReplayBuffer(self.max_steps, sampler=sampler, **self.place, **self.settings)

    def reader(self):
        options = {name: self.settings[name] for name in ("reads", "history_len")}
        return ReplayBuffer.open(self.path, seed=0, **options)

    def episode(self, rng):
        number, length = next(self.numbers) + self.world * 1_000_000, int(rng.integers(3, self.longest))
        return number, length, Episodes(self.words, length)(number, length)

    def write(self, rng):
        number, length, data = self.episode(rng)
        return self.entered(WRITE, number, length, lambda: self.buffer.write_episode(data))

    def stream(self, rng):
        """Record an episode step by step; abandoned if a step of it was refused."""
        number, length, data = self.episode(rng)

        def record():
            episode = self.buffer.begin_episode()
            try:
                for t in range(length):
                    episode.append({name: values[t] for name, values in data.items()})
                episode.finish()
            except RoleError:
                with contextlib.suppress(RoleError):
                    episode.abandon()
                raise

        return self.entered(WRITE, number, length, record)

    def clear(self, rng):
        return self.entered(CLEAR, 0, 0, lambda: self.buffer.clear())

    def snapshot(self, rng):
        if (number := next(self.snapshots)) >= 3:
            return None
        path = os.path.join(self.round.folder, f"snapshot-{number}")
        return self.entered(SNAPSHOT, number, 0, lambda: self.buffer.snapshot(path), (NoClipsError,))

    def update(self, rng):
        """Give the clips of a batch other priorities."""
        ids = getattr(self.buffer.sampler, "ids", ())
        # InputError: nothing was drawn yet with this sampler since another thread opened the buffer again.
        update = functools.partial(self.buffer.update_priorities, ids, rng.random(len(ids)))
        return self.plain(update, (InputError,)) if len(ids) else None

    def others(self):
        return {name: getattr(self, name) for name in ("flush", "clear", "snapshot", "update", "stream")}

    def read(self, rng, buffer):
        size, kind = int(rng.integers(1, 33)), int(rng.integers(9))
        if kind < 3:
            self.prove(buffer.sample(size))
        elif kind == 3:
            self.prove(buffer[int(rng.integers(60))], 1)
        elif kind == 4:
            self.prove(buffer[rng.integers(0, 60, size)])
        elif kind == 5:
            self.prove(buffer.load_episode(int(rng.integers(-3, 3))), 1)
        elif kind == 6:
            self.prove(buffer.get_row_data(rng.integers(0, 60, size)), 0)
        elif kind == 7:
            numbers = []
            for episode in itertools.islice(buffer.episodes(), 6):
                self.prove(steps := {name: np.stack(values) for name, values in episode.items()}, 1)
                numbers.append(int(steps["episode"][0]))
            if len(numbers) != len(set(numbers)):
                self.round.violation("twice", f"episodes(): {numbers}")
        else:
            with contextlib.closing(buffer.batches(8, steps=3, prefetch=int(rng.integers(0, 3)))) as batches:
                for batch in batches:
                    self.prove(batch)

    def sample(self, buffer, size):
        return buffer.sample(size)

    def prove(self, batch, axes=2):
        """`axes` are ahead of a row's shape: 2 of clips, 1 of a clip or an episode, 0 of single rows."""
        self.round.tallies["reads"] += 1
        if wrong := self.wrong(batch, axes):
            self.round.violation(*wrong)

    def wrong(self, batch, axes=2):
        rows = {name: np.asarray(values) for name, values in batch.items()}
        if sorted(rows) != ["episode", "length", "row", "step"]:
            return "torn", f"columns {sorted(rows)}"
        if axes < 2:
            rows = {name: values[None] if axes else values[:, None] for name, values in rows.items()}
        if torn := num_torn(rows):
            return "torn", f"{torn} of {len(rows['step'])}: {rows['episode'][:6].tolist()} {rows['step'][:6].tolist()}"
        if (strange := rows["episode"] // 1_000_000 != self.world).any():
            return "mixed", f"episodes of another buffer: {sorted(set(rows['episode'][strange].tolist()))[:6]}"
        return None

    def calls_of(self, episode):
        steps = {name: np.stack(values) for name, values in episode.items()}
        if wrong := self.wrong(steps, 1):
            self.round.violation(wrong[0], f"stored: {wrong[1]}")
        return [(int(steps["episode"][0]), len(steps["step"]))]


class Another(Whole):
    """The buffer that takes the place of the first one."""

    world = 1


def key(call, lane):
    return (call * 2654435761 + lane * 40503) % 1_000_003


def observed(call, lanes, final):
    """Return the observations of a call: `[call, lane, whether it is the last of an episode, key]`."""
    lane = np.arange(lanes)
    columns = np.full(lanes, call), lane, final * np.ones(lanes), key(call, lane) + 0.5 * final
    return np.stack(columns, 1).astype(np.float64)


def flags(call, lane):
    """Return whether a step ends its episode, and whether it cuts it off."""
    return (call + 3 * lane) % 11 == 0, (call + 5 * lane) % 13 == 0


class Rows(Home):
    """Rows: a call writes one for each environment."""

    column = "obs"

    def draw(self, rng):
        self.capacity, self.lanes = int(rng.integers(64, 300)), int(rng.integers(1, 9))

    def opened(self):
        buffer = self.made(self.round.rng)
        ring = buffer._ring.buffer
        self.max_steps, self.slack = ring.max_steps, ring.engine.owned.manifest.spare
        if not self.in_ram:
            self.path = str(ring.path)
        return buffer

    def write(self, rng):
        call = next(self.numbers)
        return self.entered(WRITE, call, self.lanes, lambda: self.add(call))

    def sample(self, buffer, size):
        return buffer.sample(size)

    def calls_of(self, episode):
        """Return `(number, rows)` of the calls whose rows were committed together."""
        (values,) = (v for name, v in episode.items() if self.column in name and "next" not in name)
        numbers = np.stack(values).reshape(len(values), -1)[:, 0].astype(int)
        firsts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
        return list(zip(numbers[firsts].tolist(), np.diff([*firsts, len(numbers)]).tolist(), strict=True))


class Transitions(Rows):
    def made(self, rng):
        self.n_step = int(rng.choice([1, 1, 3]))
        options = {
            "storage": str(rng.choice(["memmap", "memmap", "zarr"])),
            "durability": "power" if rng.random() < 0.25 else "process",
            "sync_every_s": float(rng.choice([0, 0.01])),
            "seed": int(rng.integers(1 << 30)),
        }
        sizes = {"device": None, "obs_dtype": np.float64, "n_step": self.n_step, "gamma": 0.5}
        return TransitionReplayBuffer(self.capacity, (4,), (), **sizes, **options, **self.place)

    def add(self, call):
        lane = np.arange(self.lanes)
        done, cut = flags(call, lane)
        after = observed(call + 1, self.lanes, (done | cut).astype(np.float64))
        rewards = np.full(self.lanes, call, np.float32)
        self.buffer.add(observed(call, self.lanes, 0.0), lane, rewards, after, done, truncated=cut)

    def sample(self, buffer, size):
        try:
            return buffer.sample(size)
        except InputError as error:
            if "are stored" in str(error):  # more was asked for than there is
                raise NoClipsError(str(error)) from error
            raise

    def others(self):
        def clear(rng):
            entry = self.calls_made.begin(CLEAR)
            self.calls_made.end(entry, DONE if self.plain(self.buffer.clear) is None else OPEN)

        return {**super().others(), "clear": clear}

    def wrong(self, batch):
        now, then = batch["observations"], batch["next_observations"]
        call, lane = now[:, 0].astype(np.int64), now[:, 1].astype(np.int64)
        good = (now[:, 2] == 0) & (now[:, 3] == key(call, lane)) & (batch["actions"] == lane)
        if not good.all():
            return "torn", f"transitions {now[~good][:4].tolist()}"
        last = then[:, 0].astype(np.int64) - 1
        done, cut = flags(last, lane)
        right = (then[:, 1] == lane) & (then[:, 2] == (done | cut)) & (batch["dones"] == done)
        right &= then[:, 3] == key(last + 1, lane) + 0.5 * (done | cut)
        right &= (last >= call) & (last < call + self.n_step)
        if self.n_step == 1:
            right &= batch["rewards"] == call.astype(np.float32)
        if not right.all():
            return "successor", f"{(~right).sum()} of {len(now)}: {now[~right][:4]} led to {then[~right][:4]}"
        return None


class Labels(Rows):
    def made(self, rng):
        options = {"seed": int(rng.integers(1 << 30)), "sync_every_s": float(rng.choice([0, 0.01]))}
        buffer = DistillationBuffer(self.capacity, retention="fifo", obs_shape=(4,), **options, **self.place)
        buffer.start_round()
        return buffer

    def add(self, call):
        lane, rounds = np.arange(self.lanes), np.full(self.lanes, self.buffer.round)
        labels = np.stack([key(call, lane), rounds], 1).astype(np.int64)
        self.buffer.add(observed(call, self.lanes, 0.0), labels, dones=(call + 3 * lane) % 5 == 0)

    def sample(self, buffer, size):
        return buffer.batch(size)

    def relabel(self, rng):
        if rng.random() < 0.2:
            self.plain(self.buffer.start_round)

        def teach(rows):
            seen = rows["student_observations"]
            call, lane = seen[:, 0].astype(np.int64), seen[:, 1].astype(np.int64)
            return np.stack([key(call, lane), np.full(len(call), self.buffer.round)], 1)

        newest = self.buffer._ring.buffer.engine.owned.head
        self.plain(lambda: self.buffer.relabel(np.arange(max(0, newest - 20), newest) if self.in_ram else None, teach))

    def others(self):
        return {**super().others(), "relabel": self.relabel}

    def wrong(self, batch):
        seen, label = batch["student_observations"], batch["teacher_actions"]
        call, lane = seen[:, 0].astype(np.int64), seen[:, 1].astype(np.int64)
        if not (seen[:, 3] == key(call, lane)).all():
            return "torn", f"rows {seen[:4].tolist()}"
        if not ((label[:, 0] == key(call, lane)) & (label[:, 1] == batch["label_round"])).all():
            return "label", f"{seen.tolist()} has {label.tolist()}, of round {batch['label_round'].tolist()}"
        return None


class Halves(Rows):
    column = "who"

    def made(self, rng):
        offline, lane = ReplayBuffer(200), np.arange(100)
        offline.write_episode({"who": np.stack([np.full(100, -1), lane, key(-1, lane)], 1).astype(np.float64)})
        self.fraction = float(rng.choice([0.25, 0.5]))
        options = {"offline_fraction": self.fraction, "provenance": "is_offline", "seed": int(rng.integers(1 << 30))}
        return OfflineToOnlineReplayBuffer(offline, online_capacity=self.capacity, **options, **self.place)

    def add(self, call):
        lane = np.arange(self.lanes)
        self.buffer.extend({"who": np.stack([np.full(self.lanes, call), lane, key(call, lane)], 1).astype(np.float64)})

    def wrong(self, batch):
        who, offline = batch["who"].reshape(-1, 3), batch["is_offline"].reshape(-1)
        call, lane = who[:, 0].astype(np.int64), who[:, 1].astype(np.int64)
        if not (who[:, 2] == key(call, lane)).all():
            return "torn", f"rows {who[:4].tolist()}"
        if ((call == -1) != offline).any() or offline.sum() not in (round(self.fraction * len(who)), len(who)):
            return "half", f"{offline.sum()} of {len(who)} are called offline, {(call == -1).sum()} are"
        return None


KINDS = {"episodes": (Whole, 10), "transitions": (Transitions, 3), "distillation": (Labels, 1), "online": (Halves, 1)}


# -- a round -----------------------------------------------------------------------------------------------


class Round:
    """One round: threads around a buffer, until enough was done; then it is closed, opened again and judged."""

    def __init__(self, seed, number, folder, kinds=tuple(KINDS)):
        self.rng, self.number, self.seed = np.random.default_rng([seed, number]), number, seed
        weights = np.array([KINDS[name][1] for name in kinds], float)
        self.kind = str(self.rng.choice(kinds, p=weights / weights.sum()))
        self.seconds, self.folder = float(self.rng.uniform(0.1, 0.45)), os.path.join(folder, str(number))
        self.violations, self.tallies, self.calls = [], collections.Counter(), Calls()
        self.threads, self.stop = [], threading.Event()

    def violation(self, judge, text):
        """Note that something is wrong; `judge` is what noticed it."""
        if len(self.violations) < 20:
            self.violations.append((judge, text[:6000]))

    def play(self, plant=None):
        """Play it in this process, with a bug planted; return the home, what is wrong, and the tallies."""
        # Not by faulthandler's own timer, whose thread, of pytest, a fork does not have.
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(HANGS_S)
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork of a process with threads
        sys.unraisablehook = lambda what: self.violation("stderr", f"{what.exc_value!r} in {what.object!r}")
        live_reader.HELD_S = 0.0  # a reader looks at its path with each call
        gc.collect()
        before = descriptors()
        if plant is not None:
            plant()
        os.makedirs(self.folder)
        try:
            self._play()
        except Exception:
            self.violation("error", f"the round: {traceback.format_exc(limit=-12)}")
        self._see_what_stays(before)
        signal.alarm(0)
        home = self.home
        told = home.path, home.max_steps, home.slack, home.in_ram or home.gone
        return told, self.calls.entries, self.violations, +self.tallies

    def _play(self):
        rng = self.rng
        self.home = home = KINDS[self.kind][0](self, in_ram=rng.random() < 0.3)
        self.strangers = Strangers(os.path.join(self.folder, "strangers"), self.violation)
        for _ in range(int(rng.integers(1, 30))):
            home.write(rng)
        is_whole = type(home) is Whole
        reader = home.reader() if is_whole and not home.in_ram and rng.random() < 0.6 else None
        self.until = time.monotonic() + self.seconds
        self.begun_with = self.tallies["calls"]
        self._start("writer", home.write)
        for i in range(int(rng.integers(1, 4))):
            self._start(f"sampler {i}", home.look)
        if reader is not None:
            self._start("reader", lambda rng: home.look(rng, reader))
        others = home.others()
        for name in rng.permutation(sorted(others))[: int(rng.integers(0, 3))]:
            self._start(str(name), others[name], float(rng.uniform(0.001, 0.03)))
        self._start("strangers", lambda rng: self.strangers.turn(2), 0.0002)
        reopens, forks = is_whole and not home.in_ram and rng.random() < 0.6, rng.random() < 0.4
        while not self.over:
            time.sleep(float(rng.uniform(0.005, 0.08)))
            if forks:
                for child in [Child(self._in_a_child(reader)) for _ in range(int(rng.integers(1, 4)))]:
                    self._end_of(child)
            if reopens:  # under the hands of the others
                home.close()
                home.buffer = home.opened()
        if is_whole and not home.in_ram and rng.random() < 0.3:
            self._replace(reader)
        elif rng.random() < 0.5:
            home.close()
        self._join()
        home.close()
        if reader is not None:
            home.plain(reader.close)
        self.strangers.close()

    @property
    def over(self):
        """Whether the time is over, and enough was done: on a busy machine a thread may get none of it."""
        late = time.monotonic() - self.until
        return late > 6 or (late > 0 and self.tallies["calls"] - self.begun_with > ENOUGH)

    def _start(self, name, turn, pause=0.0):
        """Call `turn(rng)` time after time in a thread, until the round is over."""
        rng = np.random.default_rng([self.seed, self.number, sum(name.encode())])

        def run():
            try:
                while not self.stop.is_set():
                    error = turn(rng)
                    if isinstance(error, ClosedError) or pause:
                        time.sleep(pause or 0.001)
            except BaseException:
                self.violation("error", f"{name}: {traceback.format_exc(limit=-8)}")

        self.threads.append(threading.Thread(target=run, name=name))
        self.threads[-1].start()

    def _join(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def _in_a_child(self, reader):
        """Return what a forked child does: it samples five batches, and is refused to write."""
        self.tallies["forks"] += 1
        home = self.home

        def work(_):
            signal.alarm(CHILD_HANGS_S)
            self.violations.clear()
            drawn = 0
            for _ in range(200):
                with contextlib.suppress(*home.refused, ClosedError):
                    home.prove(home.sample(home.buffer if reader is None else reader, 16))
                    drawn += 1
                if drawn == 5:
                    break
            if type(home) is Whole and drawn:
                try:
                    home.buffer.write_episode(home.episode(self.rng)[2])
                except (ReadOnlyError, ClosedError):
                    pass
                else:
                    self.violation("child", "a forked child could write")
            return self.violations

        return work

    def _end_of(self, child):
        try:
            self.violations += [("child", f"{judge}: {text}") for judge, text in child.result()]
        except EOFError:
            self.violation("hang", "a forked child that sampled hung or died")
        except AssertionError as error:
            self.violation("child", str(error))

    def _replace(self, reader):
        """Remove or rename the directory, with or without another one in its place; the old handles go on."""
        rng, home = self.rng, self.home
        home.gone, how = True, str(rng.choice(["removed", "renamed", "removed, made anew", "renamed, made anew"]))
        if how.startswith("removed"):
            shutil.rmtree(home.path, ignore_errors=True)
        else:
            os.rename(home.path, home.path + "-moved")
        self._join()  # some of them were in the middle of a call
        if how.startswith("removed"):  # which may have put files into what was being removed
            shutil.rmtree(home.path, ignore_errors=True)
        if how.endswith("anew"):
            os.mkdir(home.path)
            other = Another(Round(self.seed, self.number, self.folder))
            for _ in range(12):
                other.write(rng)
            other.buffer.close()
        self.tallies["replaced"] += 1
        before = bytes_in(home.path)
        calls = home.write, home.flush, home.stream, home.clear, home.look, home.write, home.flush
        errors = [call(rng) for call in calls]
        # A call in the middle of whose sync it was replaced left the handle refused for that.
        if how != "renamed" and not any(isinstance(error, ReplacedError | SyncFailedError) for error in errors):
            self.violation("went on", f"{how}: writes, flush, clear: no ReplacedError, but {errors}")
        if reader is not None and how != "renamed":
            looks = [home.plain(functools.partial(reader.__getitem__, i), home.refused) for i in range(60)]
            if looks[-1] is None and not any(isinstance(error, ReplacedError) for error in looks):
                self.violation("stale", f"{how}: a reader never raised ReplacedError: {looks[-1]!r}")
        home.close()
        after = bytes_in(home.path)
        if changed := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
            self.violation("replaced", f"{how}: in the new buffer these files were changed: {changed}")

    def _see_what_stays(self, before):
        """See that no thread and no descriptor stays behind in the process."""
        until = time.monotonic() + 3.0
        while True:
            gc.collect()
            left = [t for t in threading.enumerate()[1:] if not t.name.startswith(THEIRS)]
            more = [where for where in descriptors() if where not in before]
            if not (left or more) or time.monotonic() > until:
                break
            time.sleep(0.01)
        if left or more:
            self.violation("stays", f"after everything was closed: threads {left}, files {more}")


def descriptors():
    """Return the files that this process has open: their paths."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in paths if path.startswith("/") and not path.startswith("/proc")]


def bytes_in(path):
    """Return name -> content of all files."""
    files = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                files[os.path.relpath(file.name, path)] = file.read()
    return files


def judge(round, path, max_steps, slack):
    """Open what a round left, as the next process would; return what is wrong with it."""
    home = KINDS[round.kind][0].__new__(KINDS[round.kind][0])
    home.round, home.path = round, path
    for at, entry in [(path, None), *((None, e) for e in round.calls.entries if e[0] == SNAPSHOT and e[5] == DONE)]:
        home.path = at or os.path.join(round.folder, f"snapshot-{entry[1]}")
        times = {"began": entry[4], "since": entry[3]} if entry else {"slack": slack}
        try:
            if problems := ringmap.check(home.path):
                round.violation("check", f"{home.path}: {[str(one) for one in problems]}")
            for one in faults(round.calls.entries, home.stored(), max_steps, **times):
                round.violation(*one)
        except Exception:
            round.violation("will not open", f"{home.path}: {traceback.format_exc(limit=-5)}")
    return round.violations


def run(seed, number, folder, kinds=tuple(KINDS), plant=None):
    """Play a round and judge it, each in a process of its own; return it. `plant`: called first, plants a bug."""
    round = Round(seed, number, folder, kinds)
    try:
        (path, *sizes, nothing), entries, violations, tallies = Child(lambda _: round.play(plant)).result()
    except EOFError:
        round.violation("hang", f"no end after {HANGS_S} s, or it died; where its threads were is on stderr")
        return round
    round.calls.entries, round.violations, round.tallies = entries, violations, tallies
    if not nothing:
        round.violations = Child(lambda _: judge(round, path, *sizes)).result()
    if not round.violations:
        shutil.rmtree(round.folder, ignore_errors=True)
    return round


def main(words=None):
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.rounds", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of buffers")
    parser.add_argument("--round", type=int, help="this one alone, --times")
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args(words)
    began, totals, first = time.monotonic(), collections.Counter(), None
    with ram_folder() as folder:
        for i in range(options.rounds if options.round is None else options.times):
            if time.monotonic() - began > 60 * options.minutes:
                break
            number = i if options.round is None else options.round
            round = run(options.seed, number, str(folder), tuple(options.only.split(",")))
            totals.update({"rounds": 1, f"rounds of {round.kind}": 1, "violating": bool(round.violations)})
            totals.update(round.tallies)
            if round.violations:
                again = f"python -m tools.campaign.rounds --seed {options.seed} --round {number} --times 20"
                text = "\n".join(f"  {judge}: {text}" for judge, text in round.violations[:8])
                text = f"VIOLATION, round {number}, {round.kind}: {again}\n{text}"
                print(text, flush=True)
                first = first or text
                shutil.rmtree(round.folder, ignore_errors=True)
    print(json.dumps({**totals, "seconds": int(time.monotonic() - began), "violation": first}))
    return int(first is not None)


if __name__ == "__main__":
    sys.exit(main())
