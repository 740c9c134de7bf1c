"""What a call that goes wrong says: where, what, expected and got, and what to do."""

import contextlib
import errno
import logging
import os
import pickle
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
from torch.utils.data import DataLoader

import ringmap
from ringmap import (
    DistillationBuffer,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
    TransitionReplayBuffer,
)
from ringmap.data import (
    ConcatDataset,
    MergeDataset,
    Window,
    convert,
    detect_format,
    load_dataset,
    merge,
)
from ringmap.errors import (
    ClipIndexError,
    ClosedError,
    EnvironmentFault,
    InputError,
    NoClipsError,
    SubscriptError,
)
from ringmap.formats.registry import resolve_format
from ringmap.storage.disk.files import Disk


def episode(steps):
    return {"obs": np.zeros((steps, 2), np.float32), "action": np.zeros((steps, 1), np.float32)}


# -- episodes that are too short -----------------------------------------------------------------

TOO_SHORT = (
    r"no clip of 16 steps \(history_len=8 \* frameskip=2\) fits: the longest stored episode \(of 3\) has 7 steps; "
    "choose history_len=3 or less, or collect longer episodes"
)


@pytest.fixture
def short():
    buf = ReplayBuffer(1000, history_len=8, frameskip=2, seed=0)
    buf.write_episodes(map(episode, (5, 7, 3)))
    return buf


def test_too_short_episodes_name_the_longest_and_what_would_fit(short):
    uniform = lambda step, buf, size, history: np.zeros(size, np.int64)  # noqa: E731
    own = ReplayBuffer(1000, 8, 2, uniform)
    own.write_episodes(map(episode, (5, 7, 3)))
    for call in (
        lambda: short.sample(4),
        lambda: own.sample(4),
        lambda: next(iter(short.batches(4, prefetch=0))),
    ):
        with pytest.raises(NoClipsError, match=f"^ReplayBuffer.sample: {TOO_SHORT}$"):
            call()
    with pytest.raises(NoClipsError, match=r"^RAM: no clip of 16 steps .* choose history_len=3 or less"):
        short.__getitems__([0])
    with pytest.raises(ClipIndexError, match=f"^ReplayBuffer: empty: {TOO_SHORT}$"):
        short[0]
    with pytest.raises(ClipIndexError, match=f"^BufferView: empty: {TOO_SHORT}$"):
        short.view()[0]
    with pytest.raises(NoClipsError, match=r"history_len=9 \* .* choose history_len=3 or less"):
        short.sample(4, history_len=9)


def test_what_is_suggested_fits(short):
    assert short.sample(4, history_len=3)["obs"].shape == (4, 3, 2)
    wide = ReplayBuffer(1000, history_len=2, frameskip=9)
    wide.write_episode(episode(7))
    with pytest.raises(NoClipsError, match="choose frameskip=7 or less"):
        wide.sample(1)


def test_an_empty_buffer_says_to_collect(short):
    short.clear()
    with pytest.raises(NoClipsError, match=r"\(0 episodes\); collect more first"):
        short.sample(4)


@pytest.mark.parametrize("how", ["shuffled", "in order", "a pass", "its length"])
def test_a_loader_over_too_short_episodes_says_so(short, tmp_path, how):
    """Where PyTorch's own words are `num_samples=0`, or it yields nothing: also of a view, and of files."""
    short.dump(tmp_path / "short.h5", "hdf5", progress=False)
    for dataset, option in (
        (short, "history_len"),
        (short.view(), "history_len"),
        (load_dataset(tmp_path / "short.h5", num_steps=8, frameskip=2), "num_steps"),
    ):
        asks = {
            "shuffled": lambda d: DataLoader(d, shuffle=True),
            "in order": lambda d: next(iter(DataLoader(d))),
            "a pass": lambda d: next(iter(DataLoader(d, sampler=d.pass_sampler()))),
            "its length": lambda d: len(DataLoader(d)),
        }
        if how == "a pass" and option == "num_steps":
            continue
        with pytest.raises(NoClipsError, match=rf"no clip of 16 steps \({option}=8 .*has 7 steps; choose"):
            asks[how](dataset)
        assert len(dataset) == 0, "it is no error for one who waits for longer episodes"


def test_a_length_of_0_and_a_view_without_items_are_told_once(short, caplog, tmp_path):
    short.dump(tmp_path / "short.h5", "hdf5", progress=False)
    files = load_dataset(tmp_path / "short.h5")
    window = {"obs": Window(range(9))}
    for made, text in (
        (lambda: short, "no clip of 16 steps (history_len=8"),
        (lambda: short.view(), "no clip of 16 steps (history_len=8"),
        (lambda: short.view(window), "needs episodes of at least"),
        (lambda: short.view().view(window), "needs episodes of at least"),
        (lambda: files.view(window), "needs episodes of at least"),
    ):
        caplog.clear()
        dataset = made()
        for _ in range(2):
            assert len(dataset) == 0
        line = caplog.records[-1]
        assert (line.levelno, line.name) == (logging.WARNING, "ringmap")
        assert "len() is 0: " in line.getMessage()
        assert text in line.getMessage()
        assert "has 7 steps" in line.getMessage()
        assert sum(text in r.getMessage() for r in caplog.records) == 1


def test_the_length_of_what_has_no_episodes_is_0_without_a_word(caplog):
    buf = ReplayBuffer(1000, history_len=8)
    assert len(buf) == 0
    assert not caplog.records
    buf.write_episode(episode(8))
    assert len(pickle.loads(pickle.dumps(buf))) == 1
    assert not caplog.records


# -- what stands in the brackets -------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    buf = ReplayBuffer(1000)
    buf.write_episode(episode(30))
    buf.dump(tmp_path / "stored.h5", "hdf5", progress=False)
    return buf


@pytest.mark.parametrize(
    ("idx", "said"),
    [
        (slice(0, 3), r"got slice\(0, 3, None\); for several clips take dataset.* call load_chunk"),
        ("action", r"got 'action'; for a whole column call get_col_data\('action'\)"),
        (1.5, r"got 1.5; for steps of an episode call load_chunk"),
        (None, "got None; for steps"),
    ],
)
def test_brackets_say_what_to_call_instead(stored, tmp_path, idx, said):
    read = load_dataset(tmp_path / "stored.h5")
    for dataset in (stored, stored.view(), read, ConcatDataset([stored]), MergeDataset([stored])):
        for kind in (SubscriptError, TypeError, InputError):
            with pytest.raises(kind, match=f"^{type(dataset).__name__}: a clip id is an integer, {said}"):
                dataset[idx]


def test_what_brackets_suggest_works(stored, tmp_path):
    assert stored[list(range(0, 3))]["obs"].shape == (3, 1, 2)
    assert len(load_dataset(tmp_path / "stored.h5").__getitems__(range(0, 3))) == 3
    assert stored.get_col_data("action").shape == (30, 1)
    assert stored.load_chunk([0], 2, 5)[0]["obs"].shape == (3, 2)


def transitions():
    buf = TransitionReplayBuffer(100, (2,), device=None)
    row = np.zeros((4, 2), np.float32)
    buf.add(row, np.zeros(4, np.int64), np.zeros(4), row, np.zeros(4))
    return buf


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DistillationBuffer(100), r"draw batches with batch\("),
        (lambda: RolloutBuffer(1, 1, (2,), (1,)), r"minibatches\("),
        (
            lambda: OfflineToOnlineReplayBuffer(transitions(), online_capacity=10),
            r"draw batches with sample\(",
        ),
    ],
)
def test_a_buffer_without_ids_says_what_to_call(make, said):
    buf = make()
    for call in (lambda: buf[0], lambda: list(buf), lambda: buf["obs"]):
        with pytest.raises(TypeError, match=f"^{type(buf).__name__}: has no ids, .*; .*{said}"):
            call()


# -- datasets of datasets --------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [ConcatDataset, MergeDataset])
def test_what_is_no_dataset_is_not_joined(stored, joined, tmp_path):
    name = joined.__name__
    for part, said in (
        (1, "is a int, and no dataset of episodes; expected a ReplayBuffer, what load_dataset"),
        ({"obs": [1]}, "is a dict, .* expected a ReplayBuffer"),
        ("runs/a.h5", r"is a str, .* open it first: load_dataset\('runs/a.h5'\)"),
        (tmp_path, r"is a PosixPath, .* open it first: load_dataset\("),
        (
            transitions(),
            r"is a TransitionReplayBuffer, .* draw from it with sample\(.* OfflineToOnline",
        ),
    ):
        with pytest.raises(InputError, match=f"^{name}: dataset 1 {said}"):
            joined([stored, part])
    for whole in (stored, "runs/a.h5", 3):
        with pytest.raises(InputError, match=f"^{name}: expected a list of datasets, got "):
            joined(whole)


# -- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.h5", "x.HDF5", "x.zarr", "x.lance", "x.zarr/"])
def test_a_dump_without_a_format_goes_by_the_suffix(stored, tmp_path, name):
    stored.dump(f"{tmp_path}/{name}", progress=False)
    assert detect_format(tmp_path / name.rstrip("/")).name == resolve_format(name).name
    assert load_dataset(tmp_path / name.rstrip("/")).lengths.tolist() == [30]


@pytest.mark.parametrize("name", ["x", "x.npy", "x.", "runs.h5/x"])
def test_a_suffix_that_names_no_format(stored, tmp_path, name):
    with pytest.raises(
        InputError,
        match=rf"^ReplayBuffer.dump: the suffix of .*{name} names no format \(\.h5, .* do\); say which: "
        r"format=NAME, one of \['hdf5', 'zarr', 'folder'",
    ):
        stored.dump(tmp_path / name)
    assert list(tmp_path.iterdir()) == [tmp_path / "stored.h5"]


def test_a_format_that_is_only_read_is_not_dumped_to(stored, tmp_path):
    for name, format in (("x", "ringmap"), ("x.ringmap", None)):
        with pytest.raises(InputError, match="^ReplayBuffer.dump: format 'ringmap' is read-only; choose"):
            stored.dump(tmp_path / name, format)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("h5", "hdf5"), (".h5", "hdf5"), ("HDF5", "hdf5"), ("hdf", "hdf5"), ("le-robot", "lerobot"), ("vidoe", "video")],
)
def test_a_name_that_is_nearly_a_formats_is_asked_about_everywhere(stored, tmp_path, given, meant):
    path = tmp_path / "stored.h5"
    for call in (
        lambda: stored.dump(tmp_path / "x", given),
        lambda: load_dataset(path, format=given),
        lambda: convert(path, tmp_path / "x", dest_format=given),
        lambda: convert(path, tmp_path / "x", dest_format="hdf5", source_format=given),
        lambda: merge([path], tmp_path / "x", dest_format=given),
    ):
        with pytest.raises(InputError, match=f"unknown format '{given}'; did you mean '{meant}'\\?; known: "):
            call()
    assert not (tmp_path / "x").exists()


# -- the machine ---------------------------------------------------------------------------------


class Refuses(Disk):
    """A disk that does not let a lock file be opened."""

    number = 0

    def before(self, change, path, *details):
        if change == "lock":
            raise OSError(self.number, os.strerror(self.number), path)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "the file system is read-only; open the buffer with mode='r' to read it; to write, mount"),
        (
            errno.EACCES,
            r"this process may not write here \(Permission denied\); open the buffer with mode='r' .* permission",
        ),
        (errno.EPERM, r"this process may not write here \(Operation not permitted\); open the buffer with mode='r'"),
        (errno.EMFILE, r"can't be locked \(Too many open files\); close files, or raise .* \(ulimit -n\), then"),
        (errno.ENOSPC, r"can't be locked \(No space left on device\); free space"),
        (errno.ENOLCK, r"this file system can't lock files \(No locks available\); put the buffer on another"),
    ],
)
def test_a_buffer_that_can_not_be_locked_says_why(tmp_path, monkeypatch, number, said):
    ReplayBuffer(100, path=tmp_path / "b").close()
    monkeypatch.setattr("ringmap.buffers.engine.DISK", Refuses())
    Refuses.number = number
    for call in (
        lambda: ReplayBuffer.open(tmp_path / "b", "r+"),
        lambda: ReplayBuffer(100, path=tmp_path / "b"),
    ):
        with pytest.raises(EnvironmentFault, match=f"b/lock: {said}") as raised:
            call()
        assert raised.value.errno == number
    ReplayBuffer.open(tmp_path / "b").close()


READ_ONLY = """
import sys
from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault
ReplayBuffer.open(sys.argv[1]).close()
try:
    ReplayBuffer.open(sys.argv[1], "r+")
except EnvironmentFault as error:
    print(error)
"""


def test_a_read_only_mount_is_called_that(tmp_path):
    ReplayBuffer(100, path=tmp_path / "b").close()
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--mount", "sh", "-ec", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("can't mount here")
    run = f"{mount} && exec {sys.executable} -c '{READ_ONLY}' {tmp_path}/b"
    done = subprocess.run(["unshare", "--mount", "sh", "-ec", run], capture_output=True, text=True, check=True)
    assert "the file system is read-only; open the buffer with mode='r'" in done.stdout


@contextlib.contextmanager
def no_more_files():
    """Let this process open no other file: each try ends in EMFILE."""
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


REMEDY = r"close files, or raise the limit of open files \(ulimit -n\), then call it again$"


def test_streaming_calls_say_that_too_many_files_are_open(tmp_path):
    buf = ReplayBuffer(100, path=tmp_path / "b")
    step = {"obs": np.zeros(2, np.float32)}
    buf.write_episode({"obs": np.zeros((3, 2), np.float32)})
    begun, waiting = buf.begin_episode(), buf.begin_episode()
    begun.append(step)
    with no_more_files():
        with pytest.raises(EnvironmentFault, match=f"OpenEpisode.append: Too many open files.*{REMEDY}"):
            waiting.append(step)
        with pytest.raises(EnvironmentFault, match=f"OpenEpisode.finish: Too many open files.*{REMEDY}"):
            begun.finish()
    # Then nothing was lost, and the same calls work
    begun.append(step)
    begun.finish()
    waiting.append(step)
    waiting.finish()
    assert buf.lengths.tolist() == [3, 2, 1]


def test_opening_and_reading_say_that_too_many_files_are_open(tmp_path):
    buf = ReplayBuffer(100, path=tmp_path / "b", storage="zarr")
    buf.write_episode(episode(3))
    buf.flush()
    with no_more_files():
        with pytest.raises(EnvironmentFault, match=f"^.Errno 24. ReplayBuffer: Too many.*{REMEDY}"):
            buf.sample(2)
        with pytest.raises(EnvironmentFault, match=f"ReplayBuffer.open: Too many open files.*{REMEDY}"):
            ReplayBuffer.open(tmp_path / "b")
    assert buf.sample(2)["obs"].shape == (2, 1, 2)


# -- offline to online ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("online", "data", "said"),
    [
        (lambda: ReplayBuffer(50), {"x": np.zeros((5, 2))}, "ReplayBuffer.write_episode: schema mismatch: missing"),
        (lambda: ReplayBuffer(50), [3], "an episode is a mapping of column"),
        (lambda: ReplayBuffer(50), 3, "the online half is a ReplayBuffer: expected an episode"),
        (lambda: 50, {"x": np.zeros((5, 2))}, "schema mismatch: missing"),
        (lambda: 50, {"obs": np.zeros((500, 2))}, "500 rows exceed capacity=50"),
        (transitions, {"obs": np.zeros((5, 2))}, r"TransitionReplayBuffer.add\(\) got .*'obs'; give what .*\['obs'\]"),
        (transitions, 3, "expected a mapping of what TransitionReplayBuffer.add takes, got int"),
    ],
)
def test_extend_names_itself(stored, online, data, said):
    half = online()
    given = {"online_capacity": half} if isinstance(half, int) else {"online_storage": half}
    mixed = OfflineToOnlineReplayBuffer(stored, **given)
    if not isinstance(half, TransitionReplayBuffer):
        mixed.extend({"obs": np.zeros((5, 2), np.float32)})
    with pytest.raises(InputError, match=f"^OfflineToOnlineReplayBuffer.extend: {said}"):
        mixed.extend(data)
    if isinstance(half, ReplayBuffer):
        half.close()
        with pytest.raises(ClosedError, match="^OfflineToOnlineReplayBuffer.extend: .* is closed"):
            mixed.extend({"obs": np.zeros((5, 2), np.float32)})


# -- names ---------------------------------------------------------------------------------------


def test_a_face_shows_its_public_names_alone():
    for face in (ringmap, ringmap.data, ringmap.samplers, ringmap.recording, ringmap.world):
        assert {n for n in dir(face) if not n.startswith("__")} == set(face.__all__), face
    assert {"__version__", "__doc__"} <= set(dir(ringmap))
