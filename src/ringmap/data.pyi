from ringmap.buffers.distillation import DistillationBuffer, ExponentialBeta, LinearBeta
from ringmap.buffers.offline_to_online import OfflineToOnlineReplayBuffer
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.sharded.buffer import ShardedReplayBuffer
from ringmap.buffers.torchrl_storage import to_torchrl, torchrl_storage
from ringmap.clips.items import Computed, Items
from ringmap.clips.rewards import Hindsight, NStep, ReturnToGo
from ringmap.clips.sequences import Index, Sequences, TimeToEnd
from ringmap.clips.window import Window
from ringmap.datasets.arrays import from_arrays
from ringmap.datasets.base import Dataset
from ringmap.datasets.goal import GoalDataset
from ringmap.datasets.joined import ConcatDataset, MergeDataset
from ringmap.exits.hf_datasets import to_datasets
from ringmap.formats.base import (
    EPISODE_DATA_KEY,
    WRITE_MODES,
    Format,
    Writer,
    split_episode_data,
    validate_write_mode,
)
from ringmap.formats.catalog.convert import convert, merge
from ringmap.formats.catalog.load import get_cache_dir, list_prefixes, load_dataset, register_dataset
from ringmap.formats.common.source import EpisodeSource
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.registry import (
    FORMATS,
    detect_format,
    get_format,
    list_formats,
    register_format,
    resolve_format,
)

__all__ = [
    "EPISODE_DATA_KEY",
    "FORMATS",
    "WRITE_MODES",
    "Computed",
    "ConcatDataset",
    "Dataset",
    "DistillationBuffer",
    "EpisodeSource",
    "EpisodeWriter",
    "ExponentialBeta",
    "Format",
    "GoalDataset",
    "Hindsight",
    "Index",
    "Items",
    "LinearBeta",
    "MergeDataset",
    "NStep",
    "OfflineToOnlineReplayBuffer",
    "ReplayBuffer",
    "ReturnToGo",
    "Sequences",
    "ShardedReplayBuffer",
    "TimeToEnd",
    "Window",
    "Writer",
    "convert",
    "detect_format",
    "from_arrays",
    "get_cache_dir",
    "get_format",
    "list_formats",
    "list_prefixes",
    "load_dataset",
    "merge",
    "register_dataset",
    "register_format",
    "resolve_format",
    "split_episode_data",
    "to_datasets",
    "to_torchrl",
    "torchrl_storage",
    "validate_write_mode",
]
