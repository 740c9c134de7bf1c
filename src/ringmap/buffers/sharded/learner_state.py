"""The learner's own directory: what it knows of rings that others write.

    runs/learner/lock                      one learner at a time
    runs/learner/boot                      the boot id of the priorities
    runs/learner/UUID/priorities.bin       of the ring with this uuid

Invariants: only the process that holds the lock writes; priorities of rows that a power cut may have taken are dropped.
Not here: the bytes of a file (storage/sidecars), the meaning of a priority (clips/samplers).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ringmap.errors import EnvironmentFault, InputError, LockedError
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import Paths
from ringmap.storage.disk.system import clear_errors
from ringmap.storage.read.handle import Handle
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.priorities import PriorityFile

__all__ = ["LearnerState"]

_WHERE = "ShardedReplayBuffer"
_LOCK, _BOOT = "lock", "boot"
_BOOT_MOST = 4096


class LearnerState:
    """An open directory of a learner.

    Args:
        path: the directory; made if it is not there.
        write: whether to take its lock and write; a copy in another process only reads.
        disk: through which it is written; None: the file system.

    Raises:
        InputError: the path is a ring.
        LockedError: another learner holds it.
        EnvironmentFault: it lies on a network file system, or can't be written to.
    """

    def __init__(self, path: str, write: bool, disk: Disk | None = None) -> None:
        self.path = path
        self.disk = Disk() if disk is None else disk
        self._pid = os.getpid()
        self._lock: WriterLock | None = None
        if not write:
            return
        if os.path.lexists(Paths(path).manifest):
            raise InputError(f"{_WHERE}: state={path} is a ring; give a directory of the learner's own")
        with clear_errors(_WHERE, path):
            make_folder(self.disk, path)
        if self.disk.system.is_network(path):
            raise EnvironmentFault(
                f"{_WHERE}: state={path} lies on a network file system, whose locks are not ours; give one on a local "
                "disk"
            )
        lock = WriterLock(self.disk, os.path.join(path, _LOCK), path)
        try:
            lock.acquire()
        except LockedError:
            raise LockedError(
                f"{_WHERE}: state={path} is held by {describe(holder_of(lock.path))}; give each learner its own, or "
                "close the other one"
            ) from None
        self._lock = lock
        try:
            with clear_errors(_WHERE, path):
                self._drop_after_a_reboot()
        except BaseException:
            self.close()
            raise

    def _drop_after_a_reboot(self) -> None:
        """Drop the priorities of another boot: a ring may have lost rows with it, and given their positions to
        others."""
        boot, at = self.disk.boot_id() or b"", os.path.join(self.path, _BOOT)
        known = self.disk.read_file(at, _BOOT_MOST) if self.disk.exists(at) else None
        if known == boot:
            return
        for name in self.disk.names(self.path) if known is not None else ():
            self.drop(name)
        self.disk.put(at, at + ".tmp", boot, synced=True)

    def drop(self, uuid: str) -> None:
        """Remove what is kept of a ring, by its uuid in hexadecimal; nothing for another name."""
        folder = os.path.join(self.path, uuid)
        if self.is_writable and len(uuid) == 32 and self.disk.is_folder(folder):
            for name in (*PriorityFile.names, *PriorityFile.temporary):
                self.disk.discard(os.path.join(folder, name))

    @property
    def is_writable(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None and self._pid == os.getpid()

    def home(self, source: Handle) -> Home:
        """Return where sidecars of a ring lie here; the directory may not be there."""
        uuid = source.manifest.uuid
        folder = os.path.join(self.path, uuid.hex())
        return Home(self.disk, folder, uuid, source.home.rows, source.schema)

    def keeper(self, source: Handle) -> _Keeper:
        """Return what keeps the priorities of a ring."""
        home = self.home(source)
        if self.is_writable:
            with clear_errors(_WHERE, home.folder):
                make_folder(self.disk, home.folder)
        return _Keeper(self, source, home)

    def close(self) -> None:
        """Release the lock; a forked child leaves it to its parent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            if self._pid == os.getpid():
                lock.release()
            else:
                lock.drop_in_child()


@dataclass(frozen=True, slots=True)
class _Keeper:
    """A ring as `StoredPriorities` sees it: its rows, and the directory of the learner."""

    state: LearnerState
    source: Handle
    home: Home

    @property
    def head(self) -> int:
        return self.source.head

    @property
    def writable(self) -> bool:
        return self.state.is_writable

    @property
    def is_open(self) -> bool:
        return self.state.is_writable
