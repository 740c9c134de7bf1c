"""The reading side of a folder of videos: decoders stay open, episodes are decoded in parallel.

Not here: frames and decoders (common/video.py), columns and the episode table (common/tabular.py).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringmap.formats.common.tabular import Column, TabularLayout, TabularSource
from ringmap.formats.common.untrusted import kind_at
from ringmap.formats.common.video import Decoder, DecodingSource, decode_runs

__all__ = ["LAYOUT", "VideoSource", "video_name"]

Array = np.ndarray[Any, np.dtype[Any]]


def video_name(episode: int) -> str:
    """Return the name of the file of an episode.

    Example:
        >>> video_name(3)
        'ep_3.mp4'
    """
    return f"ep_{episode}.mp4"


class VideoLayout(TabularLayout):
    """Folders with a video per episode."""

    def find_media(self, folder: str) -> tuple[str, tuple[int, int, int]] | None:
        """Return "mp4" and the size of the first video."""
        first = os.path.join(folder, video_name(0))
        if not os.path.exists(first):
            return None
        decoder = Decoder(first)
        try:
            return "mp4", (*decoder.size, 3)
        finally:
            decoder.close()


LAYOUT = VideoLayout("video")


class VideoSource(DecodingSource, TabularSource):
    """The columns of a folder of videos, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        CorruptError: it is damaged, or of another layout.

    Processes and threads: up to 64 videos stay open per process; a fork opens its own.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, LAYOUT)

    def _most_images(self, folder: str, column: Column) -> int:
        """Return how many images a folder can hold at most: a frame takes a byte of its video."""
        sizes = (os.path.join(folder, video_name(i)) for i in range(len(self.lengths)))
        return sum(
            os.stat(path, follow_symlinks=False).st_size for path in sizes if not kind_at(path)
        )

    def _images(self, out: Array, column: Column, episodes: Array, steps: Array) -> None:
        folder = os.path.join(self.path, column.file)
        decode_runs(
            self._decoders,
            out,
            episodes,
            steps,
            lambda episode: os.path.join(folder, video_name(episode)),
        )
