"""One episode as a file: HDF5, mp4, or a strip of pictures.

Invariants: the file is made in a temporary folder, or in memory; nothing of it remains.
Not here: whole buffers (`ringmap dump`).
"""

from __future__ import annotations

import io
import os
import tempfile
from typing import Any

from ringmap.errors import InputError
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.formats.media.images import sheet, shown, spread
from ringmap.formats.media.videos import write_video
from ringmap.formats.registry import get_format
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.viewer.drawing import kind_of
from ringmap.viewer.limits import MOST_NBYTES, TooLargeError
from ringmap.viewer.open_dataset import OpenDataset

__all__ = ["download"]

_FPS, _STRIP = 15, 12


def download(opened: OpenDataset, name: int, kind: str, column: str | None) -> tuple[bytes, str, str]:
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
        at = spread(length, _STRIP)
        _small(len(at), [spec])
        pictures = [source.read(name, t, t + 1, [spec.name])[spec.name][0] for t in at]
        return sheet([list(map(shown, pictures))]), "image/png", f"{stem}.png"
    if kind == "mp4":
        _small(length, [spec])
        video = io.BytesIO()
        write_video(video, _FPS, map(shown, source.read(name, 0, length, [spec.name])[spec.name]))
        return video.getvalue(), "video/mp4", f"{stem}.mp4"
    raise InputError(f"as: expected hdf5, mp4 or png, got {kind!r}")


def _pictures(opened: OpenDataset, column: str | None) -> ColumnSpec:
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
