import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path):
    """A folder in RAM where there is one: what is tested here does not depend on the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ringmap-damage-", dir="/dev/shm") as folder:
        yield Path(folder)
