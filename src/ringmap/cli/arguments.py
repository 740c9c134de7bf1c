"""Arguments and options that several commands have, each described once, and what they mean: episodes to show, and
where to write.

Not here: what a path holds (buffers/opening.py), the output.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from ringmap.buffers.opening import DATASET, EPISODES, FLEET, ROWS, TRANSITIONS, kind_of
from ringmap.buffers.opening import open as open_buffer
from ringmap.errors import ExistsError, InputError, NotFoundError
from ringmap.storage.disk.paths import refuse_address

__all__ = [
    "AsJson",
    "Buffer",
    "Destination",
    "DropNames",
    "Force",
    "FormatName",
    "Mode",
    "Place",
    "Quiet",
    "WriterOptions",
    "episodes_at",
    "format_for",
    "free_path",
    "say_written",
    "writer_options",
]


Buffer = Annotated[str, typer.Argument(metavar="DIR", help="Directory of a buffer.")]

Place = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="Directory of a buffer; or a dataset: its path, its name, or an id such as minari:NAME.",
    ),
]

Destination = Annotated[str, typer.Argument(metavar="DEST", help="Where to write.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code tells.")]

FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        "-f",
        metavar="NAME",
        help="Format to write; by default what the suffix of DEST says. `ringmap formats` lists them.",
    ),
]

Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="MODE",
        help="What to do where something is: error, append or overwrite.",
    ),
]

DropNames = Annotated[
    list[str] | None,
    typer.Option(
        "--drop",
        metavar="NAME",
        help="A column, or data of episodes, to leave out; may be given several times. Nothing else is left out.",
    ),
]

WriterOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-O",
        metavar="KEY=VALUE",
        help="An option of the format's writer, such as level=3 or image_format=png; may be given several times.",
    ),
]


def writer_options(given: list[str] | None, where: str) -> dict[str, Any]:
    """Return options as a writer takes them: what is JSON as its value (3, true, null), all else as text."""
    found: dict[str, Any] = {}
    for pair in given or ():
        key, sign, value = pair.partition("=")
        if not (key.isidentifier() and sign) or key in ("path", "mode", "progress"):
            raise InputError(f"{where}: -O {pair}: expected KEY=VALUE, an option of the format's writer")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]


def episodes_at(path: str, where: str) -> Any:
    """Open the episodes at a path: a buffer as a live reader, a directory of rings as one, transitions or rows as they
    are now, or a dataset, images as they are stored.
    """
    kind = kind_of(path, where, (EPISODES, TRANSITIONS, ROWS, FLEET, DATASET))
    if kind == EPISODES:
        return open_buffer(path)
    if kind == FLEET:
        return open_buffer(path, wait_s=0)
    from ringmap.formats.catalog.load import load_arrays

    return load_arrays(path)


def format_for(dest: str, name: str | None, mode: str, where: str) -> str:
    """Return the format to write: the requested one, or by the suffix of the destination, or by its content."""
    from ringmap.formats.base import validate_write_mode
    from ringmap.formats.registry import resolve_format

    mode = validate_write_mode(mode)
    return resolve_format(dest, name, mode=mode, where=where, option="--format NAME").name


def say_written(dest: str, name: str) -> None:
    """Say what a destination holds now, by looking: a writer may have evicted episodes meanwhile, or some were
    there."""
    from ringmap.cli.console import count, show
    from ringmap.formats.registry import get_format

    held = ""
    if get_format(name).can_read():
        from ringmap.formats.catalog.load import load_arrays

        lengths = load_arrays(dest, name).lengths
        held = f": it holds {count(len(lengths), 'episode')}, {count(int(lengths.sum()), 'step')}"
    show(f"wrote {dest}, format {name}{held}")


def free_path(path: str, where: str, force: bool) -> str:
    """Return the path of a file to write."""
    refuse_address(path)
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise NotFoundError(f"{where}: --output {path}: there is no folder {folder}; make it first")
    if os.path.lexists(path) and not force:
        raise ExistsError(f"{where}: {path} exists; choose another --output, or say --force")
    return path
