"""Batches for a DataLoader: in a form that it uses without a copy, if there is one.

    __getitems__(ids) -> ClipBatch {column: (B, H, ...)}     one gather per column, in a worker into `allocate`d arrays
        default_collate  takes the block as it is            worker_slots.py
        collate_fn=mine  gets B clips, each {column: (H, ...)}, made when it looks

PyTorch is used only if it is already imported: without it there is no DataLoader.
Invariants: a batch that was changed, or accessed, is collated clip by clip as any list.
Not here: tensors, and how they travel between processes (worker_slots.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

__all__ = [
    "Clip",
    "ClipBatch",
    "Layout",
    "allocate",
    "as_clip",
    "as_mapping",
    "collates_whole",
    "of_clips",
    "of_columns",
    "stacked",
    "worker",
]


Array = np.ndarray[Any, np.dtype[Any]]
Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


class Clip(dict[str, Any]):
    """One clip of a batch: column -> `(H, ...)`. A dict; its type is how `default_collate` knows it."""

    __slots__ = ()


class ClipBatch(list[Clip]):
    """B clips over one block of columns; a list whose items are made when they are looked at.

    Args:
        columns: column -> `(B, H, ...)`.
        size: B.
        like: what makes the collated batch of its columns, if that has more than these; it can be pickled.
    """

    def __init__(self, columns: dict[str, Array], size: int, like: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.columns = columns
        self.like = like
        self._size = size
        self._first: Clip | None = None
        self._first_values: list[Any] = []
        self._made = False

    @classmethod
    def of(cls, clips: list[Any], like: Callable[..., Any] | None) -> ClipBatch:
        """Return a batch of clips that were made one by one."""
        batch = cls({}, len(clips), like)
        batch._made = True
        list.extend(batch, clips)
        return batch

    @property
    def whole(self) -> bool:
        """Whether no clip but the first was accessed, and that one was not changed."""
        if self._made:
            return False
        first = self._first
        return first is None or (
            first.keys() == self.columns.keys()
            and all(a is b for a, b in zip(first.values(), self._first_values, strict=True))
        )

    def _clip(self, number: int) -> Clip:
        return Clip((name, values[number]) for name, values in self.columns.items())

    def _make(self) -> None:
        """Become an ordinary list."""
        if not self._made:
            self._made = True
            clips = [self._clip(i) for i in range(self._size)]
            if self._first is not None:
                clips[0] = self._first
            super().extend(clips)

    def __len__(self) -> int:
        return super().__len__() if self._made else self._size

    def __getitem__(self, index: Any) -> Any:
        if not self._made and isinstance(index, int) and index == 0 and self._size:
            if self._first is None:
                self._first = self._clip(0)
                self._first_values = list(self._first.values())
            return self._first
        self._make()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Clip]:
        self._make()
        return super().__iter__()

    def __reduce__(self) -> Any:
        self._make()
        return list, (list(self),)


def _after_making(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def call(self: ClipBatch, *args: Any, **options: Any) -> Any:
        self._make()
        return method(self, *args, **options)

    call.__name__ = name
    return call


for _name in (
    "__add__",
    "__contains__",
    "__delitem__",
    "__eq__",
    "__ge__",
    "__gt__",
    "__iadd__",
    "__imul__",
    "__le__",
    "__lt__",
    "__mul__",
    "__ne__",
    "__repr__",
    "__reversed__",
    "__rmul__",
    "__setitem__",
    "append",
    "clear",
    "copy",
    "count",
    "extend",
    "index",
    "insert",
    "pop",
    "remove",
    "reverse",
    "sort",
):
    setattr(ClipBatch, _name, _after_making(_name))
ClipBatch.__hash__ = None


def worker() -> Any:
    """Return PyTorch's information about this DataLoader worker, or None."""
    data = sys.modules.get("torch.utils.data")  # not imported: there is no DataLoader
    asked = getattr(data, "get_worker_info", None)  # nor is it when another thread is importing it
    return None if asked is None else asked()


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
