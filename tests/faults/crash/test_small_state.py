"""The small state outlives the commit that stored it: laps, kills and power cuts, and what a commit costs without
it."""

import errno
import itertools
import os

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault, SyncFailedError
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.records.blobs import HEAD, Segments, segment_name
from tests.disks import Through, undisturbed
from tests.faults.crash.recording import Always, RecordingDisk, materialise

MAX_STEPS = 12
NOTES = {"seeds": [3, 4]}


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk whose segments are full after a few blobs."""
    undisturbed(monkeypatch.setattr, peeks=2)
    monkeypatch.setattr(Segments.__init__, "__defaults__", (600,))
    (tmp_path / "live").mkdir()
    return RecordingDisk(str(tmp_path / "live"))


def write(buf, laps):
    for number in range(laps * MAX_STEPS // 3):
        buf.write_episode({"x": np.full(3, number)})


def lapped(disk, tmp_path, ends, again=False):
    """Sample, note, write two laps, and end; return the sampling state and the notes as they were, what is there then,
    and the directory."""
    path = f"{disk.root}/buf"
    make = Through(ReplayBuffer, disk)
    buf = make(MAX_STEPS, path=path, seed=5, durability="power" if ends == "cut" else "process")
    write(buf, 1)
    buf.sample(7)
    buf.write_episode({"x": np.zeros(3)}, notes=NOTES)
    was = buf.state_dict(), buf.notes
    write(buf, 2)
    buf.engine.owned.abandon()
    if again:  # killed once more, before it has written anything
        make(MAX_STEPS, path=path).engine.owned.abandon()
    found = f"{tmp_path}/left/buf"
    materialise(disk.model.crash(Always(0 if ends == "cut" else 1)), f"{tmp_path}/left")
    with ReplayBuffer.open(found, mode="r+") as buf:
        return was, (buf.state_dict(), buf.notes), found


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("ends", ["kill", "cut"])
def test_two_laps_later_the_generator_goes_on_as_it_did(disk, tmp_path, ends, again):
    was, found, path = lapped(disk, tmp_path, ends, again)
    assert found == was
    assert found[1] == NOTES
    assert ringmap.check(path) == []


def only_where_it_changed(self, at, *parts, blob=CommitFiles._blob):
    """Take the small state of a segment that may be gone, as the first blob of the next one."""
    return blob(self, at or 1, *parts)


@pytest.mark.parametrize(
    ("name", "wrong", "segment"),
    [
        ("_blob", only_where_it_changed, 600),
        ("carry", lambda self, small: self.carried.update(small or {}), 1 << 20),
    ],
    ids=["a segment without it", "a change that is not stored"],
)
def test_control(disk, tmp_path, monkeypatch, name, wrong, segment):
    monkeypatch.setattr(Segments.__init__, "__defaults__", (segment,))
    monkeypatch.setattr(CommitFiles, name, wrong)
    was, found, _ = lapped(disk, tmp_path, "kill")
    assert found != was


def blob_sizes(path):
    table = np.load(f"{path}/episodes.npy")
    return dict(zip(table["seq"].tolist(), table["blob_size"].tolist(), strict=True))


def test_a_commit_that_changes_nothing_of_it_does_not_store_it(tmp_path):
    path = tmp_path / "buf"
    with ReplayBuffer(100, path=path, seed=5) as buf:
        for number in range(6):
            if number == 3:
                buf.sample(2)
            buf.write_episode({"x": np.full(3, number)})
        buf.write_episodes([{"x": np.full(3, number)} for number in range(4)])
        sizes = blob_sizes(path)
    assert sizes[4] > 150
    assert {sizes[seq] for seq in sizes if seq and seq not in (1, 4)} == {HEAD.size + 8}


def after_a_failed_sync(disk, tmp_path, at):
    """Let sync `at` of a flush fail, open again, and cut the power; return state and notes before and after, None if
    there is no such sync.

    No sync covers the episode that stored them, and it is evicted.
    """
    path, make = f"{disk.root}/buf{at}", Through(ReplayBuffer, disk)
    buf = make(MAX_STEPS, path=path, seed=5, spare_rows=MAX_STEPS, sync_every_s=0)
    buf.write_episode({"x": np.zeros(3)})
    buf.sample(7)
    buf.write_episode({"x": np.zeros(3)}, notes=NOTES)
    was = buf.state_dict(), buf.notes
    write(buf, 1)
    disk.fail(at, OSError(errno.EIO, "planted"), only="sync")
    with pytest.raises(EnvironmentFault) as raised:
        buf.flush()
    disk.lift()
    buf.engine.owned.abandon()
    if not isinstance(raised.value, SyncFailedError):  # that of the manifest, the last one
        return None
    make(MAX_STEPS, path=path).engine.owned.abandon()
    materialise(disk.model.crash(Always(0)), f"{tmp_path}/left{at}")
    with ReplayBuffer.open(f"{tmp_path}/left{at}/buf{at}", mode="r+") as buf:
        return was, (buf.state_dict(), buf.notes)


def each_failed_sync(disk, tmp_path):
    """Return what `after_a_failed_sync` does for each sync of a flush."""
    each = (after_a_failed_sync(disk, tmp_path, at) for at in itertools.count(1))
    found = list(itertools.takewhile(lambda one: one is not None, each))
    assert len(found) > 2
    return found


def test_an_opening_after_a_failed_sync_makes_it_durable(disk, tmp_path):
    for was, found in each_failed_sync(disk, tmp_path):
        assert found == was


def test_control_it_is_not_written_again(disk, tmp_path, monkeypatch):
    def restored(self, found, kept, restore=CommitFiles.restore_carried):
        newest = restore(self, found, kept)
        self._restored = None
        return newest

    monkeypatch.setattr(CommitFiles, "restore_carried", restored)
    assert any(found != was for was, found in each_failed_sync(disk, tmp_path))


def test_it_outlives_the_segments_that_no_record_names(disk, tmp_path):
    """The blob of the newest record, which names no episode, is lost: the second opening from then on deletes all
    segments."""
    path, root = f"{disk.root}/buf", f"{tmp_path}/left"
    buf = Through(ReplayBuffer, disk)(MAX_STEPS, path=path, seed=5, sync_every_s=0)
    buf.write_episode({"x": np.zeros(3)}, notes=NOTES)
    buf.clear()
    record = buf.engine.owned.table.read(buf.engine.owned.seq)
    buf.engine.owned.abandon()
    tree = disk.model.crash(Always(1))
    materialise(tree, root)
    with open(f"{root}/buf/data/{segment_name(record.blob_segment)}", "r+b") as file:
        file.seek(record.blob_offset)
        file.write(bytes(record.blob_size))
    for _ in range(3):
        again = Through(ReplayBuffer, RecordingDisk(root, 2, tree)).open(f"{root}/buf", mode="r+")
        assert again.notes == NOTES
        again.engine.owned.abandon()


def laps_after_a_sync(disk, tmp_path):
    """Note, sync in the background, write laps that no commit syncs, and cut the power; return the notes then."""
    buf = Through(ReplayBuffer, disk)(MAX_STEPS, path=f"{disk.root}/buf", seed=5, sync_every_s=0)
    buf.write_episode({"x": np.zeros(3)}, notes=NOTES)
    buf.engine.owned.sync_behind()
    write(buf, 20)
    assert not os.path.exists(f"{disk.root}/buf/data/{segment_name(1)}")
    buf.engine.owned.abandon()
    found = disk.model.crash(Always(0))
    data = found["buf"]["data"]
    for name in {*data} - {*os.listdir(f"{disk.root}/buf/data")}:  # of all that no sync covers, the removals are there
        del data[name]
    materialise(found, f"{tmp_path}/left")
    with ReplayBuffer.open(f"{tmp_path}/left/buf", mode="r+") as buf:
        return buf.notes


def test_a_segment_goes_once_a_later_one_is_durable(disk, tmp_path):
    assert laps_after_a_sync(disk, tmp_path) == NOTES


def test_control_records_are_synced_without_blobs(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(CommitFiles, "_sync_blobs", lambda self: None)
    assert laps_after_a_sync(disk, tmp_path) != NOTES
