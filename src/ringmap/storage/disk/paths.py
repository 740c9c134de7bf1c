"""Paths: the one that a caller gives, and the names in a buffer's directory.

    "runs/replay"  ->  "/jobs/runs/replay"          "s3://bucket/replay"  ->  InputError

    entry            made               copied by a snapshot      checked and repaired as
    lock             by a writer        no                        -
    manifest.json    with the buffer    written, another uuid     the manifest, from labels
    episodes.npy     with the buffer    live records              records; lost ones are filled in
    state.bin        with the buffer    written                   its two states; written again
    data/            with the buffer    live blobs                blobs; a bad one drops its episode
    open/            with the buffer    empty                     frames; cut after the last whole one
    columns/         first episode      live rows                 rows; a bad one drops its episode
    a sidecar        at first use       `Sidecar.copy`            `Sidecar.faults`, `Sidecar.repair`

Only segments (`data/N.bin`), folders of rows that wait (`open/ID/`), what a creation that was interrupted left, what
repair makes anew, and sidecars' temporary files are ever removed.

Invariants: no other module names such a file, or makes a given path absolute; no other file in the directory is ours.
Not here: the content of the files; the names of columns and segments, which are in the manifest and the records; ids
with a prefix, such as "minari:door/human-v2" (formats/catalog/load.py).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ringmap.errors import InputError

__all__ = [
    "COLUMNS",
    "DATA",
    "ENTRIES",
    "FINE",
    "FOLDERS",
    "FROM_BIRTH",
    "LOCK",
    "MANIFEST",
    "MARKS",
    "NAMES",
    "OPEN",
    "PRIORITIES",
    "SIGNS",
    "STATE",
    "STEPS",
    "SUCCESSORS",
    "TABLE",
    "UNFINISHED",
    "VALUES",
    "Entry",
    "Paths",
    "local_path",
    "refuse_address",
]

LOCK, MANIFEST, TABLE, STATE = "lock", "manifest.json", "episodes.npy", "state.bin"
DATA, OPEN, COLUMNS = "data", "open", "columns"

STEPS = "steps.bin"
"""The file in a folder of `open/`."""

PRIORITIES, VALUES, MARKS, SUCCESSORS = "priorities.bin", "mutable.bin", "marks.json", "successors.bin"
"""The sidecars."""

UNFINISHED = ".tmp"
"""Behind the name of a file that is not whole yet."""

FINE = frozenset({"lost+found", ".DS_Store"})
"""Files that other programs leave in a directory, and that are not a fault."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a buffer's directory.

    `birth`: whether it is made with the directory, before the manifest; `folder`: whether it is a folder; `sign`:
    whether it shows, without a manifest, that a buffer is or was there; `temporary`: its name until it is whole.
    """

    name: str
    birth: bool = False
    folder: bool = False
    sign: bool = False
    temporary: tuple[str, ...] = ()


ENTRIES = (
    Entry(LOCK),
    Entry(DATA, birth=True, folder=True),
    Entry(OPEN, birth=True, folder=True),
    Entry(TABLE, birth=True, sign=True),
    Entry(STATE, birth=True, sign=True),
    Entry(MANIFEST, sign=True, temporary=(MANIFEST + UNFINISHED,)),
    Entry(COLUMNS, folder=True, sign=True, temporary=(COLUMNS + UNFINISHED,)),
    Entry(PRIORITIES, temporary=(PRIORITIES + UNFINISHED,)),
    Entry(SUCCESSORS),
    Entry(VALUES, temporary=(VALUES + UNFINISHED,)),
    Entry(MARKS, temporary=(MARKS + UNFINISHED, MARKS + ".lock")),
)

NAMES = frozenset(n for entry in ENTRIES for n in (entry.name, *entry.temporary))
"""All names that belong to a buffer."""

SIGNS = frozenset(entry.name for entry in ENTRIES if entry.sign)

FOLDERS = tuple(n for e in ENTRIES if e.folder for n in (e.name, *e.temporary))

FROM_BIRTH = tuple(entry for entry in ENTRIES if entry.birth)


class Paths:
    """The paths inside a buffer's directory."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.manifest = os.path.join(folder, MANIFEST)
        self.new_manifest = self.manifest + UNFINISHED
        self.table = os.path.join(folder, TABLE)
        self.state = os.path.join(folder, STATE)
        self.columns = os.path.join(folder, COLUMNS)
        self.new_columns = self.columns + UNFINISHED
        self.data = os.path.join(folder, DATA)
        self.open = os.path.join(folder, OPEN)
        self.lock = os.path.join(folder, LOCK)


# -- the paths that callers give -----------------------------------------------------------------

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")


def refuse_address(path: str | os.PathLike[str]) -> None:
    """Raise InputError if a path is an address: a scheme, such as s3, gs, hf, https or file, and "://".

    A `pathlib.Path` of an address has one slash; as a text, "a:/b" is a path below the folder "a:".
    """
    address = _ADDRESS.match(os.fspath(path))
    if address is not None and (address[2] or not isinstance(path, str)):
        raise InputError(
            f"{os.fspath(path)}: is an address (scheme {address[1]!r}), expected the path of a local file or folder; "
            "copy the data to this machine first, or mount them as a folder"
        )


def local_path(path: str | os.PathLike[str]) -> str:
    """Return a path that a caller gives, absolute.

    Raises:
        InputError: it is an address.

    Example:
        >>> local_path("/runs/../replay")
        '/replay'
        >>> local_path("s3://bucket/replay")
        Traceback (most recent call last):
        ringmap.errors.InputError: s3://bucket/replay: is an address (scheme 's3'), expected ...
    """
    refuse_address(path)
    return os.path.abspath(path)
