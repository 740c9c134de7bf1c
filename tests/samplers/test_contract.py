"""Every sampler of ours, and a plain function, pass the exported suite."""

import numpy as np
import pytest

from ringmap.samplers import (
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


class TestFunction(SamplerTests):
    @pytest.fixture
    def make_sampler(self):
        def make():
            return _Plain()

        return make


class _Plain:
    """What the guide calls a sampler: nothing but a callable."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __call__(self, step, buffer, batch_size, history_len):
        return self.rng.integers(0, buffer.num_valid_ends(history_len), batch_size)


def test_control():
    """A sampler that counts steps, not clips, fails the suite."""

    class Wrong:
        def __call__(self, step, buffer, batch_size, history_len):
            return np.arange(batch_size) % buffer.num_steps_stored

    with pytest.raises(AssertionError):
        SamplerTests().test_returns_ids_of_clips(Wrong, 5)
