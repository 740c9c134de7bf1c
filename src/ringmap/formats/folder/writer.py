"""The writing side of a folder: images go to their files at once, columns to the log.

Not here: the block, the log and the swap (common/directory.py), .npz files (common/tabular.py).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringmap.formats.common import disk
from ringmap.formats.common.apart import ApartWriter
from ringmap.formats.common.images import check_image_format, encode, in_threads
from ringmap.formats.common.tabular import Column
from ringmap.formats.folder.source import LAYOUT, image_name

__all__ = ["FolderWriter"]

Array = np.ndarray[Any, np.dtype[Any]]


class FolderWriter(ApartWriter):
    """Writes episodes to a folder. Use it in a `with` block.

    Args:
        path: the folder; those above it are made.
        mode: "append" extends what is there, "overwrite" replaces it when the block ends well,
            "error" refuses it.
        image_format: "jpeg" (quality 95, full chroma) is lossy, "png" is not. Of a dataset that is
            appended to, the one that it has.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work.
        UnknownFormatError, CorruptError: on entering, when what is there can't be appended to.

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

    def _put(self, folder: str, number: int, column: Column, images: Array) -> str:
        kind = check_image_format(column.how, "FolderWriter")
        blobs = encode(images, kind)
        files = [os.path.join(folder, image_name(number, t, column.how)) for t in range(len(blobs))]
        in_threads(lambda item: disk.write_file(*item), list(zip(files, blobs, strict=True)))
        return (
            "JPEG, which is lossy; for exact images pass image_format='png'"
            if kind == "jpeg"
            else ""
        )

    def _files(self, folder: str, number: int) -> list[str]:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return [name for name in names if name.startswith(f"ep_{number}_")]
