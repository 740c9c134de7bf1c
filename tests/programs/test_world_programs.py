"""The programs of two public guides that use a world run as they are written there.

Source: stable-worldmodel, World guide and Replay Buffer guide. Each program runs on TwoRoom,
which comes along, and on PushT where gym-pusht is installed (the extra pusht).
"""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ringmap as swm
from ringmap.data import ReplayBuffer
from ringmap.policy import ExpertPolicy, RandomPolicy

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gym_pusht  # noqa: F401

    IDS = ["swm/TwoRoom-v1", "swm/PushT-v1"]
except ImportError:
    IDS = ["swm/TwoRoom-v1"]

pytestmark = [
    pytest.mark.parametrize("name", IDS),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # a machine with one core
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of pymunk, in gym-pusht
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def expert_for(name):
    return ExpertPolicy() if "TwoRoom" in name else (lambda infos: infos["state"][:, 0, 2:4])


def test_reset(name):
    world = swm.World(env_name=name, num_envs=4, image_shape=(64, 64))
    world.set_policy(RandomPolicy())
    world.reset(seed=0)
    assert world.infos["pixels"].shape == (4, 1, 64, 64, 3)
    assert world.infos["state"].shape == (4, 1, 2 if "TwoRoom" in name else 5)
    per_env = [
        {"variation": ["agent.color"], "variation_values": {"agent.color": [255, 0, 0]}},
        {"variation": ["agent.color"], "variation_values": {"agent.color": [0, 255, 0]}},
        {"variation": ["agent.color"], "variation_values": {"agent.color": [0, 0, 255]}},
    ]
    world.close()
    world = swm.World(name, num_envs=3, image_shape=(64, 64))
    world.reset(options=per_env)
    for env in range(3):
        others = [c for c in range(3) if c != env]
        picture = world.infos["pixels"][env, 0].astype(int)
        strong = (picture[..., env] > 200) & (picture[..., others] < 60).all(-1)
        assert strong.any(), "the agent has not its color"
    world.close()


def test_collect_and_evaluate(name):
    pytest.importorskip("av", reason="PyAV is not installed (the extra video)")
    world = swm.World(name, num_envs=8, image_shape=(64, 64), max_episode_steps=25)
    world.set_policy(expert_for(name))
    world.collect("data/expert.h5", episodes=20, seed=0)
    dataset = swm.data.load_dataset("data/expert.h5")
    assert len(dataset.lengths) == 20
    results = world.evaluate(episodes=10, seed=42, video="videos/")
    assert 0 <= results["success_rate"] <= 100
    assert len(list(Path("videos").glob("episode_*.mp4"))) == 10
    if "TwoRoom" in name:
        assert results["success_rate"] == 100
    world.close()

    long = np.flatnonzero(dataset.lengths > 12)[:4]
    world = swm.World(name, num_envs=4, image_shape=(64, 64))
    world.set_policy(expert_for(name))
    results = world.evaluate(
        dataset=dataset,
        episodes_idx=long.tolist(),
        start_steps=[0, 1, 2, 3],
        goal_offset=8,
        eval_budget=50,
        video="videos/",
    )
    assert set(results) >= {"success_rate", "episode_successes", "seeds"}
    assert len(list(Path("videos").glob("env_*.mp4"))) == 4
    world.close()


@pytest.mark.parametrize("home", ["ram", "disk"])
def test_quick_tour(name, home):
    trained = []
    buf = ReplayBuffer(max_steps=100_000, history_len=4, path="buffer" if home == "disk" else None)
    world = swm.World(name, num_envs=4, image_shape=(64, 64), max_episode_steps=15)
    world.set_policy(swm.policy.RandomPolicy(seed=0))
    world.collect(writer=buf, episodes=20, seed=0)
    loader = DataLoader(buf, batch_size=64, shuffle=True)
    for batch in loader:
        trained.append({column: values.shape for column, values in batch.items()})
    assert trained[0]["pixels"] == (64, 4, 64, 64, 3)
    assert trained[0]["action"] == (64, 4, 2)
    batch = buf.sample(batch_size=64)
    assert batch["pixels"].shape == (64, 4, 64, 64, 3)
    buf.dump("runs/replay.h5", format="hdf5")
    assert len(swm.data.load_dataset("runs/replay.h5", num_steps=4)) == len(buf) == 20 * 13
    buf.close()
    world.close()


def test_online(name):
    world = swm.World(name, num_envs=4, image_shape=(64, 64), max_episode_steps=10)

    class Learns(RandomPolicy):
        updates = 0

        def update(self, batch):
            assert batch["state"].shape[:2] == (32, 4)
            self.updates += 1

        def state_dict(self):
            return {"updates": torch.tensor(self.updates)}

    policy = Learns(seed=0)
    world.set_policy(policy)
    prior = ReplayBuffer(max_steps=1000)
    world.collect(writer=prior, episodes=3, seed=100)
    prior.dump("runs/prior.h5", format="hdf5")

    buf = ReplayBuffer(max_steps=150, history_len=4)
    warm_start = swm.data.load_dataset("runs/prior.h5", num_steps=4)
    for ep_idx in range(len(warm_start.lengths)):
        buf.write_episode(warm_start.load_episode(ep_idx))

    global_step = 0
    while global_step < 12:
        world.collect(writer=buf, episodes=2, seed=global_step)
        for _ in range(4):
            policy.update(buf.sample(batch_size=32, step=global_step))
            global_step += 1
        if global_step % 4 == 0:
            buf.dump(f"runs/step_{global_step:06d}.h5", format="hdf5")
            torch.save(policy.state_dict(), f"runs/step_{global_step:06d}.pt")
    assert policy.updates == 12
    assert len(swm.data.load_dataset("runs/step_000012.h5").lengths) == buf.num_episodes
    world.close()
