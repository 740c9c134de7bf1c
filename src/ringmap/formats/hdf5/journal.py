"""The journal of an HDF5 file: the pages that a commit changes, before it changes them.

    FILE.journal    head: magic, size of the file afterwards, number of pages, checksum
                    page number | checksum before | checksum after | 4096 bytes      (per page)

A journal counts when it is complete. The next process that opens the file applies it and removes it.
Invariants: it is applied only to pages that are as before or as after, so that it can't
touch a file that it was not made for; applying it twice is applying it once.
Not here: which pages a commit changes (pages.py).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

import xxhash

from ringmap.errors import CorruptError, EnvironmentFault, NotFoundError
from ringmap.formats.common import disk
from ringmap.formats.common.untrusted import kind_at, open_binary, open_fd
from ringmap.storage.disk.system import NotAFileError

__all__ = ["PAGE", "SUFFIX", "WAIT_S", "apply", "open_locked", "recover", "runs", "unwritten", "write"]

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
    """Write a journal: once this returns, the commit is decided.

    Args:
        fd: the journal.
        size: of the file, after the commit.
        records: `(page, content before, content after)`.
    """
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
