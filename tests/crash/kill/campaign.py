"""Runs cases: copies what was given, lets a victim die in it, and asks for the verdict.

    with Runner() as runner:
        reports = runner.run(folder, kinds=[["changes", 11]], scenarios=["birth"])

A process of its own, because it forks thousands of times: a test process with torch in it forks slowly. It has
imported what the victims need, and runs each job in a fork of itself.
"""

import contextlib
import gc
import importlib
import json
import logging
import os
import pkgutil
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field

import numpy as np

from ringmap.buffers import engine
from ringmap.errors import LockedError
from tests import ROOT
from tests.crash.kill import strace, victim
from tests.crash.kill.blows import PACKAGE, AfterCall, AtChange, AtLine, CrashDisk, interrupt, kill
from tests.crash.kill.families import SCENARIOS_OF_OTHERS
from tests.crash.kill.interrupts import interrupt as interrupted
from tests.crash.kill.planted import PLANTS, UNSEEN
from tests.crash.kill.script import SCENARIOS, STORAGES, random_scenario
from tests.crash.kill.verdict import fingerprint, verify
from tests.crash.kill.victim import hands_of, perform
from tests.disks import undisturbed


@dataclass
class Report:
    """`cases`: blows struck; `directories`: different ones that they left; `impossible`: skipped, see blows.

    `stop`: whether one violation is enough.
    """

    stop: bool = False
    cases: int = 0
    directories: int = 0
    impossible: int = 0
    violations: list = field(default_factory=list)
    cpu_s: float = 0


class Enough(Exception):
    pass


class Bench:
    """One scenario at one level of durability."""

    def __init__(self, root, scenario, level, report):
        self.root = root
        self.scenario = scenario
        self.level = level
        self.report = report
        self.models = scenario.models()
        self.since = len(scenario.given)
        self.quiet = len(scenario.first)
        self.begun = self.since + self.quiet
        self.judged = set()
        self.left = {}
        self.listed = {}
        self.template = os.path.join(root, "given", "a", "b")
        self.case = os.path.join(root, "case", "a", "b")
        os.makedirs(os.path.dirname(self.template))
        boot = b"\2" * 16 if "reboot" in scenario.spoil else None
        given = perform(self.template, scenario, level, scenario.given, 0, self.since, boot=boot)
        self._sound(given, "given")
        spoil(self.template, scenario)
        blow = AtChange(0, kill)
        rest = self.uncut(blow)
        self.listed[type(blow), blow.half] = rest.said["places"]
        first = hands_of("", scenario, level).fresh_state()
        self.sampling = dict(enumerate([*given.returned, *rest.returned])) | {-1: first}
        self.judge(self.case, len(scenario.ops), "uncut")

    def _sound(self, death, what):
        if death.error or death.killed:
            raise AssertionError(f"{self.scenario.name} ({self.level}), {what}: {death.error or 'died'}")

    def fresh(self, source=None):
        """Put a copy of what is given at `case`, and return its path."""
        source = source or self.template
        shutil.rmtree(os.path.join(self.root, "case"), ignore_errors=True)
        os.makedirs(os.path.dirname(self.case))
        if os.path.exists(source):
            shutil.copytree(source, self.case)
        return self.case

    def victim(self, blow, before_wait=None):
        ops = self.scenario.ops[self.since :]
        return perform(
            self.fresh(), self.scenario, self.level, ops, self.since, self.quiet, blow, before_wait=before_wait
        )

    def traced(self, tracer):
        ops = self.scenario.ops[self.since :]
        return perform(
            self.fresh(), self.scenario, self.level, ops, self.since, self.quiet, tracer, before_wait=tracer.attach
        )

    def uncut(self, blow):
        death = self.victim(blow)
        self._sound(death, "uncut")
        return death

    def strike(self, blow, before_wait=None):
        """Let a victim die, and judge what it left."""
        death = self.victim(blow, before_wait)
        what = f"{type(blow).__name__} {blow.at}" if blow is not None else "from outside"
        if death.error:
            self.fail(what, death.error)
        elif death.killed:
            self.report.cases += 1
            self.judge(self.case, self.since + len(death.returned), what)
        return death

    def fail(self, what, why):
        self.report.violations.append(f"{self.scenario.name} ({self.level}), {what}: {why}")
        if self.report.stop and what != "uncut":
            raise Enough

    def allowed(self, index):
        """Return what a blow during call number `index` may leave."""
        if index == len(self.scenario.ops):
            return [self.models[-1]]
        return self.models[index].allowed(self.scenario.ops[index], index, self.scenario.keep)

    def judge(self, folder, index, what):
        key = fingerprint(folder), index
        if key in self.judged:
            return
        self.judged.add(key)
        if what != "uncut":
            self.report.directories += 1
            kept = self.left[key] = os.path.join(self.root, "left", str(len(self.left)))
            if os.path.exists(folder):
                shutil.copytree(folder, kept)
        self.verdict(folder, index, self.allowed(index), what)

    def verdict(self, folder, index, allowed, what):
        birth = not any(op[0] == "open" for op in self.scenario.ops[:index])
        try:
            verify(
                hands_of(folder, self.scenario, self.level),
                allowed,
                self.sampling,
                birth,
                self.scenario.keep,
                self.scenario.spoil == "torn state",
            )
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.fail(
                what,
                f"{type(error).__name__}: {error} [{os.path.basename(at.filename)}:{at.lineno}]",
            )

    def places(self, blow):
        key = type(blow), getattr(blow, "half", None)
        if key not in self.listed:
            self.listed[key] = self.uncut(blow).said["places"]
        return self.listed[key]


# -- kinds of case -----------------------------------------------------------------------------------


def lines(bench, every, offset):
    """Kill at every line."""
    for at in chosen(len(bench.places(AtLine(0, kill))), every, offset):
        bench.strike(AtLine(at, kill))


def changes(bench, every, offset):
    """Kill before every change, and in the middle of every write."""
    for half in (False, True):
        for at in chosen(len(bench.places(AtChange(0, kill, half))), every, offset):
            bench.strike(AtChange(at, kill, half))


def again(bench, every, offset):
    """Kill the recovery of every different directory, before each change and at every line in turn.

    Every line of a recovery is hit in some directory, each directory at its share of the lines.
    """
    scenario, level = bench.scenario, bench.level
    if not bench.left:
        changes(bench, 1, 0)
    judged = set()
    for number, ((_, index), left) in enumerate(list(bench.left.items())):
        allowed = [s for m in bench.allowed(index) for s in (m, *m.settled(scenario.keep))]

        def open_under(blow, left=left, index=index):
            case = bench.fresh(left)
            return perform(case, scenario, level, [("open",)], 500 + index, 0, blow)

        blows = []
        for make, step, start in (
            (lambda at: AtChange(at, kill), every, offset),
            (lambda at: AtLine(at, kill), every * len(bench.left), offset + number * every),
        ):
            death = open_under(make(0))
            if death.error:
                break  # the verdict on the directory itself has said so
            blows += map(make, chosen(len(death.said["places"]), step, start))
        for blow in blows:
            death = open_under(blow)
            what = f"left {number}, then {type(blow).__name__} {blow.at}"
            if death.error:
                bench.fail(what, death.error)
                continue
            bench.report.cases += death.killed
            key = fingerprint(bench.case), index
            if key not in judged:
                judged.add(key)
                bench.report.directories += 1
                bench.verdict(bench.case, index, allowed, what)


def interrupts(bench, every, offset, blow=AtLine):
    """Interrupt at every line, the process going on."""
    places = bench.places(blow(0, kill))
    interrupt_at(bench, places, chosen(len(places), every, offset), blow, bench.level)


def in_ram(bench, every, offset):
    """Interrupt at every line of the same calls on a buffer in RAM."""
    ops = bench.scenario.ops
    listed = perform("", bench.scenario, "ram", ops, 0, bench.begun, AtLine(0, kill))
    places = listed.said["places"]
    interrupt_at(bench, places, chosen(len(places), every, offset), AtLine, "ram")


def interrupt_at(bench, places, numbers, blow, level):
    struck = [at for at in numbers if places[at - 1][1]]
    bench.report.impossible += len(numbers) - len(struck)
    cases = [(blow(at, interrupt), None) for at in struck]
    for case, ended in interrupt_all(bench, cases, level):
        place = places[case.at - 1][0]
        if "error" in ended:
            bench.fail(f"interrupt ({level}) at {place}", ended["error"])
        elif ended["struck"] != place:  # one place is hit twice, then, and another never
            bench.fail(f"interrupt ({level}) at {place}", f"it fell at {ended['struck']}")


def interrupt_all(bench, cases, level):
    """Yield each blow and how it ended; after one that ended ill, another process goes on."""
    while cases:
        done = interrupted(bench.fresh, bench.scenario, level, cases)
        bench.report.cases += len(done)
        yield from zip((blow for blow, _ in cases), done, strict=False)
        cases = cases[len(done) :]


def calls(bench, every, offset):
    """Interrupt where CPython looks for signals."""
    interrupts(bench, every, offset, AfterCall)


def twice(bench, every, offset):
    """Interrupt at every so many lines, and again at every so many of what follows."""
    places = bench.places(AtLine(0, kill))
    struck = [at for at in chosen(len(places), every, offset) if places[at - 1][1]]
    pairs = []
    once = [(AtLine(at, interrupt), AtLine(0, kill)) for at in struck]
    for first, ended in interrupt_all(bench, once, bench.level):
        then = ended.get("places", [])
        second = [n for n in chosen(len(then), 4 * every, first.at) if then[n - 1][1]]
        pairs += [(AtLine(first.at, interrupt), AtLine(n, interrupt)) for n in second]
    seconds = iter([again.at for _, again in pairs])
    for first, ended in interrupt_all(bench, pairs, bench.level):
        second = next(seconds)
        if "error" in ended:
            what = f"interrupt at {places[first.at - 1][0]}, and at line {second} of what follows"
            bench.fail(what, ended["error"])


def locked(bench, every, offset):
    """Open for writing while the victim lives: refused, unless it is about to take the lock (again)."""
    places = bench.places(AtChange(0, kill))
    for at in chosen(len(places), every, offset):
        ready, said = os.pipe()
        free = places[at - 1][0] == "lock lock"

        def wait(_, said=said):
            os.write(said, b"!")
            signal.pause()

        def meanwhile(pid, ready=ready, free=free):
            os.read(ready, 1)
            try:
                hands_of(bench.case, bench.scenario, bench.level).open().close()
                let_in = True
            except LockedError:
                let_in = False
            if let_in != free:
                told = "let in while the first one lives" if let_in else "kept out by nobody"
                bench.fail("a second writer", f"was {told}")
            os.kill(pid, signal.SIGKILL)

        bench.strike(AtChange(at, wait), meanwhile)
        os.close(ready)
        os.close(said)


def orphan(bench, every, offset):
    """Kill a writer whose forked worker lives on: it keeps nobody out."""
    for at in chosen(len(bench.places(AtChange(0, kill))), every, offset):
        until, let_go = os.pipe()

        def fork_and_die(place, until=until, let_go=let_go):
            if not os.fork():
                os.close(let_go)
                os.close(victim.mouth)
                os.read(until, 1)  # until the campaign closes its end
                os._exit(0)
            kill(place)

        bench.strike(AtChange(at, fork_and_die))
        os.close(until)
        os.close(let_go)


def system_calls(bench, every, offset):
    """Kill before every N-th system call of each kind that may change something, by strace."""
    counting = strace.Tracer(os.path.join(bench.root, "calls"))
    bench.traced(counting)
    for name, count in counting.counts().items():
        for at in chosen(count, every, offset):
            tracer = strace.Tracer(os.devnull, name, at)
            death = bench.traced(tracer)
            if death.error:
                bench.fail(f"{name} {at}", death.error)
            elif death.killed:
                bench.report.cases += 1
                bench.judge(bench.case, bench.since + len(death.returned), f"before {name} {at}")


def randomly(bench, every, offset):
    """Kill at random lines and changes, twenty of each script."""
    rng = random.Random(f"{bench.scenario.name} {offset}")
    for blow in (AtLine, AtChange):
        count = len(bench.places(blow(0, kill)))
        for at in sorted(rng.sample(range(1, count + 1), 10))[::every]:
            bench.strike(blow(at, kill))


def from_outside(bench, every, offset):
    """Kill at random moments, in the middle of whatever the processor does."""
    rng = random.Random(f"{bench.scenario.name} {offset}")
    began = time.perf_counter()
    bench.uncut(None)
    lasts_s = time.perf_counter() - began

    def soon(pid):
        until = time.perf_counter() + rng.random() * lasts_s
        while time.perf_counter() < until:
            pass
        os.kill(pid, signal.SIGKILL)

    for _ in range(0, 20, every):
        bench.strike(None, soon)


KINDS = {
    f.__name__: f
    for f in (
        lines,
        changes,
        again,
        interrupts,
        in_ram,
        calls,
        twice,
        locked,
        orphan,
        system_calls,
        randomly,
        from_outside,
    )
}


def chosen(count, every, offset):
    return range(1 + offset % every, count + 1, every)


def spoil(folder, scenario):
    """Do to what was given what a kill of a script can't."""
    what = scenario.spoil
    if what == "volume":
        os.makedirs(os.path.join(folder, "lost+found"))
    elif what == "torn record":
        count = sum(1 for op in scenario.given if op[0] == "write")
        patch(os.path.join(folder, "episodes.npy"), 4096 + 128 * (count + 1), b"\xa5" * 64)
        patch(os.path.join(folder, "data", f"{99:012d}.bin"), 0, b"a blob without a record")
        patch(os.path.join(folder, "manifest.json.tmp"), 0, b"{")
    elif what == "torn state":
        file = os.path.join(folder, "state.bin")
        with open(file, "rb") as f:
            generations = [int.from_bytes(f.read(4096)[8:16], "little") for _ in range(2)]
        patch(file, 4096 * int(np.argmax(generations)), b"\xa5" * 40)
    elif what.endswith("rows lost"):
        start = sum(op[2] for op in scenario.given[:5] if op[0] == "write")
        if scenario.storage == "memmap":
            patch(os.path.join(folder, "columns", "000-obs.npy"), 4096 + 8 * start, b"\xa5" * 8)
        else:  # the chunk behind the one that it may share with the episode before it
            way = STORAGES[scenario.storage]
            steps = (way["obs"] if scenario.storage == "mixed" else way).chunk_steps
            chunk = os.path.join(folder, "columns", "000-obs.zarr", f"c.{-(-start // steps)}.0")
            os.truncate(chunk, 3)


def warm():
    """Import now what the victims would import one by one."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "ringmap."):
        if module.name.split(".")[1] in ("storage", "clips", "buffers"):
            importlib.import_module(module.name)
    for name in ("numcodecs", "multiprocessing.synchronize"):  # half of a victim's time
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.disable()


def patch(path, offset, data):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.pwrite(fd, data, offset)
    os.close(fd)


def run_job(
    root, kinds, scenarios=(), scripts=(), levels=None, offset=0, planted=None, stop=False, storages=("memmap",)
):
    """Run kinds of cases on some scenarios.

    Args:
        root: where the directories are made.
        kinds: `[name in KINDS, every]`: only each so many of the places that there are, from `offset`
            on; the next scenario starts one later.
        scenarios: names in SCENARIOS.
        scripts: seeds of random ones, to be run as well.
        levels: of durability; None for those of each scenario, alternately for random ones.
        offset: where to start counting.
        planted: a name in PLANTS or in UNSEEN.
        stop: end at the first violation.
        storages: names in STORAGES, each of them for every scenario.

    Returns:
        Kind -> report, as JSON has it.
    """
    logging.getLogger("ringmap").setLevel(logging.CRITICAL)
    undisturbed(peeks=20)
    engine.DISK = CrashDisk()
    if planted is not None:
        (PLANTS | UNSEEN)[planted]()
    known = SCENARIOS | SCENARIOS_OF_OTHERS
    work = [(known[name], levels or known[name].levels) for name in scenarios]
    work += [(random_scenario(seed), levels or (("process", "power")[seed % 2],)) for seed in scripts]
    reports = {kind: Report(stop) for kind, _ in kinds}
    with contextlib.suppress(Enough):
        for scenario, level in [
            (s.stored_as(storage), level) for s, at in work for storage in storages for level in at if level in s.levels
        ]:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                bench = Bench(folder, scenario, level, next(iter(reports.values())))
                for kind, every in kinds:
                    bench.report, cpu_s = reports[kind], spent_s()
                    KINDS[kind](bench, every, offset)
                    bench.report.cpu_s += spent_s() - cpu_s
                offset += 1
    return {kind: asdict(report) for kind, report in reports.items()}


def spent_s():
    """Return the processor time of this process and of the victims so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


class Runner:
    """The process, seen from the tests. It runs the jobs of a module, which calls `serve`."""

    def __init__(self, module="tests.crash.kill.campaign"):
        self.module = module

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # its threads make a fork slow
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        # Not at the end of its input: a process that a test forked and left alive holds that open.
        try:
            self.process.communicate("\n", timeout=60)
        finally:
            self.process.kill()

    def run(self, root, **job):
        """Run a job, see `run_job`, and return what it did."""
        file = os.path.join(root, "reports")
        self.process.stdin.write(json.dumps({"file": file, "job": {"root": str(root), **job}}) + "\n")
        self.process.stdin.flush()
        code = self.process.stdout.readline().strip()
        assert code, "the process that runs jobs has ended"
        with open(file) as said:
            assert code == "0", said.read()
            return json.load(said)


def serve(run_job):
    """Run each job that comes in a fork of this process, and write what it returns into a file."""
    warm()
    for line in iter(lambda: sys.stdin.readline().strip(), ""):
        given = json.loads(line)
        if not (child := os.fork()):
            with open(given["file"], "w") as said:
                try:
                    done = run_job(**given["job"])
                except BaseException:
                    traceback.print_exc(file=said)
                    said.flush()
                    os._exit(1)
                json.dump(done, said)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(run_job)
