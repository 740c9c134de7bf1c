"""Marks: flags and a note for an episode, given by people, beside the data.

    marks.json        {"format", "version", "marks": {owner: [mark, ...]}, "checksum"}
    owner             the buffer's UUID; of a dataset, which has none, its name
    mark              position of the episode's first step, checksum of its rows in its record, flags, note
    marks.json.lock   held while one process changes the file

A change reads the file under the lock, writes it anew beside, and renames it. So a reader finds the file before or
after the change, and two that change it lose nothing. One file may hold the marks of many owners: the user may keep it
elsewhere.

Invariants: the checksum is that of the rest; a mark counts for the episode whose record has its checksum of rows, since
after a power cut another episode may begin at its position.
Not here: conditions on marks (where.py, datasets/episode_table.py), the data, which never change.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from filelock import FileLock, Timeout

from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    InputError,
    LockedError,
    NewerVersionError,
)
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.checksums import decode_signed, encode_signed
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import MARKS
from ringmap.storage.disk.system import NotAFileError, remedy
from ringmap.storage.read.handle import Handle
from ringmap.storage.records.table import MOST
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars.base import Copied

__all__ = [
    "ANY",
    "MARK_NAMES",
    "Mark",
    "MarkFile",
    "checked_flags",
    "checked_note",
    "marked",
    "marks_of_copy",
    "record_key",
]

ANY = "any"
"""In place of the checksum of rows: of an episode in parts whose first part was evicted."""

MARK_NAMES = ("flags", "note")
"""What a mark says of an episode, by the names that conditions and tables use."""

_FORMAT, _VERSION = "ringmap marks", 1
_LIMIT = 1 << 26
_WAIT_S = 10.0
_NOTE_MOST, _FLAGS_MOST = 4000, 16
_FLAG = re.compile(r"[\w.+-]{1,64}")
_SUM = re.compile(r"[0-9a-f]{16}|any")

_All = dict[str, dict[int, "Mark"]]


@dataclass(frozen=True, slots=True)
class Mark:
    """What was noted of an episode.

    `position`: of its first step; of a dataset, its number; `record`: the checksum of its rows, in hexadecimal digits;
    `flags`: words, sorted; `note`: any text.
    """

    position: int
    record: str
    flags: tuple[str, ...] = ()
    note: str = ""


def checked_flags(flags: Any, where: str) -> tuple[str, ...]:
    """Return flags sorted, each once.

    Raises:
        InputError: one is no word.
    """
    given = (flags,) if isinstance(flags, str) else flags
    if not isinstance(given, Iterable):
        raise InputError(f"{where}: flags must be words, such as ['bad'], got {flags!r}")
    found = sorted({_flag(flag, where) for flag in given})
    if len(found) > _FLAGS_MOST:
        raise InputError(f"{where}: {len(found)} flags; an episode has at most {_FLAGS_MOST}")
    return tuple(found)


def _flag(flag: Any, where: str) -> str:
    if not isinstance(flag, str) or not _FLAG.fullmatch(flag):
        raise InputError(
            f"{where}: a flag is a word of up to 64 letters, digits and . _ + -, got {str(flag)[:80]!r}; put sentences "
            "into the note"
        )
    return flag


def checked_note(note: Any, where: str) -> str:
    """Return a note.

    Raises:
        InputError: it is no text, or too long.
    """
    if not isinstance(note, str) or len(note) > _NOTE_MOST:
        got = f"{len(note):,}" if isinstance(note, str) else type(note).__name__
        raise InputError(f"{where}: a note is a text of up to {_NOTE_MOST:,} characters, got {got}")
    return note


class MarkFile:
    """The file of marks, as one owner sees it, whose marks are read and changed. Any number of processes and threads
    may do so."""

    def __init__(self, disk: Disk, path: str, owner: str) -> None:
        self.disk, self.path, self.owner = disk, path, owner

    @classmethod
    def of(cls, source: Handle, path: str) -> MarkFile:
        """Return the file at a path, as a ring sees it."""
        return cls(source.home.disk, path, source.manifest.uuid.hex())

    def signature(self) -> tuple[int, ...]:
        """Return what differs after each change; () while there is no file."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> dict[int, Mark]:
        """Return position -> mark, whether the episodes are stored or not; {} if there is no file.

        Raises:
            CorruptError: it is damaged, or was changed by hand.
            NewerVersionError: it is from a newer ringmap.
        """
        return _read(self.disk, self.path).get(self.owner, {})

    def change(self, work: Callable[[dict[int, Mark]], None]) -> None:
        """Let `work` change the owner's marks, in place, and write the file durably. O(marks).

        Raises:
            CorruptError, NewerVersionError: the file can't be read; it is left as it is.
            LockedError: another process holds the lock for ten seconds.
            EnvironmentFault: the place can't be written.
            ReplacedError: the buffer's directory was removed, renamed or replaced.
        """
        with self._locked():
            every = _read(self.disk, self.path)
            mine = every.setdefault(self.owner, {})
            work(mine)
            try:
                self.disk.replace_file(self.path, _encode(every))
            except OSError as error:
                raise self._refused(error) from error

    @contextmanager
    def _locked(self) -> Any:
        self.disk.check_held("Marks.set")  # the lock is taken by path
        path = self.path + ".lock"
        if (kind := self.disk.kind(path)) and kind != "missing":
            raise NotAFileError(path, kind)
        lock = FileLock(
            path,
            timeout=_WAIT_S,
            thread_local=False,
            fallback_to_soft=False,
            preserve_lock_file=True,
        )
        try:
            self.disk.before("lock", path)
            lock.acquire()
        except Timeout:
            raise LockedError(
                f"{self.path}: another process has been changing it for {_WAIT_S:g} s; try again"
            ) from None
        except OSError as error:
            raise self._refused(error) from error
        try:
            self.disk.check_held("Marks.set")
            yield
        finally:
            lock.release(force=True)

    def _refused(self, error: OSError) -> EnvironmentFault:
        what = remedy(error)
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            what = "keep the marks in a file elsewhere: Marks(buf, path=FILE), ringmap view --marks FILE"
        said = error.strerror or str(error)
        return EnvironmentFault(error.errno, f"{self.path}: can't be written ({said}); {what}")


def record_key(source: Handle, position: int) -> str | None:
    """Return what tells an episode from another one at the same position; None if no stored episode begins there. O(log
    episodes)."""
    with thread.searching, source.lock:
        live = source.live
        ordinal = live.ordinal_from(Position(position))
        if ordinal < live.last and live.start(ordinal) == position:
            record = source.record_of(ordinal)
            return None if record is None else f"{record.rows_sum:016x}"
        if live.links is not None and position in live.whole.names:
            return ANY
        return None


def marked(source: Handle, marks: dict[int, Mark]) -> dict[int, Mark]:
    """Return the marks of stored episodes. O(marks log episodes)."""
    found = {}
    for position, mark in marks.items():
        key = record_key(source, position)
        if key is not None and (mark.record == key or ANY in (key, mark.record)):
            found[position] = mark
    return found


def marks_of_copy(source: Handle, state: Copied) -> bytes | None:
    """Return the file for a copy of a ring, with the marks of the copied episodes; None without any. Those of evicted
    ones go with the next change."""
    try:
        every = MarkFile.of(source, source.home.path(MARKS)).read()
    except CorruptError:
        return None  # `check` of the source says so
    mine = {at: mark for at, mark in every.items() if at < state.head}
    return _encode({state.uuid.hex(): mine}) if mine else None


def _read(disk: Disk, path: str) -> _All:
    try:
        data = disk.read_file(path, _LIMIT + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except NotAFileError as error:
        raise CorruptError(str(error)) from None
    return _decode(data, path)


def _encode(every: Mapping[str, Mapping[int, Mark]]) -> bytes:
    marks = {owner: [asdict(marks[at]) for at in sorted(marks)] for owner, marks in every.items() if marks}
    body = {"format": _FORMAT, "version": _VERSION, "marks": marks}
    return encode_signed(body, indent=1)


def _decode(data: bytes, path: str) -> _All:
    """Return owner -> position -> mark."""
    try:
        if len(data) > _LIMIT:
            raise ValueError(f"more than {_LIMIT:,} bytes")
        body, fault = decode_signed(data)
        if body is None or body.get("format") != _FORMAT:
            raise ValueError(fault if body is None else "no file of marks")
        version = body.get("version")
        if isinstance(version, int) and version > _VERSION:
            raise NewerVersionError(
                f"{path}: marks of version {version}; this ringmap reads version {_VERSION}; upgrade ringmap"
            )
        if fault:
            raise ValueError(f"it {fault}")
        return {
            str(owner): {mark.position: mark for mark in map(_mark, marks)} for owner, marks in body["marks"].items()
        }
    except NewerVersionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = "is damaged" if isinstance(error, KeyError | AttributeError | TypeError) else str(error)
        raise CorruptError(
            f"{path}: marks can't be read: {why}; run ringmap.check and ringmap.repair on the buffer, or move the file "
            "away"
        ) from None


def _mark(told: Any) -> Mark:
    position, record = told["position"], told["record"]
    if type(position) is not int or not 0 <= position < MOST or not _SUM.fullmatch(record):
        raise ValueError("a mark of no episode")
    return Mark(position, record, checked_flags(told["flags"], "flags"), checked_note(told["note"], "note"))
