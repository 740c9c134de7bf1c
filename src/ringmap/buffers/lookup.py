"""Clips by id or by position, transformed, in the forms that a dataset returns.

    one(buffer, id)        column -> one item                     __getitem__
    several(buffer, ids)   B clips over one block of rows        __getitems__, which a DataLoader calls
    mapping(buffer, ids)   column -> (B, ...)                     __getitem__ with a list

Not here: which clips exist and how they are copied (engine.py), what ids mean to a view (view.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ringmap.buffers.engine import Engine
from ringmap.clips.cut import Cut
from ringmap.datasets.batch import ClipBatch, worker
from ringmap.datasets.loader_batches import allocate, as_clip, as_mapping, of_columns
from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema

__all__ = ["ClipBuffer", "fitting", "mapping", "one", "several"]

Array = np.ndarray[Any, np.dtype[Any]]


class ClipBuffer(Protocol):
    """A buffer whose clips are found by the ids that `Engine.clips` takes; also what views and passes need."""

    transform: Any
    num_steps: int
    frameskip: int

    @property
    def fps(self) -> float | None:
        """Steps per second."""
        ...

    @property
    def reward_at(self) -> str | None:
        """Where rewards stand."""
        ...

    @property
    def engine(self) -> Engine:
        """The engine of the buffer."""
        ...

    @property
    def cut(self) -> Cut:
        """What a clip holds."""
        ...

    def __len__(self) -> int:
        """Return the number of clips."""
        ...


def one(buffer: ClipBuffer, number: int) -> dict[str, Any]:
    """Return one clip."""
    block = buffer.engine.clips(np.array([number]), buffer.cut)
    clip = {name: values[0] for name, values in block.items()}
    return clip if buffer.transform is None else buffer.transform(clip)


def several(buffer: ClipBuffer, ids: Array) -> list[Any]:
    """Return a list of clips over one block, which is shared memory in a worker."""
    engine, cut = buffer.engine, buffer.cut
    if buffer.transform is not None:
        batch = ClipBatch(engine.clips(ids, cut), len(ids))
        return [as_clip(buffer.transform(dict(clip))) for clip in batch]
    return of_columns(engine.clips(ids, cut, _room(buffer, len(ids))), len(ids))


def mapping(buffer: ClipBuffer, ids: Array) -> dict[str, Any]:
    """Return clips as one batch."""
    if buffer.transform is None:
        # Not in a shared slot: a dataset around this one may keep it, and the loop writes into what it gets.
        return as_mapping(buffer.engine.clips(ids, buffer.cut))
    clips = several(buffer, ids)
    return {n: np.stack([clip[n] for clip in clips]) for n in clips[0]} if clips else {}


def _room(buffer: ClipBuffer, size: int) -> dict[str, Array] | None:
    """Return the memory for a batch of `size` clips: None unless this process is a worker."""
    if worker() is None or (schema := buffer.engine.source.schema) is None:
        return None
    return allocate(buffer.cut.layout(schema, size))


def fitting(
    out: Mapping[str, Array], schema: Schema | None, size: int, cut: Cut
) -> dict[str, Array]:
    """Return the arrays of `out` to gather into, if they fit a batch of `size` items exactly.

    Columns that are computed come in new arrays: those of an earlier batch are left out.

    Raises:
        InputError: one does not fit.
    """
    where, layout = "ReplayBuffer.sample", {} if schema is None else cut.layout(schema, size)
    made = {name for name, _ in cut.functions}
    made.update(added for name, how in cut.computed for added in how.adds(name))
    for name, array in out.items():
        if name in made:
            continue
        if name not in layout:
            whose = "batch" if schema is not None and name in schema.names else "buffer"
            raise InputError(f"{where}: out has a column {name!r} that the {whose} has not")
        shape, dtype = layout[name]
        got: Any = type(array)
        if isinstance(array, np.ndarray):
            got = f"{array.dtype} {array.shape}"
            if (
                array.flags.c_contiguous and array.flags.writeable
                and array.shape == shape and array.dtype == dtype
            ):  # fmt: skip
                continue
        raise InputError(
            f"{where}: out[{name!r}] must be a C-contiguous array {dtype} {shape}, got {got}"
        )
    return {name: array for name, array in out.items() if name not in made}
