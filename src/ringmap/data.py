"""The face of ringmap's data: buffers, datasets and formats by name, loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmap.faces import lazily

if TYPE_CHECKING:
    from ringmap.buffers.distillation.beta import ExponentialBeta, LinearBeta
    from ringmap.buffers.distillation.buffer import DistillationBuffer
    from ringmap.buffers.offline_to_online.buffer import OfflineToOnlineReplayBuffer
    from ringmap.buffers.replay import ReplayBuffer
    from ringmap.buffers.torchrl_storage import torchrl_storage
    from ringmap.datasets.base import Dataset
    from ringmap.datasets.catalog import get_cache_dir, load_dataset
    from ringmap.datasets.goal import GoalDataset
    from ringmap.datasets.joined import ConcatDataset, MergeDataset
    from ringmap.datasets.prefixes import list_prefixes, register_dataset
    from ringmap.datasets.transfer import convert, merge
    from ringmap.formats.base import (
        EPISODE_DATA_KEY,
        WRITE_MODES,
        Format,
        Writer,
        split_episode_data,
        validate_write_mode,
    )
    from ringmap.formats.registry import (
        FORMATS,
        detect_format,
        get_format,
        list_formats,
        register_format,
    )

__all__ = [
    "EPISODE_DATA_KEY",
    "FORMATS",
    "WRITE_MODES",
    "ConcatDataset",
    "Dataset",
    "DistillationBuffer",
    "ExponentialBeta",
    "Format",
    "GoalDataset",
    "LinearBeta",
    "MergeDataset",
    "OfflineToOnlineReplayBuffer",
    "ReplayBuffer",
    "Writer",
    "convert",
    "detect_format",
    "get_cache_dir",
    "get_format",
    "list_formats",
    "list_prefixes",
    "load_dataset",
    "merge",
    "register_dataset",
    "register_format",
    "split_episode_data",
    "torchrl_storage",
    "validate_write_mode",
]

_HOMES = {
    "DistillationBuffer": "ringmap.buffers.distillation.buffer",
    "ExponentialBeta": "ringmap.buffers.distillation.beta",
    "LinearBeta": "ringmap.buffers.distillation.beta",
    "OfflineToOnlineReplayBuffer": "ringmap.buffers.offline_to_online.buffer",
    "ReplayBuffer": "ringmap.buffers.replay",
    "ConcatDataset": "ringmap.datasets.joined",
    "torchrl_storage": "ringmap.buffers.torchrl_storage",
    "Dataset": "ringmap.datasets.base",
    "GoalDataset": "ringmap.datasets.goal",
    "MergeDataset": "ringmap.datasets.joined",
    "convert": "ringmap.datasets.transfer",
    "get_cache_dir": "ringmap.datasets.catalog",
    "load_dataset": "ringmap.datasets.catalog",
    "merge": "ringmap.datasets.transfer",
    "list_prefixes": "ringmap.datasets.prefixes",
    "register_dataset": "ringmap.datasets.prefixes",
    "EPISODE_DATA_KEY": "ringmap.formats.base",
    "Format": "ringmap.formats.base",
    "WRITE_MODES": "ringmap.formats.base",
    "Writer": "ringmap.formats.base",
    "split_episode_data": "ringmap.formats.base",
    "validate_write_mode": "ringmap.formats.base",
    "FORMATS": "ringmap.formats.registry",
    "detect_format": "ringmap.formats.registry",
    "get_format": "ringmap.formats.registry",
    "list_formats": "ringmap.formats.registry",
    "register_format": "ringmap.formats.registry",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
