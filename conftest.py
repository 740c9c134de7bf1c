"""What tests and doctests share: fixed seeds, and a folder of their own for doctests."""

import random
import sys

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _same_every_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for third parties; our own code takes a Generator
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
