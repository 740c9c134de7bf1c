import pytest

from tests.disks import ram_folder


@pytest.fixture
def fast():
    """A folder where a sync costs nothing, if there is one: then the writer never waits for a disk."""
    with ram_folder() as folder:
        yield folder
