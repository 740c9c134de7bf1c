"""Minari reads what we wrote: every value equal, through its own `load_dataset`."""

import numpy as np
import pytest

pytest.importorskip("minari", reason="minari is not installed (extra minari)")

import gymnasium as gym
import minari
from gymnasium import spaces

import ringmap
from ringmap.data import ReplayBuffer, convert, get_format, load_dataset, merge
from ringmap.errors import ExistsError, InputError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def episode(number, steps):
    """T + 1 rows, as environments are recorded here."""
    rng = np.random.default_rng(number)
    rows = steps + 1
    found = {
        "obs/camera": rng.integers(0, 256, (rows, 32, 32, 3), np.uint8),
        "obs/pair/0": rng.normal(size=(rows, 2)).astype(np.float32),
        "obs/pair/1": rng.integers(0, 5, rows),
        "obs/task": np.array([f"go {number} {'é' * i}" for i in range(rows)]),
        "action": rng.normal(size=(rows, 2)),
        "reward": rng.normal(size=rows),
        "terminated": np.arange(rows) == steps,
        "truncated": np.zeros(rows, bool),
        "speed": rng.normal(size=rows),
    }
    found["action"][-1] = found["reward"][0] = np.nan
    return found


def same(got, given):
    for name in ("camera", "task"):
        assert np.array_equal(got.observations[name], given[f"obs/{name}"])
    for i in range(2):
        assert np.array_equal(got.observations["pair"][i], given[f"obs/pair/{i}"])
        assert got.observations["pair"][i].dtype == given[f"obs/pair/{i}"].dtype
    assert np.array_equal(got.actions, given["action"][:-1])
    assert np.array_equal(got.rewards, given["reward"][1:])
    assert np.array_equal(got.terminations, given["terminated"][1:])
    assert not got.truncations.any()
    assert np.array_equal(got.infos["speed"], given["speed"])


def test_every_value_comes_back(tmp_path):
    given = [episode(n, 4 - n) for n in range(3)]  # the buffer locks the width of texts
    buf = ReplayBuffer(100, path=tmp_path / "ring", reward_at="next")
    buf.write_episodes([{**e, "_episode_data": {"seed": n, "who": "me"}} for n, e in enumerate(given)])
    convert(buf, "minari:here/parts-v0", dest_format="minari", progress=False)
    found = minari.load_dataset("here/parts-v0")
    assert list(minari.list_local_datasets()) == ["here/parts-v0"]
    assert (found.total_episodes, found.total_steps) == (3, 9)
    assert isinstance(found.observation_space["pair"], spaces.Tuple)
    for number, one in enumerate(found.iterate_episodes()):
        same(one, given[number])
        assert all(found.observation_space.contains(o) for o in parts_of(one, found))
    assert [m["who"] for m in found.storage.get_episode_metadata([0, 1, 2])] == ["me"] * 3
    mine = load_dataset("minari:here/parts-v0")
    assert mine.get_episode_data()["seed"] == [0, 1, 2]
    assert mine.load_episode(1)["next_observation/task"].tolist() == given[1]["obs/task"][1:].tolist()
    buf.close()


def parts_of(one, found):
    for t in range(len(one.rewards) + 1):
        pair = tuple(np.asarray(p[t]) for p in one.observations["pair"])
        yield {"camera": one.observations["camera"][t], "pair": pair, "task": one.observations["task"][t]}


def test_a_dataset_of_theirs_is_copied_and_merged(tmp_path):
    env = gym.make("CartPole-v1")
    episodes = []
    for seed in range(2):
        obs = [env.reset(seed=seed)[0], *(env.step(env.action_space.sample())[0] for _ in range(4))]
        episodes.append(
            minari.data_collector.EpisodeBuffer(
                id=seed,
                seed=seed,
                observations=np.array(obs),
                actions=np.arange(4) % 2,
                rewards=[1.0] * 4,
                terminations=[False] * 4,
                truncations=[False] * 3 + [True],
                infos={"x": {"y": np.arange(5)}},
            )
        )
    theirs = minari.create_dataset_from_buffers(
        "theirs-v0", episodes, observation_space=env.observation_space, action_space=env.action_space
    )
    how = {"observation_space": env.observation_space, "action_space": env.action_space}
    convert("minari:theirs-v0", "minari:ours-v0", progress=False, **how)
    merge(["minari:theirs-v0", "minari:ours-v0"], "minari:both-v0", progress=False, **how)
    ours, both = minari.load_dataset("ours-v0"), minari.load_dataset("both-v0")
    assert ours.action_space == theirs.action_space and ours.observation_space == theirs.observation_space
    assert both.total_episodes == 4
    for number in range(4):
        left, right = theirs[number % 2], both[number]
        assert np.array_equal(left.observations, right.observations)
        assert np.array_equal(left.actions, right.actions)
        assert np.array_equal(left.truncations, right.truncations)
        assert np.array_equal(left.infos["x"]["y"], right.infos["x"]["y"])


def test_it_has_the_spaces_that_were_given(home):
    given = [episode(n, 3) for n in range(3)]
    action_space = spaces.Box(-1, 1, (2,), np.float64)
    path = home / "made-v1"
    with get_format("minari").open_writer(path, action_space=action_space) as writer:
        writer.write_episodes(given)
        assert load_dataset(path).lengths.tolist() == [3, 3, 3]  # out of the log
    found = minari.load_dataset("made-v1")
    assert found.action_space == action_space
    for number in range(3):
        same(found[number], given[number])
    with pytest.raises(ExistsError):
        convert(ReplayBuffer(10), "minari:made-v1", progress=False)


def test_what_it_can_not_hold_is_refused(tmp_path, home):
    whole = {"obs": [[0.0], [1.0]], "next_obs": [[1.0], [2.0]], "action": [0, 1], "reward": [0.0, 1.0]}
    with pytest.raises(InputError, match="no id of Minari"):
        get_format("minari").open_writer(home / "no version here!")
    with get_format("minari").open_writer(home / "a-v0") as writer:
        for change, message in [
            ({"next_obs": [[7.0], [2.0]]}, "one step later"),
            ({"reward": None}, "no column 'reward'"),
            ({"obs": None}, "no column 'observation' or 'obs'"),
            ({"when": np.zeros(2, "M8[s]")}, "no type"),
            ({"_episode_data": {"a": None}}, "episode data 'a'"),
        ]:
            wrong = {k: v for k, v in {**whole, **change}.items() if v is not None}
            with pytest.raises(InputError, match=message):
                writer.write_episode(wrong)
        with pytest.raises(InputError, match="has no step"):
            writer.write_episode({"obs": [[0.0]], "action": [0], "reward": [0.0]})
        writer.write_episode(whole)
    found = minari.load_dataset("a-v0")
    assert found[0].observations.tolist() == [[0.0], [1.0], [2.0]]
    assert found[0].truncations.tolist() == [False, True]


def test_rewards_of_the_same_row(home):
    rows = {"pixels": np.zeros((3, 4)), "state": np.ones((3, 2)), "action": [0, 1, -1], "reward": [5.0, 6.0, 0.0]}
    with get_format("minari").open_writer(
        home / "s-v0", observation=["pixels", "state"], reward_at="same", final_row=True
    ) as writer:
        writer.write_episode(rows)
    found = minari.load_dataset("s-v0")[0]
    assert found.rewards.tolist() == [5.0, 6.0] and found.actions.tolist() == [0, 1]
    assert found.observations["state"].shape == (3, 2)


def test_a_recording_of_a_world(tmp_path):
    buf = ReplayBuffer(1000, path=tmp_path / "ring")
    env = ringmap.ReplayBufferCollectionWrapper(gym.make("CartPole-v1"), buf)
    env.reset(seed=0)
    for _ in range(60):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    env.close()
    convert(buf, "minari:cart-v0", progress=False, action_space=env.action_space)
    found = minari.load_dataset("cart-v0")
    assert found.total_episodes == buf.num_episodes > 0
    for number, one in enumerate(found):  # the last one was cut
        assert one.terminations[-1] or number == found.total_episodes - 1
        assert one.rewards.tolist() == [1.0] * len(one)
        assert np.array_equal(one.observations, buf.load_episode(number)["obs"])
    buf.close()
