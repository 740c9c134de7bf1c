"""The writing side of a Zarr group.

Not here: the log (common/staged.py), arrays (columns.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.errors import InputError, UnsupportedError
from ringmap.formats.common.log import FILE, Record
from ringmap.formats.common.staged import StagedWriter
from ringmap.formats.common.table_mark import refuse_other_table
from ringmap.formats.zarr import Zarr
from ringmap.formats.zarr.columns import (
    CHUNK_NBYTES,
    create,
    episode_ends,
    extend,
    find_columns,
    has_its_table,
    open_group,
)
from ringmap.storage.columns.schema import Schema

__all__ = ["ZarrWriter"]

Array = np.ndarray[Any, np.dtype[Any]]


class ZarrWriter(StagedWriter):
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
        self._options = {"chunk_nbytes": chunk_nbytes, "level": level}

    def _is_dataset(self, path: str) -> bool:
        return Zarr.detect(path)

    def _owns(self, relative: str) -> bool:
        head = relative.split(os.sep)[0]
        return head in ("data", "meta", "zarr.json", FILE, FILE + ".new") or head.startswith(".z")

    def _look(self, path: str) -> tuple[Array, Schema | None]:
        group = open_group(path)
        ends = episode_ends(group, path)
        found = find_columns(group, path, ends)
        for name, what in found.unsupported.items():
            raise UnsupportedError(
                f"ZarrWriter: {path}: column {name!r} is {what}; nothing can be appended to it: copy the others "
                "(convert) into a new dataset"
            )
        schema = Schema(tuple(c.spec for c in found.columns)) if found.columns and len(ends) else None
        return np.diff(ends, prepend=0), schema

    def _open(self, path: str) -> None:
        group = open_group(path) if path else None
        if group is not None and not has_its_table(group, episode_ends(group, path)):
            raise refuse_other_table(path)

    def _stored_facts(self, path: str) -> Facts:
        return Facts.stated(open_group(path)["meta"].attrs, PREFIX)

    def _notes(self) -> dict[str, Any]:
        return self._options

    def _export(self, path: str, episodes: Iterable[Record]) -> None:
        create(path)
        extend(path, episodes)

    def _extend(self, path: str, episodes: Iterable[Record]) -> None:
        extend(path, episodes)
