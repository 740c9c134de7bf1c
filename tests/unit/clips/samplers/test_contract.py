"""Every sampler of ours, a plain function, and a stranger's object pass the exported suite."""

import numpy as np
import pytest

from ringmap.errors import InputError
from ringmap.samplers import (
    BaseSampler,
    EpisodeSampler,
    EpochSampler,
    MixtureSampler,
    PrioritizedSampler,
    RecencySampler,
    UniformSampler,
)
from ringmap.testing import SamplerTests


class TestUniform(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: UniformSampler(np.random.default_rng(3))


class TestEpisodes(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: EpisodeSampler(3)


class TestHalfLife(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: RecencySampler(half_life=5, rng=3)


class TestWindow(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: RecencySampler(window=5, rng=3)


class TestProportional(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: PrioritizedSampler(rng=3)


class TestRank(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: PrioritizedSampler(kind="rank", rng=3)


class TestMixture(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: MixtureSampler(
            [(UniformSampler(1), 1), (PrioritizedSampler(rng=2), 2), (EpochSampler(4), 1)], rng=3
        )


class TestEpochs(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: EpochSampler(3)


class TestMixtureOfStrangers(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: MixtureSampler([(UniformSampler(1), 1), (_Stateful(), 2), (_oldest, 1)], 3)


class TestFunction(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return lambda: _oldest


class TestCallable(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return _Plain


class TestDerived(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return _Derived


class TestStateful(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        return _Stateful


def _oldest(step, buffer, batch_size, history_len):
    return np.arange(batch_size) % buffer.num_valid_ends(history_len)


class _Plain:
    """What the guide calls a sampler: nothing but a callable."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __call__(self, step, buffer, batch_size, history_len):
        return self.rng.integers(0, buffer.num_valid_ends(history_len), batch_size)


class _Derived(BaseSampler):
    """The least that a subclass of the base needs."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __call__(self, step, buffer, batch_size, history_len):
        return self.rng.integers(0, buffer.num_valid_ends(history_len), batch_size)


class _Stateful(_Plain):
    """Of no class of ours: it has some of the methods."""

    def small_state(self):
        return {"kind": "_Stateful", "rng": self.rng.bit_generator.state}

    def load_small_state(self, state):
        if state["kind"] != "_Stateful":
            raise InputError(f"_Stateful: the state is that of {state['kind']!r}")
        self.rng.bit_generator.state = state["rng"]

    state_dict = small_state
    load_state_dict = load_small_state


class _Weighing(_Derived):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def weigh(self):
        return lambda positions: self.weight


@pytest.mark.parametrize("weight", [np.ones(3, np.float32), np.ones(16), np.zeros(16, np.float32)])
def test_control_weights(weight):
    """Weights of another shape or dtype, or 0, fail the suite."""
    with pytest.raises(AssertionError):
        SamplerTests().test_weighs_its_batches_or_does_not(lambda: _Weighing(weight))
    SamplerTests().test_weighs_its_batches_or_does_not(lambda: _Weighing(np.ones(16, np.float32)))


def test_control_priorities():
    """One that says it takes priorities, and does not, fails the suite."""

    class Boasting(_Derived):
        has_priorities = True

    with pytest.raises(InputError):
        SamplerTests().test_takes_priorities_or_says_that_it_does_not(Boasting)


def test_control_state_of_another():
    """One that takes the state of another kind fails the suite; as a part of a mixture it is not given that state."""

    class Careless(_Stateful):
        def load_small_state(self, state):
            self.rng.bit_generator.state = state["rng"]

        load_state_dict = load_small_state

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        SamplerTests().test_refuses_the_state_of_another(Careless)
    other = MixtureSampler([(_Stateful(), 1)], 3)
    with pytest.raises(InputError, match="state is that of '_Stateful'"):
        MixtureSampler([(Careless(), 1)], 3).load_state_dict(other.state_dict())


def test_control_closed_for_good(tmp_path):
    """One that can't be used after `close` fails the suite."""

    class Fragile(_Derived):
        def close(self):
            del self.rng

    with pytest.raises(AttributeError):
        SamplerTests().test_may_be_called_at_any_time(Fragile, tmp_path)


def test_control():
    """A sampler that counts steps, not clips, fails the suite."""

    class Wrong:
        def __call__(self, step, buffer, batch_size, history_len):
            return np.arange(batch_size) % buffer.num_steps_stored

    with pytest.raises(AssertionError):
        SamplerTests().test_returns_ids_of_clips(Wrong, 5)
