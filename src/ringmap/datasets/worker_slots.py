"""The glue to PyTorch's DataLoader: batches become tensors, and are sent in slots that are reused.

    worker                                    the loader's process
    gather into a free slot -> slot number    tensors over the same memory, mapped when the slot first came
    ^                                             |
    +------ first byte of the slot: free <--------+ the last tensor of the batch is gone

A fresh block of shared memory for each batch, which PyTorch's own transport makes, costs more in page faults
than the gather: 19 ms against 1.1 ms for 12.6 MB. The blocks themselves are PyTorch's: it names no file that a
killed process could leave behind. A block travels once: PyTorch hands a descriptor over through a socket made for it,
where both sides prove who they are, which takes 0.5 ms of two processes' time. That the receiver kept its map, the
first byte says too.

Invariants: a slot is written only while no array or tensor over it is left in either process, nor in a child that the
loader's process forked; it is sent once for each time that it is filled; a worker keeps at most MAX_SLOTS, beyond
them batches go the way PyTorch sends any tensor. A map is kept only while the `Process` of its worker lives, which the
loader's iterator holds, and at most until a new slot comes after the worker ended, or after it gave the slot up; a
child that this process forks has none.
Not here: which rows are gathered (clips/), the list that a collate_fn sees (batch.py).
"""

from __future__ import annotations

import datetime
import itertools
import math
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from ringmap.datasets.batch import Clip, ClipBatch, Layout, worker
from ringmap.errors import RoleError
from ringmap.storage.columns.copying import ALIGNMENT, empty

__all__ = ["MAX_SLOTS", "Sender", "SlotBatch", "Slots", "as_tensor", "keep", "kept", "register", "worker_slots"]


Array = np.ndarray[Any, np.dtype[Any]]

MAX_SLOTS = 16
"""Slots of a worker: its batches that are being gathered, wait in the queue, or are still in use."""

_Part = tuple[int, tuple[int, ...], str]
"""Where in a slot a tensor lies: offset, shape, dtype."""

_FREE, _TAKEN, _SEEN, _KEPT = 0, 1, 2, 3
"""A slot that a forked child may still look at is SEEN, not free: the worker takes another in its place. One that is
KEPT is free, and mapped in the loader's process: its number is enough to send it."""

_TENSOR_KINDS = "biufc"
_PLAIN_KINDS = "SUmM"


# -- collating -------------------------------------------------------------------------------


def register() -> None:
    """Make `default_collate` accept our batches unchanged. Cheap to call again."""
    if Clip not in default_collate_fn_map:
        default_collate_fn_map[Clip] = _collate


def _collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
    like = batch.like if isinstance(batch, ClipBatch) else None
    if isinstance(batch, ClipBatch) and batch.whole:
        tensors = {name: as_tensor(values) for name, values in batch.columns.items()}
    else:
        tensors = _stack(batch, collate_fn_map)
    if worker() is not None:
        return SlotBatch(tensors, like)
    return tensors if like is None else like(tensors)


def _stack(clips: Any, collate_fn_map: Any) -> dict[str, Any]:
    """Collate clips as PyTorch does, but arrays and tensors into a slot, and text and dates to a list of B."""
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
            room = into.get(name)
            room = empty(*alike[name]) if room is None else room
            done[name] = as_tensor(np.stack(values, out=room))
        elif all(map(_is_text, values)):
            done[name] = values
        else:
            done[name] = collate(values, collate_fn_map=collate_fn_map)
    return done


def _is_text(value: Any) -> bool:
    """Tell whether a value is text or a date, or (nested) lists of such."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_text, value))
    return isinstance(value, str | bytes | datetime.date | datetime.timedelta)


def _as_array(value: Any) -> Any:
    """Return a plain tensor as an array over its memory, text and dates as Python's own, all else as it is."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _PLAIN_KINDS:
        return value.tolist()
    if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
        try:
            return value.numpy()
        except (TypeError, RuntimeError):  # bfloat16, sparse
            return value
    return value


def _are_alike(values: list[Any]) -> bool:
    first = values[0]
    return isinstance(first, np.ndarray) and all(
        isinstance(v, np.ndarray) and v.shape == first.shape and v.dtype == first.dtype for v in values
    )


def as_tensor(values: Any) -> Any:
    """Return an array as a tensor over the same memory; text, which no tensor holds, as nested lists."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(values) if values.dtype.kind in _TENSOR_KINDS else values.tolist()


# -- slots -----------------------------------------------------------------------------------


class _Slot:
    """A block of shared memory: its first byte says whether the loader's process is done with it."""

    __slots__ = ("_lease", "address", "block", "flag", "is_kept", "number", "sent")

    def __init__(self, nbytes: int, number: int = 0) -> None:
        self.block = torch.empty(nbytes, dtype=torch.uint8)
        self.block.share_memory_()  # type: ignore[no-untyped-call]
        self.address: int = self.block.data_ptr()
        self.flag: Array = self.block[:1].numpy()
        self._lease: weakref.ref[Array] | None = None
        self.number = number
        self.sent = self.is_kept = False

    @property
    def is_free(self) -> bool:
        return not self._is_held and (not self.sent or self.flag[0] in (_FREE, _KEPT))

    @property
    def is_seen(self) -> bool:
        """Whether only a forked child can still have it: it is never free again."""
        return not self._is_held and self.sent and bool(self.flag[0] == _SEEN)

    @property
    def _is_held(self) -> bool:
        return self._lease is not None and self._lease() is not None

    def lease(self) -> Array:
        """Return the whole block as an array; the slot is taken while it, or a view of it, lives."""
        if self.sent:
            self.is_kept = bool(self.flag[0] == _KEPT)
        self.sent, self.flag[0] = False, _TAKEN
        whole: Array = self.block.numpy()
        self._lease = weakref.ref(whole)
        return whole


class Slots:
    """The slots of one worker."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._numbers = itertools.count()
        self._name = os.urandom(8)
        self._lock = threading.Lock()  # PyTorch sends from a thread of its own

    def allocate(self, layout: Layout) -> dict[str, Array] | None:
        """Return arrays of this layout over a free slot, or None: then let PyTorch send what is gathered."""
        layout = {n: (shape, d) for n, (shape, d) in layout.items() if d.kind in _TENSOR_KINDS}
        offsets, at = {}, ALIGNMENT
        for name, (shape, dtype) in layout.items():
            offsets[name] = at
            at += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        with self._lock:
            slot = self._find(at)
            if slot is None:
                return None
            whole = slot.lease()
        return {name: _cut(whole, offsets[name], shape, dtype) for name, (shape, dtype) in layout.items()}

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
        self._slots.append(_Slot(nbytes, next(self._numbers)))
        return self._slots[-1]

    def places(self, arrays: dict[str, Array]) -> dict[str, tuple[_Slot, _Part]]:
        """Return, for those of the arrays that lie in a slot, the slot, and where in it."""
        with self._lock:
            slots = [(slot.address, slot.address + slot.block.numel(), slot) for slot in self._slots]
        found = {}
        for name, array in arrays.items():
            at = array.__array_interface__["data"][0]
            for begin, end, slot in slots:
                if begin < at < end:
                    found[name] = slot, (at - begin, array.shape, array.dtype.str)
                    break
        return found

    @property
    def sender(self) -> Sender:
        """Which slots this worker has now."""
        with self._lock:
            return Sender(self._name, os.getpid(), tuple(slot.number for slot in self._slots))

    @property
    def name(self) -> bytes:
        """The same for no two workers, also of a process that has the number of an earlier one."""
        return self._name

    def copies(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return copies of arrays over a free slot; none if there is no slot."""
        made = self.allocate({name: (array.shape, array.dtype) for name, array in arrays.items()}) or {}
        for name, copy in made.items():
            np.copyto(copy, arrays[name])
        return made


def _cut(whole: Array, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.ndarray(shape, dtype, whole, at)


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
    """A collated batch on its way out of a worker; what arrives is what `like` makes of its tensors, else a plain dict.

    Only the pickler of `multiprocessing` sends the slot. To a plain one, and to a deep copy, this is what arrives.
    """

    def __init__(self, tensors: Any, like: Callable[..., Any] | None = None) -> None:
        super().__init__(tensors)
        self.like: Callable[..., Any] = like or dict

    def __copy__(self) -> SlotBatch:
        return SlotBatch(self, self.like)

    def __reduce__(self) -> Any:
        return self.like, (dict(self),)


def _send(batch: SlotBatch) -> Any:
    unpack, args = _parts_of(batch)
    return (unpack, args) if batch.like is dict else (_arrived, (batch.like, unpack, args))


def _arrived(like: Callable[..., Any], unpack: Callable[..., dict[str, Any]], args: Any) -> Any:
    return like(unpack(*args))


def _parts_of(batch: SlotBatch) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
    """Return what makes the dict of tensors in the loader's process, and its arguments."""
    items, slots, used = dict[str, Any](batch), worker_slots(), None
    arrays = {name: a for name, value in batch.items() if (a := _whole_array(value)) is not None}
    places = slots.places(arrays)
    if not places:
        arrays = slots.copies(arrays)  # which hold the slot until it counts as sent
        places = slots.places(arrays)
    parts = {}
    for name, (slot, part) in places.items():
        # One that was sent before holds another batch too: whose end would free it?
        if not slot.sent and (used is None or used is slot):
            items[name], parts[name], used = None, part, slot
    if used is None:
        return dict, (items,)
    used.sent = True
    if used.is_kept:
        return _unpack_kept, (slots.name, used.number, items, parts)
    return _unpack_new, (slots.sender, used.number, used.block, items, parts)


ForkingPickler.register(SlotBatch, _send)


def _whole_array(value: Any) -> Array | None:
    """Return a tensor as an array, if it lies in one piece."""
    array = _as_array(value) if isinstance(value, torch.Tensor) else None
    return array if isinstance(array, np.ndarray) and array.flags.c_contiguous else None


def _unpack_new(
    sender: Sender, number: int, block: Any, items: dict[str, Any], parts: dict[str, _Part]
) -> dict[str, Any]:
    return _unpack(block, items, parts, keep(sender, number, block))


def _unpack_kept(name: bytes, number: int, items: dict[str, Any], parts: dict[str, _Part]) -> dict[str, Any]:
    return _unpack(kept(name, number), items, parts, True)


def _unpack(block: Any, items: dict[str, Any], parts: dict[str, _Part], is_kept: bool = False) -> dict[str, Any]:
    """Return the batch in the loader's process: tensors over the slot, which is free when all are gone."""
    whole: Array = block.numpy()
    free = _KEPT if is_kept else _FREE
    _when_gone(whole, _give_back, block[:1].numpy(), os.getpid(), _forks, free)
    for name, (offset, shape, dtype) in parts.items():
        items[name] = torch.from_numpy(_cut(whole, offset, shape, np.dtype(dtype)))
    return items


def _when_gone(held: Array, call: Callable[..., None], *args: Any) -> None:
    weakref.finalize(held, call, *args).atexit = False


def _give_back(flag: Array, pid: int, forks: int, free: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of the tensors, not the say
        flag[0] = free if forks == _forks else _SEEN


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


class Sender(NamedTuple):
    """A worker: its name, which no other has, its process number, and the numbers of the slots that it has now."""

    name: bytes
    pid: int
    slots: tuple[int, ...]


class _Maps:
    """The maps of one process. PyTorch unpacks in a thread of its own where it pins batches."""

    def __init__(self) -> None:
        self._of: dict[bytes, tuple[int, dict[int, Any]]] = {}  # name -> process number, maps
        self._lock = threading.RLock()  # a collection of garbage may call `drop` in here

    def keep(self, sender: Sender, number: int, block: Any) -> bool:
        """Keep the map of a slot, drop those that nobody needs; return False if no process started here sent it."""
        processes = {process.pid: process for process in multiprocessing.active_children()}
        process = processes.get(sender.pid)
        with self._lock:
            for name, (pid, _) in list(self._of.items()):
                if pid not in processes:
                    self.drop(name)
            if process is None:
                return False
            if sender.name not in self._of:
                weakref.finalize(process, _drop, sender.name).atexit = False
            _, maps = self._of.get(sender.name, (0, {}))
            left = {n: maps[n] for n in sender.slots if n in maps}
            self._of[sender.name] = sender.pid, {**left, number: block}
        return True

    def kept(self, name: bytes, number: int) -> Any:
        """Return the map of a slot."""
        try:
            return self._of[name][1][number]
        except KeyError:
            raise RoleError(
                "DataLoader: this batch lies in a worker's memory that another process has mapped; iterate over a "
                "loader in the process that began to, or make a loader here"
            ) from None

    def drop(self, name: bytes) -> None:
        """Drop the maps of a worker."""
        with self._lock:
            self._of.pop(name, None)


_maps = _Maps()


def keep(sender: Sender, number: int, block: Any) -> bool:
    """Keep the map of a slot that came; return whether its number is enough from now on."""
    # PyTorch counts who has a file with a name: a forked child that drops its maps would count them down.
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return False
    return _maps.keep(sender, number, block)


def kept(name: bytes, number: int) -> Any:
    """Return a slot whose map was kept."""
    return _maps.kept(name, number)


def _drop(name: bytes) -> None:
    _maps.drop(name)


def _forget_after_fork() -> None:
    global _maps
    _maps = _Maps()  # else the child would keep the memory of workers that are gone


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
