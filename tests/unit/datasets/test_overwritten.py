"""A dataset that is open while its files are overwritten: it reads what it opened, or refuses as ReplacedError."""

import contextlib
import os
import pickle
import shutil
from collections.abc import Mapping

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap.data import (
    ConcatDataset,
    GoalDataset,
    MergeDataset,
    ReplayBuffer,
    ShardedReplayBuffer,
    convert,
    load_dataset,
)
from ringmap.errors import NoClipsError, ReplacedError
from ringmap.formats.common.source import DirectorySource
from tests.tiers import few
from tests.unit.formats.others import later_than

NEEDS = {"video": "av", "lance": "lance", "parquet": "pyarrow", "lerobot": "av", "minari": "minari"}
FORMATS = ["hdf5", "zarr", "folder", "video", "lance", "parquet", "ringmap", "lerobot", "minari", "robomimic"]
SUFFIX = {"hdf5": ".h5", "zarr": ".zarr", "lance": ".lance", "minari": "-v0", "robomimic": ".hdf5"}
EXACT = {"folder": {"image_format": "png"}, "video": {"lossless": True}, "lerobot": {"videos": False}}

LENGTHS, OTHERS = (5, 2, 9), (7, 3, 2, 4)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(params=FORMATS)
def name(request):
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return request.param


def episodes(first, lengths):
    for number, length in enumerate(lengths, first):
        where = np.stack([np.full(length, number), np.arange(length)], 1)
        pixels = np.full((length, 16, 16, 3), number, np.uint8)
        pixels[:, :, 0] = np.arange(length)[:, None, None]
        yield {
            "obs": where,
            "pixels": pixels,
            "action": where.astype(np.float32),
            "reward": where[:, 1] / 8,
            "_episode_data": {"seed": number},
        }


def make(path, name, first, lengths, mode="error"):
    if name == "ringmap":
        if mode == "overwrite":
            shutil.rmtree(path)
        with ReplayBuffer(100, path=path, reward_at="next") as buf:
            buf.write_episodes(episodes(first, lengths))
        return
    buf = ReplayBuffer(100, reward_at="next")
    buf.write_episodes(episodes(first, lengths))
    convert(buf, path, dest_format=name, mode=mode, progress=False, **EXACT.get(name, {}))


def by_our_writer(path, name, first, lengths):
    make(path, name, first, lengths, mode="overwrite")


def beside(path, name, first, lengths):
    folder = path.parent / "other"
    folder.mkdir()
    make(folder / path.name, name, first, lengths)
    return folder / path.name


def anew(path, name, first, lengths):
    """Another program deletes the files, and makes others."""
    other = beside(path, name, first, lengths)
    for item in other.parent.iterdir():
        there = path.parent / item.name
        shutil.rmtree(there) if there.is_dir() else there.unlink()
        shutil.copytree(item, there) if item.is_dir() else shutil.copy2(item, there)


def in_place(path, name, first, lengths):
    """Another program writes into the files that are there."""
    other = beside(path, name, first, lengths)
    for at, _, names in os.walk(other.parent):
        for file in names:
            source = os.path.join(at, file)
            target = path.parent / os.path.relpath(source, other.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def reads(dataset):
    """Return what a dataset can be asked for, as calls."""
    every = range(len(dataset.lengths))
    return {
        **{f"item {i}": lambda i=i: dataset[i] for i in (0, 3, len(dataset) - 1)},
        "items": lambda: dict(enumerate(map(dict, dataset.__getitems__(list(range(len(dataset))))))),
        **{f"episode {e}": lambda e=e: dataset.load_episode(e) for e in every},
        **{f"column {c}": lambda c=c: {c: dataset.get_col_data(c)} for c in dataset.column_names},
        "rows": lambda: dataset.get_row_data([0, 6, 12]),
        **{f"data {e}": lambda e=e: dataset.episode_data(e) for e in every},
    }


def flat(value):
    if isinstance(value, Mapping):
        return {str(k): flat(v) for k, v in value.items()}
    return np.asarray(value).tolist()


@pytest.mark.parametrize(
    ("overwrite", "lengths"),
    few(
        [(by_our_writer, OTHERS), (in_place, OTHERS), (anew, LENGTHS), (in_place, LENGTHS), (by_our_writer, LENGTHS)], 2
    ),
)
def test_overwritten_while_open(tmp_path, name, overwrite, lengths):
    path = tmp_path / f"set{SUFFIX.get(name, '')}"
    make(path, name, 0, LENGTHS)
    options = {"format": name, "output": "numpy"}
    known = load_dataset(path, **options)
    want = {what: flat(read()) for what, read in reads(known).items()}
    known.close()
    fresh, used, closed = (load_dataset(path, **options) for _ in range(3))
    for dataset in (used, closed):
        _ = dataset[0]
    closed.close()
    pickled = pickle.dumps(used)
    later_than(tmp_path)
    overwrite(path, name, 50, lengths)
    for state, dataset in {"fresh": fresh, "used": used, "closed": closed, "pickled": pickle.loads(pickled)}.items():
        for what, read in reads(dataset).items():
            assert outcome(read, want[what], path) != "new", f"{state}: {what} is of the new files"
        dataset.close()
    again = load_dataset(path, **options)
    kept = [n - (name in ("lerobot", "minari", "robomimic")) for n in lengths]
    assert again.lengths.tolist() == kept
    assert flat(again.load_episode(0)) != want["episode 0"]


def outcome(read, want, path):
    """Return whether a read is refused, or gives what was there, or something new."""
    try:
        got = flat(read())
    except ReplacedError as error:
        assert str(path) in str(error)
        return "refused"
    return "same" if got == want else "new"


@pytest.mark.parametrize("gone", ["_check", "_refuse_newer"])
def test_control(tmp_path, monkeypatch, gone):
    """Without either look, pictures of the new files come with the old numbers."""
    path = tmp_path / "set"
    make(path, "folder", 0, LENGTHS)
    dataset = load_dataset(path, output="numpy")
    want = flat(dataset[3])
    later_than(tmp_path)
    if gone == "_check":
        by_our_writer(path, "folder", 50, LENGTHS)
    else:  # another program has come as far as the pictures
        other = beside(path, "folder", 50, LENGTHS) / "pixels"
        shutil.copytree(other, path / "pixels", dirs_exist_ok=True, copy_function=shutil.copyfile)
    assert outcome(lambda: dataset[3], want, path) == "refused"
    monkeypatch.setattr(DirectorySource, "_check", lambda self: None)
    monkeypatch.setattr(DirectorySource, "_refuse_newer", lambda self, path: None)
    assert outcome(lambda: dataset[3], want, path) == "new"


APPENDS = [n for n in FORMATS if n not in ("lerobot", "minari", "robomimic")]


@pytest.mark.parametrize("name", APPENDS, indirect=True)
def test_appended_to_while_open(tmp_path, name):
    """What our own writer adds changes nothing of what is open, in this process or another."""
    path = tmp_path / f"set{SUFFIX.get(name, '')}"
    make(path, name, 0, LENGTHS)
    options = {"format": name, "output": "numpy"}
    dataset, fresh = (load_dataset(path, **options) for _ in range(2))
    want = {what: flat(read()) for what, read in reads(dataset).items()}
    pickled = pickle.dumps(dataset)
    later_than(tmp_path)
    if name == "ringmap":
        with ReplayBuffer.open(path, mode="r+") as buf:
            buf.write_episodes(episodes(50, LENGTHS))
    else:
        for one in (dataset, fresh) if name == "hdf5" else ():  # which locks its file
            one.close()
        make(path, name, 50, LENGTHS, mode="append")
    assert len(load_dataset(path, **options).lengths) == 6
    for state, one in {"used": dataset, "fresh": fresh, "pickled": pickle.loads(pickled)}.items():
        for what, read in reads(one).items():
            assert flat(read()) == want[what], f"{state}: {what}"
        one.close()


@pytest.mark.parametrize("name", ["hdf5", "zarr", "folder", "video", "ringmap"], indirect=True)
def test_persistent_workers(tmp_path, name):
    """A worker that was started before goes on with what it opened, or refuses."""
    path = tmp_path / f"set{SUFFIX.get(name, '')}"
    make(path, name, 0, LENGTHS)
    dataset = load_dataset(path, format=name)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    want = [flat(batch) for batch in loader]
    assert sum(len(batch["obs"]) for batch in want) == sum(LENGTHS)
    later_than(tmp_path)
    by_our_writer(path, name, 50, LENGTHS)
    with contextlib.suppress(ReplacedError):
        for batch, old in zip(loader, want, strict=True):
            assert flat(batch) == old


def joined(path, **options):
    parts = [load_dataset(path, **options) for _ in range(2)]
    return {
        "concat": ConcatDataset(parts),
        "merge": MergeDataset(parts, [["pixels"], ["obs", "action", "reward"]]),
        "goal": GoalDataset(parts[0], (0, 0, 0, 1), goal_keys={"obs": "goal"}, seed=0),
        "view": parts[0].view(),
    }


@pytest.mark.parametrize("kind", ["concat", "merge", "goal", "view"])
def test_what_is_over_a_dataset(tmp_path, kind):
    """No item has numbers of one and pictures of the other."""
    path = tmp_path / "set"
    make(path, "folder", 0, LENGTHS)
    dataset = joined(path, output="numpy")[kind]
    want = [flat(dataset[i]["obs"]) for i in range(len(dataset))]
    later_than(tmp_path)
    by_our_writer(path, "folder", 50, LENGTHS)
    for i in range(len(dataset)):
        with pytest.raises(ReplacedError):
            dataset[i]
    with pytest.raises(ReplacedError):
        dataset.__getitems__([0, 1])
    with pytest.raises(ReplacedError):
        dataset.load_episode(0)
    assert len(want) == len(dataset)


def live(path):
    return {
        "reader": lambda: ReplayBuffer.open(path / "ring"),
        "view": lambda: ReplayBuffer.open(path / "ring").view(),
        "fleet": lambda: ShardedReplayBuffer(path),
        "view of a fleet": lambda: ShardedReplayBuffer(path).view(),
    }


@pytest.mark.parametrize("kind", live(None))
def test_a_ring_in_the_place_of_another(tmp_path, kind):
    """A live reader may notice, and a fleet may follow: but what it gives is whole, of one ring."""
    make(tmp_path / "ring", "ringmap", 0, LENGTHS)
    dataset = live(tmp_path)[kind]()
    assert len(dataset.__getitems__(list(range(len(dataset))))) == sum(LENGTHS)
    make(tmp_path / "ring", "ringmap", 50, LENGTHS, mode="overwrite")
    for _ in range(3):
        for i in range(len(dataset)):
            with contextlib.suppress(ReplacedError, NoClipsError):
                item = dataset[i]
                number, step = item["obs"][0].tolist()
                assert number in (0, 1, 2, 50, 51, 52) and step < LENGTHS[number % 50]
                assert item["pixels"][0, 0, 1, 0] == number and item["pixels"][0, 0, 0, 0] == step
                assert item["action"].ravel().tolist() == [number, step]
