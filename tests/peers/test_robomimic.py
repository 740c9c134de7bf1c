"""robomimic's own SequenceDataset reads the files that we wrote; its layout is read back equal."""

import contextlib
import io
import json

import h5py
import numpy as np
import pytest

from ringmap.data import get_format, load_dataset
from ringmap.errors import CorruptError, InputError

COLUMNS = ["obs/eef", "next_obs/eef", "obs/eye", "next_obs/eye", "action", "reward", "done", "task"]


def episode(number, steps, final=True):
    rng = np.random.default_rng(number)
    rows = steps + final
    found = {
        "obs/eef": rng.normal(size=(rows, 3)),
        "obs/eye": rng.integers(0, 256, (rows, 8, 8, 3), np.uint8),
        "action": rng.normal(size=(rows, 7)).astype(np.float32),
        "reward": rng.normal(size=rows),
        "task": np.array([f"lift {number} é{i}" for i in range(rows)]),
    }
    return found


def write(path, numbers=(0, 1, 2), **options):
    with get_format("robomimic").open_writer(path, **options) as writer:
        for n in numbers:
            split = ["train", "small"] if n == 0 else "valid"
            writer.write_episode({**episode(n, 4 + n), "_episode_data": {"mask": split, "seed": n}})


def check(path, numbers=(0, 1, 2)):
    found = load_dataset(path, format="robomimic", output="numpy", layout="HWC")
    assert found.lengths.tolist() == [4 + n for n in numbers]
    for number, n in enumerate(numbers):
        got, given = found.load_episode(number), episode(n, 4 + n)
        assert sorted(got) == sorted(COLUMNS)
        for key in ("eef", "eye"):
            assert np.array_equal(got[f"obs/{key}"], given[f"obs/{key}"][:-1])
            assert np.array_equal(got[f"next_obs/{key}"], given[f"obs/{key}"][1:])
            assert got[f"obs/{key}"].dtype == given[f"obs/{key}"].dtype
        assert np.array_equal(got["action"], given["action"][:-1])
        assert np.array_equal(got["reward"], given["reward"][1:])
        assert np.array_equal(got["task"], given["task"][:-1])
        assert got["done"].tolist() == [0] * (3 + n) + [1]
    data = found.get_episode_data()
    assert [m.tolist() for m in data["mask"]] == [["small", "train"] if n == 0 else ["valid"] for n in numbers]
    assert data["seed"] == list(numbers)
    found.close()


def test_the_layout_is_theirs_and_comes_back(tmp_path):
    path = tmp_path / "demos.hdf5"
    write(path, env_args={"env_name": "Lift", "type": 1})
    check(path)
    with h5py.File(path) as file:
        assert file["data"].attrs["total"] == 15
        assert json.loads(file["data"].attrs["env_args"])["env_name"] == "Lift"
        assert file["data/demo_1"].attrs["num_samples"] == 5
        assert file["mask/train"][()].tolist() == [b"demo_0"]
        assert file["mask/valid"][()].tolist() == [b"demo_1", b"demo_2"]


def test_rows_without_a_last_observation(tmp_path):
    path = tmp_path / "a.hdf5"
    with get_format("robomimic").open_writer(path, observation=["state"], final_row=False) as writer:
        writer.write_episode({"state": [[0.0], [1.0]], "action": [[0.0], [1.0]], "next": [5, 6]})
    got = load_dataset(path, format="robomimic", output="numpy").load_episode(0)
    assert got["obs/state"].tolist() == [[0.0], [1.0]] and "next_obs/state" not in got
    assert got["next"].tolist() == [5, 6]
    assert got["done"].tolist() == [0, 1]


def test_what_it_refuses(tmp_path):
    path = tmp_path / "a.hdf5"
    with get_format("robomimic").open_writer(path) as writer:
        for wrong, message in [
            ({"obs": [0.0, 1.0]}, "no column 'action'"),
            ({"action": [0.0, 1.0]}, "no column 'obs' or 'observation'"),
            ({"obs": [0.0], "action": [0.0]}, "has no step"),
            ({"obs": [0.0, 1.0], "action": np.zeros(2, "M8[s]")}, "no type"),
        ]:
            with pytest.raises(InputError, match=message):
                writer.write_episode(wrong)
    assert len(load_dataset(path, format="robomimic").lengths) == 0
    with h5py.File(tmp_path / "link.hdf5", "w") as file:
        demo = file.create_group("data/demo_0")
        demo.attrs["num_samples"] = 2
        demo["actions"] = h5py.ExternalLink("a.hdf5", "/data")
    with pytest.raises(CorruptError, match="link to elsewhere"):
        load_dataset(tmp_path / "link.hdf5", format="robomimic")


@pytest.mark.filterwarnings("ignore")  # what robomimic says is not for us to mend
def test_their_loader_reads_it(tmp_path):
    pytest.importorskip("robomimic", reason="robomimic is not installed (tests/peers/alone.txt)")
    with contextlib.redirect_stdout(io.StringIO()):
        from robomimic.utils import obs_utils
        from robomimic.utils.dataset import SequenceDataset

        path = tmp_path / "demos.hdf5"
        write(path)
        obs_utils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": ["eef"], "rgb": ["eye"]}})
        how = {
            "obs_keys": ["eef", "eye"],
            "dataset_keys": ["actions", "rewards", "dones"],
            "load_next_obs": True,
            "seq_length": 2,
            "pad_seq_length": True,
            "frame_stack": 1,
            "hdf5_cache_mode": None,
            "hdf5_use_swmr": False,
        }
        whole = SequenceDataset(str(path), **how)
        valid = SequenceDataset(str(path), filter_by_attribute="valid", **how)
    assert (len(whole), len(valid)) == (15, 11)
    at = 0
    for n in range(3):
        given = episode(n, 4 + n)
        for step in range(4 + n):
            item = whole[at]
            assert np.array_equal(item["actions"][0], given["action"][step])
            assert item["rewards"][0] == given["reward"][step + 1]
            assert np.array_equal(item["obs"]["eef"][0], given["obs/eef"][step])
            assert np.array_equal(item["next_obs"]["eye"][0], given["obs/eye"][step + 1])
            at += 1


def test_a_column_of_another_length_is_refused(tmp_path):
    path = tmp_path / "demos.hdf5"
    write(path, [0])
    with h5py.File(path, "r+") as file:
        rows = file["data/demo_0/actions"][:]
        del file["data/demo_0/actions"]
        file["data/demo_0/actions"] = np.concatenate([rows, rows[:1]])
    with pytest.raises(CorruptError, match=r"actions has 5 rows, expected 4"):
        load_dataset(path, format="robomimic", output="numpy").load_episode(0)
