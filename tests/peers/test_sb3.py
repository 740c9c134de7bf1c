"""Stable-Baselines3's algorithms over our ring: the same batches and the same weights as over its own buffers."""

import gc
import pickle
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed (extra sb3)")

from stable_baselines3 import DQN, SAC
from stable_baselines3.common import buffers as theirs
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
from stable_baselines3.her import HerReplayBuffer as TheirHer

import ringmap
from ringmap.errors import InputError, NotFoundError, ReplacedError
from tests.house import PYTHON, ROOT, run

BOX, PICTURE = spaces.Box(-9, 9, (3,)), spaces.Box(0, 255, (4, 6, 6), np.uint8)
DICT = spaces.Dict({"camera": PICTURE, "state": BOX, "kind": spaces.Discrete(5)})
ACTIONS = {"discrete": spaces.Discrete(4), "box": spaces.Box(-1, 1, (2,))}


def rows(space, count, rng):
    if isinstance(space, spaces.Dict):
        return {name: rows(part, count, rng) for name, part in space.items()}
    if isinstance(space, spaces.Discrete):
        return rng.integers(0, space.n, count)
    return rng.integers(0, 9, (count, *space.shape)).astype(space.dtype)


def ended(obs, fresh, done):
    if isinstance(obs, dict):
        return {name: ended(leaf, fresh[name], done) for name, leaf in obs.items()}
    return np.where(done.reshape(-1, *[1] * (obs.ndim - 1)), fresh, obs)


def play(buffers, obs_space, action_space, lanes, calls, rng, obs=None):
    """Give the same steps to all buffers, as an algorithm does, from `obs` on; return where they end."""
    obs = rows(obs_space, lanes, rng) if obs is None else obs
    for _ in range(calls):
        after = rows(obs_space, lanes, rng)
        done = rng.random(lanes) < 0.2
        infos = [{"TimeLimit.truncated": bool(d and rng.random() < 0.5)} for d in done]
        action = np.array([action_space.sample() for _ in range(lanes)])
        reward = rng.normal(size=lanes).astype(np.float32)
        for buffer in buffers:
            copies = pickle.loads(pickle.dumps((obs, after)))
            buffer.add(*copies, action, reward, done, infos)
        obs = ended(after, rows(obs_space, lanes, rng), done)
    return obs


def drawn(buffer, seed, env=None):
    np.random.seed(seed)  # noqa: NPY002 - theirs
    return buffer.sample(40, env)


def assert_same(ours, others, exact=True):
    for name, one, other in zip(ours._fields, ours, others, strict=True):
        if isinstance(other, dict):
            assert one.keys() == other.keys()
            for key in other:
                assert one[key].dtype == other[key].dtype
                assert torch.equal(one[key], other[key]), (name, key)
        elif other is None:
            assert one is None
        else:
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            assert torch.equal(one, other) or (not exact and torch.allclose(one, other, atol=1e-5)), name


@pytest.mark.parametrize("size", [6, 48, 1000])
@pytest.mark.parametrize("lanes", [1, 4, 7])
@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize("space", [BOX, PICTURE, spaces.Discrete(9), DICT])
def test_batches_are_those_of_their_own(tmp_path, space, lanes, size, timeouts):
    action = ACTIONS["box" if lanes == 4 else "discrete"]
    kinds = {True: (ringmap.sb3.DictReplayBuffer, theirs.DictReplayBuffer)}
    ours, other = kinds.get(isinstance(space, spaces.Dict), (ringmap.sb3.ReplayBuffer, theirs.ReplayBuffer))
    given = {"n_envs": lanes, "device": "cpu", "handle_timeout_termination": timeouts}
    pair = [ours(size, space, action, path=tmp_path / "ring", **given), other(size, space, action, **given)]
    rng = np.random.default_rng(0)
    for part in range(3):
        play(pair, space, action, lanes, 10, rng)
        assert (pair[0].pos, pair[0].full) == (pair[1].pos, pair[1].full)
        assert_same(drawn(pair[0], part), drawn(pair[1], part))
    pair[0].reset()
    assert (pair[0].size(), pair[0].pos) == (0, 0)


@pytest.mark.parametrize(("lanes", "size"), [(300, 1000), (300, 300), (300, 10), (700, 1400)])
def test_vec_envs_of_any_size(tmp_path, lanes, size):
    pair = [
        ringmap.sb3.ReplayBuffer(size, BOX, ACTIONS["box"], "cpu", n_envs=lanes, path=tmp_path / "ring"),
        theirs.ReplayBuffer(size, BOX, ACTIONS["box"], "cpu", n_envs=lanes),
    ]
    rng = np.random.default_rng(0)
    for part in range(7):
        play(pair, BOX, ACTIONS["box"], lanes, 1, rng)
        assert_same(drawn(pair[0], part), drawn(pair[1], part))


@pytest.mark.parametrize("lanes", [1, 3])
def test_sums_of_several_rewards(tmp_path, lanes):
    given = {"n_envs": lanes, "n_steps": 3, "gamma": 0.9}
    pair = [
        ringmap.sb3.ReplayBuffer(90, BOX, ACTIONS["box"], "cpu", path=tmp_path / "ring", **given),
        theirs.NStepReplayBuffer(90, BOX, ACTIONS["box"], "cpu", **given),
    ]
    rng, obs = np.random.default_rng(0), None
    for part in range(5):
        obs = play(pair, BOX, ACTIONS["box"], lanes, 15, rng, obs)
        assert_same(drawn(pair[0], part), drawn(pair[1], part), exact=False)


def weights(model):
    return {name: value.clone() for name, value in model.policy.state_dict().items()}


def learned(algorithm, env, steps, **options):
    model = algorithm("MlpPolicy", env, seed=3, learning_starts=50, device="cpu", **options)
    model.learn(steps)
    return weights(model)


@pytest.mark.parametrize("lanes", [1, 2])
def test_dqn_learns_as_with_its_own(tmp_path, lanes):
    def run(**options):
        env = make_vec_env("CartPole-v1", n_envs=lanes, seed=0)
        return learned(DQN, env, 300, buffer_size=200, **options)

    ours = run(replay_buffer_class=ringmap.sb3.ReplayBuffer, replay_buffer_kwargs={"path": tmp_path / "ring"})
    own = run()
    assert all(torch.equal(ours[name], own[name]) for name in own)


def test_sac_learns_as_with_its_own_and_with_normalized_values(tmp_path):
    def run(**options):
        env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2, seed=0))
        return learned(SAC, env, 120, **options)

    ours = run(replay_buffer_class=ringmap.sb3.ReplayBuffer, replay_buffer_kwargs={"path": tmp_path / "ring"})
    own = run()
    assert all(torch.equal(ours[name], own[name]) for name in own)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_hindsight_learns_as_with_its_own(tmp_path, lanes, strategy):
    def run(kind, **kwargs):
        env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=True) for _ in range(lanes)])
        env.seed(0)
        kwargs["goal_selection_strategy"] = strategy
        model = SAC(
            "MultiInputPolicy",
            env,
            seed=3,
            learning_starts=30,
            device="cpu",
            buffer_size=90,
            replay_buffer_class=kind,
            replay_buffer_kwargs=kwargs,
        )
        model.learn(120)
        return model

    ours, own = run(ringmap.sb3.HerReplayBuffer, path=tmp_path / "ring"), run(TheirHer)
    assert all(torch.equal(weights(ours)[name], value) for name, value in weights(own).items())
    one, other = ours.replay_buffer, own.replay_buffer
    np.testing.assert_array_equal(one.ep_length, other.ep_length)
    assert_same(drawn(one, 1), drawn(other, 1))


class Frames(gymnasium.Env):
    """Frames that carry their number."""

    observation_space = spaces.Box(0, 255, (1, 5, 5), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = int(self.np_random.integers(0, 99))
        return np.full((1, 5, 5), self.step_number, np.uint8), {}

    def step(self, action):
        self.step_number += 1
        obs = np.full((1, 5, 5), self.step_number, np.uint8)
        return obs, 1.0, self.np_random.random() < 0.1, self.np_random.random() < 0.1, {}


def test_each_frame_of_a_stack_is_stored_once(tmp_path):
    def run(size, **options):
        env = VecFrameStack(make_vec_env(Frames, n_envs=2, seed=0), 4, channels_order="first")
        return learned(DQN, env, size, buffer_size=150, policy_kwargs={"net_arch": [8]}, **options)

    kwargs = {"path": tmp_path / "ring", "frame_stack": 4}
    options = {"replay_buffer_class": ringmap.sb3.ReplayBuffer, "replay_buffer_kwargs": kwargs}
    ours, own = run(240, **options), run(240)
    assert all(torch.equal(ours[name], own[name]) for name in own)
    gc.collect()
    run(60, **options)  # goes on, with the first stacks of a reset
    opened = ringmap.TransitionReplayBuffer.open(tmp_path / "ring", device=None)
    assert opened.check() == []
    assert {spec.name: spec.shape for spec in opened.schema.columns}["observations"] == (5, 5)
    opened.close()


def test_a_saved_buffer_is_a_pointer(tmp_path):
    env = make_vec_env("CartPole-v1", n_envs=2, seed=0)
    model = DQN(
        "MlpPolicy",
        env,
        seed=0,
        device="cpu",
        replay_buffer_class=ringmap.sb3.ReplayBuffer,
        replay_buffer_kwargs={"path": tmp_path / "ring"},
    )
    model.learn(300)
    model.save_replay_buffer(tmp_path / "pointer")
    size, batch = model.replay_buffer.size(), drawn(model.replay_buffer, 0)
    model.load_replay_buffer(tmp_path / "pointer")  # in the process that has it open
    assert (tmp_path / "pointer.pkl").stat().st_size < 5000
    assert model.replay_buffer.size() == size
    assert_same(drawn(model.replay_buffer, 0), batch)
    model.learn(100, reset_num_timesteps=False)
    assert model.replay_buffer.size() > size + 40
    model.replay_buffer.close()


@pytest.mark.parametrize("there", ["nothing", "another", "file", "removed later"])
def test_a_pointer_makes_nothing_where_its_ring_is_not(tmp_path, there):
    old, new = tmp_path / "run" / "ring", tmp_path / "moved"
    made = ringmap.sb3.ReplayBuffer(100, BOX, ACTIONS["box"], "cpu", n_envs=2, path=old)
    play([made], BOX, ACTIONS["box"], 2, 30, np.random.default_rng(0))
    pointer = pickle.dumps(made)
    made.close()
    loaded = pickle.loads(pointer) if there == "removed later" else None
    (tmp_path / "run").rename(new)
    if there == "another":
        ringmap.sb3.ReplayBuffer(100, BOX, ACTIONS["box"], "cpu", n_envs=2, path=old).close()
    elif there == "file":
        old.parent.write_text("notes")
    error = ReplacedError if there == "another" else NotFoundError
    with pytest.raises(error, match=rf"points to its ring, and .* at {old}; if the run was moved"):
        pickle.loads(pointer) if loaded is None else loaded.sample(3)
    assert (there == "another") == old.exists()
    again = ringmap.sb3.ReplayBuffer(100, BOX, ACTIONS["box"], "cpu", n_envs=2, path=new / "ring")
    assert again.size() == 30
    second = pickle.dumps(pickle.loads(pickle.dumps(again)))  # never opened in between
    again.close()
    assert pickle.loads(second).size() == 30


def test_a_buffer_in_ram_is_pickled_whole():
    buffer = ringmap.sb3.ReplayBuffer(100, BOX, ACTIONS["box"], "cpu", n_envs=2)
    play([buffer], BOX, ACTIONS["box"], 2, 30, np.random.default_rng(0))
    copy = pickle.loads(pickle.dumps(buffer))
    assert_same(drawn(copy, 0), drawn(buffer, 0))


def test_another_number_of_environments(tmp_path):
    for lanes, size in [(1, 40), (4, 20), (7, 14)]:
        buffer = ringmap.sb3.ReplayBuffer(100, BOX, ACTIONS["box"], "cpu", n_envs=lanes, path=tmp_path / "ring")
        play([buffer], BOX, ACTIONS["box"], lanes, 40, np.random.default_rng(lanes))
        assert buffer.size() == min(100 // lanes, 40 if lanes == 1 else 25)
        drawn(buffer, 0)
        buffer.close()


def her(path, lanes=2, **options):
    env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=True) for _ in range(lanes)])
    options = {"replay_buffer_kwargs": {"path": path}, "learning_starts": 30} | options
    return SAC(
        "MultiInputPolicy",
        env,
        seed=3,
        device="cpu",
        buffer_size=90,
        replay_buffer_class=ringmap.sb3.HerReplayBuffer,
        **options,
    )


def test_hindsight_goes_on_with_the_episodes_on_disk(tmp_path):
    model = her(tmp_path / "ring")
    model.learn(72)
    kept = model.replay_buffer
    lengths = kept.ep_length.copy()
    open_since = kept._current_ep_start.copy()
    model.save_replay_buffer(tmp_path / "pointer.pkl")
    kept.close()

    model = her(tmp_path / "ring")
    found = model.replay_buffer
    for lane in range(2):  # what has not ended counts as ended
        lengths[open_since[lane] : found.pos, lane] = found.pos - open_since[lane]
    np.testing.assert_array_equal(found.ep_length, lengths)
    batch = drawn(found, 0)
    assert batch.rewards.shape == (40, 1)
    model.learn(30)
    found.close()
    model.load_replay_buffer(tmp_path / "pointer.pkl")
    drawn(model.replay_buffer, 0)
    model.replay_buffer.close()

    with pytest.raises(InputError, match="another number of environments than n_envs=3"):
        her(tmp_path / "ring", lanes=3)


def test_messages(tmp_path):
    box, action = BOX, ACTIONS["box"]
    with pytest.raises(InputError, match="optimize_memory_usage=True is not needed"):
        ringmap.sb3.ReplayBuffer(10, box, action, optimize_memory_usage=True)
    with pytest.raises(InputError, match="infos are not stored"):
        her(tmp_path, replay_buffer_kwargs={"copy_info_dict": True})
    with pytest.raises(InputError, match="must be one of"):
        her(tmp_path, replay_buffer_kwargs={"goal_selection_strategy": "past"})
    with pytest.raises(InputError, match=r"\['n_steps'\] can't be combined"):
        her(tmp_path, replay_buffer_kwargs={"n_steps": 3})
    buffer = ringmap.sb3.ReplayBuffer(10, box, action, path=tmp_path / "ring")
    buffer.close()
    with pytest.raises(InputError, match="max_steps|capacity"):
        ringmap.sb3.ReplayBuffer(20, box, action, path=tmp_path / "ring")


def test_n_steps_of_the_algorithm_says_how(tmp_path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        DQN(
            "MlpPolicy",
            "CartPole-v1",
            n_steps=3,
            device="cpu",
            replay_buffer_class=ringmap.sb3.ReplayBuffer,
            replay_buffer_kwargs={"path": tmp_path / "ring", "n_steps": 3},
        )
    assert any("configure it explicitly" in str(one.message) for one in said)


def test_the_curves_are_equal_and_a_killed_run_goes_on(tmp_path):
    """The example, tiny; it compares the returns itself."""
    said = run(PYTHON, ROOT / "examples/sb3_curves.py", "--tiny", cwd=tmp_path)
    assert "killed with -9 in step 275" in said
    assert "resumed with the model of step 200; the ring has 274 transitions" in said
