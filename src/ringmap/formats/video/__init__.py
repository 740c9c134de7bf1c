"""The video format: as the folder format, with one H.264 video per episode and image column.

    DIR/
      ep_len.npz  ep_offset.npz  action.npz ...       key arr_0: all steps of all episodes
      pixels/ep_0.mp4 ...                             images: uint8, three axes, the last of size 1 or 3

The layout of stable-worldmodel, in both directions. H.264 is lossy; `lossless=True` is not.
PyAV (the extra `video`) is imported when a dataset is opened.
Not here: reading (source.py), writing (writer.py), frames (common/video.py), columns (common/tabular.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringmap.formats.base import Format
from ringmap.formats.registry import register_format

if TYPE_CHECKING:
    from ringmap.datasets.stored import StoredDataset
    from ringmap.formats.video.writer import VideoWriter

__all__ = ["Video"]


@register_format
class Video(Format):
    """Datasets as folders of .npz files and videos. Lossless with `lossless=True`."""

    name = "video"
    supports_episode_data = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `ep_len.npz` and videos."""
        from ringmap.formats.video.source import LAYOUT

        return LAYOUT.is_dataset(os.fspath(path))

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
        from ringmap.formats.video.source import VideoSource

        return StoredDataset(VideoSource(path), **options)

    @classmethod
    def open_writer(cls, path: str | os.PathLike[str], **options: Any) -> VideoWriter:
        """Return a writer to a folder; see `VideoWriter` for its options and errors."""
        from ringmap.formats.video.writer import VideoWriter

        return VideoWriter(path, **options)
