"""What a power cut takes leaves its ordinals behind: they are given to no other episode."""

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.checksums import SLOT_NBYTES
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.episodes import origins
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import LAST_ORDINAL
from tests.disks import Cut, Through, undisturbed
from tests.faults.crash.recording import Always, RecordingDisk, materialise

OPTIONS = {"max_steps": 12, "spare_rows": 40, "sync_every_s": 0}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    undisturbed(monkeypatch.setattr, peeks=2)


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
            self.given.append(int(origins(self.buf.engine.owned)[1][-1]))

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
    for count in (15, 3, 4):  # 15: one more would need a sync
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


class Lanes(Rows):
    """Calls of 256 lanes, whose episodes end at once."""

    def open(self):
        self.buf = TransitionReplayBuffer(
            256, (), device=None, path=f"{self.disk.root}/buf", disk=self.disk, sync_every_s=0
        )

    def write(self, lanes):
        none = np.zeros(lanes)
        self.buf.add(none, none.astype(int), none, none, np.ones(lanes, bool))
        self.given += self.buf.episode_dataset().origins()[1][-lanes:].tolist()


def all_rows_lost(folder):
    """Begin an episode in each row of the ring, and lose all: one row more, and a sync had come before it."""
    ring = Lanes(folder)
    ring.open()
    manifest = ring.buf.engine.owned.manifest
    for _ in range(3):
        ring.write(256)
    assert manifest.rows == len(ring.given) < manifest.table_slots
    ring.buf.engine.owned.abandon()
    ring.reboot(keep=0)
    ring.open()
    assert len(ring.buf) == ring.buf.engine.owned.seq == 0
    ring.write(9)
    ring.buf.close()
    return ring


def test_after_all_rows_are_lost(tmp_path):
    assert is_once(all_rows_lost(tmp_path).given)


def test_control_one_row_less(tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "_beyond_lost", lambda self, found: self.manifest.rows - 1)
    assert not is_once(all_rows_lost(tmp_path).given)


def killed_while_it_opens(ring, folder):
    """Cut the power, kill the opening before each change, and open again; yield the
    ordinals that are given then."""
    ring.write(4)
    ring.buf.engine.owned.abandon()
    tree = ring.disk.model.crash(Always(0))
    tree["buf"].pop("lock", None)
    for at in itertools.count(1):
        root = folder / f"killed{at}"
        materialise(tree, str(root))
        ring.disk = RecordingDisk(str(root), 2, tree)
        ring.disk.fail(at, Cut(), sticky=True)
        with contextlib.suppress(Cut):
            ring.open()
            ring.buf.engine.owned.abandon()
            return
        ring.disk = RecordingDisk(str(root), 2, tree)
        ring.open()
        known = len(ring.given)
        ring.write(1)
        ring.buf.engine.owned.abandon()
        yield ring.given[known:]
        del ring.given[known:]


def test_a_kill_of_the_opening_gives_none_twice(ring, tmp_path):
    given = list(killed_while_it_opens(ring, tmp_path))
    assert len(given) > 5
    assert all(min(one) > max(ring.given) for one in given)


def test_after_the_state_is_lost_too(ring):
    """It was never closed, and no state is left that says so."""
    ring.buf.engine.owned.abandon()
    ring.reboot(keep=0)
    with open(f"{ring.disk.root}/buf/state.bin", "r+b") as file:
        file.write(bytes(StateFile.nbytes))
    ring.open()
    ring.write(2)
    ring.buf.close()
    assert is_once(ring.given)


def test_after_a_close_the_state_is_lost_and_then_the_rows(ring):
    """Eras begin anew without a state: one must not come to that of an earlier close."""
    ring.buf.close()
    ring.open()
    for slots in (2, 0):
        ring.write(2)
        ring.buf.engine.owned.abandon()
        ring.reboot(keep=0)
        with open(f"{ring.disk.root}/buf/state.bin", "r+b") as file:
            file.write(bytes(slots * SLOT_NBYTES))
        ring.open()
    ring.write(2)
    ring.buf.close()
    assert is_once(ring.given)


def test_no_ordinal_beyond_the_last_is_left_out(ring):
    store = ring.buf.engine.owned
    store.manifest = replace(store.manifest, ordinal=LAST_ORDINAL - 3)
    ring.buf.flush()
    for _ in range(2):
        store.abandon()
        ring.reboot(keep=0)
        ring.open()
        store = ring.buf.engine.owned
        assert store.manifest.ordinal == LAST_ORDINAL - 3
    store.abandon()


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
        assert origins(buf.engine.owned)[1][-1] > max(ring.given) + 1000


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
