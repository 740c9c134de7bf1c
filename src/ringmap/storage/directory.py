"""The directory: what is at a path, and the manifest of the buffer there.

Invariants: changes nothing; what leads out of the directory is not followed.
Not here: making a buffer (commit/create.py), its records and rows (read/).
"""

from __future__ import annotations

import os
from typing import Literal

from ringmap.errors import CorruptError, NotFoundError, UnknownFormatError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import COLUMNS, FINE, FOLDERS, LOCK, MANIFEST, NAMES, Paths
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.manifest import LARGEST, Manifest
from ringmap.storage.records.state import StateFile

__all__ = [
    "examine",
    "hold",
    "links_in",
    "read_manifest",
    "refuse_dangling",
    "refuse_links",
]


def examine(disk: Disk, folder: str) -> Literal["nothing", "unfinished", "buffer"]:
    """Tell what is at `folder`: nothing (or an empty folder), an unfinished creation, or a buffer.

    Raises:
        NotFoundError: a link to nothing.
        UnknownFormatError: a file, or a folder that holds something else.
        CorruptError: a buffer without its manifest.
    """
    if not disk.exists(folder):
        return "nothing"
    if not os.path.isdir(folder) and not disk.volatile:
        refuse_dangling(folder)
        raise UnknownFormatError(f"{folder}: is a file, expected a directory of a buffer; choose another path")
    names = set(disk.names(folder)) - FINE
    if MANIFEST in names:
        return "buffer"
    if names <= {LOCK}:
        return "nothing"
    foreign = names - NAMES
    if foreign:
        raise UnknownFormatError(
            f"{folder}: holds something else ({', '.join(sorted(foreign)[:3])}), and no {MANIFEST}; "
            "name the directory of a buffer, or an empty or new one"
        )
    if COLUMNS in names or _has_commits(disk, folder):
        raise CorruptError(
            f"{folder}: {MANIFEST} is missing from a buffer that has data; put it back, or run "
            "ringmap.repair, which can make it again"
        )
    return "unfinished"


def refuse_dangling(path: str) -> None:
    """Raise for a link to nothing: to a disk that is not mounted, or to what was moved or removed.

    Raises:
        NotFoundError: it is one.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise NotFoundError(
            f"{path}: is a link to {os.readlink(path)}, which is not there; mount or restore it, or remove the link"
        )


def _has_commits(disk: Disk, folder: str) -> bool:
    try:
        data = disk.read_file(Paths(folder).state, StateFile.nbytes)
    except (OSError, NotAFileError):
        return False
    return StateFile.witnesses_commits(data)


def hold(disk: Disk, folder: str) -> Disk:
    """Return the disk with `folder` held open, while a handle on its buffer exists; see `Disk.hold`.

    Raises:
        NotFoundError, UnknownFormatError: the path is not a folder.
    """
    try:
        return disk.hold(folder)
    except (FileNotFoundError, NotADirectoryError):
        disk.check_held("ReplayBuffer")  # of the handle that this one replaces
        read_manifest(disk, folder)  # raises an error for what is there
        raise


def links_in(disk: Disk, folder: str) -> list[str]:
    """Return the folders of a buffer that are links, or not folders: their content is elsewhere."""
    paths = {name: os.path.join(folder, name) for name in FOLDERS}
    return [n for n, path in paths.items() if not disk.is_folder(path) and disk.exists(path)]


def refuse_links(disk: Disk, folder: str) -> None:
    """Raise unless the folders of a buffer are inside it: nothing outside is read, written or removed.

    Raises:
        CorruptError: one of them is a link, or not a folder.
    """
    for name in links_in(disk, folder):
        path = os.path.join(folder, name)
        raise CorruptError(
            f"{path}: is {disk.kind(path) or 'a file'}, expected a folder: what leads elsewhere is not followed; "
            "put the folder itself there"
        )


def read_manifest(disk: Disk, folder: str) -> Manifest:
    """Return the manifest of the buffer at `folder`.

    Raises:
        UnknownFormatError: there is no buffer (yet).
        CorruptError, NewerVersionError: see `Manifest.decode`.
    """
    paths = Paths(folder)
    try:
        data = disk.read_file(paths.manifest, LARGEST)
        refuse_links(disk, folder)
    except (FileNotFoundError, NotADirectoryError):
        examine(disk, folder)  # gives more detail if it can
        raise NotFoundError(
            f"{folder}: no buffer is there; make one with ReplayBuffer(max_steps=..., path=...)"
        ) from None
    return Manifest.decode(data, paths.manifest)
