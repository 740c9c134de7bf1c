"""The base class of sidecars: what the storage asks of a file that stands beside the columns.

    writer opens      recover       after the recovery of the buffer, before the first write
    writer commits    (instance)    what must be there first is written by who holds the instance, ahead of the commit
    flush, close      sync, close
    check             faults        repair   mend        snapshot   copy

A sidecar holds values that come and go with the rows. A buffer may have it or not: a missing one begins empty.

Invariants: a file of another buffer counts for nothing; after a crash no value is of a row that it was not given to.
Not here: which sidecars there are (`SIDECARS`), what the values mean (clips/, buffers/).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ringmap.storage.disk.files import Disk
from ringmap.storage.records.table import Record

__all__ = ["Copied", "Home", "Mend", "Sidecar"]

Mend = tuple[str, Callable[[], None]]
"""What is done to mend a sidecar, in words, and what does it."""


Kept = Callable[["Copied"], Any]


@dataclass(frozen=True, slots=True)
class Home:
    """The directory that a sidecar belongs to. `uuid` and `rows`: the buffer's."""

    disk: Disk
    folder: str
    uuid: bytes
    rows: int

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.folder, name)


@dataclass(frozen=True, slots=True)
class Copied:
    """The state that a copy of a buffer is: its live positions, and the record of its newest episode, if it has one."""

    tail: int
    head: int
    newest: Record | None


class Sidecar(ABC):
    """A file, or some, beside the columns of a buffer. An instance is one that is open.

    The class methods are for a directory in which nobody else writes, or for reading beside a writer. They raise OSError
    where the disk fails, and NotAFileError where something else has the name.
    """

    names: ClassVar[tuple[str, ...]]
    """What it is called in the buffer's directory. The first one stands for all in findings."""
    temporary: ClassVar[tuple[str, ...]] = ()
    """What an unfinished file is called."""
    of_newest: ClassVar[bool] = False
    """Whether it is of the newest episode alone, so that each commit changes what is right."""

    @classmethod
    def exists(cls, home: Home) -> bool:
        """Tell whether a buffer has it, whatever is in it."""
        return any(home.disk.exists(home.path(name)) for name in cls.names)

    @classmethod
    def recover(cls, home: Home, head: int) -> list[str]:
        """Forget, durably, what is of positions from `head` on: a power cut took them, and others will come.

        Returns:
            What is wrong with the file, in words.
        """
        return []

    @classmethod
    @abstractmethod
    def faults(cls, home: Home, newest: Record | None) -> list[str]:
        """Return what is wrong with it, in words. It exists; `newest` is the record of the newest live episode."""

    @classmethod
    @abstractmethod
    def mend(cls, home: Home, newest: Record | None) -> Mend | None:
        """Return how it is mended; None if nothing in it counts, so that it is to be set aside."""

    @classmethod
    @abstractmethod
    def copy(cls, source: Home, target: Home, state: Copied, kept: Kept | None) -> None:
        """Write it, durably, into a copy of the buffer, as it counts for the state that the copy is.

        Args:
            source: the buffer, which may have none, and which may be written meanwhile.
            target: the copy. The name in its directory is synced by the caller.
            state: of the copy.
            kept: gives what the handle that copies has in memory, of a kind that the sidecar knows.
        """

    @abstractmethod
    def sync(self) -> None:
        """Return once all that was written is on the disk itself."""

    @abstractmethod
    def close(self) -> None:
        """Give the files back."""
