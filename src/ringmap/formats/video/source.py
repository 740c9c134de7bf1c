"""The reading side of a folder of videos: decoders stay open, episodes are decoded in parallel.

Not here: frames (codec.py), columns and the episode table (common/tabular.py).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from ringmap.errors import CorruptError
from ringmap.formats.common.images import in_threads
from ringmap.formats.common.tabular import Column, TabularLayout, TabularSource
from ringmap.formats.video.codec import Decoder

__all__ = ["LAYOUT", "MAX_DECODERS", "VideoSource", "video_name"]

Array = np.ndarray[Any, np.dtype[Any]]

_inherited: list[Any] = []
"""Decoders that a forked child got from its parent, and must neither use nor close."""

MAX_DECODERS = 64
"""Decoders that a dataset keeps open in a process."""


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


class VideoSource(TabularSource):
    """The columns of a folder of videos, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        CorruptError: it is damaged, or of another layout.

    Processes and threads: up to `MAX_DECODERS` videos stay open per process; a fork opens its own.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, LAYOUT)

    def _forget(self) -> None:
        if hasattr(
            self, "_decoders"
        ):  # closing one in a forked child waits for threads that are not there
            _inherited.append(self._decoders)
        super()._forget()
        self._decoders = _Decoders()

    def close(self) -> None:
        """Give the files back; the next read opens them again."""
        super().close()
        self._decoders.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_decoders"}

    def _images(self, out: Array, column: Column, episodes: Array, steps: Array) -> None:
        self._alone()  # in a forked child: no decoder of its parent's
        folder = os.path.join(self.path, column.file)
        cuts = np.flatnonzero(np.concatenate([[True], episodes[1:] != episodes[:-1], [True]]))
        runs = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
        decoders = self._decoders

        def one(run: tuple[int, int]) -> None:
            first, stop = run
            path = os.path.join(folder, video_name(int(episodes[first])))
            decoder = decoders.take(path)
            try:
                decoder.read(steps[first:stop].tolist(), out[first:stop])
            except (OSError, ValueError) as error:
                decoder.close()
                if isinstance(error, CorruptError):
                    raise
                raise CorruptError(f"{path} can't be read: {error}") from error
            decoders.give_back(decoder)

        in_threads(one, runs, 1)


class _Decoders:
    """Open decoders, lent to one thread at a time; the one unused longest is closed first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, Decoder] = OrderedDict()

    def take(self, path: str) -> Decoder:
        with self._lock:
            found = self._idle.pop(path, None)
        return found if found is not None else Decoder(path)

    def give_back(self, decoder: Decoder) -> None:
        spare = []
        with self._lock:
            if decoder.path in self._idle:
                spare.append(decoder)
            else:
                self._idle[decoder.path] = decoder
            while len(self._idle) > MAX_DECODERS:
                spare.append(self._idle.popitem(last=False)[1])
        for decoder in spare:
            decoder.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = list(self._idle.values()), OrderedDict()
        for decoder in idle:
            decoder.close()
