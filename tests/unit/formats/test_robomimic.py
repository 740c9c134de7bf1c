"""Files of robomimic: found by their path, whatever the suffix, and told from our own HDF5 files; names of
observations."""

import os

import h5py
import numpy as np
import pytest

from ringmap.data import ReplayBuffer, convert, detect_format, get_format, load_dataset
from ringmap.errors import InputError, UnsupportedError


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
    for place in (path, *([tmp_path] if "." in name else [])):  # a folder with one file stands for it
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
        (["arm"], "'obs/arm': it would stand where robomimic has something else"),
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
    buf.write_episode({"observation": steps, "action": steps[:, None], "reward": steps, name: steps})
    with pytest.raises(InputError, match=f"column '{name}': it would stand where robomimic has"):
        buf.dump(tmp_path / "set.h5", format="robomimic")
    assert not (tmp_path / "set.h5").exists()


def test_episode_data_are_no_count_of_steps(tmp_path):
    buf = ReplayBuffer(100, reward_at="next")
    steps = np.arange(5.0)
    data = {"num_samples": 3}
    buf.write_episode({"obs": steps, "action": steps[:, None], "reward": steps, "_episode_data": data})
    with pytest.raises(InputError, match="'num_samples'.*robomimic has the number of steps there"):
        buf.dump(tmp_path / "set.h5", format="robomimic")


def test_without_flags_the_last_step_is_done(tmp_path):
    buf = ReplayBuffer(100, reward_at="next")
    for rows in (2, 5):
        steps = np.arange(float(rows))
        buf.write_episode({"obs": steps, "action": steps, "reward": steps})
    buf.dump(tmp_path / "set.h5", format="robomimic")
    with h5py.File(tmp_path / "set.h5") as file:
        assert [file[f"data/demo_{n}/dones"][:].tolist() for n in (0, 1)] == [[1], [0, 0, 0, 1]]
    buf.write_episode({name: [0.0] for name in ("obs", "action", "reward")})
    with pytest.raises(InputError, match="one row has no step"):
        buf.dump(tmp_path / "other.h5", format="robomimic")


def test_what_has_another_length_is_data_of_the_demo(tmp_path):
    """As `initial_state` of Isaac Lab, of one row, and the source demos of MimicGen; also where a demo has as many
    samples."""
    path = tmp_path / "lab.hdf5"
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = "{}"
        for number, steps in enumerate((1, 4, 2)):
            demo = file.create_group(f"data/demo_{number}")
            demo["obs/arm"] = np.arange(steps) + 10.0 * number
            demo["actions"] = np.arange(steps)
            demo["initial_state/articulation/robot/root_pose"] = np.full((1, 7), number, "f4")
            demo["src_demo_inds"] = np.arange(2) + number
            demo["note"] = "gut"
            if number:
                demo.attrs["num_samples"] = steps  # else the rows of the actions count
        file["data/demo_2/only_here"] = np.arange(2)
    found = load_dataset(path, output="numpy")
    assert found.lengths.tolist() == [1, 4, 2] and found.column_names == ["action", "obs/arm"]
    assert found.load_episode(2)["obs/arm"].tolist() == [20, 21]
    for number in range(3):
        data = found.episode_data(number)
        pose = data["initial_state/articulation/robot/root_pose"]
        assert pose.dtype == np.float32 and pose.tolist() == [[number] * 7]
        assert data["src_demo_inds"].tolist() == [number, number + 1] and data["note"] == "gut"
    assert found.episode_data(2)["only_here"].tolist() == [0, 1]
    convert(path, tmp_path / "copy.zarr", progress=False)
    copy = load_dataset(tmp_path / "copy.zarr").get_episode_data([1])
    assert copy["initial_state/articulation/robot/root_pose"][0].shape == (1, 7)


def test_demos_that_differ_are_named(tmp_path):
    path = demos(tmp_path / "set.hdf5")
    with h5py.File(path, "r+") as file:
        for number, dtype in ((1, "i4"), (2, "f8"), (3, "f8")):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"], demo["obs/arm"] = (np.zeros(3 + number), np.full(3 + number, 1.5).astype(dtype))
        del file["data/demo_2/obs/arm"], file["data/demo_1/obs/arm"]
        file["data/demo_1/obs/arm"] = np.full(4, 0.1, "f8").astype("c16")
        file["data/demo_0/extra"] = np.arange(3)
        file["data/pair"] = np.zeros(2)
        file["data/demo_0/strange"] = file["data/demo_3/strange"] = np.zeros(3, [("a", "i4")])
        del file["data/demo_3/strange"]
        file["data/demo_3/strange"] = np.zeros(6, [("a", "i4")])
    with pytest.warns(UserWarning, match="left out, .*'data/pair'$"):
        found = load_dataset(path, keys_to_load=["action", "obs/arm"], output="numpy")
    for options, message in (
        ({}, "column 'extra' is not in all demos: demo_3 lacks it"),
        ({"keys_to_load": ["action", "strange"]}, "column 'strange' is of HDF5 type"),
    ):
        with pytest.warns(UserWarning, match="left out"), pytest.raises(UnsupportedError, match=message):
            load_dataset(path, **options)
    with pytest.raises(UnsupportedError, match="'obs/arm' is of complex128 in episode 1, and of float64"):
        found.load_episode(1)
    with pytest.raises(UnsupportedError, match="'obs/arm' is not in episode 2"):
        found.load_episode(2)
    assert found.load_episode(3)["obs/arm"].tolist() == [1.5] * 6
