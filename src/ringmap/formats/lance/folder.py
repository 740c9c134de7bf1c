"""The folders of a Lance dataset, as `DirectoryWriter` fills and replaces them.

    NAME.lance/{_versions, _transactions, data, ...}      NAME_episodes.lance/... if there is episode data

Not here: the columns in them (layout.py), how the log becomes rows (absorb.py).
"""

from __future__ import annotations

import os
from typing import Any

from ringmap.formats.common.log import Log
from ringmap.formats.lance.absorb import absorb
from ringmap.formats.lance.layout import (
    EPISODE,
    METADATA,
    STEP,
    episodes_path,
    lance,
    opened,
    sized_fields,
)
from ringmap.storage.schema import Schema

__all__ = ["LAYOUT"]

_FOLDERS = ("_versions", "_transactions", "_indices", "_deletions", "_refs", "data", "tree")


class _Layout:
    """What `DirectoryWriter` needs to know of Lance datasets."""

    def items(self, path: str) -> list[str]:
        return [os.path.basename(path), os.path.basename(episodes_path(path))]

    def is_dataset(self, path: str) -> bool:
        return os.path.isdir(os.path.join(path, "_versions"))

    def owns(self, relative: str) -> bool:
        head = relative.split(os.sep)[0]
        return head in _FOLDERS or relative == ".ringmap.log" or relative.startswith("_latest")

    def create(self, path: str) -> None:
        import pyarrow as pa

        lance().write_dataset(pa.table({EPISODE: pa.array([], pa.int32()), STEP: pa.array([], pa.int32())}), path, mode="create")  # fmt: skip

    def look(self, path: str) -> tuple[int, int, Schema | None, dict[str, Any]]:
        dataset = opened(path)
        rows = dataset.count_rows()
        if not rows:
            return 0, 0, None, {}
        fields = sized_fields(dataset, path)
        last = dataset.take([rows - 1], columns=[EPISODE]).column(0)[0].as_py()
        compat = METADATA not in (dataset.schema.metadata or {})
        return last + 1, rows, Schema(tuple(f.spec for f in fields)), {"fields": fields, "compat": compat}  # fmt: skip

    def absorb(self, path: str, log: Log) -> None:
        absorb(path, log)

    def tidy(self, path: str) -> None:
        """Nothing: what Lance did not commit, it does not read."""


LAYOUT = _Layout()
