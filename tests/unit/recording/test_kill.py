"""kill -9 while eight environments record into one directory."""

import os
import signal
import subprocess

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from tests import ROOT
from tests.house import PYTHON
from tests.tiers import few
from tests.unit.recording.reading import assert_episode, numbers
from tests.unit.recording.scripted import Model, code
from tests.unit.recording.victim import NUM, STEPS, actions_of


def killed(path, stream, after, rng):
    """Kill a recording process once it has said `after` lines and a bit; return its last line."""
    command = [PYTHON, "-m", "tests.unit.recording.victim", str(path), *(["stream"] if stream else [])]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as child:
        for _ in range(after):
            line = child.stdout.readline()
        for _ in range(int(rng.integers(0, 20_000))):  # somewhere within the next step
            pass
        child.send_signal(signal.SIGKILL)
        rest = [text for text in child.stdout.read().splitlines(keepends=True) if text.endswith("\n")]
        line = rest[-1] if rest else line
    assert child.returncode == -signal.SIGKILL
    return tuple(map(int, line.split()))


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
    step, told = killed(path, stream, int(rng.integers(1, STEPS // 2)), rng)
    return check(path, stream, keep, step, told)


@pytest.mark.parametrize("seed", few(range(3)))
def test_a_kill_loses_open_episodes_at_most(tmp_path, seed):
    whole, parts = strike(tmp_path, seed)
    assert whole
    assert bool(parts) == (seed == 1)


@pytest.mark.campaign
def test_fifty_kills(tmp_path):
    found = [strike(tmp_path, seed) for seed in range(4, 54)]
    whole, parts = (sum(column) for column in zip(*found, strict=True))
    print(f"{len(found)} kills: {whole} whole episodes, all there; {parts} interrupted ones kept")
    assert whole > 1000 and parts > 20


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
