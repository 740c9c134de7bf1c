"""Batches for a DataLoader: in a form that it uses without a copy, if there is one.

    allocate(layout)            arrays to gather into, in a worker
    of_columns, of_clips, as_clip     what `__getitems__` returns
    as_mapping              a batch that was asked for as a whole

PyTorch is used only if it is already imported: without it there is no DataLoader.
Not here: the list of clips (batch.py), tensors and shared memory (worker_slots.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringmap.datasets.batch import Clip, ClipBatch, Layout, worker

__all__ = [
    "allocate",
    "as_clip",
    "as_mapping",
    "collates_whole",
    "of_clips",
    "of_columns",
    "stacked",
]

Array = np.ndarray[Any, np.dtype[Any]]

_TENSOR_KINDS = "biufc"


def allocate(layout: Layout) -> dict[str, Array] | None:
    """Return arrays to gather into that travel to the process of the DataLoader without a copy, in a worker."""
    if worker() is None:
        return None
    from ringmap.datasets.worker_slots import worker_slots

    return worker_slots().allocate(layout)


def of_columns(columns: dict[str, Array], size: int, like: Callable[..., Any] | None = None) -> ClipBatch:
    """Return a batch as `__getitems__` does. `like` makes what it is collated to; None: a dict."""
    _register()
    return ClipBatch(columns, size, like)


def of_clips(clips: list[Any], like: Callable[..., Any]) -> ClipBatch:
    """Return a batch of transformed clips as `__getitems__` does."""
    return ClipBatch.of(clips, like)


def as_clip(clip: Any) -> Any:
    """Return a transformed clip as one that the DataLoader collates into a slot, if it is a plain dict."""
    if type(clip) is not dict:
        return clip
    _register()
    return Clip(clip)


def as_mapping(columns: dict[str, Array]) -> dict[str, Array]:
    """Return a batch that was asked for as a whole: in a worker, one that is copied into a slot when it is sent."""
    if worker() is None:
        return columns
    from ringmap.datasets.worker_slots import SlotBatch

    return SlotBatch(columns)


def stacked(clips: Sequence[Any]) -> dict[str, Any]:
    """Return clips as one batch: tensors as tensors, and all else, text too, as arrays."""
    if isinstance(clips, ClipBatch) and clips.whole:
        return dict(clips.columns)
    columns = {name: [clip[name] for clip in clips] for name in clips[0]}
    torch = sys.modules.get("torch")
    return {
        name: torch.stack(values)
        if torch is not None and isinstance(values[0], torch.Tensor)
        else np.stack([np.asarray(value) for value in values])
        for name, values in columns.items()
    }


def collates_whole(values: Any) -> bool:
    """Return whether a column of a batch becomes one tensor in a DataLoader: text and dates do not."""
    return not isinstance(values, np.ndarray) or values.dtype.kind in _TENSOR_KINDS


def _register() -> None:
    if "torch" in sys.modules:
        from ringmap.datasets.worker_slots import register

        register()
