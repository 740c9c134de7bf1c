import pytest

from tests.programs.forked import Forked


@pytest.fixture(scope="session")
def forked():
    """Return what runs programs in forks of one process, which has imported what takes long to import."""
    with Forked() as process:
        yield process
