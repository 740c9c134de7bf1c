"""What the scenarios share: a buffer's home, calls that are entered in the ledger, reads that are proved."""

import contextlib
import itertools
import json
import os
import sys
import threading
import time
import traceback

import numpy as np

from ringmap import ReplayBuffer, Zarr
from ringmap.errors import (
    ClipIndexError,
    ClosedError,
    InputError,
    NoClipsError,
    ReplacedError,
    RingmapError,
    RoleError,
)
from ringmap.samplers import PrioritizedSampler
from tools.campaign.edges.ledger import CLEAR, DONE, OPEN, REFUSED, SNAPSHOT, WRITE
from tools.campaign.edges.proof import WORLD, Strangers, made, wrong

MAY_RAISE = ClosedError, NoClipsError, ClipIndexError  # LappedError is a NoClipsError
LONGEST = 24
ENOUGH = 80
"""Calls of a round."""
STORAGES = (
    "memmap",
    "memmap",
    "memmap",
    Zarr("lz4", 6),
    {"row": Zarr("none", 16)},
    {"row": Zarr("zstd", 8), "step": Zarr("lz4", 8)},
)


class Raised(KeyboardInterrupt):
    """Raised by a signal handler: Ctrl-C."""


class Ended(SystemExit):
    """Raised by a signal handler: an orderly end."""


class Actor:
    """One round's process: its generator, its ledger, its folder, and when it has to be done.

    Args:
        told: the round: number, scenario, folder.
        ledger: shared with the host.
    """

    def __init__(self, told, ledger):
        self.told, self.ledger, self.folder = told, ledger, told.folder
        self.rng = np.random.default_rng([told.seed, told.number])
        self.strangers = Strangers(os.path.join(told.folder, "strangers"), ledger)
        self.numbers = itertools.count()  # of episodes: `next` is one instruction
        self.stop = threading.Event()
        self.until, self.latest = 0.0, 0.0
        self.threads = []
        self.homes = []
        self.snapshots = itertools.count()

    def keep(self):
        """Let the host know which buffers to judge."""
        told = [
            {
                "kind": h.kind,
                "path": None if h.in_ram else h.lies_at,
                "root": h.path,
                "world": h.world,
                "max_steps": h.max_steps,
                "slack": h.slack,
            }
            for h in self.homes
        ]
        path = os.path.join(self.folder, "homes.json")
        with open(path + ".new", "w") as file:
            json.dump(told, file)
        os.replace(path + ".new", path)

    # -- chance ------------------------------------------------------------------------------

    def chance(self, probability):
        return self.rng.random() < probability

    def pick(self, items, weights=None):
        p = None if weights is None else np.array(weights) / sum(weights)
        return items[int(self.rng.choice(len(items), p=p))]

    def fork(self, name):
        """Return a generator of its own for a thread or a child."""
        return np.random.default_rng([self.told.seed, self.told.number, sum(name.encode())])

    def begin(self):
        """Let the time of the round begin: all is set up."""
        self.until = time.monotonic() + self.told.seconds
        self.latest = self.until + 6.0
        self.done_before = self.ledger.done
        self.ledger.tally("begun")

    @property
    def over(self):
        """Whether the time is over, and enough was done: on a busy machine a thread may get none of it."""
        now = time.monotonic()
        if self.stop.is_set() or now > self.latest:
            return True
        return now > self.until and self.ledger.done - self.done_before > ENOUGH

    # -- threads -----------------------------------------------------------------------------

    def start(self, name, turn, *args):
        """Call `turn(rng, *args)` time after time in a thread, until the round is over or it returns True."""
        rng = self.fork(name)

        def run():
            try:
                while not self.over and not turn(rng, *args):
                    pass
            except BaseException:
                self.ledger.violation("error", f"{name}: {traceback.format_exc(limit=-8)}")

        thread = threading.Thread(target=run, name=name)
        thread.start()
        self.threads.append(thread)

    def join(self):
        for thread in self.threads:
            thread.join()
        self.threads.clear()

    # -- reads -------------------------------------------------------------------------------

    def read(self, what, call, world, axes=2, allowed=MAY_RAISE):
        """Make a call that reads; prove what it returns. Return its error, if it may raise that."""
        try:
            batch = call()
        except allowed as error:
            self.ledger.tally("reads refused")
            return error
        except (Raised, Ended):
            raise
        except Exception:
            self.ledger.violation("error", f"{what}: {traceback.format_exc(limit=-8)}")
            return None
        self.ledger.tally("reads")
        self.proved(what, batch, world, axes)
        return None

    def proved(self, what, batch, world, axes):
        if not batch:
            self.ledger.violation("torn", f"{what}: returned {batch!r}")
            return
        self.ledger.tally("read rows", len(batch["step"]))
        if fault := wrong(batch, world, axes):
            self.ledger.violation("mixed" if "another buffer" in fault else "torn", f"{what}: {fault}")


class Caller:
    """What makes calls, and notes in `ledger` what came of them."""

    def plain(self, what, call, refused=(RoleError,)):
        """Make a call that stores nothing; return its error unless it returned."""
        try:
            call()
        except refused as error:
            return error
        except (Raised, Ended):
            raise
        except Exception as error:
            self.ledger.violation("error", f"{what}: {traceback.format_exc(limit=-10)}")
            return error
        return None


class Home(Caller):
    """A buffer's directory, or RAM, and the handle that writes it."""

    slack = 0

    def __init__(self, actor, name="buf", world=0, **settings):
        rng = actor.rng
        self.actor, self.ledger, self.world = actor, actor.ledger, world
        self.path = self.lies_at = os.path.join(actor.folder, name)
        like = settings.pop("like", None)
        self.max_steps = int(rng.integers(100, 400)) if like is None else like.max_steps
        self.in_ram = settings.pop("in_ram", False)
        self.words = int(actor.pick([4, 16, 128])) if like is None else like.words
        self.patient = False
        """Whether the directory may be replaced in the middle of the call under way: then anything clear may be
        raised."""
        self.settings = {
            "history_len": int(rng.integers(1, 4)),
            "spare_rows": 64,
            "seed": int(rng.integers(1 << 30)),
            "storage": actor.pick(STORAGES),
            "durability": actor.pick(["process", "power"], [3, 1]),
            "sync_every_s": float(actor.pick([0, 0.01, 30.0])),
            "reads": actor.pick(["map", "pread"]),
        }
        self.prioritized = settings.pop("prioritized", False)
        self.settings |= settings
        self.buffer = self.opened()
        actor.homes.append(self)
        actor.keep()

    kind = "episodes"

    def moved_to(self, path):
        """Take note that the directory was renamed by us."""
        self.lies_at = path
        self.actor.keep()

    def gone(self):
        """Take note that the directory was removed."""
        self.lies_at = None
        self.actor.keep()

    def opened(self):
        sampler = PrioritizedSampler(rng=0) if self.prioritized else None
        path = None if self.in_ram else self.path
        return ReplayBuffer(self.max_steps, path=path, sampler=sampler, **self.settings)

    def reader(self):
        """Open a live reader."""
        return ReplayBuffer.open(
            self.path,
            seed=0,
            reads=self.settings["reads"],
            history_len=self.settings["history_len"],
        )

    # -- calls in the ledger -----------------------------------------------------------------

    def entered(self, kind, what, call, number=0, length=0, refused=()):
        """Make a writing call, and enter how it ended; return its error unless it returned."""
        entry = self.ledger.begin(kind, number, length, self.world)
        how = OPEN
        try:
            call()
            how = DONE
        except (RoleError, *refused) as error:
            how = REFUSED
            return error
        except (Raised, Ended):
            raise
        except Exception as error:
            if not (self.patient and isinstance(error, RingmapError | OSError)):
                self.ledger.violation("error", f"{what}: {traceback.format_exc(limit=-10)}")
            return error
        finally:
            self.ledger.end(entry, how)
        return None

    def episode(self, rng):
        number = next(self.actor.numbers) + self.world * WORLD
        length = int(rng.integers(3, LONGEST))
        return number, length, made(number, length, self.words)

    def write(self, rng, buffer=None):
        number, length, data = self.episode(rng)
        buffer = self.buffer if buffer is None else buffer
        error = self.entered(WRITE, "write_episode", lambda: buffer.write_episode(data), number, length)
        self.ledger.tally("writes" if error is None else "writes refused")
        return error

    def stream(self, rng, buffer=None, between=lambda: None):
        """Record an episode step by step; abandoned if a step of it was refused."""
        number, length, data = self.episode(rng)
        buffer = self.buffer if buffer is None else buffer

        def record():
            episode = buffer.begin_episode()
            try:
                for t in range(length):
                    episode.append({name: values[t] for name, values in data.items()})
                    between()
                episode.finish()
            except RoleError:
                with contextlib.suppress(RoleError):
                    episode.abandon()
                raise

        self.ledger.tally("streams")
        return self.entered(WRITE, "begin_episode, append, finish", record, number, length)

    def clear(self, rng, buffer=None):
        buffer = self.buffer if buffer is None else buffer
        self.ledger.tally("clears")
        return self.entered(CLEAR, "clear", buffer.clear)

    def snapshot(self, rng, buffer=None):
        number = next(self.actor.snapshots)
        if number >= 3:
            return None
        buffer = self.buffer if buffer is None else buffer
        path = os.path.join(self.actor.folder, f"snapshot-{number}")
        self.ledger.tally("snapshots")
        return self.entered(SNAPSHOT, "snapshot", lambda: buffer.snapshot(path), number, refused=(NoClipsError,))

    def flush(self, rng, buffer=None):
        buffer = self.buffer if buffer is None else buffer
        self.ledger.tally("flushes")
        return self.plain("flush", buffer.flush)

    def close(self, buffer=None):
        error = self.plain("close", (self.buffer if buffer is None else buffer).close)
        self.ledger.tally("closes" if error is None else "closes refused")
        return error

    # -- reads -------------------------------------------------------------------------------

    def look(self, rng, buffer=None, allowed=MAY_RAISE, threads=True):
        """Read in one way or another; return the error, if it may be raised.

        `threads`: whether in ways that wait for another thread, too: not in a handler, which may have interrupted
        what that thread would wait for.
        """
        buffer = self.buffer if buffer is None else buffer
        kind = int(rng.integers(9 if threads else 8))
        size = int(rng.integers(1, 33))
        read, world = self.actor.read, self.world
        if kind <= 2:
            return read("sample", lambda: buffer.sample(size), world, allowed=allowed)
        if kind == 3:
            return read("buffer[i]", lambda: buffer[int(rng.integers(0, 60))], world, 1, allowed)
        if kind == 4:
            return read("buffer[[...]]", lambda: buffer[rng.integers(0, 60, size)], world, 2, allowed)
        if kind == 5:
            return read(
                "load_episode",
                lambda: buffer.load_episode(int(rng.integers(-3, 3))),
                world,
                1,
                allowed,
            )
        if kind == 6:
            return read(
                "get_row_data",
                lambda: buffer.get_row_data(rng.integers(0, 60, size)),
                world,
                0,
                allowed,
            )
        several = self.few_episodes if kind == 7 else self.few_batches
        return self.plain_read(several, rng, buffer, allowed)

    def plain_read(self, several, rng, buffer, allowed):
        try:
            several(rng, buffer)
        except allowed as error:
            self.ledger.tally("reads refused")
            return error
        except (Raised, Ended):
            raise
        except Exception:
            self.ledger.violation("error", f"{several.__name__}: {traceback.format_exc(limit=-8)}")
        return None

    def few_episodes(self, rng, buffer):
        """Go through some of `episodes()`."""
        last = -1
        for episode in itertools.islice(buffer.episodes(), 6):
            steps = {name: np.stack(values) for name, values in episode.items()}
            self.actor.proved("episodes()", steps, self.world, 1)
            number = int(steps["episode"][0])
            if number <= last and not self.actor.told.unordered:
                self.ledger.violation("order", f"episodes(): {number} behind {last}")
            last = number

    def few_batches(self, rng, buffer):
        """Go through some of `batches()`."""
        with contextlib.closing(buffer.batches(8, steps=3, prefetch=int(rng.integers(0, 3)))) as batches:
            for batch in batches:
                self.actor.proved("batches()", batch, self.world, 2)

    def update(self, rng, buffer=None):
        """Give the clips of a batch other priorities."""
        buffer = self.buffer if buffer is None else buffer
        sampler = buffer.sampler
        if not hasattr(sampler, "ids") or not len(sampler.ids):
            return None
        self.ledger.tally("updates")
        ids = sampler.ids
        values = rng.random(len(ids))
        # InputError: nothing was drawn yet with this sampler since another thread opened the buffer again.
        refused = RoleError, InputError
        return self.plain("update_priorities", lambda: buffer.update_priorities(ids, values), refused)


def descriptors():
    """Return the files that this process has open: their paths."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [where for where in found if where.startswith("/") and not where.startswith("/proc")]


def leave(code):
    """End a forked child as an interpreter ends, but for what its parent has to do at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


__all__ = ["Actor", "Ended", "Home", "Raised", "ReplacedError", "descriptors", "leave"]
