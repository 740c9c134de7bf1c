"""What a buffer holds, against the model: every column of every row."""

import math

import numpy as np

from ringmap import ReplayBuffer, TransitionReplayBuffer
from tests.unit.recording.scripted import BITS, numbers, space_of

FULL = {
    "action": ((), np.int64),
    "reward": ((), np.float64),
    "terminated": ((), bool),
    "truncated": ((), bool),
    "done": ((), bool),
    "env_index": ((), np.int32),
    "episode_id": ((), np.int64),
    "t": ((), np.int64),
    "is_first": ((), bool),
    "is_last": ((), bool),
    "info/number": ((), np.int64),
    "info/odd": ((), np.float32),
}


def leaves(kind, prefix):
    place, bits = ((3,), np.int32), ((BITS,), np.int8)
    return {
        "box": {prefix: place},
        "dict": {f"{prefix}/place": place, f"{prefix}/in/number": ((), np.int64)},
        "discrete": {prefix: ((), np.int64)},
        "multibinary": {prefix: bits},
        "tuple": {f"{prefix}/0": place, f"{prefix}/1": bits},
    }[kind]


def full_buffer(kind, **options):
    """Return a buffer that asks for all there is."""
    schema = leaves(kind, "obs") | leaves(kind, "next_obs") | FULL
    return ReplayBuffer(options.pop("max_steps", 5000), schema=schema, **options)


def transition_buffer(kind, **options):
    """Return a buffer of transitions whose `sample(len(buf))` gives all of them in order."""
    return TransitionReplayBuffer(
        4096,
        space_of(kind) if kind != "tuple" else None,
        device=None,
        sampler=lambda step, buf, size, history: np.arange(size),
        **options,
    )


def assert_episode(kind, got, expected):
    steps = len(expected.actions)
    assert numbers(kind, got) == expected.obs
    assert got["action"].tolist() == [*expected.actions, 0]
    assert math.isnan(got["reward"][0])
    assert got["reward"][1:].tolist() == expected.rewards
    quiet = [False] * steps
    assert got["terminated"].tolist() == [*quiet, expected.terminated]
    assert got["truncated"].tolist() == [*quiet, expected.truncated]
    if "t" not in got:
        return
    rest = {name: values[:-1] for name, values in got.items()}
    assert numbers(kind, rest, "next_obs") == expected.obs[1:]
    for name in leaves(kind, "next_obs"):
        assert not got[name][-1].any(), "what follows the last row is blank"
    assert got["done"].tolist() == [*quiet, expected.terminated or expected.truncated]
    assert got["is_first"].tolist() == [True, *quiet]
    assert got["is_last"].tolist() == [*quiet, True]
    assert got["t"].tolist() == list(range(steps + 1))
    assert set(got["env_index"].tolist()) == {expected.env}
    assert set(got["episode_id"].tolist()) == {expected.number}
    assert got["info/number"].tolist() == expected.obs
    odd = [1.5 if number % 2 else None for number in expected.obs]
    assert [None if math.isnan(v) else v for v in got["info/odd"].tolist()] == odd


def assert_holds(kind, buf, expected):
    """Compare a buffer of episodes with the model, in order."""
    assert buf.num_episodes == len(expected)
    for number, episode in enumerate(expected):
        assert_episode(kind, buf.load_episode(number), episode)


def assert_whole(buf):
    """Each episode is of one environment and episode, its steps in a row, each reward that of its action."""
    for got in map(buf.load_episode, range(buf.num_episodes)):
        env, episode, first = got["obs"][0].tolist()
        assert got["obs"].tolist() == [[env, episode, first + t] for t in range(len(got["obs"]))]
        assert got["reward"][1:].tolist() == (got["action"][:-1] + 0.5).tolist()


def stepped(env, count, errors=()):
    """Step a vector environment so often, and return what was raised on the way."""
    raised = []
    for i in range(count):
        try:
            env.step(np.full(env.num_envs, i))
        except errors as error:
            raised.append(error)
    return raised


def assert_transitions(kind, buf, steps):
    """Compare a buffer of transitions with the model, in order."""
    rows = [row for step in steps for row in step]
    assert len(buf) == len(rows)
    if not rows:
        return
    got = buf.sample(len(rows))
    flat = {}

    def walk(name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}/{key}", inner)
        else:
            flat[name] = value

    walk("obs", got["observations"])
    walk("next_obs", got["next_observations"])
    now, actions, rewards, after, terminated, *_ = zip(*rows, strict=True)
    assert numbers(kind, flat) == list(now)
    assert numbers(kind, flat, "next_obs") == list(after)
    assert got["actions"].tolist() == list(actions)
    assert got["rewards"].tolist() == list(rewards)
    assert got["dones"].tolist() == [float(x) for x in terminated]
