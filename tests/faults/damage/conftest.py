import pytest

from tests.disks import ram_folder, undisturbed


@pytest.fixture
def place():
    """A folder in RAM where there is one: what is tested here does not depend on the disk."""
    with ram_folder() as folder:
        yield folder


@pytest.fixture
def no_waiting(monkeypatch):
    """A reader of a slot that stays torn gives up at once: there is no writer that would mend it."""
    undisturbed(monkeypatch.setattr)
