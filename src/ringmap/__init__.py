"""ringmap: replay buffers on a memory-mapped ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmap.faces import lazily

if TYPE_CHECKING:
    from ringmap import data, errors, policy, recording, samplers, world
    from ringmap.buffers.distillation.buffer import DistillationBuffer
    from ringmap.buffers.offline_to_online.buffer import OfflineToOnlineReplayBuffer
    from ringmap.buffers.replay import ReplayBuffer
    from ringmap.buffers.rollout.buffer import RolloutBuffer
    from ringmap.buffers.transitions.buffer import TransitionReplayBuffer
    from ringmap.recording.wrapper import ReplayBufferCollectionWrapper
    from ringmap.storage.check import check
    from ringmap.storage.columns.backends import Zarr
    from ringmap.storage.repair import repair
    from ringmap.world.world import World

__version__ = "0.1.0.dev0"

__all__ = [
    "DistillationBuffer",
    "OfflineToOnlineReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferCollectionWrapper",
    "RolloutBuffer",
    "TransitionReplayBuffer",
    "World",
    "Zarr",
    "check",
    "data",
    "errors",
    "policy",
    "recording",
    "repair",
    "samplers",
    "world",
]

_HOMES = {
    "DistillationBuffer": "ringmap.buffers.distillation.buffer",
    "OfflineToOnlineReplayBuffer": "ringmap.buffers.offline_to_online.buffer",
    "ReplayBuffer": "ringmap.buffers.replay",
    "ReplayBufferCollectionWrapper": "ringmap.recording.wrapper",
    "RolloutBuffer": "ringmap.buffers.rollout.buffer",
    "TransitionReplayBuffer": "ringmap.buffers.transitions.buffer",
    "World": "ringmap.world.world",
    "Zarr": "ringmap.storage.columns.backends",
    "check": "ringmap.storage.check",
    "data": "ringmap.data",
    "errors": "ringmap.errors",
    "policy": "ringmap.policy",
    "recording": "ringmap.recording",
    "repair": "ringmap.storage.repair",
    "samplers": "ringmap.samplers",
    "world": "ringmap.world",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
