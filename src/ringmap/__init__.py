"""ringmap: replay buffers on a memory-mapped ring."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringmap import data, errors, policy, samplers, world
    from ringmap.buffers.distillation import DistillationBuffer
    from ringmap.buffers.offline_to_online import OfflineToOnlineReplayBuffer
    from ringmap.buffers.replay import ReplayBuffer
    from ringmap.buffers.rollout import RolloutBuffer
    from ringmap.buffers.transitions import TransitionReplayBuffer
    from ringmap.storage.check import check
    from ringmap.storage.columns.backends import Zarr
    from ringmap.storage.repair import repair
    from ringmap.world.world import World

__version__ = "0.1.0"

__all__ = [
    "DistillationBuffer",
    "OfflineToOnlineReplayBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
    "TransitionReplayBuffer",
    "World",
    "Zarr",
    "check",
    "data",
    "errors",
    "policy",
    "repair",
    "samplers",
    "world",
]

_LAZY = {
    "DistillationBuffer": ("ringmap.buffers.distillation", "DistillationBuffer"),
    "OfflineToOnlineReplayBuffer": (
        "ringmap.buffers.offline_to_online",
        "OfflineToOnlineReplayBuffer",
    ),
    "ReplayBuffer": ("ringmap.buffers.replay", "ReplayBuffer"),
    "RolloutBuffer": ("ringmap.buffers.rollout", "RolloutBuffer"),
    "TransitionReplayBuffer": ("ringmap.buffers.transitions", "TransitionReplayBuffer"),
    "World": ("ringmap.world.world", "World"),
    "Zarr": ("ringmap.storage.columns.backends", "Zarr"),
    "check": ("ringmap.storage.check", "check"),
    "data": ("ringmap.data", None),
    "errors": ("ringmap.errors", None),
    "policy": ("ringmap.policy", None),
    "repair": ("ringmap.storage.repair", "repair"),
    "samplers": ("ringmap.samplers", None),
    "world": ("ringmap.world", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ringmap' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = import_module(module)
    if attribute is not None:
        found = getattr(found, attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
