"""Each way of collecting: an episode says which weights played it (the actions are the step at which these were
published), and a pace counts exactly the steps that are committed, when they are."""

import contextlib

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from ringmap import Pace, ReplayBuffer, ReplayBufferCollectionWrapper, TransitionReplayBuffer, Weights, World
from ringmap.data import load_dataset
from ringmap.errors import CorruptError, InputError
from ringmap.policy import FeedForwardPolicy
from tests.unit.world.envs import Proof


class Constant(torch.nn.Module):
    """Its action is its only number; with a learner beside it, which publishes the next one at every second action."""

    def __init__(self, learner=None):
        super().__init__()
        self.number = torch.nn.Parameter(torch.tensor(-1.0))
        self.learner, self.calls = [learner], 0

    def get_action(self, infos):
        num = len(next(iter(infos.values())))
        return self.act(num)

    def act(self, *shape):
        self.calls += 1
        acts = np.full((*shape, 2), self.number.item(), np.float32)
        if self.learner[0] is not None and self.calls % 2:
            publish(self.learner[0], self.calls)
        return acts


def publish(path, step):
    model = Constant()
    model.load_state_dict({"number": torch.tensor(float(step))})
    Weights(path).publish(model, step)


def play(tmp_path, num_envs, weights_of=Weights, writer=None, **options):
    policy = Constant(tmp_path / "policy")
    world = World("RingmapTest/Proof-v0", num_envs, add_pixels=False)
    target = {"writer": writer} if writer is not None else {}
    try:
        world.collect(
            policy=policy, weights=weights_of(tmp_path / "policy"), progress=False, seed=0, **target, **options
        )
    finally:
        world.close()


def check(episodes, steps, single):
    """Compare what the episodes say with what their actions say; return whether any began before anything was
    published."""
    assert len(episodes) == len(steps) and len(set(steps)) > 3
    for episode, step in zip(episodes, steps, strict=True):
        actions = np.asarray(episode["action"])[:-1, 0].tolist()
        assert actions[0] == step
        assert set(actions) == {step} if single else actions == sorted(actions)
    assert steps[0] == -1


class Noted(Pace):
    """Notes what was asked for, and what came in meanwhile."""

    def __init__(self, path):
        super().__init__(path, samples_per_insert=1, min_steps=1000)
        self.noted, self.refuse = [], 0

    def _may_insert(self, count, where):
        self.refuse, refused = 0, self.refuse
        return not refused and super()._may_insert(count, where)

    @contextlib.contextmanager
    def insert(self, num_steps, flush=None):
        with super().insert(num_steps, flush):
            before = self.inserted
            yield
            self.noted.append((num_steps, self.inserted - before))

    def check(self, total):
        assert len(self.noted) > 3
        assert all(asked == came for asked, came in self.noted), self.noted
        assert sum(came for _, came in self.noted) == self.inserted == total


@pytest.fixture
def pace(tmp_path):
    return Noted(tmp_path)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("commit_every", [None, 1, 3])
def test_world(tmp_path, pace, num_envs, commit_every):
    buf = ReplayBuffer(1000, path=tmp_path / "buffer")
    play(tmp_path, num_envs, writer=buf, episodes=12, commit_every=commit_every, pace=pace)
    pace.check(int(buf.lengths.sum()))
    data = buf.get_episode_data()
    assert sorted(data["seed"]) == list(range(12))
    check([buf.load_episode(i) for i in range(12)], list(data["policy_step"]), num_envs == 1)
    buf.close()


def test_world_with_a_policy_that_holds_the_model(tmp_path):
    learned, acting = (
        torch.nn.Sequential(torch.nn.Unflatten(0, (-1, 1)), torch.nn.Linear(1, 2)).double() for _ in range(2)
    )
    Weights(tmp_path / "policy").publish(learned, 7)
    buf = ReplayBuffer(1000)
    world = World("RingmapTest/Proof-v0", 1, add_pixels=False)
    policy = FeedForwardPolicy(acting, keys="drawn")
    world.collect(writer=buf, policy=policy, weights=Weights(tmp_path / "policy"), episodes=2, progress=False, seed=0)
    world.close()
    assert torch.equal(acting[1].weight, learned[1].weight)
    assert list(buf.get_episode_data()["policy_step"]) == [7, 7]


def test_world_into_a_file(tmp_path):
    play(tmp_path, 1, path=tmp_path / "episodes.h5", episodes=12, resume=True)
    dataset = load_dataset(tmp_path / "episodes.h5", output="numpy")
    steps = [int(step) for step in dataset.get_episode_data()["policy_step"]]
    check([dataset.load_episode(i) for i in range(12)], steps, True)
    dataset.close()


def test_world_loads_into_the_model_of_the_weights(tmp_path, pace):
    buf, model = ReplayBuffer(1000), Constant()
    publish(tmp_path, 7)
    world = World("RingmapTest/Proof-v0", 2, add_pixels=False)
    world.set_policy(lambda infos: model.get_action(infos))
    world.collect(writer=buf, episodes=3, weights=Weights(tmp_path, model), progress=False)
    assert list(buf.get_episode_data()["policy_step"]) == [7, 7, 7]
    world.collect(writer=buf, episodes=1, progress=False)
    assert buf.get_episode_data([2, 3])["policy_step"] == [buf.episode_data(2)["policy_step"], None]
    assert "policy_step" not in buf.get_episode_data(3)
    with pytest.raises(InputError, match="FunctionPolicy.*Weights.path, model"):
        world.collect(writer=buf, episodes=1, weights=Weights(tmp_path), progress=False)
    with pytest.raises(InputError, match="World.collect: weights= must be a ringmap.Weights, got str"):
        world.collect(writer=buf, episodes=1, weights=str(tmp_path), progress=False)
    with pytest.raises(InputError, match="another model: 'weight' is nothing there"):
        world.collect(writer=buf, episodes=1, weights=Weights(tmp_path, torch.nn.Linear(2, 2)), progress=False)
    assert buf.num_episodes == 4
    with pytest.raises(InputError, match="World.collect: pace= is for a ReplayBuffer"):
        world.collect(tmp_path / "x.h5", episodes=1, pace=pace)
    with pytest.raises(InputError, match="World.collect: pace= counts the rings in .* in RAM"):
        world.collect(writer=ReplayBuffer(100), episodes=1, pace=pace)
    with pytest.raises(InputError, match="World.collect: pace= must be a ringmap.Pace, got int"):
        world.collect(writer=buf, episodes=1, pace=3)
    world.close()


def record(env, buf, weights, steps, **options):
    env = ReplayBufferCollectionWrapper(env, buf, weights=weights, **options)
    policy, vector = weights.model, isinstance(env, gymnasium.vector.VectorEnv)
    env.reset(seed=0)
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(policy.act(*((env.num_envs,) if vector else ())))
        if not vector and (terminated or truncated):
            env.reset()
        elif vector and env.metadata["autoreset_mode"] == AutoresetMode.DISABLED:
            over = terminated | truncated
            if over.any():
                env.reset(options={"reset_mask": over})
    env.close()


WAYS = {"whole": {}, "stream": {"stream": True}, "parts": {"commit_every": 3}}


@pytest.mark.parametrize("way", WAYS)
def test_wrapper_around_one(tmp_path, pace, way):
    buf = ReplayBuffer(1000, path=tmp_path / "buffer")
    weights = Weights(tmp_path / "policy", Constant(tmp_path / "policy"))
    record(Proof(), buf, weights, 60, pace=pace, **WAYS[way])
    pace.check(int(buf.lengths.sum()))
    steps = list(buf.get_episode_data()["policy_step"])
    check([buf.load_episode(i) for i in range(buf.num_episodes)], steps, True)
    buf.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_wrapper_around_many(tmp_path, pace, way, mode):
    buf = ReplayBuffer(1000, path=tmp_path / "buffer")
    weights = Weights(tmp_path / "policy", Constant(tmp_path / "policy"))
    envs = gymnasium.vector.SyncVectorEnv([Proof] * 3, autoreset_mode=mode)
    record(envs, buf, weights, 40, pace=pace, **WAYS[way])
    pace.check(int(buf.lengths.sum()))
    steps = list(buf.get_episode_data()["policy_step"])
    check([buf.load_episode(i) for i in range(buf.num_episodes)], steps, False)
    buf.close()


def test_wrapper_with_a_builder_and_a_swap(tmp_path):
    buffers = [ReplayBuffer(1000), ReplayBuffer(1000)]
    weights = Weights(tmp_path, Constant())
    publish(tmp_path, 3)
    env = ReplayBufferCollectionWrapper(
        Proof(), buffers[0], weights=weights, transition_builder=lambda **step: {"action": step["action"]}
    )
    env.reset(seed=1)
    env.step(weights.model.act())
    publish(tmp_path, 4)
    env.set_replay_buffers(buffers[1], finalize_old_segments=True, require_same_space=False)
    env.step(weights.model.act())  # the same episode of the environment goes on, and so its weights
    env.reset()
    env.step(weights.model.act())
    env.close()
    found = [list(buf.get_episode_data()["policy_step"]) for buf in buffers]
    assert found == [[3], [3, 4]]
    assert [buffers[1].load_episode(i)["action"][0, 0] for i in range(2)] == [3, 4]


def test_wrapper_says_what_is_wrong(tmp_path):
    buf = ReplayBuffer(1000)
    for given in (Weights(tmp_path), "policy"):
        with pytest.raises(
            InputError, match="ReplayBufferCollectionWrapper: weights= must be a ringmap.Weights with the model"
        ):
            ReplayBufferCollectionWrapper(Proof(), buf, weights=given)
    publish(tmp_path, 3)
    env = ReplayBufferCollectionWrapper(Proof(), buf, weights=Weights(tmp_path, Constant()))
    env.reset(seed=0)
    env.step(np.full(2, 3, np.float32))
    publish(tmp_path, 4)
    path = tmp_path / "policy.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(
        CorruptError, match="publish again\nReplayBufferCollectionWrapper: the policy of envs .0. is what it was"
    ):
        env.reset()
    assert buf.num_episodes == 1, "the episode before is stored"
    env.step(np.full(2, 3, np.float32))
    path.write_bytes(data)
    env.reset()
    env.step(np.full(2, 4, np.float32))
    env.close()
    assert list(buf.get_episode_data()["policy_step"]) == [3, 3, 4]


def transitions(tmp_path):
    return TransitionReplayBuffer(1000, (3,), (2,), None, np.int64, np.float32, path=tmp_path / "ring")


def random_steps(env, count):
    env.reset(seed=0)
    for _ in range(count):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    env.close()


def test_wrapper_of_transitions(tmp_path, pace):
    """They come in when their group is committed, by a flush at the latest."""
    buf = transitions(tmp_path)
    random_steps(ReplayBufferCollectionWrapper(Proof(), buf, pace=pace), 60)
    assert [asked for asked, _ in pace.noted] == [1] * 60
    buf.flush()
    assert pace.inserted == len(buf) == 60
    buf.close()


def test_a_collector_flushes_before_it_waits(tmp_path, pace):
    flushed = []
    buf = transitions(tmp_path)
    wrapped = ReplayBufferCollectionWrapper(Proof(), buf, pace=pace)
    random_steps(wrapped, 60)
    assert pace.inserted < 60, "the control: they are in an open group"
    with pace.insert(1, lambda: flushed.append(1)):
        pass
    assert not flushed, "there is room"
    pace.refuse = 1
    with pace.insert(1, buf.flush):
        assert pace.inserted == 60
    buf.close()


def test_wrapper_says_what_is_wrong_with_a_pace(tmp_path, pace):
    with pytest.raises(InputError, match="ReplayBufferCollectionWrapper: pace= counts the rings in"):
        ReplayBufferCollectionWrapper(Proof(), ReplayBuffer(100), pace=pace)
    with pytest.raises(InputError, match="ReplayBufferCollectionWrapper: pace= must be a ringmap.Pace, got str"):
        ReplayBufferCollectionWrapper(Proof(), ReplayBuffer(100), pace="pace")
    deeper = ReplayBuffer(100, path=tmp_path / "deeper" / "ring")
    with pytest.raises(InputError, match="at .*deeper"):
        ReplayBufferCollectionWrapper(Proof(), deeper, pace=pace)
    deeper.close()
