import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def fast(tmp_path):
    """A folder where a sync costs nothing, if there is one: then the writer never waits for a disk."""
    if os.access("/dev/shm", os.W_OK):
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ringmap-test-") as folder:
            yield Path(folder)
    else:
        yield tmp_path
