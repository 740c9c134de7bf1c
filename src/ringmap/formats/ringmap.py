"""The ringmap format: a buffer's own directory, read as a dataset without conversion.

What is read is the buffer as it was when it was opened. To write one, make a `ReplayBuffer` with
`path=`; its writer may be at work meanwhile.
Invariants: an episode that the buffer's writer evicted since is an error, never other rows.
Not here: how a buffer is read (storage/), live reading (`ReplayBuffer.open`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.errors import DamageError, InputError, ReplacedError
from ringmap.formats.common.source import (
    DirectorySource,
    damage_named,
    offsets_of,
    stamp_of,
    steps_of,
)
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import MANIFEST, local_path
from ringmap.storage.read.episodes import joined_data
from ringmap.storage.read.read_live import is_live
from ringmap.storage.read.reader import Reader
from ringmap.storage.records.manifest import EPISODES, ROWS, TRANSITIONS, must_be, read_manifest

__all__ = ["BufferSource"]

Array = np.ndarray[Any, np.dtype[Any]]

_SOURCES = {
    EPISODES: "ringmap.formats.ringmap:BufferSource",
    TRANSITIONS: "ringmap.buffers.transitions.buffer:transition_source",
    ROWS: "ringmap.buffers.row_episodes:RowSource",
}
"""What reads the episodes of a buffer, by the kind of its rows."""


def source_of(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Return what reads a buffer, as `module:class`, and the options that its own clips have."""
    manifest = read_manifest(Disk(), local_path(path))
    if manifest.kind not in _SOURCES:
        must_be(manifest, EPISODES, local_path(path), "load_dataset")
    options = {}
    for name, stored in (("num_steps", "history_len"), ("frameskip", "frameskip")):
        value = manifest.settings.get(stored)
        if type(value) is int and value > 0:
            options[name] = value
    return _SOURCES[manifest.kind], options


class BufferSource(DirectorySource):
    """The columns of a buffer's directory, as `StoredDataset` reads them.

    Args:
        path: the directory.

    Raises:
        NotFoundError, UnknownFormatError, CorruptError, NewerVersionError: it can't be read.
    """

    _holds = True
    _uuid: bytes | None = None
    _names: list[str] | None = None
    _manifest: tuple[tuple[int, ...], bytes] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        reader = self._handle()
        with thread.searching, reader.lock:
            self._whole = reader.live.whole
            self.lengths = np.array(self._whole.lengths, np.int32)
        self.offsets = offsets_of(self.lengths)
        self.schema = reader.schema if reader.schema is not None else Schema(())
        Facts.of(reader.manifest).give(self)

    @property
    def episode_columns(self) -> list[str]:  # type: ignore[override]
        """Names of the values that are constant within an episode; the first call reads the data of all."""
        if self._names is None:
            handle, names = self._handle(), dict[str, None]()
            with damage_named(f"{self.path}: data of episodes"):
                for name in self._whole.names.tolist():
                    names.update(dict.fromkeys(joined_data(handle, name) or {}))  # or evicted since
            self._names = list(names)
        return self._names

    @property
    def first_steps(self) -> Array:
        """How many steps of each episode were evicted."""
        found: Array = self._whole.first_steps
        return found

    def ring(self) -> tuple[Reader, Array]:
        """Return the open buffer, and the positions of the episodes' first steps."""
        return self._handle(), self._whole.names

    def _open(self) -> Reader:
        reader = Reader(Disk(), self.path, uuid=self._uuid)
        self._uuid = reader.manifest.uuid
        try:
            must_be(reader.manifest, EPISODES, self.path, "load_dataset")
        except InputError:
            reader.close()
            raise
        return reader

    def _kept(self, handle: Reader) -> Any:
        """Return which buffer the manifest names: its own writer may replace it, by one that names the same."""
        try:
            stamp = stamp_of(os.stat(os.path.join(self.path, MANIFEST)))
            if self._manifest is None or self._manifest[0] != stamp:
                self._manifest = stamp, read_manifest(Disk(), self.path).uuid
        except (OSError, DamageError):
            return None
        return self._manifest[1]

    def _release(self, handle: Reader) -> None:
        handle.close()

    def _windows(
        self, handle: Reader, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        rows = steps_of(starts, length, stride)
        flat = rows.ravel()
        if not len(flat) or handle.rows is None:
            specs = {spec.name: spec for spec in self.schema.columns}
            return {n: np.empty((*rows.shape, *specs[n].shape), specs[n].dtype) for n in columns}
        positions = self._whole.positions(flat)
        found = {}
        for name, taken in zip(columns, handle.rows.take(columns, positions), strict=True):
            found[name] = taken.reshape(*rows.shape, *taken.shape[1:])
        if not is_live(handle, int(positions.min())):
            raise self._evicted()
        return found

    def _episode_data(self, handle: Reader, episode: int) -> dict[str, Any]:
        data = joined_data(handle, int(self._whole.names[episode]))
        if data is None:
            raise self._evicted()
        return data

    def _evicted(self) -> ReplacedError:
        return ReplacedError(
            f"{self.path}: the buffer's writer evicted episodes since this dataset was loaded; load it "
            "again, or follow the buffer with ReplayBuffer.open(path, mode='r')"
        )
