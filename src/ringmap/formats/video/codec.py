"""Frames of an episode to a video file and back, by PyAV.

    frames (T, H, W, C) -> padded to even sizes -> encoder -> ep_0.mp4
    ep_0.mp4 -> seek to the keyframe before -> decode -> cropped to (H, W)

Invariants: frame t is at pts t, in decoding order (no B-frames), a keyframe every `KEYFRAMES`.
Not here: which frames a batch needs, decoders that stay open (source.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ringmap.errors import CorruptError

__all__ = ["KEYFRAMES", "Decoder", "Encoding", "encode_video"]

Array = np.ndarray[Any, np.dtype[Any]]

KEYFRAMES = 8
"""Frames from one keyframe to the next: a clip decodes at most so many frames in vain. 16 would save 10 % of the
bytes and cost 30 % more time per clip."""

SMALLEST = 16
"""Encoders refuse smaller pictures; they are padded to this."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How videos are encoded.

    Args:
        codec: as PyAV names it.
        crf: quality, 0 to 51: less is better.
        fps: frames per second that a player shows.
        lossless: keep every value: RGB instead of YUV, and quantizer 0.
    """

    codec: str = "libx264"
    crf: int = 18
    fps: int = 30
    lossless: bool = False


def encode_video(path: str, frames: Array, encoding: Encoding) -> None:
    """Write `frames`, (T, H, W, 1 or 3) uint8, to a file.

    Raises:
        av.FFmpegError (an OSError or ValueError): the codec is not there, or refuses its options.
    """
    import av

    # Grey goes as RGB: encoders and decoders differ in the range that they take grey's values to have.
    frames = np.broadcast_to(frames, (*frames.shape[:3], 3))
    height, width = (max(SMALLEST, n + n % 2) for n in frames.shape[1:3])
    pad = ((0, height - frames.shape[1]), (0, width - frames.shape[2]))
    codec, options = encoding.codec, {"crf": str(encoding.crf)}
    pixels = "yuv420p"
    if encoding.lossless:
        codec, options, pixels = "libx264rgb", {"qp": "0"}, "rgb24"
    with av.open(path, "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(encoding.fps), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.codec_context.gop_size = KEYFRAMES
        stream.codec_context.max_b_frames = 0
        stream.codec_context.time_base = Fraction(1, encoding.fps)
        for number, picture in enumerate(frames):
            if pad != ((0, 0), (0, 0)):
                picture = np.pad(picture, (*pad, (0, 0)), mode="edge")
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
            frame.pts = number
            frame.time_base = Fraction(1, encoding.fps)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


class Decoder:
    """A video file that stays open. One thread at a time.

    Args:
        path: of the file.

    Raises:
        CorruptError: it is no video.
    """

    def __init__(self, path: str) -> None:
        import av

        self.path = path
        try:
            self._container = av.open(path)
            self._stream = self._container.streams.video[0]
        except (OSError, ValueError, IndexError) as error:
            raise CorruptError(f"{path} can't be read: {error}") from error
        self._stream.codec_context.thread_count = 1  # clips are what runs in parallel
        self._frames: Any = None
        self._next = 0
        self._ticks = Fraction(1)
        if self._stream.average_rate and self._stream.time_base:
            self._ticks = 1 / (self._stream.average_rate * self._stream.time_base)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a frame as it is stored."""
        context = self._stream.codec_context
        return context.height, context.width

    def read(self, numbers: list[int], out: Array) -> None:
        """Decode frames, in ascending order, into `out`, (len(numbers), H, W, C), cropped to its size.

        Raises:
            CorruptError: there is no such frame.
        """
        height, width, channels = out.shape[1:]
        for into, number in zip(out, numbers, strict=True):
            frame = self._frame(number)
            pixels = frame.to_ndarray(format="rgb24")
            if pixels.shape[0] < height or pixels.shape[1] < width:
                raise CorruptError(
                    f"{self.path}: frames of {pixels.shape[:2]}, expected at least {(height, width)}"
                )
            into[...] = pixels[:height, :width, :channels]

    def _frame(self, number: int) -> Any:
        if self._frames is None or not self._next <= number < self._next + KEYFRAMES:
            self._container.seek(int(number * self._ticks), stream=self._stream)
            self._frames = self._container.decode(self._stream)
            self._next = -1  # known from the first frame
        for frame in self._frames:
            at = round(frame.pts / self._ticks) if frame.pts is not None else max(self._next, 0)
            self._next = at + 1
            if at == number:
                return frame
            if at > number:
                break
        self._frames = None
        raise CorruptError(f"{self.path}: has no frame {number}")

    def close(self) -> None:
        """Give the file back."""
        self._frames = None
        self._container.close()
