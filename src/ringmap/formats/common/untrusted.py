"""Limits on what a dataset may make us open: regular files below its own folder, of a plausible size.

    DIR/pixels -> ../../you        refused: a link leads elsewhere
    DIR/a.npz  a pipe              refused: opening it would wait, maybe for ever
    "columns": [["x", "../y"]]     refused: a name that a file says is one name, not a path
    shape (2**40,) in 1 KB         refused: more is declared than so few bytes can hold

The dataset's own path may be a link: it is the user who named it.
Invariants: reads only; each raises CorruptError, which names the file.
Not here: what a format's files mean; buffers (storage/).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, BinaryIO

from ringmap.errors import CorruptError
from ringmap.storage.disk.system import NotAFileError, System, kind_of

__all__ = [
    "INFLATED",
    "JSON_NBYTES",
    "LARGEST_PICTURE",
    "LARGEST_ROW",
    "check_name",
    "check_row",
    "kind_at",
    "open_binary",
    "open_fd",
    "read_json",
    "refuse_elsewhere",
    "refuse_links",
    "refuse_vast",
]

JSON_NBYTES = 64 << 20
"""A description of a dataset is read up to here; those of a million names take about 20 MB."""

LARGEST_ROW = 1 << 30
"""Bytes of one step of a column: what is asked for by steps is made room for by their number times this, at most."""

LARGEST_PICTURE = 1 << 26
"""Pixels of a picture: 8192 by 8192. Decoders make room for a picture by what its header says."""

INFLATED = 1100
"""Deflate packs 1,032 bytes into one, at most."""

_FEW = 64 << 20

_BINARY = getattr(os, "O_BINARY", 0)

_system = System()


def kind_at(path: str) -> str:
    """Return what is at a path, in words: "" for a regular file, "missing" for nothing. Follows no link."""
    try:
        return kind_of(os.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except ValueError:  # a NUL in it
        return "no name that a file can have"


def open_fd(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of a dataset, and return its descriptor.

    Raises:
        NotAFileError: something else is there, such as a link or a pipe.
    """
    if flags & os.O_CREAT:
        flags &= ~os.O_CREAT
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        except FileExistsError:
            pass
    return _system.open_file(path, flags | _BINARY)[0]


def open_binary(path: str) -> BinaryIO:
    """Open a regular file of a dataset for reading, as `open(path, "rb")` does."""
    return os.fdopen(open_fd(path), "rb")


def read_json(path: str) -> Any:
    """Return what a JSON file of a dataset holds.

    Raises:
        CorruptError: it is not JSON, is nested too deep, or has more than 64 MiB.
        FileNotFoundError: it is not there.
    """
    with open_binary(path) as file:
        data = file.read(JSON_NBYTES + 1)
    if len(data) > JSON_NBYTES:
        raise CorruptError(f"{path}: has more than {JSON_NBYTES:,} bytes, expected a description of a few kilobytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: is no valid JSON: {error}") from None


def check_name(path: str, name: Any) -> str:
    """Return what a file gives as the name of another one beside it, if it is one name and no path.

    Raises:
        CorruptError: it leads elsewhere, or is none.
    """
    bad = not isinstance(name, str) or name in ("", ".", "..")
    if bad or any(c in name for c in "/\\\0") or (os.name == "nt" and ":" in name):
        raise CorruptError(
            f"{path}: names {name!r} as a file of the dataset, expected the name of one that lies in its folder"
        )
    return str(name)


def refuse_elsewhere(root: str, path: str) -> None:
    """Raise unless a file lies below a folder, with no link on the way, and is a regular one."""
    inside = os.path.relpath(path, root)
    parts = inside.split(os.sep)
    if ".." in parts or os.path.isabs(inside):
        raise CorruptError(f"{root}: names {path}, which does not lie in it; nothing there is read")
    at = root
    for part in parts[:-1]:
        at = os.path.join(at, part)
        if (kind := kind_at(at)) not in ("a folder", "missing"):
            raise CorruptError(f"{at}: is {kind or 'a file'}, expected a folder of the dataset")
    if kind := kind_at(path):
        if kind == "missing":
            raise FileNotFoundError(path)
        raise NotAFileError(path, kind)


def refuse_links(root: str, skip: Iterable[str] = ()) -> None:
    """Raise if anything below a folder is a link, or neither file nor folder.

    Cost: reads the names of all folders in it; for formats whose library opens files by itself.
    """
    if (kind := kind_at(root)) != "a folder":
        raise CorruptError(f"{root}: is {kind or 'a file'}, expected a folder of the dataset")
    left = [root]
    while left:
        folder = left.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if folder == root and entry.name in skip:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    raise NotAFileError(entry.path, kind_at(entry.path))


def check_row(path: str, name: Any, nbytes: int) -> None:
    """Raise unless a step of a column is of a size that memory is asked for."""
    if not 0 <= nbytes <= LARGEST_ROW:
        raise CorruptError(
            f"{path}: a step of column {name!r} takes {nbytes:,} bytes, expected at most {LARGEST_ROW:,}"
        )


def refuse_vast(what: str, declared: int, stored: int, ratio: int) -> None:
    """Raise if more bytes are declared than those stored can hold, of which one may become `ratio`. A few MiB are never
    worth the question."""
    if declared > max(_FEW, ratio * stored):
        raise CorruptError(
            f"{what}: declares {declared:,} bytes, but {stored:,} are stored, which can hold at most "
            f"{ratio * stored:,}; it is damaged, or made to use up your memory"
        )
