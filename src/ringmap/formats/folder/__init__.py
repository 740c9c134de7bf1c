"""The folder format: .npz columns, and one image file per step.

    DIR/
      ep_len.npz  ep_offset.npz  action.npz ...       key arr_0: all steps of all episodes
      pixels/ep_0_step_0.jpeg ...                     images: uint8, three axes, the last of size 1 or 3

The layout of stable-worldmodel, in both directions, with names, dtypes and shapes kept in
`ep_len.json` beside it. JPEG by default, which is lossy; PNG is not.
Not here: reading (reader.py), writing (writer.py), what it shares with `video` (common/tabular.py).
"""

from __future__ import annotations

import os

from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.registry import register_format

__all__ = ["Folder"]


@register_format
class Folder(StoredFormat):
    """Datasets as folders of .npz files and images. Lossless with `image_format="png"`."""

    name = "folder"
    source = "ringmap.formats.folder.reader:FolderSource"
    writer = "ringmap.formats.folder.writer:FolderWriter"
    logs = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `ep_len.npz`, and no videos."""
        from ringmap.formats.folder.reader import LAYOUT

        return LAYOUT.is_dataset(os.fspath(path))
