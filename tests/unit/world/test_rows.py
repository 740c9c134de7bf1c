"""Rows are aligned: each says which environment, episode and step it shows, and what was done there."""

import numpy as np
import pytest

from ringmap.data import ReplayBuffer
from tests.tiers import few


def told(infos):
    """A policy: the action's number says at which observation it is taken."""
    place = infos["place"] if "place" in infos else infos["observation"]
    _, episode, t = place[:, 0].T
    return (episode * 20 + t) % 1000


def policy_for(kind):
    def choose(infos):
        number = told(infos)
        return {
            "discrete": lambda: number,
            "box": lambda: np.stack([number, -number], 1).astype(np.float32),
            "dict": lambda: {"a": number, "b": number / 7},
            "tuple": lambda: (number, np.stack([number % 2, number % 3 > 0], 1)),
            "multi": lambda: np.stack([number, number % 7], 1),
        }[kind.partition("-")[0]]()

    return choose


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.episodes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def write_episode(self, episode):
        self.episodes.append(episode)

    def write_episodes(self, episodes):
        for episode in episodes:
            self.write_episode(episode)


def expect_aligned(episode, kind):
    """Every row of an episode is where it belongs."""
    rows = {n: np.stack(v) for n, v in episode.items() if n != "_episode_data"}
    place = rows["place" if kind.endswith("-named") else "observation"]
    length = len(place) - 1
    assert episode["_episode_data"]["end"] == length, "rows are missing"
    assert {len(values) for values in rows.values()} == {length + 1}
    assert (place[:, 0] == place[0, 0]).all(), "rows of two environments"
    assert (place[:, 1] == place[0, 1]).all(), "rows of two episodes"
    assert place[:, 2].tolist() == list(range(length + 1)), "steps are not in a row"
    assert rows["step_idx"].tolist() == list(range(length + 1))
    assert len(set(rows["id"].tolist())) == 1
    # What was done at an observation stands beside it, and came back as the next reward.
    done = {"dict": lambda: rows["action.a"], "tuple": lambda: rows["action.0"]}.get(
        kind.partition("-")[0], lambda: rows["action"].reshape(length + 1, -1)[:, 0]
    )()
    expected = (place[:, 1] * 20 + place[:, 2]) % 1000
    assert (done[:-1] == expected[:-1]).all(), "actions are shifted"
    assert (rows["reward"][1:] == expected[:-1]).all(), "rewards are shifted"
    assert np.isnan(rows["reward"][0])
    assert rows["reward"].dtype == np.float32
    blank = done[-1]
    assert blank == 0 if done.dtype.kind in "iu" else np.isnan(blank)
    if kind.startswith("dict"):
        assert (rows["action.b"][:-1] == expected[:-1] / 7).all()
        assert np.isnan(rows["action.b"][-1])
    odd = length % 2
    assert rows["terminated"].tolist() == [False] * length + [bool(odd)]
    assert rows["truncated"].tolist() == [False] * length + [not odd]
    if kind.endswith("-named"):
        assert (rows["twice"] == 2 * place).all()
    return int(place[0, 0]), int(place[0, 1])


KINDS = ["box", "discrete", "box-named", "dict", "dict-named", "tuple", "multi"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_envs", few([5, 1, 2, 8]))
def test_every_row_of_every_episode(make, num_envs, kind):
    world = make(num_envs=num_envs, kind=kind, policy=policy_for(kind))
    seen, count = set(), 0
    for seed in (None, 7, 7, None, 3):  # several calls in a row, seeded and not
        kept = Kept()
        world.collect(writer=kept, episodes=11, seed=seed)
        assert len(kept.episodes) == 11
        whose = [expect_aligned(episode, kind) for episode in kept.episodes]
        seen.update(whose)
        count += len(whose)
        seeds = [e["_episode_data"].get("seed") for e in kept.episodes]
        assert sorted(seeds) == list(range(seed, seed + 11)) if seed is not None else not any(seeds)
        assert all(e["_episode_data"]["maker"] == "proof" for e in kept.episodes)
    assert len(seen) == count, "an episode was recorded twice"


def test_control(make):
    world = make(kind="box", policy=policy_for("box"))
    kept = Kept()
    world.collect(writer=kept, episodes=20, seed=0)
    episode = next(e for e in kept.episodes if len(e["reward"]) > 4)
    other = next(e for e in kept.episodes if e is not episode and len(e["reward"]) > 4)
    expect_aligned(episode, "box")
    planted = {
        "actions are shifted": {"action": episode["action"][-1:] + episode["action"][:-1]},
        "rewards are shifted": {"reward": episode["reward"][1:] + episode["reward"][:1]},
        "rows are missing": {name: v[1:] for name, v in episode.items() if name != "_episode_data"},
        "rows of two": {"observation": other["observation"][:1] + episode["observation"][1:]},
        "not in a row": {"observation": [episode["observation"][i] for i in (0, 2, 1)] + episode["observation"][3:]},
    }
    for message, changed in planted.items():
        with pytest.raises(AssertionError, match=message):
            expect_aligned({**episode, **changed}, "box")


def by_seed(buf):
    """Return seed -> bytes of every column, and check that no seed is there twice."""
    seeds = buf.get_episode_data().get("seed", [])
    assert len(seeds) == len(set(seeds))
    found = {}
    for i, seed in enumerate(seeds):
        data = buf.get_episode_data(i)
        found[seed] = {
            **{name: (v.dtype.str, v.shape, v.tobytes()) for name, v in buf.load_episode(i).items()},
            "data": {name: repr(v[0]) for name, v in sorted(data.items())},
        }
    return found


@pytest.mark.parametrize("policy", few(["random", "expert", "noisy"]))
def test_same_seeds_same_bytes(make, tmp_path, policy):
    """Whatever the number of environments and workers, in RAM and on disk."""
    from ringmap.policy import ExpertPolicy, RandomPolicy

    found = []
    for number, (num_envs, workers) in enumerate([(1, 0), (3, 0), (4, 2), (5, 5), (2, 1)]):
        world = make("ringmap/TwoRoom-v1", num_envs, (16, 16), max_episode_steps=15, workers=workers)
        world.set_policy(
            {
                "random": lambda: RandomPolicy(seed=2),
                "expert": lambda: ExpertPolicy(),
                "noisy": lambda: ExpertPolicy(noise=0.7, seed=4),
            }[policy]()
        )
        path = tmp_path / str(number) if number % 2 else None
        buf = ReplayBuffer(max_steps=1000, path=path)
        world.collect(writer=buf, episodes=8, seed=30, options={"variation": ["all"]})
        found.append(by_seed(buf))
        buf.close()
        world.close()
    assert sorted(found[0]) == list(range(30, 38))
    assert all(other == found[0] for other in found)


def test_spawned_workers_give_the_same(make):
    from ringmap.policy import RandomPolicy

    found = []
    for options in ({}, {"workers": 1, "context": "spawn"}):
        world = make("ringmap/TwoRoom-v1", 2, (16, 16), max_episode_steps=5, **options, policy=RandomPolicy(seed=0))
        buf = ReplayBuffer(max_steps=1000)
        world.collect(writer=buf, episodes=3, seed=0)
        found.append(by_seed(buf))
    assert found[0] == found[1]
