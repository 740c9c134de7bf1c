"""The glue to PyTorch's DataLoader: batches become tensors, and are sent in slots that are reused.

    worker                                    the loader's process
    gather into a free slot -> slot number    tensors over the same memory
    ^                                             |
    +------ first byte of the slot: free <--------+ the last tensor of the batch is gone

A fresh block of shared memory for each batch, which PyTorch's own transport makes, costs more in page faults
than the gather: 19 ms against 1.1 ms for 12.6 MB. The blocks themselves are PyTorch's: it names no file that a
killed process could leave behind.

Invariants: a slot is written only while no array or tensor over it is left in either process, nor in a child that the
loader's process forked; it is sent once for each time that it is filled; a worker keeps at most MAX_SLOTS, beyond
them batches go the way PyTorch sends any tensor.
Not here: which rows are gathered (clips/), the list that a collate_fn sees (batch.py).
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from ringmap.datasets.batch import Clip, ClipBatch, Layout, worker

__all__ = ["MAX_SLOTS", "SlotBatch", "Slots", "as_tensor", "register", "worker_slots"]

Array = np.ndarray[Any, np.dtype[Any]]

MAX_SLOTS = 16
"""Slots of a worker: its batches that are being gathered, wait in the queue, or are still in use."""

_ALIGN = 64
_FREE, _TAKEN, _SEEN = 0, 1, 2
"""A slot that a forked child may still look at is SEEN, not free: the worker takes another in its place."""

_TENSOR_KINDS = "biufc"


# -- collating -------------------------------------------------------------------------------


def register() -> None:
    """Make `default_collate` accept our batches unchanged. Cheap to call again."""
    if Clip not in default_collate_fn_map:
        default_collate_fn_map[Clip] = _collate


def _collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
    if isinstance(batch, ClipBatch) and batch.whole:
        tensors = {name: as_tensor(values) for name, values in batch.columns.items()}
    else:
        tensors = _stack(batch, collate_fn_map)
    return tensors if worker() is None else SlotBatch(tensors)


def _stack(clips: Any, collate_fn_map: Any) -> dict[str, Any]:
    """Collate changed clips as PyTorch does, but arrays and tensors into a slot."""
    columns = {name: [_as_array(clip[name]) for clip in clips] for name in clips[0]}
    alike = {
        name: ((len(values), *values[0].shape), values[0].dtype)
        for name, values in columns.items()
        if _are_alike(values)
    }
    into = (worker_slots().allocate(alike) if worker() is not None else None) or {}
    done = {}
    for name, values in columns.items():
        if name in alike:
            done[name] = as_tensor(np.stack(values, out=into.get(name)))
        else:
            done[name] = collate(values, collate_fn_map=collate_fn_map)
    return done


def _as_array(value: Any) -> Any:
    """Return a plain tensor as an array over the same memory; anything else, and what no array can be, as it is."""
    if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
        try:
            return value.numpy()
        except (TypeError, RuntimeError):  # bfloat16, sparse
            return value
    return value


def _are_alike(values: list[Any]) -> bool:
    first = values[0]
    return isinstance(first, np.ndarray) and all(
        isinstance(v, np.ndarray) and v.shape == first.shape and v.dtype == first.dtype
        for v in values
    )


def as_tensor(values: Any) -> Any:
    """Return an array as a tensor over the same memory; text, which no tensor holds, as nested lists."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(values) if values.dtype.kind in _TENSOR_KINDS else values.tolist()


# -- slots -----------------------------------------------------------------------------------


class _Slot:
    """A block of shared memory: its first byte says whether the loader's process is done with it."""

    __slots__ = ("_lease", "block", "flag", "sent")

    def __init__(self, nbytes: int) -> None:
        self.block = torch.empty(nbytes, dtype=torch.uint8)
        self.block.share_memory_()  # type: ignore[no-untyped-call]
        self.flag: Array = self.block[:1].numpy()
        self._lease: weakref.ref[Array] | None = None
        self.sent = False

    @property
    def is_free(self) -> bool:
        return not self._is_held and (not self.sent or bool(self.flag[0] == _FREE))

    @property
    def is_seen(self) -> bool:
        """Whether only a forked child can still have it: it is never free again."""
        return not self._is_held and self.sent and bool(self.flag[0] == _SEEN)

    @property
    def _is_held(self) -> bool:
        return self._lease is not None and self._lease() is not None

    def lease(self) -> Array:
        """Return the whole block as an array; the slot is taken while it, or a view of it, lives."""
        self.sent, self.flag[0] = False, _TAKEN
        whole: Array = self.block.numpy()
        self._lease = weakref.ref(whole)
        return whole


class Slots:
    """The slots of one worker."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()  # PyTorch sends from a thread of its own

    def allocate(self, layout: Layout) -> dict[str, Array] | None:
        """Return arrays of this layout over a free slot, or None: then let PyTorch send what is gathered."""
        layout = {n: (shape, d) for n, (shape, d) in layout.items() if d.kind in _TENSOR_KINDS}
        offsets, at = {}, _ALIGN
        for name, (shape, dtype) in layout.items():
            offsets[name] = at
            at += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        with self._lock:
            slot = self._find(at)
            if slot is None:
                return None
            whole = slot.lease()
        return {
            name: _cut(whole, offsets[name], shape, dtype)
            for name, (shape, dtype) in layout.items()
        }

    def _find(self, nbytes: int) -> _Slot | None:
        self._slots = [slot for slot in self._slots if not slot.is_seen]
        free = [slot for slot in self._slots if slot.is_free]
        for slot in free:
            if slot.block.numel() >= nbytes:
                return slot
        if len(self._slots) >= MAX_SLOTS:
            if not free:
                return None
            self._slots.remove(free[0])  # too small
        if not _has_space(nbytes):
            return None
        self._slots.append(_Slot(nbytes))
        return self._slots[-1]

    def holding(self, array: Array) -> tuple[_Slot | None, int]:
        """Return the slot in which an array lies, if in any, and its offset in bytes."""
        at = array.__array_interface__["data"][0]
        with self._lock:
            slots = list(self._slots)
        for slot in slots:
            begin = slot.block.data_ptr()
            if begin < at < begin + slot.block.numel():
                return slot, at - begin
        return None, 0

    def copies(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return copies of arrays over a free slot; none if there is no slot."""
        made = (
            self.allocate({name: (array.shape, array.dtype) for name, array in arrays.items()})
            or {}
        )
        for name, copy in made.items():
            np.copyto(copy, arrays[name])
        return made


def _cut(whole: Array, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return whole[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _has_space(nbytes: int) -> bool:
    """Return whether shared memory has room: where it is full, touching it kills the process."""
    try:
        found = os.statvfs("/dev/shm")
    except (AttributeError, OSError):
        return True
    return found.f_bavail * found.f_frsize > 2 * nbytes


_of_process: tuple[int, Slots] | None = None


def worker_slots() -> Slots:
    """Return the slots of this process."""
    global _of_process
    if _of_process is None or _of_process[0] != os.getpid():
        _of_process = os.getpid(), Slots()
    return _of_process[1]


# -- travelling ------------------------------------------------------------------------------


class SlotBatch(dict[str, Any]):
    """A collated batch on its way out of a worker; what arrives is a plain dict of tensors.

    Only the pickler of `multiprocessing` sends the slot. To a plain one, and to a deep copy, this is a dict.
    """

    def __copy__(self) -> SlotBatch:
        return SlotBatch(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _send(batch: SlotBatch) -> Any:
    items, used, slots, arrays = dict[str, Any](batch), None, worker_slots(), dict[str, Array]()
    for name, value in batch.items():
        array = _as_array(value) if isinstance(value, torch.Tensor) else None
        if isinstance(array, np.ndarray) and array.flags.c_contiguous:
            arrays[name] = array
    if all(slots.holding(array)[0] is None for array in arrays.values()):
        arrays = slots.copies(arrays)
    for name, array in arrays.items():
        slot, offset = slots.holding(array)
        # One that was sent before holds another batch too: whose end would free it?
        if slot is not None and not slot.sent and (used is None or used is slot):
            items[name] = _Part(offset, array.shape, str(array.dtype))
            used = slot
    if used is None:
        return dict, (items,)
    used.sent = True
    return _unpack, (used.block, items)


ForkingPickler.register(SlotBatch, _send)


class _Part(tuple[int, tuple[int, ...], str]):
    """Where in the slot a tensor lies: offset, shape, dtype."""

    __slots__ = ()

    def __new__(cls, *fields: Any) -> _Part:
        return super().__new__(cls, fields)

    def __reduce__(self) -> Any:
        return _Part, tuple(self)


def _unpack(block: Any, items: dict[str, Any]) -> dict[str, Any]:
    """Return the batch in the loader's process: tensors over the slot, which is free when all are gone."""
    whole: Array = block.numpy()
    _when_gone(whole, _give_back, block[:1].numpy(), os.getpid(), _forks)
    batch = {}
    for name, item in items.items():
        if isinstance(item, _Part):
            offset, shape, dtype = item
            item = torch.from_numpy(_cut(whole, offset, shape, np.dtype(dtype)))
        batch[name] = item
    return batch


def _when_gone(held: Array, call: Callable[..., None], *args: Any) -> None:
    weakref.finalize(held, call, *args).atexit = False


def _give_back(flag: Array, pid: int, forks: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of the tensors, not the say
        flag[0] = _FREE if forks == _forks else _SEEN


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)
