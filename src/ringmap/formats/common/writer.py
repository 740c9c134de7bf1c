"""The writer of every format that is written: the block, the modes, the log, and all code for kills and full disks.

    write_episode -> refuses, layout, check -> encode -> the log          one write: the episode is written
                                                            |
                  when the log is large, and at the end: extend -> the dataset, in groups

| mode      | no dataset          | a dataset exists                                        |
| --------- | ------------------- | ------------------------------------------------------- |
| append    | an empty dataset    | extended, or refused (`Format.appends`)                 |
| overwrite | an empty dataset    | built beside it, swapped at the end (swap.py)           |
| error     | an empty dataset    | refused; one without episodes is extended               |

A format without `extend` is exported beside the old dataset, with all its episodes, and swapped.
A log that a killed writer left is moved into the dataset by the next one that appends; of a format that does not
append, it stays, and is read.
Invariants: a call that raises has changed nothing that a reader sees; a new dataset appears whole, as an empty one; an
episode whose write has returned is in the log or in the dataset; a log is dropped only when the dataset has its
episodes; a forked child neither writes nor ends its parent's block.
Not here: the files of a dataset (each format), the log's bytes and how a reader reads it (log.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.datasets.episode import stored_layout
from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    ExistsError,
    InputError,
    LockedError,
    ReadOnlyError,
    RingmapError,
    RoleError,
    UnknownFormatError,
    UnsupportedError,
)
from ringmap.formats.base import Format
from ringmap.formats.common import disk
from ringmap.formats.common.log import FILE, Again, Encoded, Log, Pending, Record, base_of, log_path, pending_at
from ringmap.formats.common.refusals import Refused, is_own, refusal
from ringmap.formats.common.swap import Staging, each_file, finish_swap, lock_folder, staging_folder
from ringmap.formats.episode import (
    EPISODE_DATA_KEY,
    INSTEAD,
    CheckedEpisode,
    check_episode,
    no_append,
    split_episode_data,
    validate_write_mode,
)
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.disk.calls import Turn
from ringmap.storage.disk.paths import local_path
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.manifest import rate_text

if TYPE_CHECKING:
    from ringmap.formats.base import Format

__all__ = ["EpisodeWriter", "tell_facts"]


Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")


class EpisodeWriter:
    """Writes episodes to a dataset. Use it in a `with` block.

    A format's writer is a subclass with `export`, and what else differs: `extend`, `refuses`, `refuses_data`, `layout`,
    `encode`, `resume`.

    Args:
        path: the dataset, a file or folder; folders above it are made. A link to a dataset stays one.
        mode: "append" extends a dataset (not every format: `Format.appends`), "overwrite" replaces it when the block
            succeeds, "error" refuses it; None: "append", or "error" of a format that can't.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work.
        UnknownFormatError, CorruptError: on entering, if the dataset can't be appended to.

    Processes and threads: one writer at a time, which a lock sees to. Threads wait for each other; a signal handler in
    the middle of a write of the same thread is refused. Killed at any moment, the writer leaves every episode readable
    whose call had returned; a power cut may cost what was written since the block began.
    """

    format: ClassVar[type[Format]]
    """The format; a class that a `Format` names as its `writer` gets it."""

    files: ClassVar[str] = ".*"
    """A pattern of the paths, below a dataset's folder, of the files that the format writes: no other is deleted."""

    beside: ClassVar[str] = ""
    """The end of the path of a second part of the dataset, after that of the first without its suffix; "" for none."""

    group_nbytes: ClassVar[int] = 64 << 20
    """The log is moved into the dataset when it is this large."""

    facts = Facts()
    """What is known of the episodes, as far as anybody said."""

    _is_told = False
    _schema: Schema | None = None
    _staging: Staging | None = None
    _fd = -1
    _episodes = 0
    _rows = 0
    _drain_at = 0
    _lengths: Array | None = None

    def __init__(self, path: str | os.PathLike[str], mode: str | None = None, progress: bool = False) -> None:
        appends = self.format.appends
        self.path = os.path.realpath(local_path(path))
        self.mode = validate_write_mode(("append" if appends else "error") if mode is None else mode)
        if mode == "append" and not appends:
            raise no_append(type(self).__name__, self.path)
        self.progress = progress
        self._owner: int | None = None
        self._turn = Turn()
        self._said: set[str] = set()

    # -- what a format supplies --------------------------------------------------------------

    def refuses(self, name: str, rows: Array) -> str | None:
        """Return why the format can't hold these rows of a column, None if it can. Also called outside of a block."""
        return None

    def refuses_data(self, name: str, value: Any) -> str | None:
        """Return why the format can't hold a datum of an episode, None if it can. Also called outside of a block."""
        return None if self.format.supports_episode_data else "it has no place for any"

    def looks_at(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Return whether a column may be refused for its values: a copy then looks at all of them before it begins."""
        return False

    @property
    def looks_at_data(self) -> bool:
        """Whether the format does not hold all data of episodes: a copy then looks at all of them before it begins."""
        return not self.format.supports_episode_data or type(self).refuses_data is not EpisodeWriter.refuses_data

    def layout(
        self, columns: dict[str, Array], data: dict[str, Any], refused: Refused, where: str
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return columns and data as the dataset holds them: their names, their steps. Also called outside of a block.

        It may add to `refused`.
        """
        return columns, data

    def encode(self, episode: CheckedEpisode) -> dict[str, Array | Encoded]:
        """Return the columns as the log holds them: pictures and videos encoded."""
        return dict(episode.columns)

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write a new dataset at `path`, which does not exist. It does not have to handle kills and full disks.

        Args:
            episodes: none or more; they can be iterated more than once. Each maps a column to its array (T, ...), or
                what `encode` made of it, and `_episode_data` to its data if it has any.
            path: of a file or folder; its parent folder exists.
        """
        raise NotImplementedError(f"{type(self).__name__} must supply export")

    def extend(self, episodes: Iterable[Record], path: str) -> None:
        """Add episodes to a dataset. One change, the last, such as a rename, makes each count, or all of them at once.

        After a kill in the middle, it is called again, with the episodes that do not count yet, and later ones.
        A dataset of a format without it is exported again as a whole, at the end of a block that appended to it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not supply extend: its datasets are exported as a whole")

    def resume(self, dataset: Any) -> None:
        """Look at the open dataset that is extended, before the first episode; None for a new one."""

    def rewritten(self, path: str) -> int:
        """Return how many existing bytes `extend` writes again: the log grows as large."""
        return 0

    # -- where rewards stand, and the rate ---------------------------------------------------

    def expect_facts(self, facts: Facts, where: str) -> None:
        """Note what is known of the episodes that are about to be written. Call it before the block.

        Args:
            facts: where their rewards stand, and their rate.
            where: what writes them, to name in an error.

        Raises:
            InputError: the format can't hold the rate. On entering the block, that a dataset which is appended to has
                its rewards elsewhere, or another rate.
        """
        self.facts, self._is_told = facts, True

    def reward_at(self, option: str | None) -> str | None:
        """Return where rewards stand: as the writer's option says, else their source; "next" where nothing else was
        said."""
        if option is not None:
            return option
        return self.facts.reward_at if self._is_told else "next"

    def _agree(self, stored: Facts) -> None:
        """Raise unless episodes may follow others of which this is known; what is stored stays, where something is."""
        name, told = type(self).__name__, self.facts
        if stored.reward_at is not None and self._is_told and told.reward_at != stored.reward_at:
            given = f"reward_at={told.reward_at!r}" if told.reward_at else "it is not known where theirs stand"
            raise InputError(
                f"{name}: {self.path} has its rewards at reward_at={stored.reward_at!r}, and of the episodes that are "
                f"to follow {given}: say it (load_dataset(..., reward_at=)), or choose another path"
            )
        stored.refuse_rate(told, name, self.path, "what is to follow")
        if told.fps is not None and stored.fps is None:
            warnings.warn(
                f"{name}: {self.path} does not say how many steps are a second, and will not, although the episodes "
                f"that follow have {rate_text(told.fps)}: merge both into a new dataset, with fps=",
                stacklevel=4,
            )
        self.facts = stored.over(Facts(told.reward_at))

    # -- episodes ----------------------------------------------------------------------------

    def write_episode(self, ep_data: Mapping[str, Any]) -> None:
        """Append one whole episode; it is safe from a kill when the call returns.

        Args:
            ep_data: column -> per-step list, array or CPU tensor of shape (T, ...); under
                `_episode_data`, a mapping of values constant within the episode. An empty one
                changes nothing.

        Raises:
            RoleError: outside of a `with` block, or within another write of the same thread.
            InputError: it does not fit the schema of the first episode; nothing was written.
            OSError: the disk is full or failed; nothing was written, and the next call may work.
        """
        where = f"{type(self).__name__}.write_episode"
        if self._owner is None:
            raise RoleError(f"{where}: {self.path}: used outside of a `with` block")
        if self._owner != os.getpid():
            raise ReadOnlyError(f"{where}: {self.path} belongs to process {self._owner}, not to its fork")

        def work() -> None:
            found, refused = self._examined(ep_data, where)
            if refused:
                raise refusal(refused, self.path, where)
            episode = check_episode(found, self._schema, where)
            if episode is not None:
                self._store(episode, where)

        self._turn.take(f"{where}: {self.path}", work)

    def write_episodes(self, episodes: Iterable[Mapping[str, Any]]) -> None:
        """Append episodes as they come, each safe when the next one is asked for.

        Raises:
            RoleError, InputError, OSError: as `write_episode`; the episodes before stay.
        """
        if self.progress:
            from tqdm import tqdm

            episodes = tqdm(episodes, desc=os.path.basename(self.path), unit="episode")
        for episode in episodes:
            self.write_episode(episode)

    def refusals(self, ep_data: Mapping[str, Any]) -> Refused:
        """Return what of an episode `write_episode` would refuse. Nothing is opened or changed.

        Raises:
            InputError: it is no episode.
        """
        where = f"{type(self).__name__}.write_episode"
        found, refused = self._examined(ep_data, where)
        if not refused:
            check_episode(found, None, where)
        return refused

    def refused_columns(self, columns: Mapping[str, Array]) -> Refused:
        """Return which columns can't be held."""
        found = Refused()
        for name, rows in columns.items():
            why = self.refuses(name, rows)
            if why is not None:
                found[f"column {name!r} ({rows.dtype} {rows.shape[1:]}): {why}"] = name
        return found

    def refused_data(self, data: Mapping[str, Any]) -> Refused:
        """Return which data of an episode can't be held, and are not ours."""
        found = Refused()
        for name, value in data.items():
            why = None if is_own(name) else self.refuses_data(name, value)
            if why is not None:
                found[f"episode data {name!r} ({type(value).__name__}): {why}"] = name
        return found

    def say_once(self, message: str) -> None:
        """Log, once in a block, what is lossy about this dataset."""
        if message not in self._said:
            self._said.add(message)
            log.warning("%s: %s: %s", type(self).__name__, self.path, message)

    def _examined(self, ep_data: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Refused]:
        """Return an episode as it is stored, and what of it can't be held."""
        given, data = split_episode_data(stored_layout(ep_data))
        columns = as_columns(given, where)
        if not columns or not len(next(iter(columns.values()))):
            return {}, Refused()
        refused = Refused(self.refused_columns(columns) | self.refused_data(data))
        data = {n: v for n, v in data.items() if not is_own(n) or self.refuses_data(n, v) is None}
        try:
            stored, data = self.layout(columns, data, refused, where)
        except InputError:
            if refused:  # what it met may be a consequence of these
                return {}, refused
            raise
        return {**stored, **({EPISODE_DATA_KEY: data} if data else {})}, refused

    def _store(self, episode: CheckedEpisode, where: str) -> None:
        """Write a checked episode, safe from a kill when it returns."""
        packed = encode_data(episode.data, where) if episode.data else b""
        with _named(f"{where}: {self.path}", "nothing was written"):
            # Before the episode: it is written once the log has its record, whatever happens to older ones.
            if self._log.size >= self._drain_at:
                try:
                    self._log.start(base_of(self._drain()))
                    self._drain_at = self._next_drain()
                except LockedError:  # another program has the file open
                    self._drain_at = self._log.size + self.group_nbytes
            count = len(self._log.places)
            columns = self.encode(episode)
            notes = {**episode.notes, **self.facts.encode()}
            record = Record(self._episodes, self._rows, episode.length, episode.schema, columns, packed, notes)
            try:
                self._log.append(record)
            except BaseException:
                self._log.cut(count)
                raise
            self._schema = episode.schema
            self._episodes += 1
            self._rows += episode.length

    # -- the block ---------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._owner is not None:
            raise RoleError(f"{type(self).__name__}: {self.path} is already open in a `with` block of this writer")
        try:
            self._begin()
        except BaseException:
            self._close()
            raise
        self._owner = os.getpid()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        owner, self._owner = self._owner, None
        if owner != os.getpid():
            return
        try:
            self._end(kind is not None)
        finally:
            self._close()

    def _begin(self) -> None:
        """Open the dataset for writing."""
        from ringmap.datasets.stored_episodes import schema_of

        exists = self._find()
        replaces = exists and self.mode == "overwrite"
        disk.make_folder(os.path.dirname(self.path))
        if not exists:
            self._appear()
        if self._extends_folder:
            self._fd = lock_folder(self.path)
        if self._staging is None and (replaces or not self._extends_folder):
            self._stage()  # its lock is that of a dataset which is one file
        elif self._staging is None and os.path.isdir(staging_folder(self.path)):
            self._stage().close()  # the unfinished work of a killed writer
            self._staging = None
        if exists and self.mode == "error":
            self._check_bare()  # another writer may have been faster than the lock
        self._said.clear()
        self._target, self._schema, lengths = self.path, None, np.empty(0, np.int32)
        self._log = Log(log_path(self.path))
        if replaces:  # the log goes with the old dataset
            assert self._staging is not None
            self._target = self._staging.dataset
            self._log = Log(os.path.join(self._staging.folder, "unfinished"))
        else:
            self._take_over()
            with self._opened(self.path) as dataset:
                lengths, self._schema = np.asarray(dataset.lengths), schema_of(dataset, type(self).__name__)
                if self._schema is not None:
                    self._agree(Facts.of(dataset))
                    self.resume(dataset)
        if self._schema is None:
            self.resume(None)
        self._lengths = lengths
        self._episodes, self._rows = len(lengths), int(lengths.sum(dtype=np.int64))
        self._log.start(base_of(lengths))
        self._drain_at = self._next_drain()

    def _end(self, failed: bool) -> None:
        """Finish; `failed` tells that the block ended with an exception."""
        if self._target != self.path:
            if not failed:
                self._drain()
                self._swap()
            return
        then = "the next writer finishes this" if self.format.appends else "convert it to a new dataset"
        done = f"all its episodes are written and can be read, do not write them again: {then}"
        with _named(f"{type(self).__name__}: {self.path}", done):
            self._drain()
            self._drop_log()

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

    # -- the dataset -------------------------------------------------------------------------

    @property
    def _whole(self) -> bool:
        """Whether the dataset is exported again as a whole where it is added to."""
        return type(self).extend is EpisodeWriter.extend

    @property
    def _extends_folder(self) -> bool:
        return not self._whole and os.path.isdir(self.path)

    def _owns(self, relative: str) -> bool:
        """Return whether the format writes a file with this path below a dataset's folder."""
        return relative in (FILE, FILE + ".new") or re.fullmatch(self.files, relative.replace(os.sep, "/")) is not None

    def _items(self) -> list[str]:
        """Return the names of the files and folders, side by side, of the dataset; the main one first."""
        name = os.path.basename(self.path)
        return [name, name.removesuffix(os.path.splitext(self.beside)[1]) + self.beside] if self.beside else [name]

    def _look(self, path: str) -> Array:
        """Return the lengths of a dataset's episodes."""
        with self._opened(path) as dataset:
            return np.asarray(dataset.lengths)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        try:
            dataset = self.format.open_reader(path, layout="HWC")
        except UnsupportedError as error:
            raise UnsupportedError(f"{type(self).__name__}: nothing can be appended to it: {error}") from error
        with contextlib.closing(dataset):
            yield dataset

    def _stored(self, path: str) -> Iterator[Record]:
        """Yield the episodes of a dataset that is exported again, with more of them."""
        from ringmap.datasets.stored_episodes import episodes_of

        name = type(self).__name__
        with self._opened(path) as dataset:
            for number, (columns, data) in enumerate(episodes_of(dataset, self.format.supports_episode_data)):
                found = check_episode({**columns, EPISODE_DATA_KEY: data}, None, name)
                if found is not None:
                    packed = encode_data(data, name) if data else b""
                    yield Record(number, 0, found.length, found.schema, found.columns, packed, {})

    def _find(self) -> bool:
        """Return whether a dataset exists, or refuse something else at the path."""
        path, name = self.path, type(self).__name__
        finish_swap(path, self._owns)
        if not os.path.exists(path) or (os.path.isdir(path) and not os.listdir(path)):  # an empty folder is removed
            return False
        if self.mode == "error":
            self._check_bare()
            return True
        if not self.format.detect(path):
            raise UnknownFormatError(f"{name}: {path} holds something else; choose another path, or delete it yourself")
        if self.mode == "overwrite":
            for item in self._items():
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
            if self.format.detect(path) and all(map(self._owns, each_file(path))) and not len(self._look(path)):
                left = pending_at(path)
                if left is None:
                    return
                left.close()
        more = "pass mode='append'" if self.format.appends else INSTEAD
        raise ExistsError(
            f"{type(self).__name__}: {path} already exists; pass mode='overwrite' to replace it; to add to it, {more}"
        )

    def _stage(self) -> Staging:
        self._staging = Staging(self.path, self._items(), self._owns)
        return self._staging

    def _appear(self) -> None:
        """Create an empty dataset at the path."""
        staging = self._stage()
        disk.remove(log_path(self.path))  # of a dataset that was deleted since
        self.export((), staging.dataset)
        staging.put()
        if self._extends_folder:
            self._staging = None
            staging.close()

    def _swap(self) -> None:
        assert self._staging is not None
        if not os.path.lexists(self._staging.dataset):
            self.export((), self._staging.dataset)
        self._log.close()
        self._staging.put()

    def _take_over(self) -> None:
        """Move the log of a killed writer into the dataset."""
        try:
            self._log.open(write=True)
        except FileNotFoundError:
            return
        self._drain()
        self._drop_log()

    def _drop_log(self) -> None:
        """Remove the log, once what came out of it is on the disk."""
        if os.path.isfile(self.path):
            disk.sync_file(self.path)
        else:
            disk.sync_all(os.path.dirname(self.path))
        self._log.remove()

    def _drain(self) -> Array:
        """Add the episodes of the log that the dataset lacks, and return the lengths of all that it has then."""
        path, fresh = self._target, not os.path.lexists(self._target)
        lengths, self._lengths = self._lengths, None  # not known, if this is interrupted
        if lengths is None:
            lengths = np.empty(0, np.int32) if fresh else self._look(path)
        old, pending = len(lengths), Pending(self._log, lengths, path)
        if not pending.places:
            self._lengths = lengths
            return lengths
        try:
            if fresh:
                self.export(pending, path)
            elif not self._whole:
                self.extend(pending, path)
            else:
                assert self._staging is not None
                path = self._staging.dataset
                self.export(Again(lambda: chain(self._stored(self._target) if old else (), pending)), path)
        except (OSError, MemoryError, RingmapError):
            raise
        except Exception as error:  # of another library, or of somebody else's format
            raise InputError(
                f"{type(self).__name__}: {self.path}: the {len(pending)} episodes from number {old} on are written and "
                f"can be read, but can't be moved out of {self._log.path}: {type(error).__name__}: {error}; find the "
                "one that is to blame, write the others to a new dataset by convert(..., where='episode != N'), and "
                "delete that file"
            ) from error
        lengths = self._look(path)
        if len(lengths) != old + len(pending):
            raise CorruptError(
                f"{type(self).__name__}: {path}: holds {len(lengths)} episodes after {len(pending)} were added to "
                f"{old}; its log stays"
            )
        if path != self._target:
            self._staging.put()  # type: ignore[union-attr]
        self._lengths = lengths
        return lengths

    def _next_drain(self) -> int:
        if self._whole:
            return 1 << 62
        fresh = not os.path.lexists(self._target)
        return max(self.group_nbytes, 0 if fresh else self.rewritten(self._target))


@contextlib.contextmanager
def _named(what: str, then: str) -> Iterator[None]:
    """Turn an error of the disk into one of ours that says what holds now."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RingmapError):
            raise
        message = f"{what}: {error}; {then}"
        if error.errno is None:  # a library's own
            raise EnvironmentFault(message) from error
        raise EnvironmentFault(error.errno, message) from error


def tell_facts(writer: Any, facts: Facts, where: str) -> None:
    """Say what is known of the episodes to a writer that can be told: ours, a buffer, or one with the same method.

    Raises:
        InputError: it has rewards elsewhere, or another rate, or can't hold this one.
    """
    tell = getattr(writer, "expect_facts", None)
    if tell is not None:
        tell(facts, where)
