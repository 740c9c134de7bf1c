"""A file that changes atomically: the layer under an HDF5 file while it is written, and its journal.

    HDF5 --write--> |  sealed (what readers may see)  |  new space  |
                          | kept in memory, by page        | straight to the file
    commit:  pages -> journal, whole -> pages to their places -> no journal
                            ^ the commit point

    FILE.journal    head: magic, size of the file afterwards, number of pages, checksum
                    page number | checksum before | checksum after | 4096 bytes      (per page)

HDF5 itself updates its trees in place and in no particular order: killed in the middle, it leaves a file that can be
neither read nor appended to. Here nothing that a sealed page says changes until the journal holds every change. HDF5's
SWMR mode is no way out: it forbids new columns, text and attributes, and leaves a mark that others refuse to open.
A journal counts when it is complete. The next process that opens the file applies it and removes it.
Invariants: between commits the file, as it lies there, is the one of the last commit, plus unused bytes at its end; a
journal is applied only to pages that are as before or as after, so that it can't touch a file that it was not made for;
applying it twice is applying it once.
Not here: episodes. Power cuts: the file is synced when its writer closes, not before.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import h5py
import xxhash

from ringmap.errors import CorruptError, EnvironmentFault, NotFoundError
from ringmap.formats.common import disk
from ringmap.formats.common.untrusted import kind_at, open_binary, open_fd
from ringmap.storage.disk.system import NotAFileError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["WAIT_S", "JournaledFile", "journaled", "unwritten"]


class JournaledFile:
    """A file object for h5py whose changes reach the file at `commit`, together.

    Its callbacks never raise, because HDF5 goes on after an exception with half of its state:
    what went wrong is kept in `error`, and `commit` raises it. A forked child's copy changes nothing."""

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
            for first, count in runs(pages):
                disk.reserve(self.fd, first * PAGE, min(count * PAGE, self.size - first * PAGE))
            fd = os.open(self.path + SUFFIX, os.O_RDWR | os.O_CREAT | os.O_TRUNC | disk.BINARY, 0o666)
            try:
                write(fd, self.size, records)
            finally:
                os.close(fd)
            apply(self.fd, pages)
        if os.fstat(self.fd).st_size > self.size:
            disk.truncate(self.fd, self.size)
        disk.remove(self.path + SUFFIX)

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
        for first, count in runs(page for page in self._pages if page < last):
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
    fd = open_locked(path)
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


PAGE = 4096
"""The kernel copies a page whole: a kill leaves it as before or as after."""

SUFFIX = ".journal"
"""What is added to the path of a file for that of its journal."""

WAIT_S = 30.0
"""How long a reader waits for a writer that adds a group of episodes."""

_WRITER_WAIT_S = 2.0
"""How long a writer waits for readers, which hold the file for one read."""

_MAGIC = b"RINGMAPJ"
_HEAD = struct.Struct("<8sQQQ")
_PAGE_HEAD = struct.Struct("<QQQ")
_RECORD = _PAGE_HEAD.size + PAGE
_MOST = 16 << 30


def write(fd: int, size: int, records: Sequence[tuple[int, bytes, bytes]]) -> None:
    """Write a journal: once this returns, the commit is decided."""
    digest = xxhash.xxh3_64_intdigest
    body = b"".join(
        part
        for page, before, after in records
        for part in (_PAGE_HEAD.pack(page, digest(before), digest(after)), after)
    )
    head = _HEAD.pack(_MAGIC, size, len(records), _checksum(size, body))
    disk.write(fd, memoryview(head + body), 0)


def apply(fd: int, pages: Mapping[int, bytes]) -> None:
    """Write pages where they belong. Whole ones, even the last: the file is cut to size afterwards."""
    for first, count in runs(pages):
        content = b"".join(pages[page] for page in range(first, first + count))
        disk.write(fd, memoryview(content), first * PAGE)


def recover(fd: int, path: str) -> None:
    """Finish a commit of a locked file that was cut short, and remove its journal.

    Raises:
        CorruptError: the journal belongs to other content.
    """
    journal = path + SUFFIX
    found = _parse(journal)
    if found is not None:
        size, records = found
        late = {}
        for page, old, new, content in records:
            now = bytearray(PAGE)
            disk.read_into(fd, memoryview(now), page * PAGE)
            state = xxhash.xxh3_64_intdigest(now)
            if state not in (old, new):
                raise CorruptError(
                    f"{journal}: was not made for {path} as it is now (page {page} differs); if that "
                    "file opens well without it, delete the journal"
                )
            if state != new:
                late[page] = content
        apply(fd, late)
        if os.fstat(fd).st_size != size:
            disk.truncate(fd, size)
    disk.remove(journal)


def open_locked(path: str, flags: int = os.O_RDWR) -> int:
    """Open a file for writing, alone, and finish a commit that was cut short.

    Raises:
        LockedError: someone has it open.
        CorruptError: its journal belongs to other content.
    """
    while True:
        fd = open_fd(path, flags)
        try:
            disk.lock(fd, path, wait_s=_WRITER_WAIT_S)
            if _is_at(fd, path):
                recover(fd, path)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another writer put a new file there before we had the lock


@contextlib.contextmanager
def unwritten(path: str) -> Iterator[int]:
    """Open a file for reading, and keep its writers waiting; a commit that was cut short is finished first.

    Raises:
        NotFoundError: there is no file.
        LockedError: a writer keeps it locked.
        EnvironmentFault: a commit has to be finished, and the file may not be written by us.
    """
    # A journal is beside the file that it changes: a link to one is no way to have that changed.
    path = os.path.realpath(path)
    while True:
        if not os.path.isfile(path):
            if os.path.exists(path):
                raise NotAFileError(path, kind_at(path))
            raise NotFoundError(f"{path}: no such file")
        fd = os.open(path, os.O_RDONLY | disk.BINARY)
        try:
            disk.lock(fd, path, shared=True, wait_s=WAIT_S)
            if not os.path.lexists(path + SUFFIX) or _parse(path + SUFFIX) is None:
                yield fd
                return
        finally:
            disk.unlock(fd)
        try:
            disk.unlock(open_locked(path))
        except PermissionError as error:
            raise EnvironmentFault(
                f"{path}: its writer was killed in the middle of a commit, which opening it finishes; "
                f"open it once with permission to write ({error})"
            ) from error


def runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Group pages that follow each other: `(first, count)`.

    Example:
        >>> list(runs([7, 1, 2, 3]))
        [(1, 3), (7, 1)]
    """
    first = count = 0
    for page in sorted(pages):
        if count and page == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = page, 1
    if count:
        yield first, count


def _parse(journal: str) -> tuple[int, list[tuple[int, int, int, bytes]]] | None:
    """Return `(size of the file, [(page, before, after, content)])`, or None unless it is whole."""
    try:
        file = open_binary(journal)
    except FileNotFoundError:
        return None
    with file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        magic, size, count, checksum = _HEAD.unpack(head)
        there = os.fstat(file.fileno()).st_size - _HEAD.size
        if magic != _MAGIC or count * _RECORD > min(there, _MOST):
            return None
        body = file.read(count * _RECORD)  # a longer one's rest may follow
    if len(body) != count * _RECORD or checksum != _checksum(size, body):
        return None
    records = []
    for at in range(0, len(body), _RECORD):
        page, old, new = _PAGE_HEAD.unpack_from(body, at)
        records.append((page, old, new, body[at + _PAGE_HEAD.size : at + _RECORD]))
    return size, records


def _checksum(size: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(size.to_bytes(8, "little") + xxhash.xxh3_128_digest(body))


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
