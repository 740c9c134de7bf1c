"""Backends: the known ones, and the choice of one for each column.

    storage="zarr"                              every column that Zarr can store
    storage={"pixels": "zarr"}                  this column; the others are memmaps
    storage={"pixels": Zarr("lz4", 16)}         with options

Not here: what a backend does (memmap.py, zarr.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmap.arguments import positive
from ringmap.errors import InputError
from ringmap.storage.columns.base import Column
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.columns.zarr import NAMED, ZarrColumn, chunk_steps

__all__ = [
    "BACKENDS",
    "Choice",
    "Storage",
    "Zarr",
    "check_storage",
    "choose",
    "disagreement",
]

BACKENDS: dict[str, type[Column]] = {"memmap": MemmapColumn, "zarr": ZarrColumn}
"""Storage backend name -> column class."""

_CHUNK_LIMIT = 1 << 30


@dataclass(frozen=True)
class Zarr:
    """Options of a compressed column: `storage={"pixels": ringmap.Zarr("lz4", chunk_steps=16)}`.

    Args:
        codecs: "zstd" (the default for None: Blosc with Zstandard, and shuffled bytes), "lz4" (Blosc with LZ4:
            larger, faster) or "none" (no compression). Each chain ends in a checksum.
        chunk_steps: steps that are compressed together, in one file; None for a value that suits the
            column. A clip reads every chunk that it touches whole.

    Example:
        >>> import numpy as np, ringmap, zarr
        >>> buf = ringmap.ReplayBuffer(1000, path="small", storage={"pixels": ringmap.Zarr("lz4", 16)})
        >>> buf.write_episode({"pixels": np.zeros((40, 64, 64, 3), np.uint8), "reward": np.zeros(40)})
        >>> zarr.open_array("small/columns/000-pixels.zarr", mode="r").chunks
        (16, 64, 64, 3)
    """

    codecs: str | None = None
    chunk_steps: int | None = None


Storage = str | Zarr | Mapping[str, "str | Zarr"]
"""How columns are stored: one backend for all, or column -> backend."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for a column: its backend, and the backend's options as the manifest stores them."""

    backend: str
    options: dict[str, Any]


def check_storage(storage: Storage, where: str) -> None:
    """Raise InputError for an unknown backend, or options that are not valid for any column."""
    if not isinstance(storage, str | Zarr | Mapping):
        raise InputError(
            f"{where}: storage must be one of {sorted(BACKENDS)}, ringmap.Zarr(...), or column -> one of these, "
            f"got {storage!r}"
        )
    for way in storage.values() if isinstance(storage, Mapping) else [storage]:
        if isinstance(way, Zarr):
            if way.chunk_steps is not None:
                positive(where, "chunk_steps", way.chunk_steps)
            if way.codecs is not None and not (isinstance(way.codecs, str) and way.codecs in NAMED):
                raise InputError(f"{where}: unknown codecs {way.codecs!r}; expected one of {sorted(NAMED)}")
        elif not (isinstance(way, str) and way in BACKENDS):
            raise InputError(f"{where}: unknown storage {way!r}; known: {sorted(BACKENDS)}")


def choose(storage: Storage, schema: Schema, where: str) -> list[Choice]:
    """Return the choice for each column, in order.

    Raises:
        InputError: an unknown column; chunks that are too large.
    """
    for name in storage if isinstance(storage, Mapping) else ():
        if name not in schema.names:
            raise InputError(f"{where}: storage names column {name!r}, which is not in {schema.names}")
    return [_choice(_way(storage, spec), spec.stored, where) for spec in schema.columns]


def _way(storage: Storage, spec: ColumnSpec) -> str | Zarr:
    return storage.get(spec.name, "memmap") if isinstance(storage, Mapping) else storage


def _choice(way: str | Zarr, spec: ColumnSpec, where: str) -> Choice:
    if way == "memmap" or not ZarrColumn.suits(spec):
        return Choice("memmap", {})
    asked = way if isinstance(way, Zarr) else Zarr()
    steps = int(asked.chunk_steps or chunk_steps(spec))
    if steps * spec.row_nbytes > _CHUNK_LIMIT:
        raise InputError(
            f"{where}: chunk_steps={steps} of column {spec.name!r} make chunks of {steps * spec.row_nbytes:,} "
            f"bytes, expected at most {_CHUNK_LIMIT:,}; choose fewer"
        )
    return Choice("zarr", {"codecs": asked.codecs or "zstd", "chunk_steps": steps})


def disagreement(storage: Storage, schema: Schema, stored: Sequence[Choice], where: str) -> str | None:
    """Return in words how the requested storage differs from the stored one. A bare name requests no options.

    Raises:
        InputError: as `choose`.
    """
    for spec, asked, choice in zip(schema.columns, choose(storage, schema, where), stored, strict=True):
        if asked.backend != choice.backend:
            return f"storage {asked.backend!r} for column {spec.name!r}, but on disk it is {choice.backend!r}"
        for name, value in asked.options.items():
            is_asked = getattr(_way(storage, spec), name, None) is not None
            if is_asked and value != choice.options[name]:
                return f"{name} {value} for column {spec.name!r}, but on disk it is {choice.options[name]}"
    return None
