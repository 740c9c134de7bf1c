"""The Zarr format: the layout of robot-learning code.

    DIR/
      data/<col>              (N, ...): all steps of all episodes, chunked by steps, compressed
      meta/episode_ends       (E,) int64: rows at which episodes end, exclusive

Zarr format 2, which diffusion-policy-style loaders read. zarr is imported when a dataset is opened.
Not here: arrays (layout.py), reading (source.py), writing (writer.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringmap.formats.base import Format
from ringmap.formats.registry import register_format

if TYPE_CHECKING:
    from ringmap.datasets.stored import StoredDataset
    from ringmap.formats.zarr.writer import ZarrWriter

__all__ = ["Zarr"]


@register_format
class Zarr(Format):
    """Datasets in Zarr groups. Lossless for every dtype that a buffer stores."""

    name = "zarr"
    supports_episode_data = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `meta/episode_ends`."""
        folder = os.path.join(os.fspath(path), "meta", "episode_ends")
        return any(os.path.isfile(os.path.join(folder, f)) for f in (".zarray", "zarr.json"))

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> StoredDataset:
        """Return the dataset in a folder.

        Args:
            path: the folder.
            options: `num_steps, frameskip, transform, layout, keys_to_load, keys_to_cache,
                keys_to_merge` of `StoredDataset`.

        Raises:
            NotFoundError, CorruptError: it can't be read.
        """
        from ringmap.datasets.stored import StoredDataset
        from ringmap.formats.zarr.source import ZarrSource

        return StoredDataset(ZarrSource(path), **options)

    @classmethod
    def open_writer(cls, path: str | os.PathLike[str], **options: Any) -> ZarrWriter:
        """Return a writer to a folder; see `ZarrWriter` for its options and errors."""
        from ringmap.formats.zarr.writer import ZarrWriter

        return ZarrWriter(path, **options)
