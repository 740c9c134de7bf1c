"""The writing side of a Zarr group.

Not here: the log (common/writer.py), arrays (columns.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ringmap.errors import InputError
from ringmap.formats.common.log import Record
from ringmap.formats.common.table_mark import refuse_other_table
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.zarr import Zarr
from ringmap.formats.zarr.columns import (
    CHUNK_NBYTES,
    create,
    episode_ends,
    extend,
    has_its_table,
    open_group,
)

__all__ = ["ZarrWriter"]


class ZarrWriter(EpisodeWriter):
    """Writes episodes to a Zarr group. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`.

    Args:
        level: of compression (Blosc, zstd), 1 to 9; None for none.
        chunk_nbytes: about how large a chunk of a column is before compression.

    Raises:
        InputError: an option is wrong.

    Example:
        >>> import os, tempfile, zarr
        >>> path = os.path.join(tempfile.mkdtemp(), "demo.zarr")
        >>> with ZarrWriter(path) as writer:
        ...     writer.write_episodes([{"reward": [0.0, 1.0]}, {"reward": [2.0]}])
        >>> zarr.open_group(path, mode="r")["meta/episode_ends"][:].tolist()
        [2, 3]
    """

    format = Zarr
    files = r"(data|meta)/.*|zarr\.json|\.z.*"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        level: int | None = 1,
        chunk_nbytes: int = CHUNK_NBYTES,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if chunk_nbytes <= 0:
            raise InputError(f"ZarrWriter: chunk_nbytes must be positive, got {chunk_nbytes}")
        if level is not None and not 1 <= level <= 9:
            raise InputError(f"ZarrWriter: level must be 1 to 9 or None, got {level}")
        self._chunk_nbytes, self._level = chunk_nbytes, level

    def resume(self, dataset: Any) -> None:
        """Raise if another program has changed which episodes there are."""
        group = None if dataset is None else open_group(self.path)
        if group is not None and not has_its_table(group, episode_ends(group, self.path)):
            raise refuse_other_table(self.path)

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write a new dataset."""
        create(path)
        self.extend(episodes, path)

    def extend(self, episodes: Iterable[Record], path: str) -> None:
        """Add episodes: rows, then lengths."""
        extend(path, episodes, self._chunk_nbytes, self._level)
