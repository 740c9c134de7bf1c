"""Repair: keep what is whole, drop and name the rest.

Invariants: the writer's lock is held while anything is changed; a dry run and the real one
list the same; a repair that was interrupted is finished by the next one.
Not here: what is wrong (faults.py), what is kept (salvage.py), how files are replaced (swap.py).
"""

from __future__ import annotations

import os
from contextlib import closing

from ringmap.errors import EnvironmentFault
from ringmap.storage.directory.entries import Paths
from ringmap.storage.directory.opening import refuse_links
from ringmap.storage.disk.advice import clear_errors
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.local import local_path
from ringmap.storage.disk.lock import WriterLock
from ringmap.storage.inspect.raw_files import Files
from ringmap.storage.inspect.salvage import Action, Salvage
from ringmap.storage.inspect.scan import Scan
from ringmap.storage.inspect.swap import finish, is_unfinished
from ringmap.storage.inspect.workplace import refuse_target, workplace
from ringmap.storage.read.recovery import Progress
from ringmap.storage.records.names import LOCK, SALVAGE, SALVAGED

__all__ = ["Action", "copy_repaired", "repair", "repair_folder"]

_BLOCK, _PAGE = 1 << 20, 4096


def repair(
    path: str | os.PathLike[str],
    dry_run: bool = True,
    progress: Progress | None = None,
    to: str | os.PathLike[str] | None = None,
) -> list[Action]:
    """Mend the buffer at `path`: every whole episode stays, the others are dropped.

    Look at the dry run first, and put back from a backup what you can: a column that is missing
    costs every episode, and once they are dropped they don't come back.

    Args:
        path: its directory.
        dry_run: change nothing, and return what would be done.
        progress: called with `(done, of)` episodes while they are verified.
        to: a directory, new or empty, for a copy that is mended, while `path` is only read: for a disk that is
            mounted read-only, or that is failing. What can't be read counts as damaged.

    Returns:
        What was done, or would be, in order; the same for both. Empty for a sound buffer.

    Raises:
        LockedError: a writer is at it.
        ExistsError, InputError: no copy can go to `to`.
        UnknownFormatError: no buffer is there, nor the remains of one.
        NewerVersionError: it is from a newer ringmap.
        CorruptError: it can't be mended, and why.
        EnvironmentFault: the disk is full, fails, or can't be written to. Mend it, and repair again; or give `to`.

    Cost: reads every live byte once. Writes the episode table (128 bytes per record), `state.bin` and the manifest
        beside, in the buffer's own directory, and needs that much room; with `to`, copies all that is stored.

    Processes and threads: takes the writer's lock. Close the readers as well: a file that is put in
    the place of another is not seen by who has the old one open.

    Example:
        >>> import numpy as np, os, ringmap
        >>> with ringmap.ReplayBuffer(max_steps=100, path="hurt") as buf:
        ...     for number in range(3):
        ...         buf.write_episode({"obs": np.full(20, number)})
        >>> buf.close()
        >>> with open("hurt/columns/000-obs.npy", "r+b") as file:
        ...     _ = file.seek(4096 + 25 * 8), file.write(b"?")
        >>> for action in ringmap.repair("hurt", dry_run=False):
        ...     print(action)
        episodes.npy: drop the episode of record 2: columns/000-obs.npy: rows of record 2 (positions 20 to 40) are
        damaged manifest.json: write it again: 2 episodes
        state.bin: show readers the repaired state
        >>> [int(episode["obs"][0]) for episode in ringmap.ReplayBuffer.open("hurt").episodes()]
        [0, 2]
    """
    folder = local_path(path)
    if to is not None:
        return copy_repaired(Disk(), folder, local_path(to), dry_run, progress)
    return repair_folder(Disk(), folder, dry_run, progress)


def repair_folder(disk: Disk, folder: str, dry_run: bool, progress: Progress | None = None) -> list[Action]:
    """Mend the buffer in `folder` of a disk; see `repair`."""
    refuse_links(disk, folder)
    files = Files(disk, folder)
    finishing = _finishing(files)
    if not finishing:  # before the lock leaves a file in a directory that is not ours
        Scan(disk, folder).close()
    if dry_run:
        return finishing or Salvage(disk, folder, progress).actions
    then = "free space or mend the disk, and repair again: it goes on where it was"
    with clear_errors("ringmap.repair", folder, lambda: _became(files), then):
        lock = WriterLock(disk, Paths(folder).lock, folder)
        try:
            lock.acquire()
        except EnvironmentFault as error:
            hint = "or mend a copy of what is whole elsewhere: ringmap.repair(path, to=...)"
            raise EnvironmentFault(error.errno, f"{error.strerror}; {hint}") from error
        try:
            return _carried_out(disk, folder, progress)
        finally:
            lock.release()


def _carried_out(disk: Disk, folder: str, progress: Progress | None) -> list[Action]:
    """Do it. The lock is held."""
    files = Files(disk, folder)
    finishing = _finishing(files)
    if finishing:
        finish(files)
    salvage = Salvage(disk, folder, progress)
    salvage.carry_out()
    return finishing + salvage.actions


def _finishing(files: Files) -> list[Action]:
    what = "finish the repair that was interrupted"
    return [Action(SALVAGE, what)] if is_unfinished(files) else []


def _became(files: Files) -> str:
    if is_unfinished(files):
        return "some files are replaced and some are not, so the buffer can't be opened yet"
    if files.disk.exists(files.path(SALVAGED)):
        return f"all is mended, but {SALVAGED} is there yet"
    return "no file of the buffer was replaced"


# -- to another place ------------------------------------------------------------------------------


def copy_repaired(disk: Disk, folder: str, to: str, dry_run: bool, progress: Progress | None = None) -> list[Action]:
    """Mend a copy of the buffer in `folder`, which is only read; see `repair`."""
    where = "ringmap.repair"
    refuse_links(disk, folder)
    refuse_target(folder, disk, os.path.realpath(to), where)
    files = Files(disk, folder)
    first = [Action(".", f"copy what can be read to {to}")]
    planned = _finishing(files) or Salvage(disk, folder, progress).actions
    if dry_run:
        return first + planned
    with workplace(folder, disk, to, where) as beside:
        _copy_files(files, "", beside)
        return first + _carried_out(disk, beside, progress)


def _copy_files(files: Files, name: str, target: str) -> None:
    """Copy the regular files of a folder, and of those in it."""
    for inner in files.names(name):
        path = os.path.join(target, os.path.basename(inner))
        if files.is_folder(inner):
            files.disk.make_folder(path)
            _copy_files(files, inner, path)
        elif files.is_file(inner) and inner != LOCK:
            _copy_file(files.disk, files.path(inner), path)
    files.disk.sync_folder(target)


def _copy_file(disk: Disk, source: str, target: str) -> None:
    """Copy a file, its holes as holes; a page that can't be read becomes zeros, which no checksum takes for rows."""
    with closing(disk.open(source)) as old, closing(disk.create(target, old.size())) as new:
        at, size = 0, _BLOCK
        while (at := max(at, old.next_data(at))) < old.size():
            try:
                data = old.read(size, at)
                if not data:  # it was cut meanwhile
                    break
            except OSError:
                at, size = (at, _PAGE) if size > _PAGE else (at + _PAGE, _PAGE)
                continue
            new.write(data, at)
            at, size = at + len(data), _BLOCK
        new.sync()
