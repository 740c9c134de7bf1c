"""A part of the crash campaigns, small enough for each run of the tests.

All of them, with their controls: `python -m pytest -m campaign tests/crash`.
"""

import os
import random

import pytest

from tests.crash.cases import Campaign, Case
from tests.crash.test_kill import GROUPS, memory, passes
from tests.crash.test_power import _quiet, base

__all__ = ["_quiet", "base", "memory"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case is a forked process")
@pytest.mark.parametrize("group", ["birth", "end"])
def test_kills_and_interrupts(memory, group):
    kinds = [["changes", 3], ["lines", 401], ["interrupts", 211]]
    passes(memory, kinds=kinds, scenarios=GROUPS[group], levels=["process"])


@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
def test_power_cuts(base, monkeypatch, power):
    case = Case.draw(0, power)
    case.settle(monkeypatch)
    campaign = Campaign(base, random.Random(0), samples=1, share=0.0)
    campaign.run(case)
    assert campaign.states > 50
