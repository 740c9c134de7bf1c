"""A file that changes atomically: the layer under an HDF5 file while it is written.

    HDF5 --write--> |  sealed (what readers may see)  |  new space  |
                          | kept in memory, by page        | straight to the file
    commit:  pages -> journal, whole -> pages to their places -> no journal
                            ^ the commit point

HDF5 itself updates its trees in place and in no particular order: killed in the middle, it
leaves a file that can be neither read nor appended to. Here nothing that a sealed page says
changes until the journal holds every change. HDF5's SWMR mode is no way out: it forbids new
columns, text and attributes, and leaves a mark that others refuse to open.

Invariants: between commits the file, as it lies there, is the one of the last commit, plus
unused bytes at its end.
Not here: episodes (writer.py). Power cuts: the file is synced when its writer closes, not before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import h5py

from ringmap.errors import CorruptError
from ringmap.formats.common import disk
from ringmap.formats.hdf5 import journal
from ringmap.formats.hdf5.journal import PAGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["JournaledFile", "journaled"]


class JournaledFile:
    """A file object for h5py whose changes reach the file at `commit`, together.

    Its callbacks never raise, because HDF5 goes on after an exception with half of its state:
    what went wrong is kept in `error`, and `commit` raises it. A forked child's copy changes nothing.

    Args:
        fd: the file, open for reading and writing, locked; it stays the caller's.
        path: its path, beside which the journal is kept.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path
        self.size = os.fstat(fd).st_size
        self.error: BaseException | None = None
        self._dead = False
        self._pid = os.getpid()
        self._position = 0
        self._pages: dict[int, bytearray] = {}
        self._sealed = _pages_in(self.size)

    def __repr__(self) -> str:
        return self.path  # h5py calls the file so in its messages

    # -- the file object ---------------------------------------------------------------------

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to `offset`; from the end with `os.SEEK_END`."""
        self._position = offset + (self.size if whence == os.SEEK_END else 0)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes, zeros beyond the end."""
        buffer = bytearray(self.size - self._position if size < 0 else size)
        self.readinto(buffer)
        return bytes(buffer)

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer`, with zeros beyond the end."""
        view = memoryview(buffer).cast("B")
        start = self._position
        try:
            disk.read_into(self.fd, view, start)
            if self._pages:
                for page, part, inner in _cut(start, len(view)):
                    changed = self._pages.get(page)
                    if changed is not None:
                        view[part] = changed[inner]
        except BaseException as error:
            self.error = self.error or error
        self._position += len(view)
        return len(view)

    def write(self, data: Buffer) -> int:
        """Take all of `data`."""
        view = memoryview(data).cast("B")
        start, size = self._position, len(view)
        if not (self._dead or self.error) and os.getpid() == self._pid:
            try:
                inside = min(max(self._sealed * PAGE - start, 0), size)
                if inside:
                    self._keep(view[:inside], start)
                if inside < size:
                    disk.write(self.fd, view[inside:], start + inside)
            except BaseException as error:
                self.error = error
        self._position += size
        self.size = max(self.size, self._position)
        return size

    def truncate(self, size: int) -> int:
        """Note the file's size; `commit` makes it so."""
        self.size = size
        return size

    def flush(self) -> None:
        """Do nothing: `commit` is the flush."""

    # -- the transaction ---------------------------------------------------------------------

    def seal(self) -> None:
        """Forget what lies beyond the end that HDF5 has just reported: a killed writer's leavings.

        Call it after the first flush of a file that was just opened.
        """
        self._sealed = _pages_in(self.size)
        if os.fstat(self.fd).st_size > self.size:
            disk.truncate(self.fd, self.size)

    def commit(self) -> None:
        """Make all changes part of the file.

        Raises:
            OSError: before the commit point, and nothing was changed; or after it, and `recover` finishes the commit.

        Cost: a few writes; what changed in sealed pages is written twice.
        """
        if self.error is not None:
            raise self.error
        if self._dead or os.getpid() != self._pid:
            return
        if os.fstat(self.fd).st_size < self.size:
            disk.truncate(self.fd, self.size)  # first: no root may point beyond the end
        records = self._changes()
        if records:
            pages = {page: content for page, _, content in records}
            for first, count in journal.runs(pages):
                disk.reserve(self.fd, first * PAGE, min(count * PAGE, self.size - first * PAGE))
            fd = os.open(self.path + journal.SUFFIX, os.O_RDWR | os.O_CREAT | os.O_TRUNC | disk.BINARY, 0o666)
            try:
                journal.write(fd, self.size, records)
            finally:
                os.close(fd)
            journal.apply(self.fd, pages)
        if os.fstat(self.fd).st_size > self.size:
            disk.truncate(self.fd, self.size)
        disk.remove(self.path + journal.SUFFIX)

    def kill(self) -> None:
        """Drop what was not committed; from now on writing has no effect."""
        self._dead = True
        self._pages.clear()

    def _keep(self, view: memoryview, start: int) -> None:
        for page, part, inner in _cut(start, len(view)):
            content = self._pages.get(page)
            if content is None:
                content = bytearray(PAGE)
                if inner.stop - inner.start < PAGE:
                    disk.read_into(self.fd, memoryview(content), page * PAGE)
                self._pages[page] = content
            content[inner] = view[part]

    def _changes(self) -> list[tuple[int, bytes, bytes]]:
        """Return `(page, before, after)` of each page that a commit has to change."""
        last, records = _pages_in(self.size), []
        for first, count in journal.runs(page for page in self._pages if page < last):
            before = bytearray(count * PAGE)
            disk.read_into(self.fd, memoryview(before), first * PAGE)
            for page, at in zip(range(first, first + count), range(0, len(before), PAGE), strict=True):
                # Beyond the end there is nothing: once cut, the file must still equal what is noted here.
                inside = min(self.size - page * PAGE, PAGE)
                new = bytes(self._pages[page][:inside]).ljust(PAGE, b"\0")
                old = bytes(before[at : at + PAGE])
                if old != new:
                    records.append((page, old, new))
        return records


@contextlib.contextmanager
def journaled(path: str) -> Iterator[Any]:
    """Open an HDF5 file, alone, for changes that are made together at the end of the block, or not at all.

    Raises:
        LockedError: someone keeps it locked.
        CorruptError: HDF5 can't open it, or its journal belongs to other content.
        OSError: the disk failed: nothing was changed, or the next one to open it finishes the change.
    """
    fd = journal.open_locked(path)
    io, file = JournaledFile(fd, path), None
    before = os.fstat(fd).st_mtime_ns
    try:
        try:
            file = h5py.File(io, "r+", rdcc_nbytes=0)
        except OSError as error:
            raise CorruptError(f"HDF5Writer: HDF5 can't open {path}: {error}") from error
        file.flush()
        io.seal()
        yield file
        file.close()  # and takes off the mark of a file that is being written, which newer ones have
        io.commit()
        if os.fstat(fd).st_mtime_ns == before:  # readers tell by it that the file was written
            os.utime(fd, ns=(before + 1, before + 1))
    finally:
        io.kill()
        with contextlib.suppress(Exception):  # HDF5 may be in any state; nothing reaches the file
            file.close()  # type: ignore[union-attr]
        disk.unlock(fd)


def _pages_in(size: int) -> int:
    return -(-size // PAGE)


def _cut(start: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Cut a range at the pages: `(page, slice of the range, slice of the page)`."""
    done = 0
    while done < size:
        page, inner = divmod(start + done, PAGE)
        step = min(PAGE - inner, size - done)
        yield page, slice(done, done + step), slice(inner, inner + step)
        done += step
