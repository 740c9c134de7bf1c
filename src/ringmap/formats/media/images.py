"""What a picture is, for every format, page and video: by its column, and by the header of its file.

    column     uint8 or uint16, (H, W, C), C = 1, 3 or 4     `ringmap.datasets.episode.is_image`: its axes are turned
    codec      the dtypes and channels that it stores exactly as pictures, or as its documented loss      `holds`
    header     of a PNG, JPEG or TIFF -> `Picture`: size, channels, dtype, by the file's own bits         `picture_of`
    shown      (H, W), (H, W, C) or (C, H, W), uint8 -> (H, W, 3), and sheets of them                     `axes_of`,
    `shown`

| header | read as |
| --- | --- |
| grey of 1 to 8 bits | uint8, 1 channel |
| grey of 12 or 16 bits | uint16, 1 channel |
| grey of 32 bits, floating point (TIFF) | float32, 1 channel |
| colour of 8 bits, with or without a palette | uint8, 3 channels, 4 with alpha |
| colour of 16 bits (PNG) | uint16, 3 channels, 4 with alpha; FFmpeg decodes it, since Pillow narrows it to 8 bits |
| all else | refused by name |

Invariants: no value is narrowed: a picture is decoded into its own dtype and channels; grey may be repeated to three.
Pictures are encoded and decoded in parallel threads if that is faster: Pillow releases the GIL.
Not here: video (videos.py).
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.datasets.batch import worker
from ringmap.errors import CorruptError, InputError, RingmapError, UnsupportedError
from ringmap.extras import require
from ringmap.formats.common.untrusted import LARGEST_PICTURE, open_binary
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.process import pool
from ringmap.storage.disk.system import cores

__all__ = [
    "Picture",
    "axes_of",
    "channels_last",
    "check_image_format",
    "decode_into",
    "encode",
    "enlarged",
    "holds",
    "in_threads",
    "is_frame",
    "misfit",
    "picture_of",
    "refuse_unheld",
    "resample_of",
    "resized",
    "sheet",
    "shown",
    "spread",
]

Array = np.ndarray[Any, np.dtype[Any]]

IMAGE_FORMATS = ("png", "jpeg")

_U8, _U16, _F32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.float32)

_HELD: dict[str, set[tuple[np.dtype[Any], int]]] = {
    "jpeg": {(_U8, 1), (_U8, 3)},
    "png": {(_U8, 1), (_U8, 3), (_U8, 4), (_U16, 1)},
    "video": {(_U8, 1), (_U8, 3)},
    "lossless video": {(_U8, 1), (_U8, 3), (_U16, 1), (_U16, 3)},
}
"""Codec -> the pictures that it is given; in other ways than its documented loss it changes none of these."""

_LONGEST = 65_000
"""The largest number of pixels along an axis that JPEG supports."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 1},  # level 6 takes 3 times as long for 5 % less
    "jpeg": {"format": "JPEG", "quality": 95, "subsampling": 0},
}

_KINDS: dict[tuple[str, str], tuple[int, np.dtype[Any], str]] = {
    ("1", "1"): (1, _U8, "L"),
    ("1", "1;R"): (1, _U8, "L"),
    ("L", "L"): (1, _U8, ""),
    ("L", "L;R"): (1, _U8, ""),
    ("L", "L;2"): (1, _U8, ""),
    ("L", "L;4"): (1, _U8, ""),
    ("LA", "LA"): (4, _U8, "RGBA"),
    ("RGB", "RGB"): (3, _U8, ""),
    ("RGBA", "RGBA"): (4, _U8, ""),
    ("I;16", "I;16B"): (1, _U16, ""),
    ("I;16", "I;16"): (1, _U16, ""),
    ("I;16", "I;16N"): (1, _U16, ""),
    ("I;16", "I;16R"): (1, _U16, ""),
    ("I;16", "I;12"): (1, _U16, ""),
    ("I;16B", "I;16B"): (1, _U16, ""),
    ("I;16B", "I;16N"): (1, _U16, ""),
    ("F", "F;32F"): (1, _F32, ""),
    ("F", "F;32BF"): (1, _F32, ""),
    ("F", "F;32NF"): (1, _F32, ""),
    ("RGB", "RGB;16B"): (3, _U16, "rgb48be"),
    ("RGBA", "RGBA;16B"): (4, _U16, "rgba64be"),
    ("RGBA", "LA;16B"): (4, _U16, "ya16be"),
}
"""Pillow's mode and the raw mode of its decoder -> channels, dtype, and how: "": Pillow as it is, a mode: Pillow
converts to it
without loss, a pixel format: FFmpeg, since Pillow's raw mode narrows. What is not listed would be changed."""

_READ = "read are PNG, JPEG, and TIFF, grey of up to 16 bits or float32, and colour of 8 bits, of PNG up to 16"

_MAGIC = {
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"GIF8": "GIF",
    b"RIFF": "WebP",
    b"v/1\x01": "EXR",
}

_MIN_PER_THREAD = 4

_WORTH_THREADS = 128 * 128
"""Pixels: threads that decode smaller images wait for the GIL more than they gain."""

_pool: tuple[int, int, ThreadPoolExecutor | None] | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """What the header of a picture, or of a video, says: its size, its channels, and the dtype that holds its
    values."""

    height: int
    width: int
    channels: int
    dtype: np.dtype[Any]
    how: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return self.height, self.width, self.channels

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


# -- columns --------------------------------------------------------------------------------------


def holds(codec: str, spec: ColumnSpec) -> bool:
    """Return whether a codec stores the values of a column as pictures: "png", "jpeg", "video" or "lossless video"."""
    if len(spec.shape) != 3 or (spec.dtype, spec.shape[2]) not in _HELD[codec]:
        return False
    height, width, _ = spec.shape
    sides = min(height, width) > 0 and max(height, width) <= _LONGEST
    return sides and height * width <= LARGEST_PICTURE


def refuse_unheld(codec: str, images: Array) -> None:
    """Raise InputError unless a codec stores the values of images (T, H, W, C)."""
    if not holds(codec, ColumnSpec("", images.shape[1:], images.dtype)):
        raise InputError(
            f"pictures of {images.dtype} {images.shape[1:]} can't be written as {codec}; convert the dataset into a "
            "new one, where they are numbers"
        )


def misfit(found: Picture, spec: ColumnSpec, cropped: bool = False) -> bool:
    """Return whether a picture is not one of a column: of another size, or with values that the column can't hold."""
    height, width, channels = spec.shape
    size = (found.height < height or found.width < width) if cropped else (found.height, found.width) != (height, width)
    return size or found.dtype != spec.dtype or (found.channels != channels and (found.channels, channels) != (1, 3))


def check_image_format(given: str, where: str) -> str:
    """Return the name of an image format.

    Raises:
        InputError: there is no image format of that name.
    """
    name = {"jpg": "jpeg"}.get(given, given)
    if name not in IMAGE_FORMATS:
        raise InputError(f"{where}: image_format must be one of {IMAGE_FORMATS}, got {given!r}")
    return name


# -- files ----------------------------------------------------------------------------------------


def encode(images: Array, image_format: str) -> list[bytes]:
    """Return each of `images`, (T, H, W, C), as the bytes of a file.

    Raises:
        InputError: the format does not hold them; a dataset of another program may have such.
    """
    from PIL import Image

    refuse_unheld(image_format, images)

    def one(image: Array) -> bytes:
        buffer = io.BytesIO()
        pixels = image[..., 0] if image.shape[-1] == 1 else image
        Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, **_OPTIONS[image_format])
        return buffer.getvalue()

    # Two threads write JPEGs no faster than one, of any size.
    least = _MIN_PER_THREAD if image_format == "png" else len(images)
    return in_threads(one, list(images), least)


@contextlib.contextmanager
def _opened(file: Any, what: str) -> Iterator[tuple[Any, Picture, str]]:
    """Open a picture, bytes or a path, in a `with` block, whatever its name says: yield it, its header, and what to
    call it.

    Pillow recognises formats by their first bytes, and supports some that run programs (EPS: Ghostscript)."""
    from PIL import Image, UnidentifiedImageError

    where = what if isinstance(file, bytes | memoryview) else f"{what}: {file}"
    try:
        with (
            io.BytesIO(file) if isinstance(file, bytes | memoryview) else open_binary(file) as raw,
            Image.open(raw, formats=("PNG", "JPEG", "TIFF")) as image,
        ):
            tags = getattr(image, "tag_v2", {})
            # Pillow's own bound is higher, and only warns at first; a decoder makes room for a whole tile.
            tile = int(tags.get(322, 1)) * int(tags.get(323, 1))
            if max(image.width * image.height, tile) > LARGEST_PICTURE:
                raise CorruptError(
                    f"{where}: a picture of {image.width} by {image.height} pixels, expected at most "
                    f"{LARGEST_PICTURE:,} in all"
                )
            yield image, _header(image, tags, where), where
    except (RingmapError, FileNotFoundError):
        raise
    except UnidentifiedImageError as error:
        kind = _named(file)
        if kind:
            raise UnsupportedError(f"{where}: a {kind} that is not read as it is: {_READ}; convert it") from error
        raise CorruptError(f"{where} can't be decoded: {error}") from error
    except Exception as error:  # of every kind, by format
        raise CorruptError(f"{where} can't be decoded: {error}") from error


def _named(file: Any) -> str:
    """Return the name of a format whose pictures Pillow does not read, or we do not ask it to; "" of what is none."""
    if isinstance(file, bytes | memoryview):
        head = bytes(file[:4])
    else:
        with open_binary(file) as raw:
            head = raw.read(4)
    return _MAGIC.get(head, "")


def _header(image: Any, tags: Any, where: str) -> Picture:
    """Return what an open image is, by the bits that its file has."""
    args = image.tile[0][3] if image.tile else ""
    raw = args if isinstance(args, str) else args[0]
    if image.format in ("PNG", "TIFF") and getattr(image, "is_animated", False):
        raise UnsupportedError(f"{where}: a {image.format} of several frames, expected one; store each as a file")
    if image.mode == "P":
        mode = "RGBA" if "transparency" in image.info else "RGB"
        return Picture(image.height, image.width, len(mode), _U8, mode)
    signed = image.mode in ("L", "RGB", "RGBA") and any(n != 1 for n in np.atleast_1d(tags.get(339, 1)))
    known = None if signed else _KINDS.get((image.mode, raw))
    if known is None:
        kind = f"{image.mode}, stored as {'signed ' if signed else ''}{raw}"
        raise UnsupportedError(
            f"{where}: a {image.format} picture of mode {kind}, whose values would be changed: {_READ}; convert it"
        )
    return Picture(image.height, image.width, *known)


def picture_of(file: Any, what: str) -> Picture:
    """Return what the header of a picture, bytes or a path, says. Nothing is decoded.

    Raises:
        CorruptError: it is neither PNG, JPEG nor TIFF, or has too many pixels.
        UnsupportedError: its values would be changed.
    """
    with _opened(file, what) as (_, found, _):
        return found


def decode_into(out: Array, files: Sequence[Any], spec: ColumnSpec) -> None:
    """Decode `files` (bytes or paths) into `out`, (len(files), H, W, C), of the column's dtype.

    Raises:
        CorruptError: one has another size, dtype or number of channels than the column, or is not an image.
        UnsupportedError: its values would be changed.
        MissingExtraError: it is of colours of 16 bits, and PyAV is not installed.
    """

    def one(item: tuple[Array, Any]) -> None:
        into, file = item
        with _opened(file, f"column {spec.name!r}") as (image, found, where):
            if misfit(found, spec):  # before any memory is allocated for its pixels
                raise CorruptError(f"{where}: a picture of {found}, expected {spec.dtype} {spec.shape}")
            if found.how.endswith("be"):
                pixels = _wide(image, file, found, where)
            else:
                pixels = np.asarray(image.convert(found.how) if found.how else image)
            into[...] = pixels[..., None] if pixels.ndim == 2 else pixels

    large = math.prod(spec.shape[:2]) >= _WORTH_THREADS
    in_threads(one, list(zip(out, files, strict=True)), _MIN_PER_THREAD if large else len(files))


def _wide(image: Any, file: Any, found: Picture, where: str) -> Array:
    """Return the values of a PNG with colours of 16 bits, by FFmpeg."""
    require("video", f"{where}: colours of 16 bits")
    import av

    image.load()  # Pillow finds damage that FFmpeg passes over
    if not isinstance(file, bytes | memoryview):
        with open_binary(file) as raw:
            file = raw.read()
    decoder: Any = av.CodecContext.create("png", "r")
    (frame,) = decoder.decode(av.Packet(bytes(file)))
    if (frame.format.name, frame.height, frame.width) != (found.how, found.height, found.width):
        raise CorruptError(f"{where}: a picture of {frame.format.name}, expected {found.how}")
    rows = np.frombuffer(frame.planes[0], ">u2").reshape(found.height, -1)
    values = rows[:, : found.width * (2 if found.how == "ya16be" else found.channels)]
    values = values.reshape(found.height, found.width, -1)
    return values[..., [0, 0, 0, 1]] if found.how == "ya16be" else values


# -- what is shown --------------------------------------------------------------------------------


def axes_of(shape: Sequence[int], dtype: Any) -> str:
    """Return the axes of a picture that can be shown: "HWC", "CHW" or "HW"; "" where values of this shape and dtype are
    none.

    Two axes of numbers are a picture from 8 by 8 on, three from 2 by 2.

    Example:
        >>> axes_of((7, 7, 3), "uint8"), axes_of((3, 64, 64), "uint8")
        ('HWC', 'CHW')
        >>> axes_of((5, 5), "uint8"), axes_of((64, 64, 3), "float32")
        ('', '')
    """
    if dtype != _U8 or len(shape) not in (2, 3):
        return ""
    if len(shape) == 2:
        return "HW" if min(shape) >= 8 else ""
    if shape[2] in (1, 3, 4) and min(shape[:2]) >= 2:
        return "HWC"
    return "CHW" if shape[0] in (1, 3) and min(shape[1:]) >= 2 else ""


def is_frame(value: Any) -> bool:
    """Return whether this is a picture as environments draw them: (H, W) or (H, W, 1, 3 or 4)."""
    return isinstance(value, np.ndarray) and axes_of(value.shape, value.dtype) in ("HW", "HWC")


def channels_last(picture: Array) -> Array:
    """Return a picture of `axes_of` as (H, W, C)."""
    axes = axes_of(picture.shape, picture.dtype)
    return picture[..., None] if axes == "HW" else np.moveaxis(picture, 0, -1) if axes == "CHW" else picture


def shown(picture: Array) -> Array:
    """Return a picture of `axes_of` as (H, W, 3)."""
    picture = channels_last(picture)
    return np.repeat(picture, 3, axis=-1) if picture.shape[-1] == 1 else picture[..., :3]


def enlarged(picture: Array, least: int) -> Array:
    """Return a picture (H, W, C) with no side shorter than `least`, each pixel as a square."""
    factor = max(1, -(-least // min(picture.shape[:2])))
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)


def spread(length: int, most: int) -> list[int]:
    """Return up to `most` steps of `length`, evenly, the first and the last among them.

    Example:
        >>> spread(10, 4), spread(2, 4), spread(0, 4)
        ([0, 3, 6, 9], [0, 1], [])
    """
    return sorted({round(at) for at in np.linspace(0, max(0, length - 1), min(most, length)).tolist()})


def sheet(rows: Sequence[Sequence[Array]], captions: Sequence[str] = (), gap: int = 0) -> bytes:
    """Return a contact sheet as a PNG: a row of pictures (H, W, 3) of one size for each of `rows`, under its
    caption."""
    from PIL import Image, ImageDraw

    top = 14 if captions else 0
    height, width = rows[0][0].shape[:2]
    columns = max(map(len, rows))
    size = columns * (width + gap) + gap, len(rows) * (height + top + gap) + gap
    made = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(made)
    for number, pictures in enumerate(rows):
        y = gap + number * (height + top + gap)
        if captions:
            pen.text((gap, y), captions[number], fill="black")
        for i, picture in enumerate(pictures):
            made.paste(Image.fromarray(np.ascontiguousarray(picture)), (gap + i * (width + gap), y + top))
    file = io.BytesIO()
    made.save(file, **_OPTIONS["png"])
    return file.getvalue()


def resample_of(given: str | int | None) -> int:
    """Return PIL's constant of a resampling filter, by name ("nearest"), constant, or None (bilinear).

    Raises:
        InputError: there is no such filter.
    """
    from PIL import Image

    known = {member.name.lower(): int(member) for member in Image.Resampling}
    found = known.get(given.lower()) if isinstance(given, str) else given
    if given is None:
        return known["bilinear"]
    if found is None or found not in known.values():
        raise InputError(f"image_resample: expected one of {list(known)} or PIL's constant, got {given!r}")
    return int(found)


def resized(frame: Array, shape: tuple[int, int], resample: int) -> Array:
    """Return a picture (H, W, C) or (H, W), uint8, in another size (H, W)."""
    if frame.shape[:2] == shape:
        return frame
    from PIL import Image

    flat = frame[..., 0] if frame.ndim == 3 and frame.shape[2] == 1 else frame
    made = np.asarray(Image.fromarray(flat).resize(shape[::-1], Image.Resampling(resample)))
    return made[..., None] if made.ndim < frame.ndim else made


def in_threads(call: Callable[[Any], Any], items: list[Any], least: int = _MIN_PER_THREAD) -> list[Any]:
    """Return the result of `call` for each item, in order, with one thread per core available to this process."""
    pool, threads = _threads()
    size = max(least, -(-len(items) // threads))
    if pool is None or len(items) <= size:
        return [call(item) for item in items]

    def several(part: list[Any]) -> list[Any]:
        return [call(item) for item in part]

    jobs = [pool.submit(several, part) for part in _cut(items[size:], size)]
    done = several(items[:size])  # this thread takes the first share
    return done + [result for job in jobs for result in job.result()]


def _cut(items: list[Any], size: int) -> Iterator[list[Any]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _threads() -> tuple[ThreadPoolExecutor | None, int]:
    """Return the thread pool of this process, a new one after a fork; the workers of a loader share the cores."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        told = worker()
        share = max(1, cores() // (told.num_workers if told is not None else 1))
        threads = pool(share, "ringmap-images") if share > 1 else None
        _pool = (os.getpid(), share if threads is not None else 1, threads)
    return _pool[2], _pool[1]


def _drop_in_child() -> None:
    global _pool
    _pool = None  # its threads do not exist in the child


if hasattr(os, "register_at_fork"):
    with contextlib.suppress(RuntimeError):
        os.register_at_fork(after_in_child=_drop_in_child)
