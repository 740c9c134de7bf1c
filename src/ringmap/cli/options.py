"""Arguments and options that several commands have, each described once."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["AsJson", "Buffer", "Destination", "Force", "FormatName", "Mode", "Place", "Quiet"]

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
        "--format", "-f", metavar="NAME",
        help="Format to write; by default what the suffix of DEST says. `ringmap formats` lists them.",
    ),
]  # fmt: skip

Mode = Annotated[
    str,
    typer.Option(
        "--mode", metavar="MODE",
        help="What to do where something is: error, append or overwrite.",
    ),
]  # fmt: skip

Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]
