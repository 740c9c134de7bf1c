"""Repair: keep what is whole, drop and name the rest.

A dropped episode keeps its record, flagged, so that positions never move; a record that is
lost is replaced by a dropped one that reaches from one neighbour to the next.

Invariants: the writer's lock is held while anything is changed; a dry run and the real one
list the same; a repair that was interrupted can be run again.
Not here: what is wrong (faults.py), what is done about it (plan.py).
"""

from __future__ import annotations

import os

from ringmap.storage.commit.create import refuse_links
from ringmap.storage.commit.recovery import Progress
from ringmap.storage.disk.advice import clear_errors
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock
from ringmap.storage.inspect.plan import Action, Plan
from ringmap.storage.inspect.scan import Scan
from ringmap.storage.records.layout import Paths

__all__ = ["Action", "repair", "repair_folder"]


def repair(
    path: str | os.PathLike[str], dry_run: bool = True, progress: Progress | None = None
) -> list[Action]:
    """Mend the buffer at `path`: every whole episode stays, the others are dropped.

    Look at the dry run first, and put back from a backup what you can: a column that is missing
    costs every episode, and once they are dropped they don't come back.

    Args:
        path: its directory.
        dry_run: change nothing, and return what would be done.
        progress: called with `(done, of)` episodes while they are verified.

    Returns:
        What was done, or would be, in order; the same for both. Empty for a sound buffer.

    Raises:
        LockedError: a writer is at it.
        UnknownFormatError: no buffer is there, nor the remains of one.
        NewerVersionError: it is from a newer ringmap.
        CorruptError: it can't be mended, and why.
        EnvironmentFault: the disk is full or fails. Mend it, and repair again.

    Cost: reads every live byte once; writes what is damaged.

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
        episodes.npy: drop the episode of record 2: columns/000-obs.npy: rows of record 2 (positions 20 to 40) are damaged
        manifest.json: write it again: 2 episodes
        state.bin: show readers the repaired state
        >>> [int(episode["obs"][0]) for episode in ringmap.ReplayBuffer.open("hurt").episodes()]
        [0, 2]
    """
    return repair_folder(Disk(), os.path.abspath(path), dry_run, progress)


def repair_folder(
    disk: Disk, folder: str, dry_run: bool, progress: Progress | None = None
) -> list[Action]:
    """Mend the buffer in `folder` of a disk; see `repair`."""
    refuse_links(disk, folder)
    Scan(disk, folder).close()  # before the lock leaves a file in a directory that is not ours
    if dry_run:
        return Plan(disk, folder, progress).actions
    then = "mend the disk, and repair again: it goes on where it was"
    with clear_errors("ringmap.repair", folder, then=then):
        lock = WriterLock(disk, Paths(folder).lock, folder)
        lock.acquire()
        try:
            plan = Plan(disk, folder, progress)
            plan.carry_out()
        finally:
            lock.release()
    return plan.actions
