"""Videos: frames into an mp4 file, by PyAV.

Not here: which frames (episode_videos.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.extras import require

__all__ = ["VideoFile", "as_frame", "frame_of"]

Array = np.ndarray[Any, np.dtype[Any]]

FPS = 15
_SMALLEST = 192
"""Smaller frames are enlarged, each pixel as a square: players blur enlarged frames."""


class VideoFile:
    """One mp4 file that is being written. The frames must be of one size.

    Args:
        path: the file; folders above it are made.
        fps: frames per second.

    Raises:
        MissingExtraError: PyAV is not installed.
    """

    def __init__(self, path: Path, fps: int = FPS) -> None:
        require("video", "writing a video")
        import av

        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), mode="w")
        self._stream = self._container.add_stream("libx264", rate=fps)
        self._stream.pix_fmt = "yuv420p"
        self._stream.options = {"crf": "18"}
        self._size: tuple[int, ...] | None = None

    def add(self, frame: Array) -> None:
        """Add a frame, uint8 (H, W, 3)."""
        import av

        factor = max(1, -(-_SMALLEST // min(frame.shape[:2])))
        frame = frame.repeat(factor, axis=0).repeat(factor, axis=1)
        height, width = frame.shape[:2]
        frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # yuv420p
        if self._size is None:
            self._size = frame.shape
            self._stream.height, self._stream.width = frame.shape[:2]
        made = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        self._container.mux(self._stream.encode(made))

    def close(self) -> None:
        """Finish the file."""
        if self._size is not None:
            self._container.mux(self._stream.encode())
        self._container.close()


def frame_of(row: dict[str, Any]) -> Array:
    """Return the frame that an environment's row shows, uint8 (H, W, 3).

    Raises:
        InputError: it shows none.
    """
    for name in (
        "_pixels",
        "pixels",
        *sorted(n for n in row if n.startswith(("_pixels.", "pixels."))),
    ):
        value = row.get(name)
        if isinstance(value, np.ndarray):
            return as_frame(value)
    raise InputError("World.evaluate: a video needs pixels; make the world with add_pixels=True")


def as_frame(picture: Array) -> Array:
    """Return a picture as uint8 (H, W, 3).

    Raises:
        InputError: it is none.
    """
    if picture.ndim == 2:
        picture = picture[..., None]
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] not in (1, 3, 4):
        raise InputError(
            f"World.evaluate: a video needs uint8 pictures (H, W, 3), got {picture.dtype} {picture.shape}"
        )
    return np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture[..., :3]
