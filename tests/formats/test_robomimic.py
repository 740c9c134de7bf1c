"""Files of robomimic: found by their path, whatever the suffix, and told from our own HDF5 files; names of observations."""

import os

import h5py
import numpy as np
import pytest

from ringmap.data import ReplayBuffer, convert, detect_format, get_format, load_dataset
from ringmap.errors import InputError


def demos(path):
    with h5py.File(path, "w") as file:
        demo = file.create_group("data/demo_0")
        demo.attrs["num_samples"] = 3
        demo["obs/arm"] = np.arange(3.0)
        demo["actions"] = np.arange(3.0)
    return path


@pytest.mark.parametrize("name", ["set.hdf5", "set.h5", "set"])
def test_it_is_found_by_its_path(tmp_path, name):
    path = demos(tmp_path / name)
    assert detect_format(path).name == "robomimic"
    for place in (
        path,
        *([tmp_path] if "." in name else []),
    ):  # a folder with one file stands for it
        found = load_dataset(place, output="numpy")
        assert found.load_episode(0)["action"].tolist() == [0, 1, 2]
        found.close()
    convert(path, tmp_path / "copy.zarr", progress=False)
    assert load_dataset(tmp_path / "copy.zarr").lengths.tolist() == [3]


def test_our_own_files_are_hdf5(tmp_path):
    """One with columns `data` and `demo_0`, too; what a link leads to is not looked at."""
    texts = np.array(["demo_0", "demo_1"])
    for column in ("data", "data/demo_0"):
        path = tmp_path / "ours.h5"
        with get_format("hdf5").open_writer(path, mode="overwrite") as writer:
            writer.write_episode({column: texts})
        assert detect_format(path).name == "hdf5"
        assert load_dataset(path, output="numpy").load_episode(0)[column].tolist() == texts.tolist()
    demos(tmp_path / "there.h5")
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["data"] = h5py.ExternalLink("there.h5", "/data")
    assert detect_format(tmp_path / "link.h5").name == "hdf5"
    os.mkfifo(tmp_path / "pipe.h5")
    assert detect_format(tmp_path / "pipe.h5").name == "hdf5"


@pytest.mark.parametrize(
    ("chosen", "stored"),
    [
        (["obs/arm"], "obs/arm"),
        (["obs/arm", "pixels"], "obs/arm obs/pixels"),
        (["pixels"], "obs/pixels"),
        ("obs", "obs/arm"),
        ("pixels", "obs/flat"),
        (["obs/arm", "arm"], "'arm' would be 'obs/arm'.*leave one out"),
        (["arm"], "'obs/arm' would stand where robomimic has something else"),
    ],
)
def test_names_of_observations(tmp_path, chosen, stored):
    buf, path = ReplayBuffer(10), tmp_path / "set.hdf5"
    given = {name: np.arange(3.0) for name in ("obs/arm", "pixels", "arm", "action")}
    buf.write_episode(given)

    def make():
        convert(buf, path, dest_format="robomimic", observation=chosen, progress=False)

    if " would " in stored:
        with pytest.raises(InputError, match=stored):
            make()
        assert not path.exists()
        return
    make()
    names = set(load_dataset(path).column_names)
    followed = {n.removeprefix("next_") for n in names if n.startswith("next_obs/")}
    assert followed == set(stored.split())
    assert not [n for n in names if n.startswith("obs/obs")]


def test_a_look_keeps_nobody_out(tmp_path):
    """A file that is open, here or in a writer, is told all the same, and detecting takes no lock."""
    path = demos(tmp_path / "set.hdf5")
    with h5py.File(path, "r+"):  # locked
        assert detect_format(path).name == "robomimic"
    found = load_dataset(path)
    assert detect_format(path).name == "robomimic"
    found.close()


@pytest.mark.parametrize("name", ["dones", "rewards", "actions", "next_obs"])
def test_a_column_stands_in_the_place_of_nothing_of_robomimic(tmp_path, name):
    buf = ReplayBuffer(100, reward_at="next")
    steps = np.arange(5.0)
    buf.write_episode(
        {"observation": steps, "action": steps[:, None], "reward": steps, name: steps}
    )
    with pytest.raises(InputError, match=f"column '{name}' would stand where robomimic has"):
        buf.dump(tmp_path / "set.h5", format="robomimic")
    assert not (tmp_path / "set.h5").exists()


def test_episode_data_are_no_count_of_steps(tmp_path):
    buf = ReplayBuffer(100, reward_at="next")
    steps = np.arange(5.0)
    data = {"num_samples": 3}
    buf.write_episode({"obs": steps, "action": steps[:, None], "reward": steps, "_episode_data": data})  # fmt: skip
    with pytest.raises(InputError, match="'num_samples': robomimic has the number of steps there"):
        buf.dump(tmp_path / "set.h5", format="robomimic")
