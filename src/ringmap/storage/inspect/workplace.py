"""The directory in which a copy of a buffer is made, before it has its name.

    .NAME.ringmap-unfinished/    all of it, synced -> renamed to NAME

Invariants: nothing is at the target before all of it is there and synced; the place is locked.
Not here: what is copied (snapshot.py, repair.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ringmap.errors import EnvironmentFault, ExistsError, InputError, LockedError
from ringmap.storage.commit.create import make_folder
from ringmap.storage.directory.entries import NAMES, Paths
from ringmap.storage.disk.advice import clear_errors
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.records.names import LOCK

__all__ = ["refuse_target", "workplace"]


@contextlib.contextmanager
def workplace(own: str, disk: Disk, folder: str, where: str) -> Iterator[str]:
    """Lend an empty directory that becomes `folder` if the block succeeds, and is gone if it fails.

    Args:
        own: the directory of the buffer that is copied, "" for one in RAM.
        disk: where the copy goes.
        folder: its directory, absolute.
        where: the method to name in an error.

    Raises:
        InputError, ExistsError: no copy may go there.
        LockedError: another one is being made.
        EnvironmentFault: the disk is full or fails.
    """
    folder = os.path.realpath(folder)
    refuse_target(own, disk, folder, where)
    parent, name = os.path.split(folder)
    beside = os.path.join(parent, f".{name}.ringmap-unfinished")
    said = f"nothing is at {folder}, and the buffer is as it was"
    with clear_errors(where, folder, lambda: said):
        make_folder(disk, parent)
        with _held(disk, beside, folder, where):
            refuse_target(own, disk, folder, where)  # another one may have come first
            yield beside
            disk.rename(beside, folder)
            try:
                disk.sync_folder(parent)
            except OSError:  # it may be there after a power cut, or not: better not
                disk.remove_folder(folder)
                raise


def refuse_target(own: str, disk: Disk, folder: str, where: str) -> None:
    """Raise unless a copy may go there."""
    own = os.path.realpath(own) if own else own
    if own and (folder == own or folder.startswith(own + os.sep)):
        raise InputError(f"{where}: {folder} lies inside the buffer itself; choose a path outside")
    if not disk.exists(folder):
        return
    if not disk.is_folder(folder) or disk.names(folder):
        raise ExistsError(f"{where}: something is at {folder} already; expected a directory that is new or empty")
    if os.path.ismount(folder):
        raise InputError(f"{where}: {folder} is a mount point, which nothing can be renamed to; name a directory in it")


@contextlib.contextmanager
def _held(disk: Disk, beside: str, folder: str, where: str) -> Iterator[None]:
    """Hold an empty directory under the temporary name, and leave nothing there if the block fails."""
    with contextlib.suppress(FileExistsError):
        disk.make_folder(beside)
    lock = WriterLock(disk, Paths(beside).lock, beside)
    try:
        lock.acquire()
    except LockedError:
        raise LockedError(
            f"{where}: a copy to {folder} is being made by {describe(holder_of(Paths(beside).lock))}; "
            "wait for it, or choose another path"
        ) from None
    except BaseException as error:
        if not disk.exists(beside) and isinstance(error, EnvironmentFault):
            raise LockedError(
                f"{where}: another copy to {folder} ended just now; look at what is there, and call it again"
            ) from None
        if disk.exists(beside) and set(disk.names(beside)) <= {LOCK}:
            disk.remove_folder(beside)
        raise
    try:
        left = set(disk.names(beside)) - {LOCK}
        if foreign := left - NAMES:
            raise ExistsError(
                f"{where}: {beside} holds something that no copy left there ({', '.join(sorted(foreign)[:3])}); "
                "move it away"
            )
        try:
            for name in left:  # of a try that was killed
                disk.discard(os.path.join(beside, name))
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # what stays goes with the next try
                disk.remove_folder(beside)
            raise
    finally:
        lock.release()
