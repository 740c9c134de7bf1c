"""One harness for crashes: scripts of calls on a small buffer, and the disks that a kill or a power cut may leave.

    Subject     a buffer below a folder, on a disk that remembers: makes the calls of a script, and knows for each
                length of the disk's log what a crash there may show. One for each kind of buffer
    Campaign    crashes a subject after every change, opens what is left, and judges it; the recovery is crashed in turn

A subject writes `make`, `open`, and `step` or `play`; see test_updates.py.
"""

import marshal
import os
import random
import shutil
import time
from dataclasses import dataclass, field

import pytest
import xxhash

import ringmap
from ringmap.errors import EnvironmentFault, RingmapError, SyncFailedError
from ringmap.storage.disk.files import Disk
from tests.disks import Cut, ram_folder
from tests.faults.crash.recording import Always, Machine, Model, RecordingDisk, materialise, same_ids

LEVELS = pytest.mark.parametrize("power", [False, True], ids=["process", "power"])


class Violation(AssertionError):
    """A disk that a crash may leave showed what it must not."""


class Watcher(Disk):
    """A disk that nothing may change."""

    def __init__(self, boot):
        super().__init__(Machine(boot))

    def before(self, change, path, *details):
        raise AssertionError(f"a reader did {change} to {path}")


class Origins:
    """Which ordinal each episode was seen with: its own for good, and greater than all that were given before.

    Args:
        before: what was seen before a crash; after a cut only what is left of it must be the same.
        least: the greatest ordinal that was given before it, and is on the disk.
    """

    def __init__(self, before=(), least=-1):
        self.before, self.most = dict(before), least
        self.earlier, self.known = self.before, {}

    def seen_of(self, numbers):
        """Return number -> ordinal of these episodes, as far as they were seen since the first session.

        A recovery may evict an episode before its session looks; a cut of that recovery brings it back.
        """
        ever = {**self.earlier, **self.known}
        return {number: ever[number] for number in ever.keys() & numbers}

    def see(self, found, kept=()):
        """Judge the ordinals of stored episodes, number -> ordinal. `kept`: those that an opening may have stored
        anew."""
        for number in (found.keys() & self.before.keys()) - set(kept):
            assert found[number] == self.before[number], f"{number} was {self.before[number]}: {found}"
        new = {n: ordinal for n, ordinal in found.items() if n not in self.known}
        again = {n: ordinal for n, ordinal in found.items() if self.known.get(n, ordinal) != ordinal}
        assert not again, f"{again} had others before: {self.known}"
        assert len({*new.values()}) == len(new), f"an ordinal was given twice: {found}"
        later = {n for n in new if new[n] != self.before.get(n)}
        assert all(new[n] > self.most for n in later), f"{new}: {self.most} was given before"
        self.known |= new
        self.most = max([self.most, *new.values()])
        self.before = {}


@dataclass(frozen=True)
class Draw:
    """A script of so many calls that its subject draws."""

    power: bool
    calls: int = 9
    keep: bool = False


class Subject:
    """A buffer below `root`, from one crash to the next.

    Args:
        case: its level, its sizes, and its calls.
        root: a folder with `tree` in it.
        tree: what is there.
        boot: the number of the boot.
        expect: what may be there.
        cut: whether the power was cut before (or else a process was killed).
        fresh: whether nobody opened it since.
        cheats: what a control plants, see `RecordingDisk`.
    """

    depth = 1
    """How often what a crash left goes on, and is crashed again."""
    looks = 1.0
    """How often a reader looks at what a crash left."""

    def __init__(self, case, root, tree, boot, expect, cut=True, fresh=True, cheats=None):
        self.case, self.root, self.power = case, root, case.power
        self.cut = self.was_cut = cut
        self.fresh = fresh
        self.disk = RecordingDisk(root, boot, tree, cheats)
        self.expects = [(0, expect)]
        self.afters = set()  # which of them are of calls that returned
        self.call_ends = []  # of calls, in the log
        self.opened_at = None
        self.explored_from = 0
        self.buf = None
        self.blows, self.struck = [], None
        self.trace = []
        self.origins = Origins()

    @classmethod
    def suited(cls, case):
        """Return a case with sizes that such a buffer can have."""
        return case

    @classmethod
    def nothing(cls, case):
        """Return what is expected where nothing was made yet."""
        raise NotImplementedError

    def inherit(self, before, expect, boots):
        """Take over what the one knows that was crashed."""
        self.origins = Origins(before.origins.known)

    @classmethod
    def make_small(cls, patch, case):
        """Make the package use small sizes, as the case has them."""

    @property
    def path(self):
        return os.path.join(self.root, "buf")

    @property
    def level(self):
        return "power" if self.power else "process"

    @property
    def store_now(self):
        return self.buf.engine.owned

    # -- what to expect --

    @property
    def now(self):
        return self.expects[-1][1]

    def during(self, expect):
        """From the next change on, expect this."""
        self.expects.append((len(self.disk.log) + 1, expect))
        self.noted()

    def after(self, expect):
        """From here on, expect this."""
        self.afters.add(len(self.expects))
        self.expects.append((len(self.disk.log), expect))
        self.call_ends.append(len(self.disk.log))
        self.noted()

    def noted(self):
        """Nothing: a process that is killed tells its parent how far it came."""

    def expect_at(self, prefix):
        """Return what a crash may show after so many changes of the log."""
        return next(expect for at, expect in reversed(self.expects) if at <= prefix)

    def expect_within(self, prefix):
        """Return what a crash may show in the middle of the last one of so many changes."""
        known = reversed([*enumerate(self.expects)])
        return next(e for i, (at, e) in known if at < prefix or (at == prefix and i not in self.afters))

    def opened(self):
        """Note that the buffer is open, and has shown what was expected."""
        self.cut = False
        if self.opened_at is None:
            self.opened_at = len(self.disk.log)

    def read(self):
        """Open it as a reader, judge what that shows, and return it."""

    def settle(self):
        """Go on: store one more, close, open again. All is sound, and nothing is left behind."""

    def agree(self, shown, seen):
        """Compare what a reader saw with what the writer found after it."""

    # -- calls --

    def play(self, rng):
        """Make the calls of the case."""
        for _ in range(self.case.calls):
            self.step(rng)

    def go_on(self, rng):
        for _ in range(3):
            self.step(rng)

    def fault(self, rng, most=6):
        """Draw a fault, as `FaultyDisk.fail` takes it, or none."""
        kinds = [KeyboardInterrupt(), OSError(28, "planted"), Cut(), OSError(5, "planted")]
        return None if rng.random() >= 0.25 else (rng.randint(1, most), rng.choice(kinds))

    def arm(self, fault, **how):
        """Let the next changes fail, and the next one of `blows` fall, which count what calls execute."""
        if fault is not None:
            self.disk.fail(*fault, **how)
        if self.blows:
            self.blows[0].arm()

    def lift(self, returned=False):
        """Let nothing go wrong any more."""
        self.disk.lift()
        if self.blows:
            self.blows[0].disarm()
            if self.blows[0].struck:
                assert not returned, f"an interrupt was swallowed: {self.blows[0].struck}"
                self.struck = self.blows.pop(0)

    def was_planted(self, fault):
        """Tell whether a call may fail."""
        return fault is not None or bool(self.blows and self.blows[0].struck)

    def attempt(self, do, fault=None, **how):
        """Make a call. Return whether it returned; None where the buffer was opened again."""
        self.arm(fault, **how)
        try:
            do()
        except (SyncFailedError, Cut):
            self.lift()
            self.kill()
            self.open()
            return None
        except (EnvironmentFault, KeyboardInterrupt):
            assert self.was_planted(fault)
            returned = False
        else:
            returned = True
        self.lift(returned)
        self.store_now.recover_if_stale()
        return returned

    def kill(self):
        """Let go of the buffer as the kernel does, changing nothing."""
        if self.buf is not None:
            self.disk.fail(1, Cut(), sticky=True)
            self.store_now.abandon()
            self.disk.lift()
            self.buf = None


@dataclass
class Campaign:
    """Crashes subjects and opens what is left.

    `samples`: random disks per prefix, beside the two where all or nothing pending is kept; `every`: only each so many
    of these, in turn; no cut at all: None. `kills`: how often a kill is tried after a change; with `halves`, within a
    write, too, and what it leaves goes on. `prefixes`: after how many of the changes anything is tried; `share`: of the
    disks, how many go on being written, and crash again.
    """

    base: str
    rng: random.Random
    samples: int | None = 3
    every: int = 1
    share: float = 0.1
    kills: float = 0.1
    halves: bool = False
    prefixes: float = 1.0
    cheats: object = None
    boots: bool = True
    session: type | None = None
    states: int = 0
    again: int = 0
    sessions: int = 0
    roots: int = 0
    seen: set = field(default_factory=set)

    def run(self, case):
        """Run a case and crash it after each of its changes."""
        self.seen.clear()
        self.sessions += 1
        root = self.new_root({})
        case = self.session.suited(case)
        session = self.session(case, root, {}, 1, self.session.nothing(case), cut=False, cheats=self.cheats)
        try:
            session.open()
            session.play(self.rng)
            session.kill()
            assert read_tree(root) == session.disk.model.live(), "the log misses a change"
        except (AssertionError, RingmapError, OSError) as error:
            raise Violation(f"{case}: {error!r}") from error
        shutil.rmtree(root)
        self.explore(session, 0)
        return session

    def explore(self, session, depth):
        """Crash a session after each change: at depth 0 every prefix, below it some."""
        rng, model, share = self.rng, Model(session.disk.tree), 0.15 if depth else self.prefixes or 1e-9
        for prefix in range(len(session.disk.log) + 1):
            entry = session.disk.log[prefix - 1] if prefix else None
            chosen = prefix >= session.explored_from and (share >= 1 or rng.random() <= share)
            if self.samples is None and not depth:  # few of a short script, but some
                chosen = prefix >= session.explored_from and prefix % round(1 / share) == 0
            expect = session.expect_at(prefix)
            if chosen and entry and self.halves and (half := half_of(entry, session.disk.paths[prefix - 1])):
                model.apply(half)
                self.examine(session, model.live(), session.expect_within(prefix), False, prefix, depth)
            if prefix:
                model.apply(entry)
            if not chosen:
                continue
            ways = [] if self.samples is None else [Always(0), Always(1), *[rng] * self.samples]
            for way in ways[-1:] if depth else ways[prefix % self.every :: self.every]:
                self.examine(session, model.crash(way), expect, True, prefix, depth)
            if rng.random() < self.kills:
                self.examine(session, model.live(), expect, False, prefix, depth)

    def examine(self, before, tree, expect, reboots, prefix, depth):
        """Open a disk as a reader, then as the writer, and judge both; sometimes go on from there."""
        cut = reboots or (depth > 0 and prefix < before.opened_at and before.was_cut)
        reboots = reboots and self.boots
        boot = before.disk.system.boot + reboots
        tree.get("buf", {}).pop("lock", None)
        key = xxhash.xxh3_64_intdigest(marshal.dumps(tree)), id(expect), cut
        if key in self.seen:
            return
        self.seen.add(key)
        self.states += 1
        self.again += depth > 0
        root = self.new_root(tree)
        rng, case = self.rng, before.case
        session = self.session(case, root, tree, boot, expect, cut, depth == 0, self.cheats)
        session.inherit(before, expect, self.boots)
        try:
            if self.halves and not cut and "manifest.json" in tree.get("buf", {}):
                # No kill is a finding, but for half an update of priorities over an older log, which returned nothing,
                # and for values whose columns are being made.
                known = ("priorities.bin", "is here, but no column is mutable")
                found = [f for f in ringmap.check(session.path) if f.file not in known and f.what not in known]
                assert not found, found
            shown = session.read() if rng.random() < session.looks else None
            seen = session.open()
            if reboots:
                session.agree(shown, seen)
            if self.halves:
                session.settle()
            goes_on = depth < session.depth and rng.random() < self.share
            if goes_on:
                session.go_on(rng)
            session.kill()
        except (AssertionError, RingmapError, OSError) as error:
            where = f"prefix {prefix}, depth {depth}, cut {cut}, then {session.trace or 'unopened'}"
            raise Violation(f"{case}\n{where}: {error!r}") from error
        finally:
            shutil.rmtree(root, ignore_errors=True)
        if goes_on:
            self.explore(session, depth + 1)

    def new_root(self, tree):
        self.roots += 1
        root = os.path.join(self.base, f"{os.getpid()}-{id(self)}-{self.roots}")
        materialise(tree, root)
        return root


def half_of(entry, path):
    """Return the first half of a write, whole words of it, that a kill may leave; None of one within a page, which none
    does."""
    if entry[0] != "write" or path.endswith(("episodes.npy", "state.bin")):
        return None
    _, _, offset, data = entry
    if path.endswith("mutable.bin") and offset < 8192:  # a header
        return None
    count = (offset + len(data) // 2) // 8 * 8 - offset
    return (*entry[:3], data[:count]) if count > 0 else None


def read_tree(root):
    """Return what is below a folder, but for the lock file."""
    found = {}
    for entry in os.scandir(root):
        if entry.is_dir():
            found[entry.name] = read_tree(entry.path)
        elif entry.name != "lock":
            fd = os.open(entry.path, os.O_RDONLY)  # in half the time of `open`: some callers do this at each line
            found[entry.name] = b"".join(iter(lambda fd=fd: os.read(fd, 1 << 16), b""))
            os.close(fd)
    return found


@pytest.fixture
def crash(monkeypatch):
    """Run a case of a subject and crash it everywhere; returns the campaign, which counts."""
    with ram_folder() as folder:

        def crash(session, case, seed=0, **options):
            with monkeypatch.context() as patch:
                session.make_small(patch, case)
                same_ids(patch, seed)
                campaign = crash.last = Campaign(str(folder), random.Random(seed), session=session, **options)
                campaign.run(case)
            return campaign

        yield crash


def at_length(states_of):
    """Run scripts until they left 100,000 states (STATES), or for LASTS_S seconds; the first is number 100 * SEED.
    Print what ran.

    Args:
        states_of: runs the script of a number; returns how many states it left.
    """
    want, lasts_s = int(os.environ.get("STATES", 100_000)), float(os.environ.get("LASTS_S", "inf"))
    first, began = 100 * int(os.environ.get("SEED", 1)), time.monotonic()
    states = scripts = 0
    while states < want and (not scripts or time.monotonic() - began < lasts_s):
        states += states_of(first + scripts)
        scripts += 1
    print(f"\n{scripts} scripts, {states:,} states, {time.monotonic() - began:.0f} s")
