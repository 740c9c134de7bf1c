"""Creation: turns a directory into a buffer, in two steps that a kill may interrupt.

    1. constructor      lock, data/, open/, episodes.npy, state.bin ... manifest.json last
    2. first episode    columns.tmp/ -> columns/, mutable.bin ... manifest.json (now with columns) last

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

from ringmap.errors import EnvironmentFault
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import ENTRIES, FROM_BIRTH, Paths
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import EpisodeTable
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.values import MutableValues

__all__ = ["make_columns", "make_folder", "make_home", "make_parts", "sizes_when_full", "warn_of_space"]


def make_folder(disk: Disk, folder: str) -> None:
    """Make the directory and its missing parents, and sync their names."""
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
            error.errno, f"{folder}: can't make the directory ({error}); choose a path that you may write to"
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
    columns = zip(manifest.files, manifest.columns(Disk(), ""), strict=True)
    sizes = {file: column.nbytes_when_full for file, column in columns}
    newest = MutableValues.nbytes(manifest.schema, manifest.rows)
    beside = {MutableValues.names[0]: newest} if newest else {}
    return {**sizes, **manifest.fixed_sizes, **beside}


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


def make_columns(disk: Disk, paths: Paths, manifest: Manifest, sync_folder: Callable[[str], None]) -> Manifest:
    """Take the second step: the columns, then the manifest that names them. No record is stored yet.

    `sync_folder` ends the writer if it fails: a second sync of a folder may report success wrongly.
    """
    disk.discard(paths.new_columns)
    disk.make_folder(paths.new_columns)
    for column in manifest.columns(disk, paths.new_columns):
        column.create()
    sync_folder(paths.new_columns)
    disk.discard(paths.columns)
    disk.rename(paths.new_columns, paths.columns)
    sync_folder(paths.folder)
    if manifest.schema is not None and manifest.schema.mutable.columns:
        MutableValues.create(Home(disk, paths.folder, manifest.uuid, manifest.rows, manifest.schema), sync_folder)
    disk.put(paths.manifest, paths.new_manifest, manifest.encode(), synced=True)
    sync_folder(paths.folder)
    return manifest
