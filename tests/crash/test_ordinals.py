"""What a power cut takes leaves its ordinals behind: they are given to no other episode."""

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.manifest import Manifest
from tests.crash.recording import Always, RecordingDisk, materialise
from tests.disks import Through, undisturbed

OPTIONS = {"max_steps": 12, "spare_rows": 40, "sync_every_s": 0}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    undisturbed(monkeypatch.setattr, looks=2)


class Ring:
    """A ring whose machine loses its power now and then."""

    def __init__(self, folder):
        self.folder, self.boot = folder, 1
        (folder / "1").mkdir()
        self.disk = RecordingDisk(str(folder / "1"))
        self.given = []

    def open(self):
        self.buf = Through(ReplayBuffer, self.disk)(path=f"{self.disk.root}/buf", **OPTIONS)

    def write(self, count):
        """Store episodes, which this handle and readers see, and note their ordinals."""
        for _ in range(count):
            self.buf.write_episode({"x": np.zeros(3)})
            self.given.append(int(self.buf.engine.owned.origins()[1][-1]))

    def reboot(self, keep=1):
        """Start the machine again; without a power cut everything is kept (1), after one nothing that no sync covers
        (0)."""
        tree = self.disk.model.crash(Always(keep))
        tree["buf"].pop("lock", None)
        self.boot += 1
        root = self.folder / str(self.boot)
        materialise(tree, str(root))
        self.disk = RecordingDisk(str(root), self.boot, tree)


class Rows(Ring):
    """A ring of transitions, each of which is an episode: a commit gives many ordinals."""

    def open(self):
        self.buf = TransitionReplayBuffer(
            12, (), device=None, path=f"{self.disk.root}/buf", disk=self.disk, sync_every_s=0
        )

    def write(self, count):
        for _ in range(count):
            for _ in range(4):
                self.buf.add(0.0, 0, 0.0, 1.0, True)
            self.given += self.buf.episode_dataset().origins()[1][-4:].tolist()


def begun(kind, folder):
    ring = kind(folder)
    ring.open()
    ring.write(2)
    return ring


@pytest.fixture
def ring(tmp_path):
    return begun(Ring, tmp_path)


@pytest.fixture(params=[Ring, Rows])
def each(tmp_path, request):
    return begun(request.param, tmp_path)


def cut_twice(ring):
    ring.buf.flush()
    for count in (5, 3, 4):
        ring.write(count)
        ring.buf.engine.owned.abandon()
        ring.reboot(keep=0)
        ring.open()
    ring.write(2)
    ring.buf.close()
    return ring.given


def is_once(given):
    return len({*given}) == len(given) and given == sorted(given)


def test_no_ordinal_is_given_twice(each):
    assert is_once(cut_twice(each))
    assert ringmap.check(f"{each.disk.root}/buf") == []


def test_after_the_first_rows_are_lost(ring):
    """No record at all is left."""
    ring.buf.engine.owned.abandon()
    ring.reboot(keep=0)
    ring.open()
    assert ring.buf.num_episodes == 0
    ring.write(2)
    ring.buf.close()
    assert is_once(ring.given)


def test_a_reboot_after_a_close_leaves_none_out(ring):
    ring.buf.close()
    for _ in range(2):
        ring.reboot()
        ring.open()
        ring.write(1)
        ring.buf.close()
    assert ring.given == [0, 1, 2, 3]


def test_a_copy_of_a_closed_ring_is_not_closed(ring):
    """The era of its state is another: it must not come to that of the close."""
    ring.buf.close()
    ring.open()
    ring.buf.snapshot(f"{ring.disk.root}/copy")
    manifest = Manifest.decode(Disk().read_file(f"{ring.disk.root}/copy/manifest.json", 1 << 20), "")
    assert manifest.closed is None
    ring.buf.close()


def test_a_manifest_that_is_made_again_leaves_out_what_it_may_have_known(ring):
    cut_twice(ring)
    path = f"{ring.disk.root}/buf"
    with open(f"{path}/manifest.json", "w") as file:
        file.write("{")
    ringmap.repair(path, dry_run=False)
    with ReplayBuffer.open(path, mode="r+") as buf:
        buf.write_episode({"x": np.zeros(3)})
        assert buf.engine.owned.origins()[1][-1] > max(ring.given) + 1000


def forgotten(self, found, beyond=Store._beyond_lost):
    """What is left out is counted from the newest record alone, so that a second cut leaves out the same."""
    self.manifest = self.manifest.__class__.decode(self.manifest.encode(), "")
    return beyond(self, found) - self.manifest.ordinal


CONTROLS = {
    "none is left out": lambda self, found: 0,
    "too few are left out": lambda self, found: self.manifest.ordinal + 2,
    "a second cut leaves out the same": forgotten,
}


@pytest.mark.parametrize("name", CONTROLS)
def test_control(each, monkeypatch, name):
    monkeypatch.setattr(Store, "_beyond_lost", CONTROLS[name])
    assert not is_once(cut_twice(each))
