"""The writing side of a Zarr group.

Not here: the block, the log and the swap (common/directory.py), arrays (layout.py).
"""

from __future__ import annotations

import os
from typing import Any

from ringmap.errors import InputError
from ringmap.formats.common.directory import DirectoryWriter
from ringmap.formats.schema import CheckedEpisode
from ringmap.formats.zarr.layout import CHUNK_NBYTES, LAYOUT

__all__ = ["ZarrWriter"]


class ZarrWriter(DirectoryWriter):
    """Writes episodes to a Zarr group. Use it in a `with` block.

    Args:
        path: the folder; those above it are made.
        mode: "append" extends what is there, "overwrite" replaces it when the block ends well,
            "error" refuses it.
        level: of compression (Blosc, zstd), 1 to 9; None for none.
        chunk_nbytes: about how large a chunk of a column is before compression.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work.
        UnknownFormatError, CorruptError: on entering, when what is there can't be appended to.

    Processes and threads: one writer at a time, which a lock sees to, one thread at a time. Killed
    at any moment, it leaves every episode readable whose call had returned; a power cut may cost
    what was written since the block began.

    Example:
        >>> import os, tempfile, zarr
        >>> path = os.path.join(tempfile.mkdtemp(), "demo.zarr")
        >>> with ZarrWriter(path) as writer:
        ...     writer.write_episodes([{"reward": [0.0, 1.0]}, {"reward": [2.0]}])
        >>> zarr.open_group(path, mode="r")["meta/episode_ends"][:].tolist()
        [2, 3]
    """

    layout = LAYOUT

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
        self._notes = {"chunk_nbytes": chunk_nbytes, "level": level}

    def _encode(
        self, episode: CheckedEpisode, number: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return dict(episode.columns), self._notes
