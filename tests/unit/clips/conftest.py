import pytest

from ringmap.clips import index as index_module


@pytest.fixture
def guided(monkeypatch):
    """Look clips up through the guide, however few episodes there are: other folders test the search among
    few."""
    monkeypatch.setattr(index_module, "_FEW", 0)
