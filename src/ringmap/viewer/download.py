"""One episode as a file: HDF5, mp4, or a strip of pictures.

Invariants: the file is made in a temporary folder, or in memory; nothing of it remains.
Not here: whole buffers (`ringmap dump`).
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.extras import require
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.formats.media.films import Encoding, FilmWriter
from ringmap.formats.media.images import enlarged, rgb
from ringmap.formats.registry import get_format
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.viewer.drawing import channels_last, kind_of, strip
from ringmap.viewer.limits import MOST_NBYTES, TooLargeError
from ringmap.viewer.opened import Opened

__all__ = ["download"]

_FPS, _SMALLEST, _STRIP = 15, 192, 12


def download(opened: Opened, name: int, kind: str, column: str | None) -> tuple[bytes, str, str]:
    """Return an episode as a file: its bytes, its media type, its name.

    Args:
        opened: the place.
        name: the episode's id.
        kind: "hdf5", "mp4" or "png".
        column: of pictures; None: the first.

    Raises:
        InputError: no such kind, or no pictures.
        TooLargeError: more than 64 MiB.
        MissingExtraError: a video, and PyAV is not installed.
    """
    source = opened.source
    number = source.number_of(name)
    stem = f"episode-{number}"
    _, lengths = source.spans()
    length = int(lengths[min(number, len(lengths) - 1)])
    if kind == "hdf5":
        _small(length, list(source.columns))
        steps: dict[str, Any] = dict(source.read(name, 0, length, [c.name for c in source.columns]))
        data = source.data(name)
        with tempfile.TemporaryDirectory(prefix="ringmap-view-") as folder:
            path = os.path.join(folder, "episode.h5")
            with get_format("hdf5").open_writer(path) as writer:
                writer.write_episode({**steps, **({EPISODE_DATA_KEY: data} if data else {})})
            with open(path, "rb") as file:
                return file.read(), "application/x-hdf5", f"{stem}.h5"
    spec = _pictures(opened, column)
    if kind == "png":
        at = np.unique(np.linspace(0, max(0, length - 1), min(_STRIP, length)).round().astype(int))
        _small(len(at), [spec])
        shown = [source.read(name, t, t + 1, [spec.name])[spec.name][0] for t in at.tolist()]
        return strip(np.stack(shown)), "image/png", f"{stem}.png"
    if kind == "mp4":
        require("video", "downloading a video")
        _small(length, [spec])
        frames = rgb(channels_last(source.read(name, 0, length, [spec.name])[spec.name]))
        with tempfile.TemporaryDirectory(prefix="ringmap-view-") as folder:
            path = os.path.join(folder, "episode.mp4")
            with FilmWriter(path, Encoding(fps=_FPS, keyframes=None)) as film:
                for frame in frames:
                    film.add(enlarged(frame, _SMALLEST))
            with open(path, "rb") as file:
                return file.read(), "video/mp4", f"{stem}.mp4"
    raise InputError(f"as: expected hdf5, mp4 or png, got {kind!r}")


def _pictures(opened: Opened, column: str | None) -> ColumnSpec:
    for spec in opened.source.columns:
        if kind_of(spec)[0] == "picture" and column in (None, spec.name):
            return spec
    raise InputError("there are no pictures" + (f" in a column {column!r}" if column else ""))


def _small(length: int, specs: list[ColumnSpec]) -> None:
    nbytes = length * sum(spec.row_nbytes for spec in specs)
    if nbytes > MOST_NBYTES:
        raise TooLargeError(
            f"an episode of {nbytes:,} bytes; at most {MOST_NBYTES:,} are downloaded: use `ringmap convert`"
        )
