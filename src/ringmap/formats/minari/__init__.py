"""The Minari format: local datasets of the Farama Foundation's Minari, read through its package.

    observation  next_observation  action  reward  terminated  truncated      one row per step
    info/<key>   next_info/<key>

An episode of T steps has T + 1 observations: `next_observation` is `observation` one step later, and
holds the last. Spaces of several parts become columns: observation/position, ...
Not here: downloads (`minari download`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringmap.formats.base import Format
from ringmap.formats.registry import register_format

if TYPE_CHECKING:
    from ringmap.datasets.stored import StoredDataset

__all__ = ["Minari"]


@register_format
class Minari(Format):
    """Minari datasets. Read-only."""

    name = "minari"
    supports_episode_data = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `data/metadata.json` and what lies beside it."""
        folder = os.path.join(os.fspath(path), "data")
        return os.path.isfile(os.path.join(folder, "metadata.json")) and any(
            name == "main_data.hdf5" or name.isdigit() for name in os.listdir(folder)
        )

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> StoredDataset:
        """Return the dataset in a folder.

        Args:
            path: the folder that holds `data`.
            options: `num_steps, frameskip, transform, layout, keys_to_load, keys_to_cache,
                keys_to_merge` of `StoredDataset`.

        Raises:
            NotFoundError, CorruptError: it can't be read.
        """
        from ringmap.datasets.stored import StoredDataset
        from ringmap.formats.minari.source import MinariSource

        return StoredDataset(MinariSource(path), **options)
