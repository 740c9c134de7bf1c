"""The video format: as the folder format, with one H.264 video per episode and image column.

    DIR/
      ep_len.npz  ep_offset.npz  action.npz ...       key arr_0: all steps of all episodes
      pixels/ep_0.mp4 ...                             images: uint8, three axes, the last of size 1 or 3

The layout of stable-worldmodel, in both directions. H.264 is lossy; `lossless=True` is not.
PyAV (the extra `video`) is imported when a dataset is opened.
Not here: reading (reader.py), writing (writer.py), frames (common/video.py), columns (common/tabular.py).
"""

from __future__ import annotations

import os

from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.registry import register_format

__all__ = ["Video"]


@register_format
class Video(StoredFormat):
    """Datasets as folders of .npz files and videos. Lossless with `lossless=True`."""

    name = "video"
    source = "ringmap.formats.video.reader:VideoSource"
    writer = "ringmap.formats.video.writer:VideoWriter"
    logs = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `ep_len.npz` and videos."""
        from ringmap.formats.video.reader import LAYOUT

        return LAYOUT.is_dataset(os.fspath(path))
