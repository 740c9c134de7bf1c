"""The contract of a format: the duties of a reader and a writer of one on-disk layout.

    path --detect--> Format --open_reader--> dataset        (episodes come out)
                            --open_writer--> its `writer`   (episodes go in: `EpisodeWriter`)

A writer is a subclass of `EpisodeWriter` (common/writer.py), which logs each episode, and moves them into the dataset
in groups: of the format it needs `export`, and has `layout`, `encode`, `extend` where the format differs.
Every writer takes per-step lists and bulk arrays alike; an empty episode changes nothing;
the schema of the first episode holds from then on, and an episode that does not fit raises
before a byte is written; if it is killed at any moment, every episode stays readable whose
`write_episode` had returned. `ringmap.testing.FormatTests` tests all of this.
Not here: the list of formats (registry.py), what an episode must look like (episode.py).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from os import PathLike
from typing import Any, ClassVar

from ringmap.clips.facts import Facts
from ringmap.errors import InputError, UnsupportedError
from ringmap.formats.episode import (
    EPISODE_DATA_KEY,
    WRITE_MODES,
    Writer,
    split_episode_data,
    validate_write_mode,
)
from ringmap.storage.disk.paths import refuse_address

__all__ = ["EPISODE_DATA_KEY", "WRITE_MODES", "Format", "Writer", "named", "split_episode_data", "validate_write_mode"]

_WHICH = "choose another: the command `ringmap formats` says what each can do"


class Format:
    """One on-disk layout. Register a subclass with `register_format`.

    A format that only reads has no `writer`; one that only writes has no `source`, and no `open_reader` of its own.
    """

    name: ClassVar[str] = ""
    """The name for `format=`; the registry's key."""

    supports_episode_data: ClassVar[bool] = False
    """Whether a writer stores the values under `_episode_data`, and a reader returns them."""

    lossless: ClassVar[bool] = False
    """Whether all stored values, images too, are read back bit for bit, without any option."""

    appends: ClassVar[bool] = True
    """Whether a writer can add episodes to a dataset that is there. Where not, a writer's default mode is "error"."""

    source: ClassVar[str | Callable[..., Any]] = ""
    """The class of its `EpisodeSource`, or another `ColumnSource`, or where it stands, as `module:class`; "" where
    `open_reader` is its own."""

    writer: ClassVar[str | Callable[..., Writer]] = ""
    """The class of its writers, or where it stands, as `module:class`; "" for a format that only reads."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "writer" in vars(cls) and isinstance(cls.writer, type):
            cls.writer.format = cls  # type: ignore[attr-defined]

    @classmethod
    def detect(cls, path: str | PathLike[str]) -> bool:
        """Return whether a path looks like this format. Reads little, changes nothing, never raises."""
        raise NotImplementedError(f"{cls.__name__} must supply detect")

    @classmethod
    def can_read(cls) -> bool:
        """Return whether there is a reader: whether `source` is set, or `open_reader` is the format's own."""
        return bool(cls.source) or cls._has("open_reader")

    @classmethod
    def can_write(cls) -> bool:
        """Return whether there is a writer: whether `writer` is set, or `open_writer` is the format's own."""
        return bool(cls.writer) or cls._has("open_writer")

    @classmethod
    def open_reader(cls, path: str | PathLike[str], **options: Any) -> Any:
        """Return the dataset (`ringmap.data.Dataset`) at `path`, without the episodes that a writer has only logged.

        Every reader takes the options `num_steps`, `frameskip`, `transform`, and `layout`: "CHW" returns images with
        their channels first, "HWC" as they are stored. One by its `source` takes those of `StoredDataset`, and of the
        source.

        Raises:
            NotFoundError, UnknownFormatError, CorruptError: it can't be read.
            MissingExtraError: a required package is not installed.
        """
        return cls._opened(path, options, lambda path, source_of: source_of(path))

    @classmethod
    def open_dataset(cls, path: str | PathLike[str], **options: Any) -> Any:
        """Return the dataset at `path`, with the episodes that a killed or running writer has only logged so far.

        Changes nothing. `load_dataset` calls this; `options` are those of `open_reader`.
        """
        if not cls.writer:
            return cls.open_reader(path, **options)
        from ringmap.formats.common.log import open_logged, with_pending

        if not cls.source:
            return open_logged(cls, os.fspath(path), options)
        return cls._opened(path, options, with_pending)

    @classmethod
    def place(cls, path: str) -> str:
        """Return the path of the dataset that a path stands for."""
        return path

    @classmethod
    def open_stream(cls, path: str | PathLike[str]) -> Any:
        """Return the episodes at `path` (`ringmap.datasets.stored_episodes.EpisodeStream`) of a format that is read in
        order alone, for `convert` and `merge`; None of one that has `open_reader`."""
        return None

    @classmethod
    def copier(cls, parts: Sequence[Any], facts: Facts, options: Mapping[str, Any]) -> Any:
        """Return what reads datasets for a copy into this format without a loss that a copy need not have.

        Args:
            parts: the datasets.
            facts: its `fps` and `reward_at` are those of the copy, None where they are not known.
            options: of the copy's writer.

        Returns:
            A function of a dataset that yields `(columns, data)` of each episode, for the writer of this format alone;
            None: they are read as anybody reads them.
        """
        return None

    @classmethod
    def open_writer(cls, path: str | PathLike[str], **options: Any) -> Writer:
        """Return a writer to `path`; every writer takes the option `mode`, one of `WRITE_MODES` ("append" if
        `appends`). Its class has the other options, and the errors.

        Raises:
            UnsupportedError: the format only reads.
            InputError: an option is unknown.
        """
        if not cls.writer:
            raise UnsupportedError(f"format {cls.name!r} does not support writing (it is read-only); {_WHICH}")
        kind = cls._named(cls.writer)
        known = list(inspect.signature(kind).parameters)[1:]
        for name in options:
            if name not in known:
                raise InputError(f"{kind.__name__}: {os.fspath(path)}: unknown option {name!r}; known: {known}")
        made: Writer = kind(path, **options)
        return made

    @classmethod
    def _opened(cls, path: str | PathLike[str], options: dict[str, Any], open_source: Any) -> Any:
        if not cls.source:
            raise UnsupportedError(f"format {cls.name!r} does not support reading; {_WHICH}")
        from ringmap.datasets.stored import StoredDataset

        refuse_address(path)
        made = cls._named(cls.source)
        its = [name for name in list(inspect.signature(made).parameters)[1:] if name in options]
        made = functools.partial(made, **{name: options.pop(name) for name in its}) if its else made
        source = open_source(cls.place(os.fspath(path)), made)
        try:
            return StoredDataset(source, **options)
        except BaseException:
            source.close()  # a file that is open is locked for its writer
            raise

    @staticmethod
    def _named(given: str | Callable[..., Any]) -> Callable[..., Any]:
        return named(given) if isinstance(given, str) else given

    @classmethod
    def _has(cls, method: str) -> bool:
        own, base = getattr(cls, method), getattr(Format, method)
        return own.__func__ is not base.__func__


def named(place: str) -> Any:
    """Return what stands at `module:name`, which is imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
