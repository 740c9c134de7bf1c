"""Find out what a path holds: a kind of buffer, or a dataset of a format.

    DIR/manifest.json   a buffer: of episodes, of transitions, of rows; the manifest says which
    anything else       a dataset of a registered format

Not here: the datasets of a format (formats/), the output.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ringmap.errors import DamageError, InputError, NotFoundError, UnknownFormatError
from ringmap.storage.disk.paths import local_path, refuse_address
from ringmap.storage.records.manifest import DISTILLATION, EPISODES, ROWS, TRANSITIONS

__all__ = [
    "BUFFERS",
    "DATASET",
    "DISTILLATION",
    "EPISODES",
    "ROWS",
    "TRANSITIONS",
    "Located",
    "buffer_at",
    "has_parts",
    "holds_rings",
    "is_dataset",
    "look",
]

BUFFERS = (EPISODES, TRANSITIONS, ROWS, DISTILLATION)
DATASET = "dataset"


@dataclass(frozen=True, slots=True)
class Located:
    """What lies at a path.

    `kind`: one of `BUFFERS`, or "dataset".
    """

    path: str
    kind: str


def look(path: str, where: str, only: tuple[str, ...] = ()) -> Located:
    """Return what a path holds.

    Args:
        path: what the user gave.
        where: the command, for messages.
        only: the kinds that the command takes; () for all.

    Raises:
        NotFoundError, UnknownFormatError, CorruptError: nothing of ours is there, or it can't be read.
        InputError: it is of a kind that the command does not take.
    """
    found = buffer_at(path)
    if found is None:
        if only and DATASET not in only:
            _refuse(path, where)
        found = Located(path, DATASET)
    if only and found.kind not in only:
        raise InputError(
            f"{where}: {path} is a buffer of {found.kind}, whose commits are no episodes; expected a buffer "
            "of episodes" + (" or a dataset" if DATASET in only else "")
        )
    return found


def buffer_at(path: str) -> Located | None:
    """Return the buffer at a path; None if something else, or nothing, is there.

    Raises:
        CorruptError, NewerVersionError: its manifest can't be read.
        OSError: whether there is one can't be told.

    Cost: reads the manifest.
    """
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.disk.paths import Paths
    from ringmap.storage.records.manifest import read_manifest

    refuse_address(path)
    if not os.path.isdir(path):
        return None
    if not Disk().exists(Paths(path).manifest):
        return None
    try:
        return Located(path, read_manifest(Disk(), local_path(path)).kind)
    except UnknownFormatError:  # another program's manifest
        return None


def holds_rings(path: str) -> bool:
    """Return whether a path is no buffer itself, but a directory with buffers of episodes, or of transitions, directly
    below it.

    Raises:
        OSError: nothing below it is one, as far as that can be told.
    """
    from ringmap.storage.disk.paths import FINE

    if not os.path.isdir(path) or buffer_at(path) is not None or is_dataset(path):
        return False
    unknown: OSError | None = None
    for name in sorted(set(os.listdir(path)) - FINE):
        try:
            found = buffer_at(os.path.join(path, name))
        except DamageError:  # one of them may be damaged
            continue
        except OSError as error:  # or not for this user
            unknown = error
            continue
        if found is not None and found.kind in (EPISODES, TRANSITIONS):
            return True
    if unknown is not None:
        raise unknown
    return False


def has_parts(path: str) -> bool:
    """Return whether a directory has files of a buffer, however damaged."""
    from ringmap.storage.disk.paths import SIGNS

    return os.path.isdir(path) and any(os.path.lexists(os.path.join(path, name)) for name in SIGNS)


def is_dataset(path: str) -> bool:
    """Return whether a dataset of a format is at a path, and not a (damaged) buffer."""
    from ringmap.formats.registry import detect_format, refuse_missing

    if has_parts(path):
        return False
    found = detect_format(path)
    if found is None:
        refuse_missing(path)
    return found is not None


def _refuse(path: str, where: str) -> None:
    if not os.path.exists(path):
        raise NotFoundError(f"{where}: {path}: nothing is there")
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.records.manifest import read_manifest

    read_manifest(Disk(), local_path(path))
