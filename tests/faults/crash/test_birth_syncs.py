"""A folder's sync that fails while the columns are made: a new writer takes nothing for granted."""

import contextlib
import errno
import itertools

from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault
from tests.disks import FaultyDisk
from tests.faults.crash.cases import SCHEMA, episode


class Names(FaultyDisk):
    """Tells what of a folder's names was changed since its last sync that worked."""

    def __init__(self):
        super().__init__()
        self.changed = []

    def rename(self, source, target):
        super().rename(source, target)
        self.changed.append(target.rpartition("/")[2])


def test_a_fixed_schema_is_named_again(tmp_path, monkeypatch):
    """The last sync of a birth fails: the manifest that names the columns may not be on the disk."""
    for at in itertools.count(1):
        disk = Names()
        monkeypatch.setattr("ringmap.buffers.engine.DISK", disk)
        options = {"path": tmp_path / str(at), "durability": "power", "schema": SCHEMA}
        disk.fail(at, OSError(errno.EIO, "I/O error"), only="sync_folder")
        try:
            buf = ReplayBuffer(24, **options)
        except EnvironmentFault:
            disk.lift()
        else:
            break
        disk.changed.clear()
        with contextlib.closing(ReplayBuffer(24, **options)) as buf:
            assert "manifest.json" in disk.changed
            buf.write_episode(episode(3, 5))
            assert buf.check() == []
    disk.lift()
    assert at > 5
    buf.close()
