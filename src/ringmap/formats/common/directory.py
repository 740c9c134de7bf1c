"""A dataset that is a folder, open for writing: found or made, locked, logged, swapped.

    write_episode -> check -> _encode (images to files or bytes) -> log        one write: the commit
                                                                     |
            at the end, and ahead of an episode when the log is large: absorb -> the format's files

| mode      | nothing there      | a dataset is there                                      |
| --------- | ------------------ | ------------------------------------------------------- |
| append    | a new folder       | extended in place                                       |
| overwrite | a new folder       | built beside it, swapped at the end (swap.py)           |
| error     | a new folder       | refused                                                 |

Invariants: a new dataset appears whole, as an empty one; an episode whose write has returned is in
the log or in the format's files; `recover` changes nothing but what a killed writer left undone.
Not here: what the files are (each format: a `Layout`, and a `DirectoryWriter`).
"""

from __future__ import annotations

import errno
import os
from typing import Any, ClassVar, Protocol

from ringmap.errors import (
    EnvironmentFault,
    ExistsError,
    InputError,
    LockedError,
    RingmapError,
    UnknownFormatError,
)
from ringmap.formats.common import disk
from ringmap.formats.common.log import Log, Record
from ringmap.formats.common.swap import Staging, each_file, finish_swap, lock_folder
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.schema import CheckedEpisode
from ringmap.storage.schema import Schema

__all__ = ["DirectoryWriter", "Layout", "recover"]


class Layout(Protocol):
    """What a format says of its folders, and how records become files of its own."""

    def items(self, path: str) -> list[str]:
        """Return the names, beside each other, of what a dataset at `path` consists of; its own first."""
        ...

    def is_dataset(self, path: str) -> bool:
        """Tell whether a folder holds a dataset of this format."""
        ...

    def owns(self, relative: str) -> bool:
        """Tell of a path below the folder whether this format writes such files."""
        ...

    def create(self, path: str) -> None:
        """Make an empty dataset."""
        ...

    def look(self, path: str) -> tuple[int, int, Schema | None, dict[str, Any]]:
        """Return `(episodes, rows, schema, notes)` of the format's own files."""
        ...

    def absorb(self, path: str, log: Log) -> None:
        """Take the records of the log over into the format's own files, but for those that were before."""
        ...

    def tidy(self, path: str) -> None:
        """Remove what a killed writer left of an episode that was not written."""
        ...


def recover(path: str, layout: Layout) -> None:
    """Finish what a killed writer left undone at `path`. Readers call it before they look.

    Raises:
        EnvironmentFault: there is something to finish, and the folder may not be written by us.
    """
    path = os.path.realpath(path)
    try:
        finish_swap(path, layout.owns)
        log = Log(path)
        if not os.path.exists(log.path):
            return
        try:
            fd = lock_folder(path)
        except (LockedError, FileNotFoundError):
            return  # its writer is at work
        try:
            log.open()
            layout.absorb(path, log)
            layout.tidy(path)
            disk.sync_all(path)
            log.remove()
        finally:
            log.close()
            disk.unlock(fd)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise EnvironmentFault(
            error.errno,
            f"{path}: its writer was killed, and opening it finishes its work; open it once with "
            f"permission to write ({error})",
        ) from error


class DirectoryWriter(EpisodeWriter):
    """Writes episodes to a folder. Formats subclass it, and give it their layout.

    Args:
        path: the folder; folders above it are made.
        mode: one of `WRITE_MODES`.
        progress: show a progress bar in `write_episodes`.
    """

    layout: ClassVar[Layout]

    log_nbytes: ClassVar[int | None] = 64 << 20
    """The log is taken over when it is this large; None: at the end only."""

    _session: _Session | None = None

    # -- what a subclass may supply ----------------------------------------------------------

    def _open(self, path: str, notes: dict[str, Any]) -> None:
        """Called when the folder is there: `path` is where it is being built or extended."""

    def _check(self, episode: CheckedEpisode, where: str) -> None:
        """Raise InputError if this format can't hold an episode that fits its schema."""

    def _encode(
        self, episode: CheckedEpisode, number: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return `(columns for the log, notes)`; a column that is stored elsewhere by now is left out."""
        return dict(episode.columns), {}

    def _undo(self, number: int) -> None:
        """Remove what `_encode` stored elsewhere for an episode that was not written after all."""

    # -- the block ---------------------------------------------------------------------------

    def _begin(self) -> None:
        session = _Session(self.path, self.mode, self.layout, type(self).__name__)
        try:
            self._episodes, self._rows, self._schema, notes = self.layout.look(session.path)
            self._open(session.path, notes)
            session.log.open()
        except BaseException:
            session.close()
            raise
        self._session = session

    def _end(self, failed: bool) -> None:
        session, self._session = self._session, None
        assert session is not None
        try:
            if failed and session.staging is not None:
                return
            self.layout.absorb(session.path, session.log)
            session.finish()
        except OSError as error:
            if isinstance(error, RingmapError) or session.staging is not None:
                raise
            raise _fault(
                error,
                f"{type(self).__name__}: {self.path}: {error}; all its episodes are written, do not write them again: "
                "opening it once there is room finishes this",
            ) from error
        finally:
            session.close()

    def _store(self, episode: CheckedEpisode, packed: bytes, where: str) -> None:
        session = self._session
        assert session is not None
        self._check(episode, where)
        before = self._schema, self._episodes, self._rows
        try:
            # Ahead of the episode: it is written once the log has its record, whatever becomes of older ones.
            if self.log_nbytes is not None and session.log.size >= self.log_nbytes:
                self.layout.absorb(session.path, session.log)
                session.log.cut(0)
            size = session.log.size
            try:
                columns, notes = self._encode(episode, self._episodes)
                record = Record(
                    self._episodes,
                    self._rows,
                    episode.length,
                    episode.schema,
                    columns,
                    packed,
                    notes,
                )
                session.log.append(record)
                self._schema = episode.schema
                self._episodes += 1
                self._rows += episode.length
            except BaseException:
                self._schema, self._episodes, self._rows = before
                session.log.cut(size)
                self._undo(self._episodes)
                raise
        except OSError as error:
            if isinstance(error, RingmapError):
                raise
            raise _fault(error, f"{where}: {self.path}: {error}; nothing was written") from error


def _fault(error: OSError, message: str) -> EnvironmentFault:
    if error.errno is None:  # a library's own
        return EnvironmentFault(message)
    return EnvironmentFault(error.errno, message)


class _Session:
    """One folder from the moment that it is locked until it is closed."""

    def __init__(self, path: str, mode: str, layout: Layout, name: str) -> None:
        self.target = path
        self.layout = layout
        self.name = name
        self.staging: Staging | None = None
        self._fd = -1
        exists = self._look(mode)
        disk.make_folder(os.path.dirname(path))
        items = layout.items(path)
        try:
            if exists and mode == "overwrite":
                self.staging = self._staged(items)
                self.path = self.staging.dataset
                self.log = Log(self.path)
            else:
                if not exists:
                    staging = self._staged(items)
                    try:
                        staging.put()
                    finally:
                        staging.close()
                recover(path, layout)
                self._fd = lock_folder(path)
                self.path = path
                self.log = Log(path)
        except BaseException:
            self.close()
            raise

    def _staged(self, items: list[str]) -> Staging:
        staging = Staging(self.target, items, self.layout.owns)
        try:
            self.layout.create(staging.dataset)
        except BaseException:
            staging.drop()
            staging.close()
            raise
        return staging

    def _look(self, mode: str) -> bool:
        """Tell whether there is a dataset, or refuse what is there."""
        path, layout = self.target, self.layout
        recover(path, layout)
        if not os.path.exists(path):
            return False
        if os.path.isdir(path) and not os.listdir(path):
            return False  # an empty folder gives way
        if mode == "error":
            raise ExistsError(
                f"{self.name}: {path} already exists; pass mode='overwrite' to replace it or "
                "mode='append' to extend it"
            )
        if not os.path.isdir(path) or not layout.is_dataset(path):
            raise UnknownFormatError(
                f"{self.name}: {path} holds something else; choose another path, or delete it yourself"
            )
        if mode == "overwrite":
            for item in layout.items(path):
                folder = os.path.join(os.path.dirname(path), item)
                for file in each_file(folder):
                    if not layout.owns(file):
                        raise InputError(
                            f"{self.name}: {folder} holds {file!r}, which is not of the dataset; "
                            "move it away before you overwrite"
                        )
        return True

    def finish(self) -> None:
        """Make what was absorbed last, and put it in its place."""
        if self.staging is None:
            disk.sync_all(self.path)
            self.log.remove()
            return
        self.log.remove()
        fd = lock_folder(self.target) if os.path.exists(self.target) else -1
        try:
            self.staging.put()
        finally:
            if fd >= 0:
                disk.unlock(fd)
        self.staging.close()
        self.staging = None

    def close(self) -> None:
        """Give everything back; what was not finished beside another dataset goes."""
        if hasattr(self, "log"):
            self.log.close()
        if self.staging is not None:
            if not os.path.exists(os.path.join(self.staging.folder, "plan")):
                self.staging.drop()
            self.staging.close()
            self.staging = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            disk.unlock(fd)
