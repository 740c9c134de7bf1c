"""A writer of episodes: the `with` block, who may write, and what is checked before anything is.

    write_episode -> in the block? our process? -> all that can't be held -> check_episode -> _store   (the format's
    own)

Invariants: a call that raises has changed nothing that a reader sees; a forked child neither
writes nor ends its parent's block.
Not here: files. `StagedWriter` (staged.py) is this for formats that are exported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.datasets.image_axes import stored_layout
from ringmap.errors import InputError, ReadOnlyError, RoleError
from ringmap.formats.common.refusals import Refused, is_own, refusal
from ringmap.formats.episode import (
    EPISODE_DATA_KEY,
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

__all__ = ["Ahead", "EpisodeWriter", "tell_facts"]

Array = np.ndarray[Any, np.dtype[Any]]

Ahead = Callable[
    [Callable[[str, np.dtype[Any]], bool], bool],
    Iterable[tuple[Mapping[str, Array], Mapping[str, Any]]],
]
"""Yields of each episode some columns and its data: called with which columns, by name and dtype, and whether the data
are asked for."""


class EpisodeWriter:
    """The part of a writer that every format has. Use a writer in a `with` block.

    A subclass supplies `_begin`, `_end` and `_store`, and keeps `_schema`; it may supply `_refuses`, `_refuses_data`,
    `_as_stored`.

    Args:
        path: the dataset, a file or folder; folders above it are made. A link to a dataset stays one.
        mode: "append" extends a dataset (not every format: `Format.appends`), "overwrite" replaces it when the block
            succeeds, "error" refuses it.
        progress: show a progress bar in `write_episodes`.

    Raises:
        InputError: an option is wrong.
        ExistsError: on entering, with mode "error", where something is.
        LockedError: on entering, while another writer is at work; for HDF5, while the file is open elsewhere at all.
        UnknownFormatError, CorruptError: on entering, if the dataset can't be appended to.

    Processes and threads: one writer at a time, which a lock sees to. Threads wait for each other; a signal handler in
    the middle of a write of the same thread is refused. Killed at any moment, the writer leaves every episode readable
    whose call had returned; a power cut may cost what was written since the block began.
    """

    appends: bool = True
    """Whether the format has the mode "append"; see `Format.appends`."""

    _schema: Schema | None = None
    _facts = Facts()
    """What is known of the episodes, as far as anybody said."""
    _is_told = False
    """Whether the episodes come from something that knows where its rewards stand, or that it does not."""

    def __init__(self, path: str | os.PathLike[str], mode: str = "append", progress: bool = False) -> None:
        self.path = os.path.realpath(local_path(path))
        self.mode = validate_write_mode(mode)
        if mode == "append" and not self.appends:
            raise no_append(type(self).__name__, self.path)
        self.progress = progress
        self._owner: int | None = None
        self._turn = Turn()

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

    def _refuses(self, name: str, rows: Array) -> str | None:
        """Return why this format can't hold these rows of a column, None if it can. Also called outside of a block."""
        return None

    def _refuses_data(self, name: str, value: Any) -> str | None:
        """Return why this format can't hold a datum of an episode, None if it can. Also called outside of a block."""
        return None

    def _as_stored(
        self, columns: dict[str, Array], data: dict[str, Any], refused: Refused, where: str
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return columns and data as this format holds them, where that differs from what is given. Also called outside
        of a block.

        It may add to `refused`.
        """
        return columns, data

    def looks_at(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Return whether a column may be refused for its values: a copy then looks at all of them before it begins."""
        return False

    @property
    def looks_at_data(self) -> bool:
        """Whether this format does not hold all data of episodes: a copy then looks at all of them before it begins."""
        return type(self)._refuses_data is not EpisodeWriter._refuses_data

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
        self._facts, self._is_told = facts, True

    def _placed(self, option: str | None) -> str | None:
        """Return where rewards stand: as the writer's option says, else their source; "next" where nothing else was
        said."""
        if option is not None:
            return option
        return self._facts.reward_at if self._is_told else "next"

    def _agree(self, stored: Facts) -> None:
        """Raise unless episodes may follow others of which this is known; what is stored stays, where something is."""
        name, told = type(self).__name__, self._facts
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
        self._facts = stored.over(Facts(told.reward_at))

    # -- the block ---------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._owner is not None:
            raise RoleError(f"{type(self).__name__}: {self.path} is already open in a `with` block of this writer")
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
            raise ReadOnlyError(f"{where}: {self.path} belongs to process {self._owner}, not to its fork")

        def work() -> None:
            found, refused = self._examined(ep_data, where)
            if refused:
                raise refusal(refused, self.path, where)
            episode = check_episode(found, self._schema, where)
            if episode is not None:
                packed = encode_data(episode.data, where) if episode.data else b""
                self._store(episode, packed, where)

        self._turn.take(f"{where}: {self.path}", work)

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
            why = self._refuses(name, rows)
            if why is not None:
                found[f"column {name!r} ({rows.dtype} {rows.shape[1:]}): {why}"] = name
        return found

    def refused_data(self, data: Mapping[str, Any]) -> Refused:
        """Return which data of an episode can't be held, and are not ours."""
        found = Refused()
        for name, value in data.items():
            why = None if is_own(name) else self._refuses_data(name, value)
            if why is not None:
                found[f"episode data {name!r} ({type(value).__name__}): {why}"] = name
        return found

    def _examined(self, ep_data: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Refused]:
        """Return an episode as it is stored, and what of it can't be held."""
        given, data = split_episode_data(stored_layout(ep_data))
        columns = as_columns(given, where)
        if not columns or not len(next(iter(columns.values()))):
            return {}, Refused()
        refused = Refused(self.refused_columns(columns) | self.refused_data(data))
        data = {n: v for n, v in data.items() if not is_own(n) or self._refuses_data(n, v) is None}
        try:
            stored, data = self._as_stored(columns, data, refused, where)
        except InputError:
            if refused:  # what it met may be a consequence of these
                return {}, refused
            raise
        return {**stored, **({EPISODE_DATA_KEY: data} if data else {})}, refused

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


def tell_facts(writer: Any, facts: Facts, where: str) -> None:
    """Say what is known of the episodes to a writer that can be told: ours, a buffer, or one with the same method.

    Raises:
        InputError: it has rewards elsewhere, or another rate, or can't hold this one.
    """
    tell = getattr(writer, "expect_facts", None)
    if tell is not None:
        tell(facts, where)
