"""What all formats share: kills at every change to the disk, overwriting, converting, merging, warm starts."""

import os
import shutil
import signal
import threading

import numpy as np
import pytest

from ringmap.data import ReplayBuffer, ShardedReplayBuffer, convert, detect_format, get_format, load_dataset, merge
from ringmap.errors import CorruptError, InputError, LockedError, ReadOnlyError, ReplacedError, RoleError
from ringmap.formats.common import disk
from ringmap.formats.common import writer as writing
from ringmap.formats.zarr import ZarrWriter
from ringmap.testing.datasets import make_episode, make_episodes
from tests.tiers import few
from tests.unit.formats.killing import FOLDERS, LOSSLESS, WRITERS, each_kill, overwrite, place, wheres, with_data, write

# -- killed at every change to a file ---------------------------------------------------------------

EXTENT = [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.campaign)]
"""Whether to kill at every change, or at some, evenly."""


def begun(tmp_path, name, keep):
    """Return a new folder with a copy of the dataset `kept`, and where it is in there."""
    folder = tmp_path / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for item in (keep, tmp_path / "kept_episodes.lance"):
        if item is not None and item.exists():
            copy = shutil.copytree if item.is_dir() else shutil.copy
            copy(item, folder / item.name.replace("kept", "made"))
    return folder, place(folder, name)


@pytest.mark.parametrize("whole", EXTENT)
@pytest.mark.parametrize(("name", "exchange"), few([*((n, True) for n in WRITERS), ("lance", False)], 3), ids=str)
def test_overwrite_killed_at_every_change(tmp_path, name, exchange, whole):
    """Whenever a replacement is cut short, the old dataset or the new one is there, whole."""
    old = with_data(make_episodes((3, 2)))
    new = with_data([make_episode(7, 2)], 70)
    keep = write(place(tmp_path, name, "kept"), name, old)
    expected_old, expected_new = (
        [[e["where"].tolist() for e in es], [e["_episode_data"]["n"] for e in es]] for es in (old, new)
    )
    seen = []

    def begin():
        return begun(tmp_path, name, keep)[1], name, new, exchange

    for at, outcome, (path, *_) in each_kill(whole, begin, overwrite, 3):
        found = list(wheres(path))
        assert found in (expected_old, expected_new), f"killed at {at}, {outcome.calls[-1]}"
        seen.append(found == expected_new)
        write(path, name, old, mode="overwrite")  # the next one works, and leaves nothing beside it
        assert list(wheres(path)) == expected_old
        assert not [n for n in os.listdir(path.parent) if n.startswith(".")]
    assert seen == sorted(seen)  # old ... old, new ... new
    assert not seen[0]


# -- overwriting, locks, forks ---------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_not_ours_is_never_deleted(tmp_path, name):
    path = write(place(tmp_path, name), name, make_episodes((2,)))
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        write(path, name, make_episodes((3,)), mode="overwrite")
    assert (path / "notes.txt").read_text() == "mine"
    assert wheres(path)[0] == [make_episode(0, 2)["where"].tolist()]
    other = tmp_path / "other"
    other.mkdir()
    (other / "diary").write_text("mine")
    for mode in ("append", "overwrite"):
        with pytest.raises(ValueError, match="holds something else"):
            write(other, name, make_episodes((3,)), mode=mode)
    assert os.listdir(other) == ["diary"]


@pytest.mark.parametrize("name", WRITERS)
def test_one_writer(tmp_path, name):
    path = write(place(tmp_path, name), name, [])
    with get_format(name).open_writer(path, **LOSSLESS[name]) as writer:
        writer.write_episode(make_episode(0, 2))
        with pytest.raises(LockedError):
            write(path, name, [])
        with pytest.raises(LockedError):
            write(path, name, [], mode="overwrite")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                writer.write_episode(make_episode(1, 2))
            except ReadOnlyError:
                code = 0
                writer.__exit__(None, None, None)
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        writer.write_episode(make_episode(1, 3))
    assert wheres(path)[0] == [make_episode(i, 2 + i)["where"].tolist() for i in range(2)]


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_writes_nothing(tmp_path, monkeypatch, name):
    """An episode that the disk refuses changes nothing; the next one is written."""
    path = place(tmp_path, name)
    with get_format(name).open_writer(path, **LOSSLESS[name]) as writer:
        writer.write_episode(make_episode(0, 2))
        with monkeypatch.context() as patch:

            def full(fd, parts, offset):
                os.pwrite(fd, b"half", offset)
                raise OSError(28, "No space left on device")

            patch.setattr(disk, "append", full)
            with pytest.raises(OSError, match="nothing was written"):
                writer.write_episode(make_episode(9, 5))
        writer.write_episode(make_episode(1, 3))
    assert wheres(path)[0] == [make_episode(i, 2 + i)["where"].tolist() for i in range(2)]


# -- converting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": None}, "'reward'"),
        ({"extra": np.zeros(3)}, "'extra'"),
        ({"action": np.zeros((3, 5), np.float32)}, "'action'"),
        ({"reward": np.zeros(3, np.float32)}, "'reward'"),
    ],
)
def test_merge_refuses_by_name(tmp_path, change, message):
    one = write(tmp_path / "one.h5", "hdf5", make_episodes((3,)))
    odd = {k: v for k, v in (make_episode(1, 3) | change).items() if v is not None}
    two = write(tmp_path / "two.h5", "hdf5", [odd])
    with pytest.raises(ValueError, match=message) as caught:
        merge([one, two], tmp_path / "all.zarr", progress=False)
    assert "two.h5" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["one.h5", "two.h5"]


def test_merge(tmp_path):
    short = write(tmp_path / "1.h5", "hdf5", [{"x": ["a", "b"], "y": [1, 2]}])
    empty = write(tmp_path / "2.h5", "hdf5", [])
    wide = write(tmp_path / "3.h5", "hdf5", [{"y": [3], "x": ["longer"], "_episode_data": {"n": 1}}])
    dest = tmp_path / "all.lance"
    merge([short, empty, wide, load_dataset(short)], dest, progress=False)
    merged = load_dataset(dest)
    assert merged.get_col_data("x").tolist() == ["a", "b", "longer", "a", "b"]
    assert merged.get_col_data("y").tolist() == [1, 2, 3, 1, 2]
    assert merged.get_episode_data() == {"n": [None, 1, None]}
    with pytest.raises(FileExistsError):
        merge([short], dest, progress=False)
    merge([short], dest, mode="overwrite", progress=False)
    assert load_dataset(dest).lengths.tolist() == [2]
    with pytest.raises(ValueError, match="Need at least one dataset"):
        merge([], dest)


def test_the_suffix_names_the_format(tmp_path):
    """A destination's suffix chooses the format; one that contradicts is refused before anything is made."""
    path = write(tmp_path / "1.lance", "lance", make_episodes((2,)))
    merge([path], tmp_path / "2.h5", progress=False)
    convert(path, tmp_path / "2.ZARR", progress=False)
    convert(path, tmp_path / "2", progress=False)
    for copy, name in (("2.h5", "hdf5"), ("2.ZARR", "zarr"), ("2", "lance")):
        assert detect_format(tmp_path / copy).name == name
        assert wheres(tmp_path / copy)[0] == [make_episode(0, 2)["where"].tolist()]
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=r"3\.h5 names format 'hdf5'.*'lance'"):
        convert(path, tmp_path / "3.h5", dest_format="lance", progress=False)
    with pytest.raises(ValueError, match="3.zarr names format 'zarr'"):
        merge([path], tmp_path / "3.zarr", dest_format="folder", progress=False)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("how", ["convert", "merge", "dump", "fleet"])
def test_a_first_episode_that_does_not_fit_creates_nothing(tmp_path, how):
    """The next call, with the right option, finds a free path."""
    with ReplayBuffer(100, path=tmp_path / "fleet/ring") as buf:
        buf.write_episode({"state": np.zeros((3, 2)), "move": np.zeros((3, 1))})
        fleet = ShardedReplayBuffer(tmp_path / "fleet", wait_s=0)
        dest = tmp_path / "below" / "demos.hdf5"
        call = {
            "convert": lambda **how: convert(buf, dest, dest_format="robomimic", progress=False, **how),
            "merge": lambda **how: merge([buf, buf], dest, dest_format="robomimic", progress=False, **how),
            "dump": lambda **how: buf.dump(dest, format="robomimic", mode="error", **how),
            "fleet": lambda **how: fleet.dump(dest, format="robomimic", mode="error", **how),
        }[how]
        with pytest.raises(InputError, match="action"):
            call(observation=["state"])
        assert not dest.parent.exists()
        call(observation=["state"], action="move")
        found = load_dataset(dest, format="robomimic")
        assert len(found.lengths) == 1 + (how == "merge")
        found.close()


def test_convert_refuses(tmp_path):
    path = write(tmp_path / "1.h5", "hdf5", [{"x": [1]}])
    with pytest.raises(ValueError, match="both source and destination"):
        convert(path, path, dest_format="hdf5", progress=False)
    with pytest.raises(ValueError, match="read-only"):
        convert(path, tmp_path / "2", dest_format="ringmap", progress=False)
    with pytest.raises(ValueError, match="unknown format"):
        convert(path, tmp_path / "2", dest_format="nothing", progress=False)
    with pytest.raises(ValueError, match="a source is"):
        convert(3, tmp_path / "2")
    assert os.listdir(tmp_path) == ["1.h5"]


def test_a_folder_of_datasets(tmp_path):
    inside = tmp_path / "runs"
    inside.mkdir()
    with pytest.raises(ValueError, match="No format detected"):
        load_dataset(inside)
    write(inside / "a.lance", "lance", with_data(make_episodes((2,))))
    assert os.listdir(inside) != ["a.lance"]  # its episode data lies beside it
    assert load_dataset(inside).lengths.tolist() == [2]
    write(inside / "b.zarr", "zarr", make_episodes((2,)))
    with pytest.raises(ValueError, match="Ambiguous"):
        load_dataset(inside)
    os.rename(inside / "b.zarr", tmp_path / "b.zarr")
    write(inside / "c.h5", "hdf5", make_episodes((2,)))  # one HDF5 file, but not alone
    with pytest.raises(ValueError, match=r"Ambiguous.*a\.lance, c\.h5"):
        load_dataset(inside)


@pytest.mark.slow
def test_three_thousand_episodes(tmp_path):
    for name in WRITERS:
        episodes = ({"x": np.full((1 + i % 3, 2), i), "_episode_data": {"seed": i}} for i in range(3_000))
        path = write(place(tmp_path, name, name), name, episodes)
        dataset = load_dataset(path)
        assert len(dataset.lengths) == 3_000
        assert dataset.load_episode(2_999)["x"].tolist() == [[2_999] * 2] * 3
        assert len(dataset) == int(dataset.lengths.sum())
        assert dataset.get_episode_data([2_999, 0]) == {"seed": [2_999, 0]}


def test_an_evicted_buffer_says_so(tmp_path):
    buf = ReplayBuffer(6, path=tmp_path / "buf")
    buf.write_episodes([{"x": np.arange(3)}, {"x": np.arange(3, 6)}])
    dataset = load_dataset(tmp_path / "buf")
    assert dataset[5]["x"].tolist() == [5]
    buf.write_episodes([{"x": np.arange(6, 9)}, {"x": np.arange(9, 12)}])
    with pytest.raises(ReplacedError, match="evicted"):
        dataset[0]
    assert load_dataset(tmp_path / "buf").get_col_data("x").tolist() == list(range(6, 12))


def test_a_dataset_that_lost_an_episode_keeps_its_log(tmp_path, monkeypatch):
    """A format that adds fewer episodes than it was given is found out while they can still be read."""
    path = tmp_path / "made.zarr"
    write(path, "zarr", make_episodes((3,)))
    with monkeypatch.context() as patch:
        real = ZarrWriter.extend
        patch.setattr(ZarrWriter, "extend", lambda self, eps, at: real(self, list(eps)[:-1], at))
        with pytest.raises(CorruptError, match="holds 2 episodes after 2 were added to 1; its log"):
            write(path, "zarr", make_episodes((4, 5)))
    found = load_dataset(path)
    assert sorted(found.lengths.tolist()) == [3, 4, 5]
    found.close()


# -- threads and signal handlers ---------------------------------------------------------------------


def struck(path, name, monkeypatch):
    """Return what a signal handler is told that writes in the middle of a write, and the lengths afterwards."""
    told, kind = [], []
    with get_format(name).open_writer(path, **LOSSLESS[name]) as writer:

        def handler(*_):
            try:
                writer.write_episode(make_episode(0, 5))
                told.append("written")
            except RoleError as error:
                told.append(str(error))

        real = type(writer)._store

        def store(self, *args):
            if not kind:
                kind.append(self)
                signal.raise_signal(signal.SIGUSR1)
            return real(self, *args)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(type(writer), "_store", store)
                writer.write_episode(make_episode(0, 3))
        finally:
            signal.signal(signal.SIGUSR1, before)
        writer.write_episode(make_episode(0, 4))
    return told, [len(where) for where in wheres(path)[0]]


@pytest.mark.parametrize("name", WRITERS)
def test_a_signal_handler_in_the_middle_of_a_write_is_refused(tmp_path, name, monkeypatch):
    (told,), lengths = struck(place(tmp_path, name, "made"), name, monkeypatch)
    assert "in the middle of another call of the same thread" in told
    assert lengths == [3, 4]


def test_control_a_handler_that_is_let_in(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.Turn, "take", lambda turn, where, work: work())
    assert struck(tmp_path / "made.zarr", "zarr", monkeypatch)[0] == ["written"]


def test_threads_wait_for_each_other(tmp_path):
    path, count = tmp_path / "made.zarr", 4
    with get_format("zarr").open_writer(path) as writer:
        threads = [
            threading.Thread(target=lambda: writer.write_episodes(with_data([make_episode(0, 3)] * count)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(wheres(path)[0]) == 4 * count
