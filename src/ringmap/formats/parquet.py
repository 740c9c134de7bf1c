"""The Parquet format: one row per step, in files that Hugging Face's `datasets` opens.

    DIR/
      .ringmap-parquet          makes the folder a dataset, also without rows
      data-00000.parquet  ...   rows of whole episodes; a group of episodes adds a file

| column | in the table | in `datasets` |
| --- | --- | --- |
| numbers, flags | their type; (T, 2, 3) as lists of lists of fixed length | `Value`, `List` |
| dates, durations | timestamp, duration | `Value` |
| text | string, escaped where it is no UTF-8 | `Value("string")` |
| uint8 (T, H, W, 1 or 3) | struct of PNG bytes and a path | `Image` |
| all else (complex, bytes) | the bytes of a row | `Value("binary")` |

A row has `episode_index`, `step_index` and the columns. The footer of each file has the lengths of its episodes, their
data, and dtypes that Parquet lacks.
Not here: values as Arrow has them (common/arrow.py), the log (common/writer.py).
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.errors import CorruptError, NewerVersionError, ReplacedError, UnknownFormatError
from ringmap.formats.builtin import Parquet
from ringmap.formats.common import disk
from ringmap.formats.common.arrow import from_arrow, to_arrow
from ringmap.formats.common.log import Encoded, Record
from ringmap.formats.common.names import quoted
from ringmap.formats.common.source import (
    EpisodeSource,
    damage_named,
    offsets_of,
    stamp_of,
)
from ringmap.formats.common.untrusted import check_row, refuse_elsewhere, refuse_vast
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.episode import CheckedEpisode
from ringmap.formats.media.images import check_image_format, decode_into, encode, holds
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.records.blobs import decode_data

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ParquetSource", "ParquetWriter", "arrow_schema", "table_of"]


Array = np.ndarray[Any, np.dtype[Any]]

EPISODE, STEP = "episode_index", "step_index"

_UNITS = ("s", "ms", "us", "ns")


def column_name(name: str) -> str:
    """Return the name of a column in a table: its own, if Arrow holds it.

    Example:
        >>> column_name("obs/camera"), column_name(chr(0xD800))
        ('obs/camera', '%ED%A0%80')
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return quoted(name)
    return name if name and "\0" not in name else quoted(name)


def arrow_schema(schema: Schema) -> pa.Schema:
    """Return the schema of a table of these columns, with the features that `datasets` reads."""
    import pyarrow as pa

    counts = [name for name in (EPISODE, STEP) if name not in schema.names]
    fields = [pa.field(name, pa.int64()) for name in counts]
    features: dict[str, Any] = {name: {"dtype": "int64", "_type": "Value"} for name in counts}
    for spec in schema.columns:
        name = column_name(spec.name)
        if holds("jpeg", spec):
            fields.append(pa.field(name, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
            features[name] = {"_type": "Image"}
            continue
        kind = _value_type(spec)
        feature: dict[str, Any] = {"dtype": _feature_name(kind), "_type": "Value"}
        for size in reversed(spec.shape if kind != pa.binary() else ()):
            kind = pa.list_(kind, size)
            feature = {"feature": feature, "length": size, "_type": "List"}
        fields.append(pa.field(name, kind))
        features[name] = feature
    return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})


def table_of(number: int, length: int, columns: Mapping[str, Any], schema: Schema, kind: pa.Schema) -> pa.Table:
    """Return the rows of an episode."""
    import pyarrow as pa

    arrays = []
    if EPISODE not in schema.names:
        arrays.append(pa.array(np.full(length, number)))
    if STEP not in schema.names:
        arrays.append(pa.array(np.arange(length)))
    for spec in schema.columns:
        rows = columns[spec.name]
        if holds("jpeg", spec) and not isinstance(rows, Encoded):
            rows = Encoded(encode(rows, "png"), "png")
        arrays.append(to_arrow(rows, kind.field(column_name(spec.name)).type))
    return pa.Table.from_arrays(arrays, schema=kind)


def rows_of(column: pa.ChunkedArray, spec: ColumnSpec, path: str) -> Array:
    """Return the values of a column of a table, (T, ...)."""
    if not holds("jpeg", spec):
        rows = from_arrow(column, spec, path)
        return rows if spec.is_text else rows.astype(spec.dtype, copy=False)
    images = np.empty((len(column), *spec.shape), np.uint8)
    decode_into(images, column.combine_chunks().field("bytes").to_pylist(), spec)
    return images


def _value_type(spec: ColumnSpec) -> pa.DataType:
    """Return the type of one value; binary where a whole row is bytes."""
    import pyarrow as pa

    dtype = spec.dtype
    if min(spec.shape, default=1) == 0:
        return pa.binary()
    if dtype.kind == "U":
        return pa.string()
    if dtype.kind in "mM":
        unit, count = np.datetime_data(dtype)
        if unit not in _UNITS or count != 1:
            return pa.binary()
        return pa.duration(unit) if dtype.kind == "m" else pa.timestamp(unit)
    if dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize in (2, 4, 8)):
        return pa.from_numpy_dtype(dtype)
    return pa.binary()


def _feature_name(kind: pa.DataType) -> str:
    names = {"halffloat": "float16", "float": "float32", "double": "float64"}
    return names.get(str(kind), str(kind))


def episode_shapes(schema: Schema) -> Sequence[tuple[str, str, list[int]]]:
    """Return name, dtype and shape of each column, for a footer."""
    return [(spec.name, spec.dtype.str, list(spec.shape)) for spec in schema.columns]


FOOTER = "ringmap"
"""The key of our facts in a footer: columns, lengths and data of episodes, as JSON."""

_STEPS_PER_BYTE = 100
"""Rows that a byte of Parquet may hold; the number of each takes a few bits."""

_NAME = re.compile(r"data-(\d{5,})\.parquet")


def files_of(path: str) -> list[str]:
    """Return the paths of the files of rows, in order."""
    found = [(int(m[1]), name) for name in os.listdir(path) if (m := _NAME.fullmatch(name))]
    return [os.path.join(path, name) for _, name in sorted(found)]


class ParquetSource(EpisodeSource):
    """The columns of a folder of Parquet files, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        UnknownFormatError: it holds something else.
        CorruptError: it is damaged.

    Cost: opening reads each footer; a read loads row groups of about 32 MB, which are kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if not Parquet.detect(self.path):
            raise UnknownFormatError(f"{self.path}: is no folder of Parquet files that we wrote")
        self._groups: list[tuple[str, int]] = []
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._packed: list[str] = []
        self.schema = Schema(())
        lengths: list[int] = []
        rows: list[int] = []
        self._stated: set[Facts] = set()
        with damage_named(self.path):
            for file in files_of(self.path):
                self._add(file, lengths, rows)
            self.lengths = np.array(lengths, np.int32)
            (self._stated.pop() if len(self._stated) == 1 else Facts()).give(self)
            names = (name for one in range(len(lengths)) for name in self.episode_data(one))
            self.episode_columns = list(dict.fromkeys(names))
        self.offsets = offsets_of(self.lengths)
        self._units = offsets_of(np.array(rows, np.int64))

    def _add(self, file: str, lengths: list[int], rows: list[int]) -> None:
        import pyarrow.parquet as pq

        refuse_elsewhere(self.path, file)
        self._stamps[file] = stamp_of(os.stat(file))
        footer = pq.read_metadata(file)
        refuse_vast(f"{file}: rows", footer.num_rows, os.stat(file).st_size, _STEPS_PER_BYTE)
        facts = json.loads((footer.metadata or {}).get(FOOTER.encode(), b"null"))
        if not isinstance(facts, dict):
            raise CorruptError(f"{file}: has no facts of ours in its footer")
        if facts["version"] != 1:
            raise NewerVersionError(f"{file}: is of version {facts['version']}, expected 1")
        specs = [ColumnSpec(str(n), tuple(map(int, s)), np.dtype(str(d))) for n, d, s in facts["columns"]]
        for spec in specs:
            check_row(file, spec.name, spec.row_nbytes)
            if spec.dtype.hasobject or min(spec.shape, default=0) < 0:
                raise CorruptError(f"{file}: column {spec}: no such columns are written")
        if self.schema.columns and tuple(specs) != self.schema.columns:
            raise CorruptError(f"{file}: is of columns {specs}, expected {self.schema.columns}")
        self.schema = Schema(tuple(specs))
        self._stated.add(Facts.stated(facts))
        here = [int(length) for length in facts["lengths"]]
        if min(here, default=0) < 0 or sum(here) != footer.num_rows or len(facts["data"]) != len(here):
            raise CorruptError(f"{file}: has {footer.num_rows} rows, expected {sum(here)}")
        lengths += here
        self._packed += [str(one) for one in facts["data"]]
        for group in range(footer.num_row_groups):
            self._groups.append((file, group))
            rows.append(footer.row_group(group).num_rows)

    def _load(self, file: Any, number: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return columns of a row group, which is the unit that is read and kept."""
        import pyarrow.parquet as pq

        path, group = self._groups[number]
        with pq.ParquetFile(path) as opened:
            table = opened.read_row_group(group, columns=[column_name(name) for name in columns])
        if stamp_of(os.stat(path)) != self._stamps[path]:
            raise ReplacedError(f"{path}: was written since this dataset was loaded; load it again")
        return {
            s.name: rows_of(table.column(column_name(s.name)), s, path)
            for s in self.schema.columns
            if s.name in columns
        }

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        packed = self._packed[episode]
        return decode_data(base64.b64decode(packed)) if packed else {}


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
    files = r"\.?data-.*\.parquet(\.new)?|" + re.escape(Parquet.marker)

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
        disk.write_file(os.path.join(path, Parquet.marker), b"")

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
