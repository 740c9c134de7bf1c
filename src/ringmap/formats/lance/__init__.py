"""The Lance format: one row per step in a Lance dataset, made for random access.

    NAME.lance             episode_idx int32 | step_idx int32 | pixels binary (PNG) | action float32[2] ...
    NAME_episodes.lance    episode_idx int32 | seed int64 ...    one row per episode, if there is episode data

The layout of stable-worldmodel, with every dtype kept; `compat=True` writes theirs to the letter.
pylance is imported when a dataset is opened.
Not here: columns (columns.py), reading (reader.py), writing (writer.py).
"""

from __future__ import annotations

import os

from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.registry import register_format

__all__ = ["Lance"]


@register_format
class Lance(StoredFormat):
    """Datasets in Lance. Lossless; images as PNG, or JPEG by choice."""

    name = "lance"
    lossless = True
    source = "ringmap.formats.lance.reader:LanceSource"
    writer = "ringmap.formats.lance.writer:LanceWriter"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the folder of versions that every Lance dataset has."""
        return os.path.isdir(os.path.join(os.fspath(path), "_versions"))
