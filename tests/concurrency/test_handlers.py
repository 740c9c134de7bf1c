"""A signal handler that uses the buffer in the middle of a call on it: it works or is refused, and nothing is lost."""

import random

import pytest

from ringmap.storage.store import Store
from tests.concurrency.handlers import AfterOurCall, possible, wrong_at

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


def tried(folder, storage, durability, calls, acts, number=None, blow=None):
    how = {} if blow is None else {"blow": blow}
    lines = possible(folder, storage, durability, calls, **how)
    if number is not None and len(lines) > number:
        lines = sorted(random.Random(f"{calls} {acts} {storage}").sample(lines, number))
    outcomes, wrong = wrong_at(folder, storage, durability, calls, acts, lines, **how)
    assert wrong == []
    return outcomes


@pytest.mark.parametrize(("calls", "acts"), SAMPLE)
def test_some_lines(fast, calls, acts):
    tried(fast / "case", "zarr" if len(calls) % 2 else "memmap", "process", calls, acts, number=5)


def test_control_without_the_gate(fast, monkeypatch):
    """A close that takes the files from under a write, as it once did."""
    monkeypatch.setattr(Store, "refuse_within", lambda store, where: None)
    lines = possible(fast / "case", "memmap", "process", "write")
    at = len(lines) // 2
    assert wrong_at(
        fast / "case", "memmap", "process", "write", "close", lines[at : at + 3], most=1
    )[1]


@pytest.mark.campaign
@pytest.mark.parametrize("storage", ["memmap", "zarr"])
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("calls", [*CALLS, "reader.sample", "reader.refresh"])
def test_every_line(fast, storage, durability, calls):
    acts = (
        ["reader.sample", "reader.refresh", "reader.close", "write"] if "reader" in calls else ACTS
    )
    for act in acts:
        for blow in (None, AfterOurCall):
            print(
                calls,
                act,
                storage,
                durability,
                tried(fast / "case", storage, durability, calls, act, blow=blow),
            )
