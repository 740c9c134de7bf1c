"""A buffer that a source of episodes reads: one that its caller holds, or a directory that it opens itself, and again
after `close`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ringmap.buffers.engine import Engine
from ringmap.errors import ReplacedError
from ringmap.storage.disk.paths import local_path

__all__ = ["Reopened"]


class Opened(Protocol):
    """An open buffer, as far as it is opened again."""

    @property
    def engine(self) -> Engine: ...
    def close(self) -> None: ...


B = TypeVar("B", bound=Opened)


class Reopened(Generic[B]):
    """The buffer of a source.

    Args:
        given: the buffer, or its directory.
        open_at: opens a directory.
    """

    def __init__(self, given: B | str | os.PathLike[str], open_at: Callable[[str], B]) -> None:
        self._path: str | None = None
        self._open: B | None = None
        if isinstance(given, str | os.PathLike):
            self._path = local_path(given)
        else:
            self._open = given
        self._open_at = open_at
        self._uuid: bytes | None = None

    def __call__(self) -> B:
        """Return the open buffer.

        Raises:
            ReplacedError: the directory holds another one than before.
        """
        if self._open is None:
            assert self._path is not None
            opened = self._open_at(self._path)
            uuid = opened.engine.owned.manifest.uuid
            if self._uuid not in (None, uuid):
                opened.close()
                raise ReplacedError(f"{self._path}: holds another buffer than when it was opened; open it again")
            self._open, self._uuid = opened, uuid
        return self._open

    def close(self) -> None:
        """Close the directory, if it was opened here; the next call opens it again."""
        if self._path is not None and self._open is not None:
            self._open.close()
            self._open = None
