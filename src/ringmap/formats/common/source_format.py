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
from typing import TYPE_CHECKING, Any, ClassVar

from ringmap.formats.base import Format, named
from ringmap.storage.disk.paths import refuse_address

if TYPE_CHECKING:
    from ringmap.datasets.stored import StoredDataset

__all__ = ["StoredFormat"]


class StoredFormat(Format):
    """A format by its source, as `module:class`."""

    supports_episode_data = True

    source: ClassVar[str]

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> StoredDataset:
        """Return the dataset at a path, without the episodes that a writer has only logged.

        Args:
            path: its file or folder.
            options: `num_steps, frameskip, transform, layout, keys_to_load, keys_to_cache,
                keys_to_merge, output` of `StoredDataset`, and those of the format's source.

        Raises:
            NotFoundError, UnknownFormatError, CorruptError: it can't be read.
            MissingExtraError: a required package is not installed.
        """
        return cls._opened(path, options, lambda path, source_of: source_of(path))

    @classmethod
    def open_dataset(cls, path: str | os.PathLike[str], **options: Any) -> StoredDataset:
        """Return the dataset at `path`, with the episodes that a killed or running writer has only logged so far."""
        if not cls.can_write():
            return cls.open_reader(path, **options)
        from ringmap.formats.common.pending import with_pending

        return cls._opened(path, options, with_pending)

    @classmethod
    def place(cls, path: str) -> str:
        """Return the path of the dataset that a path stands for."""
        return path

    @classmethod
    def _opened(cls, path: str | os.PathLike[str], options: dict[str, Any], open_source: Any) -> StoredDataset:
        from ringmap.datasets.stored import StoredDataset

        refuse_address(path)
        made = named(cls.source)
        its = [name for name in list(inspect.signature(made).parameters)[1:] if name in options]
        made = functools.partial(made, **{name: options.pop(name) for name in its}) if its else made
        source = open_source(cls.place(os.fspath(path)), made)
        try:
            return StoredDataset(source, **options)
        except BaseException:
            source.close()  # a file that is open is locked for its writer
            raise
