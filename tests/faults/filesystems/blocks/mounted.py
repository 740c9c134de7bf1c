"""A file system on a volume: made, mounted, unmounted; and a disk that does its changes there.

    Mounted    mkfs once, then `with mounted:` for each life on it
    BlockDisk  the real `Disk`, on a boot that can be told apart, with random writeback beside each change

The kernel writes dirty pages when it likes to; within the second that a script takes it likes to do nothing. So
`BlockDisk` makes it begin: of one file without a flush (sync_file_range), or of all (syncfs), at random.

Not here: what is cut and judged (lives.py).
"""

import contextlib
import ctypes
import errno
import os
import random
import shutil
import subprocess
import time

from tests.disks import FaultyDisk
from tests.faults.crash.recording import Machine
from tests.faults.filesystems.blocks.volume import Served

MAKE = {
    "ext4": (
        64,
        "mkfs.ext4 -q -m 0 -b 4096 -J size=4 -E nodiscard,lazy_itable_init=0,lazy_journal_init=0",
    ),
    "xfs": (300, "mkfs.xfs -q -K"),
    "btrfs": (120, "mkfs.btrfs -q -K"),
}
"""File system -> MiB, and what makes it."""

_SUPERBLOCKS = {"ext4": [0], "xfs": [0], "btrfs": [16, 16384]}
"""File system -> the blocks of 4096 bytes in which they lie."""

_LOST = {errno.EUCLEAN, errno.EIO, errno.EROFS, errno.EBADMSG}
"""What a file system answers that has lost itself."""


class FileSystemLost(Exception):
    """The file system did not come back from the cut: nothing that a buffer could mend."""


def is_lost(error):
    """Tell whether an error says that the file system itself is damaged."""
    return isinstance(error, OSError) and error.errno in _LOST


def missing(kind):
    """Return why a file system can't be cut here, in words, or None."""
    if os.geteuid() != 0:
        return "needs root, to mount"
    if not os.path.exists("/dev/fuse"):
        return "needs /dev/fuse"
    if not os.path.exists("/dev/loop-control"):
        return "needs loop devices"
    if shutil.which("unshare") is None:
        return "needs unshare"
    tool = MAKE[kind][1].split()[0]
    return f"needs {tool}" if shutil.which(tool) is None else None


class Mounted:
    """A new file system of a kind below `folder`, not mounted yet.

    Use it in a mount namespace of its own (`unshare --mount`), so that nothing outlives the process; `home` is a
    descriptor of the namespace before.
    """

    def __init__(self, kind, folder, home):
        self.kind = kind
        size, make = MAKE[kind]
        image, self.root = os.path.join(folder, "image"), os.path.join(folder, "root")
        os.makedirs(self.root)
        with open(image, "wb") as file:
            file.truncate(size << 20)
        subprocess.run([*make.split(), image], check=True, stdout=subprocess.DEVNULL)
        self.volume = Served(image, os.path.join(folder, "volume"), home, _SUPERBLOCKS[kind])

    def __enter__(self):
        words = ["mount", "-t", self.kind, "-o", "loop", self.volume.path, self.root]
        for _ in range(20):
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode == 0:
                return self
            if "failed to setup loop device" not in done.stderr:
                raise FileSystemLost(done.stderr.strip())
            time.sleep(0.05)  # another program took the free device that `mount` had found
        raise OSError(errno.EBUSY, done.stderr.strip())

    def __exit__(self, *_):
        for _ in range(20):  # the kernel lets go of a process that ended in its own time
            done = subprocess.run(["umount", self.root], capture_output=True, text=True)
            if done.returncode == 0:
                break
            time.sleep(0.02)
        else:
            raise OSError(errno.EBUSY, done.stderr.strip())

    def close(self):
        """Let go of the volume."""
        self.volume.close()


# -- a disk on it --------------------------------------------------------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True)
_RANGE_WRITE = 2


class _Syncing(Machine):
    """A machine whose syncs can be left out."""

    skips = False

    def sync(self, fd):
        if not self.skips:
            super().sync(fd)

    def sync_folder(self, path, *, dir_fd=None):
        if not self.skips:
            super().sync_folder(path, dir_fd=dir_fd)


class _Positions:
    """The length of a log that lies elsewhere."""

    def __init__(self, volume):
        self._volume = volume

    def __len__(self):
        return self._volume.position


class BlockDisk(FaultyDisk):
    """The real disk below `root`, a mounted volume.

    It is hooked as a `RecordingDisk` is (tests/faults/crash/recording.py), whose `log` has but a length here.

    Args:
        mounted: where.
        boot: the number of the boot.
        seed: of the writeback.
        cheats: what a control plants: a function (change, path) that says which syncs are left out.
    """

    def __init__(self, mounted, boot, seed, cheats=None):
        super().__init__(_Syncing(boot))
        self.log = _Positions(mounted.volume)
        self.hook = None
        self._root = mounted.root
        self._rng = random.Random(seed)
        self._cheats = cheats

    def fail(self, at, error, sticky=False, only=None, partial=False):
        super().fail(at, error, sticky, only)

    def before(self, change, path, *details):
        if self.hook is not None:
            self.hook(change, path)
        super().before(change, path, *details)
        if change in ("sync", "sync_folder"):
            self.system.skips = self._cheats is not None and self._cheats(change, path)
        self._write_back()

    def _write_back(self):
        luck = self._rng.random()
        if luck < 0.015:
            self._with(self._root, _LIBC.syncfs)
        elif luck < 0.25:
            files = sorted(
                os.path.join(folder, name)
                for folder, _, names in os.walk(os.path.join(self._root, "buf"))
                for name in names
            )
            for path in self._rng.sample(files, min(2, len(files))):
                self._with(path, lambda fd: _LIBC.sync_file_range(fd, 0, 0, _RANGE_WRITE))

    def _with(self, path, do):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY)
            do(fd)
            os.close(fd)
