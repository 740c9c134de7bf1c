"""Episodes become rows of a Lance dataset: one commit of Lance per group of them.

    rows -> files of rows, checked -> commit (Lance: a new version, by one rename)

Invariants: episode data is there before the episodes that it belongs to; a file counts only when it is as long as
Lance says: cut short by a limit or a quota, it is not committed.
Not here: the log (formats/common), what columns look like (columns.py).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringmap.formats.common.log import Record
from ringmap.formats.lance.columns import (
    EPISODE,
    METADATA,
    STEP,
    Field,
    arrow_schema,
    committed,
    episodes_path,
    fields_of,
    lance,
    opened,
    plan_fields,
    to_arrow,
)

__all__ = ["create", "extend"]

PACKED = "ringmap"

_GROUP_NBYTES = 128 << 20


def create(path: str) -> None:
    """Make an empty dataset."""
    import pyarrow as pa

    none = pa.array([], pa.int32())
    lance().write_dataset(pa.table({EPISODE: none, STEP: none}), path, mode="create")


def extend(path: str, episodes: Iterable[Record]) -> None:
    """Add episodes to the dataset at `path`."""
    dataset = opened(path)
    rows = dataset.count_rows()
    schema, fields, later = dataset.schema, list[Field](), 0
    for group in _groups(episodes):
        if any(record.packed for record in group) or committed(episodes_path(path)):
            _add_data(episodes_path(path), group)
        if not rows:
            fields = plan_fields(group[0].schema, group[0].notes["images"])
            schema = arrow_schema(fields, group[0].notes["compat"])
        elif not fields:
            fields = fields_of(schema, path)
            last = dataset.take([rows - 1], columns=[EPISODE]).column(0)[0].as_py()
            later = last + 1 - group[0].number  # another program's numbers need not count from 0
        _commit(path, _batches(group, fields, schema, later), schema, fresh=not rows)
        rows = 1


def _groups(episodes: Iterable[Record]) -> Iterator[list[Record]]:
    group: list[Record] = []
    size = 0
    for record in episodes:
        group.append(record)
        size += sum(value.nbytes for value in record.columns.values())
        if size >= _GROUP_NBYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _batches(group: list[Record], fields: list[Field], schema: Any, later: int) -> Iterator[Any]:
    import pyarrow as pa

    for record in group:
        arrays = [
            pa.array(np.full(record.length, record.number + later, np.int32)),
            pa.array(np.arange(record.length, dtype=np.int32)),
        ]
        names = [EPISODE, STEP]
        for field in fields:
            if field.how != "none":
                names.append(field.name)
                arrays.append(to_arrow(field, record.columns[field.spec.name]))
        batch = pa.record_batch(arrays, names=names)
        yield pa.record_batch([batch.column(name) for name in schema.names], schema=schema)


def _commit(path: str, batches: Iterator[Any], schema: Any, fresh: bool) -> None:
    """Write rows into files, and commit them: after what is there, or in its place."""
    import pyarrow as pa
    from lance.fragment import write_fragments

    module = lance()
    there = committed(path)
    version = module.dataset(path).version if there else None
    reader = pa.RecordBatchReader.from_batches(schema, batches)
    mode = ("overwrite" if there else "create") if fresh else "append"
    made = write_fragments(reader, path, schema=schema, mode=mode)
    for fragment in made:
        for file in fragment.files:
            stored = os.path.getsize(os.path.join(path, "data", file.path))
            if file.file_size_bytes not in (None, stored):
                raise OSError(
                    errno.EFBIG,
                    f"{stored} of {file.file_size_bytes} bytes were written; is there a limit on the size of files?",
                    file.path,
                )
    kind = module.LanceOperation
    what = kind.Overwrite(schema, made) if fresh else kind.Append(made)
    module.LanceDataset.commit(path, what, read_version=version)


def _add_data(path: str, group: list[Record]) -> None:
    """Add one row per episode; the whole table is written again when its columns have to change."""
    known: list[tuple[int, bytes]] = []
    old = None
    if committed(path):
        old = opened(path)
        if PACKED in old.schema.names:
            table = old.to_table(columns=[EPISODE, PACKED])
            known = list(zip(table[EPISODE].to_pylist(), table[PACKED].to_pylist(), strict=True))
    there = len(known)
    fresh = [(r.number, r.packed) for r in group if r.number >= there]
    if not there:  # no episode so far had any
        fresh = [(number, b"") for number in range(group[0].number)] + fresh
    if not fresh:
        return
    new = _table(fresh)
    if old is not None and old.schema.equals(new.schema, check_metadata=True):
        _commit(path, iter(new.to_batches()), new.schema, fresh=False)
    else:
        new = _table(known + fresh)
        _commit(path, iter(new.to_batches()), new.schema, fresh=True)


def _table(rows: list[tuple[int, bytes]]) -> Any:
    """Return the table of episode data: our own packing, and a plain column for each name that fits one."""
    import pyarrow as pa

    from ringmap.storage.records.blobs import decode_data

    data = [decode_data(packed) for _, packed in rows]
    names = list(dict.fromkeys(name for values in data for name in values))
    columns = {
        EPISODE: pa.array([number for number, _ in rows], pa.int32()),
        PACKED: pa.array([packed for _, packed in rows], pa.binary()),
    }
    for name in names:
        if name in columns or not name or any(c in ".`\"'" or c < " " for c in name):
            continue
        values = [v.get(name) for v in data]
        values = [v.item() if isinstance(v, np.generic) else v for v in values]
        try:
            columns[name] = pa.array(
                [v.tolist() if isinstance(v, np.ndarray) else v for v in values]
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeError, TypeError):
            continue
        if pa.types.is_null(columns[name].type):
            del columns[name]
    made = pa.table(columns)
    return made.replace_schema_metadata({METADATA: json.dumps(names).encode()})
