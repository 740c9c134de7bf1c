"""Replace a whole dataset by another: after a stop at any moment, the path holds the old one or the new one.

    .NAME.new/             beside the dataset: the folder of the new one (one writer at a time: its lock)
    .NAME.new/NAME         ... the new dataset
    .NAME.new/plan         written when the new dataset is complete: inodes before and after

    plan -> exchange each item (RENAME_EXCHANGE, else two renames) -> delete the old ones -> no plan
            THE COMMIT POINT is the first rename

The next opening finishes a plan that was begun. Of one that was not, readers see the old dataset: so it stays, and the
next writer drops the plan, and a folder without one.
Invariants: what is readable after a stop is what the next writer extends; only the files of a dataset of the format are
deleted, one by one; any other file stays, and is named.
Not here: when a dataset is complete (writer.py), what belongs to one (each format).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringmap.errors import CorruptError, EnvironmentFault, LockedError
from ringmap.formats.common import disk
from ringmap.formats.common.untrusted import kind_at, read_json

__all__ = ["Staging", "each_file", "finish_swap", "lock_folder", "restore", "staging_folder"]

PLAN = "plan"

log = logging.getLogger("ringmap")

Owns = Callable[[str], bool]
"""Returns whether the format writes a file with this path relative to a dataset's folder."""


def staging_folder(path: str) -> str:
    """Return the folder beside a dataset in which its replacement is built."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.new")


def lock_folder(path: str) -> int:
    """Open a folder exclusively, and return its descriptor.

    Raises:
        LockedError: another writer has it.
        FileNotFoundError: it does not exist, or no longer exists.
    """
    while True:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            disk.lock(fd, path)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was replaced before we had the lock


class Staging:
    """A folder in which a dataset is built, from the lock on it to the swap.

    Raises:
        LockedError: another writer is building there.
    """

    def __init__(self, path: str, items: Sequence[str], owns: Owns) -> None:
        self.parent = os.path.dirname(path)
        self.items = list(items)
        self.folder = staging_folder(path)
        self._owns = owns
        disk.make_folder(self.folder)
        if (kind := kind_at(self.folder)) != "a folder":  # the target of a link would be cleared
            raise CorruptError(f"{self.folder}: is {kind}, expected a folder; remove it")
        self._fd = lock_folder(self.folder)
        try:
            self._clear()  # the unfinished work of a killed writer
        except BaseException:
            self.close()
            raise

    @property
    def dataset(self) -> str:
        """Where the dataset is built."""
        return os.path.join(self.folder, self.items[0])

    def put(self) -> None:
        """Move the new dataset into its place: permanently, once the first rename is done.

        Raises:
            OSError: the disk failed. Before the first rename the old dataset stays; after it, the next opening
                continues.
        """
        plan = {
            item: [_inode(os.path.join(self.parent, item)), _inode(os.path.join(self.folder, item))]
            for item in self.items
        }
        disk.sync_all(self.folder)
        if all(old is None for old, _ in plan.values()):  # nothing is replaced: the main one comes last, in one step
            for item in (item for item in reversed(self.items) if plan[item][1] is not None):
                disk.replace(os.path.join(self.folder, item), os.path.join(self.parent, item))
            return
        disk.replace_file(os.path.join(self.folder, PLAN), json.dumps(plan).encode())
        disk.sync_all(self.folder)
        path = os.path.join(self.parent, self.items[0])
        _carry_out(path, self.folder, _read_plan(path, self.folder), self._owns)

    def close(self) -> None:
        """Remove a new dataset without a plan, and release the lock."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if not _has_plan(self.folder):
                self._clear()
                if not disk.remove_folder(self.folder):
                    log.warning("%s holds files that no dataset has: left there", self.folder)
        finally:
            disk.unlock(fd)

    def _clear(self) -> None:
        for name in os.listdir(self.folder):
            _delete(os.path.join(self.folder, name), self._owns)


def finish_swap(path: str, owns: Owns | None) -> None:
    """Finish an interrupted swap that was begun, drop one that was not; do not touch the work of a running writer.

    Without `owns`, only finish the renames; and keep the plan.
    """
    folder = staging_folder(path)
    if not _has_plan(folder):
        return
    with contextlib.suppress(LockedError, FileNotFoundError):
        fd = lock_folder(folder)
        try:
            plan = _read_plan(path, folder)
            if any(_inode(os.path.join(os.path.dirname(path), item)) != old for item, (old, _) in plan.items()):
                _carry_out(path, folder, plan, owns)
            elif owns is not None:  # readers have seen the old dataset
                disk.remove(os.path.join(folder, PLAN))
                for name in os.listdir(folder):
                    _delete(os.path.join(folder, name), owns)
            if owns is not None:
                disk.remove_folder(folder)
        finally:
            disk.unlock(fd)


def each_file(folder: str) -> Iterator[str]:
    """Yield the relative paths of everything below a folder that is not a folder."""
    for at, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        for name in (*names, *links):
            yield os.path.relpath(os.path.join(at, name), folder)


def restore(path: str) -> None:
    """Finish the renames of a swap that was interrupted between them; the next writer does the rest.

    Raises:
        EnvironmentFault: this process may not write to the folder.
    """
    try:
        finish_swap(path, None)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise EnvironmentFault(
            error.errno,
            f"{path}: its writer was killed while it replaced this dataset, and opening it finishes that; open it once "
            f"with permission to write ({error})",
        ) from error


def _has_plan(folder: str) -> bool:
    return kind_at(folder) == "a folder" and kind_at(os.path.join(folder, PLAN)) == ""


def _read_plan(path: str, folder: str) -> dict[str, list[Any]]:
    """Return a validated plan: it may come with an untrusted dataset."""
    file, name = os.path.join(folder, PLAN), os.path.basename(path)
    plan = read_json(file)
    ours = {name, name.removesuffix(".lance") + "_episodes.lance"}
    fits = isinstance(plan, dict) and set(plan) <= ours
    if not fits or not all(isinstance(v, list) and len(v) == 2 and all(map(_is_inode, v)) for v in plan.values()):
        raise CorruptError(
            f"{file}: is no plan to replace {sorted(ours)}, by their inodes; if {path} is whole without it, "
            f"remove {folder}"
        )
    return dict(plan)


def _is_inode(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value))


def _carry_out(path: str, folder: str, plan: dict[str, list[Any]], owns: Owns | None) -> None:
    """Do the remaining steps of a plan; without `owns`, delete nothing."""
    parent = os.path.dirname(path)
    for item, (old, new) in plan.items():
        target, source = os.path.join(parent, item), os.path.join(folder, item)
        now = _inode(target)
        if now == new:
            continue
        if now is not None and now != old:
            log.warning("%s was put there by another program: left alone", target)
            continue
        if now is not None and (new is None or not disk.exchange(source, target)):
            disk.replace(target, source + ".old")
            now = None
        if now is None and new is not None:
            disk.replace(source, target)
    disk.sync_all(parent)
    if owns is None:
        return
    for name in os.listdir(folder):
        if name != PLAN:
            _delete(os.path.join(folder, name), owns)
    disk.remove(os.path.join(folder, PLAN))


def _inode(path: str) -> list[int] | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return [found.st_dev, found.st_ino]


def _delete(path: str, owns: Owns) -> None:
    """Delete a dataset's folder, except for files that the format does not write."""
    if not os.path.isdir(path) or os.path.islink(path):
        disk.remove(path)
        return
    for at, folders, names in os.walk(path, topdown=False):
        for name in names:
            file = os.path.join(at, name)
            if owns(os.path.relpath(file, path)):
                disk.remove(file)
        for name in folders:
            disk.remove_folder(os.path.join(at, name))
    disk.remove_folder(path)
