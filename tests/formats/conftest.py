"""Formats: syncs are noted instead of waited for; a kill does not need them."""

import os

import pytest

from ringmap.formats.common import disk


@pytest.fixture(autouse=True)
def syncs(monkeypatch):
    paths = []
    monkeypatch.setattr(disk, "sync_all", lambda path: paths.append(os.path.basename(path)))
    return paths
