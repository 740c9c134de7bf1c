"""The Zarr format: the layout of robot-learning code.

    DIR/
      data/<col>              (N, ...): all steps of all episodes, chunked by steps, compressed
      meta/episode_ends       (E,) int64: rows at which episodes end, exclusive

Zarr format 2, which diffusion-policy-style loaders read. zarr is imported when a dataset is opened.
Not here: arrays (columns.py), reading (reader.py), writing (writer.py).
"""

from __future__ import annotations

import os

from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.registry import register_format

__all__ = ["Zarr"]


@register_format
class Zarr(StoredFormat):
    """Datasets in Zarr groups. Lossless for every dtype that a buffer stores."""

    name = "zarr"
    lossless = True
    source = "ringmap.formats.zarr.reader:ZarrSource"
    writer = "ringmap.formats.zarr.writer:ZarrWriter"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `meta/episode_ends`."""
        folder = os.path.join(os.fspath(path), "meta", "episode_ends")
        return any(os.path.isfile(os.path.join(folder, f)) for f in (".zarray", "zarr.json"))
