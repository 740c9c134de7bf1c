"""Episodes that are stored by one call at durability "power": one sync makes all of them durable before the call
returns."""

import os

import gymnasium
import numpy as np
import pytest

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.recording import ReplayBufferCollectionWrapper
from ringmap.recording.adapters import EpisodeSink
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.step_file import StepFile
from tests.disks import Through, undisturbed
from tests.faults.crash.recording import Always, RecordingDisk, materialise

MANY = 8


def episode(number):
    return {"number": np.full(3, number), "noise": np.arange(15).reshape(3, 5) * number}


@pytest.fixture
def disk(tmp_path, monkeypatch):
    undisturbed(monkeypatch.setattr, peeks=2)
    (tmp_path / "live").mkdir()
    return RecordingDisk(str(tmp_path / "live"))


@pytest.fixture
def buf(disk):
    with Through(ReplayBuffer, disk)(1000, path=f"{disk.root}/buf", durability="power", history_len=1) as made:
        made.write_episode(episode(0))
        yield made


def syncs(disk, work):
    """Return how many syncs some work makes."""
    before = len(disk.log)
    work()
    return sum(entry[0] in ("sync", "sync_folder") for entry in disk.log[before:])


def after_a_cut(disk, tmp_path, name):
    """Return the episodes after a power cut that loses all that no sync covers."""
    materialise(disk.model.crash(Always(0)), str(tmp_path / name))
    with ReplayBuffer(1000, path=tmp_path / name / "buf", history_len=1) as buf:
        return list(buf.episodes())


def test_one_sync_makes_all_of_them_durable(buf, disk, tmp_path):
    one = syncs(disk, lambda: buf.write_episode(episode(1)))
    many = syncs(disk, lambda: buf.write_episodes([episode(2 + i) for i in range(MANY)]))
    flush = syncs(disk, buf.flush)
    assert many <= flush
    assert many < MANY * one / 2
    found = [int(steps["number"][0]) for steps in after_a_cut(disk, tmp_path, "cut")]
    assert found == [*range(2 + MANY)]


def test_without_the_sync_a_cut_loses_them(buf, disk, tmp_path):
    buf.write_episode(episode(1), sync=False)
    assert len(buf.lengths) == 2
    assert len(after_a_cut(disk, tmp_path, "cut")) == 1
    buf.write_episode(episode(2))  # its sync covers the one before it
    assert len(after_a_cut(disk, tmp_path, "later")) == 3


def test_those_before_one_that_is_refused_are_durable(buf, disk, tmp_path):
    with pytest.raises(ValueError, match="schema mismatch"):
        buf.write_episodes([episode(1), episode(2), {"other": np.zeros(3)}])
    assert len(after_a_cut(disk, tmp_path, "cut")) == 3


def test_a_clear_covers_what_was_stored_before_it_without_a_sync(buf, disk, tmp_path):
    buf.write_episode(episode(1), sync=False)
    buf.clear()
    assert not buf.engine.owned.is_unsynced
    assert after_a_cut(disk, tmp_path, "cut") == []


def test_a_step_that_ends_several_episodes_syncs_once(disk, tmp_path):
    envs = gymnasium.make_vec("CartPole-v1", MANY, vectorization_mode="sync", max_episode_steps=4)
    path = f"{disk.root}/buf"
    with Through(ReplayBuffer, disk)(1000, path=path, durability="power", history_len=1) as buf:
        env = ReplayBufferCollectionWrapper(envs, buf)
        env.reset(seed=0)
        actions = np.zeros(MANY, np.int64)
        counts = [syncs(disk, lambda: env.step(actions)) for _ in range(10)]
        stored = buf.num_episodes
        assert stored == 2 * MANY
        assert len(after_a_cut(disk, tmp_path, "cut")) == stored
        alone = syncs(disk, lambda: buf.write_episode(buf.load_episode(0)))
        assert max(counts[5:]) < MANY * alone / 2  # the first episodes make the columns, too
        env.close()


class Writes(Disk):
    """The real disk, which notes the path of each write."""

    def __init__(self):
        super().__init__()
        self.paths = []

    def before(self, change, path, *details):
        if change == "write":
            self.paths.append(path)


def writes_of_a_step(path):
    """Return how often one step writes rows, and how often blobs, where all of `MANY` environments end their
    episodes."""
    disk = Writes()
    envs = gymnasium.make_vec("CartPole-v1", MANY, vectorization_mode="sync", max_episode_steps=4)
    with Through(ReplayBuffer, disk)(1000, path=path, sync_every_s=0) as buf:
        env = ReplayBufferCollectionWrapper(envs, buf)
        env.reset(seed=0)
        for _ in range(8):  # the first episodes make the columns
            env.step(np.zeros(MANY, np.int64))
        stored = buf.num_episodes
        disk.paths.clear()
        env.step(np.zeros(MANY, np.int64))
        assert buf.num_episodes == stored + MANY
        folders = [os.path.basename(os.path.dirname(one)) for one in disk.paths]
        env.close()
    return folders.count("columns"), folders.count("data")


def test_a_step_that_ends_several_episodes_writes_each_column_once(tmp_path):
    assert writes_of_a_step(tmp_path / "buf") == (5, 1)


def test_control_episodes_that_are_stored_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(EpisodeSink, "joins", False)
    assert writes_of_a_step(tmp_path / "buf") == (5 * MANY, MANY)


def shown_and_left(disk, tmp_path, before_recovery=lambda: None):
    """Interrupt an `add` between its write and its sync; return how many rows are shown then, and how many after a
    power cut."""
    make = {"capacity": 20, "obs_shape": (2,), "device": None}
    buf = Through(TransitionReplayBuffer, disk)(**make, path=f"{disk.root}/rows", durability="power", sync_every_s=0)
    buf.add(np.zeros(2), 0, 0.0, np.ones(2), False)
    disk.fail(1, KeyboardInterrupt(), only="sync")
    with pytest.raises(KeyboardInterrupt):
        buf.add(np.ones(2), 1, 1.0, np.full(2, 2), False)
    disk.lift()
    before_recovery()
    shown = len(buf)
    materialise(disk.model.crash(Always(0)), str(tmp_path / "cut"))
    left = TransitionReplayBuffer(**make, path=tmp_path / "cut" / "rows")
    found = shown, len(left)
    left.close()
    buf.engine.owned.abandon()
    return found


def test_a_row_that_is_shown_after_an_interrupt_survives_a_cut(disk, tmp_path):
    assert shown_and_left(disk, tmp_path) == (2, 2)


def test_control_a_recovery_that_does_not_sync_the_group(disk, tmp_path, monkeypatch):
    def unsynced():
        monkeypatch.setattr(StepFile, "sync", lambda self: None)

    assert shown_and_left(disk, tmp_path, unsynced) == (2, 1)
