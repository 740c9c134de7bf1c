"""Where rewards stand is known on every way from one dataset to another, or refused: no export gives an action
another's reward."""

import numpy as np
import pytest

from ringmap import ReplayBuffer, World, policy
from ringmap.clips.facts import Facts
from ringmap.data import (
    ConcatDataset,
    MergeDataset,
    NStep,
    Sequences,
    convert,
    get_format,
    list_formats,
    load_dataset,
    merge,
)
from ringmap.errors import InputError
from tests.unit.formats.others import NAMES, OTHERS, OURS

ROWS = 5


def episode(number, reward_at):
    """Return five rows; of "next" the first reward and the last action are none."""
    x = 10.0 * number + np.arange(ROWS)
    steps = {"obs": x[:, None].copy(), "action": x[:, None] + 0.5, "reward": x + 0.25}
    if reward_at == "next":
        steps["reward"] = np.r_[np.nan, x[:-1] + 0.25]
        steps["action"][-1] = np.nan
    return {**steps, "terminated": np.arange(ROWS) == ROWS - 1}


def wanted(count, reward_at):
    """Return each step (observation, its action, the reward of that action): all rows, or all but the last."""
    steps = range(ROWS - (reward_at == "next"))
    return [(x, x + 0.5, x + 0.25) for n in range(count) for x in (10.0 * n + t for t in steps)]


def steps_of(dataset):
    """Return the same of a dataset, as its `reward_at` says."""
    found, late = [], dataset.reward_at == "next"
    names = {n.replace("next.", ""): n for n in dataset.column_names}
    observation = next(n for n in ("obs", "obs/flat", "observation", "observation.state") if n in names)
    for number in range(len(dataset.lengths)):
        rows = {n: np.asarray(v) for n, v in dataset.load_episode(number).items()}
        columns = [rows[names[n]].reshape(-1) for n in (observation, "action", "reward")]
        count = len(columns[0]) - late
        found += zip(*(c[late * (n == 2) :][:count].tolist() for n, c in enumerate(columns)), strict=True)
    return found


def ring(path, reward_at, count=2):
    buf = ReplayBuffer(100, path=path, reward_at=reward_at, seed=0)
    for number in range(count):
        buf.write_episode(episode(number, reward_at))
    return buf


def place(tmp_path, name, folder="out"):
    (tmp_path / folder).mkdir(exist_ok=True)
    return tmp_path / folder / NAMES.get(name, f"a.{name}")


def opened(path, name):
    return load_dataset(path, format=name, output="numpy")


WAYS = {
    "dump": lambda buf, path, name: buf.dump(path, name, progress=False),
    "convert": lambda buf, path, name: convert(buf.path, path, dest_format=name, progress=False),
    "convert, some": lambda buf, path, name: convert(buf, path, dest_format=name, where="length > 0", progress=False),
    "merge": lambda buf, path, name: merge([buf], path, dest_format=name, progress=False),
}


CASES = [("dump", name) for name in [*OURS, *OTHERS] if name in list_formats()]
CASES += [(way, name) for way in WAYS if way != "dump" for name in ("hdf5", "robomimic")]


@pytest.mark.parametrize("reward_at", ["next", "same"])
@pytest.mark.parametrize(("way", "name"), CASES)
def test_a_copy_has_the_rewards_of_its_actions(tmp_path, way, name, reward_at):
    path = place(tmp_path, name)
    with ring(tmp_path / "ring", reward_at) as buf:
        if (name, reward_at) == ("minari", "same"):
            with pytest.raises(InputError, match="final_row=True"):
                WAYS[way](buf, path, name)
            assert not path.exists()
            return
        WAYS[way](buf, path, name)
    found = opened(path, name)
    assert found.reward_at == ("same" if name in OTHERS else reward_at)
    assert steps_of(found) == wanted(2, reward_at)
    back = ReplayBuffer(100)
    back.extend_from(found)
    assert back.reward_at == found.reward_at and steps_of(back) == wanted(2, reward_at)
    if name in ("hdf5", "zarr"):  # from file to file
        last = place(tmp_path, "robomimic", "last")
        convert(path, last, dest_format="robomimic", progress=False)
        assert steps_of(opened(last, "robomimic")) == wanted(2, reward_at)


def test_next_observations_say_what_followed(tmp_path):
    """Then each row is a step, whatever its rewards are called, and Minari has them all."""
    buf = ReplayBuffer(100, reward_at="same")
    rows = episode(0, "same")
    buf.write_episode({**rows, "next_obs": rows["obs"] + 1})
    for name in OTHERS:
        if name in list_formats():
            buf.dump(place(tmp_path, name), name, progress=False)
            assert steps_of(opened(place(tmp_path, name), name)) == wanted(1, "same"), name


@pytest.mark.parametrize("name", [name for name in OTHERS if name in list_formats()])
def test_rewards_of_unknown_place_are_not_guessed(tmp_path, name):
    with get_format("hdf5").open_writer(tmp_path / "a.h5") as writer:
        writer.write_episode(episode(0, "next"))
    path = place(tmp_path, name)
    with pytest.raises(InputError, match="reward_at="):
        convert(tmp_path / "a.h5", path, dest_format=name, progress=False)
    assert not path.exists()
    convert(tmp_path / "a.h5", path, dest_format=name, reward_at="next", progress=False)
    assert steps_of(opened(path, name)) == wanted(1, "next")
    told = load_dataset(tmp_path / "a.h5", reward_at="next", output="numpy")
    convert(told, path, dest_format=name, mode="overwrite", progress=False)
    assert steps_of(opened(path, name)) == wanted(1, "next")


def test_what_stands_elsewhere_is_not_mixed(tmp_path):
    one, two = ring(tmp_path / "one", "next"), ring(tmp_path / "two", "same")
    unknown = ReplayBuffer(100)
    unknown.write_episode(episode(0, "same"))
    out = tmp_path / "out.h5"
    for parts, text in (([one, two], "stand at 'same'"), ([one, unknown], "not known where")):
        with pytest.raises(InputError, match=text):
            merge(parts, out, progress=False)
        assert not out.exists()
    merge([one, unknown], out, reward_at="next", progress=False)
    assert load_dataset(out).reward_at == "next" and len(load_dataset(out).lengths) == 3
    for part, text in ((two, "'same'"), (unknown, "not known")):
        with pytest.raises(InputError, match=text):
            convert(part, out, mode="append", progress=False)
        with pytest.raises(InputError, match=text):
            one.extend_from(part)
        assert len(load_dataset(out).lengths) == 3 and one.num_episodes == 2
    with pytest.raises(InputError, match="dataset 1 has its rewards at 'same'"):
        ConcatDataset([one, two])
    assert ConcatDataset([one, one.view()]).reward_at == "next"
    assert ConcatDataset([one, unknown]).reward_at is None
    assert MergeDataset([two, two], [["obs"], ["reward"]]).reward_at == "same"
    assert MergeDataset([unknown, two.take([0])], [["obs"], ["reward"]]).reward_at == "same"


@pytest.mark.parametrize("name", [name for name in OURS if name in list_formats()])
def test_a_writer_that_was_killed_has_said_where(tmp_path, name):
    """The log has it, before the dataset does; and what is appended later is of the same kind."""
    path = place(tmp_path, name)
    writer = get_format(name).open_writer(path)
    writer.expect_facts(Facts("same"), "a test")
    with writer:
        writer.write_episode(episode(0, "same"))
        if name != "hdf5":  # whose file can't be read meanwhile
            assert opened(path, name).reward_at == "same"
    with pytest.raises(InputError, match="reward_at='next'"):
        other = get_format(name).open_writer(path)
        other.expect_facts(Facts("next"), "a test")
        with other:
            pass
    with get_format(name).open_writer(path) as writer:
        writer.write_episode(episode(1, "same"))
    assert opened(path, name).reward_at == "same" and len(opened(path, name).lengths) == 2


def test_what_a_world_collects_says_where(tmp_path):
    world = World("CartPole-v1", num_envs=1, image_shape=(8, 8), max_episode_steps=5)
    world.set_policy(policy.RandomPolicy(seed=0))
    world.collect(tmp_path / "a.h5", episodes=1, seed=0, format="hdf5")
    world.close()
    assert load_dataset(tmp_path / "a.h5").reward_at == "next"


@pytest.mark.parametrize("name", ["hdf5", *OTHERS])
@pytest.mark.parametrize("reward_at", ["next", "same"])
def test_sums_and_ends_of_a_copy_are_those_of_the_ring(tmp_path, name, reward_at):
    """Whatever the columns are called: an episode that terminated has no value beyond its last reward."""
    if name not in list_formats() or (name, reward_at) == ("minari", "same"):
        return
    with ring(tmp_path / "ring", reward_at) as buf:
        buf.dump(place(tmp_path, name), name, progress=False)
        whole = buf.view({"sum": NStep(2, gamma=0.5)})
        wanted = [{n: whole[i][n] for n in ("sum", "sum_discount", "sum_steps")} for i in range(len(whole))]
    copy = opened(place(tmp_path, name), name)
    rows = int(copy.lengths[0])
    reward = "reward" if "reward" in copy.column_names else "next.reward"
    items = list(copy.view({"sum": NStep(2, gamma=0.5, of=reward)}))
    steps = [wanted[ROWS * n + t] for n in range(2) for t in range(rows)]  # without those of a last row
    assert [{n: item[n] for n in steps[0]} for item in items] == steps
    assert items[ROWS - 1 - (reward_at == "next")]["sum_discount"] == 0
    for across in (False, True):
        (item,) = (
            list(copy.take([0]).view(Sequences(rows)))
            if not across
            else [copy.view(Sequences(2 * rows, across=True))[0]]
        )
        ends = [t % rows == rows - 1 for t in range(len(item["is_last"]))]
        assert item["is_terminal"].tolist() == item["is_last"].tolist() == ends
