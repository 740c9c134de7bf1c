"""The writing side of a folder: images go to their files at once, columns to the log.

Not here: the block, the log and the swap (common/directory.py), .npz files (common/tabular.py).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ringmap.formats.common import disk
from ringmap.formats.common.directory import DirectoryWriter
from ringmap.formats.common.images import check_image_format, encode, in_threads
from ringmap.formats.common.tabular import TABULAR, Column, plan_columns
from ringmap.formats.folder.source import LAYOUT, image_name
from ringmap.formats.schema import CheckedEpisode

__all__ = ["FolderWriter"]

log = logging.getLogger("ringmap")


class FolderWriter(DirectoryWriter):
    """Writes episodes to a folder. Use it in a `with` block.

    Args:
        path: the folder; those above it are made.
        mode: "append" extends what is there, "overwrite" replaces it when the block ends well,
            "error" refuses it.
        image_format: "jpeg" (quality 95, full chroma) is lossy, "png" is not. Of a dataset that is
            appended to, the one that it has.
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
        >>> path = os.path.join(tempfile.mkdtemp(), "demo")
        >>> with FolderWriter(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        >>> sorted(os.listdir(path))
        ['ep_len.data', 'ep_len.json', 'ep_len.npz', 'ep_offset.npz', 'reward.npz']
    """

    layout = LAYOUT
    log_nbytes = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        image_format: str = "jpeg",
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        self.image_format = check_image_format(image_format, "FolderWriter")

    def _open(self, path: str, notes: dict[str, Any]) -> None:
        self._folder = path
        self._columns: list[Column] = notes["columns"]
        self._told = False

    def _encode(
        self, episode: CheckedEpisode, number: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        columns = self._columns = self._columns or plan_columns(episode.schema, self.image_format)
        rows: dict[str, Any] = dict(episode.columns)
        for column in columns:
            if column.how == TABULAR:
                continue
            folder = os.path.join(self._folder, column.file)
            disk.make_folder(folder)
            kind = check_image_format(column.how, "FolderWriter")
            blobs = encode(rows.pop(column.spec.name), kind)
            files = [
                os.path.join(folder, image_name(number, t, column.how)) for t in range(len(blobs))
            ]
            in_threads(lambda item: disk.write_file(*item), list(zip(files, blobs, strict=True)))
            if kind == "jpeg" and not self._told:
                self._told = True
                log.warning(
                    "FolderWriter: %s: images are stored as JPEG, which is lossy; for exact images pass image_format='png'",
                    self.path,
                )
        return rows, {"columns": [[c.file, c.how] for c in columns]}

    def _undo(self, number: int) -> None:
        for column in self._columns:
            if column.how != TABULAR:
                folder = os.path.join(self._folder, column.file)
                for name in os.listdir(folder) if os.path.isdir(folder) else ():
                    if name.startswith(f"ep_{number}_"):
                        disk.remove(os.path.join(folder, name))
        if not number:
            self._columns = []
