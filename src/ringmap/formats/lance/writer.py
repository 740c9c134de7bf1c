"""The writing side of a Lance dataset: images encoded, the rest as it is.

Not here: the log (common/staged.py), rows in Lance (extend.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringmap.datasets.image_axes import is_image, stored_layout
from ringmap.formats.base import EPISODE_DATA_KEY, split_episode_data
from ringmap.formats.checked_episode import CheckedEpisode
from ringmap.formats.common.log import FILE, Encoded, Record
from ringmap.formats.common.staged import StagedWriter
from ringmap.formats.lance import Lance
from ringmap.formats.lance.columns import (
    METADATA,
    Field,
    episodes_path,
    opened,
    plan_fields,
    sized_fields,
    table_of,
)
from ringmap.formats.lance.extend import create, extend
from ringmap.formats.media.images import check_image_format, encode
from ringmap.storage.columns.schema import ColumnSpec, Schema, as_columns

__all__ = ["LanceWriter"]

log = logging.getLogger("ringmap")

Array = np.ndarray[Any, np.dtype[Any]]

_FOLDERS = ("_versions", "_transactions", "_indices", "_deletions", "_refs", "data", "tree")


class LanceWriter(StagedWriter):
    """Writes episodes to a Lance dataset. Use it in a `with` block.

    Args:
        path: the folder, NAME.lance; folders above it are made.
        mode: "append" extends a dataset, "overwrite" replaces it when the block succeeds,
            "error" refuses it.
        image_format: "png" is lossless, "jpeg" (quality 95) is smaller.
        compat: write stable-worldmodel's exact layout: numbers as flat float32 lists, images as
            JPEG. Lossy.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work.
        UnknownFormatError, CorruptError: on entering, if the dataset can't be appended to.

    Processes and threads: one writer at a time, which a lock sees to, one thread at a time; images
    are encoded in parallel. Killed at any moment, it leaves every episode readable whose call had
    returned; a power cut may cost what was written since the block began.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "demo.lance")
        >>> with LanceWriter(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        >>> from ringmap.data import load_dataset
        >>> load_dataset(path).get_episode_data()
        {'seed': [7]}
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        image_format: str | None = None,
        compat: bool = False,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        chosen = image_format or ("jpeg" if compat else "png")
        self.image_format = check_image_format(chosen, "LanceWriter")
        self.compat = compat

    def _is_dataset(self, path: str) -> bool:
        return Lance.detect(path)

    def _owns(self, relative: str) -> bool:
        head = relative.split(os.sep)[0]
        return (
            head in _FOLDERS or relative in (FILE, FILE + ".new") or relative.startswith("_latest")
        )

    def _items(self, path: str) -> list[str]:
        return [os.path.basename(path), os.path.basename(episodes_path(path))]

    def _look(self, path: str) -> tuple[Array, Schema | None]:
        dataset = opened(path)
        lengths = table_of(dataset, path)[0]
        fields = sized_fields(dataset, path) if len(lengths) else []
        return lengths, Schema(tuple(f.spec for f in fields)) if fields else None

    def _open(self, path: str) -> None:
        self._fields, self._compat = list[Field](), self.compat
        self._told = False
        if path:
            dataset = opened(path)
            self._fields = sized_fields(dataset, path)
            self._compat = METADATA not in (dataset.schema.metadata or {})

    def _as_stored(self, ep_data: Mapping[str, Any]) -> Mapping[str, Any]:
        return _flattened(ep_data) if self._compat else ep_data

    def _encode(self, episode: CheckedEpisode) -> dict[str, Array | Encoded]:
        columns: dict[str, Array | Encoded] = dict(episode.columns)
        fields = self._fields or plan_fields(episode.schema, self.image_format)
        for field in fields:
            if field.how in ("png", "jpeg"):
                images = encode(episode.columns[field.spec.name], field.how)
                columns[field.spec.name] = Encoded(images, field.how)
        if not self._told and (self._compat or any(f.how == "jpeg" for f in fields)):
            self._told = True
            log.warning(
                "LanceWriter: %s: %s; for exact values leave compat=False and image_format='png'",
                self.path,
                "numbers become float32, images JPEG" if self._compat else "images are stored as JPEG, which is lossy",
            )  # fmt: skip
        return columns

    def _notes(self) -> dict[str, Any]:
        return {"images": self.image_format, "compat": self._compat}

    def _export(self, path: str, episodes: Iterable[Record]) -> None:
        create(path)
        extend(path, episodes)

    def _extend(self, path: str, episodes: Iterable[Record]) -> None:
        extend(path, episodes)


def _flattened(ep_data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode as stable-worldmodel's layout holds it: numbers as flat float32 rows."""
    columns, data = split_episode_data(stored_layout(ep_data))
    made: dict[str, Any] = dict(as_columns(columns, "LanceWriter.write_episode"))
    for name, rows in made.items():
        spec = ColumnSpec(name, rows.shape[1:], rows.dtype)
        if rows.dtype.kind in "biuf" and not is_image(spec):
            made[name] = rows.reshape(len(rows), -1).astype(np.float32)
    return {**made, EPISODE_DATA_KEY: data} if data else made
