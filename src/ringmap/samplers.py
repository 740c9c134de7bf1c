"""The face of ringmap's samplers, loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringmap.clips.samplers.base import Sampler
    from ringmap.clips.samplers.episodes import EpisodeSampler
    from ringmap.clips.samplers.epochs import EpochSampler
    from ringmap.clips.samplers.mixture import MixtureSampler
    from ringmap.clips.samplers.prioritized import PrioritizedSampler
    from ringmap.clips.samplers.recency import RecencySampler
    from ringmap.clips.samplers.schedules import Linear
    from ringmap.clips.samplers.uniform import UniformSampler

__all__ = [
    "EpisodeSampler",
    "EpochSampler",
    "Linear",
    "MixtureSampler",
    "PrioritizedSampler",
    "RecencySampler",
    "Sampler",
    "UniformSampler",
]

_HOMES = {
    "EpisodeSampler": "episodes", "EpochSampler": "epochs", "Linear": "schedules",
    "MixtureSampler": "mixture", "PrioritizedSampler": "prioritized", "RecencySampler": "recency",
    "Sampler": "base", "UniformSampler": "uniform",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"ringmap.clips.samplers.{home}"), name)
    globals()[name] = value  # the next lookup is a plain one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
