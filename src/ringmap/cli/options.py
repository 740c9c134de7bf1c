"""Arguments and options that several commands have, each described once."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ringmap.errors import InputError

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
    """Return options as a writer takes them: what is JSON as its value (3, true, null), all else as text.

    Raises:
        InputError: one is no KEY=VALUE, or would be an option of the command itself.
    """
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
