"""Formats: syncs are noted instead of waited for; a kill does not need them."""

import os

import pytest

from ringmap.formats.common import disk


@pytest.fixture(autouse=True)
def syncs(monkeypatch):
    paths = []
    for name in ("sync_all", "sync_file"):
        monkeypatch.setattr(disk, name, lambda path: paths.append(os.path.basename(path)))
    return paths
