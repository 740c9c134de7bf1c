"""HDF5: the conformance suite, and what is its own: kills at every step, foreign files, damage."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import h5py
import numpy as np
import pytest

from ringmap.data import get_format, load_dataset
from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    LockedError,
    MissingExtraError,
    NotFoundError,
    UnknownFormatError,
    UnsupportedError,
)
from ringmap.formats.common import disk, safe_hdf5, untrusted
from ringmap.formats.common.swap import Staging
from ringmap.formats.hdf5 import HDF5Writer, journal
from ringmap.formats.hdf5.journal import JournaledFile, journaled
from ringmap.testing.datasets import make_episode, make_episodes
from ringmap.testing.formats import FormatTests
from tests.unit.formats.others import OtherOptions


class TestHDF5(OtherOptions, FormatTests):
    name = "hdf5"
    suffix = ".h5"
    reading_changes = True


@pytest.mark.slow
class TestCompressed(OtherOptions, FormatTests):
    name = "hdf5"
    suffix = ".hdf5"
    reading_changes = True
    writer_options: ClassVar = {"compression": "gzip", "compression_opts": 1, "chunk_nbytes": 4096}


def write(path, episodes, **options):
    with HDF5Writer(path, **options) as writer:
        writer.write_episodes(episodes)
    return path


def wheres(path):
    dataset = load_dataset(path)
    found = [dataset.load_episode(i)["where"].tolist() for i in range(len(dataset.lengths))]
    dataset.close()
    return found


def expected(episodes):
    return [episode["where"].tolist() for episode in episodes]


# -- killed at every step --------------------------------------------------------------------------

CALLS = ("write", "truncate", "reserve", "remove", "replace", "replace_file", "remove_folder", "sync_all", "sync_file")


class Faults:
    """Counts the calls that change the disk; at number `at` it runs `what`."""

    def __init__(self, monkeypatch, what, at=-1):
        self.count, self.at, self.what = 0, at, what
        for name in CALLS:
            monkeypatch.setattr(disk, name, self.wrap(name, getattr(disk, name)))

    def wrap(self, name, call):
        def counted(*args):
            self.count += 1
            if self.count - 1 == self.at:
                self.what(name, *args)
            return call(*args)

        return counted


def die(name, *args):
    if name == "write":  # half of it, to the page
        fd, view, offset = args
        os.pwrite(fd, view[: len(view) // 2 // 4096 * 4096], offset)
    os.kill(os.getpid(), signal.SIGKILL)


def run_killed(action):
    """Run `action` in a child; return whether it was killed (else it ended well)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return status != 0


class Groups(FormatTests):
    """Each episode is a group of its own, of some pages."""

    name, suffix, reading_changes = "hdf5", ".h5", True

    def __init__(self, **writer_options):
        self.writer_options = writer_options

    def episodes_to_kill(self):
        episodes = enumerate(make_episodes((4, 300, 2, 90, 1)))
        return [e | {"text": np.full(len(e["where"]), "é" * i, "U9"), "_episode_data": {"n": i}} for i, e in episodes]


@pytest.mark.parametrize("places", [12, pytest.param(None, marks=pytest.mark.campaign)], ids=["some", "all"])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunk_nbytes": 8192}], ids=["plain", "gzip"])
def test_killed_in_the_middle_of_groups(tmp_path, monkeypatch, options, places):
    monkeypatch.setattr(HDF5Writer, "group_nbytes", 1)
    calls, lost = Groups(**options).losses(tmp_path, 2, places)
    assert calls > 30
    assert lost == []


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_an_overwrite_that_raises_is_not_done_by_the_next_writer(tmp_path, monkeypatch, mode):
    path = write(tmp_path / "a.h5", make_episodes((3,)))

    def fails(left, right):
        raise OSError(errno.EIO, "planted")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="planted"):
        patch.setattr(disk, "exchange", fails)
        write(path, make_episodes((4, 5)), mode="overwrite")
    assert wheres(path) == expected(make_episodes((3,)))
    later = [make_episode(7, 2)]
    write(path, later, mode=mode)
    assert wheres(path) == expected(later if mode == "overwrite" else [*make_episodes((3,)), *later])
    assert os.listdir(tmp_path) == ["a.h5"]


def test_closing_syncs_before_the_log_goes(tmp_path, syncs, monkeypatch):
    remove = disk.remove
    monkeypatch.setattr(disk, "remove", lambda path: (syncs.append(os.path.basename(path)), remove(path)))
    path = tmp_path / "a.h5"
    with HDF5Writer(path) as writer:
        syncs.clear()
        writer.write_episode(make_episode(0, 3))
    assert syncs == ["a.h5.journal", "a.h5.journal", "a.h5", "a.h5.ringmap-log"]


def test_a_swap_is_on_the_disk_before_each_step_that_needs_it(tmp_path, syncs, monkeypatch):
    """A power cut keeps the new dataset before its plan, the plan before any rename, and all of them before the old
    one goes; without a plan the main one comes last."""

    def note(name):
        call = getattr(disk, name)

        def noted(path, *args):
            syncs.append(f"{name} {os.path.basename(path)}")
            return call(path, *args)

        monkeypatch.setattr(disk, name, noted)

    for name in ("replace", "exchange", "remove"):
        note(name)
    items, path, new = ["a.lance", "a_episodes.lance"], str(tmp_path / "a.lance"), ".a.lance.new"
    born = [new, "replace a_episodes.lance", "replace a.lance"]
    swapped = [new, "remove plan.new", "replace plan.new", new, "exchange a.lance", "exchange a_episodes.lance"]
    for expected in (born, [*swapped, tmp_path.name, "remove", "remove", "remove plan"]):
        staging = Staging(path, items, lambda name: True)
        for item in items:
            Path(staging.folder, item).write_bytes(b"")
        syncs.clear()
        staging.put()
        assert [one.partition(" a")[0] if one.startswith("remove a") else one for one in syncs] == expected
        staging.close()


def no_journal(fd, size, records):
    """Pages go straight to the file."""


def late(fd, size, records):
    """The file changes first, and is journalled afterwards."""
    pages = {page: content for page, _, content in records}
    path = os.readlink(f"/proc/self/fd/{fd}")
    file = os.open(path.removesuffix(journal.SUFFIX), os.O_RDWR)
    for first, count in journal.runs(pages):
        for page in range(first, first + count):
            disk.write(file, memoryview(pages[page]), page * journal.PAGE)
    os.close(file)
    WRITE(fd, size, records)


WRITE = journal.write


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [no_journal, late])
def test_control_another_order(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(HDF5Writer, "group_nbytes", 1)
    monkeypatch.setattr(journal, "write", wrong)
    assert Groups().losses(tmp_path, 2, stop=True)[1]


def test_a_plain_reader_needs_no_recovery_between_commits(tmp_path, monkeypatch):
    """Killed in the middle of a group, the file opens in h5py as it lies there."""
    path = write(tmp_path / "a.h5", make_episodes())
    commit = JournaledFile.commit

    def action():
        monkeypatch.setattr(HDF5Writer, "group_nbytes", 1)
        with HDF5Writer(path) as writer:
            for number in range(5, 9):
                writer.write_episode(make_episode(number, 50))
            monkeypatch.setattr(JournaledFile, "commit", lambda self: die("commit"))
            writer.write_episode(make_episode(9, 5000))

    assert run_killed(action)
    assert JournaledFile.commit is commit
    with h5py.File(path) as file:
        assert file["ep_len"][:].tolist() == [5, 1, 9, 2, 7, 50, 50, 50]
        assert file["where"][-1].tolist() == [7, 49]
    assert wheres(path) == expected([*make_episodes(), *(make_episode(n, 50) for n in range(5, 9))])


def half_applied(path, monkeypatch):
    """Leave `path` as a kill between the journal and its end does, with one more episode."""

    def action():
        with pytest.MonkeyPatch.context() as patch, HDF5Writer(path) as writer:
            patch.setattr(journal, "apply", lambda *args: die("apply"))
            writer.write_episode(make_episode(5, 3))

    assert run_killed(action)


def test_a_reader_finishes_the_commit(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", make_episodes())
    half_applied(path, monkeypatch)
    assert os.path.getsize(f"{path}{journal.SUFFIX}") > 4096
    assert len(get_format("hdf5").open_reader(path).lengths) == 6
    assert not os.path.exists(f"{path}{journal.SUFFIX}")
    assert len(load_dataset(path).lengths) == 6
    write(path, [])
    assert os.listdir(tmp_path) == ["a.h5"]


def test_a_fault_after_the_commit_point(tmp_path, monkeypatch):
    """The episodes of the group are there, once; what is left to do waits for the next call that can."""

    def full(fd, pages):
        raise OSError(errno.EFBIG, "File too large")

    path = tmp_path / "a.h5"
    monkeypatch.setattr(HDF5Writer, "group_nbytes", 1)
    with HDF5Writer(path) as writer:
        writer.write_episode(make_episode(0, 3))
        writer.write_episode(make_episode(1, 4))
        with monkeypatch.context() as patch:
            patch.setattr(journal, "apply", full)
            for _ in range(2):
                with pytest.raises(EnvironmentFault, match="nothing was written"):
                    writer.write_episode(make_episode(2, 5))
        writer.write_episode(make_episode(2, 5))
    assert wheres(path) == expected(make_episodes((3, 4, 5)))


def test_a_journal_of_other_content_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", make_episodes())
    half_applied(path, monkeypatch)
    pending = Path(f"{path}{journal.SUFFIX}").read_bytes()
    path.unlink()
    os.unlink(f"{path}{journal.SUFFIX}")
    write(path, make_episodes((7, 7)))
    Path(f"{path}{journal.SUFFIX}").write_bytes(pending)
    before = path.read_bytes()
    with pytest.raises(CorruptError, match=r"journal.*differs.*delete the journal"):
        load_dataset(path)
    with pytest.raises(CorruptError, match="differs"):
        write(path, make_episodes())
    assert path.read_bytes() == before


def test_a_commit_is_told_by_the_time_of_the_file(tmp_path, monkeypatch):
    """Also where it comes so soon after the last one that the clock of the file system has not moved."""
    path = write(tmp_path / "a.h5", make_episodes((3,)))
    then = os.stat(path).st_mtime_ns

    def at_once(call):
        return lambda fd, *args: (call(fd, *args), os.utime(fd, ns=(then, then)))

    for name in ("write", "reserve", "truncate"):
        monkeypatch.setattr(disk, name, at_once(getattr(disk, name)))
    with journaled(str(path)) as file:
        file["ep_len"].attrs.modify("ringmap_birth", "0" * 32)
    assert os.stat(path).st_mtime_ns > then


@pytest.mark.parametrize("cut", [0, 7, 5000, -1])
def test_half_a_journal_counts_for_nothing(tmp_path, monkeypatch, cut):
    path = write(tmp_path / "a.h5", make_episodes())
    half_applied(path, monkeypatch)
    pending = Path(f"{path}{journal.SUFFIX}")
    pending.write_bytes(pending.read_bytes()[:cut])
    assert len(get_format("hdf5").open_reader(path).lengths) == 5  # the last one is in the log
    write(path, [])
    assert wheres(path) == expected([*make_episodes(), make_episode(5, 3)])


@pytest.mark.parametrize("what", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()])
def test_a_fault_at_every_change(tmp_path, what):
    """A disk that fills, or Ctrl-C: the call raises, nothing or all of it is there, the next works."""
    path = tmp_path / "a.h5"
    cases = 0
    for at in range(1000):
        path.unlink(missing_ok=True)
        write(path, make_episodes())

        def fail(*args):
            raise what

        with HDF5Writer(path) as writer, pytest.MonkeyPatch.context() as patch:
            writer.write_episode(make_episode(5, 200))
            writer._drain_at = 0
            faults = Faults(patch, fail, at)
            raised = None
            try:
                writer.write_episode(make_episode(6, 4))
            except (OSError, KeyboardInterrupt) as error:
                raised = error
            assert isinstance(raised, type(what) | None)
            assert getattr(raised, "errno", None) in (getattr(what, "errno", None), None)
            finished = faults.count <= at
            patch.undo()
            writer.write_episode(make_episode(7, 3))
        found, before = wheres(path), [*make_episodes(), make_episode(5, 200)]
        with_it = expected([*before, make_episode(6, 4), make_episode(7, 3)])
        without = expected([*before, make_episode(7, 3)])
        if raised is None:
            assert found == with_it
        elif isinstance(raised, OSError):
            assert found == without
        else:
            assert found in (with_it, without)
        cases += 1
        if finished:
            break
    assert cases > 8
    assert os.listdir(tmp_path) == ["a.h5"]


# -- roles -----------------------------------------------------------------------------------------


def test_another_program_that_keeps_it_locked(tmp_path, monkeypatch):
    """The episodes stay in the log, and are read; the next writer moves them."""
    path = write(tmp_path / "a.h5", make_episodes())
    monkeypatch.setattr(journal, "_WRITER_WAIT_S", 0.01)
    monkeypatch.setattr(HDF5Writer, "group_nbytes", 1)
    with h5py.File(path, "r"):
        with pytest.raises(LockedError, match="open elsewhere"), HDF5Writer(path) as writer:
            for number in range(5, 8):
                writer.write_episode(make_episode(number, 3))
        assert wheres(path) == expected([*make_episodes(), *(make_episode(n, 3) for n in range(5, 8))])
    write(path, [])
    assert os.listdir(tmp_path) == ["a.h5"]
    assert wheres(path) == expected([*make_episodes(), *(make_episode(n, 3) for n in range(5, 8))])
    monkeypatch.setattr("ringmap.formats.hdf5.WAIT_S", 0.01)
    monkeypatch.setattr(journal, "WAIT_S", 0.01)
    with h5py.File(path, "r+"), pytest.raises(LockedError):
        load_dataset(path)


def test_a_reader_beside_a_writer_in_another_process(tmp_path, monkeypatch):
    """Its windows are whole, whatever the writer does meanwhile."""
    path = write(tmp_path / "a.h5", make_episodes((40, 40)), compression="gzip", chunk_nbytes=700)
    dataset = load_dataset(path, num_steps=4)
    child = os.fork()
    if child == 0:
        HDF5Writer.group_nbytes = 1
        write(path, [make_episode(n, 20) for n in range(2, 40)])
        os._exit(0)
    rounds = 0
    while os.waitpid(child, os.WNOHANG) == (0, 0) or not rounds:
        rounds += 1
        for at in range(0, len(dataset), 7):
            episode, start = dataset.clip_indices[at]
            assert dataset[at]["where"].tolist() == [[episode, start + t] for t in range(4)]
    assert len(load_dataset(path).lengths) == 40


def test_a_process_may_end_while_a_thread_has_it_open(tmp_path):
    """A fork, and the process itself."""
    write(tmp_path / "a.h5", make_episodes())
    code = f"""
import os, sys, threading
from ringmap.data import load_dataset
dataset = load_dataset({os.fspath(tmp_path / "a.h5")!r})
dataset.load_episode(0)
if (child := os.fork()) and os.waitpid(child, 0)[1]:
    os._exit(1)
dataset.load_episode(1)
threading.Thread(target=lambda kept: threading.Event().wait(), args=(dataset,), daemon=True).start()
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_child_that_outlives_the_writer_holds_no_lock(tmp_path):
    path = tmp_path / "a.h5"
    reading, writing = os.pipe()
    with HDF5Writer(path) as writer:
        writer.write_episode(make_episode(0, 3))
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    assert wheres(path) == expected([make_episode(0, 3)])
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_progress(tmp_path, capsys):
    write(tmp_path / "a.h5", make_episodes(), progress=True)
    assert "5/5" in capsys.readouterr().err


def test_links_to_a_dataset_stay_links(tmp_path):
    path = write(tmp_path / "a.h5", make_episodes())
    link = tmp_path / "link.h5"
    link.symlink_to(path)
    write(link, make_episodes((3, 3)), mode="overwrite")
    assert link.is_symlink()
    assert wheres(path) == expected(make_episodes((3, 3)))


# -- the layout ------------------------------------------------------------------------------------


def test_others_read_it(tmp_path):
    """Plain names and dtypes lie in the file as they are, for any tool that reads HDF5."""
    episode = make_episode(0, 300) | {"task": np.array(["push é"] * 300), "done": np.arange(300) > 5}
    path = write(tmp_path / "a.h5", [episode, episode])
    with h5py.File(path, "r") as file:
        assert set(file) == {*episode, "ep_len", "ep_offset"}
        assert file["ep_len"][:].tolist() == [300, 300]
        assert file["ep_len"].dtype == np.int32
        assert file["ep_offset"][:].tolist() == [0, 300]
        assert file["ep_offset"].dtype == np.int64
        assert h5py.check_string_dtype(file["task"].dtype) == ("utf-8", None)
        assert file["task"][0] == "push é".encode()
        assert file["pixels"].dtype == np.uint8
        assert file["pixels"].shape == (600, 12, 10, 3)
        assert file["done"].dtype == bool


def test_data_of_episodes_are_typed_attributes(tmp_path):
    """Nothing but columns stands at the root; numbers and texts are what any program reads."""
    goal = np.arange(3, dtype=np.float16)
    data = {"seed": 3, "return": 0.5, "task": "schieb é", "solved": True, "goal": goal, "big": 2**70, "i": np.int64(3)}
    path = write(tmp_path / "a.h5", [make_episode(0, 3) | {"_episode_data": data}, make_episode(1, 2)])
    with h5py.File(path) as file:
        assert set(file) == {*make_episode(0, 3), "ep_len", "ep_offset"}
        attrs = file["ep_len"].attrs
        found = {name: attrs[f"episode_0.{name}"] for name in list(data)[:5]}
        assert found["goal"].tolist() == [0, 1, 2] and found["goal"].dtype == np.float16
        assert [found[n] for n in ("seed", "return", "task", "solved")] == [3, 0.5, "schieb é", True]
        assert not any(name.startswith("episode_1.") for name in attrs)
    got = load_dataset(path).get_episode_data()
    assert [type(got[name][0]) for name in data] == [type(value) for value in data.values()]


def test_nested(tmp_path):
    """A column whose name is a path lies in a group, where HDF5 can; else flat, as all do by default."""
    names = ["obs/a", "x", "obs/b/c", "x/y", "ep_len/z", "obs//d", "../e"]
    episode = {name: np.arange(3) + i for i, name in enumerate(names)}
    for nested in (True, False):
        path = write(tmp_path / f"{nested}.h5", [episode], nested=nested)
        write(path, [episode])
        dataset = load_dataset(path)
        assert sorted(dataset.column_names) == sorted(names)
        assert all(dataset.get_col_data(name).tolist() == [*rows, *rows] for name, rows in episode.items())
        dataset.close()
        with h5py.File(path) as file:
            assert ("obs" in file) == nested
            if nested:
                assert file["obs/b/c"][:].tolist() == [2, 3, 4] * 2


def test_chunks_of_about_a_megabyte(tmp_path):
    episode = {"pixels": np.zeros((2, 64, 64, 3), np.uint8), "x": np.zeros(2)}
    path = write(tmp_path / "a.h5", [episode], compression="gzip")
    with h5py.File(path) as file:
        assert file["pixels"].chunks == (85, 64, 64, 3)
        assert file["pixels"].compression == "gzip"
        assert file["x"].chunks == (16384,)


@pytest.fixture
def foreign(tmp_path):
    """A file as stable-worldmodel's writer leaves it: newest HDF5, one-row chunks, no attributes."""
    path = tmp_path / "theirs.h5"
    rows = np.arange(12)
    with h5py.File(path, "w", libver="latest") as file:
        for name, data in {"pixels": np.zeros((12, 8, 8, 3), np.uint8), "action": rows * 1.0}.items():
            file.create_dataset(name, data=data, maxshape=(None, *data.shape[1:]), chunks=(1, *data.shape[1:]))
        text = np.array([f"t{i}" for i in rows], object)
        file.create_dataset("50%", data=text, maxshape=(None,), dtype=h5py.string_dtype(), chunks=(1,))
        file.create_dataset("ep_len", data=np.array([5, 7], np.int32), maxshape=(None,), chunks=(1,))
        file.create_dataset("ep_offset", data=np.array([0, 5], np.int64), maxshape=(None,), chunks=(1,))
    return path


def test_foreign_files_are_read(foreign):
    dataset = load_dataset(foreign, num_steps=2)
    assert len(dataset) == 10
    assert dataset[-1]["action"].tolist() == [[10.0], [11.0]]
    assert dataset[4]["50%"] == ["t5", "t6"]
    assert dataset.load_episode(0)["pixels"].shape == (5, 3, 8, 8)


def test_foreign_files_are_appended_to_and_survive_a_kill(foreign):
    episode = {"pixels": np.ones((2, 8, 8, 3), np.uint8), "action": [12.0, 13.0], "50%": ["longer é", "x"]}

    def action():
        HDF5Writer.group_nbytes = 1
        with HDF5Writer(foreign) as writer:
            writer.write_episode(episode)
            writer.write_episode(episode | {"_episode_data": {"big": b"x" * 200_000}})
            writer.write_episode(episode)
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_killed(action)
    with h5py.File(foreign) as file:  # no mark of an open writer: others can read it as well
        assert file["ep_len"][:].tolist() == [5, 7, 2, 2]
    write(foreign, [])
    dataset = load_dataset(foreign)
    assert dataset.offsets.tolist() == [0, 5, 12, 14, 16]
    assert dataset.load_episode(-1)["50%"].tolist() == ["longer é", "x"]
    assert dataset.get_episode_data()["big"] == [None, None, None, b"x" * 200_000, None]
    dataset.close()
    before = foreign.read_bytes()
    with pytest.raises(ValueError, match="no UTF-8"):
        write(foreign, [episode | {"50%": ["a\0b", "x"]}])
    assert foreign.read_bytes() == before


def plant(path, **datasets):
    with h5py.File(path, "r+") as file:
        for name, value in datasets.items():
            if name in file:
                del file[name]
            if value is not None:
                file[name] = value


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ep_len": None}, UnknownFormatError, "no dataset 'ep_len'"),
        ({"ep_offset": h5py.SoftLink("/where")}, UnknownFormatError, "no dataset 'ep_offset'"),
        ({"ep_len": np.array([5, -1], np.int32)}, CorruptError, "do not describe"),
        ({"ep_len": np.array([5], np.int32)}, CorruptError, "do not describe"),
        ({"ep_len": np.array([0.5])}, CorruptError, "expected integers"),
        ({"ep_len": np.array([5, 70], np.int32)}, CorruptError, "the episodes need 75"),
        ({"ep_offset": np.array([0, 2**62], np.int64)}, CorruptError, "the episodes need"),
        ({"action": np.zeros(7)}, CorruptError, "'action' has 7 rows"),
        ({"link": h5py.ExternalLink("/etc/passwd", "/")}, CorruptError, "link to elsewhere"),
        ({"link": h5py.SoftLink("/action")}, CorruptError, "link to elsewhere"),
        ({"pair": np.zeros(12, [("a", "i4"), ("b", "i4")])}, UnsupportedError, "HDF5 type"),
    ],
)
def test_damage_is_named(foreign, change, error, message):
    plant(foreign, **change)
    with pytest.raises(error, match=message):
        load_dataset(foreign)


def test_rows_outside_the_file_are_refused(foreign, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 12)
    with h5py.File(foreign, "r+") as file:
        file.create_dataset("stolen", shape=(12,), dtype="u1", external=[(str(secret), 0, 12)])
    with pytest.raises(CorruptError, match="keeps its rows in other files"):
        load_dataset(foreign)
    with h5py.File(foreign, "r+") as file:
        del file["stolen"]
        layout = h5py.VirtualLayout(shape=(12,), dtype="f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "x.h5"), "action", shape=(12,))
        file.create_virtual_dataset("stolen", layout)
    with pytest.raises(CorruptError, match="keeps its rows in other files"):
        load_dataset(foreign)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (12, 2000), "chunks": (1, 100)}, "a step of column 'vast' takes 2,000 bytes"),
        ({"shape": (12, 100), "chunks": (12, 100)}, "has chunks .12, 100. of uint8, expected at most 1,000 bytes each"),
    ],
)
def test_what_no_memory_is_asked_for_is_refused(foreign, monkeypatch, options, message):
    """However well a filter packs it: the bytes that are stored do not tell."""
    with h5py.File(foreign, "r+") as file:
        file.create_dataset("vast", dtype="u1", compression="gzip", **options)[:] = 0
    for module in (untrusted, safe_hdf5):
        monkeypatch.setattr(module, "LARGEST_ROW", 1000)
    with pytest.raises(CorruptError, match=message):
        load_dataset(foreign)


@pytest.mark.parametrize("packed", [None, "gzip"])
def test_more_than_the_file_can_hold_is_refused(foreign, monkeypatch, packed):
    """Without a filter a byte is a byte."""
    monkeypatch.setattr(untrusted, "_FEW", 1000)
    rows = 10**6 if packed is None else 10**11
    with h5py.File(foreign, "r+") as file:
        file.create_dataset("vast", (rows,), "u1", chunks=(1000,), compression=packed)[:1000] = 1
    with pytest.raises(CorruptError, match="'vast': declares"):
        load_dataset(foreign)


def test_what_is_no_column_is_named(foreign):
    with h5py.File(foreign, "r+") as file:
        file.create_group("meta")["deep"] = 1
        file["fps"] = 30
        file["per_episode"] = np.zeros(2)
    with pytest.raises(CorruptError, match="or it is no column"):
        load_dataset(foreign)
    plant(foreign, per_episode=None)
    with pytest.warns(UserWarning, match=r"left out, .*: 'fps', 'meta/deep'$"):
        assert sorted(load_dataset(foreign).column_names) == ["50%", "action", "pixels"]
    plant(foreign, fps=None, meta=None)
    with h5py.File(foreign, "r+") as file:
        file.create_dataset("refs", shape=(12,), dtype=h5py.ref_dtype)
    with pytest.raises(UnsupportedError, match="HDF5 type"):
        load_dataset(foreign)


def test_bad_attributes(tmp_path):
    path = write(tmp_path / "a.h5", [{"t": np.zeros(3, "M8[s]"), "a/b": np.zeros(3)}])
    for dtype in ("O", "V8", "nonsense", "<f8", 7):
        with h5py.File(path, "r+") as file:
            file["t"].attrs["ringmap_dtype"] = dtype
        with pytest.raises(CorruptError, match="says that its dtype"):
            load_dataset(path)
    with h5py.File(path, "r+") as file:
        file["t"].attrs["ringmap_dtype"] = "<M8[s]"
        file["a%2Fb"].attrs["ringmap_column"] = "{"
    with pytest.raises(CorruptError, match="bad name"):
        load_dataset(path)


def test_damaged_episode_data(tmp_path):
    path = write(tmp_path / "a.h5", [make_episode(0, 3) | {"_episode_data": {"seed": 2**70}}])
    with h5py.File(path, "r+") as file:
        attrs = file["ep_len"].attrs
        (name,) = [a for a in attrs if a.startswith("ringmap_episode_0")]
        attrs[name] = np.frombuffer(b"\x05\0\0\0[[1]]", np.uint8)
    with pytest.raises(CorruptError, match="data of episode 0"):
        load_dataset(path).get_episode_data()


def test_an_unknown_filter_names_what_brings_it(foreign):
    with h5py.File(foreign, "r+") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)  # Zstandard
        space = h5py.h5s.create_simple((12,))
        h5py.h5d.create(file.id, b"packed", h5py.h5t.NATIVE_DOUBLE, space, plist)
    if not h5py.h5z.filter_avail(32015):
        with pytest.raises(MissingExtraError, match="pip install hdf5plugin"):
            load_dataset(foreign)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89HDF\r\n\x1a\n" + b"\0" * 900, "half of a file"], ids=len)
def test_other_content(tmp_path, content):
    """It is refused, for reading and writing, and left alone."""
    path = tmp_path / "a.h5"
    if content == "half of a file":
        whole = write(path, make_episodes()).read_bytes()
        content = whole[: len(whole) // 2]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not an HDF5 file|can't open"):
        load_dataset(path)
    with pytest.raises(ValueError, match=r"not an HDF5 file|can't open"):
        write(path, make_episodes())
    if content == b"hello":
        with pytest.raises(UnknownFormatError, match="not an HDF5 file"):
            write(path, make_episodes(), mode="overwrite")
    assert path.read_bytes() == content


@pytest.mark.slow
def test_flipped_bytes_never_crash(tmp_path):
    """A flipped byte of the file's structure is an error of ours, or harmless; HDF5 lets no other out."""
    path = write(tmp_path / "a.h5", make_episodes(), chunk_nbytes=512)
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for at in rng.integers(0, min(len(whole), 20_000), 150).tolist():
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            dataset = load_dataset(path)
            for name in dataset.column_names:
                dataset.get_col_data(name)
            dataset.close()
        except (CorruptError, UnknownFormatError):
            pass


def test_fixed_size_columns_can_not_be_appended_to(foreign):
    plant(foreign, action=np.zeros(12))
    with pytest.raises(ValueError, match="fixed size"):
        write(foreign, [])
    assert len(load_dataset(foreign).lengths) == 2


def test_a_directory_of_one(tmp_path):
    folder = tmp_path / "set"
    hdf5 = get_format("hdf5")
    write(folder / "a.h5", make_episodes())
    assert hdf5.detect(folder)
    assert len(load_dataset(folder).lengths) == 5
    with pytest.raises(ValueError, match="is a directory"):
        write(folder, [])
    write(folder / "b.hdf5", make_episodes())
    with pytest.raises(ValueError, match=r"Ambiguous.*a\.h5, b\.hdf5"):
        load_dataset(folder)
    assert not hdf5.detect(tmp_path)
    with pytest.raises(NotFoundError):
        hdf5.open_reader(tmp_path)


def test_detected_by_its_first_bytes(tmp_path):
    hdf5 = get_format("hdf5")
    path = write(tmp_path / "no_suffix", make_episodes())
    assert hdf5.detect(path)
    with h5py.File(tmp_path / "user_block", "w", userblock_size=1024):
        pass
    assert hdf5.detect(tmp_path / "user_block")
    (tmp_path / "other").write_bytes(b"x" * 5000)
    assert not hdf5.detect(tmp_path / "other")
    assert hdf5.detect("not/there/yet.hdf5")
    assert not hdf5.detect("not/there/yet")


@pytest.mark.parametrize("options", [{"chunk_nbytes": 0}, {"compression": "nonsense"}, {"mode": "w"}], ids=str)
def test_bad_options(tmp_path, options):
    with pytest.raises(ValueError, match=r"chunk_nbytes|nonsense|write mode"):
        write(tmp_path / "a.h5", make_episodes(), **options)
