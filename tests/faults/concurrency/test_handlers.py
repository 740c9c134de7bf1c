"""A signal handler that uses the buffer in the middle of a call on it: it works or is refused, and nothing is lost."""

import pytest

from tests.faults.crash.kill.forks import Runner
from tests.tiers import few

CALLS = ["write", "first", "flush", "close", "clear", "snapshot", "finish", "append", "abandon", "sample", "background"]
ACTS = [
    "close",
    "flush",
    "write",
    "sample",
    "read",
    "clear",
    "snapshot",
    "append",
    "finish",
    "abandon",
    "background",
    "reader.close",
]
SAMPLE = [
    ("write", "close"),
    ("write", "write"),
    ("first", "close"),
    ("flush", "close"),
    ("flush", "sample"),
    ("close", "flush"),
    ("close", "close"),
    ("clear", "sample"),
    ("finish", "append"),
    ("append", "abandon"),
    ("snapshot", "write"),
    ("sample", "write"),
    ("background", "flush"),
    ("reader.sample", "reader.sample"),
    ("reader.sample", "reader.close"),
]


@pytest.fixture(scope="module")
def runner():
    with Runner("tests.faults.concurrency.handlers") as process:
        yield process


@pytest.fixture
def start(fast, runner):
    """Return what tries lines of a call, see `handlers.run_job`, in a fork of a process without threads."""

    def start(storage, durability, calls, acts, **options):
        job = {
            "storage": storage,
            "durability": durability,
            "calls": calls,
            "acts": acts,
            **options,
        }
        return runner.run(fast, **job)

    return start


@pytest.mark.parametrize(("calls", "acts"), few(SAMPLE, 5))
def test_some_lines(start, calls, acts):
    storage = "zarr" if len(calls) % 2 else "memmap"
    assert start(storage, "process", calls, acts, number=3)[1] == []


def test_control_without_the_gate(start):
    """A close that takes the files from under a write, as it once did."""
    assert start("memmap", "process", "write", "close", number=45, gate=False)[1]


@pytest.mark.campaign
@pytest.mark.parametrize("storage", ["memmap", "zarr"])
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("calls", [*CALLS, "reader.sample", "reader.refresh"])
def test_every_line(start, storage, durability, calls):
    by_reader = ["reader.sample", "reader.refresh", "reader.close", "write"]
    for acts in by_reader if "reader" in calls else ACTS:
        for blow in ("lines", "calls"):
            outcomes, wrong = start(storage, durability, calls, acts, blow=blow)
            assert wrong == []
            print(calls, acts, storage, durability, blow, outcomes)
