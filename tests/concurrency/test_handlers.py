"""A signal handler that uses the buffer in the middle of a call on it: it works or is refused, and nothing is lost."""

import pytest

from tests.concurrency.handlers import start

CALLS = ["write", "first", "flush", "close", "clear", "snapshot", "finish", "append", "abandon", "sample",
         "background"]  # fmt: skip
ACTS = ["close", "flush", "write", "sample", "read", "clear", "snapshot", "append", "finish", "abandon",
        "background", "reader.close"]  # fmt: skip
SAMPLE = [
    ("write", "close"), ("write", "write"), ("first", "close"), ("flush", "close"), ("flush", "sample"),
    ("close", "flush"), ("close", "close"), ("clear", "sample"), ("finish", "append"), ("append", "abandon"),
    ("snapshot", "write"), ("sample", "write"), ("background", "flush"),
    ("reader.sample", "reader.sample"), ("reader.sample", "reader.close"),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "acts"), SAMPLE)
def test_some_lines(fast, calls, acts):
    storage = "zarr" if len(calls) % 2 else "memmap"
    assert start(fast / "case", storage, "process", calls, acts, number=5)[1] == []


def test_control_without_the_gate(fast):
    """A close that takes the files from under a write, as it once did."""
    assert start(fast / "case", "memmap", "process", "write", "close", number=20, gate=False)[1]


@pytest.mark.campaign
@pytest.mark.parametrize("storage", ["memmap", "zarr"])
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("calls", [*CALLS, "reader.sample", "reader.refresh"])
def test_every_line(fast, storage, durability, calls):
    by_reader = ["reader.sample", "reader.refresh", "reader.close", "write"]
    for acts in by_reader if "reader" in calls else ACTS:
        for blow in ("lines", "calls"):
            outcomes, wrong = start(fast / "case", storage, durability, calls, acts, blow=blow)
            assert wrong == []
            print(calls, acts, storage, durability, blow, outcomes)
