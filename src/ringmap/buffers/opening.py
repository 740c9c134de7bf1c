"""What a path holds, and the class that opens it.

    DIR/manifest.json                   a buffer: its manifest says what its rows are
    DIR/a/manifest.json, DIR/b/...      a fleet, where the rings directly below share kind and columns
    anything else                       a dataset of a registered format

Invariants: nothing is told by the names of columns; a directory is opened by its class's own `open`, with that class's
defaults.
Not here: the datasets of a format (formats/), the output.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from ringmap.errors import DamageError, InputError, NotFoundError, UnknownFormatError
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.paths import local_path, refuse_address
from ringmap.storage.records.manifest import DISTILLATION, EPISODES, ROWS, TRANSITIONS, Manifest, read_manifest

__all__ = [
    "BUFFERS",
    "DATASET",
    "EPISODES",
    "FLEET",
    "ROWS",
    "TRANSITIONS",
    "has_parts",
    "is_dataset",
    "kind_at",
    "kind_of",
    "open",
]

DATASET, FLEET = "dataset", "fleet"

_CLASSES = {
    EPISODES: "replay:ReplayBuffer",
    TRANSITIONS: "transitions.buffer:TransitionReplayBuffer",
    ROWS: "offline_to_online:OfflineToOnlineReplayBuffer",
    DISTILLATION: "distillation:DistillationBuffer",
    FLEET: "sharded.buffer:ShardedReplayBuffer",
}
"""The class of each kind, which is loaded when it is needed."""

BUFFERS = tuple(_CLASSES)


def open(path: str | os.PathLike[str], mode: str = "r", **options: Any) -> Any:
    """Open what a directory holds: any buffer, or a fleet, by the `open` of its class.

    Args:
        path: of a `ReplayBuffer`, a `TransitionReplayBuffer`, a `DistillationBuffer`, the ring of an
            `OfflineToOnlineReplayBuffer` (give it `offline_dataset=`, else its rows are opened for reading), or a
            directory with rings of one kind directly below it, which are a `ShardedReplayBuffer`.
        mode: "r" for a live reader; "r+" for the writer, which a fleet has not.
        options: of the class's own `open`, or of `ShardedReplayBuffer`.

    Returns:
        An object of one of these classes, with the class's defaults: a `TransitionReplayBuffer` gives tensors.

    Raises:
        NotFoundError: nothing is there.
        UnknownFormatError: something else is there; of a dataset it says so.
        InputError: rings of several kinds or columns are below the path, which it lists; a wrong option.
        CorruptError, NewerVersionError, LockedError: as `ReplayBuffer.open`.

    Example:
        >>> import numpy as np, ringmap
        >>> buf = ringmap.ReplayBuffer(100, path="runs/replay", history_len=4)
        >>> buf.write_episode({"obs": np.zeros((20, 3))})
        >>> buf.close()
        >>> with ringmap.open("runs/replay") as reader:
        ...     reader.sample(8)["obs"].shape
        (8, 4, 3)
    """
    where = "ringmap.open"
    folder = os.fspath(path)
    kind = kind_of(folder, where, BUFFERS)
    home, _, name = _CLASSES[kind].partition(":")
    found = getattr(import_module(f"ringmap.buffers.{home}"), name)
    if kind != FLEET:
        return found.open(folder, mode=mode, **options)
    if mode != "r":
        raise InputError(f"{where}: {folder} is a directory of rings, which are written one by one; expected mode='r'")
    return found(folder, **options)


def kind_of(path: str, where: str, only: tuple[str, ...] = ()) -> str:
    """Return what a path holds: a kind of buffer, "fleet" or "dataset".

    Args:
        path: what the user gave.
        where: the command, for messages.
        only: the kinds that the command takes; () for all.

    Raises:
        NotFoundError, UnknownFormatError, CorruptError: nothing of ours is there, or it can't be read.
        InputError: it is of a kind that the command does not take; or rings that are no fleet.
        DamageError, OSError: of rings that may be there none can be read.
    """
    kind = kind_at(path)
    may_be_dataset = not only or DATASET in only
    if kind is None and _is_fleet(path, where, may_be_dataset):
        kind = FLEET
    if kind is None:
        if not may_be_dataset:
            _refuse(path, where)
        kind = DATASET
    if only and kind not in only:
        raise InputError(
            f"{where}: {path} is a buffer of {kind}, whose commits are no episodes; expected a buffer "
            "of episodes" + (" or a dataset" if DATASET in only else "")
        )
    return kind


def kind_at(path: str) -> str | None:
    """Return the kind of the buffer at a path; None if something else, or nothing, is there.

    Raises:
        CorruptError, NewerVersionError: its manifest can't be read.
        OSError: whether there is one can't be told.

    Cost: reads the manifest.
    """
    found = _manifest_at(path)
    return None if found is None else found.kind


def _manifest_at(path: str) -> Manifest | None:
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.disk.paths import Paths

    refuse_address(path)
    if not os.path.isdir(path) or not Disk().exists(Paths(path).manifest):
        return None
    try:
        return read_manifest(Disk(), local_path(path))
    except UnknownFormatError:  # another program's manifest
        return None


def _is_fleet(path: str, where: str, may_be_dataset: bool) -> bool:
    """Return whether rings of episodes, or of transitions, with the same columns are directly below a path.

    With `may_be_dataset` it is none where a dataset is, too: that is ambiguous. Rings that can't be read,
    beside others, count as such: whoever opens the fleet hears of them.
    """
    from ringmap.storage.disk.paths import FINE

    if not os.path.isdir(path) or has_parts(path) or (may_be_dataset and is_dataset(path)):
        return False
    unread: DamageError | OSError | None = None
    rings = dict[tuple[str, frozenset[ColumnSpec]], list[str]]()
    unborn = dict[str, list[str]]()  # by kind: they have no columns yet
    for name in sorted(set(os.listdir(path)) - FINE):
        try:
            found = _manifest_at(os.path.join(path, name))
        except (DamageError, OSError) as error:  # one of them may be damaged, or not for this user
            unread = unread or error
            continue
        if found is None:
            continue
        if found.schema is None:
            unborn.setdefault(found.kind, []).append(name)
        else:
            rings.setdefault((found.kind, frozenset(found.schema.columns)), []).append(name)
    kinds = {kind for kind, _ in rings} | unborn.keys()
    if not kinds and unread is not None:
        raise unread
    if not kinds:
        return False
    if len(rings) > 1 or len(kinds) > 1 or not kinds <= {EPISODES, TRANSITIONS}:
        listed = [
            f"{', '.join(names)}: {kind} of {', '.join(sorted(map(str, of)))}" for (kind, of), names in rings.items()
        ]
        listed += [f"{', '.join(names)}: {kind}, no columns yet" for kind, names in unborn.items()]
        raise InputError(
            f"{where}: the rings in {path} can't be read as one: {'; '.join(listed)}; expected rings of episodes, or "
            "of transitions, with the same columns: open them one by one, or move them apart"
        )
    return True


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
    if is_dataset(path):
        raise UnknownFormatError(f"{where}: {path} is a dataset, expected a buffer; load_dataset(path) reads it")
    from ringmap.storage.disk.files import Disk

    read_manifest(Disk(), local_path(path))
