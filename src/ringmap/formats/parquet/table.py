"""Rows of episodes as an Arrow table, and back.

| column | in the table | in `datasets` |
| --- | --- | --- |
| numbers, flags | their type; (T, 2, 3) as lists of lists of fixed length | `Value`, `List` |
| dates, durations | timestamp, duration | `Value` |
| text | string, escaped where it is no UTF-8 | `Value("string")` |
| uint8 (T, H, W, 1 or 3) | struct of PNG bytes and a path | `Image` |
| all else (complex, bytes) | the bytes of a row | `Value("binary")` |

Not here: values as Arrow has them (common/arrow.py), files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.formats.common.arrow import from_arrow, to_arrow
from ringmap.formats.common.log import Encoded
from ringmap.formats.common.names import quoted
from ringmap.formats.media.images import decode_into, encode, holds
from ringmap.storage.columns.schema import ColumnSpec, Schema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["EPISODE", "STEP", "arrow_schema", "column_name", "rows_of", "table_of"]

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
    """Return the rows of an episode.

    Args:
        number: of the episode.
        length: its steps.
        columns: name -> array (T, ...), or pictures that are encoded already.
        schema: of the columns.
        kind: of the table, by `arrow_schema`.
    """
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
