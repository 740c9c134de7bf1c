"""The writing side of a Lance dataset: images encoded, the rest as it is.

Not here: the block, the log and the swap (formats/common), rows in Lance (absorb.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.datasets.layout import is_image, stored_layout
from ringmap.formats.base import EPISODE_DATA_KEY, split_episode_data
from ringmap.formats.common.directory import DirectoryWriter
from ringmap.formats.common.images import check_image_format, encode
from ringmap.formats.common.log import Encoded
from ringmap.formats.lance.folder import LAYOUT
from ringmap.formats.lance.layout import Field, plan_fields
from ringmap.formats.schema import CheckedEpisode
from ringmap.storage.schema import ColumnSpec, as_columns

__all__ = ["LanceWriter"]

log = logging.getLogger("ringmap")


class LanceWriter(DirectoryWriter):
    """Writes episodes to a Lance dataset. Use it in a `with` block.

    Args:
        path: the folder, NAME.lance; folders above it are made.
        mode: "append" extends what is there, "overwrite" replaces it when the block ends well,
            "error" refuses it.
        image_format: "png" is lossless, "jpeg" (quality 95) is smaller.
        compat: write stable-worldmodel's exact layout: numbers as flat float32 lists, images as
            JPEG. Lossy.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work.
        UnknownFormatError, CorruptError: on entering, when what is there can't be appended to.

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

    layout = LAYOUT

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

    def _open(self, path: str, notes: dict[str, Any]) -> None:
        self._fields: list[Field] | None = notes.get("fields")
        self._compat = notes.get("compat", self.compat)
        self._told = False

    def _as_stored(self, ep_data: Mapping[str, Any]) -> Mapping[str, Any]:
        return _flattened(ep_data) if self._compat else ep_data

    def _encode(
        self, episode: CheckedEpisode, number: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._fields is None:
            self._fields = plan_fields(episode.schema, self.image_format)
        columns: dict[str, Any] = dict(episode.columns)
        for field in self._fields:
            if field.how in ("png", "jpeg"):
                columns[field.spec.name] = Encoded(encode(columns[field.spec.name], field.how))
        if not self._told and (self._compat or any(f.how == "jpeg" for f in self._fields)):
            self._told = True
            log.warning(
                "LanceWriter: %s: %s; for exact values leave compat=False and image_format='png'",
                self.path,
                "numbers become float32, images JPEG" if self._compat else "images are stored as JPEG, which is lossy",
            )  # fmt: skip
        return columns, {"images": self.image_format, "compat": self._compat}

    def _undo(self, number: int) -> None:
        if not number:
            self._fields = None


def _flattened(ep_data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode as stable-worldmodel's layout holds it: numbers as flat float32 rows."""
    columns, data = split_episode_data(stored_layout(ep_data))
    made: dict[str, Any] = dict(as_columns(columns, "LanceWriter.write_episode"))
    for name, rows in made.items():
        spec = ColumnSpec(name, rows.shape[1:], rows.dtype)
        if rows.dtype.kind in "biuf" and not is_image(spec):
            made[name] = rows.reshape(len(rows), -1).astype(np.float32)
    return {**made, EPISODE_DATA_KEY: data} if data else made
