"""The video format: as the folder format, with one H.264 video per episode and image column.

    DIR/
      ep_len.npz  ep_offset.npz  action.npz ...       key arr_0: all steps of all episodes
      pixels/ep_0.mp4 ...                             images: what the codec holds (media/images.py)

The layout of stable-worldmodel, in both directions. H.264 is lossy; `lossless=True` is not.
PyAV (the extra `video`) is imported when a video is opened. Decoders stay open; episodes are decoded in parallel.
Not here: frames (media/videos.py), columns (common/tabular.py), the log (common/writer.py).
"""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import Any

import numpy as np

from ringmap.clips.facts import Facts, check_fps
from ringmap.errors import InputError
from ringmap.formats.common import disk
from ringmap.formats.common.directory import DecodingSource
from ringmap.formats.common.log import Encoded
from ringmap.formats.common.tabular import Column, TabularFormat, TabularSource, TabularWriter
from ringmap.formats.common.untrusted import kind_at
from ringmap.formats.media.images import Picture
from ringmap.formats.media.videos import Decoder, Encoding, decode_runs, encode_video
from ringmap.formats.registry import register_format

__all__ = ["Video", "VideoSource", "VideoWriter"]

Array = np.ndarray[Any, np.dtype[Any]]


@register_format
class Video(TabularFormat):
    """Datasets as folders of .npz files and videos. Lossless with `lossless=True`."""

    name = "video"
    source = "ringmap.formats.video:VideoSource"
    writer = "ringmap.formats.video:VideoWriter"

    @classmethod
    def find_media(cls, folder: str) -> tuple[str, Picture] | None:
        """Return "mp4", and what the pictures of the first video are."""
        first = os.path.join(folder, video_name(0))
        if not os.path.exists(first):
            return None
        decoder = Decoder(first)
        try:
            return "mp4", decoder.picture
        finally:
            decoder.close()


def video_name(episode: int) -> str:
    """Return the name of the file of an episode.

    Example:
        >>> video_name(3)
        'ep_3.mp4'
    """
    return f"ep_{episode}.mp4"


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
        super().__init__(path, Video)

    def _most_images(self, folder: str, column: Column) -> int:
        """Return how many images a folder can hold at most: a frame takes a byte of its video."""
        sizes = (os.path.join(folder, video_name(i)) for i in range(len(self.lengths)))
        return sum(os.stat(path, follow_symlinks=False).st_size for path in sizes if not kind_at(path))

    def _images(self, out: Array, column: Column, episodes: Array, steps: Array) -> None:
        folder = os.path.join(self.path, column.file)

        def path_of(episode: int) -> str:
            return os.path.join(folder, video_name(episode))

        decode_runs(self._decoders, out, episodes, steps, path_of)
        for episode in np.unique(episodes).tolist():
            self._refuse_newer(path_of(episode))


class VideoWriter(TabularWriter):
    """Writes episodes to a folder, images as videos. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. The encoder has
    threads of its own.

    Args:
        lossless: keep every value of the images: H.264 in RGB with quantizer 0; PNG of uint16 with 1 or 3 channels,
            which is a column of numbers without it.
        codec: the encoder, as PyAV names it.
        crf: quality, 0 to 51: less is better, and larger.
        fps: steps per second of the dataset, and frames per second that a player shows; None: the rate of the source.
            Players show 30 where that is not known.

    Raises:
        InputError: an option is wrong.
    """

    format = Video

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        lossless: bool = False,
        codec: str = "libx264",
        crf: int = 18,
        fps: Any = None,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if not 0 <= crf <= 51:
            raise InputError(f"VideoWriter: crf must be 0 to 51, got {crf}")
        if lossless and codec != "libx264":
            raise InputError(f"VideoWriter: lossless=True is for codec='libx264', got {codec!r}")
        import av

        try:
            av.Codec(codec, "w")
        except ValueError as error:
            raise InputError(f"VideoWriter: PyAV has no encoder {codec!r}") from error
        self._named = check_fps("VideoWriter", fps)
        self.facts = Facts(fps=self._named)
        self._encoding = Encoding(codec, crf, lossless=lossless)

    def expect_facts(self, facts: Facts, where: str) -> None:
        """Note what is known of the episodes; a rate that the option names counts."""
        super().expect_facts(Facts(facts.reward_at, self._named or facts.fps), where)

    def _how(self) -> tuple[str, str]:
        return "mp4", "lossless video" if self._encoding.lossless else "video"

    def _pack(self, how: str, images: Array) -> tuple[Encoded, str]:
        video = io.BytesIO()
        rate = self.facts.fps or self._encoding.fps
        encode_video(video, images, replace(self._encoding, fps=rate))
        lossy = not self._encoding.lossless and images.dtype == np.uint8
        told = "H.264, which is lossy; for exact images pass lossless=True" if lossy else ""
        return Encoded([video.getvalue()], how), told

    def _put(self, folder: str, number: int, how: str, images: Encoded) -> None:
        disk.write_file(os.path.join(folder, video_name(number)), images.values[0])
