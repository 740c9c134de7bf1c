"""`ringmap convert`: a dataset in another format."""

from __future__ import annotations

from typing import Annotated

import typer

from ringmap.cli.options import (
    Destination,
    DropNames,
    FormatName,
    Mode,
    Place,
    WriterOptions,
    writer_options,
)
from ringmap.cli.progress import is_watched
from ringmap.cli.resolve import episodes_at, format_for, say_written

Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="CONDITION",
        help="Only these episodes, as in `return > 100 and not flags contains bad`. Given again, all have to be met.",
    ),
]
MarksFile = Annotated[
    str | None, typer.Option("--marks", metavar="FILE", help="The file of marks; by default that beside the source.")
]


def convert(
    source: Place,
    dest: Destination,
    format: FormatName = None,
    mode: Mode = "error",
    option: WriterOptions = None,
    where: Where = None,
    marks: MarksFile = None,
    drop: DropNames = None,
) -> None:
    """Write a dataset or a buffer in another format.

    Episode data comes along. What the format can't hold is named, and has to be dropped.
    """
    from ringmap.clips.where import Condition
    from ringmap.formats.catalog.convert import convert as convert_dataset

    chosen = format_for(dest, format, mode, "convert")
    dataset = episodes_at(source, "convert")
    convert_dataset(
        dataset,
        dest,
        dest_format=chosen,
        progress=is_watched(),
        mode=mode,
        where=Condition.all_of(where or (), "convert: where").text,
        marks=marks,
        drop=drop or (),
        **writer_options(option, "convert"),
    )
    say_written(dest, chosen)
