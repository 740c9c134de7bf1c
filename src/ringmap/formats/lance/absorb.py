"""The log of a Lance dataset becomes rows: one commit of Lance per group of episodes.

Invariants: episode data is there before the episodes that it belongs to; what was taken over
before a kill is known by its episode number, and not written twice.
Not here: the log (formats/common), what columns look like (layout.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringmap.formats.common.log import Log, Record
from ringmap.formats.lance.layout import (
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

__all__ = ["absorb"]

PACKED = "ringmap"

_GROUP_NBYTES = 128 << 20


def absorb(path: str, log: Log) -> None:
    """Take the records of a log over into the dataset at `path`."""
    dataset = opened(path)
    rows = dataset.count_rows()
    done = 0
    if rows:
        done = dataset.take([rows - 1], columns=[EPISODE]).column(0)[0].as_py() + 1
    fields: list[Field] | None = fields_of(dataset.schema, path) if rows else None
    for group in _groups(log, done):
        if any(record.packed for record in group) or committed(episodes_path(path)):
            _add_data(episodes_path(path), group)
        notes = group[0].notes
        if fields is None:
            fields = plan_fields(group[0].schema, notes["images"])
        schema = dataset.schema if rows else arrow_schema(fields, notes["compat"])
        _add_rows(path, group, fields, schema, "append" if rows else "overwrite")
        dataset, rows = lance().dataset(path), 1


def _groups(log: Log, done: int) -> Iterator[list[Record]]:
    group: list[Record] = []
    size = 0
    for record in log.records():
        if record.number < done:
            continue
        group.append(record)
        size += sum(
            sum(map(len, v.values)) if hasattr(v, "values") else v.nbytes
            for v in record.columns.values()
        )
        if size >= _GROUP_NBYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _add_rows(path: str, group: list[Record], fields: list[Field], schema: Any, mode: str) -> None:
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        for record in group:
            arrays = [
                pa.array(np.full(record.length, record.number, np.int32)),
                pa.array(np.arange(record.length, dtype=np.int32)),
            ]
            names = [EPISODE, STEP]
            for field in fields:
                if field.how != "none":
                    names.append(field.name)
                    arrays.append(to_arrow(field, record.columns[field.spec.name]))
            batch = pa.record_batch(arrays, names=names)
            yield pa.record_batch([batch.column(name) for name in schema.names], schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    lance().write_dataset(reader, path, mode=mode)


def _add_data(path: str, group: list[Record]) -> None:
    """Add one row per episode; the whole table is written anew when its columns have to change."""
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
        lance().write_dataset(new, path, mode="append")
    else:
        lance().write_dataset(_table(known + fresh), path, mode="overwrite" if there else "create")


def _table(rows: list[tuple[int, bytes]]) -> Any:
    """Return the table of episode data: our own packing, and a plain column for each name that fits one."""
    import pyarrow as pa

    from ringmap.storage.blobs import decode_data

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
