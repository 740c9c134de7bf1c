"""Text of rows that are not committed: their words are in the frames that need them first."""

import errno
import os
import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.buffers.steps import StepRing
from ringmap.errors import EnvironmentFault
from ringmap.storage.disk import files
from ringmap.storage.disk.checksums import FINISH
from ringmap.storage.disk.files import Disk
from ringmap.storage.records import step_file
from tests.disks import undisturbed
from tests.faults.crash.recording import Always, RecordingDisk, materialise

SCHEMA = {"n": ((), "i8"), "task": ((2,), str)}


def row(number):
    return {"n": number, "task": [f"word {number // 2}", "and " * number]}


def check(buf, least):
    """Assert that the rows are the first ones, at least so many."""
    n = buf.get_col_data("n").tolist() if buf.num_episodes else []
    assert n == [*range(len(n))]
    assert len(n) >= least
    expected = [[text.rstrip("\0") for text in row(number)["task"]] for number in n]
    assert not n or buf.get_col_data("task").tolist() == expected


def make(path, kind, **options):
    """Return a buffer, and a function that stores a row in an open group or an open episode."""
    buf = ReplayBuffer(60, path=path, schema=SCHEMA, spare_rows=31, seed=0, **options)
    if kind == "episode":
        episode = buf.begin_episode()
        return buf, lambda number: episode.append(row(number))
    store = buf.engine.owned
    store.settings = replace(store.settings, group_s=0)
    ring = StepRing.over(buf, "test")
    ring.group = 20
    return buf, lambda number: ring.append({n: np.array([v]) for n, v in row(number).items()})


@pytest.mark.parametrize("kind", ["group", "episode"])
def test_rows_before_a_cut_stay(tmp_path, kind):
    buf, add = make(tmp_path / "ring", kind)
    ends = []
    for number in range(6):
        add(number)
        (steps,) = (tmp_path / "ring").glob("open/*/steps.bin")
        ends.append(steps.stat().st_size - len(FINISH))
    buf.engine.owned.abandon()
    for cut in (ends[0] - 1, ends[0], ends[3] + 13, ends[-1] - 1, ends[-1]):
        shutil.copytree(tmp_path / "ring", tmp_path / "cut")
        (steps,) = (tmp_path / "cut").glob("open/*/steps.bin")
        os.truncate(steps, cut)
        whole = sum(end <= cut for end in ends)
        assert ringmap.check(tmp_path / "cut") == []
        with closing(ReplayBuffer.open(tmp_path / "cut", "r+", interrupted="keep")) as again:
            check(again, whole)
            assert again.num_steps_stored == whole
            again.write_episode({n: [v] for n, v in row(whole).items()})
            check(again, whole + 1)
        assert ringmap.check(tmp_path / "cut") == []
        shutil.rmtree(tmp_path / "cut")


@pytest.mark.parametrize("kind", ["group", "episode"])
def test_words_whose_write_failed_are_written_again(tmp_path, monkeypatch, kind):
    buf, add = make(tmp_path / "ring", kind)
    add(0)
    write, failures = files.File.write, iter([OSError(errno.ENOSPC, "planted")])

    def full(self, data, offset):
        if self.path.endswith("steps.bin"):
            for error in failures:
                raise error
        write(self, data, offset)

    monkeypatch.setattr(files.File, "write", full)
    with pytest.raises(EnvironmentFault):
        add(1)
    for number in (1, 2):
        add(number)
    buf.engine.owned.abandon()
    with closing(ReplayBuffer.open(tmp_path / "ring", "r+", interrupted="keep")) as again:
        check(again, 3)
        assert again.num_steps_stored == 3


def test_a_group_that_its_writer_has_committed_meanwhile_is_not_damaged(tmp_path, monkeypatch):
    buf, add = make(tmp_path / "ring", "group")
    add(0)
    (path,) = (tmp_path / "ring").glob("open/*/steps.bin")
    real = step_file._rows_in

    def late(*args):
        buf.engine.commit_pending("test")
        ring = StepRing.over(buf, "test")
        ring.group = 15
        ring.append({n: np.array([v]) for n, v in row(1).items()})  # into the file of the first group
        return real(*args)

    monkeypatch.setattr(step_file, "_rows_in", late)
    found = step_file.read_steps(Disk(), str(path.parent), 60)
    assert (found.count, found.fault) == (0, "")
    buf.close()


@pytest.mark.parametrize("kind", ["group", "episode"])
@pytest.mark.parametrize("is_flawed", [False, True])
def test_rows_and_words_survive_a_power_cut(tmp_path, monkeypatch, kind, is_flawed):
    undisturbed(monkeypatch.setattr, peeks=2)
    (tmp_path / "live").mkdir()
    disk = RecordingDisk(str(tmp_path / "live"))
    durability = "process" if is_flawed else "power"
    buf, add = make(tmp_path / "live/ring", kind, durability=durability, disk=disk)
    for number in range(5):
        add(number)
    buf.engine.owned.abandon()
    materialise(disk.model.crash(Always(0)), str(tmp_path / "left"))
    with closing(ReplayBuffer.open(tmp_path / "left/ring", "r+", interrupted="keep")) as again:
        check(again, 0)
        assert (again.num_steps_stored == 5) != is_flawed
