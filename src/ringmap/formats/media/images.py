"""Encode, decode and resize images with pillow, in parallel threads if that is faster (it releases the GIL).

Invariants: a decoded image has the requested shape: grey keeps its channel axis.
Not here: which columns are images (`ringmap.datasets.image_axes.is_image`), video.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ringmap.datasets.batch import worker
from ringmap.errors import CorruptError, InputError, RingmapError
from ringmap.formats.common.untrusted import LARGEST_PICTURE, open_binary
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.system import cores
from ringmap.storage.disk.threads import pool

__all__ = [
    "IMAGE_FORMATS", "LARGEST", "check_image_format", "decode_into", "encode", "enlarged", "in_threads", "is_picture",
    "opened", "resample_of", "resized", "rgb", "size_of",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]

IMAGE_FORMATS = ("png", "jpeg")

LARGEST = 65_000
"""The largest number of pixels along an axis that JPEG supports."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 1},  # level 6 takes 3 times as long for 5 % less
    "jpeg": {"format": "JPEG", "quality": 95, "subsampling": 0},
}

_MIN_PER_THREAD = 4

_WORTH_THREADS = 128 * 128
"""Pixels: threads that decode smaller images wait for the GIL more than they gain."""

_pool: tuple[int, int, ThreadPoolExecutor | None] | None = None


def check_image_format(given: str, where: str) -> str:
    """Return the name of an image format.

    Raises:
        InputError: there is no image format of that name.
    """
    name = {"jpg": "jpeg"}.get(given, given)
    if name not in IMAGE_FORMATS:
        raise InputError(f"{where}: image_format must be one of {IMAGE_FORMATS}, got {given!r}")
    return name


def encode(images: Array, image_format: str) -> list[bytes]:
    """Return each of `images`, (T, H, W, 1 or 3) uint8, as the bytes of a file."""
    from PIL import Image

    def one(image: Array) -> bytes:
        buffer = io.BytesIO()
        shown = image[..., 0] if image.shape[-1] == 1 else image
        Image.fromarray(shown).save(buffer, **_OPTIONS[image_format])
        return buffer.getvalue()

    # Two threads write JPEGs no faster than one, of any size.
    least = _MIN_PER_THREAD if image_format == "png" else len(images)
    return in_threads(one, list(images), least)


@contextlib.contextmanager
def opened(file: Any, what: str) -> Iterator[Any]:
    """Open an image, bytes or a path, in a `with` block: PNG or JPEG, regardless of its name.

    Pillow recognises formats by their first bytes, and supports some that run programs (EPS: Ghostscript).

    Raises:
        CorruptError: it is neither PNG nor JPEG, has too many pixels, or can't be decoded.
    """
    from PIL import Image

    where = what if isinstance(file, bytes | memoryview) else f"{what}: {file}"
    try:
        with (
            io.BytesIO(file) if isinstance(file, bytes | memoryview) else open_binary(file) as raw,
            Image.open(raw, formats=("PNG", "JPEG")) as image,
        ):
            # Pillow's own bound is higher, and only warns at first.
            if image.width * image.height > LARGEST_PICTURE:
                raise CorruptError(
                    f"{where}: a picture of {image.width} by {image.height} pixels, expected at most "
                    f"{LARGEST_PICTURE:,} in all"
                )
            yield image
    except (RingmapError, FileNotFoundError):
        raise
    except Exception as error:  # of every kind, by format
        raise CorruptError(f"{where} can't be decoded: {error}") from error


def size_of(file: Any, what: str) -> tuple[int, int, int]:
    """Return height, width and channels (1 or 3) of an image, bytes or a path; errors as for `opened`."""
    with opened(file, what) as image:
        return image.height, image.width, 1 if image.mode in ("L", "1") else 3


def decode_into(out: Array, files: Sequence[Any], spec: ColumnSpec) -> None:
    """Decode `files` (bytes or paths) into `out`, (len(files), H, W, C).

    Raises:
        CorruptError: one has another size, or is not an image.
    """

    def one(item: tuple[Array, Any]) -> None:
        into, file = item
        where = "" if isinstance(file, bytes | memoryview) else f" in {file}"
        with opened(file, f"column {spec.name!r}") as image:
            if (image.height, image.width) != spec.shape[
                :2
            ]:  # before any memory is allocated for its pixels
                raise CorruptError(
                    f"column {spec.name!r}: an image of {(image.height, image.width)}, expected "
                    f"{spec.shape[:2]}{where}"
                )
            mode = "L" if spec.shape[-1] == 1 else "RGB"
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        into[...] = pixels[..., None] if spec.shape[-1] == 1 else pixels

    large = math.prod(spec.shape[:2]) >= _WORTH_THREADS
    in_threads(one, list(zip(out, files, strict=True)), _MIN_PER_THREAD if large else len(files))


def is_picture(value: Any) -> bool:
    """Return whether this is a picture: uint8, (H, W) or (H, W, 1, 3 or 4)."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4)))
    )


def rgb(pictures: Array) -> Array:
    """Return pictures (..., H, W, 1, 3 or 4) with three channels."""
    return np.repeat(pictures, 3, axis=-1) if pictures.shape[-1] == 1 else pictures[..., :3]


def enlarged(pictures: Array, least: int) -> Array:
    """Return pictures (..., H, W, C) with no side shorter than `least`, each pixel as a square."""
    factor = max(1, -(-least // min(pictures.shape[-3:-1])))
    return pictures.repeat(factor, axis=-3).repeat(factor, axis=-2)


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
        raise InputError(
            f"image_resample: expected one of {list(known)} or PIL's constant, got {given!r}"
        )
    return int(found)


def resized(frame: Array, shape: tuple[int, int], resample: int) -> Array:
    """Return a picture (H, W, C) or (H, W), uint8, in another size (H, W)."""
    if frame.shape[:2] == shape:
        return frame
    from PIL import Image

    flat = frame[..., 0] if frame.ndim == 3 and frame.shape[2] == 1 else frame
    made = np.asarray(Image.fromarray(flat).resize(shape[::-1], Image.Resampling(resample)))
    return made[..., None] if made.ndim < frame.ndim else made


def in_threads(
    call: Callable[[Any], Any], items: list[Any], least: int = _MIN_PER_THREAD
) -> list[Any]:
    """Return the result of `call` for each item, in order, with one thread per core available to this process.

    Args:
        call: releases the GIL most of the time.
        items: its arguments.
        least: the number of items that are worth a thread.
    """
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
