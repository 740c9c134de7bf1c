"""World, wrappers and policies."""

import os

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

import ringmap as swm
from ringmap.data import ReplayBuffer, get_format, list_formats, load_dataset
from ringmap.policy import ExpertPolicy, FeedForwardPolicy, FunctionPolicy, RandomPolicy
from ringmap.world.envs.two_room import TwoRoom
from ringmap.world.wrappers import MegaWrapper
from tests.unit.world.envs import Faulty, Proof

SHAPE = (24, 32)


def test_infos_after_a_reset_and_a_step(make):
    world = make("ringmap/TwoRoom-v1", 4, SHAPE)
    world.reset(seed=0)
    shapes = {name: (v.shape, v.dtype.name) for name, v in world.infos.items()}
    assert shapes == {
        "pixels": ((4, 1, 24, 32, 3), "uint8"),
        "goal": ((4, 1, 24, 32, 3), "uint8"),
        "state": ((4, 1, 2), "float32"),
        "goal_state": ((4, 1, 2), "float32"),
        "action": ((4, 1, 2), "float32"),
        "reward": ((4, 1), "float32"),
        "terminated": ((4, 1), "bool"),
        "truncated": ((4, 1), "bool"),
        "is_success": ((4, 1), "bool"),
        "step_idx": ((4, 1), "int64"),
        "id": ((4, 1), "int64"),
        "render_time": ((4, 1), "float64"),
    }
    assert np.isnan(world.infos["reward"]).all()
    assert np.isnan(world.infos["action"]).all()
    assert not world.infos["step_idx"].any()
    assert len(set(world.infos["id"].ravel())) == 4
    assert world.rewards.shape == world.terminateds.shape == world.truncateds.shape == (4,)
    ids = world.infos["id"].copy()
    world.envs.step(np.full((4, 2), 0.5, np.float32))
    assert (world.infos["action"] == 0.5).all()
    assert (world.infos["reward"][:, 0] == world.rewards).all()
    assert (world.infos["step_idx"] == 1).all()
    assert (world.infos["id"] == ids).all()
    world.reset()
    assert not world.truncateds.any()
    assert (world.infos["id"] != ids).all()


@pytest.mark.parametrize("resample", [None, "nearest", "BILINEAR", Image.Resampling.LANCZOS, 3])
def test_pixels_are_resized_as_pil_does(make, resample):
    world = make("ringmap/TwoRoom-v1", 1, SHAPE, image_resample=resample)
    world.reset(seed=3)
    env = TwoRoom()
    _, info = env.reset(seed=3)
    how = {None: 2, "nearest": 0, "BILINEAR": 2}.get(resample, resample)
    for name, whole in (("pixels", env.render()), ("goal", info["goal"])):
        expected = np.asarray(Image.fromarray(whole).resize((32, 24), Image.Resampling(how)))
        assert np.array_equal(world.infos[name][0, 0], expected)


def test_a_dict_of_renders(make):
    world = make("RingmapTest/Faulty-v0", 2, SHAPE, fault="several")
    world.reset()
    assert world.infos["pixels.front"].shape == world.infos["pixels.back"].shape == (2, 1, *SHAPE, 3)
    assert "pixels" not in world.infos


def test_transforms(make):
    def halve(picture):
        return torch.from_numpy(picture.copy()).movedim(-1, 0) / 2

    world = make("ringmap/TwoRoom-v1", 1, SHAPE, image_transform=halve, goal_transform=lambda goal: goal[::2])
    world.reset(seed=0)
    assert world.infos["pixels"].shape == (1, 1, 3, *SHAPE)
    assert world.infos["goal"].shape == (1, 1, 12, 32, 3)
    raw = world.infos["_pixels"]
    assert np.array_equal(world.infos["pixels"][0, 0], raw[0, 0].transpose(2, 0, 1) / 2)
    buf = ReplayBuffer(max_steps=500)
    world.set_policy(RandomPolicy())
    world.collect(writer=buf, episodes=1)
    assert "_pixels" not in buf.column_names
    one = make("ringmap/TwoRoom-v1", 1, SHAPE, image_transform=halve, goal_conditioned=False)
    one.reset(seed=0)
    assert one.infos["goal"].shape == (1, 1, 3, *SHAPE)


def test_wrappers_before_and_after(make):
    class Marks(gymnasium.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.inside = isinstance(env, MegaWrapper)

        def reset(self, **options):
            observation, info = self.env.reset(**options)
            return observation, {**info, "after" if self.inside else "before": "reward" in info}

        def step(self, action):
            *rest, info = self.env.step(action)
            return *rest, {**info, "after" if self.inside else "before": "reward" in info}

    world = make("ringmap/TwoRoom-v1", 1, pre_wrappers=[Marks], extra_wrappers=[Marks])
    world.reset()
    assert (world.infos["before"].item(), world.infos["after"].item()) == (False, True)


def test_a_gray_picture_keeps_its_axes():
    class Gray(Faulty):
        def render(self):
            return np.zeros((8, 8, 1), np.uint8)

    env = MegaWrapper(Gray(), image_shape=(4, 6))
    _, info = env.reset()
    assert info["pixels"].shape == (4, 6, 1)


def test_options_vary(make):
    world = make("ringmap/TwoRoom-v1", 3, (64, 64))
    colors = [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    world.reset(
        seed=0, options=[{"variation": ["agent.color"], "variation_values": {"agent.color": c}} for c in colors]
    )
    for env, color in enumerate(colors):
        x, y = (world.infos["state"][env, 0] * 64).astype(int)
        assert world.infos["pixels"][env, 0, y, x].tolist() == color
    assert set(world.envs.variation_space) == {"agent", "floor", "wall", "door"}
    world.reset(seed=0, options={"variation": ["all"]})
    first = world.infos["pixels"].copy()
    assert len({frame.tobytes() for frame in first}) == 3
    world.reset(seed=0, options={"variation": ["all"]})
    assert np.array_equal(world.infos["pixels"], first)
    world.reset(seed=0)
    assert len(np.unique(world.infos["pixels"][:, 0, 0, 0], axis=0)) == 1  # the wall's own color


def test_policies_of_every_kind(make):
    world = make("ringmap/TwoRoom-v1", 3, max_episode_steps=4)
    seen = []

    class Model(torch.nn.Module):
        def __init__(self, time):
            super().__init__()
            self.time = time

        def forward(self, infos):
            seen.append({name: tuple(v.shape) for name, v in infos.items()})
            return torch.ones((3, 1, 2) if self.time else (3, 2), requires_grad=True)

    for policy in (
        FeedForwardPolicy(Model(False), keys=["state", "goal_state"]),
        FeedForwardPolicy(Model(True), keys=["state", "goal_state"], history=True),
        FeedForwardPolicy(Model(False)),
        lambda infos: np.ones((3, 2)),
        FunctionPolicy(lambda infos: torch.ones(3, 2)),
    ):
        world.set_policy(policy)
        buf = ReplayBuffer(max_steps=100)
        world.collect(writer=buf, episodes=1, seed=0)
        assert (buf.load_episode(0)["action"][:-1] == 1).all()
    assert seen[0] == {"state": (3, 2), "goal_state": (3, 2)}
    assert seen[4] == {"state": (3, 1, 2), "goal_state": (3, 1, 2)}
    assert {"state", "reward", "id"} <= set(seen[8])


def test_set_policy_calls_what_is_there(make):
    world = make("ringmap/TwoRoom-v1", 1)

    class Theirs:
        seed = 7
        called = []  # noqa: RUF012

        def get_action(self, infos):
            return np.zeros((1, 2))

        def set_env(self, envs):
            self.called.append(envs)

        def set_seed(self, seed):
            self.called.append(seed)

    world.set_policy(Theirs())
    assert Theirs.called == [world.envs, 7]


def test_random_policies_are_reproducible(make):
    world = make(kind="dict", num_envs=2)

    def actions(seed, collected, num_calls=1):
        world.set_policy(RandomPolicy(seed))
        found = []
        for _ in range(num_calls):
            buf = ReplayBuffer(max_steps=500)
            world.collect(writer=buf, episodes=4, seed=collected)
            order = np.argsort(buf.get_episode_data()["seed"]) if collected is not None else range(4)
            found.append([buf.load_episode(int(i))["action.a"].tolist() for i in order])
        return found

    first, again = actions(1, 5, 2)
    assert first == again
    assert actions(2, 5)[0] != first
    (free,), (other,) = actions(None, 5), actions(None, 5)
    assert free == other, "with seeded episodes a policy without a seed repeats"
    later = actions(1, 6)[0]
    assert later[:3] == first[1:], "an episode's actions depend on its seed, not on its turn"
    same, different = actions(1, None, 2)
    assert same != different


def test_expert_noise(make):
    world = make("ringmap/TwoRoom-v1", 2, policy=ExpertPolicy(noise=5.0, seed=0))
    buf = ReplayBuffer(max_steps=500)
    world.collect(writer=buf, episodes=2, seed=0)
    actions = buf.get_col_data("action")
    assert np.nanmax(actions) == 1
    assert np.nanmin(actions) == -1
    with pytest.raises(ValueError, match="noise"):
        ExpertPolicy(noise=-1)


THEIRS = {"lerobot", "minari", "robomimic"}  # of columns of their own: tests/peers
WRITABLE = [n for n in list_formats() if get_format(n).can_write() and n not in THEIRS]


@pytest.mark.parametrize("format", WRITABLE)
def test_every_format_takes_a_collection(make, tmp_path, format):
    world = make("ringmap/TwoRoom-v1", 2, (16, 16), max_episode_steps=4, policy=RandomPolicy(seed=0))
    path = tmp_path / f"deep/er/set.{'h5' if format == 'hdf5' else format}"
    world.collect(path, episodes=3, seed=0, format=format)
    dataset = load_dataset(path, format=format)
    assert dataset.lengths.tolist() == [5, 5, 5]
    getattr(dataset, "close", lambda: None)()
    world.collect(path, episodes=1, seed=9, format=format)  # what is there is appended to
    assert len(load_dataset(path, format=format).lengths) == 4
    if get_format(format).supports_episode_data:
        data = load_dataset(path, format=format).get_episode_data()
        assert sorted(data["seed"]) == [0, 1, 2, 9]
        assert "agent.color" in data


def test_what_is_at_the_path_of_a_collection(make, tmp_path):
    world = make("ringmap/TwoRoom-v1", 1, (16, 16), max_episode_steps=4, policy=RandomPolicy(seed=0))
    path = tmp_path / "set"
    world.collect(path, episodes=2, seed=0, format="zarr")
    world.collect(path, episodes=1, seed=2)  # of the format that is there
    assert load_dataset(path).lengths.tolist() == [5, 5, 5]
    with pytest.raises(FileExistsError, match="already exists"):
        world.collect(path, episodes=1, seed=2, mode="error")
    world.collect(path, episodes=1, seed=3, mode="overwrite")
    assert load_dataset(path).get_episode_data()["seed"] == [3]
    for options, message in (
        ({"format": "folder"}, "World.collect: .* holds a dataset of format 'zarr'"),
        ({"path": tmp_path / "a.h5", "format": "lance"}, "suffix of .*a.h5 names format 'hdf5'"),
        ({"mode": "overwrite", "resume": True}, "resume=True goes on with what is there"),
        ({"mode": "w"}, "write mode must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            world.collect(**{"path": path, "episodes": 1, "seed": 3, **options})
    assert load_dataset(path).get_episode_data()["seed"] == [3]
    assert os.listdir(tmp_path) == ["set"]


def test_collecting_nothing(make, tmp_path):
    world = make("ringmap/TwoRoom-v1", 2, policy=RandomPolicy())
    buf = ReplayBuffer(max_steps=100)
    world.collect(writer=buf, episodes=0, seed=3)
    world.collect(writer=buf, episodes=0)
    world.collect(tmp_path / "x.h5", episodes=0)
    assert buf.num_episodes == 0


def test_options_for_each_environment_are_recorded(make):
    world = make("ringmap/TwoRoom-v1", 2, max_episode_steps=2, policy=RandomPolicy())
    buf = ReplayBuffer(max_steps=100)
    places = [{"state": [0.2, 0.2]}, {"state": [0.3, 0.3]}]
    world.collect(writer=buf, episodes=4, seed=0, options=places)
    starts = [buf.load_episode(i)["state"][0].round(2).tolist() for i in range(4)]
    assert np.allclose(sorted(starts), [[0.2, 0.2]] * 2 + [[0.3, 0.3]] * 2)


def test_no_more_are_started_than_asked_for(make):
    """Whoever stops at the first N that end collects the short ones: lengths must be the seeds' own."""
    world = make(num_envs=8, kind="discrete", policy=RandomPolicy(seed=0))
    buf = ReplayBuffer(max_steps=1000)
    world.collect(writer=buf, episodes=9, seed=0)
    alone = make(num_envs=1, kind="discrete", policy=RandomPolicy(seed=0))
    other = ReplayBuffer(max_steps=1000)
    alone.collect(writer=other, episodes=9, seed=0)
    assert sorted(buf.lengths) == sorted(other.lengths)
    assert sum(world.envs.episodes) == 9
    assert sorted(buf.get_episode_data()["seed"]) == list(range(9))


def test_a_context_and_lazy_names(make):
    with make("ringmap/TwoRoom-v1", 1) as world:
        world.reset()
    with pytest.raises(swm.errors.ClosedError):
        world.reset()
    assert swm.world.EnvPool is type(world.envs)
    assert "RandomPolicy" in dir(swm.policy)
    assert "EnvPool" in dir(swm.world)
    for module in (swm.policy, swm.world):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            module.nothing  # noqa: B018


def drawn_by(env, seeds):
    """Return what an environment draws of its own generator, and the ids of its episodes."""
    drawn, ids = [], []
    for seed in seeds:
        _, info = env.reset(seed=seed)
        ids.append(info.get("id"))
        ended = False
        while not ended:
            drawn.append(info["drawn"])
            _, _, terminated, truncated, info = env.step(env.action_space.sample())
            ended = terminated or truncated
    return drawn, ids


def test_episodes_are_those_of_the_environment_alone():
    """Its generator is left alone, and each episode has an id that the seeds decide."""
    seeds = [3, None, None, 3, 4]
    plain, _ = drawn_by(Proof(), seeds)
    drawn, ids = drawn_by(MegaWrapper(Proof()), seeds)
    assert drawn == plain
    assert ids[0] == ids[3]
    assert len(set(ids)) == 4
    assert drawn_by(MegaWrapper(Proof()), seeds)[1] == ids
