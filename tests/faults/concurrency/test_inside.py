"""Public calls wherever code of a user runs in the middle of ours: they work, or are refused, and none hangs.

The whole of it: `python -m tools.campaign.inside`, of both storages and durabilities, and with `--blow calls`.
"""

import pytest

from tests.tiers import few
from tests.unit.buffers.processes import Child
from tools.campaign.inside import main

SAMPLE = ["--calls", "sample;write_episode;flush;close", "--under-way", "write_episode", "--every", "60"]
HANDLERS = [
    ("write_episode;close", "write_episode", 300, "memmap"),
    ("write_episode;sample", "flush", 90, "zarr"),
    ("flush;close", "close", 150, "memmap"),
    ("append;abandon", "finish,append", 150, "zarr"),
    ("write_episode;flush", "snapshot,sync_behind", 400, "memmap"),
    ("reader.sample;reader.close", "reader.sample", 90, "zarr"),
]
"""Calls in a handler, what they interrupt, at every so many lines, and the storage."""


@pytest.mark.parametrize(("calls", "under", "every", "storage"), few(HANDLERS, 3))
def test_a_handler_s_call_works_or_is_refused(capsys, calls, under, every, storage):
    words = ["--only", "handler", "--calls", calls, "--under-way", under, "--every", str(every), "--storage", storage]
    assert main(words) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--blow", "calls", "--durability", "power"]], ids=["lines", "calls"])
def test_a_call_inside_works_or_is_refused(capsys, more):
    assert main([*SAMPLE, *more]) == 0, capsys.readouterr().out


def test_control_without_the_gate():
    """In a child: it is taken out of the package."""
    words = [*SAMPLE, "--only", "handler", "--without-the-gate"]
    assert Child(lambda _: main(words)).result() == 1
