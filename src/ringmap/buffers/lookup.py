"""Clips by id or by position, transformed, in the forms that a dataset returns.

    one(buffer, id)        column -> one item                     __getitem__
    several(buffer, ids)   B clips over one block of rows        __getitems__, which a DataLoader calls
    mapping(buffer, ids)   column -> (B, ...)                     __getitem__ with a list

A transition is a clip, too: `clips` of a buffer says how they are found and read.
Not here: which clips exist and how they are copied (engine.py), what ids mean to a view (view.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import numpy as np

from ringmap.buffers.batch import Batch
from ringmap.buffers.engine import Engine
from ringmap.clips.cut import Cut
from ringmap.clips.draws import Crossing
from ringmap.clips.gather import GONE, PINNED
from ringmap.clips.items import EpisodeMoment
from ringmap.clips.sequences import Index
from ringmap.datasets.base import clip_ids
from ringmap.datasets.batch import ClipBatch, Layout, worker
from ringmap.datasets.loader_batches import allocate, as_clip, as_mapping, of_clips, of_columns
from ringmap.errors import ClipIndexError, InputError
from ringmap.storage.columns.copying import aligned
from ringmap.storage.columns.schema import TEXT
from ringmap.storage.columns.values import flat

__all__ = [
    "STANDS",
    "ClipBuffer",
    "Clips",
    "fitting",
    "locate",
    "mapping",
    "one",
    "read",
    "several",
]

Array = np.ndarray[Any, np.dtype[Any]]


STANDS = Cut({}, None, computed=(("at", Index()),))
"""Says of a step in which episode it is, and where there."""


class Clips(Protocol):
    """What finds and reads clips: an engine, for one."""

    def anchors(self, ids: Array, cut: Cut) -> Array:
        """Return the anchors of the clips with these ids; GONE for an evicted one."""
        ...

    def replaced(self, positions: Array, cut: Cut) -> Array:
        """Return the anchors, with another clip in place of each that is GONE."""
        ...

    def read(
        self,
        positions: Array,
        cut: Cut,
        out: dict[str, Array] | None = None,
        asked: bool = False,
        crossing: Crossing | None = None,
        *,
        numbers: EpisodeMoment | None = None,
    ) -> dict[str, Array]:
        """Return the clips with these anchors, column -> `(B, ...)`; `positions` shows which were redrawn."""
        ...

    def numbering(self, cut: Cut) -> EpisodeMoment | None:
        """Return what numbers the episodes of one batch, for `read`; None: nothing does."""
        ...

    def layout(self, cut: Cut, size: int) -> Layout:
        """Return the shape and dtype of the columns of a batch."""
        ...

    def want(self, positions: Array, cut: Cut) -> None:
        """Ask the disk for clips that are to be read soon, if that pays off."""
        ...


class ClipBuffer(Protocol):
    """A buffer whose clips are found by ids; also what views and passes need."""

    num_steps: int
    frameskip: int

    @property
    def transform(self) -> Any:
        """What is called with each item, a dict; None: nothing."""
        ...

    @property
    def fps(self) -> Fraction | float | None:
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
    def clips(self) -> Clips:
        """What finds and reads its clips."""
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
    block = read(buffer, np.array([number]))
    clip, change = {name: values[0] for name, values in block.items()}, _changing(buffer)
    return clip if change is None else change(clip)


def several(buffer: ClipBuffer, ids: Array) -> list[Any]:
    """Return a list of clips over one block, which is shared memory in a worker."""
    change = _changing(buffer)
    if change is None:
        block = read(buffer, ids, _room(buffer, len(ids)))
        return of_columns(dict(block), len(ids), block.like)
    block = read(buffer, ids)
    made = [as_clip(change(dict(clip))) for clip in ClipBatch(dict(block), len(ids))]
    return of_clips(made, block.like)


def mapping(buffer: ClipBuffer, ids: Array) -> Batch[Any]:
    """Return clips as one batch, with its ids."""
    # Not in a shared slot: a dataset around this one may keep it, and the loop writes into what it gets.
    batch = read(buffer, ids)
    if worker() is not None:
        ForkingPickler.register(Batch, _send)
    if buffer.transform is None:
        nest = buffer.engine.nest
        return batch if nest is None else batch.like(nest(batch))
    change = _changing(buffer)
    assert change is not None
    clips = [change(dict(clip)) for clip in ClipBatch(batch, len(ids))]
    return batch.like(_stacked(clips) if clips else {})


def _changing(buffer: ClipBuffer) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return what makes an item of flat columns what a caller sees; None: it is that already."""
    nest, transform = buffer.engine.nest, buffer.transform
    if nest is None or transform is None:
        return transform if nest is None else nest
    return lambda clip: transform(nest(clip))


def _stacked(clips: list[dict[str, Any]]) -> dict[str, Any]:
    """Return items as a batch; a nested one of nested ones."""
    return {
        name: _stacked([clip[name] for clip in clips])
        if isinstance(value, dict)
        else aligned(np.stack([clip[name] for clip in clips]))
        for name, value in clips[0].items()
    }


def read(buffer: ClipBuffer, ids: Array, out: dict[str, Array] | None = None) -> Batch[Array]:
    """Return the clips with these ids as flat columns, with the ids of what came."""
    clips, cut = buffer.clips, buffer.cut
    asked = clips.anchors(ids, cut)
    positions = clips.replaced(asked.copy(), cut)
    return Batch(clips.read(positions, cut, out), positions, None, asked)


def locate(buffer: ClipBuffer, ids: Any, where: str) -> tuple[Array, Array]:
    """Return the numbers of the episodes of steps, and the steps in them, int64 `(B,)`, given the ids of steps.

    Args:
        buffer: a buffer, or a view whose cut is `STANDS`.
        ids: as in `batch.ids`.
        where: the call to name in an error.
    """
    clips, cut = buffer.clips, buffer.cut if buffer.cut.computed else STANDS
    wanted = clip_ids(ids, where)
    asked = clips.anchors(wanted + PINNED, cut)
    positions, numbers, lost = asked.copy(), clips.numbering(cut), asked == GONE
    if not lost.any():
        found = clips.read(positions, cut, numbers=numbers)
        lost = positions != asked
        if not lost.any() and len(wanted):
            lost = found["at_episode"] < 0
    if lost.any():
        raise ClipIndexError(
            f"{where}: no step with the id {int(wanted[lost][0])} is there; it was evicted, or is not in this view"
        )
    if numbers is not None and (table := numbers.table()) is not None:
        buffer.engine.numbered = table
    none = np.empty(0, np.int64)
    return (found["at_episode"], found["at_step"]) if len(wanted) else (none, none)


def _send(batch: Batch[Any]) -> Any:
    """Reduce a batch on its way out of a worker: its columns travel in a shared slot."""
    return batch.like, (as_mapping(dict(batch)),)


def _room(buffer: ClipBuffer, size: int) -> dict[str, Array] | None:
    """Return the memory for a batch of `size` clips: None unless this process is a worker."""
    return None if worker() is None else allocate(buffer.clips.layout(buffer.cut, size))


def fitting(out: Mapping[str, Array], engine: Engine, size: int, cut: Cut) -> dict[str, Array]:
    """Return the arrays of `out` to gather into, if they fit a batch of `size` items exactly. Text, whose width is that
    of the batch, comes in a new array.

    The shape of a computed column is known once it was computed; until then any array is accepted, and left out if it
    does not fit.
    """
    where, schema, layout = "ReplayBuffer.sample", engine.schema, engine.layout(cut, size)
    if engine.nest is not None:
        out, _ = flat(out, where)
    texts = {name for name, (_, dtype) in layout.items() if dtype == TEXT}
    out = {name: array for name, array in out.items() if name not in texts}
    for name, array in out.items():
        if name not in layout and name in cut.added:
            continue
        if name not in layout:
            whose = "batch" if schema is not None and name in schema.names else "buffer"
            raise InputError(f"{where}: out has a column {name!r} that the {whose} has not")
        shape, dtype = layout[name]
        got: Any = type(array)
        if isinstance(array, np.ndarray):
            got = f"{array.dtype} {array.shape}"
            if array.flags.c_contiguous and array.flags.writeable and array.shape == shape and array.dtype == dtype:
                continue
        raise InputError(f"{where}: out[{name!r}] must be a C-contiguous array {dtype} {shape}, got {got}")
    return dict(out)
