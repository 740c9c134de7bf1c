"""The base class of samplers, and `as_sampler`: what a buffer calls, of whatever it was given; bad samplers."""

import numpy as np
import pytest

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import ClosedError, InputError
from ringmap.samplers import (
    BaseSampler,
    MixtureSampler,
    PrioritizedSampler,
    UniformSampler,
    as_sampler,
)


def oldest(step, buffer, batch_size, history_len):
    return np.arange(batch_size) % buffer.num_valid_ends(history_len)


def filled(sampler, **options):
    buf = ReplayBuffer(100, sampler=sampler, sync_every_s=0, **options)
    buf.write_episode({"step": np.arange(10)})
    return buf


def transitions(sampler):
    buf = TransitionReplayBuffer(100, (1,), device=None, sampler=sampler)
    zeros = np.zeros((10, 1), np.float32)
    buf.add(zeros, zeros, np.arange(10.0), zeros, np.zeros(10))
    return buf


class Stranger:
    """Has every method, and derives from nothing of ours."""

    def __init__(self):
        self.calls = []

    def __call__(self, step, buffer, batch_size, history_len):
        self.calls.append("draw")
        return np.zeros(batch_size, np.int64)

    def __getattr__(self, name):
        if name not in ANSWERS:
            raise AttributeError(name)

        def call(*args):
            self.calls.append(name)
            return ANSWERS[name]

        return call


STATE = {"kind": "Stranger"}
ANSWERS = {
    "attach": None,
    "follow": None,
    "weigh": lambda positions: np.full(len(positions), 0.5, "f4"),
    "update_priorities": 2,
    "kept_priorities": None,
    "small_state": STATE,
    "load_small_state": None,
    "state_dict": STATE,
    "load_state_dict": None,
    "flush": None,
    "close": None,
    "check": [],
}


def test_a_stranger_s_methods_are_called_as_those_of_ours(tmp_path):
    sampler = Stranger()

    def called(act):
        sampler.calls.clear()
        found = act()
        return found, list(sampler.calls)

    path = tmp_path / "buf"
    buf, calls = called(lambda: filled(sampler, path=path))
    assert buf.sampler is sampler
    assert calls == ["attach", "small_state"]
    batch, calls = called(lambda: buf.sample(2))
    assert calls == ["draw", "weigh"]
    assert batch.weights.tolist() == [0.5, 0.5]
    assert called(lambda: buf.update_priorities(batch.ids, [1, 1])) == (2, ["update_priorities"])
    state, calls = called(buf.state_dict)
    assert calls == ["state_dict"]
    assert state["sampler"] == STATE
    assert called(lambda: buf.load_state_dict(state))[1] == ["load_state_dict"]
    assert called(lambda: buf.snapshot(tmp_path / "copy"))[1] == ["kept_priorities"]
    assert called(buf.check)[1] == ["check"]
    assert called(buf.flush)[1] == ["flush", "small_state"]
    assert called(buf.close)[1] == ["flush", "close"]
    buf, calls = called(lambda: ReplayBuffer.open(path, "r+", sampler=sampler))
    assert calls == ["load_small_state", "attach"]
    assert called(lambda: setattr(buf, "sampler", oldest))[1] == ["close"]
    buf.sampler = MixtureSampler([(sampler, 0), (oldest, 1)])
    assert called(lambda: buf.sample(2))[1] == ["follow"]
    buf.close()


def test_a_plain_function_is_drawn_with_and_shown():
    for buf in (filled(oldest), transitions(oldest)):
        assert buf.sampler is oldest
        buf.sample(3)
        assert "sampler" not in buf.state_dict()
        buf.flush()
        buf.sampler = None
        assert buf.sampler is not oldest
        buf.close()


def test_the_base_does_nothing():
    class Newest(BaseSampler):
        def __call__(self, step, buffer, batch_size, history_len):
            return np.full(batch_size, buffer.num_valid_ends(history_len) - 1)

    buf = filled(Newest())
    assert buf.sample(2)["step"].ravel().tolist() == [9, 9]
    assert buf.sample(2).weights is None
    assert "sampler" not in buf.state_dict()
    assert buf.sampler.kept_priorities() is None
    assert buf.check() == buf.sampler.check() == []
    buf.flush()
    buf.close()
    with pytest.raises(TypeError, match="abstract"):
        BaseSampler()


def test_a_mixture_checks_its_parts():
    sampler = PrioritizedSampler(rng=0)
    buf = filled(MixtureSampler([(sampler, 1), (oldest, 1)], rng=0))
    buf.sample(4)
    assert buf.check() == []
    sampler._tree.leaves[3] = -1
    assert "a leaf is negative" in str(buf.check()[0])


# -- bad samplers --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [5, None, "uniform", np.arange(3)])
def test_what_is_no_sampler(given):
    with pytest.raises(InputError, match="as_sampler: sampler must be callable, got"):
        as_sampler(given)


def test_a_class_in_place_of_a_sampler():
    with pytest.raises(InputError, match=r"sampler is the class UniformSampler; give .* UniformSampl"):
        ReplayBuffer(100, sampler=UniformSampler)
    buf = filled(oldest)
    with pytest.raises(InputError, match="the class PrioritizedSampler"):
        buf.sampler = PrioritizedSampler
    assert buf.sampler is oldest


@pytest.mark.parametrize("make", [filled, transitions])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(3, np.int64), r"the sampler returned shape \(3,\), expected \(4,\)"),
        (np.zeros((4, 1), np.int64), r"the sampler returned shape \(4, 1\), expected \(4,\)"),
        (None, r"the sampler returned shape \(\), expected \(4,\)"),
        (np.zeros(4), "the sampler returned dtype float64, expected integers"),
        (np.zeros(4, bool), "the sampler returned dtype bool, expected integers"),
    ],
)
def test_bad_ids(make, ids, message):
    buf = make(lambda *_: ids)
    with pytest.raises(InputError, match=r"ReplayBuffer.sample: " + message):
        buf.sample(4)
    buf.sampler = MixtureSampler([(oldest, 0), (buf.sampler, 1)])
    with pytest.raises(InputError, match=r"^MixtureSampler.samplers\[1\]: " + message):
        buf.sample(4)
    buf.sampler = oldest
    buf.sample(4)


@pytest.mark.parametrize("make", [filled, transitions])
def test_a_sampler_that_keeps_a_buffer_that_is_closed(make, tmp_path):
    other = filled(None, path=tmp_path / "other")

    def as_in_the_other(step, buffer, batch_size, history_len):
        return np.arange(batch_size) % other.num_valid_ends(1)

    buf = make(as_in_the_other)
    buf.sample(4)
    other.close()
    with pytest.raises(
        ClosedError,
        match=r"ReplayBuffer.sample: the sampler as_in_the_other reads a buffer that is closed: .*other",
    ):
        buf.sample(4)
    buf.sampler = oldest
    buf.sample(4)


def test_priorities_of_a_closed_buffer(tmp_path):
    buf = filled(PrioritizedSampler(rng=0), path=tmp_path / "buf")
    ids = buf.sample(4).ids
    buf.close()
    with pytest.raises(ClosedError, match="is closed"):
        buf.update_priorities(ids, np.ones(4))


@pytest.mark.parametrize("sampler", [None, oldest, UniformSampler(0)])
def test_a_state_of_another_sampler_changes_nothing(sampler):
    theirs = filled(PrioritizedSampler(rng=0))
    theirs.sample(4)
    buf = filled(sampler, seed=3)
    before = buf.state_dict()
    with pytest.raises(InputError, match="the state has that of a sampler|the state is that of"):
        buf.load_state_dict(theirs.state_dict())
    assert buf.state_dict() == before


class Counted(BaseSampler):
    """Leaves to the base whose state it is given."""

    count = 0

    def __call__(self, step, buffer, batch_size, history_len):
        return np.zeros(batch_size, np.int64)

    def small_state(self):
        return {"kind": "Counted", "count": self.count}

    def load_small_state(self, state):
        self.count = state["count"]


def test_the_base_refuses_another_s_state():
    sampler = Counted()
    sampler.load_state_dict({"kind": "Counted", "count": 2})
    for other in ({"kind": "Other", "count": 3}, {"count": 3}, {"kind": ["Counted"], "count": 3}):
        with pytest.raises(InputError, match=r"Counted\.load_state_dict: the state is that of"):
            sampler.load_state_dict(other)
    assert sampler.count == 2


def test_a_stranger_s_state_need_not_say_its_kind():
    class Plain:
        seen = None

        def __call__(self, step, buffer, batch_size, history_len):
            return np.zeros(batch_size, np.int64)

        def state_dict(self):
            return {"count": 7}

        def load_state_dict(self, state):
            self.seen = state

    for wrapped in (lambda plain: plain, lambda plain: MixtureSampler([(UniformSampler(0), 1), (plain, 1)], rng=0)):
        buf, plain = filled(wrapped(Plain())), Plain()
        filled(wrapped(plain)).sampler.load_state_dict(buf.sampler.state_dict())
        assert plain.seen == {"count": 7}
