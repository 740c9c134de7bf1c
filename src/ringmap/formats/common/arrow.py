"""Columns as Arrow arrays, and back: one mapping for Lance, Parquet and LeRobot, each of which chooses the types.

| type of a step | rows |
| --- | --- |
| a number, or lists of numbers, one in another | numbers; of complex ones pairs, of dates int64, of bytes uint8 |
| timestamp, duration | dates |
| string, or a list of strings | text, escaped where it is no UTF-8 |
| binary | a picture, or the bytes of a row |
| struct of bytes and path | a picture, as `datasets` has it |

Invariants: what `to_arrow` made, `from_arrow` gives back equal, dtype and all.
Not here: which type a column has (each format), pictures (media/).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, UnsupportedError
from ringmap.formats.common.log import Encoded
from ringmap.formats.common.names import ESCAPED, escape, unescape
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["from_arrow", "leaves", "refuse_missing", "to_arrow"]

Array = np.ndarray[Any, np.dtype[Any]]


def to_arrow(rows: Array | Encoded, kind: Any) -> Any:
    """Return rows (T, ...), or encoded pictures, as an Arrow array of a type."""
    import pyarrow as pa

    if isinstance(rows, Encoded):
        files = pa.array(rows.values, pa.binary())
        if kind == pa.binary():
            return files
        return pa.StructArray.from_arrays([files, pa.nulls(len(files), pa.string())], ["bytes", "path"])
    if kind == pa.binary():
        data, size = np.ascontiguousarray(rows).tobytes(), math.prod(rows.shape[1:]) * rows.itemsize
        return pa.array([data[size * t : size * (t + 1)] for t in range(len(rows))], kind)
    lists, leaf = list[Any](), kind
    while _is_list(leaf):
        lists.append(leaf)
        leaf = leaf.value_type
    flat = np.ascontiguousarray(rows).reshape(-1)
    if leaf == pa.string():
        made = pa.array([_storable(text) for text in flat.tolist()], leaf)
    elif pa.types.is_temporal(leaf):
        made = pa.array(flat, leaf)
    else:
        made = pa.array(flat.view(leaf.to_pandas_dtype()))
    for depth in range(len(lists), 0, -1):
        if pa.types.is_fixed_size_list(lists[depth - 1]):
            made = pa.FixedSizeListArray.from_arrays(made, lists[depth - 1].list_size)
        else:
            count = len(rows) * math.prod(rows.shape[1:depth])
            size = math.prod(rows.shape[depth:]) if depth == len(lists) else rows.shape[depth]
            made = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * size, made)
    return made


def from_arrow(column: Any, spec: ColumnSpec, path: str) -> Array:
    """Return the rows of a column, (T, ...); they may be Arrow's own memory. Text is as wide as its longest, at least.

    Raises:
        UnsupportedError: a value is missing, or lists are not of one length.
        CorruptError: rows of bytes are of other sizes.
    """
    import pyarrow as pa

    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if isinstance(array, pa.ChunkedArray):  # of no chunk
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    shape = len(array), *spec.shape
    found = leaves(array, spec, path)
    if pa.types.is_binary(found.type):
        return _from_bytes(found, spec, path)
    if (spec.dtype.kind == "U" and pa.types.is_string(found.type)) or pa.types.is_large_string(found.type):
        texts = [unescape(t) if t.startswith(ESCAPED) else t for t in found.to_pylist()]
        width = max(map(len, texts), default=0)
        fits = spec.dtype.itemsize and width <= spec.dtype.itemsize // 4
        return np.array(texts, spec.dtype if fits else f"<U{max(width, 1)}").reshape(shape)
    flat = found.to_numpy(zero_copy_only=False)
    if spec.dtype.kind in "biuf" or flat.dtype.kind in "mM":
        return np.asarray(flat.astype(spec.dtype, copy=False).reshape(shape))
    return np.asarray(flat.view(spec.dtype).reshape(shape))


def leaves(values: Any, spec: ColumnSpec, path: str) -> Any:
    """Return the values of an array, out of their lists.

    Raises:
        UnsupportedError: one is missing, or the lists are not of one length.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    depth = 0
    while True:
        values = getattr(values, "storage", values)  # of an extension type, such as those of `datasets`
        if not pa.types.is_temporal(values.type):  # whose missing value is NaT
            refuse_missing(values, spec, path)
        if not _is_list(values.type):
            return values
        if not pa.types.is_fixed_size_list(values.type) and len(values):
            sizes = pc.min_max(pc.list_value_length(values)).as_py()
            if sizes["min"] != sizes["max"]:
                raise _other_lengths(spec, path)
        count, values, depth = len(values), values.flatten(), depth + 1
        nested = _is_list(getattr(values, "storage", values).type)
        size = spec.shape[depth - 1] if nested and depth <= len(spec.shape) else None
        if size is not None and len(values) != count * size:
            raise _other_lengths(spec, path)


def refuse_missing(values: Any, spec: ColumnSpec, path: str) -> None:
    """Raise where values of another program are missing: Arrow would give NaN, 0 or None for them."""
    if values.null_count:
        raise UnsupportedError(
            f"{path}: column {spec.name!r} has missing values ({values.null_count}), which no column here has; fill "
            "them, or leave it out: keys_to_load="
        )


def _other_lengths(spec: ColumnSpec, path: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: column {spec.name!r} has lists of another length than {spec.shape}; leave it out: keys_to_load="
    )


def _from_bytes(found: Any, spec: ColumnSpec, path: str) -> Array:
    """Return rows that are bytes, each of one size, copied once."""
    rows = np.empty((len(found), *spec.shape), spec.dtype)
    if rows.nbytes:
        _, places, data = found.buffers()
        ends = np.frombuffer(places, np.int32)[found.offset : found.offset + len(found) + 1]
        if (np.diff(ends) != spec.row_nbytes).any():
            raise CorruptError(f"{path}: column {spec.name!r} has rows of other sizes than {spec.row_nbytes} bytes")
        rows.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    return rows


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _storable(text: str) -> str:
    """Return a text that UTF-8 holds, and that is not taken for an escaped one."""
    strange = text.startswith(ESCAPED) or any("\ud800" <= c <= "\udfff" for c in text)
    return escape(text) if strange else text
