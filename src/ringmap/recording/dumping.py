"""Dumps: a copy of a buffer at the user's path, which holds the old or the new copy at any moment.

    dump_path == the buffer's own path     nothing to do: every episode was a commit
    another path                           snapshot to .NAME.dump beside it, then both change places
    several buffers                        dump_path/env_0, dump_path/env_1, ...

Invariants: only a buffer without a writer is replaced or removed; anything else at the path is an
error, and stays.
Not here: what a snapshot is (storage/inspect/snapshot.py).
"""

from __future__ import annotations

import os
from typing import Any

from ringmap.errors import DamageError, ExistsError
from ringmap.formats.common.disk import exchange
from ringmap.recording.adapters import Sink
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock
from ringmap.storage.disk.paths import Paths, local_path
from ringmap.storage.records.manifest import examine

__all__ = ["dump", "place_of"]


def place_of(path: str | os.PathLike[str], index: int | None) -> str:
    """Return the dump path of the buffer of environment `index`; with None, that of all."""
    folder = local_path(path)
    return folder if index is None else os.path.join(folder, f"env_{index}")


def dump(sink: Sink, target: str, where: str) -> None:
    """Make a copy of a sink's buffer at `target`, in the place of an older one if there is one.

    Cost: reads and writes all that is stored; nothing for a buffer's own path.
    """
    if sink.path is not None and os.path.realpath(sink.path) == os.path.realpath(target):
        return
    make = sink.copy_to
    disk = Disk()
    if not disk.exists(target) or (disk.is_folder(target) and not disk.names(target)):
        make(target)
        return
    _check_is_buffer(disk, target, where)
    lock = WriterLock(disk, Paths(target).lock, target)
    lock.acquire()
    try:
        _replace(disk, make, target)
    finally:
        lock.release()


def _replace(disk: Disk, make: Any, target: str) -> None:
    parent, name = os.path.split(target)
    beside = os.path.join(parent, f".{name}.dump")
    if disk.exists(beside):
        disk.discard(beside)  # of a process that was killed
    make(beside)
    if not exchange(beside, target):
        # No such system call: after a kill between these two, the new copy is complete, under the name beside.
        disk.rename(target, f"{beside}.old")
        disk.rename(beside, target)
        beside = f"{beside}.old"
    disk.sync_folder(parent)
    disk.discard(beside)


def _check_is_buffer(disk: Disk, folder: str, where: str) -> None:
    try:
        found = disk.is_folder(folder) and examine(disk, folder) == "buffer"
    except DamageError:
        found = False
    if not found:
        raise ExistsError(f"{where}: {folder} holds something that is no buffer; choose another dump_path")
