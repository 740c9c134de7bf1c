from ringmap.clips.samplers.base import BaseSampler, Linear, Sampler, as_sampler
from ringmap.clips.samplers.episodes import EpisodeSampler
from ringmap.clips.samplers.mixture import MixtureSampler
from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.clips.samplers.uniform import EpochSampler, RecencySampler, UniformSampler

__all__ = [
    "BaseSampler",
    "EpisodeSampler",
    "EpochSampler",
    "Linear",
    "MixtureSampler",
    "PrioritizedSampler",
    "RecencySampler",
    "Sampler",
    "UniformSampler",
    "as_sampler",
]
