"""How columns lie in a Lance dataset.

    how       Arrow type                    for
    png, jpeg binary                        images: what the codec holds (media/images.py)
    list      fixed-size list of numbers    numbers, complex (as pairs), dates (as int64)
    text      string                        one text per step
    raw       fixed-size list of uint8      bytes, arrays of text
    none      -                             columns of size 0

The table `ringmap` in the schema's metadata says which column is which; without it (a dataset that
another program made) binary columns are images and lists are what they are.
Not here: values as Arrow has them (common/arrow.py), the folder and its commits (writer.py), which rows to take
(reader.py).
"""

from __future__ import annotations

import json
import math
import os
import threading
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.errors import CorruptError, RoleError, UnsupportedError
from ringmap.formats.common.arrow import refuse_missing
from ringmap.formats.common.names import file_name
from ringmap.formats.common.untrusted import check_name, check_row, refuse_links
from ringmap.formats.media.images import holds, picture_of
from ringmap.storage.columns.schema import ColumnSpec, Schema, stored_spec
from ringmap.storage.records.blobs import decode_data

__all__ = [
    "EPISODE",
    "METADATA",
    "PACKED",
    "STEP",
    "Field",
    "all_data",
    "arrow_schema",
    "arrow_type",
    "committed",
    "episodes_path",
    "facts_of",
    "fields_of",
    "lance",
    "opened",
    "plan_fields",
    "sized_fields",
    "table_of",
]

Array = np.ndarray[Any, np.dtype[Any]]

EPISODE = "episode_idx"
STEP = "step_idx"
_LANCE_OWN = (
    "_rowid",
    "_rowaddr",
    "_rowoffset",
    "_row_created_at_version",
    "_row_last_updated_at_version",
)
METADATA = b"ringmap"
PACKED = "ringmap"
"""The column of a table of data of episodes that holds them as we pack them."""


@dataclass(frozen=True, slots=True)
class Field:
    """A column, and the field that holds it.

    Args:
        spec: what the user sees.
        name: of the field.
        how: as in the table above.
    """

    spec: ColumnSpec
    name: str
    how: str


def lance() -> Any:
    """Return the module `lance`, whose warning at each fork is kept for the process that needs it.

    pylance's threads do not survive a fork, and it says so to whoever forks. Ours use no handle that was opened before
    a fork (`DirectorySource`); but in the child `take` hangs or crashes now and then, on some datasets every other
    time.

    Raises:
        RoleError: this process was forked from one that had used Lance.
    """
    import lance as module

    global _hooked, _used_by
    if _used_by not in (None, os.getpid()):
        raise RoleError(
            "Lance was used before this process was forked, and its threads did not come along: reading here would "
            "hang or crash. Start workers with DataLoader(..., multiprocessing_context='spawn'), or 'forkserver'"
        )
    _used_by = os.getpid()
    if not _hooked and hasattr(os, "register_at_fork"):
        _hooked = True
        # Hooks run in reverse order: ours, registered later, before the one that warns.
        os.register_at_fork(before=_quiet, after_in_parent=_loud, after_in_child=_loud)
    return module


_hooked = False
_used_by: int | None = None
_silenced = threading.local()


def _quiet() -> None:
    silence = warnings.catch_warnings()
    silence.__enter__()
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    _silenced.by = silence


def _loud() -> None:
    silence, _silenced.by = getattr(_silenced, "by", None), None
    if silence is not None:
        silence.__exit__(None, None, None)


def opened(path: str) -> Any:
    """Open a dataset whose files all lie in its folder.

    Raises:
        CorruptError: one is a link, or the dataset says that it has files elsewhere.
    """
    refuse_links(path)
    dataset = lance().dataset(path)
    for fragment in dataset.get_fragments():
        for file in fragment.data_files():
            # Lance may keep files under another base, which is any path or address.
            if getattr(file, "base_id", None) is not None:
                raise CorruptError(f"{path}: keeps {file.path} elsewhere, which is not followed")
            for part in file.path.split("/"):
                check_name(path, part)
    return dataset


def committed(path: str) -> bool:
    """Return whether Lance has committed anything at a path: a kill may leave folders without a version."""
    folder = os.path.join(path, "_versions")
    return os.path.isdir(folder) and any(n.endswith(".manifest") for n in os.listdir(folder))


def episodes_path(path: str) -> str:
    """Return where the episode data of a dataset lies.

    Example:
        >>> episodes_path("runs/prior.lance")
        'runs/prior_episodes.lance'
    """
    return f"{path.removesuffix('.lance')}_episodes.lance"


def plan_fields(schema: Schema, image_format: str) -> list[Field]:
    """Return how the columns of a new dataset are to lie."""
    return [Field(spec, _field_name(spec.name), _how(spec, image_format)) for spec in schema.columns]


def _how(spec: ColumnSpec, image_format: str) -> str:
    kind = spec.dtype.kind
    if not spec.row_nbytes:
        return "none"
    if holds(image_format, spec):
        return image_format
    if kind == "S" or (kind == "U" and spec.shape and not spec.is_text):
        return "raw"
    return "text" if kind == "U" else "list"


def _field_name(column: str) -> str:
    name = file_name(column, (EPISODE, STEP, *_LANCE_OWN))
    return "".join(f"%{ord(c):02X}" if c in ".`\"'" else c for c in name)


def arrow_schema(fields: list[Field], compat: bool = False, facts: Facts | None = None) -> Any:
    """Return the Arrow schema of a dataset; `compat` leaves our table of columns out, and the facts."""
    import pyarrow as pa

    found = [pa.field(EPISODE, pa.int32()), pa.field(STEP, pa.int32())]
    for field in fields:
        if field.how != "none":
            found.append(pa.field(field.name, arrow_type(field)))
    if compat:
        return pa.schema(found)
    table = [[f.spec.name, f.name, f.how, f.spec.dtype.str, list(f.spec.shape)] for f in fields]
    known: dict[Any, Any] = {} if facts is None else dict(facts.encode(PREFIX))
    return pa.schema(found, metadata={METADATA: json.dumps(table).encode(), **known})


def facts_of(schema: Any) -> Facts:
    """Return what a dataset's schema states of its episodes."""
    stored = (schema.metadata or {}).items()
    texts = {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in stored}
    return Facts.stated(texts, PREFIX)


def arrow_type(field: Field) -> Any:
    """Return the Arrow type of a field."""
    import pyarrow as pa

    if field.how in ("png", "jpeg"):
        return pa.binary()
    if field.how == "plain":
        return pa.from_numpy_dtype(field.spec.dtype)
    if field.how == "text":
        return pa.list_(pa.string()) if field.spec.shape else pa.string()
    dtype, size = _items(field)
    return pa.list_(pa.from_numpy_dtype(dtype), size)


def _items(field: Field) -> tuple[np.dtype[Any], int]:
    """Return dtype and number of the items of a step in its list."""
    spec = field.spec
    size = math.prod(spec.shape)
    if field.how == "raw":
        return np.dtype(np.uint8), spec.row_nbytes
    if spec.dtype.kind == "c":
        return np.dtype(f"<f{spec.dtype.itemsize // 2}"), 2 * size
    if spec.dtype.kind in "mM":
        return np.dtype("<i8"), size
    return spec.dtype, size


def fields_of(schema: Any, path: str, unsupported: dict[str, str] | None = None) -> list[Field]:
    """Return the columns of a dataset; image columns of other programs' come without a size yet, and those of a type
    that none has here go to `unsupported`.

    Raises:
        CorruptError: it has no episode and step numbers.
        UnsupportedError: a column is of a type that none has, and nobody asks which.
    """
    import pyarrow as pa

    for name in (EPISODE, STEP):
        if name not in schema.names:
            raise CorruptError(f"{path}: has no column {name!r}; it holds {schema.names}")
    given = (schema.metadata or {}).get(METADATA)
    if given is not None:
        try:
            table = json.loads(given)
            return [_field(path, stored_spec(n, shape, dt), f, how) for n, f, how, dt, shape in table]
        except CorruptError:
            raise
        except (ValueError, TypeError) as error:
            raise CorruptError(f"{path}: the table of its columns is damaged: {error}") from error
    fields = []
    for column in schema:
        name, kind = column.name, column.type
        if name in (EPISODE, STEP):
            continue
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            fields.append(Field(ColumnSpec(name, (0, 0, 3), np.dtype(np.uint8)), name, "jpeg"))
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            fields.append(Field(ColumnSpec(name, (), np.dtype("U")), name, "text"))
        elif pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
            dtype = np.dtype(kind.value_type.to_pandas_dtype())
            check_row(path, name, kind.list_size * dtype.itemsize)
            fields.append(Field(ColumnSpec(name, (kind.list_size,), dtype), name, "list"))
        elif _is_number(kind):
            dtype = np.dtype(kind.to_pandas_dtype())
            fields.append(Field(ColumnSpec(name, (), dtype), name, "plain"))
        else:
            what = f"of type {kind}, which no column is"
            if unsupported is None:
                raise UnsupportedError(f"{path}: column {name!r} is {what}")
            unsupported[name] = what
    return fields


def sized_fields(dataset: Any, path: str, unsupported: dict[str, str] | None = None) -> list[Field]:
    """Return the columns of a dataset, images as the first step has them; those that are not read go to `unsupported`.

    Raises:
        UnsupportedError: images are not read, and nobody asks which.
    """
    fields = fields_of(dataset.schema, path, unsupported)
    unsized = [f for f in fields if f.how == "jpeg" and f.spec.shape[:2] == (0, 0)]
    if not unsized or not dataset.count_rows():
        return fields
    first = dataset.take([0], columns=[f.name for f in unsized])
    found = {field.spec.name: field for field in fields}
    for field in unsized:
        name = field.spec.name
        try:
            refuse_missing(first.column(field.name), field.spec, path)
            size = picture_of(first.column(field.name)[0].as_py(), f"{path}: {field.name}")
        except (CorruptError, UnsupportedError) as error:
            if unsupported is None:
                raise
            sound = isinstance(error, UnsupportedError)
            kind = "pictures that are not read" if sound else "bytes that are no picture"
            unsupported[name] = f"of {kind} ({error})"
            del found[name]
            continue
        found[name] = replace(field, spec=ColumnSpec(name, size.shape, size.dtype))
    return list(found.values())


def table_of(dataset: Any, path: str) -> tuple[Array, Array, Array]:
    """Return lengths, offsets and numbers of the episodes: the runs of rows of one episode number."""
    table = dataset.to_table(columns=[EPISODE, STEP])
    numbers, steps = (table.column(name).to_numpy() for name in (EPISODE, STEP))
    if not len(numbers):
        return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64)
    begins = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    lengths = np.diff(np.append(begins, len(numbers)))
    if len(np.unique(numbers[begins])) != len(begins):
        raise CorruptError(f"{path}: the rows of an episode do not lie together; sort it by {EPISODE}")
    expected = np.arange(len(numbers)) - np.repeat(begins, lengths)
    if not np.array_equal(steps - np.repeat(steps[begins], lengths), expected):
        raise CorruptError(f"{path}: the steps of an episode are not in order; sort it by {STEP}")
    return lengths.astype(np.int32), begins.astype(np.int64), numbers[begins].astype(np.int64)


def all_data(data: Any) -> dict[int, dict[str, Any]]:
    """Return number of an episode -> its data; a table without numbers has those of all, from 0 on."""
    found = {}
    for at, row in enumerate(data.to_table().to_pylist()):
        number = row.pop(EPISODE, at)
        packed = row.get(PACKED)
        found[number] = {k: v for k, v in row.items() if v is not None} if packed is None else decode_data(packed)
    return found


def _field(path: str, spec: ColumnSpec, name: Any, how: Any) -> Field:
    """Return a field as the schema's metadata describes it, validating every value."""
    check_row(path, spec.name, spec.row_nbytes)
    images = how in ("png", "jpeg") and holds(how, spec)
    if not (images or how in ("list", "raw", "text") or (how == "none" and not spec.row_nbytes)):
        raise ValueError(f"column {spec} is stored as {how!r}")
    return Field(spec, str(name), how)


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
