"""Putting a whole dataset in the place of another: the old one or the new one, whenever it is stopped.

    .NAME.new/             beside the dataset: what is being built (one writer at a time: its lock)
    .NAME.new/NAME         ... as it will be
    .NAME.new/plan         written when all is whole: THE COMMIT POINT. Inodes before and after
    .NAME.new/log          episodes that a dataset which is one file lacks (log.py)

    plan -> exchange each item (RENAME_EXCHANGE, else two renames) -> delete the old ones -> no plan

The next opening finishes what a plan says, and ignores what has none.
Invariants: what is deleted is a dataset of the format, file by file; a file that is none of its
own stays, and is named.
Not here: when a dataset is whole (staged.py), what belongs to one (each format).
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

LOG = "log"
"""The log of a dataset that is one file. A swap removes it; what only clears the folder leaves it alone."""

log = logging.getLogger("ringmap")

Owns = Callable[[str], bool]
"""Tells of a path relative to a dataset's folder whether the format writes such files."""


def staging_folder(path: str) -> str:
    """Return the folder beside a dataset in which its replacement is built."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.new")


def lock_folder(path: str) -> int:
    """Open a folder alone, and return its descriptor.

    Raises:
        LockedError: another writer has it.
        FileNotFoundError: it is not there (any more).
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

    Args:
        path: of the dataset that is to be.
        items: names of what the dataset consists of beside each other; the first is its own.
        owns: what belongs to a dataset of this format.

    Raises:
        LockedError: another writer is building there.
    """

    def __init__(self, path: str, items: Sequence[str], owns: Owns) -> None:
        self.parent = os.path.dirname(path)
        self.items = list(items)
        self.folder = staging_folder(path)
        self._owns = owns
        disk.make_folder(self.folder)
        if (kind := kind_at(self.folder)) != "a folder":  # what it led to would be cleared
            raise CorruptError(f"{self.folder}: is {kind}, expected a folder; remove it")
        self._fd = lock_folder(self.folder)
        try:
            self._clear()  # what a killed writer was building here
        except BaseException:
            self.close()
            raise

    @property
    def dataset(self) -> str:
        """Where the dataset is built."""
        return os.path.join(self.folder, self.items[0])

    def put(self) -> None:
        """Put what was built in its place: for good, once this has written its plan.

        Raises:
            OSError: the disk failed. Before the plan was written the old dataset stays; after it,
                the next opening goes on.
        """
        plan = {
            item: [_inode(os.path.join(self.parent, item)), _inode(os.path.join(self.folder, item))]
            for item in self.items
        }
        disk.sync_all(self.folder)
        disk.replace_file(os.path.join(self.folder, PLAN), json.dumps(plan).encode())
        disk.sync_all(self.folder)
        _carry_out(os.path.join(self.parent, self.items[0]), self.folder, self._owns)

    def close(self) -> None:
        """Remove what was built and is not decided, and give the lock back."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if not _has_plan(self.folder):
                self._clear()
                if not disk.remove_folder(self.folder) and os.listdir(self.folder) != [LOG]:
                    log.warning("%s holds files that no dataset has: left there", self.folder)
        finally:
            disk.unlock(fd)

    def _clear(self) -> None:
        for name in os.listdir(self.folder):
            if name != LOG:
                _delete(os.path.join(self.folder, name), self._owns)


def finish_swap(path: str, owns: Owns | None) -> None:
    """Finish a swap that was cut short, if one was; leave alone what a writer is at work on.

    Without `owns` only a swap of which a part is done, which nobody could read; and the plan is kept.
    """
    folder = staging_folder(path)
    if not _has_plan(folder):
        return
    with contextlib.suppress(LockedError, FileNotFoundError):
        fd = lock_folder(folder)
        try:
            _carry_out(path, folder, owns)
            if owns is not None:
                disk.remove_folder(folder)
        finally:
            disk.unlock(fd)


def each_file(folder: str) -> Iterator[str]:
    """Yield the paths of all that is below a folder and no folder itself, relative to it."""
    for at, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        for name in (*names, *links):
            yield os.path.relpath(os.path.join(at, name), folder)


def restore(path: str) -> None:
    """Finish the renames of a swap that was cut short among them; the next writer does the rest.

    Raises:
        EnvironmentFault: the folder may not be written by us.
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
    """Return a plan, believing nothing: it may come with a dataset that a stranger made.

    Raises:
        CorruptError: it is none, or would put or replace anything but the dataset and its side table.
    """
    file, name = os.path.join(folder, PLAN), os.path.basename(path)
    plan = read_json(file)
    ours = {name, name.removesuffix(".lance") + "_episodes.lance"}
    fits = isinstance(plan, dict) and set(plan) <= ours
    if not fits or not all(
        isinstance(v, list) and len(v) == 2 and all(map(_is_inode, v)) for v in plan.values()
    ):
        raise CorruptError(
            f"{file}: is no plan to replace {sorted(ours)}, by their inodes; if {path} is whole without it, "
            f"remove {folder}"
        )
    return dict(plan)


def _is_inode(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)
    )


def _carry_out(path: str, folder: str, owns: Owns | None) -> None:
    """Do what a plan says that is not done yet; without `owns`, only what was begun, and delete nothing."""
    parent, plan = os.path.dirname(path), _read_plan(path, folder)
    if owns is None and all(_inode(os.path.join(parent, i)) == old for i, (old, _) in plan.items()):
        return  # the old dataset is whole
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
    """Delete a dataset's folder, but for files that the format does not write."""
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
