"""The Lance format: one row per step in a Lance dataset, made for random access.

    NAME.lance             episode_idx int32 | step_idx int32 | pixels binary (PNG) | action float32[2] ...
    NAME_episodes.lance    episode_idx int32 | seed int64 ...    one row per episode, if there is episode data

The layout of stable-worldmodel, with every dtype kept; `compat=True` writes theirs to the letter.
pylance is imported when a dataset is opened.
Not here: columns (layout.py), reading (source.py), writing (writer.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringmap.formats.base import Format
from ringmap.formats.registry import register_format

if TYPE_CHECKING:
    from ringmap.datasets.stored import StoredDataset
    from ringmap.formats.lance.writer import LanceWriter

__all__ = ["Lance"]


@register_format
class Lance(Format):
    """Datasets in Lance. Lossless; images as PNG, or JPEG by choice."""

    name = "lance"
    supports_episode_data = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the folder of versions that every Lance dataset has."""
        return os.path.isdir(os.path.join(os.fspath(path), "_versions"))

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> StoredDataset:
        """Return the dataset in a folder.

        Args:
            path: the folder NAME.lance.
            options: `num_steps, frameskip, transform, layout, keys_to_load, keys_to_cache,
                keys_to_merge` of `StoredDataset`.

        Raises:
            NotFoundError, UnknownFormatError, CorruptError: it can't be read.
        """
        from ringmap.datasets.stored import StoredDataset
        from ringmap.formats.lance.source import LanceSource

        return StoredDataset(LanceSource(path), **options)

    @classmethod
    def open_writer(cls, path: str | os.PathLike[str], **options: Any) -> LanceWriter:
        """Return a writer to a folder; see `LanceWriter` for its options and errors."""
        from ringmap.formats.lance.writer import LanceWriter

        return LanceWriter(path, **options)
