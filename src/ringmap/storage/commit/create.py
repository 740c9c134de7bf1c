"""Creation: turns a directory into a buffer, in two steps that a kill may interrupt.

    1. constructor      lock, data/, open/, episodes.npy, state.bin ... manifest.json last
    2. first episode    columns.tmp/ -> columns/ ... manifest.json (now with columns) last

Until the manifest names a part, the part does not count and is made again. Until the first record is
stored, the columns of an episode that the disk refused may also be made again.

Invariants: files are synced before the name that makes them count; only our own files
are removed.
Not here: the content of the files.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ringmap.errors import CorruptError, EnvironmentFault, NotFoundError, UnknownFormatError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.layout import (
    COLUMNS,
    ENTRIES,
    FINE,
    FOLDERS,
    FROM_BIRTH,
    LOCK,
    MANIFEST,
    NAMES,
    Paths,
)  # fmt: skip
from ringmap.storage.records.manifest import Manifest, read_limit
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import EpisodeTable

__all__ = [
    "examine", "hold", "links_in", "make_columns", "make_folder", "make_home", "make_parts", "read_manifest",
    "refuse_links", "sizes_when_full", "warn_of_space",
]  # fmt: skip


def examine(disk: Disk, folder: str) -> Literal["nothing", "unfinished", "buffer"]:
    """Tell what is at `folder`: nothing (or an empty folder), an unfinished creation, or a buffer.

    Raises:
        UnknownFormatError: a file, or a folder that holds something else.
        CorruptError: a buffer without its manifest.
    """
    if not disk.exists(folder):
        return "nothing"
    if not os.path.isdir(folder) and not disk.volatile:
        raise UnknownFormatError(
            f"{folder}: is a file, expected a directory of a buffer; choose another path"
        )
    names = set(disk.names(folder)) - FINE
    if MANIFEST in names or disk.exists(Paths(folder).swap):
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


def _has_commits(disk: Disk, folder: str) -> bool:
    try:
        data = disk.read_file(Paths(folder).state, StateFile.nbytes)
    except (OSError, NotAFileError):
        return False
    return StateFile.witnesses_commits(data)


def make_folder(disk: Disk, folder: str) -> None:
    """Make the directory and its missing parents, and sync their names.

    Raises:
        EnvironmentFault: not writable.
    """
    missing = []
    at = folder
    while at and not disk.exists(at) and not disk.volatile:
        missing.append(at)
        at = os.path.dirname(at)
    try:
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                disk.make_folder(path)
            disk.sync_folder(os.path.dirname(path))
    except OSError as error:
        raise EnvironmentFault(
            error.errno,
            f"{folder}: can't make the directory ({error}); choose a path that you may write to",
        ) from error
    if disk.volatile:
        disk.make_folder(folder)


def make_home(disk: Disk, paths: Paths, manifest: Manifest) -> None:
    """Take the first step: all parts except the columns, manifest last. The lock is held."""
    for entry in ENTRIES:  # of an interrupted creation
        for name in (*entry.temporary, *((entry.name,) if entry in FROM_BIRTH else ())):
            disk.discard(os.path.join(paths.folder, name))
    make_parts(disk, paths, manifest)
    disk.sync_folder(paths.folder)
    disk.replace_file(paths.manifest, manifest.encode())


def make_parts(disk: Disk, paths: Paths, manifest: Manifest) -> None:
    """Make the parts of every buffer except the manifest, which comes last."""
    for entry in FROM_BIRTH:
        if entry.folder:
            disk.make_folder(os.path.join(paths.folder, entry.name))
    EpisodeTable.create(disk, paths.table, manifest.table_slots)
    StateFile.create(disk, paths.state, manifest.uuid)


def sizes_when_full(manifest: Manifest) -> dict[str, int]:
    """Return the size of each file of a full ring in bytes, without episode data."""
    sizes = {one.file: one.backend.nbytes_when_full(*one.about) for one in manifest.columns}
    return {**sizes, **manifest.fixed_sizes}


def warn_of_space(disk: Disk, folder: str, manifest: Manifest) -> None:
    """Warn if the files, which are sparse and grow as they fill, may become larger than the free space."""
    need, free = sum(sizes_when_full(manifest).values()), disk.free(folder)
    if free is not None and need > free:
        steps = int(manifest.rows * free / need)
        warnings.warn(
            f"{folder}: a full ring of max_steps={manifest.max_steps} takes {need:,} bytes, but its file system has "
            f"only {free:,} free: writing will fail with ENOSPC after about {steps:,} steps, and lose nothing; lower "
            "max_steps, or choose another disk (ReplayBuffer.estimate tells beforehand)",
            stacklevel=2,
        )


def make_columns(
    disk: Disk, paths: Paths, manifest: Manifest, sync_folder: Callable[[str], None]
) -> Manifest:
    """Take the second step: the columns, then the manifest that names them. No record is stored yet.

    `sync_folder` syncs a folder, and ends the writer if that fails: the directory stays, and a second sync of it
    may report success wrongly. (Files left by an earlier try are made again, and synced as new files.)
    """
    disk.remove_folder(paths.new_columns)
    disk.make_folder(paths.new_columns)
    for one in manifest.columns:
        name = one.file.partition("/")[2]
        one.backend.create(disk, os.path.join(paths.new_columns, name), *one.about)
    sync_folder(paths.new_columns)
    disk.remove_folder(paths.columns)
    disk.rename(paths.new_columns, paths.columns)
    sync_folder(paths.folder)
    manifest = replace(manifest, sizes=tuple(one.nbytes for one in manifest.columns))
    disk.put(paths.manifest, paths.new_manifest, manifest.encode(), synced=True)
    sync_folder(paths.folder)
    return manifest


def links_in(disk: Disk, folder: str) -> list[str]:
    """Return the folders of a buffer that are links, or not folders: their content is elsewhere."""
    paths = {name: os.path.join(folder, name) for name in FOLDERS}
    return [n for n, path in paths.items() if disk.exists(path) and not disk.is_folder(path)]


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
        CorruptError, NewerVersionError: see `Manifest.decode`; a repair was interrupted.
    """
    path = Paths(folder).manifest
    if disk.exists(Paths(folder).swap):
        raise CorruptError(
            f"{folder}: a repair was interrupted while it replaced files; run ringmap.repair again, which finishes it"
        )
    try:
        data = disk.read_file(path, read_limit())
        refuse_links(disk, folder)
    except (FileNotFoundError, NotADirectoryError):
        examine(disk, folder)  # gives more detail if it can
        raise NotFoundError(
            f"{folder}: no buffer is there; make one with ReplayBuffer(max_steps=..., path=...)"
        ) from None
    return Manifest.decode(data, path)
