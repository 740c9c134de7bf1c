"""Frames to a video file and back, by PyAV.

    frames (T, H, W, C) -> padded to even sizes -> encoder -> ep_0.mp4
    ep_0.mp4 -> seek to the keyframe before -> decode -> cropped to (H, W)

Invariants: with keyframes, frame t is at pts t, in decoding order (no B-frames), a keyframe every `KEYFRAMES`.
A decoder that a fork copied is never used nor closed: closing it would wait for threads that are not there.
Not here: which frames a batch needs (each format).
"""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ringmap.errors import CorruptError
from ringmap.formats.common.untrusted import LARGEST_PICTURE, kind_at
from ringmap.formats.media.images import in_threads
from ringmap.storage.disk.system import NotAFileError

__all__ = [
    "KEYFRAMES",
    "MAX_DECODERS",
    "Decoder",
    "Decoders",
    "Encoding",
    "FilmWriter",
    "decode_runs",
    "encode_video",
]

Array = np.ndarray[Any, np.dtype[Any]]

KEYFRAMES = 8
"""Frames from one keyframe to the next: a clip decodes at most so many frames in vain. 16 would save 10 % of the
bytes and cost 30 % more time per clip."""

MAX_DECODERS = 64
"""Videos that a dataset keeps open in a process."""

_inherited: list[Any] = []
"""Decoders that a forked child got from its parent."""

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
        keyframes: frames from one keyframe to the next, in decoding order; None: as the codec likes, which is smaller,
            for a file that is only played.
    """

    codec: str = "libx264"
    crf: int = 18
    fps: int = 30
    lossless: bool = False
    keyframes: int | None = KEYFRAMES


class FilmWriter:
    """A video that is being encoded, frame by frame, all of one size. Use it in a `with` block.

    Args:
        file: a path or a file object.
        encoding: how.

    Raises:
        av.FFmpegError (an OSError or ValueError): the codec is not there, or refuses its options.
    """

    def __init__(self, file: Any, encoding: Encoding) -> None:
        import av

        self._encoding, self._number = encoding, 0
        codec, options, pixels = encoding.codec, {"crf": str(encoding.crf)}, "yuv420p"
        if encoding.lossless:
            codec, options, pixels = "libx264rgb", {"qp": "0"}, "rgb24"
        self._container: Any = av.open(file, "w", format="mp4")
        stream: Any = self._container.add_stream(codec, rate=Fraction(encoding.fps), options=options)  # fmt: skip
        stream.pix_fmt = pixels
        if encoding.keyframes is not None:
            stream.codec_context.gop_size = encoding.keyframes
            stream.codec_context.max_b_frames = 0
        stream.codec_context.time_base = Fraction(1, encoding.fps)
        self._stream = stream

    def add(self, picture: Array) -> None:
        """Add a frame, uint8 (H, W, 3)."""
        import av

        height, width = (max(SMALLEST, n + n % 2) for n in picture.shape[:2])
        pad = ((0, height - picture.shape[0]), (0, width - picture.shape[1]))
        if not self._number:
            self._stream.height, self._stream.width = height, width
        if pad != ((0, 0), (0, 0)):
            picture = np.pad(picture, (*pad, (0, 0)), mode="edge")
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
        frame.pts, frame.time_base = self._number, Fraction(1, self._encoding.fps)
        self._number += 1
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        """Finish the file."""
        if self._number:
            self._container.mux(self._stream.encode())
        self._container.close()

    def __enter__(self) -> FilmWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode_video(file: Any, frames: Array, encoding: Encoding) -> None:
    """Write `frames`, (T, H, W, 1 or 3) uint8, as `FilmWriter` does."""
    # Grey goes as RGB: encoders and decoders differ in the range that they take grey's values to have.
    with FilmWriter(file, encoding) as film:
        for picture in np.broadcast_to(frames, (*frames.shape[:3], 3)):
            film.add(picture)


class Decoder:
    """A video file that stays open. One thread at a time.

    Args:
        path: of the file; or what to call it, where its bytes are given.
        data: what is in it.

    Raises:
        CorruptError: it is not a video.
    """

    def __init__(self, path: str, data: bytes | None = None) -> None:
        import av

        self.path = path
        self._container: Any
        if data is None and (kind := kind_at(path)):
            if kind == "missing":
                raise CorruptError(f"{path}: is missing")
            raise NotAFileError(path, kind)
        try:
            # By its content alone, a file could be a playlist, which makes FFmpeg open others, here or elsewhere.
            self._container = av.open(
                path if data is None else io.BytesIO(data), format="mp4", options={"protocol_whitelist": "file"}
            )  # fmt: skip
            self._stream: Any = self._container.streams.video[0]
            self._stream.codec_context.options = {"max_pixels": str(LARGEST_PICTURE)}
            height, width = self.size
        except (OSError, ValueError, IndexError) as error:
            raise CorruptError(f"{path} can't be read: {error}") from error
        if height * width > LARGEST_PICTURE:
            self._container.close()
            raise CorruptError(
                f"{path}: frames of {width} by {height} pixels, expected at most {LARGEST_PICTURE:,} in all"
            )
        self._stream.codec_context.thread_count = 1  # clips are what runs in parallel
        self._frames: Any = None
        self._next = 0
        self._start = self._stream.start_time or 0
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
            self._container.seek(self._start + int(number * self._ticks), stream=self._stream)
            self._frames = self._container.decode(self._stream)
            self._next = -1  # known from the first frame
        for frame in self._frames:
            if frame.pts is None:
                raise CorruptError(f"{self.path}: a frame has no time")
            at = round((frame.pts - self._start) / self._ticks)
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


class Decoders:
    """Open decoders, lent to one thread at a time; the one unused longest is closed first."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, Decoder] = OrderedDict()

    def of_process(self) -> None:
        """Leave the parent's decoders alone, in a forked child. Called before threads are."""
        if self._pid != os.getpid():
            _inherited.append(self._idle)
            self._start()

    def take(self, path: str) -> Decoder:
        """Return a decoder of a file, for this thread."""
        with self._lock:
            found = self._idle.pop(path, None)
        return found if found is not None else Decoder(path)

    def give_back(self, decoder: Decoder) -> None:
        """Keep a decoder for the next one who asks."""
        spare = []
        with self._lock:
            if decoder.path in self._idle:
                spare.append(decoder)
            else:
                self._idle[decoder.path] = decoder
            while len(self._idle) > MAX_DECODERS:
                spare.append(self._idle.popitem(last=False)[1])
        for one in spare:
            one.close()

    def close(self) -> None:
        """Close all that nobody uses."""
        self.of_process()
        with self._lock:
            idle, self._idle = list(self._idle.values()), OrderedDict()
        for decoder in idle:
            decoder.close()

    def __del__(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._idle)


def decode_runs(
    decoders: Decoders, out: Array, episodes: Array, frames: Array, path_of: Callable[[int], str]
) -> None:
    """Decode frame `frames[i]` of `path_of(episodes[i])` into `out[i]`: an episode's in one go, in parallel.

    Args:
        decoders: open files.
        out: (n, H, W, C) uint8.
        episodes: (n,), each episode's together.
        frames: (n,), ascending within an episode.
        path_of: where an episode's video lies.

    Raises:
        CorruptError: one can't be read.
    """
    decoders.of_process()
    cuts = np.flatnonzero(np.concatenate([[True], episodes[1:] != episodes[:-1], [True]])).tolist()

    def one(run: tuple[int, int]) -> None:
        first, stop = run
        path = path_of(int(episodes[first]))
        decoder = decoders.take(path)
        try:
            decoder.read(frames[first:stop].tolist(), out[first:stop])
        except (OSError, ValueError, ArithmeticError, RuntimeError) as error:
            decoder.close()
            if isinstance(error, CorruptError):
                raise
            raise CorruptError(f"{path} can't be read: {error}") from error
        decoders.give_back(decoder)

    in_threads(one, list(itertools.pairwise(cuts)), 1)
