"""The LeRobot format: local datasets of version 3, read by their documented layout.

    meta/info.json                        features, paths, frames per second
    meta/episodes/chunk-*/file-*.parquet  one row per episode: length, which files, from when in a video
    meta/tasks.parquet                    task_index -> task
    data/chunk-*/file-*.parquet           one row per frame: many episodes in a file
    videos/<key>/chunk-*/file-*.mp4       many episodes in a file

pyarrow reads the tables, PyAV the videos (the extra `lerobot`); LeRobot's own package is not needed.
Source: LeRobot documentation, LeRobotDataset v3.0.
Not here: older versions (LeRobot converts them), downloads.
"""

from __future__ import annotations

import os

from ringmap.errors import CorruptError
from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.common.untrusted import read_json
from ringmap.formats.registry import register_format

__all__ = ["LeRobot"]


@register_format
class LeRobot(StoredFormat):
    """LeRobot datasets, version 3. Read-only."""

    name = "lerobot"
    source = "ringmap.formats.lerobot.reader:LeRobotSource"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `meta/info.json` and its version."""
        try:
            found = read_json(os.path.join(os.fspath(path), "meta", "info.json"))
        except (OSError, CorruptError):
            return False
        return isinstance(found, dict) and "codebase_version" in found
