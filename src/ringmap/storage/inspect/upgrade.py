"""Upgrade: let a directory have what the newest version of the format allows.

Invariants: only the manifest changes its form; a directory that needs nothing is not changed.
Not here: the writes that do this by themselves when they first need it (commit/store.py).
"""

from __future__ import annotations

import os
from contextlib import closing

from ringmap.storage.commit.store import Settings, Store
from ringmap.storage.directory.opening import read_manifest
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.manifest import FEATURES

__all__ = ["upgrade", "upgrade_folder"]


def upgrade(path: str | os.PathLike[str]) -> list[str]:
    """Upgrade the buffer at `path` to the newest version of the format, which older releases refuse by name.

    A buffer needs no upgrade to be opened, and the first write that needs one does it. Call this to have it done before.

    Args:
        path: its directory.

    Returns:
        The features that were added; empty if the buffer had them all. Then nothing was changed.

    Raises:
        LockedError: another handle has it open for writing.
        NotFoundError, UnknownFormatError, CorruptError, NewerVersionError: it can't be opened.
        EnvironmentFault: the disk is full, fails, or can't be written to.

    Cost: as opening it for writing.

    Example:
        >>> import ringmap
        >>> ringmap.ReplayBuffer(max_steps=100, path="older").close()
        >>> ringmap.upgrade("older"), ringmap.upgrade("older")
        (['chains', 'groups', 'mutable'], [])
    """
    return upgrade_folder(Disk(), os.path.abspath(path))


def upgrade_folder(disk: Disk, folder: str) -> list[str]:
    """Upgrade the buffer in `folder` of a disk; see `upgrade`."""
    missing = sorted(FEATURES - set(read_manifest(disk, folder).features))
    if missing:
        with closing(Store.open(disk, folder, Settings(sync_every_s=0, group_s=0))) as store:
            store.use(missing, "ringmap.upgrade")
    return missing
