"""The swap: how the files that a repair has written take the places of those that are damaged.

    .salvage/ written, synced, read back -> .salvage/journal -> moves -> steps -> synced -> .salvage.done -> gone

Until the journal has its name, nothing that counts was changed, and the folder is worth nothing. From then
on no handle opens the buffer, and the next repair does all that the journal names, however far this one came.
A table and a state whose files are as large as they must be keep them: live readers have them open.

Invariants: each move and each step may be done twice; moves only take away, steps only put in place.
Not here: what is written, and why (salvage.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from contextlib import closing
from typing import Any

from ringmap.errors import NewerVersionError
from ringmap.storage.disk.canonical import json_checksum
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.inspect.faults import ASIDE, home_of, sidecar_faults
from ringmap.storage.inspect.identity import decode
from ringmap.storage.inspect.raw_files import Files
from ringmap.storage.inspect.scan import Scan
from ringmap.storage.records.manifest import Manifest, read_limit
from ringmap.storage.records.names import (
    COLUMNS,
    DATA,
    MANIFEST,
    OPEN,
    SALVAGE,
    SALVAGED,
    STATE,
    TABLE,
)
from ringmap.storage.sidecars import SIDECARS

__all__ = ["Swap", "finish", "free_aside", "is_unfinished"]

_JOURNAL, _REST, _ROOM = f"{SALVAGE}/journal", f"{SALVAGE}/rest", f"{SALVAGE}/room"
_ROOM_NBYTES = 1 << 16
_BLOCK, _PAGE = 1 << 20, 4096


class Swap:
    """What a repair replaces. Names are relative to the buffer's directory.

    Attributes:
        began: whether the journal may have its name: then all of it is to be done.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._moves: list[tuple[str, str]] = []
        self._steps: list[list[Any]] = []
        self.began = False

    def inside(self, name: str) -> str:
        """Return the name of a file that is written beside."""
        return f"{SALVAGE}/{name}"

    def take(self, name: str) -> str:
        """Move a file into the folder of the repair, ahead of all steps; return its name there."""
        taken = self.inside(str(len(self._moves)))
        self._moves.append((name, taken))
        return taken

    def move(self, source: str, target: str) -> None:
        """Give a file another name, ahead of all steps."""
        self._moves.append((source, target))

    def step(self, verb: str, *args: Any) -> None:
        """Add a step; see `_do`."""
        self._steps.append([verb, *args])

    def begin(self) -> None:
        """Make the folder, and keep room in it for the last pages of files that were cut."""
        disk = self._files.disk
        for name in (SALVAGE, SALVAGED):
            disk.discard(self._files.path(name))
        disk.make_folder(self._files.path(SALVAGE))
        columns = sum(step[0] == "column" for step in self._steps)
        with closing(disk.create(self._files.path(_ROOM))) as file:
            file.reserve(0, _ROOM_NBYTES + 2 * _PAGE * columns)

    def undo(self) -> None:
        """Remove the folder, of which nothing counts yet."""
        with contextlib.suppress(OSError):
            self._files.disk.discard(self._files.path(SALVAGE))

    def carry_out(self) -> None:
        """Write the journal, which makes the repair count, and do what it names."""
        files, disk = self._files, self._files.disk
        for name, moves in ((_REST, []), (_JOURNAL, self._moves)):
            for folder in (SALVAGE, ""):
                disk.sync_folder(files.path(folder))
            data = _encode(moves, self._steps)
            disk.put(files.path(name), files.path(name + ".tmp"), data, synced=True)
        self.began = True
        disk.sync_folder(files.path(SALVAGE))
        finish(files)


def free_aside(files: Files, name: str) -> str:
    """Return a name that nothing has, for a file that is set aside."""
    name += ASIDE
    return name if not files.disk.exists(files.path(name)) else free_aside(files, name)


def is_unfinished(files: Files) -> bool:
    """Tell whether a repair was interrupted while it replaced files."""
    return files.disk.exists(files.path(_JOURNAL))


def finish(files: Files) -> None:
    """Do all that the journal names, and forget it; if it is damaged, set aside what lies in its folder.

    Raises:
        NewerVersionError: it is from a newer ringmap.
    """
    disk, path = files.disk, files.path(_JOURNAL)
    todo = _decode(disk.read_file(path, read_limit()), path)
    if todo is None:
        _set_all_aside(files)
        return
    moves, steps = todo
    manifest = decode(files, f"{SALVAGE}/{MANIFEST}")[0] or decode(files, MANIFEST)[0]
    for source, target in moves:
        # Its target was free. If it is taken, the move is done, and the source a new file: that of the lock.
        if not disk.exists(files.path(target)):
            _do(files, None, "rename", source, target)
    if moves:
        for folder in sorted({os.path.dirname(source) for source, _ in moves} | {SALVAGE}):
            disk.sync_folder(files.path(folder))
        # From here on a name that was moved away may be another file's: the moves are not to be done again.
        disk.rename(files.path(_REST), path)
        disk.sync_folder(files.path(SALVAGE))
    disk.discard(files.path(_ROOM))
    for step in steps:
        _do(files, manifest, *step)
    _sync(files)
    _mend_sidecars(files, {args[0] for verb, *args in steps if verb == "sidecar"})
    disk.rename(files.path(SALVAGE), files.path(SALVAGED))
    disk.sync_folder(files.folder)
    disk.discard(files.path(SALVAGED))


def _encode(moves: list[tuple[str, str]], steps: list[list[Any]]) -> bytes:
    body = {"version": 1, "moves": moves, "steps": steps}
    return json.dumps({**body, "checksum": json_checksum(json.loads(json.dumps(body)))}).encode()


def _decode(data: bytes, path: str) -> tuple[list[list[str]], list[list[Any]]] | None:
    """Return moves and steps, None if the journal is damaged."""
    try:
        body = json.loads(data)
        if body.pop("checksum") != json_checksum(body):
            return None
        version, todo = body["version"], (body["moves"], body["steps"])
        if version == 1 and not all(_makes_sense(*step) for step in todo[1]):
            return None
        if version == 1 and not all(_makes_sense("rename", *move) for move in todo[0]):
            return None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return None
    if version != 1:
        raise NewerVersionError(f"{path}: version {version}, this ringmap reads 1; upgrade ringmap")
    return todo


_TAKES: dict[str, tuple[type, ...]] = {
    "make": (str,),
    "rename": (str, str),
    "overwrite": (str, str),
    "remove": (str,),
    "resize": (str, int),
    "column": (int,),
    "sidecar": (str,),
}


def _makes_sense(verb: str, *args: Any) -> bool:
    """Tell whether a step is one of ours, and stays in the directory: a stranger may have written it."""
    names = [arg for arg in args if isinstance(arg, str)]
    foreign = r"[\0\\:]" if os.name == "nt" else r"\0"
    inside = not any(re.search(foreign, n) or {"", ".", ".."} & {*n.split("/")} for n in names)
    return inside and tuple(map(type, args)) == _TAKES[verb] and all(arg >= 0 for arg in args if isinstance(arg, int))


def _set_all_aside(files: Files) -> None:
    """Move what lies in the folder into the directory, where the next look finds each file by what is in it."""
    for name in files.names(SALVAGE):
        if name not in (_JOURNAL, _REST, _ROOM):
            files.disk.rename(files.path(name), files.path(free_aside(files, name.partition("/")[2])))
    files.disk.sync_folder(files.folder)
    files.disk.discard(files.path(SALVAGE))


# -- the steps -------------------------------------------------------------------------------------


def _do(files: Files, manifest: Manifest | None, verb: str, name: Any, *args: Any) -> None:
    """Do a step, again if need be. What is left undone, the look that follows finds."""
    for inner in (arg for arg in (name, *args) if isinstance(arg, str)):
        above = inner.rpartition("/")[0]
        if above and not files.is_folder(above):  # a link, which may lead elsewhere
            return
    disk, path = files.disk, files.path(str(name))
    if verb == "make" and not disk.exists(path):
        disk.make_folder(path)
    elif verb == "rename" and disk.exists(path):
        disk.rename(path, files.path(args[0]))
    elif verb == "remove":
        disk.discard(path)
    elif verb == "resize" and files.is_file(name) and files.size(name) != args[0]:
        disk.extend(path, args[0])
    elif verb == "overwrite":
        _overwrite(disk, path, files.path(args[0]))
    elif verb == "column":
        _mend_column(files, manifest, name)


def _mend_column(files: Files, manifest: Manifest | None, index: int) -> None:
    """Give a column its size, header and label back."""
    if manifest is None or manifest.schema is None or index >= len(manifest.files):
        return
    one = manifest.column(index)
    one.at(files.disk, files.path(one.file)).mend()


def _overwrite(disk: Disk, source: str, target: str) -> None:
    """Write into a file the pages in which another one of the same size differs. Its inode stays."""

    def read(file: File, at: int) -> bytes:
        try:
            return file.read(_BLOCK, at)
        except OSError:  # a bad sector: writing may heal it
            return b""

    with (
        closing(disk.open(source)) as new,
        closing(disk.open(target, write=True)) as old,
    ):
        at = 0
        while (at := max(at, min(new.next_data(at), old.next_data(at)) // _PAGE * _PAGE)) < new.size():
            data, there = new.read(_BLOCK, at), read(old, at)
            for i in range(0, len(data), _PAGE):
                if data[i : i + _PAGE] != there[i : i + _PAGE]:
                    old.write(data[i : i + _PAGE], at + i)
            at += len(data)


def _mend_sidecars(files: Files, names: set[str]) -> None:
    survey = Scan(files.disk, files.folder)
    try:
        for sidecar in SIDECARS:
            if sidecar.names[0] in names and sidecar_faults(survey, sidecar, survey.newest()):
                mend = sidecar.mend(home_of(survey), survey.newest())
                if mend is not None:
                    mend[1]()
    finally:
        survey.close()


def _sync(files: Files) -> None:
    """Return once the files, and the names in the folders, are on the disk itself."""
    manifest, disk = decode(files, MANIFEST)[0], files.disk
    columns = manifest.files if manifest is not None else ()
    for name in (TABLE, STATE, *columns):
        path = files.path(name)
        if disk.is_folder(path):  # what is in it is replaced by synced files only
            disk.sync_folder(path)
        elif disk.is_file(path):
            with closing(disk.open(path, write=True)) as file:
                file.sync()
    for folder in (OPEN, DATA, COLUMNS, ""):
        if disk.is_folder(files.path(folder)):
            disk.sync_folder(files.path(folder))
