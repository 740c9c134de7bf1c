"""kill -9 and Ctrl-C at every line, change and system call: what is there afterwards is a committed state.

The cases are in `kill/`: script.py says what is done, blows.py when the blow falls, verdict.py what must
hold. By default a sample runs; all of it, with a line of numbers for each kind:

    python -m pytest -m campaign tests/crash/test_kill.py -s
"""

import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.crash.kill.campaign import Runner
from tests.crash.kill.families import SCENARIOS_OF_OTHERS
from tests.crash.kill.planted import PLANTS, UNSEEN
from tests.crash.kill.script import SCENARIOS
from tests.disks import ram_folder
from tests.tiers import few

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="each case is a forked process")

BIRTH = [name for name in SCENARIOS if "birth" in name or "first" in name]
COMMIT = [name for name in SCENARIOS if name.startswith("commit")]
OPEN = [name for name in SCENARIOS if name.startswith("open")]
STREAM = [name for name in SCENARIOS if name.startswith("stream")]
END = [name for name in SCENARIOS if name not in {*BIRTH, *COMMIT, *OPEN, *STREAM}]
GROUPS = {"commit": COMMIT, "stream": STREAM, "birth": BIRTH, "end": END, "open": OPEN}
STRACE = shutil.which("strace")


@pytest.fixture(scope="session")
def runner():
    with Runner() as process:
        yield process


@pytest.fixture
def memory(runner):
    """A folder in RAM where there is one, and what runs jobs there: a kill does not care, and a sync costs nothing."""
    with ram_folder() as folder:
        yield folder, runner


def start(memory, **job):
    """Run a job in a process of its own and return its reports."""
    folder, runner = memory
    return runner.run(folder, **job)


def violations(reports):
    return [violation for report in reports.values() for violation in report["violations"]]


def cases(reports):
    return {kind: report["cases"] for kind, report in reports.items()}


def passes(memory, **job):
    reports = start(memory, **job)
    assert violations(reports) == []
    assert all(cases(reports).values()), cases(reports)


# -- a sample ------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", few(GROUPS, 2))
def test_kills_and_interrupts(memory, group):
    passes(memory, kinds=[["changes", 23]], scenarios=GROUPS[group], levels=["process"])
    kinds = [["lines", 2999], ["interrupts", 2999], ["calls", 11987]]
    passes(memory, kinds=kinds, scenarios=GROUPS[group][::5], levels=["process"])


ZARR = [
    "first episode",
    "commit that evicts",
    "commit of a long episode",
    "open after a reboot that lost rows",
]


@pytest.mark.slow
def test_kills_and_interrupts_of_compressed_columns(memory):
    kinds = [["changes", 29], ["lines", 3989], ["interrupts", 3989], ["calls", 14983]]
    passes(memory, kinds=kinds, scenarios=ZARR, levels=["process"], storages=["zarr"])
    kinds = [["changes", 23], ["lines", 2999]]
    passes(memory, kinds=kinds, scenarios=["commit that evicts"], levels=["power"], storages=["mixed"])


@pytest.mark.slow
def test_compressed_columns_killed_again_and_in_ram(memory):
    kinds = [["changes", 23], ["again", 2999], ["in_ram", 997]]
    passes(memory, kinds=kinds, scenarios=["commit that evicts"], levels=["process"], storages=["zarr"])
    passes(memory, kinds=[["randomly", 2]], scripts=[4], storages=["mixed"])


def test_kills_and_interrupts_at_the_level_of_power_cuts(memory):
    chosen = [
        "first episode",
        "commit that evicts",
        "commit of a long episode",
        "clear",
        "flush",
        "stream, keep",
    ]
    kinds = [["changes", 29], ["lines", 3593], ["interrupts", 3593]]
    passes(memory, kinds=kinds, scenarios=chosen, levels=["power"])


@pytest.mark.slow
def test_killed_again_during_recovery(memory):
    chosen = [
        "birth with schema",
        "first episode",
        "commit of a long episode",
        "open with streams, keep",
    ]
    chosen += ["open after a reboot that lost rows"]
    passes(memory, kinds=[["changes", 61], ["again", 4999]], scenarios=chosen, levels=["process"])


@pytest.mark.slow
def test_interrupted_again_during_recovery(memory):
    chosen = ["first episode", "commit of a long episode", "clear", "stream, keep"]
    passes(memory, kinds=[["twice", 797]], scenarios=chosen, levels=["process"])


def test_interrupts_of_a_buffer_in_ram(memory):
    chosen = [
        "first episode",
        "commit that evicts",
        "commit of a long episode",
        "clear",
        "stream, keep",
    ]
    passes(memory, kinds=[["in_ram", 293]], scenarios=chosen, levels=["process"])


def test_random_kills(memory):
    passes(memory, kinds=[["randomly", 2]], scripts=[0])


def test_a_second_writer_is_kept_out_and_a_dead_one_keeps_nobody_out(memory):
    kinds = [["locked", 2], ["orphan", 3]]
    passes(memory, kinds=kinds, scenarios=["commit that evicts"], levels=["process"])


OTHERS = ["transitions", "priorities", "labels", "values", "chains"]


@pytest.mark.parametrize("family", few(OTHERS, 2))
def test_kills_of_other_buffers(memory, family):
    chosen = [name for name in SCENARIOS_OF_OTHERS if name.startswith(family)]
    every = 37 if family == "priorities" else 127
    passes(memory, kinds=[["changes", every]], scenarios=chosen[1:], levels=["process"])
    kinds = [["changes", every], ["lines", 9973]]
    passes(memory, kinds=kinds, scenarios=chosen[1:2], levels=["power"])


@pytest.mark.skipif(STRACE is None, reason="needs strace")
def test_kills_before_system_calls(memory):
    try_strace()
    chosen = ["birth", "commit that evicts", "flush"]
    passes(memory, kinds=[["system_calls", 11]], scenarios=chosen, levels=["power"])


def try_strace():
    tried = subprocess.run([STRACE, "-e", "inject=sync:signal=KILL", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"strace can't trace here: {tried.stderr.strip()}")


# -- controls ------------------------------------------------------------------------------------

CAUGHT = {
    "record before rows": ("changes", "commit that evicts"),
    "record before blob": ("changes", "commit that evicts"),
    "state.bin before record": ("changes", "commit that evicts"),
    "rows overwritten before their retire record": ("changes", "commit of a long episode"),
    "segment deleted before its retirement": ("changes", "commits, a segment each"),
    "stream removed before its commit": ("changes", "stream, keep"),
    "finished stream not named in its commit": ("changes", "stream, keep"),
    "columns renamed after the manifest": ("changes", "birth with schema"),
    "episode table made after the manifest": ("changes", "birth"),
    "manifest written in place": ("changes", "flush"),
    "orphaned segments kept": ("changes", "commit after sampling"),
    "torn record not wiped": ("changes", "open what was being written"),
    "lock not taken": ("locked", "commit that evicts"),
    "places counted in another state": ("calls", "birth"),
    "memory never marked stale": ("interrupts", "commit that evicts"),
    "memory changed before the files": ("interrupts", "commit that evicts"),
    "chunk written in place": ("changes", "commit that evicts"),
    "chunk removed before the new one is there": ("changes", "commit that evicts"),
    "unfinished chunk never removed": ("changes", "commit that evicts"),
    "successors written after the commit": ("changes", "transitions: first calls"),
    "words of priorities after the log": ("changes", "priorities: a log that is full"),
    "values written over the newest, in two pieces": ("changes", "values: updates"),
    "labels and their round apart": ("changes", "labels: first relabelling"),
}
OF_CHUNKS = [planted for planted in CAUGHT if "chunk" in planted]
CAUGHT_COMPRESSED = ["record before rows", "rows overwritten before their retire record"]


def test_each_planted_bug_has_its_control():
    assert CAUGHT.keys() == PLANTS.keys()


@pytest.mark.parametrize(
    ("planted", "storage"),
    few(
        [(p, "zarr" if p in OF_CHUNKS else "memmap") for p in CAUGHT] + [(p, "zarr") for p in CAUGHT_COMPRESSED],
        8,
    ),
)
def test_control(memory, planted, storage):
    kind, scenario = CAUGHT[planted]
    level = "power" if planted.startswith("segment") else "process"
    samples = {"changes": (23, 1), "calls": (97,), "interrupts": (97, 7, 1)}.get(kind, (1,))
    reports = start(
        memory,
        kinds=[[kind, every] for every in samples],  # as above, and then every one
        scenarios=[scenario],
        levels=[level],
        planted=planted,
        stop=True,
        storages=[storage],
    )
    found = violations(reports)
    assert found, cases(reports)
    print(f"{planted}: caught after {cases(reports)[kind]} cases: {found[-1]}")
    # Left alone the wrong order must go well, or the kills prove nothing; but a torn record is there from the start.
    assert "wiped" in planted or not [text for text in found if ", uncut:" in text]


@pytest.mark.parametrize("planted", UNSEEN)
def test_no_kill_shows(memory, planted):
    scenarios = ["commits, a turn of the ring"]
    passes(memory, kinds=[["changes", 7]], scenarios=scenarios, levels=["power"], planted=planted)


# -- all of it -----------------------------------------------------------------------------------

EVERY = int(os.environ.get("EVERY", "1"))
"""Only each so many of the places of the campaign, but for changes: all of them take hours."""
LONG = [*COMMIT, *END, *STREAM, "first episode"]
ALL = [*SCENARIOS]
STORED = os.environ.get("STORAGE", "memmap,zarr,mixed").split(",")
"""How columns are stored in the campaign: `STORAGE=zarr` runs the scenarios with compressed columns alone."""


def campaign(memory, what, at_once=2, **job):
    """Run a job over two processes and print its numbers."""
    name = "scripts" if "scripts" in job else "scenarios"
    items = job.pop(name)
    shares = [items[n::at_once] for n in range(at_once)]
    job.setdefault("storages", STORED)
    job["kinds"] = [[kind, every * (1 if kind == "changes" else EVERY)] for kind, every in job["kinds"]]

    def share(number):
        folder = memory[0] / str(number)
        folder.mkdir(exist_ok=True)
        with Runner() as runner:
            return runner.run(folder, **{name: shares[number]}, offset=number, **job)

    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(share, range(at_once)))
    for kind in done[0]:
        total = {
            key: sum(len(r[kind][key]) if key == "violations" else r[kind][key] for r in done)
            for key in ("cases", "directories", "impossible", "violations", "cpu_s")
        }
        print(f"\n| {what}: {kind} |", " | ".join(f"{value:,.0f}" for value in total.values()), "|")
    assert [text for reports in done for text in violations(reports)] == []


@pytest.mark.campaign
class TestCampaign:
    def test_every_line_and_change_at_process_level(self, memory):
        kinds = [["changes", 1], ["lines", 1], ["interrupts", 1], ["calls", 7]]
        campaign(memory, "process", kinds=kinds, scenarios=ALL, levels=["process"])

    def test_every_line_and_change_at_power_level(self, memory):
        kinds = [["changes", 1], ["lines", 1], ["interrupts", 5]]
        campaign(memory, "power", kinds=kinds, scenarios=LONG, levels=["power"])

    def test_killed_again_during_recovery(self, memory):
        campaign(memory, "both", kinds=[["changes", 1], ["again", 8]], scenarios=ALL)

    def test_interrupted_again_during_recovery(self, memory):
        campaign(memory, "process", kinds=[["twice", 37]], scenarios=ALL, levels=["process"])

    def test_interrupts_of_a_buffer_in_ram(self, memory):
        without = [name for name in LONG if name not in ("close", "close and open")]
        campaign(memory, "ram", kinds=[["in_ram", 1]], scenarios=without, levels=["process"])

    def test_random_kills(self, memory):
        """Of 50 scripts, or of as many as there is time for: LASTS_S, from the one that SEED says on."""
        kinds = [["randomly", 1], ["from_outside", 1]]
        first, began = 100 * int(os.environ.get("SEED", "1")), time.monotonic()
        lasts_s = float(os.environ.get("LASTS_S", "inf"))
        for script in range(first, first + 50, 2):
            campaign(memory, "both", kinds=kinds, scripts=[script, script + 1])
            if time.monotonic() - began > lasts_s:
                break

    def test_second_writers_and_orphans(self, memory):
        campaign(memory, "both", kinds=[["locked", 1], ["orphan", 1]], scenarios=LONG)

    @pytest.mark.parametrize("family", OTHERS)
    def test_other_buffers(self, memory, family):
        chosen = [name for name in SCENARIOS_OF_OTHERS if name.startswith(family)]
        others = {"scenarios": chosen, "storages": ["memmap"]}
        kinds = [["changes", 3], ["lines", 1]]
        campaign(memory, f"{family}, process", kinds=kinds, levels=["process"], **others)
        campaign(memory, f"{family}, power", kinds=[["changes", 3]], levels=["power"], **others)
        if STRACE is not None:
            try_strace()
            campaign(memory, f"{family}, power", kinds=[["system_calls", 3]], levels=["power"], **others)

    @pytest.mark.skipif(STRACE is None, reason="needs strace")
    def test_every_system_call(self, memory):
        try_strace()
        campaign(memory, "both", kinds=[["system_calls", 1]], scenarios=ALL)
