"""The contract of a format: the duties of a reader and a writer of one on-disk layout.

    path --detect--> Format --open_reader--> dataset        (episodes come out)
                            --export, extend-->             (episodes go in: the easy way)
                            --open_writer--> Writer         (... or a writer of the format's own)

A format with `export` has a writer that logs each episode, and exports them in groups (common/staged.py).
Every writer takes per-step lists and bulk arrays alike; an empty episode changes nothing;
the schema of the first episode holds from then on, and an episode that does not fit raises
before a byte is written; if it is killed at any moment, every episode stays readable whose
`write_episode` had returned. `ringmap.testing.FormatTests` tests all of this.
Not here: the list of formats (registry.py), what an episode must look like (episode.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, ClassVar

from ringmap.errors import UnsupportedError
from ringmap.formats.episode import (
    EPISODE_DATA_KEY,
    WRITE_MODES,
    Writer,
    split_episode_data,
    validate_write_mode,
)
from ringmap.storage.columns.schema import ColumnSpec

__all__ = [
    "EPISODE_DATA_KEY",
    "WRITE_MODES",
    "Format",
    "Writer",
    "split_episode_data",
    "validate_write_mode",
]

_WHICH = "choose another: the command `ringmap formats` says what each can do"


class Format:
    """One on-disk layout. Register a subclass with `register_format`.

    A format that only reads does not override `open_writer`, and a format that only writes not `open_reader`.
    """

    name: ClassVar[str] = ""
    """The name for `format=`; the registry's key."""

    supports_episode_data: ClassVar[bool] = False
    """Whether a writer stores the values under `_episode_data`, and a reader returns them."""

    lossless: ClassVar[bool] = False
    """Whether all stored values, images too, are read back bit for bit, without any option."""

    appends: ClassVar[bool] = True
    """Whether a writer can add episodes to a dataset that is there. Where not, a writer's default mode is "error"."""

    @classmethod
    def detect(cls, path: str | PathLike[str]) -> bool:
        """Return whether a path looks like this format. Reads little, changes nothing, never raises."""
        raise NotImplementedError(f"{cls.__name__}.detect")

    @classmethod
    def can_read(cls) -> bool:
        """Return whether there is a reader: whether `open_reader` is the format's own."""
        return cls._has("open_reader")

    @classmethod
    def can_write(cls) -> bool:
        """Return whether there is a writer: whether `export` or `open_writer` is the format's own."""
        return cls._has("export") or cls._has("open_writer")

    @classmethod
    def open_reader(cls, path: str | PathLike[str], **options: Any) -> Any:
        """Return the dataset (`ringmap.data.Dataset`) at `path`.

        Every reader takes the options `num_steps`, `frameskip`, `transform`, and `layout`: "CHW" returns images with
        their channels first, "HWC" as they are stored.
        """
        raise UnsupportedError(f"format {cls.name!r} does not support reading; {_WHICH}")

    @classmethod
    def open_dataset(cls, path: str | PathLike[str], **options: Any) -> Any:
        """Return the dataset at `path`, with the episodes that a killed or running writer has only logged so far.

        Changes nothing. `load_dataset` calls this; `options` are those of `open_reader`.
        """
        if not cls._has("export"):
            return cls.open_reader(path, **options)
        from ringmap.formats.common.exported import open_exported

        return open_exported(cls, path, options)

    @classmethod
    def open_stream(cls, path: str | PathLike[str]) -> Any:
        """Return the episodes at `path` (`ringmap.datasets.stored_episodes.EpisodeStream`) of a format that is read in
        order alone, for `convert` and `merge`; None of one that has `open_reader`."""
        return None

    @classmethod
    def export(cls, episodes: Iterable[Mapping[str, Any]], path: str | PathLike[str], **options: Any) -> None:
        """Write a new dataset at `path`, which does not exist. It does not have to handle kills and full disks.

        Args:
            episodes: none or more, column -> array (T, ...), and `_episode_data` if the format holds it; they can be
                iterated more than once.
            path: of a file or folder; its parent folder exists.
            options: the writer's. A method with the parameters `fps` (a `Fraction`) or `reward_at` gets what is known
                of them.
        """
        raise NotImplementedError(f"{cls.__name__}.export")

    @classmethod
    def extend(cls, episodes: Iterable[Mapping[str, Any]], path: str | PathLike[str], **options: Any) -> None:
        """Add episodes to a dataset that is a folder, in new files that count by one rename, the last change.

        After a kill in the middle, it is called again, with the episodes that do not count yet, and later ones.
        A dataset of a format without it is exported again as a whole, at the end of a block that appended to it.
        """
        raise NotImplementedError(f"{cls.__name__}.extend")

    @classmethod
    def refuses(cls, column: ColumnSpec) -> str | None:
        """Return why the format can't hold a column, None if it can. Asked of a format with `export`, before anything
        is written.

        All that is refused stands in one error, with the `drop=` that would do.
        """
        return None

    @classmethod
    def open_writer(cls, path: str | PathLike[str], **options: Any) -> Writer:
        """Return a writer to `path`; every writer takes the option `mode`, one of `WRITE_MODES` ("append" if
        `appends`)."""
        if not cls._has("export"):
            raise UnsupportedError(f"format {cls.name!r} does not support writing (it is read-only); {_WHICH}")
        from ringmap.formats.common.exported import ExportWriter

        return ExportWriter(cls, path, extends=cls._has("extend"), **options)

    @classmethod
    def _has(cls, method: str) -> bool:
        own, base = getattr(cls, method), getattr(Format, method)
        return own.__func__ is not base.__func__
