"""Write a folder of videos: each is encoded when its episode is written.

Not here: the log (common/staged.py), .npz files (common/tabular.py), frames (common/video.py).
"""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.formats.common import disk
from ringmap.formats.common.log import Encoded
from ringmap.formats.common.tabular import TabularWriter
from ringmap.formats.common.video import Encoding, encode_video
from ringmap.formats.video.reader import LAYOUT, video_name

__all__ = ["VideoWriter"]

Array = np.ndarray[Any, np.dtype[Any]]


class VideoWriter(TabularWriter):
    """Writes episodes to a folder, images as videos. Use it in a `with` block.

    Args:
        path: the folder; those above it are made.
        mode: "append" extends a dataset, "overwrite" replaces it when the block succeeds,
            "error" refuses it.
        lossless: keep every value of the images: H.264 in RGB with quantizer 0.
        codec: the encoder, as PyAV names it.
        crf: quality, 0 to 51: less is better, and larger.
        fps: frames per second that a player shows.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work.
        UnknownFormatError, CorruptError: on entering, if the dataset can't be appended to.

    Processes and threads: one writer at a time, which a lock sees to, one thread at a time; the
    encoder has threads of its own. Killed at any moment, it leaves every episode readable whose call
    had returned; a power cut may cost what was written since the block began.
    """

    layout = LAYOUT

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        lossless: bool = False,
        codec: str = "libx264",
        crf: int = 18,
        fps: int = 30,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if not 0 <= crf <= 51 or fps <= 0:
            raise InputError(
                f"VideoWriter: crf must be 0 to 51 and fps positive, got {crf} and {fps}"
            )
        if lossless and codec != "libx264":
            raise InputError(f"VideoWriter: lossless=True is for codec='libx264', got {codec!r}")
        import av

        try:
            av.Codec(codec, "w")
        except ValueError as error:
            raise InputError(f"VideoWriter: PyAV has no encoder {codec!r}") from error
        self.encoding = Encoding(codec, crf, fps, lossless)

    def _how(self) -> str:
        return "mp4"

    def _pack(self, how: str, images: Array) -> tuple[Encoded, str]:
        film = io.BytesIO()
        encode_video(film, images, self.encoding)
        lossy = "H.264, which is lossy; for exact images pass lossless=True"
        return Encoded([film.getvalue()], how), "" if self.encoding.lossless else lossy

    def _put(self, folder: str, number: int, how: str, images: Encoded) -> None:
        disk.write_file(os.path.join(folder, video_name(number)), images.values[0])
