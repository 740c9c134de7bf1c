"""The face of ringmap's samplers, loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmap.faces import lazily

if TYPE_CHECKING:
    from ringmap.clips.samplers.base import BaseSampler, Sampler, as_sampler
    from ringmap.clips.samplers.episodes import EpisodeSampler
    from ringmap.clips.samplers.epochs import EpochSampler
    from ringmap.clips.samplers.mixture import MixtureSampler
    from ringmap.clips.samplers.prioritized import PrioritizedSampler
    from ringmap.clips.samplers.recency import RecencySampler
    from ringmap.clips.samplers.schedules import Linear
    from ringmap.clips.samplers.uniform import UniformSampler

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

_HOMES = {
    "BaseSampler": "ringmap.clips.samplers.base",
    "EpisodeSampler": "ringmap.clips.samplers.episodes",
    "EpochSampler": "ringmap.clips.samplers.epochs",
    "Linear": "ringmap.clips.samplers.schedules",
    "MixtureSampler": "ringmap.clips.samplers.mixture",
    "PrioritizedSampler": "ringmap.clips.samplers.prioritized",
    "RecencySampler": "ringmap.clips.samplers.recency",
    "Sampler": "ringmap.clips.samplers.base",
    "UniformSampler": "ringmap.clips.samplers.uniform",
    "as_sampler": "ringmap.clips.samplers.base",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
