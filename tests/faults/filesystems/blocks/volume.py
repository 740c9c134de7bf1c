"""A block device that can lose its power: a log of writes and flushes, and the disks that a cut of it may leave.

    base    the file that mkfs made, never changed
    start   blocks that differ from it, where the log begins
    log     (offset, bytes) of each write, None for each flush

    cut(at)   start + every write before the last flush in log[:at]
              + some of those after it, in any order, some of them torn

A cut disk begins a log of its own, so that what is done to it may be cut again; `back` returns to the
log before. A cut costs what lies behind the last flush, not the size of the disk.

Invariants: a flushed write is on every cut disk behind the flush; a sector of 512 bytes is new or old. The
blocks in `whole` are never torn: each of these file systems has one superblock that nothing but a drive's own sector of
4096 bytes protects. Not here: who writes (fuse.py), what a file system or a buffer makes of what is left (lives.py).
"""

import ctypes
import json
import mmap
import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
from dataclasses import dataclass, field

from tests.faults.filesystems.blocks import fuse

BLOCK, SECTOR = 4096, 512
LUCK = (0, 0, 1, 0.1, 0.5, 0.5, 0.9)
"""How likely a write that no flush followed is kept; drawn once per cut."""

_NOTHING = bytes(BLOCK)


@dataclass
class Level:
    """Blocks by number, and the log from there on; `durable` are those as of the flush at `flushed`."""

    start: dict
    log: list = field(default_factory=list)
    durable: dict = None
    flushed: int = 0


class Volume:
    """The device, in the process that serves it."""

    def __init__(self, image, position, whole):
        self._whole = set(whole)
        with open(image, "rb") as file:
            self._base = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._base)
        self._position = position
        self._blocks = {}
        self._levels = [Level({})]

    @property
    def _level(self):
        return self._levels[-1]

    # -- as the kernel uses it --

    def read(self, offset, size):
        first, last = offset // BLOCK, -(-(offset + size) // BLOCK)
        parts = [self._block(number) for number in range(first, last)]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return data[offset - first * BLOCK :][:size] if len(data) != size else data

    def write(self, offset, data):
        self._level.log.append((offset, data))
        self._put(self._blocks, offset, data)
        self._tell()

    def flush(self):
        self._level.log.append(None)
        self._tell()

    def _tell(self):
        self._position[:8] = struct.pack("<Q", len(self._level.log))

    def _block(self, number):
        block = self._blocks.get(number)
        return self._base[number * BLOCK : (number + 1) * BLOCK] if block is None else block

    def _put(self, blocks, offset, data):
        at, stop = offset, offset + len(data)
        while at < stop:
            number, inside = divmod(at, BLOCK)
            size = min(BLOCK - inside, stop - at)
            new = data[at - offset : at - offset + size]
            if size < BLOCK:
                old = blocks.get(number)
                if old is None:
                    old = self._base[number * BLOCK : (number + 1) * BLOCK]
                new = old[:inside] + new + old[inside + size :]
            blocks[number] = new
            at += size

    # -- as the campaign uses it --

    def cut(self, at, seed):
        """Become a disk that a cut behind `at` entries of the log may leave; return what was done."""
        level, rng = self._level, random.Random(seed)
        if level.durable is None or level.flushed >= at:  # the flush itself lies behind it
            level.durable, level.flushed = dict(level.start), 0
        flush = max((i for i in range(level.flushed, at) if level.log[i] is None), default=None)
        if flush is not None:
            for entry in level.log[level.flushed : flush]:
                if entry is not None:
                    self._put(level.durable, *entry)
            level.flushed = flush
        late = [entry for entry in level.log[level.flushed : at] if entry is not None]
        luck = rng.choice(LUCK)
        blocks = dict(level.durable)
        rng.shuffle(late)
        kept = torn = 0
        for offset, data in late:
            tears = len(data) > SECTOR and offset // BLOCK not in self._whole
            if tears and rng.random() < 0.3 and 0 < luck < 1:
                torn += 1
                for inside in _torn(rng, len(data)):
                    self._put(blocks, offset + inside, data[inside : inside + SECTOR])
            elif rng.random() < luck:
                kept += 1
                self._put(blocks, offset, data)
        self._blocks = dict(blocks)
        self._levels.append(Level(blocks))
        self._tell()
        return {"late": len(late), "kept": kept, "torn": torn, "lost": len(late) - kept - torn}

    def back(self):
        """Return to the log before the last cut, at its end. Nobody may have the disk mounted."""
        self._levels.pop()
        self._tell()
        return {}

    def save(self, path):
        """Write the disk as it stands to a sparse file."""
        with open(path, "wb") as file:
            file.truncate(self.size)
            for number in range(self.size // BLOCK):
                block = self._block(number)
                if block != _NOTHING:
                    os.pwrite(file.fileno(), block, number * BLOCK)
        return {}

    def count(self):
        """Return how many writes and flushes the log has, and how many bytes."""
        log = self._level.log
        writes = [entry for entry in log if entry is not None]
        return {
            "writes": len(writes),
            "flushes": len(log) - len(writes),
            "nbytes": sum(len(data) for _, data in writes),
        }


def _torn(rng, nbytes):
    """Return the sectors of a torn write that are new: the first ones, the last ones, or any."""
    sectors = range(0, nbytes, SECTOR)
    middle = rng.randint(1, len(sectors) - 1)
    way = rng.random()
    if way < 0.35:
        return sectors[:middle]
    if way < 0.7:
        return sectors[middle:]
    return [at for at in sectors if rng.random() < 0.5]


class Served:
    """A volume in a process of its own, mounted at `folder`: the file `disk` in it is the device.

    It must be a process: one that serves a page to itself, while it holds the interpreter, waits for ever. And it must
    not be in the mount namespace of the volume: the last process to leave that one unmounts it, and would wait for
    itself.

    Args:
        image: the file that mkfs made.
        folder: where it is mounted.
        home: a descriptor of the mount namespace in which it is served.
        whole: blocks that are never torn.
    """

    def __init__(self, image, folder, home, whole=()):
        self._home = home
        self.folder = str(folder)
        os.makedirs(self.folder, exist_ok=True)
        self._position = mmap.mmap(-1, mmap.PAGESIZE)
        fd = fuse.mount(self.folder)
        self._ours, theirs = socket.socketpair()
        self._process = multiprocessing.get_context("fork").Process(
            target=self._serve, args=(image, fd, theirs, whole), daemon=True
        )
        self._process.start()
        os.close(fd)
        theirs.close()
        self._answers = self._ours.makefile("rb")

    @property
    def path(self):
        return os.path.join(self.folder, "disk")

    @property
    def position(self):
        """How many entries the log has by now."""
        return struct.unpack("<Q", self._position[:8])[0]

    def __getattr__(self, name):
        """Call a method of the volume over there."""
        if name not in ("cut", "back", "count", "save"):
            raise AttributeError(name)

        def call(*args):
            self._ours.sendall(json.dumps([name, args]).encode() + b"\n")
            return json.loads(self._answers.readline())

        return call

    def close(self):
        """Unmount it."""
        subprocess.run(["umount", self.folder], check=True)
        self._ours.close()
        self._process.join()

    def _serve(self, image, fd, control, whole):
        os.setsid()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # it ends when it is unmounted, not before
        if ctypes.CDLL(None, use_errno=True).setns(self._home, 0):
            raise OSError(ctypes.get_errno(), "can't go back to the first mount namespace")
        self._ours.close()
        volume = Volume(image, self._position, whole)
        lines = control.makefile("rb")

        def command():
            line = lines.readline()
            if not line:  # whoever used it is gone, or lets go of it: the kernel may have more to write
                return False
            name, args = json.loads(line)
            control.sendall(json.dumps(getattr(volume, name)(*args)).encode() + b"\n")
            return True

        fuse.serve(fd, volume, control.fileno(), command)
