"""Whatever has a `state_dict`: a state with one wrong value is refused, and nothing has changed then.

And each object continues from its own state as it went on itself.
"""

import copy

import numpy as np
import pytest

from ringmap import DistillationBuffer, OfflineToOnlineReplayBuffer, RolloutBuffer, TransitionReplayBuffer
from ringmap.arguments import whole
from ringmap.buffers.engine import Engine
from ringmap.clips.samplers.base import checked_rng
from ringmap.data import ReplayBuffer, ShardedReplayBuffer
from ringmap.errors import RingmapError
from ringmap.samplers import EpisodeSampler, EpochSampler, MixtureSampler, PrioritizedSampler, RecencySampler

WRONG = {
    "none": None,
    "text": "x",
    "negative": -1,
    "fraction": 0.5,
    "nan": float("nan"),
    "vast": 1 << 80,
    "list": [1, 2, 3],
    "dict": {"a": 1},
    "array": np.arange(3),
    "bytes": b"abc",
}


def episode(number, length=8):
    return {"x": np.full((length, 2), number, np.float32), "reward": np.ones(length, np.float32)}


def ring(sampler=None, **options):
    buf = ReplayBuffer(100, history_len=2, seed=0, sampler=sampler, **options)
    buf.write_episodes(episode(number) for number in range(5))
    return buf


def made(kind, folder):
    """Return an object with a state, and what it draws next."""
    if kind == "ring":
        buf = ring()
        return buf, lambda: buf.sample(4)["x"]
    if kind == "sampled":
        buf = ring(MixtureSampler([(PrioritizedSampler(), 0.5), (EpisodeSampler(2), 0.5)]))
        return buf, lambda: buf.sample(4)["x"]
    if kind == "epochs":
        buf = ring(EpochSampler(4))
        return buf, lambda: buf.sample(4)["x"]
    if kind == "recent":
        buf = ring(RecencySampler(20))
        return buf, lambda: buf.sample(4)["x"]
    if kind == "fleet":
        for number in range(2):
            with ring(path=folder / f"ring-{number}"):
                pass
        buf = ShardedReplayBuffer(folder, 2, seed=0)
        return buf, lambda: buf.sample(4)["x"]
    if kind == "pass":
        buf = ring()
        sampler = buf.pass_sampler(seed=1)
        return sampler, lambda: np.array(list(sampler)[:5])
    if kind == "transitions":
        buf = TransitionReplayBuffer(50, (2,), (), seed=0, pin_memory=False)
        for number in range(10):
            buf.add(np.full(2, number), 0, 1.0, np.full(2, number + 1), False)
        return buf, lambda: buf.sample(4)["observations"]
    if kind == "rollout":
        torch = pytest.importorskip("torch")
        buf = RolloutBuffer(2, 4, (3,), (), torch.int64, "cpu", seed=0)
        for _ in range(4):
            zeros = torch.zeros(2)
            buf.add(torch.ones(2, 3), None, torch.ones(2, dtype=torch.int64), zeros, zeros, zeros, zeros)
        buf.compute_returns_and_advantages(torch.zeros(2))
        return buf, lambda: buf.get_minibatch(4)["observations"]
    if kind == "student":
        buf = DistillationBuffer(50, seed=0, to="numpy")
        for number in range(3):
            buf.add(np.full((4, 2), number, np.float32), np.zeros((4, 1), np.float32))
        return buf, lambda: buf.sample(4)[0]
    buf = OfflineToOnlineReplayBuffer(ring(), online_storage=ring(), batch_size=4)
    for number in range(5, 8):
        buf.extend([episode(number)])
    return buf, lambda: buf.sample(4)["x"]


KINDS = ["ring", "sampled", "epochs", "recent", "fleet", "pass", "transitions", "rollout", "student", "mix"]


def places(state, path=()):
    """Yield the path of each value of nested dicts and lists."""
    items = state.items() if isinstance(state, dict) else enumerate(state[:3]) if isinstance(state, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def replaced(state, path, value):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return state


def faults(kind, folder):
    """Return where a wrong value in a state is not refused by an error of ringmap, or changed something."""
    subject, _ = made(kind, folder)
    good = copy.deepcopy(subject.state_dict())
    before, wrong = repr(good), []
    states = [(path, name, replaced(good, path, value)) for path in places(good) for name, value in WRONG.items()]
    states += [((key,), "missing", {k: v for k, v in good.items() if k != key}) for key in good]
    for path, name, state in states:
        try:
            subject.load_state_dict(state)
        except RingmapError:
            if repr(subject.state_dict()) != before:
                wrong.append((path, name, "changed"))
        except Exception as error:
            wrong.append((path, name, repr(error)))
        subject.load_state_dict(good)
    assert repr(subject.state_dict()) == before
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_state_changes_nothing(kind, tmp_path):
    assert faults(kind, tmp_path) == []


def test_control_a_value_that_is_loaded_before_the_next_is_checked(tmp_path, monkeypatch):
    def load(self, state):
        self.counter = state["step"] if state["step"] == 0.5 else 0
        checked_rng(self.rng, state["rng"], "load")
        whole("load", "step", state["step"])

    monkeypatch.setattr(Engine, "load_state_dict", load)
    assert (("step",), "fraction", "changed") in faults("ring", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_continues_from_its_state(kind, tmp_path):
    subject, draw = made(kind, tmp_path)
    draw()
    state = copy.deepcopy(subject.state_dict())
    first = np.asarray(draw())
    subject.load_state_dict(state)
    assert np.array_equal(first, np.asarray(draw()))
