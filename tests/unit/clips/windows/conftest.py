"""Windows in RAM and on disk."""

import pytest

from tests.disks import ram_folder


@pytest.fixture
def home():
    """A folder where a sync costs nothing, if there is one: these tests cut no power."""
    with ram_folder() as folder:
        yield folder
