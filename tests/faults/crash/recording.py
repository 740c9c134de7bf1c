"""A disk that remembers what was done to it, and the disks that a power cut may leave behind.

    RecordingDisk   does every change for real, and notes it in `log`
    Model           replays a log: what is on the disk for sure, and what may be there
    Model.crash     one of the possible disks: {name: bytes | {name: ...}}

What a cut may leave, worse than any file system of today:
a write that no sync followed is kept, lost or torn, each 64 bytes of it for themselves; a file's size
is any that it had since its last sync; a name made, renamed or removed since the last
sync of its folder is so or not, each for itself. A sync that fails marks what was written
as clean, as Linux does: it may be on the disk or not, and no later sync writes it.
"""

import os
import random
import uuid

import numpy as np

from ringmap.storage.disk.files import File
from ringmap.storage.disk.system import System
from tests.disks import FaultyDisk, descriptor_of

GRANULE = 64


class Machine(System):
    """A system whose boots can be told apart at will."""

    def __init__(self, boot=1):
        super().__init__()
        self.boot = boot

    def boot_id(self):
        return self.boot.to_bytes(16, "little")

    def is_network(self, path):
        return False

    def share(self, source, fd):
        return False

    def copy_range(self, source, fd, offset, nbytes):
        return 0  # what is copied is read and written: only writes are recorded


class RecordingDisk(FaultyDisk):
    """Does every change for real below `root`, and appends it to `log`.

    It may be told to fail (`fail`); with `partial` a write fails after half of its bytes, up to a
    whole word of the file: a system never tears one.
    `cheats` is what a control plants: a function of a change that says which are left out of the log.
    """

    def __init__(self, root, boot=1, tree=None, cheats=None):
        super().__init__(Machine(boot))
        self.root = root
        self.tree = tree or {}
        self.log = []
        self.paths = []  # of each entry of the log
        self.cheats = cheats
        self.hook = None
        self.changes = 0
        self.model = Model(self.tree)  # for the numbers only: nothing is ever synced in it

    def fail(self, at, error, sticky=False, only=None, partial=False):
        super().fail(at, error, sticky, only)
        self.partial = partial

    def before(self, change, path, *details):
        self.changes += 1
        if self.hook is not None:
            self.hook(change, path)
        super().before(change, path, *details)
        if change == "rmdir":
            self.note("unlink", path)

    def note(self, change, path, *details, node=None):
        """Put a change into the log, its paths as numbers of nodes."""
        if self.cheats is not None and self.cheats(change, path, details):
            return
        *folders, name = self._parts(path)
        if change == "sync_folder":
            entry = (change, self.model.find([*folders, name]))
        elif change in ("write", "empty", "sync", "failed"):
            entry = (change, node, *details)
        elif change == "rename":
            entry = (change, self.model.find(folders), name, *details, self.model.find([*folders, name]))
        else:
            entry = (change, self.model.find(folders), name, *details)
        if entry[1] is not None:  # else it is the lock file, which whoever opens makes anew
            self.log.append(entry)
            self.paths.append(path)
            self.model.apply(entry)

    def _parts(self, path):
        return path[len(self.root) :].split(os.sep)[1:] or ["."]

    def create(self, path, size=0):
        file = super().create(path, size)
        self.note("create", path, size)
        return RecordingHandle(self, descriptor_of(file), path)

    def open(self, path, write=False):
        return RecordingHandle(self, descriptor_of(super().open(path, write)), path)

    def make_folder(self, path):
        super().make_folder(path)
        self.note("mkdir", path)

    def rename(self, source, target):
        super().rename(source, target)
        self.note("rename", source, os.path.basename(target))

    def remove(self, path):
        super().remove(path)
        self.note("unlink", path)

    def sync_folder(self, path):
        super().sync_folder(path)
        self.note("sync_folder", path)


class RecordingHandle(File):
    __slots__ = ("node",)

    def __init__(self, disk, fd, path):
        super().__init__(disk, fd, path)
        self.node = disk.model.find(disk._parts(path))

    def write(self, data, offset):
        data = bytes(data)
        try:
            super().write(data, offset)
        except OSError:
            whole = self.path.endswith(("state.bin", "episodes.npy"))  # never across a page
            if self.disk.partial and len(data) > 1 and not whole:
                data = data[: max(0, (offset + len(data) // 2) // 8 * 8 - offset)]
                self.disk.system.pwrite(self.fd, data, offset)
                self.disk.note("write", self.path, offset, data, node=self.node)
            raise
        self.disk.note("write", self.path, offset, data, node=self.node)

    def empty(self):
        super().empty()
        self.disk.note("empty", self.path, node=self.node)

    def sync(self):
        try:
            super().sync()
        except OSError:
            self.disk.note("failed", self.path, node=self.node)
            raise
        self.disk.note("sync", self.path, node=self.node)


# -- what is on the disk, and what may be ---------------------------------------------------------


class Node:
    """A file: `base` is on the disk; of `pending` writes `[offset, data, clean]`, any part may be."""

    __slots__ = ("base", "pending", "sizes")

    def __init__(self, base=b"", size=None):
        self.base = base
        self.pending = []
        self.sizes = [] if size is None else [size]

    @property
    def size(self):
        return self.sizes[-1] if self.sizes else len(self.base)

    def write(self, offset, data):
        self.pending.append([offset, data, False])
        if offset + len(data) > self.size:
            self.sizes.append(offset + len(data))

    def empty(self):
        """Any of its bytes may be lost without the others."""
        self.pending.append([0, bytes(self.size), False])
        self.sizes.append(0)

    def sync(self):
        content = bytearray(self.base.ljust(self.size, b"\0"))
        kept = []
        for offset, data, clean in self.pending:
            if clean:
                kept.append([offset, data, True])
                continue
            content[offset : offset + len(data)] = data
            kept = [piece for old in kept for piece in _outside(old, offset, offset + len(data))]
        self.base, self.pending, self.sizes = bytes(content[: self.size]), kept, []

    def fail(self):
        for write in self.pending:
            write[2] = True

    def crash(self, rng):
        if not self.pending and not self.sizes:
            return self.base
        luck = rng.choice(LUCK)
        size = self.size
        if self.sizes and rng.random() >= luck:
            size = rng.choice([len(self.base), *self.sizes])
        content = bytearray(self.base.ljust(size, b"\0")[:size])
        for offset, data, _ in self.pending:
            by_granule = luck not in (0, 1) and rng.random() < 0.5
            if not by_granule:
                if rng.random() < luck:
                    content[offset : offset + len(data)] = data
                continue
            at = offset
            while at < offset + len(data):
                stop = min(at - at % GRANULE + GRANULE, offset + len(data))
                fate = rng.random()
                low, high = at, stop
                if fate < 0.15:  # torn: one half is new, the other is not
                    middle = (at + stop) // 2
                    low, high = (at, middle) if fate < 0.075 else (middle, stop)
                if fate < 0.15 or rng.random() < luck:
                    content[low:high] = data[low - offset : high - offset]
                at = stop
        return bytes(content[:size])


LUCK = (0, 0, 1, 1, 0.1, 0.5, 0.9)
"""How likely a part of a file's pending writes is kept; drawn once per file and crash, so that a
whole file that is kept meets a whole file that is lost."""


def _outside(write, start, stop):
    """Return what of a write lies outside `[start, stop)`."""
    offset, data, clean = write
    pieces = [(offset, min(offset + len(data), start)), (max(offset, stop), offset + len(data))]
    return [[a, data[a - offset : b - offset], clean] for a, b in pieces if a < b]


class Folder:
    """A folder: `durable` names, those of `live`, and the changes between them."""

    __slots__ = ("durable", "live", "pending")

    def __init__(self):
        self.durable = {}
        self.live = {}
        self.pending = []

    def change(self, *names):
        """Note a change: names -> node, or None where the name goes."""
        change = dict(names)
        self.pending.append(change)
        _rename(self.live, change)

    def sync(self):
        for change in self.pending:
            _rename(self.durable, change)
        self.pending = []

    def crash(self, rng):
        names = dict(self.durable)
        luck = rng.choice(LUCK)
        for change in self.pending:
            if rng.random() < luck:
                _rename(names, change)
        return names


def _rename(names, change):
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Model:
    """The nodes below a root, and what of them is on the disk. Node 0 is the root."""

    def __init__(self, tree):
        self.nodes = []
        self._plant(tree)

    def _plant(self, tree):
        number = len(self.nodes)
        if not isinstance(tree, dict):
            self.nodes.append(Node(tree))
            return number
        folder = Folder()
        self.nodes.append(folder)
        for name in sorted(tree):
            folder.durable[name] = folder.live[name] = self._plant(tree[name])
        return number

    def find(self, parts):
        """Return the number of the node at a path, None if it was never noted."""
        at = 0
        for part in parts:
            if part != ".":
                at = self.nodes[at].live.get(part)
            if at is None:
                return None
        return at

    def apply(self, entry):
        """Do one change of a log."""
        change, node = entry[0], self.nodes[entry[1]]
        if change == "write":
            node.write(*entry[2:])
        elif change == "empty":
            node.empty()
        elif change in ("sync", "sync_folder"):
            node.sync()
        elif change == "failed":
            node.fail()
        elif change == "unlink":
            node.change((entry[2], None))
        elif change == "rename":
            node.change((entry[2], None), (entry[3], entry[4]))
        else:
            node.change((entry[2], len(self.nodes)))
            self.nodes.append(Folder() if change == "mkdir" else Node(b"", entry[3]))

    @property
    def settled(self):
        """Whether a cut now could leave one disk only."""
        return not any(n.pending or getattr(n, "sizes", None) for n in self.nodes)

    def crash(self, rng, at=0):
        """Return one of the trees that a power cut may leave."""
        node = self.nodes[at]
        if isinstance(node, Node):
            return node.crash(rng)
        names = node.crash(rng)
        return {name: self.crash(rng, child) for name, child in sorted(names.items())}

    def live(self, at=0):
        """Return the tree as every process sees it: what a kill leaves."""
        node = self.nodes[at]
        if isinstance(node, Node):
            content = bytearray(node.base.ljust(node.size, b"\0"))
            for offset, data, _ in node.pending:
                content[offset : offset + len(data)] = data
            return bytes(content[: node.size])
        return {name: self.live(child) for name, child in sorted(node.live.items())}


class Always(random.Random):
    """The two ends: everything pending is kept (1), or lost (0)."""

    def __init__(self, kept):
        super().__init__(0)
        self.kept = kept

    def choice(self, options):
        return self.kept if options is LUCK else options[0]

    def random(self):
        return 0.5


def materialise(tree, root):
    """Write a tree into the new folder `root`."""
    os.mkdir(root)
    for name, node in tree.items():
        path = os.path.join(root, name)
        if isinstance(node, dict):
            materialise(node, path)
        else:
            with open(path, "wb", buffering=0) as file:
                file.write(node)


def same_ids(monkeypatch, seed=0):
    """Make identifiers, and generators without a seed, come from a seed, so that a case can be run again."""
    rng = random.Random(seed)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4))
    monkeypatch.setattr(np.random.bit_generator, "randbits", random.Random(seed).getrandbits)
