"""kill -9 and Ctrl-C anywhere: what is there afterwards is a committed state.

A kill leaves what was changed before it: so it is tried after each change of a recorded script, and within each write,
by `harness.Campaign`. That the record misses nothing is tried with what is on the disk at each line of the package, and
with processes that are killed: before system calls, at lines, from outside. An interrupt is raised where CPython looks
for signals, and the process goes on. By default a sample runs; all of it:

    python -m pytest -m campaign tests/faults/crash/test_kill.py -s
"""

import contextlib
import gc
import itertools
import marshal
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

import pytest
import xxhash

from ringmap.errors import LockedError, RingmapError
from ringmap.testing import kills
from tests.disks import ram_folder
from tests.faults.crash import test_groups, test_parts, test_updates
from tests.faults.crash.cases import SCHEMA, Case, Session
from tests.faults.crash.harness import Campaign, Draw, Violation, crash, read_tree
from tests.faults.crash.kill import planted
from tests.faults.crash.kill.blows import PACKAGE, AfterCall, AtLine, interrupt, kill
from tests.faults.crash.kill.forks import run
from tests.faults.crash.recording import Model, materialise, same_ids
from tests.faults.crash.test_power import SESSIONS, _quiet
from tests.tiers import few

__all__ = ["_quiet", "crash"]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="some cases are forked processes")

GIVEN = tuple(("write", 5) for _ in range(4))
STREAM = (("begin",), *[("append",)] * 4)
LONG = (("write", 15), ("write", 3), ("write", 24), ("write", 2))


def script(*steps, given=GIVEN, **more):
    return Case(False, steps, 24, 6, slots=2, given=given, **more)


SCRIPTS = {
    "birth": script(("sample",), ("write", 4), given=()),
    "birth with columns": script(("write", 3), given=(), schema=SCHEMA),
    "laps": script(("sample",), *[("write", n) for n in (3, 6, 5, 5, 1, 6, 2, 2, 5)], segment=200),
    "compressed": script(("sample",), *[("write", n) for n in (3, 6, 5, 1)], storage="zarr"),
    "mixed": script(("write", 3), *LONG, storage="mixed"),
    "long episodes": script(*LONG),
    "long episodes, compressed": script(*LONG, storage="zarr"),
    "a long episode over short ones": script(("write", 15), ("write", 2), given=(("write", 1),) * 24),
    "a segment each": script(*GIVEN, ("write", 5), segment=1),
    "a turn of the table": script(*[("write", 1)] * 4, given=(("write", 1),) * 30),
    "clear": script(("clear",), ("write", 5), ("write", 6), ("clear",), ("clear",), ("write", 1)),
    "ends": script(("write", 5), ("flush",), ("sample",), ("sync",), ("sync_write", 2, 2), ("reopen", "close")),
    "streams, kept": script(
        *STREAM, ("finish",), *STREAM, ("write", 2), ("begin",), ("append",), ("finish",), keep=True
    ),
    "streams, dropped": script(*STREAM, ("finish",), ("append",), ("abandon",), ("append",), ("reopen", "kill")),
    "a long stream": script(("begin",), *[("append",)] * 9, ("finish",), ("append",), ("reopen", "kill"), keep=True),
}
"""What a writer does once another one was killed."""

OTHERS = SESSIONS | {
    "rows": test_groups.Session,
    "calls": test_groups.Transitions,
    "parts": test_parts.Session,
    "values": test_updates.Updates,
}
BY_HAND = {
    "labels": (("write", 3), ("round", None), ("relabel", 0.0, None), ("write", 2), ("relabel", 0.0, None)),
    "joined": (("write", 2), ("write", 3), ("flush",), ("several", (1, 2, 1), None), ("several", (2, 1), None)),
    "priorities": (*[("write", 3)] * 3, ("sample",), *[("update", 0.4, None), ("update", 0.9, None)] * 5),
}
"""The calls of scripts that are not drawn."""


def case_of(name, power=False, seed=0):
    """Return which subject a script is of, and its case."""
    if name in SCRIPTS:
        return Session, at(SCRIPTS[name], power)
    kind = OTHERS[name]
    if not issubclass(kind, Session):
        return kind, Draw(power, 9, keep=bool(seed % 2))
    drawn = Case.draw(seed, power, count=5, step=kind.draw_step)
    return kind, Case(**{**vars(drawn), "steps": BY_HAND.get(name, drawn.steps)})


def at(case, power):
    return Case(**{**vars(case), "power": power})


def killed(crash, name, power=False, seed=0, prefixes=1.0, **options):
    """Kill a script after its changes and within its writes; what is left is opened and goes on, and at times is killed
    again. Return how many states there were."""
    options = {"samples": None, "kills": 1, "halves": True, "share": 0, "prefixes": prefixes, **options}
    return crash(*case_of(name, power, seed), seed, **options).states


# -- kills by the record -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(SCRIPTS, 4))
def test_a_kill_leaves_a_committed_state(crash, name):
    assert killed(crash, name, prefixes=0.25)


@pytest.mark.parametrize("name", few(["laps", "streams, kept", "long episodes", "mixed", "clear", "ends"], 1))
def test_a_kill_at_the_level_of_power_cuts(crash, name):
    assert killed(crash, name, True, prefixes=0.15)


@pytest.mark.parametrize("name", few(OTHERS, 2))
def test_a_kill_of_other_buffers(crash, name):
    assert killed(crash, name, power=name == "transitions", prefixes=0.1) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["birth with columns", "long episodes", "streams, kept", "compressed"])
def test_killed_again_during_recovery(crash, name):
    killed(crash, name, prefixes=0.1, share=0.3)
    assert crash.last.again


@pytest.mark.parametrize("planted_one", planted.HELD_BACK)
def test_control_changes_in_a_wrong_order(crash, monkeypatch, planted_one):
    *order, name = planted.HELD_BACK[planted_one]
    explore = Campaign.explore

    def reordered(self, session, depth):
        planted.hold_back(session.disk, session.call_ends, *order)
        explore(self, session, depth)

    monkeypatch.setattr(Campaign, "explore", reordered)
    caught(crash, planted_one, name)


@pytest.mark.parametrize("planted_one", few(planted.PLANTS, 5))
def test_control(crash, monkeypatch, planted_one):
    plant, name = planted.PLANTS[planted_one]
    plant(monkeypatch)
    caught(crash, planted_one, name)


def caught(crash, planted_one, name):
    for prefixes, seed in ((0.25, 0), (1, 0), (1, 1), (1, 2)):
        try:
            killed(crash, name, "segment" in planted_one, seed, prefixes)
        except Violation as violation:
            assert "prefix" in str(violation), f"wrong even without a kill: {violation}"
            print(f"{planted_one}: caught after {crash.last.states} states: {violation.__cause__}")
            return
    pytest.fail(f"{planted_one}: {crash.last.states} states, and nothing was noticed")


# -- a second writer ---------------------------------------------------------------------------------


def let_in(crash, every):
    """Open for writing before every so many changes of a writer; return those at which that was possible."""
    case, found, count = at(SCRIPTS["laps"], False), [], itertools.count(1)

    class Locked(Session):
        def open(self, *args, **options):
            self.disk.hook = self.meet
            return super().open(*args, **options)

        def meet(self, change, path):
            if next(count) % every or change == "lock":
                return
            hook, self.disk.hook = self.disk.hook, None
            with ThreadPoolExecutor(1) as other:
                try:
                    other.submit(Session.make, Session(self.case, self.root, {}, 1, self.now)).result().close()
                    found.append(change)
                except LockedError:
                    pass
            self.disk.hook = hook

    crash(Locked, case, prefixes=0, kills=0, samples=None)
    return found


def test_a_second_writer_is_kept_out(crash):
    assert let_in(crash, 5) == []


def test_control_no_lock(crash, monkeypatch):
    planted.no_lock(monkeypatch)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever two writers do to one another
        assert let_in(crash, 5) == []


# -- kills at each line ------------------------------------------------------------------------------


class EachLine(AtLine):
    """Reads at each line of the package what is below a folder, as another process reads it: so a kill there leaves it.
    With `at`, it is a real kill.

    `sums`: of the folder, line by line. `disks`: what differs: (sum, what is expected of it, whether the power was cut
    before) -> (place, tree).
    """

    paths = (f"{PACKAGE}{os.sep}",)

    def __init__(self, subject, at=-1):
        super().__init__(at, kill)
        self.subject, self.sums, self.disks = subject, [], {}

    def here(self, place, possible=True):
        super().here(place)
        if self.at < 0:
            subject, tree = self.subject, read_tree(self.subject.root)
            self.sums.append(sum_of(tree))
            self.disks.setdefault((self.sums[-1], len(subject.expects) - 1, subject.cut), (place, tree))


def sum_of(tree):
    return xxhash.xxh3_64_hexdigest(marshal.dumps(tree, 2))


class Lines:
    """Judges what a kill at each line of a case leaves: once what two lines leave alike.

    `turns`: how many of these disks, and of those that a power cut after a change leaves, are opened at each line in
    turn.
    """

    def __init__(self, monkeypatch, folder, kind, case, seed=0, turns=0):
        self.patch, self.folder, self.seed, self.rng = monkeypatch, folder, seed, random.Random(seed)
        kind.make_small(monkeypatch, case)
        self.kind, self.case, self.lines, self.disks, self.real = kind, kind.suited(case), 0, 0, 0
        self.campaign = Campaign(str(folder), random.Random(seed), session=kind, share=0, halves=True)
        self.play()  # what is done but once
        self.first, self.blow = self.play(-1)
        self.judge(self.first, self.blow, 0)
        for tree, expect, cut in self.to_open(turns):
            self.judge(*self.play(-1, (tree, expect, cut)), 1)

    def play(self, at=0, left=None, root=None):
        """Make the calls of the case under a blow, or open what is left; return the subject and the blow."""
        tree, expect, cut = left or ({}, self.kind.nothing(self.case), False)
        root = root or self.campaign.new_root(tree)
        victim = self.kind(self.case, root, tree, 1 + cut, expect, cut)
        blow = EachLine(victim, at)
        with self.patch.context() as patch:
            same_ids(patch, self.seed)
            patch.setattr(time, "time_ns", lambda: 10**18)
            patch.setattr(time, "monotonic", lambda: 0.0)  # else whether a group is late differs
            gc.disable()  # its lines would be counted
            if left or not (isinstance(self.case, Case) and (self.case.given or self.case.warm)):
                victim.blows = [blow] * bool(at)
            else:
                victim.prepared = lambda: victim.blows.extend([blow] * bool(at))
            try:
                if left:
                    victim.inherit(self.first, expect, cut)
                    victim.open()
                else:
                    victim.open()
                    victim.play(random.Random(self.seed))
                victim.blows = []
                victim.kill()
            finally:
                gc.enable()
        return victim, blow

    def judge(self, subject, blow, depth):
        self.lines += blow.count
        self.disks += len(blow.disks)
        self.campaign.seen.clear()
        for (_, expect, cut), (place, tree) in blow.disks.items():
            prefix = -1 if cut else subject.opened_at
            try:
                self.campaign.examine(subject, tree, subject.expects[expect][1], False, prefix, depth)
            except Violation as violation:
                raise Violation(f"{place}: {violation}") from violation.__cause__

    def to_open(self, count):
        """Yield disks that are left: by a kill, and by a power cut."""
        known = [(tree, self.first.expects[expect][1], False) for (_, expect, _), (_, tree) in self.blow.disks.items()]
        yield from self.rng.sample(known, min(count, len(known)))
        log = self.first.disk.log
        prefixes = range(self.first.explored_from, len(log) + 1)
        chosen, model = self.rng.sample(prefixes, min(count, len(prefixes))), Model({})
        for prefix, entry in enumerate([None, *log]):
            if entry:
                model.apply(entry)
            if prefix in chosen:
                yield model.crash(self.rng), self.first.expect_at(prefix), True

    def kill_really(self, count):
        """Kill a process at so many lines: it leaves what was read at one of them."""
        for at in self.rng.sample(range(1, self.blow.count + 1), min(count, self.blow.count)):
            root = self.campaign.new_root({})
            assert died(lambda say, at=at, root=root: self.play(at, root=root))
            # Not that of this very line: what a child of a fork makes anew has lines of its own.
            assert sum_of(read_tree(root)) in self.blow.sums, f"line {at} of {self.blow.count}: another disk"
            shutil.rmtree(root)
            self.real += 1


@pytest.fixture
def lines(monkeypatch):
    with ram_folder() as folder:

        def make(name, power=False, storage=None, **options):
            kind, case = case_of(name, power, 1)
            if storage and isinstance(case, Case):
                case = Case(**{**vars(case), "storage": storage})
            return Lines(monkeypatch, Path(mkdtemp(dir=folder)), kind, case, 1, **options)

        yield make


@pytest.mark.parametrize("name", few(["clear", "birth with columns", "ends", "transitions"], 1))
def test_what_each_line_leaves(lines, name):
    found = lines(name, turns=1)
    found.kill_really(3)
    assert found.lines > 100 * found.disks > 0


@pytest.mark.slow
@pytest.mark.parametrize("planted_one", planted.PLANTS)
def test_control_of_lines(lines, monkeypatch, planted_one):
    plant, name = planted.PLANTS[planted_one]
    plant(monkeypatch)
    with pytest.raises(Violation):
        lines(name, "segment" in planted_one)


# -- real kills --------------------------------------------------------------------------------------


class Victims:
    """Processes that make the calls of a case and are killed; what is left is judged by a process that was not."""

    def __init__(self, monkeypatch, folder, kind, case, seed=0):
        kind.make_small(monkeypatch, case)
        self.folder, self.kind, self.case, self.seed = folder, kind, kind.suited(case), seed
        self.numbers, self.cases = itertools.count(), 0
        self.campaign = Campaign(str(folder), random.Random(seed), session=kind, share=0)
        self.uncut = self.made()
        self.work(self.uncut)
        self.uncut.kill()

    def made(self):
        root = str(self.folder / f"victim{next(self.numbers)}")
        materialise({}, root)
        return self.kind(self.case, root, {}, 1, self.kind.nothing(self.case), False)

    def work(self, victim, blow=None):
        victim.open()
        if blow is not None:
            victim.blows = [blow]
        victim.play(random.Random(self.seed))

    def strike(self, kill_it):
        """Let `kill_it(work, victim, tell)` run one, and judge what it left."""
        ear, mouth = os.pipe()
        victim = self.made()
        victim.noted = lambda: os.write(mouth, b"!")
        died = kill_it(lambda blow=None: self.work(victim, blow), victim)
        os.close(mouth)
        with open(ear, "rb") as told:
            expect = self.uncut.expects[len(told.read())][1]
        if died:
            self.cases += 1
            self.campaign.seen.clear()
            self.campaign.examine(self.uncut, read_tree(victim.root), expect, False, -1, 0)

    def before_system_calls(self, every, offset=0):
        for number in itertools.count(offset, every):
            cases = self.cases
            self.strike(lambda work, victim, number=number: kills.killed_after(number, work).killed)
            if self.cases == cases:
                return

    def at_lines(self, every, offset=0):
        for number in itertools.count(1 + offset, every):
            cases = self.cases
            self.strike(lambda work, _, number=number: died(lambda say: work(AtLine(number, kill))))
            if self.cases == cases:
                return

    def from_outside(self, count):
        rng, began = random.Random(self.seed), time.perf_counter()
        victim = self.made()
        died(lambda say: self.work(victim))
        lasts_s = time.perf_counter() - began

        def soon(pid):
            time.sleep(rng.random() * lasts_s)
            os.kill(pid, signal.SIGKILL)

        for _ in range(count):
            self.strike(lambda work, _: died(lambda say: work(), soon))
            lasts_s /= 2  # the first one may have met a busy machine, and the next ones end before they are killed

    def with_an_orphan(self, at):
        """Kill a writer whose forked child lives on: that keeps nobody out."""
        until, let_go = os.pipe()

        left = itertools.count(1)

        def fork_and_die(change, path):
            if next(left) != at:
                return
            if not os.fork():
                for fd in map(int, os.listdir("/proc/self/fd")):  # else who listens to its parent waits for it
                    with contextlib.suppress(OSError):
                        if fd not in (0, 1, 2, until) and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe"):
                            os.close(fd)
                os.read(until, 1)
                os._exit(0)
            kill("")

        def with_child(work, victim):
            victim.disk.hook = fork_and_die
            return died(lambda say: work())

        self.strike(with_child)
        os.close(until)
        os.close(let_go)


def died(body, before_wait=lambda pid: None):
    death = run(body, before_wait)
    assert not death.error, death.error
    return death.killed


@pytest.fixture
def victims(monkeypatch):
    with ram_folder() as folder:

        def make(name, power=False, seed=0):
            return Victims(monkeypatch, Path(mkdtemp(dir=folder)), *case_of(name, power, seed), seed)

        yield make


WHY_NOT = kills.reason_why_not()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_killed_before_system_calls(victims):
    killed = victims("laps", True)
    killed.before_system_calls(17)
    assert killed.cases > 3


@pytest.mark.parametrize("name", few(["laps", "streams, kept", "compressed", "transitions"]))
def test_killed_at_lines(victims, name):
    killed = victims(name)
    killed.at_lines(2999)
    assert killed.cases > 2


def test_killed_from_outside(victims):
    killed = victims("ends")
    killed.from_outside(4)
    assert killed.cases


def test_a_dead_writer_keeps_nobody_out_though_its_child_lives(victims):
    killed = victims("laps")
    for number in (40, 100):
        killed.with_an_orphan(number)
    assert killed.cases == 2


def test_no_kill_shows_that_nothing_is_ever_synced(victims, monkeypatch):
    """The page cache outlives a process: a power cut shows it, see test_power."""
    killed = victims("laps", True)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    killed.before_system_calls(41)


# -- interrupts --------------------------------------------------------------------------------------


class RamSession(Session):
    """A buffer in RAM, which lives in its process alone."""

    def make(self):
        case = self.case
        kept = "keep" if case.keep else "drop"
        storage = {"storage": "zarr"} if case.storage == "zarr" else {}
        return self.kind(case.max_steps, seed=7, spare_rows=case.spare, sync_every_s=0, interrupted=kept, **storage)

    @property
    def kind(self):
        from ringmap import ReplayBuffer

        return ReplayBuffer


class Interrupts:
    """Interrupts the calls of a script, which then go on."""

    def __init__(self, monkeypatch, folder, kind, case, blow=AtLine):
        kind.make_small(monkeypatch, case)
        self.folder, self.kind, self.case, self.blow, self.cases = folder, kind, kind.suited(case), blow, 0
        if not issubclass(kind, Session):  # whether a group is late depends on the clock, and how many lines run
            monkeypatch.setattr(time, "monotonic", lambda: 0.0)
        self.tree, self.expect, self.steps = {}, kind.nothing(case), ()
        if issubclass(kind, Session):
            self.steps = case.given if kind is RamSession else ()
            if kind is not RamSession:
                made = self.play(steps=case.given)
                self.tree, self.expect = made.disk.model.live(), made.now
            self.steps += case.steps
        self.play()  # what is done but once
        listing = blow(0, interrupt)
        self.play(listing)
        self.places = listing.places

    def play(self, *blows, steps=None):
        """Make the calls under blows, one after the other, and look at what is there at the end."""
        self.cases += 1
        root = str(self.folder / str(self.cases))
        materialise(self.tree, root)
        session = self.kind(self.case, root, self.tree, 1, self.expect, False)
        session.fault = lambda *_: None
        gc.disable()  # its lines would be counted
        try:
            session.open()
            session.blows = list(blows)
            if issubclass(self.kind, Session):
                session.run(self.steps if steps is None else steps)
            else:
                session.play(random.Random(1))
            session.blows = []
            if self.kind is not RamSession:
                session.settle()
            session.kill()
        finally:
            gc.enable()
        return session

    def everywhere(self, every, offset=0, again=None):
        """Interrupt at every so many places at which a signal can come; `again`: and at so many of what follows."""
        for number in range(1 + offset, len(self.places) + 1, every):
            place, possible = self.places[number - 1]
            if not possible:
                continue
            blow, rest = self.blow(number, interrupt), self.blow(0, interrupt)
            self.play(blow, *[rest] * bool(again))
            assert blow.struck == place, "it fell elsewhere"
            for second in range(1 + number % (again or 1), len(rest.places) + 1, again or 1):
                if rest.places[second - 1][1]:
                    self.play(self.blow(number, interrupt), self.blow(second, interrupt))


@pytest.fixture
def interrupts(monkeypatch):
    with ram_folder() as folder:

        def make(name, power=False, in_ram=False, **more):
            kind, case = case_of(name, power, 1)
            return Interrupts(monkeypatch, Path(mkdtemp(dir=folder)), RamSession if in_ram else kind, case, **more)

        yield make


CALLS = ["birth", "laps", "clear", "streams, kept", "ends", "long episodes", "compressed", "streams, dropped"]


@pytest.mark.parametrize(
    "name", few([*CALLS[:2], "joined", "calls", *CALLS[2:], "rows", "parts", "values", "transitions"], 4)
)
def test_interrupts_at_lines(interrupts, name):
    interrupts(name).everywhere(499)
    interrupts("birth", True).everywhere(1499)


@pytest.mark.parametrize("name", few(CALLS, 1))
def test_interrupts_after_calls(interrupts, name):
    interrupts(name, blow=AfterCall).everywhere(2999)


IN_RAM = ["laps", "clear", "streams, kept", "compressed"]


@pytest.mark.parametrize("name", few(IN_RAM, 2))
def test_interrupts_of_a_buffer_in_ram(interrupts, name):
    interrupts(name, in_ram=True).everywhere(293)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["birth", "long episodes", "clear", "streams, kept"])
def test_interrupted_again_in_what_follows(interrupts, name):
    interrupts(name).everywhere(997, again=2999)


@pytest.mark.parametrize("planted_one", planted.OF_INTERRUPTS)
def test_control_of_interrupts(interrupts, monkeypatch, planted_one):
    plant, name = planted.OF_INTERRUPTS[planted_one]
    made = interrupts(name)
    plant(monkeypatch)
    with pytest.raises((AssertionError, RingmapError, LookupError, ValueError)) as caught:
        for every in (97, 7, 1):
            made.everywhere(every)
    assert "fell elsewhere" not in str(caught.value)


# -- all of it -----------------------------------------------------------------------------------------

EVERY = int(os.environ.get("EVERY", "1"))
"""Only each so many of the places of the campaign, but for changes: all of them take hours."""


def report(what, count):
    print(f"\n| {what} | {count:,} |")


@pytest.mark.campaign
class TestCampaign:
    @pytest.mark.parametrize("power", [False, True])
    @pytest.mark.parametrize("name", [*SCRIPTS, *OTHERS])
    def test_every_change(self, crash, name, power):
        report(f"{name}: changes", killed(crash, name, power, share=0.05) + 0 * crash.last.again)

    @pytest.mark.parametrize("power", [False, True])
    @pytest.mark.parametrize("name", [*SCRIPTS, *OTHERS])
    def test_every_system_call(self, victims, name, power):
        killed = victims(name, power)
        killed.before_system_calls(1)
        report(f"{name}: real", killed.cases)

    @pytest.mark.parametrize("name", [*SCRIPTS, *OTHERS])
    @pytest.mark.parametrize("power", [False, True])
    @pytest.mark.parametrize("storage", ["memmap", "zarr", "mixed"])
    def test_every_line(self, lines, name, power, storage):
        kind, case = case_of(name)
        given = case.storage if isinstance(case, Case) else "memmap"
        if storage != given and (given != "memmap" or not isinstance(case, Case) or name == "labels"):
            pytest.skip("its storage is given")
        if storage == "mixed" and issubclass(kind, SESSIONS["transitions"]):
            pytest.skip("it has no column 'noise'")
        found = lines(name, power, storage, turns=3)
        found.kill_really(5)
        report(f"{name}: lines", found.lines)
        report(f"{name}: disks that differ", found.disks)
        report(f"{name}: lines, real kills", found.real)

    @pytest.mark.parametrize("blow", [AtLine, AfterCall])
    @pytest.mark.parametrize("name", [*SCRIPTS, *OTHERS])
    def test_every_interrupt(self, interrupts, name, blow):
        made = interrupts(name, blow=blow)
        made.everywhere(EVERY * (7 if blow is AfterCall else 1))
        report(f"{name}: interrupts", made.cases)

    @pytest.mark.parametrize("name", IN_RAM)
    def test_every_interrupt_in_ram(self, interrupts, name):
        made = interrupts(name, in_ram=True)
        made.everywhere(EVERY)
        report(f"{name}: ram", made.cases)

    @pytest.mark.parametrize("name", CALLS)
    def test_interrupted_again(self, interrupts, name):
        made = interrupts(name)
        made.everywhere(37 * EVERY, again=148)
        report(f"{name}: twice", made.cases)

    def test_random_kills(self, crash, victims):
        """Of 50 scripts, or of as many as there is time for: LASTS_S, from the one that SEED says on."""
        first, began = 100 * int(os.environ.get("SEED", "1")), time.monotonic()
        lasts_s = float(os.environ.get("LASTS_S", "inf"))
        for seed in range(first, first + 50):
            case = Case.draw(seed, bool(seed % 2), ("memmap", "zarr", "mixed")[seed % 3], count=14)
            options = {"samples": None, "kills": 1, "halves": True, "prefixes": 0.2, "share": 0.05}
            report("scripts: changes", crash(Session, case, seed, **options).states)
            killed = victims("ends", bool(seed % 2), seed)
            killed.from_outside(20)
            report("scripts: outside", killed.cases)
            if time.monotonic() - began > lasts_s:
                break
