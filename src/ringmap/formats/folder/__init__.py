"""The folder format: .npz columns, and one image file per step.

    DIR/
      ep_len.npz  ep_offset.npz  action.npz ...       key arr_0: all steps of all episodes
      pixels/ep_0_step_0.jpeg ...                     images: uint8, three axes, the last of size 1 or 3

The layout of stable-worldmodel, in both directions, with names, dtypes and shapes kept in
`ep_len.json` beside it. JPEG by default, which is lossy; PNG is not.
Not here: reading (source.py), writing (writer.py), what it shares with `video` (common/tabular.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringmap.formats.base import Format
from ringmap.formats.registry import register_format

if TYPE_CHECKING:
    from ringmap.datasets.stored import StoredDataset
    from ringmap.formats.folder.writer import FolderWriter

__all__ = ["Folder"]


@register_format
class Folder(Format):
    """Datasets as folders of .npz files and images. Lossless with `image_format="png"`."""

    name = "folder"
    supports_episode_data = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `ep_len.npz`, and no videos."""
        from ringmap.formats.folder.source import LAYOUT

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
        from ringmap.formats.folder.source import FolderSource

        return StoredDataset(FolderSource(path), **options)

    @classmethod
    def open_writer(cls, path: str | os.PathLike[str], **options: Any) -> FolderWriter:
        """Return a writer to a folder; see `FolderWriter` for its options and errors."""
        from ringmap.formats.folder.writer import FolderWriter

        return FolderWriter(path, **options)
