from pathlib import Path

import numpy as np
import pytest

import ringmap.formats.ringmap
from ringmap.data import ReplayBuffer, get_cache_dir, load_dataset, register_dataset
from ringmap.errors import InputError, NotFoundError, UnknownFormatError
from ringmap.formats.hdf5 import HDF5Writer
from ringmap.testing.datasets import make_episodes


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("STABLEWM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def make(path, episodes=5):
    with HDF5Writer(path) as writer:
        writer.write_episodes(make_episodes()[:episodes])
    return path


def test_cache_dir(home, tmp_path, monkeypatch):
    assert get_cache_dir() == home
    assert get_cache_dir(sub_folder="datasets") == home / "datasets"
    assert (home / "datasets").is_dir()
    assert get_cache_dir(tmp_path / "other") == tmp_path / "other"
    monkeypatch.delenv("STABLEWM_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert get_cache_dir() == tmp_path / "me/.stable_worldmodel"


@pytest.mark.parametrize("kind", [str, Path])
def test_paths(home, tmp_path, kind):
    make(tmp_path / "runs/prior.h5")
    for given in ("runs/prior.h5", "runs", tmp_path / "runs/prior.h5"):
        assert len(load_dataset(kind(given), num_steps=4).lengths) == 5
    assert not home.exists()  # looking makes nothing


@pytest.mark.parametrize(
    ("at", "name"),
    [
        ("pusht", "pusht"),
        ("pusht.h5", "pusht.h5"),
        ("pusht.h5", "pusht"),
        ("pusht.hdf5", "pusht"),
        ("pusht/data.h5", "pusht"),
        ("user/repo/data.h5", "user/repo"),
        ("user--repo/data.h5", "user/repo"),
    ],
)
def test_names(home, tmp_path, at, name):
    make(home / "datasets" / at)
    assert len(load_dataset(name).lengths) == 5
    assert len(load_dataset(name, cache_dir=home, format="hdf5").lengths) == 5
    with pytest.raises(FileNotFoundError):
        load_dataset(name, cache_dir=tmp_path)


def test_a_path_comes_before_a_name(home, tmp_path):
    make(home / "datasets/a.h5", 2)
    make(tmp_path / "a.h5", 3)
    assert len(load_dataset("a.h5").lengths) == 3
    assert len(load_dataset("a").lengths) == 2


def test_missing(home, tmp_path):
    with pytest.raises(NotFoundError, match=r"^No dataset 'nope': the path nope does not exist in .*; check"):
        load_dataset("nope")
    (home / "datasets").mkdir(parents=True)
    with pytest.raises(NotFoundError, match=r"not exist in .*; nor .* of that name in .*home/datasets; check"):
        load_dataset("nope")
    with pytest.raises(FileNotFoundError, match=r"the path .*absent.h5 does not exist; check its spelling$"):
        load_dataset(tmp_path / "absent.h5")
    with pytest.raises(FileNotFoundError):
        load_dataset("nope", format="hdf5")


def test_not_detected(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnknownFormatError, match=r"No format detected .*notes\.txt.*'hdf5'"):
        load_dataset(tmp_path / "notes.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="No format detected"):
        load_dataset(tmp_path / "folder")


def test_ambiguous(home):
    make(home / "datasets/pusht.h5")
    make(home / "datasets/pusht.hdf5")
    with pytest.raises(ValueError, match=r"Ambiguous.*pusht\.h5.*pusht\.hdf5"):
        load_dataset("pusht")
    with pytest.raises(ValueError, match="Ambiguous"):
        load_dataset(home / "datasets")


def test_reader_options(tmp_path):
    path = make(tmp_path / "a.h5")
    dataset = load_dataset(path, num_steps=2, frameskip=2, layout="HWC", transform=lambda s: s | {"seen": s["where"]})
    assert dataset[0]["pixels"].shape == (2, 12, 10, 3)
    assert dataset[0]["action"].shape == (2, 4)
    assert "seen" in dataset[0]
    with pytest.raises(ValueError, match="unknown format"):
        load_dataset(path, format="nope")
    with pytest.raises(InputError, match=r"unknown option 'history_len'; known: num_steps"):
        load_dataset(path, history_len=2)


def test_a_colon_in_a_path_is_no_prefix(home, tmp_path):
    """What has a separator before the first colon is a path, there or not; and so is what is there."""
    for name in ("runs/2026-11-28T10:00", tmp_path / "runs:1"):
        with pytest.raises(NotFoundError, match="does not exist"):
            load_dataset(name)
    make(tmp_path / "runs/2026-11-28T10:00.h5")
    make(home / "datasets/runs/other:1.h5")
    assert len(load_dataset("runs/2026-11-28T10:00.h5").lengths) == 5
    assert len(load_dataset("runs/other:1").lengths) == 5
    with pytest.raises(InputError, match="unknown prefix 'nope'"):
        load_dataset("nope:a/b")
    with pytest.raises(InputError, match="without ':' and '/'"):
        register_dataset("a/b", lambda rest: None)


def test_what_is_no_path_is_refused(tmp_path):
    path = make(tmp_path / "a.h5")
    for given in ([path, path], ReplayBuffer(10), load_dataset(path), None, b"a.h5"):
        with pytest.raises(TypeError, match="load_dataset: a dataset is opened by its path") as caught:
            load_dataset(given)
        assert isinstance(caught.value, InputError)


def test_a_ring_has_its_own_clips(tmp_path):
    """As `ReplayBuffer.open` has; and its episode data are not read before they are asked for."""
    with ReplayBuffer(100, 3, 2, path=tmp_path / "ring") as buf:
        for number in range(3):
            buf.write_episode({"x": np.arange(9), "_episode_data": {"seed": number, f"n{number}": 0}})
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringmap.formats.ringmap, "joined_data", lambda *args: read.append(args) or {})
        dataset = load_dataset(tmp_path / "ring", output="numpy")
        dataset[0], dataset.load_episode(1), dataset.view(where="length > 0")
        assert not read
    assert (dataset.num_steps, dataset.frameskip) == (3, 2) and len(dataset) == len(buf)
    assert dataset[1]["x"].tolist() == buf[1]["x"].tolist()
    assert load_dataset(tmp_path / "ring", num_steps=1).num_steps == 1
    assert dataset.episode_column_names == ["seed", "n0", "n1", "n2"]
    assert dataset.get_episode_data(2) == {"seed": [2], "n0": [None], "n1": [None], "n2": [0]}
