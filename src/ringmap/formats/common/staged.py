"""The writer of every format that is written by exports: it holds all the code for kills and full disks.

    write_episode -> check -> _encode -> the log                one write: the episode is written
                                            |
            when the log is large, and at the end: _extend -> the dataset, in groups

| mode      | no dataset          | a dataset exists                                        |
| --------- | ------------------- | ------------------------------------------------------- |
| append    | an empty dataset    | extended, or refused (`appends = False`)                |
| overwrite | an empty dataset    | built beside it, swapped at the end (swap.py)           |
| error     | an empty dataset    | refused; one without episodes is extended               |

A dataset that can only be written as a whole (`extends = False`, or one file) is exported beside the old one, with all
its episodes, and swapped.
A log that a killed writer left is moved into the dataset by the next one that appends; of a format that does not
append, it stays, and is read.
Invariants: a new dataset appears whole, as an empty one; an episode whose write has returned is in the log or in the
dataset; a log is dropped only when the dataset has its episodes.
Not here: the files of a dataset (each format), the log's bytes (log.py), how a reader reads a log (pending.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    ExistsError,
    InputError,
    RingmapError,
    UnknownFormatError,
)
from ringmap.formats.common import disk
from ringmap.formats.common.log import Encoded, Log, Record
from ringmap.formats.common.pending import Again, Pending, base_of, log_path, pending_at
from ringmap.formats.common.swap import (
    Staging,
    each_file,
    finish_swap,
    lock_folder,
    staging_folder,
)
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.episode import INSTEAD, CheckedEpisode
from ringmap.storage.columns.schema import Schema

if TYPE_CHECKING:
    from ringmap.datasets.stored import ColumnSource

__all__ = ["StagedWriter"]

Array = np.ndarray[Any, np.dtype[Any]]


class StagedWriter(EpisodeWriter):
    """Writes episodes to a log, and exports them in groups. A format supplies the exports."""

    extends: bool = True
    """Whether `_extend` adds to a dataset; otherwise the whole dataset is exported again."""

    group_nbytes: ClassVar[int] = 64 << 20
    """The log is moved into the dataset when it is this large."""

    _staging: Staging | None = None
    _fd = -1
    _whole = False
    _episodes = 0
    _rows = 0

    # -- what a format supplies --------------------------------------------------------------

    def _is_dataset(self, path: str) -> bool:
        """Return whether a dataset of this format is at a path."""
        raise NotImplementedError

    def _owns(self, relative: str) -> bool:
        """Return whether this format writes a file with this path below a dataset's folder."""
        raise NotImplementedError

    def _items(self, path: str) -> list[str]:
        """Return the names of the files and folders, side by side, of a dataset; the main one first."""
        return [os.path.basename(path)]

    def _source(self, path: str) -> ColumnSource:
        """Return what reads a dataset, for `_look`."""
        raise NotImplementedError

    def _look(self, path: str) -> tuple[Array, Schema | None]:
        """Return the lengths of a dataset's episodes, and its columns if it has any yet."""
        source = self._source(path)
        try:
            return source.lengths, source.schema if len(source.lengths) else None
        finally:
            source.close()

    def _open(self, path: str) -> None:
        """Called before the existing dataset is extended; "" for a new one."""

    def _encode(self, episode: CheckedEpisode) -> dict[str, Array | Encoded]:
        """Return the columns as the log holds them."""
        return dict(episode.columns)

    def _notes(self) -> dict[str, Any]:
        """Return the options of this writer that `_extend` needs."""
        return {}

    def _stored_facts(self, path: str) -> Facts:
        """Return what a dataset states of its episodes, to which others are added as they are."""
        return Facts.of(self._source(path))

    def _export(self, path: str, episodes: Iterable[Record]) -> None:
        """Write a new dataset at a path that does not exist."""
        raise NotImplementedError

    def _extend(self, path: str, episodes: Iterable[Record]) -> None:
        """Add episodes to a dataset, in new files that count by the last change, one rename.

        After a kill in the middle, it is called again with the same episodes, and later ones.
        """
        raise NotImplementedError

    def _stored(self, path: str) -> Iterable[Record]:
        """Return the episodes of a dataset that is exported again, with more of them."""
        raise NotImplementedError

    def _rewritten(self, path: str) -> int:
        """Return how many existing bytes `_extend` rewrites: the log grows as large."""
        return 0

    # -- the block ---------------------------------------------------------------------------

    def _begin(self) -> None:
        exists = self._find()
        disk.make_folder(os.path.dirname(self.path))
        try:
            if not exists:
                self._appear()
            self._whole = not self.extends or not os.path.isdir(self.path)
            if not self._whole:
                self._fd = lock_folder(self.path)
            if self._staging is None and (self._whole or self._replaces(exists)):
                self._stage()
            elif self._staging is None and os.path.isdir(staging_folder(self.path)):
                self._stage().close()  # the unfinished work of a killed writer
                self._staging = None
            if exists and self.mode == "error":
                self._check_bare()  # another writer may have been faster than the lock
            self._log = Log(log_path(self.path))
            if not self._replaces(exists):  # else the log goes with the old dataset
                self._take_over()
            self._target, schema = self.path, None
            lengths = np.empty(0, np.int32)
            if self._replaces(exists):
                assert self._staging is not None
                self._target = self._staging.dataset
                self._log = Log(os.path.join(self._staging.folder, "unfinished"))
            else:
                lengths, schema = self._look(self.path)
                if len(lengths):
                    self._agree(self._stored_facts(self.path))
            self._open(self.path if schema is not None else "")
            self._schema = schema
            self._episodes, self._rows = len(lengths), int(lengths.sum(dtype=np.int64))
            self._log.start(base_of(lengths))
            self._drain_at = self._next_drain()
        except BaseException:
            self._close()
            raise

    def _end(self, failed: bool) -> None:
        replaces = self._target != self.path
        try:
            if failed and replaces:
                return
            self._drain()
            if replaces:
                self._swap()
            else:
                disk.sync_all(os.path.dirname(self.path))
            self._log.remove()
        except OSError as error:
            if isinstance(error, RingmapError) or replaces:
                raise
            raise _fault(
                error,
                f"{type(self).__name__}: {self.path}: {error}; all its episodes are written and can be read, do not "
                "write them again: "
                f"{'the next writer finishes this' if self.appends else 'convert it to a new dataset'}",
            ) from error
        finally:
            self._close()

    def _store(self, episode: CheckedEpisode, packed: bytes, where: str) -> None:
        log, before = self._log, (self._schema, self._episodes, self._rows)
        try:
            # Before the episode: it is written once the log has its record, whatever happens to older ones.
            if log.size >= self._drain_at:
                self._drain()
                log.start(base_of(self._look(self._target)[0]))
                self._drain_at = self._next_drain()
            count = len(log.places)
            try:
                log.append(
                    Record(
                        self._episodes,
                        self._rows,
                        episode.length,
                        episode.schema,
                        self._encode(episode),
                        packed,
                        {**self._notes(), **self._facts.encode()},
                    )
                )
                self._schema = episode.schema
                self._episodes += 1
                self._rows += episode.length
            except BaseException:
                self._schema, self._episodes, self._rows = before
                log.cut(count)
                raise
        except OSError as error:
            if isinstance(error, RingmapError):
                raise
            raise _fault(error, f"{where}: {self.path}: {error}; nothing was written") from error

    # -- the dataset -------------------------------------------------------------------------

    def _find(self) -> bool:
        """Return whether a dataset exists, or refuse something else at the path."""
        path, name = self.path, type(self).__name__
        finish_swap(path, self._owns)
        if not os.path.exists(path):
            return False
        if os.path.isdir(path) and not os.listdir(path):
            return False  # an empty folder is removed
        if self.mode == "error":
            self._check_bare()
            return True
        if not self._is_dataset(path):
            raise UnknownFormatError(f"{name}: {path} holds something else; choose another path, or delete it yourself")
        if self.mode == "overwrite":
            for item in self._items(path):
                place = os.path.join(os.path.dirname(path), item)
                for file in each_file(place):
                    if not self._owns(file):
                        raise InputError(
                            f"{name}: {place} holds {file!r}, which is not of the dataset; "
                            "move it away before you overwrite"
                        )
        return True

    def _check_bare(self) -> None:
        """Raise ExistsError, but for a dataset without episodes and other files: a killed writer left it."""
        path = self.path
        with contextlib.suppress(RingmapError):
            if self._is_dataset(path) and all(map(self._owns, each_file(path))) and not len(self._look(path)[0]):
                log = pending_at(path)
                if log is None:
                    return
                log.close()
        more = "pass mode='append'" if self.appends else INSTEAD
        raise ExistsError(
            f"{type(self).__name__}: {path} already exists; pass mode='overwrite' to replace it; to add to it, {more}"
        )

    def _replaces(self, exists: bool) -> bool:
        return exists and self.mode == "overwrite"

    def _stage(self) -> Staging:
        self._staging = Staging(self.path, self._items(self.path), self._owns)
        return self._staging

    def _appear(self) -> None:
        """Create an empty dataset at the path."""
        staging = self._stage()
        disk.remove(log_path(self.path))  # of a dataset that was deleted since
        self._export(staging.dataset, ())
        staging.put()
        if self.extends and os.path.isdir(self.path):
            self._staging = None
            staging.close()

    def _swap(self) -> None:
        assert self._staging is not None
        if not os.path.lexists(self._staging.dataset):
            self._export(self._staging.dataset, ())
        self._log.close()
        self._staging.put()

    def _take_over(self) -> None:
        """Move the log of a killed writer into the dataset."""
        try:
            self._log.open(write=True)
        except FileNotFoundError:
            return
        self._target = self.path
        self._drain()
        disk.sync_all(os.path.dirname(self.path))
        self._log.remove()

    def _drain(self) -> None:
        """Add the episodes of the log that the dataset lacks."""
        path, fresh = self._target, not os.path.lexists(self._target)
        lengths = np.empty(0, np.int32) if fresh else self._look(path)[0]
        pending = Pending(self._log, lengths, path)
        if not pending.places:
            return
        try:
            if fresh:
                self._export(path, pending)
            elif not self._whole:
                self._extend(path, pending)
            else:
                assert self._staging is not None
                path = self._staging.dataset
                old = len(lengths)
                self._export(path, Again(lambda: chain(self._stored(self._target) if old else (), pending)))
        except (OSError, MemoryError, RingmapError):
            raise
        except Exception as error:  # of another library, or of somebody else's format
            raise InputError(
                f"{type(self).__name__}: {self.path}: the {len(pending.places)} episodes from number {len(lengths)} on "
                "are written and "
                f"can be read, but can't be moved out of {self._log.path}: {type(error).__name__}: {error}; find the "
                "one that is to blame, "
                "write the others to a new dataset by convert(..., where='episode != N'), and delete that file"
            ) from error
        stored = len(self._look(path)[0])
        if stored != len(lengths) + len(pending.places):
            raise CorruptError(
                f"{type(self).__name__}: {path}: holds {stored} episodes after {len(pending.places)} were added to "
                f"{len(lengths)}; its log stays"
            )
        if path != self._target:
            self._staging.put()  # type: ignore[union-attr]

    def _next_drain(self) -> int:
        if self._whole:
            return 1 << 62
        fresh = not os.path.lexists(self._target)
        return max(self.group_nbytes, 0 if fresh else self._rewritten(self._target))

    def _close(self) -> None:
        """Close everything; remove an unfinished dataset beside another one."""
        if hasattr(self, "_log"):
            self._log.close()
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            disk.unlock(fd)


def _fault(error: OSError, message: str) -> EnvironmentFault:
    if error.errno is None:  # a library's own
        return EnvironmentFault(message)
    return EnvironmentFault(error.errno, message)
