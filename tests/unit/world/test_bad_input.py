"""What goes wrong is said: who, which episode, what to do; what was collected before stays."""

import gymnasium
import numpy as np
import pytest

from ringmap import World
from ringmap.data import ReplayBuffer
from ringmap.errors import InputError, RingmapError, RoleError, RolloutError
from ringmap.policy import BasePolicy, FeedForwardPolicy, RandomPolicy


def still(infos):
    return np.zeros((len(infos["step_idx"]), 1), np.float32)


@pytest.fixture
def buf():
    return ReplayBuffer(max_steps=1000)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("step", "env 0 of RingmapTest/Faulty-v0, its episode 2 .seed 12., step 2: KeyError: 'planted'"),
        ("reset", "env 0 of RingmapTest/Faulty-v0, its episode 2 .seed 12., step 0: ZeroDivisionError"),
        ("shape", r"step 2: .*the observation contradicts its space: expected float32 \(2,\), got float32 \(3,\)"),
        ("dtype", r"the observation contradicts its space: expected float32 \(2,\), got complex64"),
        ("comes", r"env 0, episode 2 \(seed 12\): info 'new' appeared first at step 2"),
        ("goes", r"env 0, episode 2 \(seed 12\): info 'stays' is missing at step 2"),
        ("dies", r"of RingmapTest/Faulty-v0 died: .* with envs \[0\]"),
        ("grows", r"env 0, episode 2 \(seed 12\): info 'grows' changed its shape at step 2, from \(1,\) to \(2,\)"),
    ],
)
def test_an_environment_that_breaks_its_contract(make, buf, fault, message, workers):
    at = (1, 0) if fault == "reset" else (1, 2)
    workers = workers or 2 * (fault == "dies")
    world = make("RingmapTest/Faulty-v0", 2, fault=fault, at=at, workers=workers, policy=still)
    with pytest.raises(RolloutError, match=message):
        world.collect(writer=buf, episodes=6, seed=10)
    assert sorted(buf.get_episode_data()["seed"]) == [10, 11], "what was collected before is gone"
    assert buf.check() == []


def test_the_buffer_can_be_gone_on_with(make, buf):
    world = make("RingmapTest/Faulty-v0", 2, fault="step", at=(1, 2), policy=still)
    with pytest.raises(RolloutError):
        world.collect(writer=buf, episodes=6, seed=10, resume=True)
    world.collect(writer=buf, episodes=6, seed=10, resume=True)  # its third episode goes well
    assert sorted(buf.get_episode_data()["seed"]) == list(range(10, 16))


def test_what_comes_with_the_first_step_is_blank_before(make, buf):
    world = make("RingmapTest/Faulty-v0", 2, fault="late", policy=still)
    world.collect(writer=buf, episodes=2, seed=0)
    episode = buf.load_episode(1)
    assert np.isnan(episode["late"][0])
    assert episode["late"][1:].tolist() == [2.5] * 4
    assert episode["count"].tolist() == [0, 3, 3, 3, 3]
    assert episode["word"].tolist() == ["", "yes", "yes", "yes", "yes"]
    assert episode["flag"].tolist() == [False] + [True] * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("blank", "pixels: render.. with render_mode='rgb_array' gave NoneType, expected a uint8 array"),
        ("floats", r"gave float64 \(8, 8, 3\), expected a uint8 array"),
    ],
)
def test_an_environment_that_draws_nothing(make, fault, message):
    world = make("RingmapTest/Faulty-v0", 2, (8, 8), fault=fault)
    with pytest.raises(RolloutError, match="env 0 .*" + message):
        world.reset(seed=0)
    make("RingmapTest/Faulty-v0", 2, fault=fault).reset(seed=0)  # without pixels it does


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda n: np.zeros((n, 2), np.float32), r"actions of shape \(2, 2\), expected \(2, 1\)"),
        (lambda n: np.zeros(n, np.float32), r"actions of shape \(2,\), expected \(2, 1\)"),
        (lambda n: np.array([[0.0], [np.nan]]), r"the actions of envs \[1\] are NaN or infinite"),
        (lambda n: np.array([[np.inf], [0]]), r"the actions of envs \[0\] are NaN or infinite"),
        (lambda n: [[0], [0, 0]], "the actions are no array"),
        (lambda n: None, r"actions of shape \(\), expected \(2, 1\)"),
        (lambda n: np.array([["a"], ["b"]]), "actions of dtype <U1, expected float32"),
    ],
)
def test_a_policy_that_returns_something_else(make, buf, returns, message):
    world = make("RingmapTest/Faulty-v0", 2)

    class Odd(BasePolicy):
        def get_action(self, infos):
            return returns(2)

    world.set_policy(Odd())
    with pytest.raises(InputError, match="Odd.get_action: " + message):
        world.collect(writer=buf, episodes=2)
    assert buf.num_episodes == 0


def test_a_policy_for_another_kind_of_action(make):
    world = make(kind="dict", num_envs=1)
    for returned, message in (
        (np.zeros(1), r"expected a dict of actions \['a', 'b'\], got ndarray"),
        ({"a": [0]}, r"got \['a'\]"),
        ({"a": [0], "b": [[0.0]]}, r"'b': actions of shape \(1, 1\)"),
    ):
        world.set_policy(lambda infos, r=returned: r)
        with pytest.raises(InputError, match=message):
            world.evaluate(episodes=1)
    world = make(kind="multi", num_envs=2, policy=lambda infos: np.array([[0, 0], [3, 7]]))
    with pytest.raises(InputError, match=r"action \[3 7\] of env 1 is not in MultiDiscrete"):
        world.evaluate(episodes=1, seed=0) and world.evaluate(episodes=9)
    world = make(kind="tuple", num_envs=1, policy=lambda infos: [[0]])
    with pytest.raises(InputError, match="a tuple of 2"):
        world.evaluate(episodes=1)


def test_an_episode_that_the_writer_refuses(make):
    world = make(num_envs=2, kind="discrete", policy=RandomPolicy(seed=0))
    buf = ReplayBuffer(max_steps=9)
    with pytest.raises(InputError, match=r"env \d, episode \d+ .seed \d+.: the writer refused it: .*exceeds max_steps"):
        world.collect(writer=buf, episodes=30, seed=0)
    assert buf.num_episodes > 0

    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write_episode(self, episode):
            raise OSError("planted")

        def write_episodes(self, episodes):
            pass

    with pytest.raises(OSError, match="planted") as caught:
        world.collect(writer=Full(), episodes=3, seed=0)
    assert "what was collected before stays" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_name": "Nothing/Here-v3"}, "no environment 'Nothing/Here-v3' is registered"),
        ({"env_name": "ringmap/TwoRooms-v1"}, "no environment 'ringmap/TwoRooms-v1' is registered"),
        ({"num_envs": 0}, "num_envs must be positive"),
        ({"image_shape": None}, "image_shape=.*add_pixels=False"),
        ({"image_shape": (64,)}, r"image_shape must be \(H, W\)"),
        ({"image_shape": (64, 0)}, r"image_shape must be \(H, W\)"),
        ({"image_shape": 64}, r"image_shape must be \(H, W\)"),
        ({"max_episode_steps": 0}, "max_episode_steps must be positive"),
        ({"image_resample": "smooth"}, "image_resample: expected one of .*'nearest'"),
        ({"workers": 3}, "workers must be 0"),
        ({"workers": -1}, "workers must be 0"),
    ],
)
def test_bad_worlds(options, message):
    given = {"env_name": "ringmap/TwoRoom-v1", "num_envs": 2, "image_shape": (8, 8), **options}
    with pytest.raises(InputError, match=message):
        World(**given)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda w, b, p: w.collect(episodes=1), InputError, "exactly one of path= .* and writer="),
        (lambda w, b, p: w.collect(p, 1, writer=b), InputError, "exactly one of"),
        (lambda w, b, p: w.collect(writer=b), InputError, "how many episodes"),
        (lambda w, b, p: w.collect(writer=b, episodes=-1), InputError, "0 or more, got -1"),
        (lambda w, b, p: w.collect(writer=b, episodes=1.5), InputError, "0 or more, got 1.5"),
        (lambda w, b, p: w.collect(writer=[], episodes=1), InputError, "must have write_episode .* got list"),
        (lambda w, b, p: w.collect(writer=b, episodes=1, resume=True), InputError, "resume=True needs a seed"),
        (
            lambda w, b, p: w.collect(writer=b, episodes=1, seed=0, options=[{}, {}], resume=True),
            InputError,
            "options for each environment",
        ),
        (lambda w, b, p: w.collect(p, 1, format="nothing"), InputError, "unknown format 'nothing'"),
        (lambda w, b, p: w.set_policy(3), InputError, r"get_action\(infos\) or a function, got int"),
        (lambda w, b, p: w.collect(writer=b, episodes=1, options=[{}]), InputError, "1 options, expected one"),
        (lambda w, b, p: w.evaluate(episodes=1, options=[{}]), InputError, "1 options, expected one"),
        (lambda w, b, p: w.reset(options={"variation": ["agent.size"]}), RolloutError, "no variation 'agent.size'"),
        (lambda w, b, p: w.reset(options={"state": [2, 2]}), RolloutError, r"state must be \(x, y\) in \[0, 1\]"),
    ],
)
def test_bad_calls(make, buf, tmp_path, call, kind, message):
    world = make("ringmap/TwoRoom-v1", 2, policy=RandomPolicy())
    with pytest.raises(kind, match=message):
        call(world, buf, tmp_path / "x.h5")
    assert buf.num_episodes == 0
    assert list(tmp_path.iterdir()) == []


def test_no_policy(make, buf):
    world = make("ringmap/TwoRoom-v1", 2)
    for call in (lambda: world.collect(writer=buf, episodes=1), lambda: world.evaluate(episodes=1)):
        with pytest.raises(RuntimeError, match="No policy set"):
            call()
    with pytest.raises(RoleError, match="has no environments yet"):
        RandomPolicy().get_action({})
    assert issubclass(RolloutError, RuntimeError)
    assert issubclass(RolloutError, RingmapError)


def test_resume_into_a_writer_that_can_not_be_asked(make, tmp_path):
    from ringmap.data import get_format

    world = make("ringmap/TwoRoom-v1", 2, policy=RandomPolicy())
    with get_format("hdf5").open_writer(tmp_path / "x.h5") as writer:
        with pytest.raises(InputError, match="resume=True needs a ReplayBuffer or path="):
            world.collect(writer=writer, episodes=1, seed=0, resume=True)
        world.collect(writer=writer, episodes=1, seed=0)


def test_a_model_that_asks_for_what_is_not_there(make):
    import torch

    world = make("ringmap/TwoRoom-v1", 2, policy=FeedForwardPolicy(torch.nn.Linear(2, 2), keys="statue"))
    with pytest.raises(InputError, match=r"no info 'statue' .* there are \[.*'state'"):
        world.evaluate(episodes=1)


class Returning(gymnasium.Wrapper):
    """A step returns what it is given, in the place of one value."""

    name, value = "reward", None

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        made = {"reward": reward, "terminated": terminated, "truncated": truncated}
        made[self.name] = self.value
        return obs, *made.values(), info


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reward", None, "dtype object does not fit in .* float32: None"),
        ("reward", 2**24 + 1, "dtype int64 does not fit in .* float32: 16777217"),
        ("reward", 1e300, "does not fit in .* float32"),
        ("reward", np.zeros(2), r"has shape \(2,\), expected one value a step"),
        ("terminated", None, "dtype object does not fit in .* bool"),
        ("truncated", "False", "is of another kind in .* bool"),
    ],
)
def test_rewards_and_flags_that_would_change_are_refused(make, buf, monkeypatch, name, value, message):
    monkeypatch.setattr(Returning, "name", name)
    monkeypatch.setattr(Returning, "value", value)
    world = make("RingmapTest/Proof-v0", 1, pre_wrappers=[Returning], policy=RandomPolicy(seed=0))
    with pytest.raises(RolloutError, match=f"step 1: InputError: World: '{name}' .*{message}"):
        world.collect(writer=buf, episodes=1, seed=10)
    assert not buf.num_episodes


class Telling(gymnasium.Wrapper):
    """Infos that no column holds, and some that say nothing."""

    def step(self, action):
        *rest, info = self.env.step(action)
        return *rest, {**info, "sizes": [1, 2], "episode": {"r": 1.0}, "count": 2**70, "_own": [1], "none": None}


def test_infos_that_no_column_holds_are_named(make, buf):
    world = make("RingmapTest/Proof-v0", 1, pre_wrappers=[Telling], policy=RandomPolicy(seed=0))
    with pytest.warns(UserWarning, match="no column holds, and is left out") as told:
        world.collect(writer=buf, episodes=1, seed=10)
    names = [str(warning.message).split("'")[1] for warning in told]
    assert sorted(names) == ["count", "episode", "sizes"], "each once an episode"
    assert not {"sizes", "episode", "count", "none"} & set(buf.column_names)
