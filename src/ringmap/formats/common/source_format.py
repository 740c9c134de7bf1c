"""A format whose datasets are read through the format's own source.

    class Lance(StoredFormat):
        source = "ringmap.formats.lance.reader:LanceSource"
        writer = "ringmap.formats.lance.writer:LanceWriter"

Both are names, and are imported when they are used: packages of an unused format need not be installed.
Not here: which files belong to which format (`detect`).
"""

from __future__ import annotations

import functools
import inspect
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from ringmap.errors import InputError
from ringmap.formats.base import Format, Writer
from ringmap.storage.disk.paths import refuse_address

if TYPE_CHECKING:
    from ringmap.datasets.stored import ColumnSource, StoredDataset

__all__ = ["StoredFormat", "named"]


class StoredFormat(Format):
    """A format by its source, and its writer if it has one, each as `module:class`."""

    supports_episode_data = True

    source: ClassVar[str]
    writer: ClassVar[str] = ""
    logs: ClassVar[bool] = False
    """Whether its writer is a `StagedWriter`, whose log is read too."""

    @classmethod
    def can_write(cls) -> bool:
        """Return whether a writer is named."""
        return bool(cls.writer)

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> StoredDataset:
        """Return the dataset at a path.

        Args:
            path: its file or folder.
            options: `num_steps, frameskip, transform, layout, keys_to_load, keys_to_cache,
                keys_to_merge, output` of `StoredDataset`, and those of the format's source.

        Raises:
            NotFoundError, UnknownFormatError, CorruptError: it can't be read.
            MissingExtraError: a required package is not installed.
        """
        from ringmap.datasets.stored import StoredDataset

        refuse_address(path)
        made = named(cls.source)
        its = [name for name in list(inspect.signature(made).parameters)[1:] if name in options]
        made = functools.partial(made, **{name: options.pop(name) for name in its}) if its else made
        source = cls._with_log(os.fspath(path), made) if cls.logs else made(path)
        try:
            return StoredDataset(source, **options)
        except BaseException:
            source.close()  # a file that is open is locked for its writer
            raise

    @classmethod
    def open_writer(cls, path: str | os.PathLike[str], **options: Any) -> Writer:
        """Return a writer to a path; its class has the options and errors."""
        if not cls.writer:
            return super().open_writer(path, **options)
        kind = named(cls.writer)
        known = list(inspect.signature(kind).parameters)[1:]
        for name in options:
            if name not in known:
                raise InputError(f"{kind.__name__}: {os.fspath(path)}: unknown option {name!r}; known: {known}")
        made: Writer = kind(path, **options)
        return made

    @classmethod
    def _with_log(cls, path: str, source_of: Any) -> ColumnSource:
        from ringmap.formats.common.pending import with_pending
        from ringmap.formats.common.swap import restore

        restore(os.path.realpath(path))
        return with_pending(path, source_of)


def named(place: str) -> Any:
    """Return what stands at `module:name`, which is imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
