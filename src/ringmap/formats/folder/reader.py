"""Read a folder: images are decoded in parallel, columns are mapped.

Not here: columns and the episode table (common/tabular.py), tensors and clips (datasets/stored.py).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringmap.formats.common.images import decode_into, size_of
from ringmap.formats.common.tabular import Column, TabularLayout, TabularSource

__all__ = ["LAYOUT", "FolderSource", "image_name"]

Array = np.ndarray[Any, np.dtype[Any]]


def image_name(episode: int, step: int, suffix: str) -> str:
    """Return the name of the file of one image.

    Example:
        >>> image_name(3, 7, "jpeg")
        'ep_3_step_7.jpeg'
    """
    return f"ep_{episode}_step_{step}.{suffix}"


class FolderLayout(TabularLayout):
    """Folders with an image file per step."""

    def find_media(self, folder: str) -> tuple[str, tuple[int, int, int]] | None:
        """Return the suffix of the images and their shape, by the first one."""
        for suffix in ("jpeg", "jpg", "png"):
            first = os.path.join(folder, image_name(0, 0, suffix))
            if os.path.exists(first):
                return suffix, size_of(first, "image")
        return None


LAYOUT = FolderLayout("folder")


class FolderSource(TabularSource):
    """The columns of a folder, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        CorruptError: it is damaged, or of another layout.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, LAYOUT)

    def _images(self, out: Array, column: Column, episodes: Array, steps: Array) -> None:
        folder = os.path.join(self.path, column.file)
        files = [
            os.path.join(folder, image_name(episode, step, column.how))
            for episode, step in zip(episodes.tolist(), steps.tolist(), strict=True)
        ]
        decode_into(out, files, column.spec)
