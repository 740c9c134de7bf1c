"""The folder format: .npz columns, and one image file per step.

    DIR/
      ep_len.npz  ep_offset.npz  action.npz ...       key arr_0: all steps of all episodes
      pixels/ep_0_step_0.jpeg ...                     images: what the codec holds (media/images.py)

The layout of stable-worldmodel, in both directions, with names, dtypes and shapes kept in
`ep_len.json` beside it. JPEG by default, which is lossy; PNG is not.
Not here: what it shares with `video` (common/tabular.py), the log (common/writer.py).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringmap.formats.common import disk
from ringmap.formats.common.log import Encoded
from ringmap.formats.common.tabular import Column, TabularFormat, TabularSource, TabularWriter
from ringmap.formats.media.images import (
    Picture,
    check_image_format,
    decode_into,
    encode,
    picture_of,
)
from ringmap.formats.registry import register_format

__all__ = ["Folder", "FolderSource", "FolderWriter"]

Array = np.ndarray[Any, np.dtype[Any]]


@register_format
class Folder(TabularFormat):
    """Datasets as folders of .npz files and images. Lossless with `image_format="png"`."""

    name = "folder"
    source = "ringmap.formats.folder:FolderSource"
    writer = "ringmap.formats.folder:FolderWriter"

    @classmethod
    def find_media(cls, folder: str) -> tuple[str, Picture] | None:
        """Return the suffix of the images, and what the first one is."""
        for suffix in ("jpeg", "jpg", "png", "tiff", "tif"):
            first = os.path.join(folder, image_name(0, 0, suffix))
            if os.path.exists(first):
                return suffix, picture_of(first, "image")
        return None


def image_name(episode: int, step: int, suffix: str) -> str:
    """Return the name of the file of one image.

    Example:
        >>> image_name(3, 7, "jpeg")
        'ep_3_step_7.jpeg'
    """
    return f"ep_{episode}_step_{step}.{suffix}"


class FolderSource(TabularSource):
    """The columns of a folder, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        CorruptError: it is damaged, or of another layout.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, Folder)

    def _images(self, out: Array, column: Column, episodes: Array, steps: Array) -> None:
        folder = os.path.join(self.path, column.file)
        files = [
            os.path.join(folder, image_name(episode, step, column.how))
            for episode, step in zip(episodes.tolist(), steps.tolist(), strict=True)
        ]
        decode_into(out, files, column.spec)
        for file in files:
            self._refuse_newer(file)


class FolderWriter(TabularWriter):
    """Writes episodes to a folder. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. Images are encoded
    in parallel.

    Args:
        image_format: "jpeg" (quality 95, full chroma) is lossy, "png" is not. Of a dataset that is
            appended to, the one that it has.

    Raises:
        InputError: an option is wrong.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "demo")
        >>> with FolderWriter(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        >>> sorted(os.listdir(path))
        ['ep_len.data', 'ep_len.json', 'ep_len.npz', 'ep_offset.npz', 'reward.npz']
    """

    format = Folder

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        image_format: str = "jpeg",
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        self.image_format = check_image_format(image_format, "FolderWriter")

    def _how(self) -> tuple[str, str]:
        return self.image_format, self.image_format

    def _pack(self, how: str, images: Array) -> tuple[Encoded, str]:
        kind = check_image_format(how, "FolderWriter")
        lossy = "JPEG, which is lossy; for exact images pass image_format='png'"
        return Encoded(encode(images, kind), how), lossy if kind == "jpeg" else ""

    def _put(self, folder: str, number: int, how: str, images: Encoded) -> None:
        for step, data in enumerate(images.values):
            disk.write_file(os.path.join(folder, image_name(number, step, how)), data)
