"""What proves itself: episodes, and files that are not the buffer's."""

import os

import numpy as np

from benchmarks.harness.proof import Episodes, num_torn

WORLD = 1_000_000
"""Episodes of another buffer have numbers from another million."""


def made(number, length, words=8):
    """Return episode `number`: arrays of its own, as a signal handler may make another meanwhile."""
    return Episodes(words, length)(number, length)


def wrong(batch, world=0, axes=2):
    """Return what is wrong with rows, None if they prove themselves.

    Args:
        batch: column -> values, `(B, H, ...)`.
        world: whose episodes they must be.
        axes: ahead of a row's shape: 2 for clips; 1 for one clip or an episode, `(H, ...)`; 0 for single rows, `(n,
            ...)`.
    """
    found = {name: np.asarray(values) for name, values in batch.items()}
    if sorted(found) != ["episode", "length", "row", "step"]:
        return f"columns {sorted(found)}"
    if axes == 1:
        found = {name: values[None] for name, values in found.items()}
    elif axes == 0:
        found = {name: values[:, None] for name, values in found.items()}
    if torn := num_torn(found):
        which = [(e, s) for e, s in zip(found["episode"].tolist(), found["step"].tolist(), strict=True)]
        return f"{torn} of {len(which)} torn; episodes and steps: {which[:6]}"
    strange = found["episode"] // WORLD != world
    if strange.any():
        return f"episodes of another buffer: {sorted(set(found['episode'][strange].tolist()))[:6]}"
    return None


class Strangers:
    """Files beside the buffer that some other part of the program has open, opens and closes all the time.

    Whoever uses a descriptor of his after it was closed hits one of them: it has other bytes then, or another
    size, or is no longer open; and who reads there gets bytes that prove nothing.
    """

    SIZE = 1 << 16

    def __init__(self, folder, ledger):
        self.folder, self._ledger = folder, ledger
        os.makedirs(folder, exist_ok=True)
        self._open = []
        self._made = 0

    def turn(self, count=1):
        """Close the oldest, open new ones."""
        for _ in range(count):
            if len(self._open) >= 12:
                self._close(self._open.pop(0))
            number, self._made = self._made, self._made + 1
            path = os.path.join(self.folder, str(number % 40))
            if os.path.exists(path) and (fault := spoiled(path)):
                self._ledger.violation("stranger", f"{path}: {fault}")
            fd = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.pwrite(fd, content(str(number % 40), number), 0)
            os.replace(path + ".new", path)
            self._open.append((fd, path, os.fstat(fd).st_ino))
        self._ledger.tally("strangers", count)

    def _close(self, one):
        fd, path, inode = one
        try:
            found = os.fstat(fd)
        except OSError as error:
            self._ledger.violation("stranger", f"{path}: somebody closed its descriptor: {error}")
            return
        if found.st_ino != inode:
            self._ledger.violation("stranger", f"{path}: its descriptor is another file's: somebody closed it")
            return
        os.close(fd)

    def close(self):
        """Close all."""
        while self._open:
            self._close(self._open.pop())


def content(name, number):
    head = f"stranger {name} {number} ".encode()
    return head + bytes((number * 7 + i * 13) % 251 for i in range(256)) * (Strangers.SIZE // 256 - 1)


def spoiled(path):
    """Return what is wrong with a stranger's file, None if it is as it was written."""
    with open(path, "rb") as file:
        found = file.read()
    name = os.path.basename(path)
    words = found[:40].split(b" ")
    try:
        good = words[0] == b"stranger" and words[1] == name.encode() and found == content(name, int(words[2]))
    except (IndexError, ValueError):
        good = False
    return None if good else f"{len(found)} bytes, which begin with {found[:48]!r}: somebody wrote into it"
