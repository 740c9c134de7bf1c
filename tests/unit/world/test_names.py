"""No name of ours takes the place of an environment's: parts, infos and data whose names are taken make way, or are
refused."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ringmap import ReplayBuffer, ReplayBufferCollectionWrapper
from ringmap.data import load_dataset
from ringmap.errors import InputError, RolloutError
from ringmap.world import EnvPool, MegaWrapper

BOX = spaces.Box(-9, 9, (2,), np.float32)


class Told(gymnasium.Env):
    """Shows at each step what it is told to show, each value multiplied by the step."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = spaces.Discrete(5)

    def __init__(self, space=BOX, seen=None, info=None, data=None, action_space=None, render_mode=None):
        self.observation_space = space
        self.action_space = action_space or self.action_space
        self.seen, self.info, self.data = seen, info or {}, data
        self.render_mode = "rgb_array"

    def look(self):
        return self.seen(self.t), {name: np.float32(self.t) for name in self.info}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look()

    def step(self, action):
        self.t += 1
        obs, info = self.look()
        return obs, 10.0 * self.t, self.t == 3, False, info

    def render(self):
        return np.full((8, 8, 3), 200, np.uint8)

    def get_episode_data(self):
        return self.data or {}


gymnasium.register("RingmapTest/Told-v0", Told)


def dict_of(*names):
    return {
        "space": spaces.Dict(dict.fromkeys(names, BOX)),
        "seen": lambda t: {name: np.full(2, t, np.float32) for name in names},
    }


def collected(make, *, shape=None, workers=0, **env):
    world = make(
        "RingmapTest/Told-v0",
        1,
        shape,
        add_pixels=shape is not None,
        workers=workers,
        **env,
        policy=lambda infos: np.full(1, 4),
    )
    buf = ReplayBuffer(100)
    world.collect(writer=buf, episodes=1, seed=7)
    return buf.load_episode(0)


STEPS = np.arange(4)


def test_parts_of_an_observation_make_way_for_our_names(make):
    taken = ("action", "reward", "terminated", "truncated", "step_idx", "id", "render_time")
    env = dict_of(*taken, "free", "observation")
    episode = collected(make, **env)
    for name in taken:
        assert (episode[f"observation.{name}"] == STEPS[:, None]).all(), name
    assert (episode["free"] == STEPS[:, None]).all() and (episode["observation"] == STEPS[:, None]).all()
    assert episode["action"].tolist() == [4, 4, 4, 0]
    assert episode["reward"][1:].tolist() == [10, 20, 30]
    assert episode["terminated"].tolist() == [False, False, False, True]


def test_infos_make_way_for_our_names_and_for_parts(make):
    episode = collected(make, **dict_of("free"), info=["action", "reward", "free", "mine", "id"])
    for name in ("info.action", "info.reward", "info.free", "info.id", "mine"):
        assert episode[name].tolist() == [0, 1, 2, 3], name
    assert (episode["free"] == STEPS[:, None]).all() and episode["action"].tolist() == [4, 4, 4, 0]


@pytest.mark.parametrize("shape", [None, (8, 8)])
def test_pixels_are_ours_only_where_they_are_drawn(make, shape):
    name = "pixels" if shape is None else "observation.pixels"
    episode = collected(make, shape=shape, **dict_of("pixels", "pixels.left"), info=["_pixels"])
    assert (episode[name] == STEPS[:, None]).all()
    assert (episode[f"{name}.left"] == STEPS[:, None]).all()
    if shape is not None:
        assert episode["pixels"].shape == (4, 8, 8, 3)
        assert episode["info._pixels"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (dict_of("action", "observation.action"), "two parts of the observation would have one"),
        ({**dict_of("a"), "info": ["action", "info.action"]}, "two values would have one name"),
        ({**dict_of("info.a", "a"), "info": ["a"]}, "two values would have one name"),
        (
            {
                "space": spaces.Dict({"a.b": BOX, "a": spaces.Dict({"b": BOX})}),
                "seen": lambda t: {"a.b": np.zeros(2, "f4"), "a": {"b": np.ones(2, "f4")}},
            },
            r"two parts of the observation would have one name: \['a.b'\]",
        ),
        ({**dict_of("a"), "info": [1, "1"]}, "two keys of the info are written alike"),
    ],
)
def test_a_way_that_is_taken_too_is_refused(make, env, message):
    with pytest.raises(RolloutError, match=message):
        collected(make, **env)


def test_control_without_a_way_a_value_is_lost(make, monkeypatch):
    monkeypatch.setattr(MegaWrapper, "_is_ours", lambda self, name: False)
    with pytest.raises(RolloutError, match="two values would have one name"):
        collected(make, **dict_of("action"))


# -- values that are lists -----------------------------------------------------------------------

LISTS = [
    (BOX, lambda t: [t, 0.1], {"observation": "f8"}),
    (BOX, lambda t: (t, 0.1), {"observation": "f8"}),
    (spaces.Dict(arm=BOX), lambda t: {"arm": [t, 0.1]}, {"arm": "f8"}),
    (spaces.Dict(a=spaces.Dict(b=BOX)), lambda t: {"a": {"b": [t, 0.1]}}, {"a.b": "f8"}),
    (spaces.Tuple((BOX, spaces.Discrete(9))), lambda t: [[t, 0.1], t], {"observation.0": "f8", "observation.1": "i8"}),
    (spaces.MultiDiscrete([9, 9]), lambda t: [t, 1], {"observation": "i8"}),
]


@pytest.mark.parametrize(("space", "seen", "columns"), LISTS)
def test_lists_in_an_observation_are_stored_as_the_wrapper_stores_them(make, space, seen, columns):
    episode = collected(make, space=space, seen=seen)
    for name, dtype in columns.items():
        assert episode[name].dtype == dtype
        assert episode[name].reshape(4, -1)[:, 0].tolist() == [0, 1, 2, 3]
        assert episode[name].ndim == 1 or episode[name][0, 1] in (0.1, 1)
    buf = ReplayBuffer(100)
    env = ReplayBufferCollectionWrapper(Told(space=space, seen=seen), buf)
    env.reset()
    for _ in range(3):
        env.step(4)
    recorded = buf.load_episode(0)
    for name in columns:
        path = [part for part in name.split(".") if part != "observation"]
        assert np.allclose(recorded["/".join(["obs", *path])], episode[name])


def test_lists_that_workers_return_are_stored(make):
    episode = collected(make, space=spaces.Dict(arm=BOX), seen=LISTS[2][1], workers=1)
    assert episode["arm"][:, 0].tolist() == [0, 1, 2, 3]


class Thing:
    """Something that no column holds."""


@pytest.mark.parametrize(
    ("space", "seen", "message"),
    [
        (
            spaces.Dict(a=BOX, b=spaces.Space()),
            lambda t: {"a": np.zeros(2, "f4"), "b": Thing()},
            "'b' of the observation is a Thing at step 0",
        ),
        (spaces.Space(), lambda t: [Thing()], "'observation' of the observation is a list at step 0"),
        (spaces.Sequence(BOX), lambda t: (np.zeros(2, "f4"),), "'observation' of the observation is a tuple"),
        (BOX, lambda t: [2**53 + 1, 0.5], "observation: item 0 is 9007199254740993"),
        (BOX, lambda t: np.ma.masked_array([1, 2], [0, 1]), "info 'observation': item 1 is masked"),
    ],
)
def test_an_observation_that_no_column_holds_is_refused(make, space, seen, message):
    with pytest.raises(RolloutError, match=message):
        collected(make, space=space, seen=seen)


def test_an_action_that_no_column_holds_is_refused(make):
    world = make(
        "RingmapTest/Told-v0",
        1,
        None,
        add_pixels=False,
        **dict_of("a"),
        action_space=spaces.Sequence(BOX),
        policy=lambda infos: [(np.zeros(2, "f4"),)],
    )
    with pytest.raises(RolloutError, match="'action' of the action is a tuple at step 1"):
        world.collect(writer=ReplayBuffer(100), episodes=1)


def test_a_text_observation_and_an_info_that_no_column_holds_are_no_fault(make):
    space = spaces.Dict(task=spaces.Text(9), a=BOX)
    episode = collected(make, space=space, seen=lambda t: {"task": "go", "a": np.zeros(2, "f4")})
    assert episode["task"].tolist() == ["go"] * 4


# -- data of episodes ----------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [None, 2])
def test_data_named_like_ours_are_refused_unless_they_say_the_same(make, tmp_path, parts):
    for value in (7, 8):
        world = make(
            "RingmapTest/Told-v0",
            1,
            add_pixels=False,
            **dict_of("a"),
            data={"seed": value, "x": 1},
            policy=lambda infos: np.full(1, 4),
        )
        buf = ReplayBuffer(100, spare_rows=50)
        if value == 7:
            world.collect(writer=buf, episodes=1, seed=7, commit_every=parts)
            assert buf.episode_data(0) == {"seed": 7, "x": 1}
        else:
            with pytest.raises(InputError, match=r"get_episode_data\(\) has 'seed', which World"):
                world.collect(writer=buf, episodes=1, seed=7, commit_every=parts)


def test_the_mark_of_a_collection_is_not_written_over(make, tmp_path):
    for resume in (False, True):
        world = make(
            "RingmapTest/Told-v0",
            1,
            add_pixels=False,
            **dict_of("a"),
            data={"collection": "mine"},
            policy=lambda infos: np.full(1, 4),
        )
        path = tmp_path / f"{resume}.h5"
        if resume:
            with pytest.raises(InputError, match="has 'collection', which World"):
                world.collect(path, episodes=1, seed=7, resume=resume)
        else:
            world.collect(path, episodes=1, seed=7)
            assert load_dataset(path).get_episode_data()["collection"] == ["mine"]


def test_a_pool_knows_the_names_of_the_observation():
    with_names = EnvPool([lambda: MegaWrapper(Told(**dict_of("action", "b")), add_pixels=False)])
    without = EnvPool([lambda: Told(**dict_of("a"))])
    assert with_names.observation_names == {"observation.action", "b"}
    assert without.observation_names == frozenset()
