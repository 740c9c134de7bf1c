"""The slots of workers that this process has mapped: each block is received once, and named from then on.

    from worker 7:  slot 0 and its block, slot 1 and its block, slot 0, slot 1, slot 0, ...
                           |                    |                ^       ^
                           v                    v                |       |
    worker 7 -> {        0: map,              1: map }  ---------+-------+

PyTorch hands a descriptor over through a socket made for it, where both sides prove who they are: 0.5 ms of two
processes' time for each batch. And of a map that is new, each piece that the loop looks at costs a page fault.

Invariants: a map is kept only while the `Process` of its worker lives, which the loader's iterator holds, and at most
until a new slot comes after the worker ended, or after it gave the slot up; a child that this process forks has none.
Not here: what lies in a slot, and when it is free (worker_slots.py).
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from typing import Any, NamedTuple

import torch

from ringmap.errors import RoleError

__all__ = ["Sender", "keep", "kept"]


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
    """Return a slot whose map was kept.

    Raises:
        RoleError: it was not kept in this process.
    """
    return _maps.kept(name, number)


def _drop(name: bytes) -> None:
    _maps.drop(name)


def _forget_after_fork() -> None:
    global _maps
    _maps = _Maps()  # else the child would keep the memory of workers that are gone


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
