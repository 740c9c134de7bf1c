"""A writer of episodes: the `with` block, who may write, and what is checked before anything is.

    write_episode -> in the block? our process? -> check_episode -> _store   (the format's own)

Invariants: a call that raises has changed nothing that a reader sees; a forked child neither
writes nor ends its parent's block.
Not here: files. `StagedWriter` (staged.py) is this for formats that are exported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from types import TracebackType
from typing import Any, Self

from ringmap.clips.window import check_reward_at
from ringmap.errors import InputError, ReadOnlyError, RoleError
from ringmap.formats.episode import CheckedEpisode, check_episode, no_append, validate_write_mode
from ringmap.storage.columns.schema import Schema
from ringmap.storage.read.handle import refuse_if_mine
from ringmap.storage.records.blobs import encode_data

__all__ = ["EpisodeWriter", "fill", "tell_reward_at"]


class EpisodeWriter:
    """The part of a writer that every format has. Use a writer in a `with` block.

    A subclass supplies `_begin`, `_end` and `_store`, and keeps `_schema`; it may supply `_as_stored`.

    Args:
        path: the dataset, a file or folder; folders above it are made. A link to a dataset stays one.
        mode: "append" extends a dataset (not every format: `Format.appends`), "overwrite" replaces it when the block succeeds,
            "error" refuses it.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work; for HDF5, while the file is open elsewhere at all.
        UnknownFormatError, CorruptError: on entering, if the dataset can't be appended to.

    Processes and threads: one writer at a time, which a lock sees to. Threads wait for each other; a signal handler in the
    middle of a write of the same thread is refused. Killed at any moment, the writer leaves every episode readable whose call had returned; a power cut may cost what was written since the block began.
    """

    appends: bool = True
    """Whether the format has the mode "append"; see `Format.appends`."""

    _schema: Schema | None = None
    _reward_at: str | None = None
    """Where the rewards of the episodes stand, as far as anybody said."""
    _is_told = False
    """Whether the episodes come from something that knows where its rewards stand, or that it does not."""

    def __init__(
        self, path: str | os.PathLike[str], mode: str = "append", progress: bool = False
    ) -> None:
        self.path = os.path.realpath(path)
        self.mode = validate_write_mode(mode)
        if mode == "append" and not self.appends:
            raise no_append(type(self).__name__, self.path)
        self.progress = progress
        self._owner: int | None = None
        self._writing = threading.RLock()

    # -- what a subclass supplies ------------------------------------------------------------

    def _begin(self) -> None:
        """Open the dataset for writing; give everything back if it raises."""
        raise NotImplementedError

    def _end(self, failed: bool) -> None:
        """Finish and give everything back; `failed` tells that the block ended with an exception."""
        raise NotImplementedError

    def _store(self, episode: CheckedEpisode, packed: bytes, where: str) -> None:
        """Write a checked episode, safe from a kill when it returns; `packed` is its encoded data."""
        raise NotImplementedError

    def _as_stored(self, ep_data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an episode as this format holds it, where that differs from what is given. Also called outside of a block."""
        return ep_data

    def _check(self, episode: CheckedEpisode, where: str) -> None:
        """Raise InputError if this format can't hold an episode that fits its schema. Also called outside of a block."""

    # -- where rewards stand -----------------------------------------------------------------

    def expect_reward_at(self, reward_at: str | None, where: str) -> None:
        """Note where the rewards of the episodes stand that are about to be written. Call it before the block.

        Args:
            reward_at: "next" or "same"; None: their source does not know.
            where: what writes them, to name in an error.

        Raises:
            InputError: neither. On entering the block, that a dataset which is appended to has its rewards elsewhere.
        """
        self._reward_at, self._is_told = check_reward_at(where, reward_at), True

    def _placed(self, option: str | None) -> str | None:
        """Return where rewards stand: as the writer's option says, else their source; "next" where nothing else was said."""
        if option is not None:
            return option
        return self._reward_at if self._is_told else "next"

    def _agree(self, stored: str | None) -> None:
        """Raise unless episodes may follow others whose rewards stand so; what is stored stays, where something is."""
        if stored is None:
            return
        if self._is_told and self._reward_at != stored:
            given = (
                f"reward_at={self._reward_at!r}"
                if self._reward_at
                else "it is not known where theirs stand"
            )
            raise InputError(
                f"{type(self).__name__}: {self.path} has its rewards at reward_at={stored!r}, and of the episodes that are to follow "
                f"{given}: say it (load_dataset(..., reward_at=)), or choose another path"
            )
        self._reward_at = stored

    # -- the block ---------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._owner is not None:
            raise RoleError(
                f"{type(self).__name__}: {self.path} is already open in a `with` block of this writer"
            )
        self._begin()
        self._owner = os.getpid()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        owner, self._owner = self._owner, None
        if owner == os.getpid():
            self._end(kind is not None)

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
            raise ReadOnlyError(
                f"{where}: {self.path} belongs to process {self._owner}, not to its fork"
            )
        refuse_if_mine(self._writing, f"{where}: {self.path}")
        with self._writing:
            episode = check_episode(self._as_stored(ep_data), self._schema, where)
            if episode is not None:
                packed = encode_data(episode.data, where) if episode.data else b""
                self._store(episode, packed, where)

    def check(self, ep_data: Mapping[str, Any]) -> None:
        """Raise what `write_episode` would say of the first episode of a new dataset. Nothing is opened or changed.

        Raises:
            InputError: it can't be stored.
        """
        where = f"{type(self).__name__}.write_episode"
        episode = check_episode(self._as_stored(ep_data), None, where)
        if episode is not None:
            self._check(episode, where)

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


def tell_reward_at(writer: Any, reward_at: str | None, where: str) -> None:
    """Say where the rewards of the episodes stand to a writer that can be told: ours, a buffer, or one with the same method.

    Raises:
        InputError: it has rewards elsewhere.
    """
    tell = getattr(writer, "expect_reward_at", None)
    if tell is not None:
        tell(reward_at, where)


def fill(
    writer: Any,
    path: str | os.PathLike[str],
    episodes: Iterable[Mapping[str, Any]],
    reward_at: str | None,
    where: str,
) -> None:
    """Write episodes through a format's writer. If nothing is at the path, and the first one can't be stored, nothing is created.

    Args:
        writer: not in its block yet.
        path: its target.
        episodes: to write.
        reward_at: where their rewards stand, "next" or "same"; None: not known.
        where: the call to name in an error.
    """
    tell_reward_at(writer, reward_at, where)
    if isinstance(writer, EpisodeWriter) and not os.path.lexists(path):
        left = iter(episodes)
        some = list(islice(left, 1))
        for first in some:
            writer.check(first)
        episodes = chain(some, left)
    with writer as opened:
        for episode in episodes:
            opened.write_episode(episode)
