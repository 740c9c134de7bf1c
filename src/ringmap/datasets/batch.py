"""A batch of clips as PyTorch's DataLoader asks for it: a list of clips that is one block already.

    __getitems__(ids) -> ClipBatch {column: (B, H, ...)}     one gather per column
        default_collate  takes the block as it is            worker_slots.py
        collate_fn=mine  gets B clips, each {column: (H, ...)}, made when it looks

Invariants: a batch that was changed, or accessed, is collated clip by clip as any list.
Not here: tensors, and how they travel between processes (worker_slots.py); what makes these batches
(loader_batches.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["Clip", "ClipBatch", "Layout", "worker"]

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
