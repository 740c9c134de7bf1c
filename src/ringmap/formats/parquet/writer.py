"""The writing side of Parquet files.

Not here: the log (common/writer.py), rows as tables (table.py).
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.formats.common import disk
from ringmap.formats.common.log import Encoded, Record
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.episode import CheckedEpisode
from ringmap.formats.media.images import check_image_format, encode, holds
from ringmap.formats.parquet import MARKER, Parquet
from ringmap.formats.parquet.reader import FOOTER, files_of
from ringmap.formats.parquet.table import arrow_schema, episode_shapes, table_of

__all__ = ["ParquetWriter"]

Array = np.ndarray[Any, np.dtype[Any]]

_GROUP_NBYTES = 32 << 20
"""Of decoded rows in a row group, which a reader holds in memory at once."""


class ParquetWriter(EpisodeWriter):
    """Writes episodes to a folder of Parquet files. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`.

    Args:
        image_format: "png", or "jpeg" (quality 95, full chroma), which is lossy.

    Raises:
        InputError: an option is wrong.

    Example:
        >>> import os, tempfile
        >>> import pyarrow.parquet as pq
        >>> path = os.path.join(tempfile.mkdtemp(), "demo.parquet")
        >>> with ParquetWriter(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0]})
        >>> pq.read_table(os.path.join(path, "data-00000.parquet")).to_pylist()[1]
        {'episode_index': 0, 'step_index': 1, 'reward': 1.0}
    """

    format = Parquet
    files = r"\.?data-.*\.parquet(\.new)?|" + re.escape(MARKER)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        image_format: str = "png",
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        self.image_format = check_image_format(image_format, "ParquetWriter")

    def encode(self, episode: CheckedEpisode) -> dict[str, Array | Encoded]:
        """Return the columns, pictures encoded."""
        columns: dict[str, Array | Encoded] = dict(episode.columns)
        for spec in episode.schema.columns:
            if holds("jpeg", spec):
                files = encode(episode.columns[spec.name], self.image_format)
                columns[spec.name] = Encoded(files, self.image_format)
        return columns

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write a new dataset; the file that marks it comes last."""
        disk.make_folder(path)
        self.extend(episodes, path)
        disk.write_file(os.path.join(path, MARKER), b"")

    def extend(self, episodes: Iterable[Record], path: str) -> None:
        """Add a file of rows."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        records = iter(episodes)
        first = next(records, None)
        if first is None:
            return
        schema = first.schema
        kind, count = arrow_schema(schema), len(files_of(path))
        target = os.path.join(path, f"data-{count:05}.parquet")
        beside = os.path.join(path, f".data-{count:05}.parquet.new")
        disk.remove(beside)
        row = sum(spec.row_nbytes for spec in schema.columns)
        lengths: list[int] = []
        packed: list[str] = []
        held: list[Any] = []
        with open(beside, "xb") as file, pq.ParquetWriter(file, kind, compression="zstd") as writer:
            for record in chain([first], records):
                held.append(table_of(record.number, record.length, record.columns, schema, kind))
                lengths.append(record.length)
                packed.append(base64.b64encode(record.packed).decode())
                if sum(len(table) for table in held) * row >= _GROUP_NBYTES:
                    writer.write_table(pa.concat_tables(held), row_group_size=1 << 40)
                    held = []
            if held:
                writer.write_table(pa.concat_tables(held), row_group_size=1 << 40)
            facts = {
                "version": 1,
                "columns": episode_shapes(schema),
                "lengths": lengths,
                "data": packed,
                **Facts.stated(first.notes).encode(),
            }
            writer.add_key_value_metadata({FOOTER: json.dumps(facts)})
        disk.replace(beside, target)
