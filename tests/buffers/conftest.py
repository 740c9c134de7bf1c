"""One buffer, two homes: what is tested here holds in RAM and on disk alike."""

import os
import tempfile
from pathlib import Path

import pytest

from ringmap import ReplayBuffer


@pytest.fixture
def home(tmp_path):
    """A folder where a sync costs nothing, if there is one: these tests cut no power."""
    if os.access("/dev/shm", os.W_OK):
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ringmap-test-") as folder:
            yield Path(folder)
    else:
        yield tmp_path


class Maker:
    """Makes buffers of one home: `maker(max_steps=...)`."""

    def __init__(self, folder):
        self.folder = folder
        self.made = []

    @property
    def on_disk(self):
        return self.folder is not None

    def __call__(self, *args, name="buf", cls=ReplayBuffer, **options):
        if self.on_disk:
            options.setdefault("path", self.folder / name)
        options.setdefault("sync_every_s", 0)
        buf = cls(*args, **options)
        self.made.append(buf)
        return buf

    def files(self):
        """Return every file below the home with its bytes."""
        if not self.on_disk:
            return {}
        return {
            str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.folder.rglob("*"))
        }

    def close(self):
        for buf in self.made:
            buf.close()


@pytest.fixture(params=["ram", "disk"])
def buffer(request, home):
    """What makes a buffer, in RAM and on disk."""
    maker = Maker(home if request.param == "disk" else None)
    yield maker
    maker.close()


@pytest.fixture
def disk_buffer(home):
    """What makes a buffer on disk."""
    maker = Maker(home)
    yield maker
    maker.close()
