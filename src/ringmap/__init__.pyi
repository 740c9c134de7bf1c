from ringmap import data, errors, grain, policy, recording, samplers, sb3, world
from ringmap.buffers.distillation import DistillationBuffer
from ringmap.buffers.offline_to_online import OfflineToOnlineReplayBuffer
from ringmap.buffers.opening import open
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.rollout import RolloutBuffer
from ringmap.buffers.transitions.buffer import TransitionReplayBuffer
from ringmap.collection.collect import collect
from ringmap.datasets.marks import Marks
from ringmap.fleet.pace import Pace
from ringmap.fleet.weights import Weights
from ringmap.recording.wrapper import ReplayBufferCollectionWrapper
from ringmap.storage.columns.backends import Zarr
from ringmap.storage.columns.schema import Column
from ringmap.storage.inspect.check import check
from ringmap.storage.inspect.repair import repair
from ringmap.world.world import World

__all__ = [
    "Column",
    "DistillationBuffer",
    "Marks",
    "OfflineToOnlineReplayBuffer",
    "Pace",
    "ReplayBuffer",
    "ReplayBufferCollectionWrapper",
    "RolloutBuffer",
    "TransitionReplayBuffer",
    "Weights",
    "World",
    "Zarr",
    "check",
    "collect",
    "data",
    "errors",
    "grain",
    "open",
    "policy",
    "recording",
    "repair",
    "samplers",
    "sb3",
    "world",
]

__version__: str
