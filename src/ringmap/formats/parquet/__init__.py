"""The Parquet format: one row per step, in files that Hugging Face's `datasets` opens.

    DIR/
      .ringmap-parquet          makes the folder a dataset, also without rows
      data-00000.parquet  ...   rows of whole episodes; a group of episodes adds a file

A row has `episode_index`, `step_index` and the columns; a picture is a PNG within its row, which `datasets` takes for
its Image feature. The footer of each file has the lengths of its episodes, their data, and dtypes that Parquet lacks.
Not here: rows as Arrow tables (table.py), reading (reader.py), writing (writer.py).
"""

from __future__ import annotations

import os

from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.registry import register_format

__all__ = ["MARKER", "Parquet"]

MARKER = ".ringmap-parquet"


@register_format
class Parquet(StoredFormat):
    """Datasets in Parquet files. Lossless for every dtype that a buffer stores."""

    name = "parquet"
    lossless = True
    source = "ringmap.formats.parquet.reader:ParquetSource"
    writer = "ringmap.formats.parquet.writer:ParquetWriter"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the file that marks a folder."""
        return os.path.isfile(os.path.join(os.fspath(path), MARKER))
