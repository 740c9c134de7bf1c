"""Lance: the conformance suite, and what is its own."""

import os
import warnings

import pytest

from ringmap.formats.lance import layout
from ringmap.testing.formats import FormatTests


class TestLance(FormatTests):
    name = "lance"
    suffix = ".lance"
    survives_forks = False


def test_a_forked_process_that_uses_it_is_warned_once(monkeypatch):
    layout.lance()
    monkeypatch.setattr(layout, "_used_by", os.getpid() + 1)  # as after a fork
    with pytest.warns(RuntimeWarning, match="multiprocessing_context='spawn'"):
        layout.lance()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout.lance()
