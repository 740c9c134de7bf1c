"""The contract of a format: what a reader and a writer of one on-disk layout owe.

    path --detect--> Format --open_reader--> dataset        (episodes come out)
                            --export, extend-->             (episodes go in: the easy way)
                            --open_writer--> Writer         (... or a writer of the format's own)

A format with `export` has a writer: one that logs each episode, and exports them in groups (common/staged.py).
Every writer: takes per-step lists and bulk arrays alike; an empty episode changes nothing;
the schema of the first episode holds from then on, and an episode that does not fit raises
before a byte is written; killed at any moment, it leaves every episode readable whose
`write_episode` had returned. `ringmap.testing.FormatTests` tests all of this.
Not here: the list of formats (registry.py), what an episode must look like (schema.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, ClassVar

from ringmap.formats.episode import (
    EPISODE_DATA_KEY,
    WRITE_MODES,
    Writer,
    split_episode_data,
    validate_write_mode,
)

__all__ = [
    "EPISODE_DATA_KEY",
    "WRITE_MODES",
    "Format",
    "Writer",
    "split_episode_data",
    "validate_write_mode",
]


class Format:
    """One on-disk layout. Register a subclass with `register_format`.

    A format that only reads leaves `open_writer` alone, and the other way round.
    """

    name: ClassVar[str] = ""
    """What `format=` calls it; the registry's key."""

    supports_episode_data: ClassVar[bool] = False
    """Whether a writer keeps what stands under `_episode_data`, and a reader returns it."""

    lossless: ClassVar[bool] = False
    """Whether what its writer stores comes back bit for bit, images too, without any option."""

    @classmethod
    def detect(cls, path: str | PathLike[str]) -> bool:
        """Tell whether a path looks like this format. Reads little, changes nothing, never raises."""
        raise NotImplementedError(f"{cls.__name__}.detect")

    @classmethod
    def can_read(cls) -> bool:
        """Tell whether there is a reader: whether `open_reader` is the format's own."""
        return cls._has("open_reader")

    @classmethod
    def can_write(cls) -> bool:
        """Tell whether there is a writer: whether `export` or `open_writer` is the format's own."""
        return cls._has("export") or cls._has("open_writer")

    @classmethod
    def open_reader(cls, path: str | PathLike[str], **options: Any) -> Any:
        """Return a dataset (`ringmap.data.Dataset`) of what lies at `path`.

        Every reader takes the options `num_steps`, `frameskip`, `transform`, and `layout`: "CHW" hands images out with
        their channels first, "HWC" as they are stored.
        """
        raise NotImplementedError(f"format {cls.name!r} does not support reading")

    @classmethod
    def open_dataset(cls, path: str | PathLike[str], **options: Any) -> Any:
        """Return the dataset at `path`, with the episodes that a writer, killed or at work, has only logged as yet.

        Changes nothing. `load_dataset` calls this; `options` are those of `open_reader`.
        """
        if not cls._has("export"):
            return cls.open_reader(path, **options)
        from ringmap.formats.common.exported import open_exported

        return open_exported(cls, path, options)

    @classmethod
    def export(
        cls, episodes: Iterable[Mapping[str, Any]], path: str | PathLike[str], **options: Any
    ) -> None:
        """Write a new dataset at `path`, where nothing is. Kills and full disks are no concern of it.

        Args:
            episodes: none or more, column -> array (T, ...), and `_episode_data` if the format holds it; they may be
                gone through more than once.
            path: of a file or folder; the folder it lies in is there.
            options: the writer's.
        """
        raise NotImplementedError(f"{cls.__name__}.export")

    @classmethod
    def extend(
        cls, episodes: Iterable[Mapping[str, Any]], path: str | PathLike[str], **options: Any
    ) -> None:
        """Add episodes to a dataset that is a folder, in new files that count by one rename, the last change.

        Killed in the middle, it is called again, with the episodes that do not count yet, and others after them.
        A format without it is exported again as a whole, when a block ends that has appended to it.
        """
        raise NotImplementedError(f"{cls.__name__}.extend")

    @classmethod
    def open_writer(cls, path: str | PathLike[str], **options: Any) -> Writer:
        """Return a writer to `path`; every writer takes the option `mode`, one of `WRITE_MODES`."""
        if not cls._has("export"):
            raise NotImplementedError(f"format {cls.name!r} does not support writing (it is read-only)")  # fmt: skip
        from ringmap.formats.common.exported import ExportWriter

        return ExportWriter(cls, path, extends=cls._has("extend"), **options)

    @classmethod
    def _has(cls, method: str) -> bool:
        own, base = getattr(cls, method), getattr(Format, method)
        return own.__func__ is not base.__func__
