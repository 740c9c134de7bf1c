"""The writer of a format that has `export`, and maybe `extend`, instead of its own writer.

    class Mine(Format):                     ExportWriter: each episode into the log; at the end
        def export(cls, episodes, path)     -> export beside, with the episodes that are there, and swap
        def extend(cls, episodes, path)     -> or extend in groups

Not here: the log and the swap (staged.py).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ringmap.clips.facts import NAMES, Facts
from ringmap.formats.common.log import Record
from ringmap.formats.common.pending import Again, Pending, logged_only, pending_at
from ringmap.formats.common.staged import StagedWriter
from ringmap.formats.common.swap import restore
from ringmap.formats.episode import EPISODE_DATA_KEY, check_episode
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.records.blobs import encode_data

__all__ = ["ExportWriter", "open_exported"]

Array = np.ndarray[Any, np.dtype[Any]]

_OPTIONS = ("num_steps", "frameskip", "transform", "layout", "output", "keys_to_load")


class Exports(Protocol):
    """The methods of a format that exports; see `Format`."""

    name: str
    supports_episode_data: bool
    appends: bool

    def detect(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a dataset of the format exists at the path."""

    def refuses(self, column: ColumnSpec) -> str | None:
        """Return why the format can't hold a column."""

    def open_reader(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """Return the dataset at `path`."""

    def export(
        self,
        episodes: Iterable[Mapping[str, Any]],
        path: str | os.PathLike[str],
        **options: Any,
    ) -> None:
        """Write a new dataset."""

    def extend(
        self,
        episodes: Iterable[Mapping[str, Any]],
        path: str | os.PathLike[str],
        **options: Any,
    ) -> None:
        """Add episodes to a dataset."""


class ExportWriter(StagedWriter):
    """Writes episodes with a format's `export` and `extend`. Use it in a `with` block.

    Args:
        format: the format.
        extends: whether it defines `extend`.
        path: a file or folder; its parents are created.
        mode: one of `WRITE_MODES`; None: "append", or "error" of a format that can't.
        progress: show a progress bar in `write_episodes`.
        options: for `export` and `extend`.
    """

    def __init__(
        self,
        format: Exports,
        path: str | os.PathLike[str],
        *,
        extends: bool,
        mode: str | None = None,
        progress: bool = False,
        **options: Any,
    ) -> None:
        self.appends = format.appends
        if mode is None:
            mode = "append" if format.appends else "error"
        super().__init__(path, mode, progress)
        self._format, self._options, self.extends = format, options, extends

    def _is_dataset(self, path: str) -> bool:
        return self._format.detect(path)

    def _owns(self, relative: str) -> bool:
        return True

    def _refuses(self, name: str, rows: Array) -> str | None:
        return self._format.refuses(ColumnSpec(name, rows.shape[1:], rows.dtype))

    def _refuses_data(self, name: str, value: Any) -> str | None:
        return None if self._format.supports_episode_data else "it has no place for any"

    @property
    def looks_at_data(self) -> bool:
        """Whether this format does not hold all data of episodes."""
        return not self._format.supports_episode_data

    def _look(self, path: str) -> tuple[Array, Schema | None]:
        from ringmap.datasets.stored_episodes import schema_of

        dataset = self._format.open_reader(path, layout="HWC")
        try:
            return np.asarray(dataset.lengths), schema_of(dataset, type(self).__name__)
        finally:
            dataset.close()

    def _stored_facts(self, path: str) -> Facts:
        dataset = self._format.open_reader(path)
        try:
            return Facts(fps=Facts.of(dataset).fps)  # where rewards stand is the format's own matter
        finally:
            dataset.close()

    def _stored(self, path: str) -> Iterable[Record]:
        from ringmap.datasets.stored_episodes import episodes_of

        name, has_data = type(self).__name__, self._format.supports_episode_data
        dataset = self._format.open_reader(path, layout="HWC")
        try:
            for number, (columns, data) in enumerate(episodes_of(dataset, has_data)):
                found = check_episode({**columns, EPISODE_DATA_KEY: data}, None, name)
                if found is not None:
                    packed = encode_data(data, name) if data else b""
                    yield Record(number, 0, found.length, found.schema, found.columns, packed, {})
        finally:
            dataset.close()

    def _export(self, path: str, episodes: Iterable[Record]) -> None:
        self._format.export(_as_episodes(episodes), path, **self._options_of(self._format.export))

    def _extend(self, path: str, episodes: Iterable[Record]) -> None:
        self._format.extend(_as_episodes(episodes), path, **self._options_of(self._format.extend))

    def _options_of(self, method: Any) -> dict[str, Any]:
        """Return the options of a call, with what is known of the episodes, as far as the method has a parameter for
        it."""
        known = {name: getattr(self._facts, name) for name in NAMES}
        names = inspect.signature(method).parameters
        return {**{n: v for n, v in known.items() if n in names and v is not None}, **self._options}


def _as_episodes(records: Iterable[Record]) -> Iterable[Mapping[str, Any]]:
    return Again(lambda: (record.as_episode() for record in records))


def open_exported(format: Exports, path: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    """Return the dataset of a format at a path, including the episodes of its log."""
    from ringmap.datasets.joined import ConcatDataset
    from ringmap.datasets.stored import StoredDataset

    place = os.path.realpath(path)
    restore(place)
    log = pending_at(place)
    dataset = format.open_reader(path, **options)
    if log is None:
        return dataset
    pending = Pending(log, np.asarray(dataset.lengths), place)
    if not pending.places:
        log.close()
        return dataset
    known = {name: options[name] for name in _OPTIONS if name in options}
    logged = StoredDataset(logged_only(place, log, pending), **known)
    return ConcatDataset([dataset, logged]) if len(dataset.lengths) else logged
