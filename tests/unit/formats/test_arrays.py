"""Arrays that a laboratory has: D4RL's files, .npz files with an episode each, arrays with ends."""

import h5py
import numpy as np
import pytest

from ringmap.data import ReplayBuffer, convert, detect_format, from_arrays, load_dataset
from ringmap.errors import InputError, UnsupportedError

ENDS = {3, 7, 8, 11}


def arrays(count=12, ends=ENDS):
    """Steps that carry their number, of which one ends in a terminal state, and the others at a time limit."""
    rows = np.arange(count)
    at = np.isin(rows, list(ends))
    return {
        "observations": rows[:, None].astype("f4"),
        "actions": rows[:, None] * 2,
        "rewards": rows * 1.0,
        "terminals": rows == 3,
        "timeouts": at & (rows != 3),
    }


def write_hdf5(path, **columns):
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return path


def never_crosses(dataset, ends=ENDS):
    """Tell whether next observations and clips stay in their episode."""
    for number in range(len(dataset.lengths)):
        episode = dataset.load_episode(number)
        seen = episode["observation"][:, 0].tolist()
        following = episode["next_observation"][:, 0].tolist() if "next_observation" in episode else []
        last = min(end for end in ends if end >= seen[0])
        if seen != list(range(int(seen[0]), int(seen[-1]) + 1)) or max(seen + following) > last:
            return False
    return True


def test_a_d4rl_file_without_timeouts_asks_where_episodes_end(tmp_path):
    """Of before `timeouts` and `next_observations`: by a time limit of 4 steps it has the episodes of the others."""
    given = arrays(12, {3, 7, 11})
    given.pop("timeouts")
    path = write_hdf5(tmp_path / "hopper-v0.hdf5", **given)
    for call in (lambda: load_dataset(path), lambda: from_arrays(given)):
        with pytest.raises(InputError, match="not known where its episodes end.*pass max_episode_steps="):
            call()
    for ends, limit in (({3, 7, 11}, 4), ({2, 3, 6, 9, 11}, 3)):  # counted from where the last one ended
        dataset = load_dataset(path, max_episode_steps=limit)
        assert never_crosses(dataset, ends)
        assert dataset.lengths.tolist() == ([4, 3, 3] if limit == 4 else [2, 1, 2, 2, 1])
        assert from_arrays(given, max_episode_steps=limit).lengths.sum() == 12
    assert not never_crosses(load_dataset(path, max_episode_steps=8), {3, 7, 11})  # the control
    for bad in (0, -1, 2.5, True):
        with pytest.raises(InputError, match="max_episode_steps must be positive"):
            load_dataset(path, max_episode_steps=bad)


def test_a_d4rl_file_by_its_path(tmp_path):
    """Recognised as its prefix loads it; other arrays are named, and read if asked for; it can be converted."""
    given = arrays()
    path = write_hdf5(
        tmp_path / "hopper.hdf5", **given, **{"infos/qpos": np.arange(24.0).reshape(12, 2), "metadata/algorithm": "SAC"}
    )
    with pytest.warns(UserWarning, match=r"left out: 'infos/qpos', 'metadata/algorithm'; keys_to_load="):
        dataset = load_dataset(path)
    assert detect_format(path).name == "d4rl" and dataset.reward_at == "same"
    assert dataset.lengths.tolist() == [4, 3, 2] and never_crosses(dataset)
    asked = load_dataset(path, keys_to_load=["observation", "infos/qpos"], output="torch")
    assert asked.load_episode(1)["infos/qpos"][:, 0].tolist() == [8, 10, 12]
    with pytest.raises(UnsupportedError, match="'metadata/algorithm'.*no row for each step"):
        load_dataset(path, keys_to_load=["observation", "metadata/algorithm"])
    with pytest.warns(UserWarning, match="left out"):
        convert(path, tmp_path / "copy.h5", progress=False)
    copy = load_dataset(tmp_path / "copy.h5", output="numpy")
    assert copy.reward_at == "same" and copy.lengths.tolist() == [4, 3, 2]
    assert np.array_equal(copy.get_col_data("next_observation"), dataset.get_col_data("next_observation"))


def test_arrays_with_ends(tmp_path):
    """Values come as they were given, up to the last step; nothing is made up but `truncated`."""
    given = {**arrays(), "skill": np.array(list("abcabcabcabc"))}
    dataset = from_arrays(given, num_steps=2)
    assert dataset.column_names == ["observation", "action", "reward", "terminated", "truncated", "skill"]
    assert dataset.lengths.tolist() == [4, 4, 1, 3] and never_crosses(dataset) and dataset.reward_at == "same"
    assert all(
        np.array_equal(dataset.get_col_data(o), given[n]) for o, n in zip(dataset.column_names, given, strict=True)
    )
    assert len(dataset) == 3 + 3 + 2 and dataset[3]["observation"][:, 0].tolist() == [4, 5]
    np.savez(tmp_path / "all.npz", **given)
    with np.load(tmp_path / "all.npz") as archive, pytest.raises(InputError, match=r"from_arrays\(np.load"):
        assert from_arrays(archive).lengths.tolist() == [4, 4, 1, 3]
        load_dataset(tmp_path / "all.npz")
    buf = ReplayBuffer(100)
    buf.extend_from(dataset)
    assert buf.lengths.tolist() == [4, 4, 1, 3] and buf.load_episode(1)["skill"].tolist() == list("bcab")
    ends = np.isin(np.arange(12), list(ENDS))
    assert from_arrays({"obs": np.arange(12), "dones": ends * 1.0}).get_col_data("done").dtype == float
    for bad, message in (
        ({"obs": np.arange(3)}, "no array says where episodes end"),
        ({"action": np.arange(3), "actions": np.arange(3), "dones": np.zeros(3)}, "two arrays are the column 'action'"),
        ({"obs": np.arange(3), "dones": [0, 2, 1]}, "expected one flag a step, 0 or 1"),
        ({}, "no arrays"),
    ):
        with pytest.raises(InputError, match=message):
            from_arrays(bad)


def test_npz_files_with_an_episode_each(tmp_path):
    """Episodes are in the order of their numbers; what has no row for each step is data of the episode."""
    for number, steps in enumerate((3, 1, 5, 2, 2, 2, 2, 2, 2, 2, 4)):
        rows = np.arange(steps + 1) + 100 * number
        np.savez_compressed(
            tmp_path / f"episode_{number}.npz",
            observations=rows[:, None],
            actions=rows[:-1] * 0.5,
            rewards=rows[:-1],
            word=np.array([chr(97 + number) * steps] * steps),
            success=number % 2 == 0,
            goal=np.arange(2.0) + number,
        )
    dataset = load_dataset(tmp_path, num_steps=2, output="numpy")
    assert detect_format(tmp_path).name == "npz" and dataset.reward_at == "same"
    assert dataset.lengths.tolist() == [3, 1, 5, 2, 2, 2, 2, 2, 2, 2, 4]
    assert dataset.column_names == ["observation", "next_observation", "action", "reward", "word"]
    last = dataset.load_episode(10)
    assert last["observation"][:, 0].tolist() == [1000, 1001, 1002, 1003]
    assert last["next_observation"][:, 0].tolist() == [1001, 1002, 1003, 1004]
    assert last["word"].tolist() == ["kkkk"] * 4 and last["action"].tolist() == [500, 500.5, 501, 501.5]
    assert dataset.get_episode_data(2)["success"] == [True]
    assert dataset.get_episode_data(3)["goal"][0].tolist() == [3, 4]
    np.savez(
        tmp_path / "episode_0.npz", observations=np.zeros((4, 1)), actions=np.zeros(3), rewards=np.zeros(3), info=[{}]
    )
    with pytest.raises(UnsupportedError, match="column 'observation' is of float64.*another shape or dtype"):
        load_dataset(tmp_path)
    with pytest.raises(UnsupportedError, match="column 'info' is of Python objects"):
        load_dataset(tmp_path, keys_to_load=["info"])
    assert load_dataset(tmp_path, keys_to_load=["action"]).get_col_data("action")[:3].tolist() == [0, 0, 0]
    np.savez(tmp_path / "episode_1.npz", a=np.zeros(3), b=np.zeros(7))
    with pytest.raises(InputError, match="episode_1.npz: how many steps"):
        load_dataset(tmp_path)


def test_files_are_in_the_order_of_their_numbers_whatever_else_their_names_have(tmp_path):
    for number, name in enumerate(["1\u00b22", "2\u00b22", "10\u00b21"]):
        np.savez(tmp_path / f"{name}.npz", action=np.full(3, number))
    dataset = load_dataset(tmp_path)
    assert [dataset.load_episode(n)["action"][0] for n in range(3)] == [0, 1, 2]


def test_arrays_of_no_steps_have_no_episodes():
    none = {"observations": np.zeros((0, 3)), "terminals": np.zeros(0), "timeouts": np.zeros((0, 1))}
    dataset = from_arrays(none)
    assert dataset.lengths.tolist() == [] and len(dataset) == 0
