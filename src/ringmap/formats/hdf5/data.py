"""Data of episodes, as attributes of `ep_len`: typed where HDF5 holds the value as it is, else packed.

    episode_7.seed = 3              int64        a whole number, a fraction, a flag, an array of these
    episode_7.task = "push"         UTF-8        text
    ringmap_episode_000000007.0     uint8        what HDF5 would change (None, 2**70, NumPy's scalars), in parts
    ringmap_episode_columns         JSON         the names of all, first seen first
    ringmap_table                   uint64 (2,)  the mark of the table of episodes that they were written for

No group stands for them: stable-worldmodel's reader takes every member of the root for a column.
Invariants: what `add_episode_data` stored, `read_episode_data` returns equal, type and all.
Not here: the table itself (reader.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from ringmap.formats.common.hdf5_trial import is_c_text, loaded
from ringmap.formats.common.table_mark import fits
from ringmap.storage.records.blobs import decode_data, encode_data

__all__ = ["add_episode_data", "data_names", "is_of_table", "mark_table", "read_episode_data"]

Array = np.ndarray[Any, np.dtype[Any]]

_NAMES = "ringmap_episode_columns"
_TABLE = "ringmap_table"

_PART_NBYTES = 60_000
"""HDF5 holds an attribute of up to 64 kB in any version of its files."""


def add_episode_data(table: Any, first: int, data: Sequence[dict[str, Any]]) -> None:
    """Store the data of episodes from number `first` on in the dataset `ep_len`."""
    known = dict.fromkeys(data_names(table))
    count = len(known)
    for number, values in enumerate(data, first):
        packed = {name: value for name, value in values.items() if not _is_typed(name, value)}
        for name, value in values.items():
            known.setdefault(name)
            if name not in packed:
                _create(table, _typed_name(number, name), value)
        blob = encode_data(packed, "HDF5Writer") if packed else b""
        for part in range(-(-len(blob) // _PART_NBYTES)):
            piece = np.frombuffer(blob, np.uint8)[part * _PART_NBYTES : (part + 1) * _PART_NBYTES]
            _create(table, _packed_name(number, part), piece)
    if len(known) > count:
        table.attrs[_NAMES] = json.dumps(list(known))


def read_episode_data(table: Any, number: int) -> dict[str, Any]:
    """Return an episode's data from the dataset `ep_len`; {} when it has none."""
    attrs, parts = table.attrs, list[bytes]()
    found = {}
    for name in data_names(table):
        value = attrs.get(_typed_name(number, name)) if _is_plain(name) else None
        if value is not None:
            found[name] = loaded(value)
    while (part := attrs.get(_packed_name(number, len(parts)))) is not None:
        parts.append(np.asarray(part, np.uint8).tobytes())
    return {**found, **(decode_data(b"".join(parts)) if parts else {})}


def data_names(table: Any) -> list[str]:
    """Return the names of all data of episodes."""
    given = table.attrs.get(_NAMES)
    return [str(name) for name in json.loads(given)] if isinstance(given, str) else []


def mark_table(table: Any, mark: Array) -> None:
    """Note which episodes the data are of, if there are any."""
    if _NAMES in table.attrs:
        table.attrs.modify(_TABLE, mark)


def is_of_table(table: Any, lengths: Array, offsets: Array) -> bool:
    """Return whether the data were written for these episodes."""
    return fits(table.attrs.get(_TABLE), lengths, offsets)


def _typed_name(number: int, name: str) -> str:
    return f"episode_{number}.{name}"


def _packed_name(number: int, part: int) -> str:
    return f"ringmap_episode_{number:09d}.{part}"


def _is_plain(name: str) -> bool:
    return len(name) < 1000 and is_c_text(name)


def _is_typed(name: str, value: Any) -> bool:
    """Return whether an attribute of this name is read back equal, type and all."""
    if not _is_plain(name):
        return False
    if isinstance(value, np.ndarray):
        return (
            value.ndim > 0 and value.dtype.kind in "biuf" and value.itemsize <= 8 and 0 < value.nbytes <= _PART_NBYTES
        )
    if type(value) is str:
        return len(value) < 1000 and is_c_text(value)
    return type(value) in (bool, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def _create(table: Any, name: str, value: Any) -> None:
    """Create an attribute: without h5py's detour by another name, which costs more than all the rest."""
    if isinstance(value, str):
        array, kind = np.array(value, object), h5py.h5t.py_create(h5py.string_dtype(), logical=True)
    else:
        array = np.asarray(value)
        kind = h5py.h5t.py_create(array.dtype, logical=True)
    space = h5py.h5s.create_simple(array.shape) if array.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
    h5py.h5a.create(table.id, name.encode(), kind, space).write(array)
