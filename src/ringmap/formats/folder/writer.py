"""Write a folder: images are encoded when their episode is written.

Not here: the log (common/staged.py), .npz files (common/tabular.py).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringmap.formats.common import disk
from ringmap.formats.common.images import check_image_format, encode
from ringmap.formats.common.log import Encoded
from ringmap.formats.common.tabular import TabularWriter
from ringmap.formats.folder.reader import LAYOUT, image_name

__all__ = ["FolderWriter"]

Array = np.ndarray[Any, np.dtype[Any]]


class FolderWriter(TabularWriter):
    """Writes episodes to a folder. Use it in a `with` block.

    Args:
        path: the folder; those above it are made.
        mode: "append" extends a dataset, "overwrite" replaces it when the block succeeds,
            "error" refuses it.
        image_format: "jpeg" (quality 95, full chroma) is lossy, "png" is not. Of a dataset that is
            appended to, the one that it has.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work.
        UnknownFormatError, CorruptError: on entering, if the dataset can't be appended to.

    Processes and threads: one writer at a time, which a lock sees to, one thread at a time; images
    are encoded in parallel. Killed at any moment, it leaves every episode readable whose call had
    returned; a power cut may cost what was written since the block began.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "demo")
        >>> with FolderWriter(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        >>> sorted(os.listdir(path))
        ['ep_len.data', 'ep_len.json', 'ep_len.npz', 'ep_offset.npz', 'reward.npz']
    """

    layout = LAYOUT

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

    def _how(self) -> str:
        return self.image_format

    def _pack(self, how: str, images: Array) -> tuple[Encoded, str]:
        kind = check_image_format(how, "FolderWriter")
        lossy = "JPEG, which is lossy; for exact images pass image_format='png'"
        return Encoded(encode(images, kind), how), lossy if kind == "jpeg" else ""

    def _put(self, folder: str, number: int, how: str, images: Encoded) -> None:
        for step, data in enumerate(images.values):
            disk.write_file(os.path.join(folder, image_name(number, step, how)), data)
