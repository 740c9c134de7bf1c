"""The entries: the only table of the files in a buffer's directory.

    entry            made               copied by a snapshot      checked and repaired as
    lock             by a writer        no                        -
    manifest.json    with the buffer    written, another uuid     the manifest, from labels
    episodes.npy     with the buffer    live records              records; lost ones are filled in
    state.bin        with the buffer    written                   its two states; written again
    data/            with the buffer    live blobs                blobs; a bad one drops its episode
    open/            with the buffer    empty                     frames; cut after the last whole one
    columns/         first episode      live rows                 rows; a bad one drops its episode
    a sidecar        at first use       `Sidecar.copy`            `Sidecar.faults`, `Sidecar.mend`

Only segments (`data/N.bin`), streams (`open/ID/steps.bin`), what repair makes anew, and sidecars' temporary files are
ever removed.

Invariants: no other module but records/names.py names such a file; no other file in the directory is ours.
Not here: the content of the files; the names of columns and segments, which are in the manifest and the records.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from ringmap.storage.records.names import (
    COLUMNS,
    DATA,
    LOCK,
    MANIFEST,
    OPEN,
    STATE,
    TABLE,
)
from ringmap.storage.sidecars import SIDECARS

__all__ = ["ENTRIES", "FINE", "FOLDERS", "FROM_BIRTH", "NAMES", "SIGNS", "Entry", "Paths"]

_UNFINISHED = ".tmp"

FINE = frozenset({"lost+found", ".DS_Store"})
"""Files that other programs leave in a directory, and that are not a fault."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a buffer's directory.

    `made`: when: "birth", with the directory; "last", after the others; "first episode"; "use", which may never come;
    `folder`: whether it is a folder; `sign`: whether it shows, without a manifest, that a buffer is or was there;
    `temporary`: its name until it is whole.
    """

    name: str
    made: Literal["birth", "last", "first episode", "use"]
    folder: bool = False
    sign: bool = False
    temporary: tuple[str, ...] = ()


ENTRIES = (
    Entry(LOCK, "use"),
    Entry(DATA, "birth", folder=True),
    Entry(OPEN, "birth", folder=True),
    Entry(TABLE, "birth", sign=True),
    Entry(STATE, "birth", sign=True),
    Entry(MANIFEST, "last", sign=True, temporary=(MANIFEST + _UNFINISHED,)),
    Entry(COLUMNS, "first episode", folder=True, sign=True, temporary=(COLUMNS + _UNFINISHED,)),
    *(Entry(n, "use", temporary=s.temporary) for s in SIDECARS for n in s.names),
)

NAMES = frozenset(n for entry in ENTRIES for n in (entry.name, *entry.temporary))
"""All names that belong to a buffer."""

SIGNS = frozenset(entry.name for entry in ENTRIES if entry.sign)

FOLDERS = tuple(n for e in ENTRIES if e.folder for n in (e.name, *e.temporary))

FROM_BIRTH = tuple(entry for entry in ENTRIES if entry.made == "birth")


class Paths:
    """The paths inside a buffer's directory."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.manifest = os.path.join(folder, MANIFEST)
        self.new_manifest = self.manifest + _UNFINISHED
        self.table = os.path.join(folder, TABLE)
        self.state = os.path.join(folder, STATE)
        self.columns = os.path.join(folder, COLUMNS)
        self.new_columns = self.columns + _UNFINISHED
        self.data = os.path.join(folder, DATA)
        self.open = os.path.join(folder, OPEN)
        self.lock = os.path.join(folder, LOCK)
