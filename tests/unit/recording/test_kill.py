"""kill -9 while eight environments record into one directory."""

from functools import partial

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import ringmap
from ringmap import ReplayBuffer
from ringmap.recording import ReplayBufferCollectionWrapper
from ringmap.testing.kills import killed_after, reason_why_not
from tests.tiers import few
from tests.unit.recording.reading import assert_episode, full_buffer, numbers
from tests.unit.recording.scripted import Model, Scripted, code

NUM, STEPS = 8, 60


def actions_of(step):
    return np.full(NUM, step % 1000)


def record(path, stream, told):
    """Record, and note after each step how many episodes are stored."""
    envs = SyncVectorEnv([lambda i=i: Scripted(i, "box", script=3) for i in range(NUM)])
    buf = full_buffer("box", path=path, max_steps=100_000)
    env = ReplayBufferCollectionWrapper(envs, buf, stream=stream)
    env.reset(seed=0)
    with open(told, "w", buffering=1) as file:
        for step in range(STEPS):
            env.step(actions_of(step))
            file.write(f"{step + 1} {buf.num_episodes}\n")


def killed(path, stream, part):
    """Kill a recording after a part of its changes to files; return what it noted last."""
    told = f"{path}.told"
    whole = len(killed_after(1 << 30, partial(record, f"{path}.whole", stream, told)).calls)
    assert killed_after(int(part * whole), partial(record, path, stream, told)).killed
    with open(told) as file:
        return tuple(map(int, file.read().splitlines()[-1].split()))


def check(path, stream, keep, step, told):
    """Compare what is there with the model: a prefix of what was recorded, as long as was told at least."""
    model = Model(NUM, "NextStep", script=3)
    model.reset(np.ones(NUM, bool))
    for t in range(step):
        model.step(actions_of(t).tolist())
    assert len(model.stored) == told, "the model and the process agree"
    model.step(actions_of(step).tolist())  # the one that the kill may have come into
    assert ringmap.check(path) == []
    buf = ReplayBuffer(100_000, path=path, interrupted="keep" if keep else "drop")
    try:
        got = [buf.load_episode(i) for i in range(buf.num_episodes)]
    finally:
        buf.close()
    done = [bool(episode["is_last"][-1]) for episode in got]
    assert all(done[:told]), "what was told of comes first"
    # One that was streamed to its end when the kill came is kept as the open ones are, among them.
    whole = [episode for episode, is_done in zip(got, done, strict=True) if is_done]
    parts = [episode for episode, is_done in zip(got, done, strict=True) if not is_done]
    assert told <= len(whole) <= len(model.stored)
    late = {expected.obs[0]: expected for expected in model.stored[told:]}
    for episode, expected in zip(whole[:told], model.stored, strict=False):
        assert_episode("box", episode, expected)
    for episode in whole[told:]:
        assert_episode("box", episode, late.pop(numbers("box", episode)[0]))
    assert bool(parts) == (stream and keep) or not parts
    for part in parts:
        number = [code(*place) for place in part["obs"].tolist()]
        assert number == list(range(number[0], number[0] + len(number)))
        assert not part["terminated"].any() and not part["truncated"].any()
        assert part["t"].tolist() == list(range(len(number)))
        assert part["info/number"].tolist() == number
        assert part["reward"][1:].tolist() == (part["action"][:-1] + 0.5).tolist()
        assert [code(*place) for place in part["next_obs"].tolist()] == [n + 1 for n in number]
    return len(whole), len(parts)


def strike(tmp_path, seed):
    rng = np.random.default_rng(seed)
    stream, keep = bool(seed % 2), bool(seed % 4 > 1) or seed == 1
    path = tmp_path / f"buf{seed}"
    step, told = killed(path, stream, rng.uniform(0.3, 1))
    return check(path, stream, keep, step, told)


@pytest.mark.skipif(bool(reason_why_not()), reason=reason_why_not())
@pytest.mark.parametrize("seed", [*few(range(3)), *(pytest.param(n, marks=pytest.mark.campaign) for n in range(4, 54))])
def test_a_kill_loses_open_episodes_at_most(tmp_path, seed):
    whole, parts = strike(tmp_path, seed)
    assert whole
    assert not parts if seed % 2 == 0 else parts or seed > 1


def test_control():
    """A comparison that takes anything would take this too."""
    model = Model(1, "NextStep")
    model.reset([True])
    for _ in range(9):
        model.step([1])
    expected = model.stored[0]
    steps = len(expected.actions)
    with pytest.raises(AssertionError):
        assert_episode("box", {"obs": np.zeros((steps + 1, 3), int)}, expected)
