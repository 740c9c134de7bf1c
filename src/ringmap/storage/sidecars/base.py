"""The base class of sidecars: the methods that the storage needs from a file beside the columns.

    writer opens      recover       once the buffer is recovered, and a group that was left open is committed
    writer commits    (instance)    the owner of the instance writes required values before the commit
    check             faults        repair   repair      snapshot   copy

A sidecar holds values that are added and evicted with the rows. It is optional, but for the values of
mutable columns, which are there from birth: a missing one begins empty.

Invariants: a file of another buffer is ignored; after a crash no value belongs to a row that it was not given to.
Not here: which sidecars exist (`SIDECARS`), the meaning of the values (clips/, buffers/).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.checksums import decode_signed, encode_signed
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import MARKS, UNFINISHED
from ringmap.storage.records.table import Record

__all__ = ["Copied", "Home", "Marks", "Repair", "Sidecar"]

_MOST = 1 << 26

Repair = tuple[str, Callable[[], None]]
"""How a sidecar is repaired: a description in words, and the function."""


Kept = Callable[["Copied"], Any]


@dataclass(frozen=True, slots=True)
class Home:
    """The directory of a sidecar. `uuid`, `rows` and `schema`: the buffer's."""

    disk: Disk
    folder: str
    uuid: bytes
    rows: int
    schema: Schema | None = None

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.folder, name)


@dataclass(frozen=True, slots=True)
class Copied:
    """The state of a copy: its live positions, the record of its newest episode, if there is one, and its UUID."""

    tail: int
    head: int
    newest: Record | None
    uuid: bytes = b""


class Sidecar(ABC):
    """One or more files beside the columns of a buffer. An instance is an open one.

    The class methods are for a directory that no other process writes, or for reading beside a writer. They raise
    OSError if the disk fails, and NotAFileError if the path is not a regular file.
    """

    names: ClassVar[tuple[str, ...]]
    """Its names in the buffer's directory. Findings use the first one."""
    temporary: ClassVar[tuple[str, ...]] = ()
    """The names of unfinished files."""

    @classmethod
    def exists(cls, home: Home) -> bool:
        """Tell whether a buffer has it, with any content."""
        return any(home.disk.exists(home.path(name)) for name in cls.names)

    @classmethod
    def is_part_of(cls, home: Home) -> bool:
        """Tell whether `faults` is asked: the buffer has it, or must have it."""
        return cls.exists(home)

    @classmethod
    def recover(cls, home: Home, head: int) -> list[str]:
        """Drop, durably, the values of positions from `head` on: a power cut removed them, and others will be written.
        Return the faults of the file, in words."""
        return []

    @classmethod
    @abstractmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return its faults, in words. It is part of the buffer; `newest` is the record of the newest live episode."""

    @classmethod
    @abstractmethod
    def repair(cls, home: Home, newest: Record | None) -> Repair | None:
        """Return how it can be repaired; None if nothing in it is valid."""

    @classmethod
    @abstractmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write it, durably, into a copy of the buffer, with the values of the copy's state; the source may not have
        it, and may be written meanwhile. `kept`: returns the in-memory data of the copying handle, of a type that the
        sidecar knows.
        """


class Marks(Sidecar):
    """The file of what people noted of episodes: here only that it is whole. What it says: clips/marks.py."""

    names = (MARKS,)
    temporary = (MARKS + UNFINISHED, MARKS + ".lock")

    @classmethod
    def _read(cls, home: Home) -> tuple[dict[str, Any] | None, list[str]]:
        """Return the object in the file, None if there is none of this buffer; and the faults, in words."""
        if kind := home.disk.kind(home.path(MARKS)):
            return None, [f"marks are {kind}, expected a regular file"]
        body, fault = decode_signed(home.disk.read_file(home.path(MARKS), _MOST))
        if body is None:
            return None, [f"marks can't be read: the file {fault}"]
        marks = body.get("marks")
        if not isinstance(marks, dict) or home.uuid.hex() not in marks:
            return None, ["marks can't be read: they are of another buffer"]
        return body, [f"the file {fault}"] if fault else []

    @classmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return the faults of the file, in words."""
        return cls._read(home)[1]

    @classmethod
    def repair(cls, home: Home, newest: Record | None) -> Repair | None:
        """Sign again what it says, if it can be read: people edit it."""
        body, _ = cls._read(home)
        if body is None:
            return None
        put = partial(home.disk.replace_file, home.path(MARKS), encode_signed(body, indent=1))
        return "take the marks as they are written there, edited or damaged", put

    @classmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write what `kept` returns, the bytes of the copy's file."""
        data = kept and kept(state)
        if data:
            target.disk.replace_file(target.path(MARKS), data)
