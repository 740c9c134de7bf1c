"""One buffer, two homes: what is tested here holds in RAM and on disk alike."""

import pytest

from ringmap import ReplayBuffer
from tests.disks import ram_folder


@pytest.fixture
def home():
    """A folder where a sync costs nothing, if there is one: these tests cut no power."""
    with ram_folder() as folder:
        yield folder


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
