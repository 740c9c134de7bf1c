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
Not here: which episodes are stored (read/marked.py), the data, which never change.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from filelock import FileLock, Timeout

from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    InputError,
    LockedError,
    NewerVersionError,
)
from ringmap.storage.disk.advice import remedy
from ringmap.storage.disk.canonical import json_checksum
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.table import MOST, Record
from ringmap.storage.sidecars.base import Copied, Home, Kept, Mend, Sidecar

__all__ = ["ANY", "MARKS", "Mark", "MarkFile", "checked_flags"]

MARKS = "marks.json"
ANY = "any"
"""In place of the checksum of rows: of an episode in parts whose first part was evicted."""

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


class MarkFile(Sidecar):
    """The file of marks, as one owner sees it.

    Args:
        disk: what changes it.
        path: of the file.
        owner: whose marks are read and changed.

    Processes and threads: any number may read and change it.
    """

    names = (MARKS,)
    temporary = (MARKS + ".tmp", MARKS + ".lock")

    def __init__(self, disk: Disk, path: str, owner: str) -> None:
        self.disk, self.path, self.owner = disk, path, owner

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

    def sync(self) -> None:
        """Return at once: each change is durable."""

    def close(self) -> None:
        """Return at once: no file stays open."""

    # -- as a part of a buffer -----------------------------------------------------------------

    @classmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return its faults, in words."""
        if kind := home.disk.kind(home.path(MARKS)):
            return [f"marks are {kind}, expected a regular file"]
        try:
            found = _decode(home.disk.read_file(home.path(MARKS), _LIMIT + 1), "")
        except (CorruptError, NewerVersionError) as error:
            return [str(error)]
        return [] if home.uuid.hex() in found else ["marks are of another buffer"]

    @classmethod
    def mend(cls, home: Home, newest: Record | None) -> Mend | None:
        """Sign again what it says, if it can be read: people edit it."""
        try:
            found = _decode(home.disk.read_file(home.path(MARKS), _LIMIT + 1), "", signed=False)
        except (CorruptError, NewerVersionError, OSError, NotAFileError):
            return None
        if home.uuid.hex() not in found:
            return None
        put = partial(home.disk.replace_file, home.path(MARKS), _encode(found))
        return "take the marks as they are written there, edited or damaged", put

    @classmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write the marks of the copied episodes. Those of evicted ones go with the next change."""
        if not source.disk.is_file(source.path(MARKS)):
            return
        try:
            found = _read(source.disk, source.path(MARKS)).get(source.uuid.hex(), {})
        except CorruptError:
            return  # `check` of the source says so
        mine = {at: mark for at, mark in found.items() if at < state.head}
        if mine:
            target.disk.replace_file(target.path(MARKS), _encode({target.uuid.hex(): mine}))


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
    text = json.dumps({**body, "checksum": json_checksum(body)}, indent=1)
    return text.encode() + b"\n"


def _decode(data: bytes, path: str, signed: bool = True) -> _All:
    """Return owner -> position -> mark; `signed`: whether the checksum must hold."""
    at = f"{path}: " if path else ""
    then = "; run ringmap.check and ringmap.repair on the buffer, or move the file away" if path else ""
    try:
        if len(data) > _LIMIT:
            raise ValueError(f"more than {_LIMIT:,} bytes")
        body = json.loads(data)
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise ValueError("no file of marks")
        version = body.get("version")
        if isinstance(version, int) and version > _VERSION:
            raise NewerVersionError(
                f"{at}marks of version {version}; this ringmap reads version {_VERSION}; upgrade ringmap"
            )
        checksum = body.pop("checksum", None)
        if signed and checksum != json_checksum(body):
            raise ValueError("its checksum does not hold: it is damaged, or was edited by hand")
        return {
            str(owner): {mark.position: mark for mark in map(_mark, marks)} for owner, marks in body["marks"].items()
        }
    except NewerVersionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "is damaged" if isinstance(error, KeyError | AttributeError | TypeError) else str(error)
        raise CorruptError(f"{at}marks can't be read: {why}{then}") from None


def _mark(told: Any) -> Mark:
    position, record = told["position"], told["record"]
    if type(position) is not int or not 0 <= position < MOST or not _SUM.fullmatch(record):
        raise ValueError("a mark of no episode")
    return Mark(position, record, checked_flags(told["flags"], "flags"), checked_note(told["note"], "note"))
