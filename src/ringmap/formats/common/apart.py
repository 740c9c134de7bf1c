"""A writer that puts images into files of their own at once, and the other columns into the log.

    episode -> images -> <col>/...   written whole before the episode's record
            -> the others -> the log

Not here: the block, the log and the swap (directory.py), what an image becomes (the formats' writers).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringmap.formats.common import disk
from ringmap.formats.common.directory import DirectoryWriter
from ringmap.formats.common.tabular import TABULAR, Column, plan_columns
from ringmap.formats.schema import CheckedEpisode

__all__ = ["ApartWriter"]

log = logging.getLogger("ringmap")

Array = np.ndarray[Any, np.dtype[Any]]


class ApartWriter(DirectoryWriter):
    """A `DirectoryWriter` whose images lie apart. A subclass says how they are written and found again."""

    log_nbytes = None

    def _how(self) -> str:
        """Return how images of a new dataset are stored."""
        raise NotImplementedError(f"{type(self).__name__} must supply _how")

    def _put(self, folder: str, number: int, column: Column, images: Array) -> str:
        """Write an episode's images of a column; return what is lossy about it, and what to do, or ""."""
        raise NotImplementedError(f"{type(self).__name__} must supply _put")

    def _files(self, folder: str, number: int) -> Iterable[str]:
        """Return the names that an episode's images of a column may have."""
        raise NotImplementedError(f"{type(self).__name__} must supply _files")

    def _open(self, path: str, notes: dict[str, Any]) -> None:
        self._folder = path
        self._columns: list[Column] = notes["columns"]
        self._told = False

    def _encode(
        self, episode: CheckedEpisode, number: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        columns = self._columns = self._columns or plan_columns(episode.schema, self._how())
        rows: dict[str, Any] = dict(episode.columns)
        for column in self._apart():
            folder = os.path.join(self._folder, column.file)
            disk.make_folder(folder)
            lossy = self._put(folder, number, column, rows.pop(column.spec.name))
            if lossy and not self._told:
                self._told = True
                log.warning(
                    "%s: %s: images are stored as %s", type(self).__name__, self.path, lossy
                )
        return rows, {"columns": [[c.file, c.how] for c in columns]}

    def _undo(self, number: int) -> None:
        for column in self._apart():
            folder = os.path.join(self._folder, column.file)
            for name in self._files(folder, number):
                disk.remove(os.path.join(folder, name))
        if not number:
            self._columns = []

    def _apart(self) -> list[Column]:
        return [column for column in self._columns if column.how != TABULAR]
