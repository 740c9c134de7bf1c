"""Frames to a video file and back, by PyAV.

    frames (T, H, W, C) -> padded to even sizes -> encoder -> ep_0.mp4
    ep_0.mp4 -> seek to the keyframe before -> decode -> cropped to (H, W)

| pixel format of the file | read as |
| --- | --- |
| grey of up to 8 bits | uint8, 1 channel, or repeated |
| colour of up to 8 bits | uint8, RGB: 3 channels, 4 with alpha |
| grey of 9 to 16 bits | uint16, 1 channel: the file's numbers |
| RGB of 9 to 16 bits | uint16, 3 channels, 4 with alpha: the file's numbers |
| YUV of 9 to 16 bits | uint16, 3 channels, 4 with alpha: as RGB of 16 bits; or 1 channel, the numbers of its luma |
| all else | refused by name |

Invariants: with keyframes, frame t is at pts t, in decoding order (no B-frames), a keyframe every `KEYFRAMES`.
A decoder that a fork copied is never used nor closed: closing it would wait for threads that are not there.
Not here: which frames a batch needs (each format).
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, RingmapError, UnsupportedError
from ringmap.extras import require
from ringmap.formats.common.untrusted import LARGEST_PICTURE, kind_at, open_binary
from ringmap.formats.media.images import Picture, enlarged, in_threads, misfit, refuse_unheld
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.system import NotAFileError

__all__ = [
    "Decoder",
    "Decoders",
    "Encoding",
    "VideoWriter",
    "copy_frames",
    "decode_runs",
    "encode_video",
    "write_video",
]

Array = np.ndarray[Any, np.dtype[Any]]

KEYFRAMES = 8
"""Frames from one keyframe to the next: a clip decodes at most so many frames in vain. 16 would save 10 % of the
bytes and cost 30 % more time per clip."""

MAX_DECODERS = 64
"""Videos that a dataset keeps open in a process."""

_inherited: list[Any] = []
"""Decoders that a forked child got from its parent."""

_RATE_MOST = 10_000

SMALLEST = 16
"""Encoders refuse smaller pictures; they are padded to this."""

_SEEN = 192
"""Players blur enlarged frames: smaller ones are enlarged here, each pixel as a square."""

_PIXELS = {
    ("uint8", 1): "rgb24",
    ("uint8", 3): "rgb24",
    ("uint16", 1): "gray16be",
    ("uint16", 3): "rgb48be",
}
"""dtype and channels of frames -> the pixel format in which an encoder is given them.

Grey of 8 bits goes as RGB: encoders and decoders differ in the range that they take grey's values to have."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How videos are encoded.

    Args:
        codec: as PyAV names it.
        crf: quality, 0 to 51: less is better.
        fps: frames per second that a player shows, as near as a video can state it: FFmpeg's ratios are of 32 bits.
        lossless: keep every value: RGB instead of YUV, and quantizer 0.
        keyframes: frames from one keyframe to the next, in decoding order; None: as the codec likes, which is smaller,
            for a file that is only played.
    """

    codec: str = "libx264"
    crf: int = 18
    fps: Fraction | int = 30
    lossless: bool = False
    keyframes: int | None = KEYFRAMES


class VideoWriter:
    """A video that is being encoded, frame by frame, all of one size. Use it in a `with` block.

    Args:
        file: a path or a file object.
        encoding: how.
        pixels: of the frames; what has 16 bits is stored without loss, each frame as a PNG.

    Raises:
        av.FFmpegError (an OSError or ValueError): the codec is not there, or refuses its options.
    """

    def __init__(self, file: Any, encoding: Encoding, pixels: str = "rgb24") -> None:
        import av

        near = Fraction(encoding.fps).limit_denominator(_RATE_MOST)
        rate = min(max(near, Fraction(1, _RATE_MOST)), Fraction(_RATE_MOST))
        self._frame_s, self._number, self._pixels = 1 / rate, 0, pixels
        codec, options, stored = encoding.codec, {"crf": str(encoding.crf)}, "yuv420p"
        if pixels != "rgb24":
            # FFV1 is as small, takes five times as long to decode, and goes into no mp4 before FFmpeg 7.
            codec, stored = "png", pixels
            options = {"pred": "mixed", "compression_level": "1"}
        elif encoding.lossless:
            codec, options, stored = "libx264rgb", {"qp": "0"}, "rgb24"
        self._container: Any = av.open(file, "w", format="mp4")
        stream: Any = self._container.add_stream(codec, rate=rate, options=options)
        stream.pix_fmt = stored
        if encoding.keyframes is not None:
            stream.codec_context.gop_size = encoding.keyframes
            stream.codec_context.max_b_frames = 0
        stream.codec_context.time_base = self._frame_s
        self._stream = stream

    def add(self, picture: Array) -> None:
        """Add a frame, (H, W, 1 or 3), of the dtype that the pixels have."""
        import av

        height, width = (max(SMALLEST, n + n % 2) for n in picture.shape[:2])
        pad = ((0, height - picture.shape[0]), (0, width - picture.shape[1]))
        if not self._number:
            self._stream.height, self._stream.width = height, width
        if pad != ((0, 0), (0, 0)):
            picture = np.pad(picture, (*pad, (0, 0)), mode="edge")
        channels = picture[..., 0] if self._pixels == "gray16be" else picture
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(channels), self._pixels)
        frame.pts, frame.time_base = self._number, self._frame_s
        self._number += 1
        self._container.mux(self._stream.encode(frame))

    def show(self, picture: Array) -> None:
        """Add a frame (H, W, 3), large enough to be seen."""
        self.add(enlarged(picture, _SEEN))

    def close(self) -> None:
        """Finish the file."""
        if self._number:
            self._container.mux(self._stream.encode())
        self._container.close()

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode_video(file: Any, frames: Array, encoding: Encoding) -> None:
    """Write `frames`, (T, H, W, 1 or 3), uint8 or uint16, as `VideoWriter` does.

    Raises:
        InputError: they are of another kind.
    """
    refuse_unheld("lossless video", frames)
    pixels = _PIXELS[str(frames.dtype), frames.shape[3]]
    with VideoWriter(file, encoding, pixels) as video:
        for picture in np.broadcast_to(frames, (*frames.shape[:3], 3)) if pixels == "rgb24" else frames:
            video.add(picture)


def write_video(file: Any, fps: int, pictures: Iterable[Array]) -> None:
    """Write a video that is only played, of pictures (H, W, 3) uint8, large enough to be seen.

    Raises:
        MissingExtraError: PyAV is not installed.
    """
    with open_video(file, fps) as video:
        for picture in pictures:
            video.show(picture)


def open_video(file: Any, fps: int) -> VideoWriter:
    """Begin such a video, for `VideoWriter.show`.

    Raises:
        MissingExtraError: PyAV is not installed.
    """
    require("video", "writing a video")
    return VideoWriter(file, Encoding(fps=fps, keyframes=None))


class Decoder:
    """A video file that stays open, or one whose bytes are given, and `path` what to call it. One thread at a time.

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
            )
            self._stream: Any = self._container.streams.video[0]
            self._stream.codec_context.options = {"max_pixels": str(LARGEST_PICTURE)}
            context = self._stream.codec_context
            height, width, kind = context.height, context.width, context.format
        except (OSError, ValueError, IndexError) as error:
            raise CorruptError(f"{path} can't be read: {error}") from error
        if kind is None or height * width > LARGEST_PICTURE:
            self._container.close()
            raise CorruptError(
                f"{path}: frames of {width} by {height} pixels, expected at most {LARGEST_PICTURE:,} in all"
                if kind is not None
                else f"{path}: does not say of what its frames are made"
            )
        self._stream.codec_context.thread_count = 1  # clips are what runs in parallel
        self._frames: Any = None
        self._next = 0
        self._start = self._stream.start_time or 0
        self._ticks = Fraction(1)
        if self._stream.average_rate and self._stream.time_base:
            self._ticks = 1 / (self._stream.average_rate * self._stream.time_base)

    @property
    def picture(self) -> Picture:
        """What a frame is, by the file's own bits.

        Raises:
            UnsupportedError: its values would be changed.
        """
        context = self._stream.codec_context
        return _picture(context.format, context.height, context.width, self.path)

    @property
    def bits(self) -> int:
        """Bits of a value in the file."""
        return int(max(part.bits for part in self._stream.codec_context.format.components))

    def read(self, numbers: list[int], out: Array) -> None:
        """Decode frames, in ascending order, into `out`, (len(numbers), H, W, C), cropped to its size.

        Raises:
            CorruptError: there is no such frame, or `out` can't hold its values.
            UnsupportedError: its values would be changed.
        """
        height, width, channels = out.shape[1:]
        spec = ColumnSpec(self.path, (height, width, channels), out.dtype)
        for into, number in zip(out, numbers, strict=True):
            frame = self._frame(number)
            found = _picture(frame.format, frame.height, frame.width, self.path)
            grey = channels == 1 and found.channels == 3  # as we store it; or numbers in luma
            if misfit(replace(found, channels=1) if grey else found, spec, cropped=True):
                raise CorruptError(
                    f"{self.path}: frames of {found}, expected {spec.dtype} {spec.shape}, or larger ones"
                )
            values = _values(frame, found, grey)[:height, :width]
            if grey and (values != values[..., :1]).any() and found.how == "rgb":
                raise CorruptError(f"{self.path}: frames in colours, expected grey ones")
            into[...] = values[..., :channels]

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

    def packets(self, first: int, count: int) -> bytes | None:
        """Return a video of `count` frames from number `first` on, its packets as they are: the file's own bytes, if
        that is all of it. None if they can't be decoded without others, or are not there."""
        if not first and self._stream.frames == count:
            with open_binary(self.path) as file:
                return file.read()
        import av

        self._frames = None
        self._container.seek(self._start + int(first * self._ticks), stream=self._stream)
        chosen: list[Any] = []
        for packet in self._container.demux(self._stream):
            if packet.pts is None:
                break
            number = round((packet.pts - self._start) / self._ticks)
            if not chosen and number == first and not packet.is_keyframe:
                return None
            if first <= number < first + count:
                chosen.append(packet)
            elif chosen:  # a frame of others among them: frames of both refer to each other
                return None
            if len(chosen) == count:
                break
        if len(chosen) != count or not chosen[0].is_keyframe:
            return None
        made, begin = io.BytesIO(), min(packet.pts for packet in chosen)
        with av.open(made, "w", format="mp4") as container:
            stream: Any = container.add_stream_from_template(self._stream, opaque=True)
            for packet in chosen:
                packet.pts, packet.dts, packet.stream = packet.pts - begin, packet.dts - begin, stream
                container.mux(packet)
        return made.getvalue()

    def close(self) -> None:
        """Give the file back."""
        self._frames = None
        self._container.close()


def _picture(kind: Any, height: int, width: int, where: str) -> Picture:
    """Return what frames of a pixel format are, and in `how` whether its planes are "gray", "rgb" or "yuv"."""
    found = _planes_of(kind.name)
    if found is None:
        raise UnsupportedError(f"{where}: frames of {kind.name}, whose values would be changed; convert it")
    return Picture(height, width, *found)


@functools.cache
def _planes_of(name: str) -> tuple[int, np.dtype[Any], str] | None:
    """Return the channels, the dtype and the planes of a pixel format, None if its values would be changed."""
    import av

    kind = av.VideoFormat(name)
    bits = max(part.bits for part in kind.components)
    alpha = any(part.is_alpha for part in kind.components)
    colours = len(kind.components) - alpha
    mixed = kind.has_palette or re.search("^bayer|f(16|32)", name)
    if mixed or bits > 16 or (colours, alpha) not in ((1, False), (3, False), (3, True)):
        return None
    how = "gray" if colours == 1 else "rgb" if kind.is_rgb else "yuv"
    return colours + alpha, np.dtype(np.uint8 if bits <= 8 else np.uint16), how


def _values(frame: Any, found: Picture, luma: bool) -> Array:
    """Return the values of a frame, (H, W, C); with `luma`, of YUV of more than 8 bits that alone."""
    if found.dtype == np.uint8:
        if found.how == "gray":
            return np.asarray(frame.to_ndarray(format="gray"))[..., None]
        return np.asarray(frame.to_ndarray(format="rgba" if found.channels == 4 else "rgb24"))
    planes, name = list(frame.planes), frame.format.name
    little = not name.endswith("be")
    if found.how == "gray" or (found.how == "yuv" and luma):
        return _plane(planes[0], found.width, 1, little)
    if name.startswith("gbr"):
        parts = [_plane(planes[at], found.width, 1, little) for at in (2, 0, 1, 3)[: len(planes)]]
        return np.concatenate(parts, axis=-1)
    packed = frame.reformat(format="rgba64le" if found.channels == 4 else "rgb48le")
    return _plane(packed.planes[0], found.width, found.channels, True)


def _plane(plane: Any, width: int, channels: int, little: bool) -> Array:
    rows = np.frombuffer(plane, "<u2" if little else ">u2").reshape(plane.height, plane.line_size // 2)
    return rows[:, : width * channels].reshape(plane.height, width, channels)


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


def copy_frames(decoders: Decoders, path: str, first: int, count: int) -> bytes | None:
    """Return frames of a video as a video, not decoded; see `Decoder.packets`."""
    decoders.of_process()
    decoder = decoders.take(path)
    try:
        found = decoder.packets(first, count)
    except BaseException:
        decoder.close()
        raise
    decoders.give_back(decoder)
    return found


def decode_runs(decoders: Decoders, out: Array, episodes: Array, frames: Array, path_of: Callable[[int], str]) -> None:
    """Decode frame `frames[i]` of `path_of(episodes[i])` into `out[i]`, (H, W, C) each: an episode's in one go, in
    parallel. Those of an episode lie together, and ascend.

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
            if isinstance(error, RingmapError):
                raise
            raise CorruptError(f"{path} can't be read: {error}") from error
        decoders.give_back(decoder)

    in_threads(one, list(itertools.pairwise(cuts)), 1)
