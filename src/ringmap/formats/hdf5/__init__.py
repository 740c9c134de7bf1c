"""The HDF5 format: one file, one dataset per column over all steps.

    FILE.h5
      pixels      (N, H, W, C)       every column, all steps of all episodes
      action      (N, A)
      ep_len      (E,) int32         steps of each episode
      ep_offset   (E,) int64         row of each episode's first step

The layout of stable-worldmodel, in both directions. h5py is imported when a file is opened.
Not here: columns (columns.py), reading (reader.py), writing (writer.py and below).
"""

from __future__ import annotations

import os

from ringmap.errors import InputError, NotFoundError
from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.registry import register_format

__all__ = ["HDF5"]

SUFFIXES = (".h5", ".hdf5")

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


@register_format
class HDF5(StoredFormat):
    """Datasets in one HDF5 file each. Lossless for every dtype that a buffer stores."""

    name = "hdf5"
    lossless = True
    source = "ringmap.formats.hdf5.reader:HDF5Source"
    writer = "ringmap.formats.hdf5.writer:HDF5Writer"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the suffix (.h5, .hdf5), the first bytes, or a directory that holds such a file."""
        path = os.fspath(path)
        if os.path.isdir(path):
            return bool(_files_in(path))
        return path.endswith(SUFFIXES) or _is_signed(path)

    @classmethod
    def place(cls, path: str) -> str:
        """Return the file itself, or the one HDF5 file of a directory.

        Raises:
            NotFoundError: there is no file.
            InputError: "Ambiguous": the directory holds several.
        """
        if not os.path.isdir(path):
            return path
        found = _files_in(path)
        if not found:
            raise NotFoundError(f"{path}: the directory holds no .h5 or .hdf5 file")
        if len(found) > 1:
            raise InputError(
                f"Ambiguous dataset: {path} holds {len(found)} HDF5 files ({', '.join(found[:5])}"
                f"{', ...' if len(found) > 5 else ''}); pass the path of one"
            )
        return os.path.join(path, found[0])


def _files_in(folder: str) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.name.endswith(SUFFIXES) and entry.is_file(follow_symlinks=False)
    )


def _is_signed(path: str) -> bool:
    """Look for HDF5's signature, which stands at byte 0, 512, 1024, ..."""
    if not os.path.isfile(path):  # opening a pipe would wait for its other end
        return False
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            at = 0
            while at + len(_SIGNATURE) <= size:
                file.seek(at)
                if file.read(len(_SIGNATURE)) == _SIGNATURE:
                    return True
                at = max(512, 2 * at)
    except OSError:
        return False
    return False
