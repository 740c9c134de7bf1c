"""The ringmap format: a buffer's own directory, read as a dataset without conversion.

What is read is the buffer as it was when it was opened. To write one, make a `ReplayBuffer` with
`path=`; its writer may be at work meanwhile.
Not here: the files (storage/), live reading (`ReplayBuffer.open`).
"""

from __future__ import annotations

import os

from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.registry import register_format
from ringmap.storage.records.layout import MANIFEST, TABLE

__all__ = ["Ringmap"]


@register_format
class Ringmap(StoredFormat):
    """Buffers on disk. Read-only."""

    name = "ringmap"
    source = "ringmap.formats.ringmap.reader:BufferSource"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the manifest and the table of episodes."""
        folder = os.fspath(path)
        return all(os.path.isfile(os.path.join(folder, f)) for f in (MANIFEST, TABLE))
