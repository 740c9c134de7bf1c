"""Find out what a path holds: a kind of buffer, or a dataset of a format.

    DIR/manifest.json                         a buffer: of episodes, or of transitions
    DIR/rows/manifest.json, DIR/labels/...    a buffer of a student's rows and a teacher's labels
    anything else                             a dataset of a registered format

Not here: the output.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from ringmap.errors import DamageError, ExistsError, InputError, NotFoundError, UnknownFormatError

__all__ = ["BUFFERS", "DISTILLATION", "EPISODES", "TRANSITIONS", "Located", "episodes_at", "folders_of", "format_for", "free_path", "holds_rings", "is_dataset", "look", "say_written"]  # fmt: skip

EPISODES, TRANSITIONS, DISTILLATION = "episodes", "transitions", "distillation"
BUFFERS = (EPISODES, TRANSITIONS, DISTILLATION)
DATASET = "dataset"


@dataclass(frozen=True, slots=True)
class Located:
    """What lies at a path.

    `kind`: one of `BUFFERS`, or "dataset"; `folders`: a buffer's directories, by what is in them, "" if it has
    but one.
    """

    path: str
    kind: str
    folders: dict[str, str]

    @property
    def main(self) -> str:
        """The directory of the rows."""
        return next(iter(self.folders.values()))


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
    found = _buffer_at(path)
    if found is None:
        if only and DATASET not in only:
            _refuse(path, where)
        found = Located(path, DATASET, {})
    if only and found.kind not in only:
        raise InputError(
            f"{where}: {path} is a buffer of {found.kind}, whose commits are no episodes; expected a buffer "
            "of episodes" + (" or a dataset" if DATASET in only else "")
        )
    return found


def _buffer_at(path: str) -> Located | None:
    from ringmap.storage.directory.entries import Paths
    from ringmap.storage.directory.opening import read_manifest
    from ringmap.storage.disk.files import Disk

    if not os.path.isdir(path):
        return None
    folders = folders_of(path)
    main = next(iter(folders.values()))
    if not os.path.exists(Paths(main).manifest):
        return None
    try:
        read_manifest(Disk(), os.path.abspath(main))
    except UnknownFormatError:  # another program's manifest
        return None
    if len(folders) > 1 or "" not in folders:
        return Located(path, DISTILLATION, folders)
    return Located(path, TRANSITIONS if _has_transitions(path) else EPISODES, folders)


def holds_rings(path: str) -> bool:
    """Return whether a path is no buffer itself, but a directory with buffers of episodes directly below it."""
    if not os.path.isdir(path) or _buffer_at(path) is not None or is_dataset(path):
        return False
    for name in sorted(os.listdir(path)):
        with contextlib.suppress(DamageError):  # one of them may be damaged
            found = _buffer_at(os.path.join(path, name))
            if found is not None and found.kind == EPISODES:
                return True
    return False


def folders_of(path: str) -> dict[str, str]:
    """Return the directories of a buffer at a path, by their contents, however damaged they are."""
    from ringmap.storage.directory.entries import SIGNS

    own = any(os.path.lexists(os.path.join(path, name)) for name in SIGNS)
    parts = {name: os.path.join(path, name) for name in ("rows", "labels")}
    if own or not os.path.isdir(parts["rows"]):
        return {"": path}
    return {name: folder for name, folder in parts.items() if os.path.isdir(folder)}


def is_dataset(path: str) -> bool:
    """Return whether a dataset of a format is at a path, and not a (damaged) buffer."""
    from ringmap.formats.registry import detect_format, refuse_missing
    from ringmap.storage.directory.entries import SIGNS

    if os.path.isdir(path) and any(
        os.path.lexists(os.path.join(f, name)) for f in folders_of(path).values() for name in SIGNS
    ):
        return False
    found = detect_format(path)
    if found is None:
        refuse_missing(path)
    return found is not None


def _has_transitions(path: str) -> bool:
    from ringmap import TransitionReplayBuffer

    try:
        TransitionReplayBuffer.open(path, device=None).close()
    except (InputError, NotFoundError):  # of something else, or without columns as yet
        return False
    return True


def _refuse(path: str, where: str) -> None:
    if not os.path.exists(path):
        raise NotFoundError(f"{where}: {path}: nothing is there")
    from ringmap.storage.directory.opening import read_manifest
    from ringmap.storage.disk.files import Disk

    read_manifest(Disk(), os.path.abspath(path))


def episodes_at(path: str, where: str) -> Any:
    """Open the episodes at a path: a buffer as a live reader, or a dataset, images as they are stored.

    Raises:
        InputError: it is a buffer of something else.
        NotFoundError, UnknownFormatError, CorruptError: as `look`.
    """
    found = look(path, where, (EPISODES, DATASET))
    if found.kind == EPISODES:
        from ringmap.buffers.replay import ReplayBuffer

        return ReplayBuffer.open(path)
    from ringmap.formats.catalog.load import load_arrays

    return load_arrays(path)


def format_for(dest: str, name: str | None, mode: str, where: str) -> str:
    """Return the format to write: the requested one, or by the suffix of the destination, or by its content.

    Raises:
        InputError: nothing decides, they contradict each other, or the format is read only.
        MissingFormatError: its package is not installed.
    """
    from ringmap.formats.base import validate_write_mode
    from ringmap.formats.registry import resolve_format

    mode = validate_write_mode(mode)
    return resolve_format(dest, name, mode=mode, where=where, option="--format NAME").name


def say_written(dest: str, name: str) -> None:
    """Say what a destination holds now, by looking: a writer may have evicted episodes meanwhile, or some were there."""
    from ringmap.cli.console import count, show
    from ringmap.formats.registry import get_format

    held = ""
    if get_format(name).can_read():
        from ringmap.formats.catalog.load import load_arrays

        lengths = load_arrays(dest, name).lengths
        held = f": it holds {count(len(lengths), 'episode')}, {count(int(lengths.sum()), 'step')}"
    show(f"wrote {dest}, format {name}{held}")


def free_path(path: str, where: str, force: bool) -> str:
    """Return the path of a file to write.

    Raises:
        ExistsError: it is there and may not be replaced.
        NotFoundError: its folder is not there.
    """
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise NotFoundError(f"{where}: --output {path}: there is no folder {folder}; make it first")
    if os.path.lexists(path) and not force:
        raise ExistsError(f"{where}: {path} exists; choose another --output, or say --force")
    return path
