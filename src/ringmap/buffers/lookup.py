"""Clips by id or by position, transformed, in the forms that a dataset returns.

    one(id)          column -> (history, ...)                __getitem__
    several(ids)     B clips over one block of rows          __getitems__, which a DataLoader calls
    mapping(ids)     column -> (B, history, ...)             __getitem__ with a list

Not here: which clips exist and how they are copied (engine.py), what ids mean to a view (view.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringmap.buffers.engine import Engine
from ringmap.datasets.batch import ClipBatch, Layout, worker
from ringmap.datasets.loader_batches import allocate, as_clip, as_mapping, of_columns

__all__ = ["ClipBuffer", "Lookup"]

Array = np.ndarray[Any, np.dtype[Any]]


class ClipBuffer(Protocol):
    """The buffer that views and passes need."""

    engine: Engine
    transform: Any
    num_steps: int
    frameskip: int

    def __len__(self) -> int:
        """Return the number of clips."""
        ...


class Lookup(NamedTuple):
    """Clips of one cut, by the ids that `Engine.clips` takes."""

    engine: Engine
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None
    history: int
    skip: int

    def one(self, number: int) -> dict[str, Any]:
        """Return one clip."""
        block = self.engine.clips(np.array([number]), self.history, self.skip)
        clip = {name: values[0] for name, values in block.items()}
        return clip if self.transform is None else self.transform(clip)

    def several(self, ids: Array) -> list[Any]:
        """Return a list of clips over one block, which is shared memory in a worker."""
        if self.transform is not None:
            batch = ClipBatch(self.engine.clips(ids, self.history, self.skip), len(ids))
            return [as_clip(self.transform(dict(clip))) for clip in batch]
        room = self._room(len(ids))
        return of_columns(self.engine.clips(ids, self.history, self.skip, room), len(ids))

    def mapping(self, ids: Array) -> dict[str, Any]:
        """Return clips as one batch."""
        if self.transform is None:
            # Not in a shared slot: a dataset around this one may keep it, and the loop writes into what it gets.
            return as_mapping(self.engine.clips(ids, self.history, self.skip))
        clips = self.several(ids)
        return {n: np.stack([clip[n] for clip in clips]) for n in clips[0]} if clips else {}

    def _room(self, size: int) -> dict[str, Array] | None:
        """Return the memory for a batch of `size` clips: None unless this process is a worker."""
        schema, history = self.engine.source.schema, self.history
        if schema is None or worker() is None:
            return None
        shapes: Layout = {s.name: ((size, history, *s.shape), s.dtype) for s in schema.columns}
        if "action" in shapes:
            shape, dtype = shapes["action"]
            shapes["action"] = (size, history, math.prod(shape[2:]) * self.skip), dtype
        return allocate(shapes)
