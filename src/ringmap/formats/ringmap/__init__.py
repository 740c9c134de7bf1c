"""The ringmap format: a buffer's own directory, read as a dataset without conversion.

What is read is the buffer as it was when it was opened. To write one, make a `ReplayBuffer` with
`path=`; its writer may be at work meanwhile.
Not here: the files (storage/), live reading (`ReplayBuffer.open`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringmap.formats.base import Format
from ringmap.formats.registry import register_format

if TYPE_CHECKING:
    from ringmap.datasets.stored import StoredDataset

__all__ = ["Ringmap"]


@register_format
class Ringmap(Format):
    """Buffers on disk. Read-only."""

    name = "ringmap"
    supports_episode_data = True

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the manifest and the table of episodes."""
        folder = os.fspath(path)
        return all(
            os.path.isfile(os.path.join(folder, f)) for f in ("manifest.json", "episodes.npy")
        )

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> StoredDataset:
        """Return the episodes that a buffer holds now.

        Args:
            path: the buffer's directory.
            options: `num_steps, frameskip, transform, layout, keys_to_load, keys_to_cache,
                keys_to_merge` of `StoredDataset`.

        Raises:
            NotFoundError, UnknownFormatError, CorruptError, NewerVersionError: it can't be read.
        """
        from ringmap.datasets.stored import StoredDataset
        from ringmap.formats.ringmap.source import BufferSource

        return StoredDataset(BufferSource(path), **options)
