"""Clips by id or by position, transformed, in the forms that a dataset returns.

    one(buffer, id)        column -> (history, ...)              __getitem__
    several(buffer, ids)   B clips over one block of rows        __getitems__, which a DataLoader calls
    mapping(buffer, ids)   column -> (B, history, ...)           __getitem__ with a list

Not here: which clips exist and how they are copied (engine.py), what ids mean to a view (view.py).
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from ringmap.buffers.engine import Engine
from ringmap.datasets.batch import ClipBatch, Layout, worker
from ringmap.datasets.loader_batches import allocate, as_clip, as_mapping, of_columns

__all__ = ["ClipBuffer", "mapping", "one", "several"]

Array = np.ndarray[Any, np.dtype[Any]]


class ClipBuffer(Protocol):
    """A buffer whose clips are found by the ids that `Engine.clips` takes; also what views and passes need."""

    transform: Any
    num_steps: int
    frameskip: int

    @property
    def engine(self) -> Engine:
        """The engine of the buffer."""
        ...

    def __len__(self) -> int:
        """Return the number of clips."""
        ...


def one(buffer: ClipBuffer, number: int) -> dict[str, Any]:
    """Return one clip."""
    block = buffer.engine.clips(np.array([number]), buffer.num_steps, buffer.frameskip)
    clip = {name: values[0] for name, values in block.items()}
    return clip if buffer.transform is None else buffer.transform(clip)


def several(buffer: ClipBuffer, ids: Array) -> list[Any]:
    """Return a list of clips over one block, which is shared memory in a worker."""
    engine, history, skip = buffer.engine, buffer.num_steps, buffer.frameskip
    if buffer.transform is not None:
        batch = ClipBatch(engine.clips(ids, history, skip), len(ids))
        return [as_clip(buffer.transform(dict(clip))) for clip in batch]
    return of_columns(engine.clips(ids, history, skip, _room(buffer, len(ids))), len(ids))


def mapping(buffer: ClipBuffer, ids: Array) -> dict[str, Any]:
    """Return clips as one batch."""
    if buffer.transform is None:
        # Not in a shared slot: a dataset around this one may keep it, and the loop writes into what it gets.
        return as_mapping(buffer.engine.clips(ids, buffer.num_steps, buffer.frameskip))
    clips = several(buffer, ids)
    return {n: np.stack([clip[n] for clip in clips]) for n in clips[0]} if clips else {}


def _room(buffer: ClipBuffer, size: int) -> dict[str, Array] | None:
    """Return the memory for a batch of `size` clips: None unless this process is a worker."""
    if worker() is None or (schema := buffer.engine.source.schema) is None:
        return None
    history = buffer.num_steps
    shapes: Layout = {s.name: ((size, history, *s.shape), s.dtype) for s in schema.columns}
    if "action" in shapes:
        shape, dtype = shapes["action"]
        shapes["action"] = (size, history, math.prod(shape[2:]) * buffer.frameskip), dtype
    return allocate(shapes)
