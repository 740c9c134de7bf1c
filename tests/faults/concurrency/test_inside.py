"""Public calls wherever code of a user runs in the middle of ours: they work, or are refused, and none hangs."""

import pytest

from tests.unit.buffers.processes import Child
from tools.campaign.inside import main

pytestmark = pytest.mark.slow
SAMPLE = ["--calls", "sample;write_episode;flush;close", "--under-way", "write_episode", "--every", "60"]


def test_a_call_inside_works_or_is_refused(capsys):
    assert main(SAMPLE) == 0, capsys.readouterr().out


def test_control_without_the_gate():
    """In a child: it is taken out of the package."""
    assert Child(lambda _: main([*SAMPLE, "--only", "handler", "--without-the-gate"])).result() == 1
